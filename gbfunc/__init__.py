"""gbfunc trains neural networks through a genomic bottleneck, as pure functions on PyTorch.

The weights of a p-net (any `nn.Module`) are generated, tile by tile, by tiny g-nets that see only the coordinates of a
weight; only the genome, which is the g-nets' parameters and the few direct ones, is trained, saved and shipped.
"""

import importlib
import warnings
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

import gbfunc.startup  # noqa: F401  # before torch: see there
from gbfunc.encoding import binary, gray, grid, one_hot, per_axis
from gbfunc.export import export
from gbfunc.fit import fit_genome
from gbfunc.generate import generate
from gbfunc.genome import flatten, init_genome, sample_noise
from gbfunc.hypernets import bilinear, constant, from_module, gnet, low_rank, periodic, stochastic, xox
from gbfunc.many import materialize_many, merge_genomes
from gbfunc.materialize import materialize
from gbfunc.parallel import mesh
from gbfunc.plan import Plan, make_plan, register
from gbfunc.storage import Checkpointer, load_checkpoint
from gbfunc.storage.genome_file import load, load_metadata, save
from gbfunc.train import TrainState, make_train_step, population, torch_optimizer, torch_schedule, update_alignment
from gbfunc.types import Genome

if TYPE_CHECKING:
    from gbfunc.module import GenomeModule
    from gbfunc.parallel.planner import plan_parallel
    from gbfunc.storage.lora import save_lora

__all__ = [
    "Checkpointer",
    "Genome",
    "GenomeModule",
    "Plan",
    "TrainState",
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
    "torch_optimizer",
    "torch_schedule",
    "update_alignment",
    "xox",
]

_LAZY = {
    "GenomeModule": "gbfunc.module",
    "plan_parallel": "gbfunc.parallel.planner",
    "save_lora": "gbfunc.storage.lora",
}
"""Names that are imported when they are first used: torch's DTensor and its FLOP counter take long to import."""

_MOVED = {
    "gbfunc.export": ("Exported",),
    "gbfunc.fit": ("Fit",),
    "gbfunc.generate": ("generate_piece",),
    "gbfunc.many": ("ManyGenomes",),
    "gbfunc.parallel": ("CollectiveError", "Mesh"),
    "gbfunc.parallel.planner": ("DeviceSpec", "ParallelPlan"),
    "gbfunc.parallel.styles": ("pad_vocabulary", "tensor_styles"),
    "gbfunc.pnet": ("GrownNet",),
    "gbfunc.storage": ("Checkpoint",),
    "gbfunc.tiling": ("TileGrid", "join_tiles", "split_tiles", "tile_grid"),
    "gbfunc.train": ("Optimizer", "Population", "StepInfo", "TrainStep", "UpdateAlignment"),
}
"""Where names are that `gbfunc` had in the release before: until the next one they are found here, with a warning."""


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        module = next((place for place, names in _MOVED.items() if name in names), None)
        if module is None:
            raise AttributeError(f"module 'gbfunc' has no attribute {name!r}")
        warnings.warn(f"gbfunc.{name} is now {module}.{name}", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(module), name)
