"""The proof that a batch in which every row has its genome gives what each row gives alone.

It is made on the first call of a kind, with tensors made of the genomes' own by random factors, so that they differ
more than rounding. Some rows come twice, on other tensors and in reverse order, so that what is sorted moves, and a
dimension that has as many entries as the batch by chance has not. Outputs of all modules are compared, and the first
one that differs is where the p-net does something else with rows than to keep them. So is the first operator that
takes rows together (a maximum over the batch, say), even if nothing comes of it with the values of this call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gbfunc.many.row_wise import PLAIN
from gbfunc.trees import tree_leaves

VARIANTS = 3
"""Sets of tensors of a proof."""


class ProofBatch(NamedTuple):
    """Rows of a call, by number, of which each computes with one of the `variants` of tensors; `checked` ones alone."""

    rows: list[int]
    variants: list[int]
    checked: list[int]


def proof_batch(n_rows: int, sizes: set[int]) -> ProofBatch:
    """All rows in order, then the first, middle and last again in reverse; a prime number that divides no size."""
    again = sorted({0, n_rows // 2, n_rows - 1}, reverse=True)
    rows = [*range(n_rows), *again]
    variants = [b % VARIANTS for b in range(n_rows)] + [(b + 1) % VARIANTS for b in again]
    checked = [*again, *range(n_rows, len(rows))]
    while any(size and size % len(rows) == 0 for size in sizes) or any(len(rows) % n == 0 for n in range(2, len(rows))):
        rows, variants = [*rows, 0], [*variants, len(rows) % VARIANTS]
    return ProofBatch(rows, variants, checked)


def varied(x: Tensor) -> Tensor:
    """Variants of a tensor of genomes: [N, ...] -> [VARIANTS, ...], each entry times a number in [1/2, 1]."""
    draw = torch.Generator().manual_seed(0)
    x = x[torch.arange(VARIANTS) % len(x)]
    if not x.is_floating_point():
        return x
    by = (1 - torch.rand(x.shape, generator=draw) / 2).to(x)
    return x * by if x.any() else by / 10


class Watch:
    """Outputs of a net's modules in a call, by path and how often the module was called before, in order."""

    def __init__(self, batch: ProofBatch | None = None) -> None:
        self.outputs: dict[tuple[str, int], list[tuple[str, Any]]] = {}
        self.running, self._batch, self._calls = list[str](), batch, Counter[str]()

    @contextmanager
    def of(self, net: nn.Module) -> Iterator[None]:
        """Watch the calls inside of this; of a batch the rows that are checked are kept."""
        handles = []
        for path, module in net.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue
            handles.append(module.register_forward_pre_hook(lambda m, a, path=path: self.running.append(path)))
            handles.append(module.register_forward_hook(lambda m, a, out, path=path: self._record(path, out)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _record(self, path: str, out: Any) -> None:
        self.running.pop()
        kept = []
        for at, x in tree_leaves(out, "output"):
            # Copies: the net may change its tensors in place.
            if isinstance(x, Tensor):
                batch = self._batch
                x = x[batch.checked] if batch and x.shape[:1] == (len(batch.rows),) else x.clone()
            kept.append((at, x))
        self.outputs[path, self._calls[path]] = kept
        self._calls[path] += 1


class RowsTogether(TorchDispatchMode):
    """Finds the operators outside of the modules at some `paths` that take the rows of a batch together.

    They read tensors that have the batch's rows, in a dimension or folded into one, and give none that has: sums over
    rows, one row of all, rows by a mask; or they order rows by values. What is left out is a single truth value: code
    asks such questions (is anything padded?) to spare work, and rows that go other branches differ in their outputs.

    Attributes:
        found: the path of the innermost module that ran the first one; None where there is none.
    """

    def __init__(self, n_rows: int, running: list[str], paths: Collection[str]) -> None:
        super().__init__()
        self.found: str | None = None
        self._n_rows, self._running, self._paths = n_rows, running, paths

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if self.found is None and not {*self._running} & {*self._paths}:
            given = [x for _, x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor) and self._have_rows(x)]
            made = [x for _, x in tree_leaves(out) if isinstance(x, Tensor) and x.numel()]
            if given and self._together(func, args, kwargs or {}, given, made):
                self.found = self._running[-1] if self._running else ""
        return out

    def _together(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor]) -> bool:
        name = func.overloadpacket.__name__
        if name in ("sort", "argsort", "topk"):
            place = [argument.name for argument in func._schema.arguments].index("dim")
            dim = args[place] if place < len(args) else kwargs.get("dim", -1)
            return given[0].shape[dim] % self._n_rows == 0
        if torch.Tag.dynamic_output_shape in func.tags:
            # Of places given by numbers the outputs are compared.
            return name != "index" or any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        truth = len(made) == 1 and made[0].numel() == 1 and made[0].dtype == torch.bool
        return bool(made) and not (truth or name.startswith("new_") or any(map(self._have_rows, made)))

    def _have_rows(self, x: Tensor) -> bool:
        return any(size and size % self._n_rows == 0 for size in x.shape)


def first_difference(alone: list[Watch], batch: Watch, strict: Collection[str], tolerance: float) -> str | None:
    """The path of the first module whose outputs differ between a batch and its rows alone.

    Of modules that are not `strict`, outputs without a first dimension of rows are not compared.
    """
    for call, outputs in batch.outputs.items():
        path, each = call[0], [watch.outputs.get(call, []) for watch in alone]
        if all([at for at, _ in one] == [at for at, _ in outputs] for one in each):
            parts = zip(*([x for _, x in one] for one in (outputs, *each)), strict=True)
            same = all(_same(rows, x, path in strict, tolerance) for x, *rows in parts)
        else:
            same = path not in strict
        if not same:
            return path
    return None


def _same(rows: list[Any], x: Any, strict: bool, tolerance: float) -> bool:
    if not all(isinstance(y, Tensor) for y in (*rows, x)):
        return not strict or all(type(y) is type(x) and (not isinstance(x, PLAIN) or y == x) for y in rows)
    if any(y.shape[:1] != (1,) for y in rows) or x.shape[:1] != (len(rows),):
        return not strict
    if any(y.shape[1:] != x.shape[1:] for y in rows):
        return False
    y = torch.cat(rows)
    if not x.is_floating_point() or not x.numel():
        return torch.equal(x, y)
    return torch.allclose(x, y, 0, tolerance * float(y.nan_to_num(0, 0, 0).abs().max()), equal_nan=True)


def tolerance_of(tensors: Iterable[Tensor]) -> float:
    """Rounding by another order of sums, relative to the largest entry: 1e-6, 2e-3, and 0.1 in half precision."""
    floating = [x for x in tensors if x.is_floating_point()]
    dtypes = {x.dtype for x in floating}
    for device in {x.device.type for x in floating}:
        dtypes |= {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0) ** 0.4
