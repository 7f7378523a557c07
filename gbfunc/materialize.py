"""A grown p-net as a module of its own, for everything that takes an `nn.Module`: evaluation, export, serving."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from gbfunc.factored import FactoredWeight, LazyWeight, factored_weight
from gbfunc.generate import Generator
from gbfunc.genome import check_genome, check_plan
from gbfunc.plan import DTYPES, Plan
from gbfunc.pnet import PureNet, with_weights
from gbfunc.types import GenomeLike


class _Factored(nn.Module):
    """A parametrisation whose originals are the factors of a weight."""

    def __init__(self, weight: FactoredWeight) -> None:
        super().__init__()
        self._first = tuple(source.detach().clone() for source in weight.sources())
        self._options = {"shape": tuple(weight.shape), "rows": weight.rows, "cols": weight.cols}

    def forward(self, left: Tensor, right: Tensor) -> FactoredWeight:
        return factored_weight(left, right, **self._options)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, ...]:
        first, self._first = self._first, ()
        return first


def materialize(plan: Plan, genome: GenomeLike, pnet: nn.Module, *, factored: bool = False) -> nn.Module:
    """A copy of the p-net with the generated weights and the genome's buffers.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        pnet: the p-net the plan was made for; it is not changed. The copy keeps its training mode.
        factored: keep the factors of weights whose factors are smaller (as a torch parametrisation), instead of
            forming the weights: less memory, and less time where the factors are thin. Without it the copy is a plain
            module with nothing of gbfunc in it.

    Raises:
        ValueError: if genome, plan and p-net do not fit together.
    """
    check_plan(plan, pnet)
    check_genome(plan, genome)
    generator = Generator(plan)
    aliased = {t.name for t in plan.tensors if t.aliases}
    candidates = generator.lazy_names - aliased if factored else frozenset()
    with torch.no_grad():
        weights = generator(genome.gnets, genome.direct, lazy=candidates)
        kept = {k: w for k, w in weights.items() if isinstance(w, FactoredWeight) and _smaller(w)}
        dense = {k: w.dense() if isinstance(w, LazyWeight) and k not in kept else w for k, w in weights.items()}
    PureNet(pnet).check(dense, genome.buffers)
    dtypes = {t.name: DTYPES[t.dtype] for t in plan.tensors}
    # A factored weight has no storage to copy: a view of one entry stands in its place until it is parametrised.
    stand_ins = {k: torch.zeros((), dtype=w.dtype).expand(w.shape) for k, w in kept.items()}
    own = {k: w.to(dtypes[k]) for k, w in (dense | stand_ins).items()}
    net = with_weights(pnet, own, genome.buffers, bare=kept)
    for name, weight in kept.items():
        prefix, _, attribute = name.rpartition(".")
        register_parametrization(net.get_submodule(prefix), attribute, _Factored(weight), unsafe=True)
    return net


def _smaller(weight: FactoredWeight) -> bool:
    return sum(source.numel() for source in weight.sources()) < weight.numel()
