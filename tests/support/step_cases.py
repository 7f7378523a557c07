"""Steps of quantisation for genomes that nobody trained."""

import torch

import gbfunc as gb
from gbfunc.formats import Steps, Stored, allocate
from gbfunc.trees import BUFFERS, flatten_tree
from gbfunc.types import Genome


def random_steps(plan: gb.Plan, genome: Genome, each: float = 5.0, seed: int = 0) -> Steps:
    generator = torch.Generator().manual_seed(seed)
    leaves = {k: x.detach().cpu() for k, x in flatten_tree(Genome(genome.gnets, genome.direct, genome.buffers)).items()}
    squares = {k: torch.rand(x.shape, generator=generator) for k, x in leaves.items() if not k.startswith(BUFFERS)}
    return allocate(plan, leaves, squares, each * plan.genome_params)


def stored_with(plan: gb.Plan, genome: Genome, dtype: str | None) -> Stored | None:
    """What `save` takes for a dtype; steps for `"auto"`."""
    return random_steps(plan, genome) if dtype == "auto" else dtype
