"""gbfunc trains neural networks through a genomic bottleneck, as pure functions on PyTorch.

The weights of a p-net (any `nn.Module`) are generated, tile by tile, by tiny g-nets that see only the coordinates of a
weight; only the genome, which is the g-nets' parameters and the few direct ones, is trained, saved and shipped.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

import gbfunc.startup  # noqa: F401  # before torch: see there
from gbfunc.encoding import binary, gray, grid, one_hot, per_axis
from gbfunc.export import Exported, export
from gbfunc.fit import Fit, fit_genome
from gbfunc.generate import generate, generate_piece
from gbfunc.genome import flatten, init_genome, sample_noise
from gbfunc.hypernets import bilinear, constant, from_module, gnet, low_rank, periodic, stochastic, xox
from gbfunc.many import ManyGenomes, materialize_many, merge_genomes
from gbfunc.materialize import materialize
from gbfunc.parallel import CollectiveError, Mesh, mesh
from gbfunc.plan import Plan, make_plan, register
from gbfunc.pnet import GrownNet
from gbfunc.storage import Checkpoint, Checkpointer, load_checkpoint
from gbfunc.storage.genome_file import load, load_metadata, save
from gbfunc.tiling import TileGrid, join_tiles, split_tiles, tile_grid
from gbfunc.train import (
    Optimizer,
    Population,
    StepInfo,
    TrainState,
    TrainStep,
    UpdateAlignment,
    make_train_step,
    population,
    torch_optimizer,
    torch_schedule,
    update_alignment,
)
from gbfunc.types import Genome

if TYPE_CHECKING:
    from gbfunc.module import GenomeModule
    from gbfunc.parallel.planner import DeviceSpec, ParallelPlan, plan_parallel
    from gbfunc.parallel.styles import pad_vocabulary, tensor_styles
    from gbfunc.storage.lora import save_lora

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "CollectiveError",
    "DeviceSpec",
    "Exported",
    "Fit",
    "Genome",
    "GenomeModule",
    "GrownNet",
    "ManyGenomes",
    "Mesh",
    "Optimizer",
    "ParallelPlan",
    "Plan",
    "Population",
    "StepInfo",
    "TileGrid",
    "TrainState",
    "TrainStep",
    "UpdateAlignment",
    "bilinear",
    "binary",
    "constant",
    "export",
    "fit_genome",
    "flatten",
    "from_module",
    "generate",
    "generate_piece",
    "gnet",
    "gray",
    "grid",
    "init_genome",
    "join_tiles",
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
    "pad_vocabulary",
    "per_axis",
    "periodic",
    "plan_parallel",
    "population",
    "register",
    "sample_noise",
    "save",
    "save_lora",
    "split_tiles",
    "stochastic",
    "tensor_styles",
    "tile_grid",
    "torch_optimizer",
    "torch_schedule",
    "update_alignment",
    "xox",
]

_LAZY = {
    "DeviceSpec": "gbfunc.parallel.planner",
    "GenomeModule": "gbfunc.module",
    "ParallelPlan": "gbfunc.parallel.planner",
    "pad_vocabulary": "gbfunc.parallel.styles",
    "plan_parallel": "gbfunc.parallel.planner",
    "save_lora": "gbfunc.storage.lora",
    "tensor_styles": "gbfunc.parallel.styles",
}
"""Names that are imported when they are first used: torch's DTensor and its FLOP counter take long to import."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'gbfunc' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
