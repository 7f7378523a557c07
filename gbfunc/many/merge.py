"""Makes a plain module from a weighted sum of the weights of several genomes."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gbfunc.generation import make_generator
from gbfunc.genome import check_genome, check_plan
from gbfunc.plan import DTYPES, Plan
from gbfunc.pnet.describe import named_tensors, with_weights
from gbfunc.trees import differentiable, flat_genome
from gbfunc.types import GenomeLike


def check_genomes(plan: Plan, genomes: Sequence[GenomeLike], pnet: nn.Module) -> None:
    """Raise ValueError if there are no genomes, or a genome does not fit the plan and the p-net."""
    check_plan(plan, pnet)
    if (one := hasattr(genomes, "gnets")) or not len(genomes):
        raise ValueError(f"expected a list of at least one genome, got {'a genome: write [genome]' if one else 'none'}")
    for genome in genomes:
        check_genome(plan, genome)


def merge_genomes(
    plan: Plan, genomes: Sequence[GenomeLike], pnet: nn.Module, weights: Sequence[float] | None = None
) -> nn.Module:
    """Make a plain module whose tensors are a weighted sum of the tensors that several genomes generate.

    Genome i generates the tensors W_i and has the weight a_i. The module has the tensors sum_i a_i W_i or, if the plan
    has a base, W_0 + sum_i a_i (W_i - W_0) with the present tensors W_0 of `pnet`. Positive weights add tasks, and
    negative weights remove tasks (task arithmetic, Ilharco et al. 2023). The sum of genomes would generate
    different tensors, because g-nets are not linear. For a single genome of weight 1, the result equals `materialize`.

    `pnet` is the plan's p-net or base, which is not changed. `weights` are finite numbers, one per genome. The default
    is the mean. Raises ValueError if genomes, plan, p-net and weights do not fit together.
    """
    check_genomes(plan, genomes, pnet)
    if beside := [t.name for t in plan.tensors if t.kind == "beside"]:
        words = "expected deltas that can be added to their weights, got deltas of layers that hide their weights"
        raise ValueError(f"{words}, {', '.join(beside)}: serve the genomes with gb.materialize_many")
    shares = [1 / len(genomes)] * len(genomes) if weights is None else [float(a) for a in weights]
    if len(shares) != len(genomes) or not all(math.isfinite(a) for a in shares):
        raise ValueError(f"expected {len(genomes)} finite weights, one for each genome, got {weights}")
    base = plan.base_tensors(pnet)
    generator = make_generator(plan, base=base)
    with torch.no_grad():
        grown = [generator(flat_genome(genome)) for genome in genomes]
    present = {} if base is None else dict(named_tensors(pnet))
    first = max(range(len(shares)), key=lambda i: shares[i])

    def summed(name: str, values: list[Tensor], dtype: torch.dtype) -> Tensor:
        # Integer tensors (counters) cannot be averaged: take the tensor of the genome with the largest weight.
        if not differentiable(dtype) or len(values) == 1 == shares[0]:
            return values[first].to(dtype)
        wide = [x.detach().to(torch.complex128 if dtype.is_complex else torch.float64) for x in values]
        start = present[name].detach().to(wide[0]) if name in present else wide[0].new_zeros(())
        total = sum((a * (x - start) for a, x in zip(shares, wide, strict=True)), start)
        return torch.as_tensor(total).to(dtype)

    tensors = {name: grown[0][name] for name in generator.unchanged}
    tensors |= {t.name: summed(t.name, [x[t.name] for x in grown], DTYPES[t.dtype]) for t in plan.tensors}
    buffers = {b.name: summed(b.name, [g.buffers[b.name] for g in genomes], DTYPES[b.dtype]) for b in plan.buffers}
    buffers |= {} if base is None else base.on(next(iter(tensors.values())).device)[1]
    return with_weights(pnet, tensors, buffers)
