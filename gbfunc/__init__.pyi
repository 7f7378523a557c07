# Public names: type checkers read this file, and gbfunc/__init__.py imports a name at its first use.

from gbfunc.encoding import binary as binary
from gbfunc.encoding import gray as gray
from gbfunc.encoding import grid as grid
from gbfunc.encoding import one_hot as one_hot
from gbfunc.encoding import per_axis as per_axis
from gbfunc.encoding import table as table
from gbfunc.exporting import export as export
from gbfunc.fit import fit_genome as fit_genome
from gbfunc.generation import generate as generate
from gbfunc.genome import flatten as flatten
from gbfunc.genome import init_genome as init_genome
from gbfunc.genome import sample_noise as sample_noise
from gbfunc.grown import carry_over as carry_over
from gbfunc.grown import materialize as materialize
from gbfunc.grown import shuffled as shuffled
from gbfunc.hypernets import bilinear as bilinear
from gbfunc.hypernets import constant as constant
from gbfunc.hypernets import from_module as from_module
from gbfunc.hypernets import gnet as gnet
from gbfunc.hypernets import low_rank as low_rank
from gbfunc.hypernets import new_rows as new_rows
from gbfunc.hypernets import periodic as periodic
from gbfunc.hypernets import stochastic as stochastic
from gbfunc.hypernets import xox as xox
from gbfunc.many import materialize_many as materialize_many
from gbfunc.many import merge_genomes as merge_genomes
from gbfunc.module import GenomeModule as GenomeModule
from gbfunc.parallel import mesh as mesh
from gbfunc.parallel.planner import plan_parallel as plan_parallel
from gbfunc.plan import Plan as Plan
from gbfunc.plan import make_plan as make_plan
from gbfunc.plan import register as register
from gbfunc.storage.checkpoint import Checkpointer as Checkpointer
from gbfunc.storage.checkpoint import load_checkpoint as load_checkpoint
from gbfunc.storage.genome_file import load as load
from gbfunc.storage.genome_file import load_metadata as load_metadata
from gbfunc.storage.genome_file import save as save
from gbfunc.storage.lora import save_lora as save_lora
from gbfunc.train.alignment import update_alignment as update_alignment
from gbfunc.train.allocation import allocate_steps as allocate_steps
from gbfunc.train.distillation import distillation as distillation
from gbfunc.train.make import make_train_step as make_train_step
from gbfunc.train.optimizers import torch_optimizer as torch_optimizer
from gbfunc.train.param_groups import torch_schedule as torch_schedule
from gbfunc.train.population import population as population
from gbfunc.train.step import TrainState as TrainState
from gbfunc.types import Genome as Genome

__version__: str
__all__: list[str]
