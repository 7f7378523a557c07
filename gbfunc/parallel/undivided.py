"""A p-net whose layers are not split over tensor ranks: the interface of `TensorParallel`, and nothing to do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor, nn

from gbfunc.tiling import Piece
from gbfunc.types import Params


class Undivided:
    """Every layer whole on every rank; see `gbfunc.parallel.tensor.TensorParallel`."""

    ranks = 1
    pieces: Mapping[str, Piece] = {}  # noqa: RUF012
    shapes: Mapping[str, tuple[int, ...]] = {}  # noqa: RUF012
    local_rows: int | None = None
    by_class = False
    takes_parts = False

    def adapt(self, skeleton: nn.Module) -> Collection[str]:
        """Change nothing."""
        return ()

    def place(self, tensors: Params) -> Params:
        """The tensors as they are."""
        return tensors

    def plain(self, loss: Tensor) -> Tensor:
        """The loss as it is."""
        return loss

    def backward(self) -> AbstractContextManager[Any]:
        """Nothing around backward."""
        return nullcontext()

    def compare(self, loss: Tensor) -> None:
        """Nothing to compare."""
