"""gbfunc trains neural networks through a genomic bottleneck, as pure functions on PyTorch.

The weights of a p-net (any `nn.Module`) are generated, tile by tile, by tiny g-nets that see only the coordinates of a
weight; only the genome, which is the g-nets' parameters and the few direct ones, is trained, saved and shipped.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from gbfunc.startup import is_command_line

__version__ = "0.1.0"

# The command line answers help and wrong arguments without torch; then it loads this module again.
if TYPE_CHECKING or "gbfunc.cli" in sys.modules or not is_command_line(sys.argv, sys.orig_argv):
    from gbfunc.encoding import binary, gray, grid, one_hot, per_axis, table
    from gbfunc.export import export
    from gbfunc.generate import generate
    from gbfunc.genome import flatten, init_genome, sample_noise
    from gbfunc.hypernets import bilinear, constant, from_module, gnet, low_rank, periodic, stochastic, xox
    from gbfunc.materialize import materialize
    from gbfunc.plan import Plan, make_plan, register
    from gbfunc.types import Genome

if TYPE_CHECKING:
    from gbfunc.fit import fit_genome
    from gbfunc.many import materialize_many, merge_genomes
    from gbfunc.module import GenomeModule
    from gbfunc.parallel import mesh
    from gbfunc.parallel.planner import plan_parallel
    from gbfunc.storage.checkpoint import Checkpointer, load_checkpoint
    from gbfunc.storage.genome_file import load, load_metadata, save
    from gbfunc.storage.lora import save_lora
    from gbfunc.train import (
        TrainState,
        allocate_steps,
        make_train_step,
        population,
        torch_optimizer,
        torch_schedule,
        update_alignment,
    )

__all__ = [
    "Checkpointer",
    "Genome",
    "GenomeModule",
    "Plan",
    "TrainState",
    "allocate_steps",
    "bilinear",
    "binary",
    "constant",
    "export",
    "fit_genome",
    "flatten",
    "from_module",
    "generate",
    "gnet",
    "gray",
    "grid",
    "init_genome",
    "load",
    "load_checkpoint",
    "load_metadata",
    "low_rank",
    "make_plan",
    "make_train_step",
    "materialize",
    "materialize_many",
    "merge_genomes",
    "mesh",
    "one_hot",
    "per_axis",
    "periodic",
    "plan_parallel",
    "population",
    "register",
    "sample_noise",
    "save",
    "save_lora",
    "stochastic",
    "table",
    "torch_optimizer",
    "torch_schedule",
    "update_alignment",
    "xox",
]

_LATER = {
    "gbfunc.fit": ("fit_genome",),
    "gbfunc.many": ("materialize_many", "merge_genomes"),
    "gbfunc.module": ("GenomeModule",),
    "gbfunc.parallel": ("mesh",),
    "gbfunc.parallel.planner": ("plan_parallel",),
    "gbfunc.storage.checkpoint": ("Checkpointer", "load_checkpoint"),
    "gbfunc.storage.genome_file": ("load", "load_metadata", "save"),
    "gbfunc.storage.lora": ("save_lora",),
    "gbfunc.train": (
        "TrainState",
        "allocate_steps",
        "make_train_step",
        "population",
        "torch_optimizer",
        "torch_schedule",
        "update_alignment",
    ),
}
"""Modules of the names that are imported at their first use; no name is also the name of a module of gbfunc."""


def __getattr__(name: str) -> Any:
    if any(f"{module}.".startswith(f"gbfunc.{name}.") for module in _LATER):
        return importlib.import_module(f"gbfunc.{name}")
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module 'gbfunc' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
