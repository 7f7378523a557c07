"""Loss and gradient of a genome on one batch: the four ways from the loss back to the g-nets.

* at once: one graph from the loss through the p-net's weights to the g-nets;
* in two halves (microbatches, `remat="generate"`): gradients gather on the weights, and go through the g-nets once;
* layer by layer (`remat="layer"`): each weight is made for its use, and again in backward;
* through factors (`lazy`): weights are never formed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gbfunc.factored import LazyWeight, lazy_pays, probe_weight
from gbfunc.generate import Generator
from gbfunc.genome import Noise, sample_noise
from gbfunc.plan import Plan
from gbfunc.pnet import PureNet
from gbfunc.trees import mean_tree, shapes_of, split_batch, tree_map
from gbfunc.types import GNets, Kernel, Params

LossFn = Callable[[Callable[..., Any], Any], Any]
"""`(net, batch) -> loss` or `(loss, aux)`; `net` is the p-net closed over its generated weights."""

Lazy = bool | Literal["auto"]
Remat = Literal["none", "generate", "layer"]

_FP16_SCALE = 2.0**10
"""Loss scale under float16, which keeps small gradients of activations from underflow (Micikevicius et al., 2018)."""

_DEFAULT_GENERATORS = threading.RLock()
"""Held while a step seeds torch's default generators, which all threads share."""


