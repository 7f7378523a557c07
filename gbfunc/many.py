"""Many genomes of one plan at once: a batch in which every row has its genome.

x [B, ...] --shared modules--> --vmap(module)(tensors[index], rows)--> ... --> y [B, ...]
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gbfunc.base import BaseTensors
from gbfunc.generation import make_generator, to_serve
from gbfunc.genome import check_genome, check_plan
from gbfunc.layers.attention import attention_forward
from gbfunc.layers.forms import WeightForm
from gbfunc.layers.install import layer_form
from gbfunc.plan import DTYPES, Plan
from gbfunc.pnet.describe import buffers_of, named_tensors, parameter_infos, skeleton_of, with_weights
from gbfunc.pnet.pure import PureNet
from gbfunc.trees import differentiable, flat_genome, tree_leaves, tree_map
from gbfunc.types import GenomeLike, Params

Self = TypeVar("Self", bound="ManyGenomes")

_PLAIN = (bool, int, float, complex, str, bytes, Enum, type(None), torch.dtype, torch.device)
"""Inputs and outputs beside tensors: values that all rows share."""


class RowWise:
    """A module of the p-net under `vmap`: row `b` of its inputs with entry `b` of the tensors in `varying`."""

    tensors: tuple[Params, int]  # all tensors of the p-net, by name, and the number of rows; set before each call

    def __init__(self, pnet: nn.Module, path: str, forms: Mapping[str, WeightForm], varying: Collection[str]) -> None:
        module, prefix = pnet.get_submodule(path), f"{path}." if path else ""
        # Where a tensor is tied, the p-net has it under its first name.
        first = {name: info.name for info in parameter_infos(pnet) for name in (info.name, *info.aliases)}
        own = {info.name: first[f"{prefix}{info.name}"] for info in parameter_infos(module)}
        mine = {name: forms[there].renamed(name) for name, there in own.items() if there in forms}
        self.path, self._net = path, PureNet(module, mine, prepare)
        # Names in the p-net by name in the module.
        self._weights = {k: v for k, v in own.items() if k not in mine}
        for k, form in mine.items():
            self._weights |= zip(form.keys, forms[own[k]].keys, strict=True)
        self._buffers = {name: f"{prefix}{name}" for name in buffers_of(module)}
        self._varying = [name for name, there in (self._weights | self._buffers).items() if there in varying]

    def install(self, skeleton: nn.Module) -> None:
        """Take the place of the module's forward."""
        module = skeleton.get_submodule(self.path)
        object.__setattr__(module, "forward", self)
        # The hooks are called for each row, inside.
        for name in vars(nn.Module()):
            if name.endswith("_hooks"):
                vars(module)[name].clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs, row by row."""
        tensors, n_rows = self.tensors
        everything = {k: tensors[v] for k, v in (self._weights | self._buffers).items()}
        inputs = [x for _, x in tree_leaves((args, kwargs))]
        split = [self._has_rows(x, n_rows) for x in inputs]
        template: Any = None

        def row(mine: Params, rows: list[Tensor]) -> tuple[Tensor, ...]:
            nonlocal template
            each, flags = iter(rows), iter(split)
            a, k = tree_map(lambda x: next(each)[None] if next(flags) else x, (args, kwargs))
            here = everything | mine
            template = self._net(*({n: here[n] for n in names} for names in (self._weights, self._buffers)), *a, **k)
            return tuple(x[0] for _, x in tree_leaves(template) if isinstance(x, Tensor))

        given = [x for x, of_rows in zip(inputs, split, strict=True) if of_rows]
        # The fused attention of CPUs has no batching rule.
        with sdpa_kernel(SDPBackend.MATH):
            made = vmap(row, randomness="different")({k: everything[k] for k in self._varying}, given)
        for at, x in tree_leaves(template, "output"):
            if not isinstance(x, (Tensor, *_PLAIN)) and not callable(x):
                raise ValueError(f"{self.path!r} has a {type(x).__name__} as {at}, which is that of one row")
        left = iter(made)
        return tree_map(lambda x: next(left) if isinstance(x, Tensor) else x, template)

    def _has_rows(self, x: Any, n_rows: int) -> bool:
        if not isinstance(x, (Tensor, *_PLAIN)) and not callable(x):
            raise ValueError(f"{self.path!r} has a {type(x).__name__} as input, whose rows are not known")
        if not isinstance(x, Tensor) or x.ndim == 0:
            return False
        # Inside of the p-net another first dimension equals the number of rows in some batches and not in others.
        if self.path and len(x) != n_rows and (len(x) != 1 or x.ndim == 1):
            raise ValueError(f"{self.path!r} has an input of shape {tuple(x.shape)} for {n_rows} rows")
        return len(x) == n_rows


def prepare(net: nn.Module) -> list[str]:
    """Set eval mode, and let torch's encoders call their layers: their fused forward has no batching rule."""
    for module in net.eval().modules():
        if isinstance(module, nn.MultiheadAttention) and layer_form(module):
            object.__setattr__(module, "forward", partial(attention_forward, module))
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return []


