"""What an ensemble's g-nets take beside their leaves: codes, groups and scales, as tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gbfunc.genome import codes_of
from gbfunc.plan import Ensemble


class Constants(NamedTuple):
    """What an ensemble needs beside its leaves, in the leaves' dtype and on their device.

    Attributes:
        row: row codes [U, r, p].
        col: column codes [U, c, q].
        groups: group of every tile [T], None where nothing is shared.
        scale: scale of every tile's slot [T].
    """

    row: Tensor
    col: Tensor
    groups: Tensor | None
    scale: Tensor

    def of(self, span: slice) -> Constants:
        """The same for some of the tiles."""
        row = self.row if len(self.row) == 1 else self.row[span]
        col = self.col if len(self.col) == 1 else self.col[span]
        return Constants(row, col, None if self.groups is None else self.groups[span], self.scale[span])


def make_constants(ensemble: Ensemble, dtype: torch.dtype, device: torch.device) -> Constants:
    """The constants of all tiles of an ensemble."""
    groups = torch.tensor(ensemble.groups, device=device) if ensemble.hypernet.shares else None
    scales = [p.slot.scale for p in ensemble.spans for _ in range(p.slot.grid.n_tiles)]
    return Constants(*codes_of(ensemble, dtype, device), groups, torch.tensor(scales, dtype=dtype, device=device))