class Objective:
    """The loss as a function of the genome, with its gradient. Options are those of `make_train_step`."""

    def __init__(
        self,
        plan: Plan,
        pnet: nn.Module,
        loss_fn: LossFn,
        *,
        microbatches: int,
        amp: torch.dtype | None,
        lazy: Lazy,
        remat: Remat,
        kernel: Kernel,
        compile: bool,
    ) -> None:
        self.plan = plan
        self._net = PureNet(pnet)
        self._loss_fn = loss_fn
        self._microbatches = microbatches
        self._amp = amp
        self._lazy = lazy
        self._remat = remat
        self._generator = Generator(plan, kernel=kernel)
        # What "auto" chose, by the shapes of the batch: a function of them alone.
        self._chosen: dict[Any, frozenset[str]] = {}
        self._whole = torch.compile(self._from_genome) if compile else self._from_genome

    def __call__(
        self, gnets: GNets, direct: Params, leaves: Params, buffers: Params, batch: Any, seed: int
    ) -> tuple[Tensor, Any, Params]:
        """Loss, aux and gradients by name.

        Args:
            gnets: leaves of the ensembles.
            direct: direct parameters.
            leaves: those of both that gradients are wanted for, flat by name; they require grad.
            buffers: clones of the p-net's buffers, which are updated.
            batch: the batch.
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
        scale = _FP16_SCALE if self._amp == torch.float16 else 1.0
        lazy = self._lazy_names(gnets, direct, buffers, batch, noise, seed)

        def weights() -> Params:
            return self._generator(gnets, direct, noise, lazy=lazy, remat=self._remat == "layer")

        with seeded(seed, device), torch.enable_grad():
            if self._microbatches == 1 and self._remat != "generate":
                loss, aux = self._whole(gnets, direct, buffers, batch, noise, lazy)
                found = torch.autograd.grad(loss * scale, wanted, allow_unused=True)
                return loss.detach(), aux, _filled(leaves, found, scale)
            if self._remat == "generate":
                with torch.no_grad():
                    kept = weights()
                requires = {k: True for k in kept}
            else:
                kept = weights()
                requires = {k: any(s.requires_grad for s in _sources(w)) for k, w in kept.items()}
            loss, aux, sums = self._halfway(kept, requires, buffers, batch, scale)
            whole = weights() if self._remat == "generate" else kept
            sources = [s for w in whole.values() for s in _sources(w)]
            used = [(s, g) for s, g in zip(sources, sums, strict=True) if g is not None and s.requires_grad]
            found = torch.autograd.grad([s for s, _ in used], wanted, [g for _, g in used], allow_unused=True)
            return loss, aux, _filled(leaves, found, scale)

    def _from_genome(
        self, gnets: GNets, direct: Params, buffers: Params, batch: Any, noise: Noise | None, lazy: frozenset[str]
    ) -> tuple[Tensor, Any]:
        """Loss and aux in one graph: what `compile` compiles."""
        weights = self._generator(gnets, direct, noise, lazy=lazy, remat=self._remat == "layer")
        return self._loss(weights, buffers, batch)

    def _halfway(
        self, weights: Params, requires: dict[str, bool], buffers: Params, batch: Any, scale: float
    ) -> tuple[Tensor, Any, list[Tensor | None]]:
        """Loss, aux and the gradients of all weights' sources, gathered over microbatches."""
        cut, sources = {}, []
        for name, weight in weights.items():
            own = tuple(s.detach().requires_grad_(requires[name] and s.is_floating_point()) for s in _sources(weight))
            cut[name] = weight.with_sources(own) if isinstance(weight, LazyWeight) else own[0]
            sources += own
        live = [i for i, s in enumerate(sources) if s.requires_grad]
        sums: list[Tensor | None] = [None] * len(sources)
        losses, auxes = [], []
        for small in split_batch(batch, self._microbatches) if self._microbatches > 1 else [batch]:
            loss, aux = self._loss(cut, buffers, small)
            buffers.update({k: v.detach() for k, v in buffers.items()})
            losses.append(loss.detach())
            auxes.append(aux)
            part = loss * (scale / self._microbatches)
            found = torch.autograd.grad(part, [sources[i] for i in live], allow_unused=True)
            for i, gradient in zip(live, found, strict=True):
                if gradient is not None:
                    before = sums[i]
                    sums[i] = gradient if before is None else before + gradient
        return torch.stack(losses).mean(), mean_tree(auxes) if len(auxes) > 1 else auxes[0], sums

    def _loss(self, weights: Params, buffers: Params, batch: Any) -> tuple[Tensor, Any]:
        net = self._net.bind(weights, buffers)
        if self._amp is None:
            out = self._loss_fn(net, batch)
        else:
            device = next((w.device.type for w in weights.values()), "cpu")
            with torch.autocast(device, self._amp):
                out = self._loss_fn(net, batch)
        loss, aux = out if isinstance(out, tuple) else (out, {})
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn must return a scalar tensor, or (scalar tensor, aux), got {shape}")
        if not loss.requires_grad:
            raise ValueError("the loss does not depend on any trained leaf: it must come from net(...), with its graph")
        return loss.reshape(()), tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux)

    def _lazy_names(
        self, gnets: GNets, direct: Params, buffers: Params, batch: Any, noise: Noise | None, seed: int
    ) -> frozenset[str]:
        """The parameters to leave as factors for a batch of these shapes."""
        names = self._generator.lazy_names
        if not self._lazy or not names:
            return frozenset()
        if self._lazy is True:
            return names
        key = shapes_of(batch)
        if key not in self._chosen:
            self._chosen[key] = self._choose(gnets, direct, buffers, batch, noise, seed)
        return self._chosen[key]

    def _choose(
        self, gnets: GNets, direct: Params, buffers: Params, batch: Any, noise: Noise | None, seed: int
    ) -> frozenset[str]:
        """One forward on dense weights that count their input rows, then the cost model for each."""
        rows: dict[str, int] = {}
        dense_only: dict[tuple[str, str], int] = {}
        leaves = (*direct.values(), *(leaf for own in gnets.values() for leaf in own.values()))
        device = next((leaf.device for leaf in leaves), torch.device("cpu"))
        # With gradients, as the loss function may take some of its own.
        with seeded(seed, device), torch.enable_grad():
            weights = self._generator(gnets, direct, noise)
            probes = {
                k: probe_weight(w, rows, name=k, report=dense_only) if k in self._generator.lazy_names else w
                for k, w in weights.items()
            }
            small = split_batch(batch, self._microbatches)[0] if self._microbatches > 1 else batch
            self._loss(probes, {k: v.clone() for k, v in buffers.items()}, small)
        refused = {name for name, _ in dense_only}
        chosen = set()
        for tensor in self.plan.generated:
            if tensor.name not in rows or tensor.name in refused:
                continue
            slot = tensor.slots[0]
            grid = slot.grid
            k = slot.hypernet.factor_width
            rows_each = rows[tensor.name] // len(tensor.slots)
            if lazy_pays(grid.rows, grid.cols, k, (grid.n_rows, grid.n_cols), rows_each):
                chosen.add(tensor.name)
        return frozenset(chosen)


def _sources(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.sources() if isinstance(weight, LazyWeight) else (weight,)


def _filled(leaves: Params, found: tuple[Tensor | None, ...], scale: float) -> Params:
    """Gradients by name, the loss scale undone, zero for leaves that the loss does not use."""
    named = zip(leaves.items(), found, strict=True)
    return {k: torch.zeros_like(v) if g is None else g if scale == 1.0 else g / scale for (k, v), g in named}


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's default generators (dropout draws from them), and put them back after; threads take turns."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    with _DEFAULT_GENERATORS:
        states = [g.get_state() for g in generators]
        try:
            for g in generators:
                g.manual_seed(seed)
            yield
        finally:
            for g, s in zip(generators, states, strict=True):
                g.set_state(s)
