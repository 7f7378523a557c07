"""The proof that a batch in which every row has its genome gives what each row gives alone.

It is made on the first call of a kind, with tensors made of the genomes' own by random factors, so that they differ
more than rounding. Some rows come twice, on other tensors and in reverse order, so that what is sorted moves, and a
dimension that has as many entries as the batch by chance has not. Outputs of all modules are compared, and the first
one that differs is where the p-net does something else with rows than to keep them. So is the first operator that
takes rows together (a maximum over the batch, say), even if nothing comes of it with the values of this call. Truths
that are asked of all rows (is anything padded?) may be of other rows in each call, and are watched in all of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gbfunc.many.row_wise import PLAIN, RowWise
from gbfunc.pnet.reads import storages_of, tensors_in
from gbfunc.trees import differentiable, tree_leaves

VARIANTS = 3
"""Sets of tensors of a proof."""

_ALONG = frozenset(
    "sort argsort topk cumsum cumprod cummax cummin logcumsumexp _softmax _log_softmax roll flip".split()
)
"""Operators that take what lies along a dimension together, and keep it."""

_COPYING = frozenset([Tensor.tolist, Tensor.numpy, Tensor.__array__])
_LEAVING = _COPYING | {Tensor.__dlpack__, Tensor.data_ptr}
"""Functions that take numbers out of torch, where no operator is seen."""

Pairs = dict[tuple[tuple[bool, ...], tuple[bool, ...]], int]
"""What a row alone answers and what its batch answers to the questions of a call: the first row of each such pair."""


class ProofBatch(NamedTuple):
    """Rows of a call, by number, of which each computes with one of the `variants` of tensors; `checked` ones alone."""

    rows: list[int]
    variants: list[int]
    checked: list[int]


def proof_batch(n_rows: int, sizes: set[int], more: Iterable[int] = ()) -> ProofBatch:
    """All rows in order, then the first, middle and last again in reverse; a prime number that divides no size.

    Checked are those, and `more`.
    """
    again = sorted({0, n_rows // 2, n_rows - 1}, reverse=True)
    rows = [*range(n_rows), *again]
    variants = [b % VARIANTS for b in range(n_rows)] + [(b + 1) % VARIANTS for b in again]
    checked = [*dict.fromkeys((*again, *more, *range(n_rows, len(rows))))]
    while any(size and size % len(rows) == 0 for size in sizes) or any(len(rows) % n == 0 for n in range(2, len(rows))):
        rows, variants = [*rows, 0], [*variants, len(rows) % VARIANTS]
    return ProofBatch(rows, variants, checked)


def varied(x: Tensor) -> Tensor:
    """Variants of a tensor of genomes: [N, ...] -> [VARIANTS, ...], each entry times a number in [1/2, 1]."""
    draw = torch.Generator().manual_seed(0)
    x = x[torch.arange(VARIANTS) % len(x)]
    if not differentiable(x.dtype):
        return x
    by = (1 - torch.rand(x.shape, generator=draw) / 2).to(x)
    return x * by if x.any() else by / 10


class _Object(NamedTuple):
    """An output that is no tree (a data class, a cache): its type, and the tensors in it."""

    kind: type
    parts: list[Tensor]


class Watch:
    """Outputs of a net's modules in a call, by path and how often the module was called before, in order."""

    def __init__(self, batch: ProofBatch | None = None) -> None:
        self.outputs: dict[tuple[str, int], list[tuple[str, Any]]] = {}
        self.running, self._batch, self._calls = list[str](), batch, Counter[str]()

    @contextmanager
    def of(self, net: nn.Module) -> Iterator[None]:
        """Watch the calls inside of this; of a batch the rows that are checked are kept."""
        with ExitStack() as hooks:
            for path, module in net.named_modules():
                if not isinstance(module, torch.jit.ScriptModule):
                    before = module.register_forward_pre_hook(lambda m, a, path=path: self.running.append(path))
                    hooks.enter_context(before)
                    after = module.register_forward_hook(lambda m, a, out, path=path: self._record(path, out))
                    hooks.enter_context(after)
            yield

    def _record(self, path: str, out: Any) -> None:
        self.running.pop()
        kept = []
        for at, x in tree_leaves(out, "output"):
            # Copies: the net may change its tensors in place.
            if not isinstance(x, (Tensor, *PLAIN)):
                parts = [*tensors_in(x, objects=True)]
                # Of the whole p-net under vmap, objects hold what was inside of it.
                inside = any(map(is_functorch_wrapped_tensor, parts))
                x = _Object(type(x), [] if inside else [self._copied(part) for part in parts])
            kept.append((at, self._copied(x) if isinstance(x, Tensor) else x))
        self.outputs[path, self._calls[path]] = kept
        self._calls[path] += 1

    def _copied(self, x: Tensor) -> Tensor:
        batch, x = self._batch, x.detach()
        return x[batch.checked] if batch and x.shape[:1] == (len(batch.rows),) else x.clone()


