"""Steps of quantisation for genomes that nobody trained."""

from __future__ import annotations

import torch

import gbfunc as gb
from gbfunc.plan import Steps, Stored, allocate
from gbfunc.trees import flat_genome
from gbfunc.types import Genome


def random_steps(plan: gb.Plan, genome: Genome, each: float = 5.0, seed: int = 0) -> Steps:
    """Steps of so many bits a number, for gradients that are drawn."""
    generator = torch.Generator().manual_seed(seed)
    leaves = {k: x.detach().cpu() for k, x in flat_genome(genome).items()}
    squares = {k: torch.rand(x.shape, generator=generator) for k, x in leaves.items() if x.is_floating_point()}
    return allocate(plan, leaves, squares, each * plan.genome_params)


def stored_with(plan: gb.Plan, genome: Genome, dtype: str | None) -> Stored | None:
    """What `save` takes for a dtype; steps for `"auto"`."""
    return random_steps(plan, genome) if dtype == "auto" else dtype
