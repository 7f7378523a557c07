"""Generates weights from a genome that is split over ranks: each rank generates some tiles and gathers all tiles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gbfunc.generation.generator import Generated, Generator, Local, Stack
from gbfunc.hypernets.ensemble import Evaluation, joined
from gbfunc.layers.forms import Needs, Source
from gbfunc.parallel import Gather, Layout
from gbfunc.plan import Ensemble
from gbfunc.tiling import Cut
from gbfunc.types import Factors, Kernel


class Remote(NamedTuple):
    """A `Source` of a slot split over ranks. All ranks gather the slot's tiles when its `WeightForm` requests them."""

    stack: RankStack
    number: int
    evaluation: Evaluation
    gather: Gather

    def matrix(self) -> Tensor:
        cut = self.stack.cuts[self.number]
        return cut.crop(joined(self._tiles(), cut.grid))

    def factors(self) -> Factors:
        return Generated(self._tiles(), self.stack.cuts[self.number]).factors()

    def inputs(self) -> Sequence[Tensor]:
        counts = torch.tensor(self.gather.counts, device="cpu")
        return *Local(self.evaluation, self.stack.cuts[self.number]).inputs(), counts

    def _tiles(self) -> Tensor | Factors:
        stack = self.stack
        name, mine = stack.ensemble.name, stack.tiles(self.evaluation, self.gather)
        return self.gather.outputs({name: mine}, {name: stack.sizes[self.number]})[name]


class RankStack(Stack):
    """Generates all slots of an ensemble whose tiles are split over ranks. `cuts` selects blocks of the matrices.

    With `needs="leaves"`, tiles are gathered when a `WeightForm` requests a slot. `sizes[i]`: tiles of slot i per rank.
    """

    def __init__(
        self, layout: Layout, ensemble: Ensemble, kernel: Kernel, cuts: Mapping[int, Cut], needs: Needs
    ) -> None:
        every = {i: cuts.get(i, Cut(p.slot.grid)) for i, p in enumerate(ensemble.spans)}
        self.sizes = [layout.sizes_of(ensemble, i) for i in every]
        self._layout = layout
        super().__init__(ensemble, kernel, every, needs)
        self._tiles = layout.span(ensemble)
        self._local_counts = [sizes[layout.mesh.gnets_index] for sizes in self.sizes]

    def slot(self, number: int, inputs: Iterator[Tensor]) -> Source:
        """Return the `Source` of a slot. `inputs` yields leaves, noise, and 0 if this rank must not add gradients."""
        evaluation = self._filled(number, inputs)
        return Remote(self, number, evaluation, Gather(self._layout, bool(next(inputs))))

    def tiles(self, evaluation: Evaluation, gather: Gather) -> Tensor | Factors:
        """Return this rank's tiles or factors, which `gather` sends to other ranks. A rank may have no tiles."""
        return evaluation.tiles() if evaluation.n_tiles else gather.no_tiles(self.ensemble, evaluation.leaves)


class RankGenerator(Generator):
    """A generator that gathers tiles from ranks: the tiles of all slots at once or, with `remat`, slot by slot."""

    def __init__(self, layout: Layout, *args: Any) -> None:
        super().__init__(*args)
        self._layout = layout

    def _slots(self, evaluations: Sequence[Evaluation], counts: bool) -> list[Sequence[Source]]:
        gather = Gather(self._layout, counts)
        # Gather all ensembles at once, to save latency, and outside of `vmap`, which does not support collectives.
        mine = {
            s.ensemble.name: s.tiles(evaluations[i], gather)
            for i, s in enumerate(self.stacks)
            if isinstance(s, RankStack) and s.needs != "leaves"
        }
        tiles, slots = gather.outputs(mine, self._layout.sizes) if mine else {}, list[Sequence[Source]]()
        for i, stack in enumerate(self.stacks):
            if stack.ensemble.name in tiles:
                slots.append(stack.of_tiles(tiles[stack.ensemble.name]))
            elif isinstance(stack, RankStack):
                split = evaluations[i].split(stack._local_counts)
                slots.append([Remote(stack, number, own, gather) for number, own in enumerate(split)])
            else:
                slots.append(stack.split(evaluations[i]))
        return slots
