"""Which weights stay factors: all that can, none, or those for which a count of operations and bytes says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gbfunc.factored import lazy_pays, probe_weight
from gbfunc.generate import Generator
from gbfunc.genome import Noise
from gbfunc.plan import DTYPES
from gbfunc.train.loss import Lazy, Loss
from gbfunc.train.seeding import seeded
from gbfunc.trees import shapes_of
from gbfunc.types import GNets, Params


class LazyChoice:
    """`choice(...) -> names` of the parameters to leave as factors for a batch of these shapes."""

    def __init__(self, generator: Generator, loss: Loss, lazy: Lazy) -> None:
        self._generator = generator
        self._loss = loss
        self._lazy = lazy
        # What "auto" chose, by the shapes of the batch: a function of them alone.
        self._chosen: dict[Any, frozenset[str]] = {}

    def __call__(
        self,
        gnets: GNets,
        direct: Params,
        buffers: Params,
        batch: Any,
        noise: Noise | None,
        seed: int,
        first_part: Callable[[Any], Any],
    ) -> frozenset[str]:
        """The names; `first_part` cuts the first microbatch from a batch."""
        names = self._generator.lazy_names
        if not self._lazy or not names:
            return frozenset()
        if self._lazy is True:
            return names
        key = shapes_of(batch)
        if key not in self._chosen:
            self._chosen[key] = self._choose(gnets, direct, buffers, first_part(batch), noise, seed)
        return self._chosen[key]

    def _choose(
        self, gnets: GNets, direct: Params, buffers: Params, small: Any, noise: Noise | None, seed: int
    ) -> frozenset[str]:
        """One forward on dense weights that count their input rows, then the cost model for each."""
        plan = self._generator.plan
        rows: dict[str, int] = {}
        dense_only: dict[tuple[str, str], int] = {}
        leaves = (*direct.values(), *(leaf for own in gnets.values() for leaf in own.values()))
        device = next((leaf.device for leaf in leaves), torch.device("cpu"))
        # With gradients, as the loss function may take some of its own.
        with seeded(seed, device), torch.enable_grad():
            if self._generator.layout:
                # Their values do not matter, and ranks come here each in its own time: no collective.
                zeros = {t.name: torch.zeros((), dtype=DTYPES[t.dtype], device=device) for t in plan.generated}
                weights = {t.name: zeros[t.name].expand(t.shape).requires_grad_() for t in plan.generated} | direct
            else:
                weights = self._generator(gnets, direct, noise)
            probes = {
                k: probe_weight(w, rows, name=k, report=dense_only) if k in self._generator.lazy_names else w
                for k, w in weights.items()
            }
            self._loss(probes, {k: v.clone() for k, v in buffers.items()}, small)
        refused = {name for name, _ in dense_only}
        chosen = set()
        for tensor in plan.generated:
            if tensor.name not in rows or tensor.name in refused:
                continue
            slot = tensor.slots[0]
            grid = slot.grid
            k = slot.hypernet.factor_width
            rows_each = rows[tensor.name] // len(tensor.slots)
            if lazy_pays(grid.rows, grid.cols, k, (grid.n_rows, grid.n_cols), rows_each):
                chosen.add(tensor.name)
        return frozenset(chosen)
