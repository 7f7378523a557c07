"""Loss and gradient of a genome on one batch: the four ways from the loss back to the g-nets.

* at once: one graph from the loss through the p-net's weights to the g-nets;
* in two halves (microbatches, `remat="generate"`): gradients gather on the weights, and go through the g-nets once;
* layer by layer (`remat="layer"`): each weight is made for its use, and again in backward;
* through factors (`lazy`): weights are never formed.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.factored import LazyWeight
from gbfunc.generate import Generator
from gbfunc.genome import Noise, sample_noise
from gbfunc.parallel import Layout
from gbfunc.plan import Plan
from gbfunc.train.choice import LazyChoice
from gbfunc.train.loss import Lazy, Loss, LossFn, Remat
from gbfunc.train.seeding import RANK_MIX, seeded
from gbfunc.trees import mean_tree, n_rows, split_batch, split_rows, tree_map
from gbfunc.types import GNets, Kernel, Params

_FP16_SCALE = 2.0**10
"""Loss scale under float16, which keeps small gradients of activations from underflow (Micikevicius et al., 2018)."""

_FP16_SCALE_A_ROW = 2.0**4
"""The same with a mesh, where each rank's loss is scaled by its rows: equal at 64 rows."""


class LossAndGrads(NamedTuple):
    """What one rank found on its share of the batch.

    Attributes:
        loss: mean over the share.
        aux: what the loss function returned beside it.
        gradients: by flat name; with a mesh of more than one rank, of `rows` times the loss.
        rows: of the share; 0 if it is empty, and what was found on rows of zeros in its place counts for nothing.
    """

    loss: Tensor
    aux: Any
    gradients: Params
    rows: int