class _Frame(NamedTuple):
    plan: Plan
    pnet: nn.Module
    base: BaseTensors | None
    forms: dict[str, WeightForm]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Frame:
        return self  # Nothing writes to it.


class _Way(NamedTuple):
    net: PureNet
    modules: list[RowWise]  # that run row by row; without them, rows run one by one


class ManyGenomes(nn.Module):
    """A module for many genomes of a plan, each row of a batch with its genome: to serve, compare or ensemble them.

    Row b of `net(index, x)` is `net(x[b : b + 1])` on genome `index[b]`, in eval mode. Shared tensors are used once for
    the batch: a base's, and tensors that are equal in all genomes. Factors stay factors. Modules with tensors that
    differ run under `torch.func.vmap`; the p-net around them runs once for the batch, and must not mix rows. Gradients
    reach the inputs, not the genomes.

    At the first call of each kind (structure, dtypes and shapes of the inputs without the number of rows), a few rows
    with different genomes are computed one by one as well. Where they differ from a batch of them, the p-net as a whole
    runs under `vmap`; where that fails or differs too, rows run one by one, with a warning.

    Torch's fused encoders (`nn.TransformerEncoder` in eval mode without gradients) are not used: at padded positions of
    `src_key_padding_mask`, where fused encoders may give zeros, outputs follow the layers' own forward.

    The genomes are on one device; all are generated now. `to` moves or casts the tensors, a base's too. `pnet` is the
    plan's p-net or base, which must not change while the module is used. Raises `ValueError` if genomes, plan and p-net
    do not fit together.

    Attributes:
        row_wise: paths of the modules that ran under `vmap` in the last batch; before the first batch, of the modules
            that hold tensors in which genomes differ. "" is the p-net itself; none: rows ran one by one.

    >>> import gbfunc as gb
    >>> pnet = nn.Linear(30, 20)
    >>> plan = gb.make_plan(pnet, gb.periodic(features=2))
    >>> genomes = [gb.init_genome(plan, pnet, seed) for seed in range(5)]
    >>> net = gb.materialize_many(plan, genomes, pnet)
    >>> net(torch.tensor([3, 0, 3]), torch.ones(3, 30)).shape
    torch.Size([3, 20])
    """

    def __init__(self, plan: Plan, genomes: Sequence[GenomeLike], pnet: nn.Module) -> None:
        super().__init__()
        _check_genomes(plan, genomes, pnet)
        base = plan.base_tensors(pnet)
        generator = make_generator(plan, pnet=pnet, lazy=True, base=base)
        with torch.no_grad():
            served = [to_serve(plan, generator, generator(flat_genome(genome))) for genome in genomes]
        self._frame, self.n_genomes = _Frame(plan, skeleton_of(pnet), base, served[0][1]), len(genomes)
        given = [weights | inputs for weights, _, inputs in served]
        tensors = {k: [x[k] for x in given] for k in given[0]}
        buffers = {b.name: [g.buffers[b.name].detach() for g in genomes] for b in plan.buffers}
        self._weights, self._buffers_of, self._rows = [*tensors], [*buffers], set[str]()
        for i, (key, values) in enumerate((tensors | buffers).items()):
            shared = all(x is values[0] or torch.equal(x, values[0]) for x in values[1:])
            self._rows |= set() if shared else {key}
            self.register_buffer(f"tensor_{i}", values[0] if shared else torch.stack(values), persistent=False)
        names = (name.partition(".parametrizations.")[0] for key in self._rows for name in self._names(key))
        self.row_wise = self._owners = _outermost(name.rpartition(".")[0] for name in names)
        self._build()

    def _build(self) -> None:
        self._lock, self._way = threading.RLock(), cache(self._make_way)
        self._known: dict[Any, _Way] = {}  # by kind of call

    def _apply(self: Self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self._frame.base is not None and (base := self._frame.base.cast(fn)) is not None:
            self._frame = self._frame._replace(base=base)
            self._build()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {k: x for k, x in self.__dict__.items() if k not in ("_lock", "_known", "_way")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._build()

    def _names(self, key: str) -> list[str]:
        for tensor in self._frame.plan.tensors:
            if key == tensor.name or key.startswith(f"{tensor.name}_form."):
                return [tensor.name, *tensor.aliases]
        return [key]

    def _make_way(self, paths: tuple[str, ...]) -> _Way:
        _, pnet, base, forms = self._frame
        modules = [RowWise(pnet, path, forms, self._rows) for path in paths]

        def adapt(skeleton: nn.Module) -> list[str]:
            prepare(skeleton)
            for module in modules:
                module.install(skeleton)
            # Tensors that vary have one dimension more.
            return [key for key in self._rows if key in self._weights] if modules else []

        return _Way(PureNet(pnet, forms, adapt, base), modules)

    def forward(self, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The p-net's outputs: row b is `net(x[b : b + 1])` on genome `index[b]`, with `index` int64 [B].

        Inputs whose first dimension is B have a row each; other inputs are for all rows.

        Raises:
            TypeError: if the index is not an int64 tensor, or an input or output is neither a tensor nor a plain value.
            ValueError: if it is not [B], names a genome that there is not, no input has B rows, or some output has not.
        """
        # A graph would not be compared at its first call.
        call: Any = torch.compiler.disable(self._call) if torch.compiler.is_dynamo_compiling() else self._call
        return call(index, *args, **kwargs)

    def _call(self, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs = tree_leaves((args, kwargs), "inputs")
        split = self._check(index, inputs)
        keys = [*self._weights, *self._buffers_of]
        stored = {key: self.get_buffer(f"tensor_{i}") for i, key in enumerate(keys)}
        with self._lock:
            if len(index) == 1:
                return _checked(self._alone(stored, index, 0, args, kwargs, split), 1, one=True)
            autocast = [torch.is_autocast_enabled(kind) for kind in {x.device.type for x in stored.values()}]
            kind = (*autocast, *map(_kind, inputs, split))
            if kind not in self._known:
                self._known[kind] = self._first(stored, *self._trial(index, args, kwargs, split), split)
            way = self._known[kind]
            self.row_wise = [module.path for module in way.modules]
            if not way.modules and self._rows:
                alone = (self._alone(stored, index, b, args, kwargs, split) for b in range(len(index)))
                each = [_checked(out, 1, one=True) for out in alone]
                tensors = ([x for _, x in tree_leaves(out) if isinstance(x, Tensor)] for out in each)
                joined = iter([torch.cat(rows) for rows in zip(*tensors, strict=True)])
                return tree_map(lambda x: next(joined) if isinstance(x, Tensor) else x, each[0])
            return _checked(self._together(way, stored, index, args, kwargs), len(index), one=self.row_wise == [""])

    def _trial(self, index: Tensor, args: Any, kwargs: Any, split: list[bool]) -> tuple[Tensor, Any, Any]:
        """Rows of a batch in another order, each with another genome: as many as no dimension of the inputs has."""
        sizes = {size for x in _tensors((args, kwargs)) for size in x.shape}
        n = next(n for n in (5, 7, 11, 13, 17, *range(19, 9999)) if n not in sizes)
        numbers = torch.arange(n, device="cpu")
        return (numbers + 1) % self.n_genomes, *_cut((len(index) - 1 - numbers) % len(index), args, kwargs, split)

    def _first(self, stored: Params, index: Tensor, args: Any, kwargs: Any, split: list[bool]) -> _Way:
        """The first way in which each row has the outputs of a batch of one."""
        alone = [_checked(self._alone(stored, index, b, args, kwargs, split), 1) for b in range(len(index))]
        expected, reason = [_tensors(out) for out in alone], ""
        tolerance = _tolerance((*stored.values(), *_tensors((args, kwargs)), *expected[0]))
        for paths in dict.fromkeys((tuple(self._owners), ("",) if self._rows else ())):
            _checked(alone[0], 1, one=paths == ("",))
            try:
                out = self._together(self._way(paths), stored, index, args, kwargs)
            except Exception as error:  # A module may raise anything inside of vmap.
                reason = str(error).partition("\n")[0]
                continue
            found = _tensors(_checked(out, len(index)))
            if all(_same([x[b : b + 1] for x in found], own, tolerance) for b, own in enumerate(expected)):
                return self._way(paths)
            reason = "a batch gives other outputs than its rows"
        warnings.warn(f"rows run one by one, as vmap cannot run the p-net: {reason}", stacklevel=5)
        return self._way(())

    def _together(self, way: _Way, stored: Params, index: Tensor, args: Any, kwargs: Any) -> Any:
        tensors = self._taken(stored, index)
        frozen = {} if self._frame.base is None else self._frame.base.on(next(iter(stored.values())).device)[1]
        for module in way.modules:
            module.tensors = tensors | frozen, len(index)
        weights, buffers = ({k: tensors[k] for k in keys} for keys in (self._weights, self._buffers_of))
        return way.net(weights, buffers, *args, **kwargs)

    def _alone(self, stored: Params, index: Tensor, b: int, args: Any, kwargs: Any, split: list[bool]) -> Any:
        args, kwargs = _cut(torch.tensor([b], device="cpu"), args, kwargs, split)
        tensors = self._taken(stored, index[b])
        weights = {k: tensors[k] for k in self._weights}
        return self._way(()).net(weights, {k: tensors[k].clone() for k in self._buffers_of}, *args, **kwargs)

    def _taken(self, stored: Params, index: Tensor) -> Params:
        return {key: x[index.to(x.device)] if key in self._rows else x for key, x in stored.items()}

    def _check(self, index: Tensor, inputs: list[tuple[str, Any]]) -> list[bool]:
        if not isinstance(index, Tensor) or index.dtype != torch.int64:
            got = str(index.dtype) if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"index must be an int64 tensor [B] of genomes' numbers, got {got}")
        if index.ndim != 1 or not len(index):
            raise ValueError(f"index must have shape [B] with B >= 1, got {tuple(index.shape)}")
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= self.n_genomes:
            raise ValueError(f"index must be within 0 .. {self.n_genomes - 1}, got {low} .. {high}")
        for at, x in inputs:
            if not isinstance(x, (Tensor, *_PLAIN)):
                raise TypeError(f"{at} is a {type(x).__name__}: inputs must be tensors and plain values")
        split = [isinstance(x, Tensor) and x.shape[:1] == index.shape for _, x in inputs]
        if not any(split):
            shapes = [tuple(x.shape) for _, x in inputs if isinstance(x, Tensor)]
            raise ValueError(f"index has {len(index)} rows, and no input has: their shapes are {shapes}")
        return split


def _kind(named: tuple[str, Any], has_rows: bool) -> Any:
    at, x = named
    return (at, has_rows, x.dtype, x.shape[has_rows:]) if isinstance(x, Tensor) else (at, type(x), x)


def _checked(out: Any, n_rows: int, one: bool = False) -> Any:
    """An output; ValueError if a tensor has not this many rows, TypeError for an object of `one` row of several."""
    for at, x in tree_leaves(out, "output"):
        if isinstance(x, Tensor) and x.shape[:1] != (n_rows,):
            got = f"{at} of {n_rows} {'row' if n_rows == 1 else 'rows'} has shape {tuple(x.shape)}"
            raise ValueError(f"{got}, and batches must come first: leave it out (a loss: call without labels)")
        if one and not isinstance(x, (Tensor, *_PLAIN)):
            raise TypeError(f"{at} is a {type(x).__name__}, of one row: switch it off (a cache: use_cache=False)")
    return out


def _cut(rows: Tensor, args: Any, kwargs: Any, split: list[bool]) -> tuple[Any, Any]:
    flags = iter(split)
    return tree_map(lambda x: x[rows.to(x.device)] if next(flags) else x, (args, kwargs))


def _tensors(tree: Any) -> list[Tensor]:
    return [x.detach() for _, x in tree_leaves(tree) if isinstance(x, Tensor)]


def _tolerance(tensors: Iterable[Tensor]) -> float:
    """Rounding by another order of sums, relative to the largest entry: 1e-6, 2e-3, and 0.1 in half precision."""
    floating = [x for x in tensors if differentiable(x.dtype)]
    dtypes = {x.dtype for x in floating}
    for device in {x.device.type for x in floating}:
        dtypes |= {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0) ** 0.4


def _same(found: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in expected]:
        return False
    for x, y in zip(found, expected, strict=True):
        # Entries of a mask, which are the same in both, may be as large as 1e9.
        largest = float(torch.where(x == y, 0, y).nan_to_num(0, 0, 0).abs().max()) if x.numel() else 0.0
        if not torch.equal(x, y) and not torch.allclose(x, y, 0, tolerance * largest, equal_nan=True):
            return False
    return True


def _outermost(paths: Iterable[str]) -> list[str]:
    given = sorted({*paths})
    return [p for p in given if not any(p != other and f"{p}.".startswith(other and f"{other}.") for other in given)]


materialize_many = ManyGenomes


def _check_genomes(plan: Plan, genomes: Sequence[GenomeLike], pnet: nn.Module) -> None:
    check_plan(plan, pnet)
    if not len(genomes):
        raise ValueError("expected at least one genome, got none")
    for genome in genomes:
        check_genome(plan, genome)


def merge_genomes(
    plan: Plan, genomes: Sequence[GenomeLike], pnet: nn.Module, weights: Sequence[float] | None = None
) -> nn.Module:
    """A plain module whose tensors are weighted sums of those of several genomes: their mean, or between two of them.

    With W_i the tensors that genome i gives and a_i its weight, the module has `sum_i a_i W_i`, and with a base, whose
    tensors (and present heads) are W_0, `W_0 + sum_i a_i (W_i - W_0)`: tasks are added up, or with a negative weight
    taken away (Ilharco et al. 2023, task arithmetic). Sums of genomes would be something else, since g-nets are not
    linear. The module is `materialize`'s for a single genome; to switch or to undo, materialise another genome, or use
    the base, which is not changed.

    `pnet` is the plan's p-net or base, which is not changed, and `weights` has a finite number for each genome; None
    is the mean. Raises `ValueError` if genomes, plan, p-net and weights do not fit together.
    """
    _check_genomes(plan, genomes, pnet)
    if beside := [t.name for t in plan.tensors if t.kind == "beside"]:
        words = "stay beside layers that hide their weight, and cannot be summed with it"
        raise ValueError(f"{', '.join(beside)} {words}: gb.materialize_many serves several genomes")
    shares = [1 / len(genomes)] * len(genomes) if weights is None else [float(a) for a in weights]
    if len(shares) != len(genomes) or not all(math.isfinite(a) for a in shares):
        raise ValueError(f"expected {len(genomes)} finite weights, one for each genome, got {weights}")
    base = plan.base_tensors(pnet)
    generator = make_generator(plan, base=base)
    with torch.no_grad():
        made = [generator(flat_genome(genome)) for genome in genomes]
    present = {} if base is None else dict(named_tensors(pnet))
    first = max(range(len(shares)), key=lambda i: shares[i])

    def summed(name: str, values: list[Tensor], dtype: torch.dtype) -> Tensor:
        # Counters are not for sums.
        if not differentiable(dtype) or len(values) == 1 == shares[0]:
            return values[first].to(dtype)
        wide = [x.detach().to(torch.complex128 if dtype.is_complex else torch.float64) for x in values]
        start = present[name].detach().to(wide[0]) if name in present else wide[0].new_zeros(())
        total = sum((a * (x - start) for a, x in zip(shares, wide, strict=True)), start)
        return torch.as_tensor(total).to(dtype)

    tensors = {name: made[0][name] for name in generator.unchanged}
    tensors |= {t.name: summed(t.name, [x[t.name] for x in made], DTYPES[t.dtype]) for t in plan.tensors}
    buffers = {b.name: summed(b.name, [g.buffers[b.name] for g in genomes], DTYPES[b.dtype]) for b in plan.buffers}
    buffers |= {} if base is None else base.on(next(iter(tensors.values())).device)[1]
    return with_weights(pnet, tensors, buffers)
