"""gbfunc trains neural networks through a genomic bottleneck, as pure functions on PyTorch.

The weights of a p-net (any `nn.Module`) are generated, tile by tile, by tiny g-nets that see only the coordinates of a
weight; only the genome, which is the g-nets' parameters and the few direct ones, is trained, saved and shipped.
"""

import gbfunc.startup  # noqa: F401  # before torch: see there
from gbfunc.encoding import binary, gray, grid, one_hot, per_axis
from gbfunc.generate import generate, generate_piece
from gbfunc.genome import init_genome, sample_noise
from gbfunc.hypernets import constant, from_module, gnet, low_rank, periodic, stochastic, xox
from gbfunc.materialize import materialize
from gbfunc.parallel import CollectiveError, Mesh, mesh
from gbfunc.parallel.planner import DeviceSpec, ParallelPlan, plan_parallel
from gbfunc.plan import Plan, make_plan
from gbfunc.storage import Checkpoint, Checkpointer, load_checkpoint
from gbfunc.storage.genome_file import load, save
from gbfunc.tiling import TileGrid, join_tiles, split_tiles, tile_grid
from gbfunc.train import Optimizer, StepInfo, TrainState, TrainStep, make_train_step, torch_optimizer, torch_schedule
from gbfunc.types import Genome

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "Checkpointer",
    "CollectiveError",
    "DeviceSpec",
    "Genome",
    "Mesh",
    "Optimizer",
    "ParallelPlan",
    "Plan",
    "StepInfo",
    "TileGrid",
    "TrainState",
    "TrainStep",
    "binary",
    "constant",
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
    "low_rank",
    "make_plan",
    "make_train_step",
    "materialize",
    "mesh",
    "one_hot",
    "per_axis",
    "periodic",
    "plan_parallel",
    "sample_noise",
    "save",
    "split_tiles",
    "stochastic",
    "tile_grid",
    "torch_optimizer",
    "torch_schedule",
    "xox",
]