class Objective:
    """The loss as a function of the genome, with its gradient. Options are those of `make_train_step`."""

    def __init__(
        self,
        plan: Plan,
        pnet: nn.Module,
        loss_fn: LossFn,
        layout: Layout,
        *,
        microbatches: int,
        amp: torch.dtype | None,
        lazy: Lazy,
        remat: Remat,
        kernel: Kernel,
        compile: bool,
    ) -> None:
        self.plan = plan
        self._rank, self._ranks = layout.mesh.rank, layout.mesh.world
        self._loss = Loss(pnet, loss_fn, amp)
        self._microbatches = microbatches
        self._amp = amp
        self._remat = remat
        self._generator = Generator(plan, kernel=kernel, layout=layout)
        self._lazy = LazyChoice(self._generator, self._loss, lazy)
        self._whole = torch.compile(self._from_genome) if compile else self._from_genome
        self._layout, self._compiled = layout, compile

    def __call__(
        self, gnets: GNets, direct: Params, leaves: Params, buffers: Params, batch: Any, seed: int
    ) -> LossAndGrads:
        """Loss, aux and gradients by name.

        Args:
            gnets: leaves of the ensembles.
            direct: direct parameters.
            leaves: those of both that gradients are wanted for, flat by name; they require grad.
            buffers: clones of the p-net's buffers, which are updated.
            batch: the batch, with a mesh this rank's share of it.
            seed: of dropout and of stochastic g-nets.

        Raises:
            ValueError: for a loss that is no scalar or does not depend on what is trained, or a batch that microbatches
                cannot split.
        """
        wanted = list(leaves.values())
        device = wanted[0].device if wanted else torch.device("cpu")
        noise = None
        if self.plan.stochastic:
            # Not dropout's seed: equal seeds draw the same numbers.
            noise = sample_noise(self.plan, torch.Generator().manual_seed(seed ^ 1), wanted[0])
        scale, rows = _FP16_SCALE if self._amp == torch.float16 else 1.0, 1
        weight, mute = scale, False
        if self._ranks > 1:
            found_rows = n_rows(batch)
            rows = 1 if found_rows is None else found_rows
            if mute := rows == 0:
                # All ranks must build the same graph, for they take part in the same collectives.
                batch = tree_map(_zero_rows, batch)
            scale = _FP16_SCALE_A_ROW if self._amp == torch.float16 else 1.0
            weight = scale * max(rows, 1)
            seed = (seed + RANK_MIX * self._rank) % 2**63
        lazy = self._lazy(gnets, direct, buffers, batch, noise, seed, lambda x: self._split(x)[0][0])

        def weights() -> Params:
            return self._generator(gnets, direct, noise, lazy=lazy, remat=self._remat == "layer", mute=mute)

        with seeded(seed, device), torch.enable_grad():
            if self._microbatches == 1 and self._remat != "generate":
                with self._outside(wanted):
                    loss, aux = self._whole(gnets, direct, buffers, batch, noise, lazy, mute)
                    found = torch.autograd.grad(loss * weight, wanted, allow_unused=True)
                return LossAndGrads(loss.detach(), aux, _filled(leaves, found, scale), rows)
            if self._remat == "generate":
                with torch.no_grad():
                    kept = weights()
                requires = {k: True for k in kept}
            else:
                kept = weights()
                requires = {k: any(s.requires_grad for s in _sources(w)) for k, w in kept.items()}
            loss, aux, sums = self._halfway(kept, requires, buffers, batch, weight)
            whole = weights() if self._remat == "generate" else kept
            sources = [s for w in whole.values() for s in _sources(w)]
            used = [(s, g) for s, g in zip(sources, sums, strict=True) if g is not None and s.requires_grad]
            found = torch.autograd.grad([s for s, _ in used], wanted, [g for _, g in used], allow_unused=True)
            return LossAndGrads(loss, aux, _filled(leaves, found, scale), rows)

    def _outside(self, wanted: list[Tensor]) -> AbstractContextManager[None]:
        """Counts and names what a compiled graph's collectives, which have no Python inside, send and fail of."""
        if not self._compiled or not self._layout.sharded:
            return nullcontext()
        mesh = self._layout.mesh
        out, back = self._layout.wire_bytes(max(x.element_size() for x in wanted))
        mesh.traffic.add("gather", out)
        mesh.traffic.add("reduce_scatter", back)
        return mesh.faults.named("a compiled step")

    def _from_genome(
        self,
        gnets: GNets,
        direct: Params,
        buffers: Params,
        batch: Any,
        noise: Noise | None,
        lazy: frozenset[str],
        mute: bool,
    ) -> tuple[Tensor, Any]:
        """Loss and aux in one graph: what `compile` compiles."""
        weights = self._generator(gnets, direct, noise, lazy=lazy, remat=self._remat == "layer", mute=mute)
        return self._loss(weights, buffers, batch)

    def _halfway(
        self, weights: Params, requires: dict[str, bool], buffers: Params, batch: Any, weight: float
    ) -> tuple[Tensor, Any, list[Tensor | None]]:
        """Loss, aux and the gradients of all weights' sources, gathered over microbatches; `weight` scales the loss."""
        cut, sources = {}, []
        for name, made in weights.items():
            own = tuple(s.detach().requires_grad_(requires[name] and s.is_floating_point()) for s in _sources(made))
            cut[name] = made.with_sources(own) if isinstance(made, LazyWeight) else own[0]
            sources += own
        live = [i for i, s in enumerate(sources) if s.requires_grad]
        sums: list[Tensor | None] = [None] * len(sources)
        losses, auxes = [], []
        parts = self._split(batch)
        for small, fraction in parts:
            loss, aux = self._loss(cut, buffers, small)
            buffers.update({k: v.detach() for k, v in buffers.items()})
            losses.append(loss.detach())
            auxes.append(aux)
            part = loss * (weight * fraction)
            found = torch.autograd.grad(part, [sources[i] for i in live], allow_unused=True)
            for i, gradient in zip(live, found, strict=True):
                if gradient is not None:
                    before = sums[i]
                    sums[i] = gradient if before is None else before + gradient
        fractions = [fraction for _, fraction in parts]
        return mean_tree(losses, fractions), mean_tree(auxes, fractions) if len(auxes) > 1 else auxes[0], sums

    def _split(self, batch: Any) -> list[tuple[Any, float]]:
        """The microbatches, each with its part of the rows; equal ones but for uneven shares of a mesh."""
        n = self._microbatches
        rows = n_rows(batch) if self._ranks > 1 and n > 1 else None
        if n == 1:
            return [(batch, 1.0)]
        if rows is None:
            return [(small, 1 / n) for small in split_batch(batch, n)]
        # Only generation has collectives, so ranks with fewer rows may take fewer microbatches.
        return [(small, (n_rows(small) or 0) / rows) for small in split_rows(batch, min(n, rows))]


def _zero_rows(x: Any) -> Any:
    # Two: some layers (batch norm) refuse a single one.
    return x.new_zeros((2, *x.shape[1:])) if isinstance(x, Tensor) and x.ndim else x


def _sources(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.sources() if isinstance(weight, LazyWeight) else (weight,)


def _filled(leaves: Params, found: tuple[Tensor | None, ...], scale: float) -> Params:
    """Gradients by name, the loss scale undone, zero for leaves that the loss does not use."""
    named = zip(leaves.items(), found, strict=True)
    return {k: torch.zeros_like(v) if g is None else g if scale == 1.0 else g / scale for (k, v), g in named}