class Draws(TorchDispatchMode):
    """Sees whether a p-net uses random numbers: an operator reads what another one drew, or they are its output.

    What is drawn and left unread changes nothing (Wav2Vec2 draws for a layer drop that only training looks at).
    """

    def __init__(self) -> None:
        super().__init__()
        self._drawn, self._used = dict[int, torch.UntypedStorage](), False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._used = self.used_in((args, kwargs))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        states = _random_states()
        out = func(*args, **kwargs)
        # Attention has the tag without a dropout too.
        if kwargs.get("generator") is not None or not all(map(torch.equal, states, _random_states())):
            self._drawn |= {s._cdata: s for x in tensors_in(out) for s in storages_of(x)}
        return out

    def used_in(self, out: Any) -> bool:
        """Whether random numbers were used up to here, with what is in this."""
        return self._used or any(s._cdata in self._drawn for x in tensors_in(out) for s in storages_of(x))


def _random_states() -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


class Questions(TorchDispatchMode):
    """Notes what the p-net asks outside of some modules: `any` and `all` of what has the rows first, and numbers.

    Its branches hang on the answers, and a row alone may answer otherwise than its batch. A number of true entries that
    is compared with the number of all is `all`. Numbers that leave torch (`if t > 1`, `t.tolist()`) are for all rows.

    Attributes:
        of_rows: whether each question is of the rows, or a number, in order; given, it says so of the first ones.
        answers: [n_rows + 1] for each: of the rows alone and of the batch.
        leaving: a mode beside this one, which sees what takes numbers out of torch.
    """

    def __init__(self, n_rows: int, modules: Sequence[RowWise], of_rows: Iterable[bool] = ()) -> None:
        super().__init__()
        self.of_rows, self.answers = [*of_rows], list[Tensor]()
        self._n_rows, self._modules = n_rows, modules
        # With the tensors themselves, whose numbers would be used again.
        self._counts: dict[int, tuple[Tensor, Tensor]] = {}
        self.leaving = _Leaving(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        if not any(module.running for module in self._modules):
            self._see(func, args, kwargs or {}, out)
        return out

    def leaves(self, func: Any, x: Tensor) -> None:
        """See the function that takes a tensor's numbers out of torch."""
        if func in _COPYING and not any(module.running for module in self._modules):
            content = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._number(torch.tensor(hash(content.numpy().tobytes()) % 2**52, dtype=torch.float64))

    def _number(self, x: Tensor) -> None:
        self.of_rows += [True] * (len(self.of_rows) <= len(self.answers))
        self.answers.append(x.detach().reshape(1).expand(self._n_rows + 1))

    def _see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        self._asks(func.overloadpacket.__name__, args, out)

    def _asks(self, name: str, args: Any, out: Any) -> bool:
        """Note a question; whether it is of the rows."""
        if name == "_local_scalar_dense":
            self._number(args[0])
            return False
        if isinstance(out, bool):
            # That of `torch.equal`.
            self._number(torch.tensor(out))
        if not isinstance(out, Tensor) or out.numel() != 1 or not args or not isinstance(args[0], Tensor):
            return False
        x = args[0]
        if name == "sum" and x.dtype == torch.bool and x.shape[:1] == (self._n_rows,):
            self._counts[id(out)] = out, x
            return True
        if name == "eq" and id(x) in self._counts and isinstance(args[1], int):
            counted = self._counts[id(x)][1]
            name, x = ("all" if args[1] == counted.numel() else name), counted
        if name not in ("any", "all"):
            return False
        if len(self.of_rows) <= len(self.answers):
            self.of_rows.append(x.shape[:1] == (self._n_rows,))
        batch = out.reshape(1).bool()
        if not self.of_rows[len(self.answers)] or x.shape[:1] != (self._n_rows,):
            self.answers.append(batch.expand(self._n_rows + 1))
            return False
        flat = x.bool().reshape(self._n_rows, math.prod(x.shape[1:]))
        self.answers.append(torch.cat([flat.any(1) if name == "any" else flat.all(1), batch]))
        return True

    def pairs(self, rows: Collection[int]) -> Pairs:
        """What these rows and the batch have answered."""
        *each, batch = torch.stack(self.answers, 1).tolist() if self.answers else [[]]
        return {(tuple(each[b]), tuple(batch)): b for b in reversed([*rows])} if any(self.of_rows) else {}


class RowsTogether(Questions):
    """Finds the operators outside of the modules that run row by row that take the rows of a batch together.

    They read tensors that have the batch's rows, in a dimension or folded into one, and give none that has: sums over
    rows, one row of all, rows by a mask; or they order or add up rows one after the other. So do functions that take
    the numbers of all rows out of torch. What is left out are the questions of code that would spare work.

    Attributes:
        found: the path of the innermost module that ran the first one; None where there is none.
    """

    def __init__(self, n_rows: int, modules: Sequence[RowWise], running: list[str]) -> None:
        super().__init__(n_rows, modules)
        self.found: str | None = None
        self._running = running

    def _see(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if not self._asks(func.overloadpacket.__name__, args, out) and self.found is None:
            read = [x for _, x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            if self._together(func, args, kwargs, read, out):
                self._find()

    def leaves(self, func: Any, x: Tensor) -> None:
        """See it; of the numbers of all rows no operator says what they are for."""
        if id(x) not in self._counts and not self._have_rows(x):
            super().leaves(func, x)
        elif self.found is None and not any(module.running for module in self._modules):
            self._find()

    def _find(self) -> None:
        self.found = self._running[-1] if self._running else ""

    def _together(self, func: Any, args: Any, kwargs: Any, read: list[Tensor], out: Any) -> bool:
        name, given = func.overloadpacket.__name__, [x for x in read if self._have_rows(x)]
        if any(id(x) in self._counts for x in read):
            return True
        if not given:
            return False
        if name in _ALONG:
            arguments = func._schema.arguments
            place = next(i for i, argument in enumerate(arguments) if argument.name in ("dim", "dims"))
            dims = args[place] if place < len(args) else kwargs.get(arguments[place].name, -1)
            dims = [dims] if isinstance(dims, int) else dims or range(given[0].ndim)
            return any(self._is_rows(given[0].shape[dim]) for dim in dims)
        if torch.Tag.dynamic_output_shape in func.tags:
            # Of places given by numbers the outputs are compared.
            return name != "index" or any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        # One answer for all rows, such as that of `torch.equal`.
        if isinstance(out, bool | int | float | complex):
            return True
        made = [x for _, x in tree_leaves(out) if isinstance(x, Tensor) and x.numel()]
        return bool(made) and not (name.startswith("new_") or any(map(self._have_rows, made)))

    def _have_rows(self, x: Tensor) -> bool:
        return any(map(self._is_rows, x.shape))

    def _is_rows(self, size: int) -> bool:
        return size > 0 and size % self._n_rows == 0


class _Leaving(TorchFunctionMode):
    """Shows `Questions` the tensors whose numbers leave torch."""

    def __init__(self, questions: Questions) -> None:
        super().__init__()
        self._questions = questions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _LEAVING:
            self._questions.leaves(func, args[0])
        return func(*args, **kwargs or {})


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
    if isinstance(x, _Object):
        if not all(isinstance(y, _Object) and y.kind is x.kind for y in rows):
            return not strict
        parts = zip(x.parts, *(y.parts for y in rows), strict=False)
        return all(_same(same, part, False, tolerance) for part, *same in parts)
    if not all(isinstance(y, Tensor) for y in (*rows, x)):
        return not strict or all(type(y) is type(x) and (not isinstance(x, PLAIN) or y == x) for y in rows)
    if any(y.shape[:1] != (1,) for y in rows) or x.shape[:1] != (len(rows),):
        return not strict
    if any(y.shape[1:] != x.shape[1:] or y.dtype != x.dtype for y in rows):
        return False
    x, y = (torch.view_as_real(z) if z.is_complex() else z for z in (x, torch.cat(rows)))
    if torch.equal(x, y) or not x.is_floating_point():
        return torch.equal(x, y)
    # Entries of a mask, which are the same in both, may be as large as 1e9.
    largest = float(torch.where(x == y, 0, y).nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(x, y, 0, tolerance * largest, equal_nan=True)


def tolerance_of(tensors: Iterable[Tensor]) -> float:
    """Rounding by another order of sums, relative to the largest entry: 1e-6, 2e-3, and 0.1 in half precision."""
    floating = [x for x in tensors if differentiable(x.dtype)]
    dtypes = {x.dtype for x in floating}
    for device in {x.device.type for x in floating}:
        dtypes |= {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0) ** 0.4
