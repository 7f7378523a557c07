"""Applies many genomes of one p-net or base in a single batch: each row of the batch may use a different genome.

Modules whose weights are equal in all genomes run once per batch. Other linear layers use a pair of factors per row.
All other modules run under `vmap`, whose batch dimension is the rows.

Suffixes: B rows of the batch, N genomes, L tokens of the longest text, T tokens of a prompt.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.base import BaseTensors
from gbfunc.generation import Generator, make_generator, to_serve
from gbfunc.hypernets.ensemble import Evaluation
from gbfunc.hypernets.periodic import Bilinear
from gbfunc.layers.factored import FactoredWeight, RowFactors
from gbfunc.layers.forms import WeightForm
from gbfunc.many.merge import check_genomes
from gbfunc.many.rows import PLAIN, RowWise, joined, unfused
from gbfunc.many.text import generate_rows
from gbfunc.plan import Plan, TensorPlan
from gbfunc.pnet.describe import skeleton_of
from gbfunc.pnet.pure import PureNet
from gbfunc.trees import BUFFERS, GNET, differentiable, flat_genome, flatten_tree, tree_leaves, tree_map
from gbfunc.types import DTYPES, GenomeLike, Params, dtype_name

Self = TypeVar("Self", bound="ManyGenomes")
_LINEAR = ("linear", "transposed_linear", "beside")
_TRANSIENT = ("_lock", "_known", "_mode", "_generators", "_grown", "_last")


class _Frame(NamedTuple):
    pnet: nn.Module  # a copy on the meta device
    plans: list[Plan]
    bases: list[BaseTensors | None]  # one per plan
    base: BaseTensors | None  # the tensors that are part of the base in every plan
    tensors: dict[str, TensorPlan]  # the generated and direct tensors of all plans, by name
    buffers: list[str]  # names of the buffers of all plans
    forms: dict[str, WeightForm]  # how layers use weights, by the weight's name or tied name

    def __deepcopy__(self, memo: dict[int, Any]) -> _Frame:
        return self  # A copy is the same object, because a frame never changes.

    @staticmethod
    def of(plans: list[Plan], pnet: nn.Module, stacks: Sequence[Params]) -> _Frame:
        """Choose how layers use each weight: as factors if all plans have factors for the weight, otherwise dense.

        `stacks` has the result of `stacked_genomes` per plan. ValueError if only some of the plans have a base.
        """
        bases = [plan.base_tensors(pnet) for plan in plans]
        if None in bases and any(bases):
            raise ValueError("expected plans that all have a base, or none, got both: make one module for each kind")
        tensors = {t.name: t for plan in plans for t in plan.tensors}
        buffers = dict.fromkeys(b.name for plan in plans for b in plan.buffers)
        new = {t.name for plan in plans for t in plan.tensors if not t.base} | buffers.keys()
        base = None if bases[0] is None else BaseTensors(pnet, new)
        frame = _Frame(skeleton_of(pnet), plans, bases, base, tensors, [*buffers], {})
        firsts = ({name: x[0] for name, x in stack.items()} for stack in stacks)
        served = [frame.serve(kind, frame.generator(kind), genome)[1] for kind, genome in enumerate(firsts)]
        names = [{t.name for t in plan.tensors} for plan in plans]
        for name, t in tensors.items():
            own = [of.get(name) for of, has in zip(served, names, strict=True) if name in has]
            factored = [form for form in own if isinstance(form, FactoredWeight)]
            rank, linear = max((form.rank for form in factored), default=0), t.kind in _LINEAR and own == factored
            if linear and (t.kind == "beside" or rank * sum(t.shape) < t.numel):
                frame.forms.update(dict.fromkeys((name, *t.aliases), RowFactors(factored[0], rank)))
            elif own[0] is not None and len(plans) == 1:
                frame.forms.update(dict.fromkeys((name, *t.aliases), own[0]))
        return frame

    def generator(self, kind: int) -> Generator:
        return make_generator(self.plans[kind], pnet=self.pnet, lazy=True, base=self.bases[kind])

    @torch.no_grad()
    def serve(self, kind: int, generator: Generator, genome: Params) -> tuple[Params, dict[str, WeightForm], Params]:
        return to_serve(self.plans[kind], generator, generator(genome))

    def varying(self, stacks: Sequence[Params]) -> set[str]:
        """Return the keys of the tensors in which genomes differ. With several plans, this includes all tensors."""
        leaves = {k for k, x in stacks[0].items() if x.stride(0) and len(x) > 1}
        (plan, *others), names = self.plans, {k.partition("/")[2] for k in leaves}
        for e in plan.ensembles:
            if any(f"{GNET}{e.name}/{k}" in leaves for k in e.leaves):
                names |= {plan.tensors[span.tensor].name for span in e.spans}
        found = {*self.tensors, *self.buffers} & (names if not others else {*self.tensors, *self.buffers})
        forms = {form.name: form for form in self.forms.values()}
        keys = {k for name in found for k in (forms[name].keys if name in forms else (name,))}
        return keys.difference(*(form.frozen for form in forms.values()))

    def grow(self, kind: int, generator: Generator, genome: Params) -> Params:
        """Generate the tensors in which genomes may differ. Take buffers from the dict `genome`, or from the base."""
        plan, base, grown = self.plans[kind], self.bases[kind], Params()
        like = torch.empty(0, dtype=plan.dtype, device=next(iter(genome.values())).device)
        others = {} if base is None else dict(item for part in base.on(like.device) for item in part.items())
        sides, padded = _sides(plan, generator, genome), dict[Any, tuple[Any, Tensor]]()
        apart = [
            t.name for t in plan.tensors if not (t.name in sides and isinstance(self.forms.get(t.name), RowFactors))
        ]
        weights, own, inputs = self.serve(kind, generator, genome) if apart else ({}, {}, {})

        def fit(x: Tensor | None, size: tuple[int, int]) -> Tensor:
            # Cache padded factors, so that layers which share a factor also share the padded copy of the factor.
            new = like.new_zeros(size) if x is None else F.pad(x, (0, size[1] - x.shape[1], 0, size[0] - x.shape[0]))
            return padded.setdefault((id(x), size), (x, new))[1]

        for name in self.tensors:
            form, taken = self.forms.get(name), own[name].taken(inputs) if name in own else {}
            if isinstance(form, RowFactors):
                factors = sides.get(name) or (
                    form.of_tiles(cast(FactoredWeight, own[name]), taken) if taken else (None,) * 3
                )
                taken = {k: fit(x, size) for k, x, size in zip(form.inputs, factors, form.sizes, strict=False)}
            if form is None:
                weight = own[name].make(taken) if taken else weights.get(name)
                grown[name] = others[name] if weight is None else weight
            else:
                grown |= {k: taken[x] for x, k in zip(form.inputs, form.keys, strict=True) if k not in form.frozen}
        return grown | {k: genome[of] if (of := f"{BUFFERS}{k}") in genome else others[k] for k in self.buffers}


def _sides(plan: Plan, generator: Generator, genome: Params) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """Return {name: (L, M, R)} of bilinear weights L M R^T with one tile. Weights may have the same tensors L and R."""
    factors = {}
    for stack in generator.stacks:
        e, leaves = stack.ensemble, {k: genome[name] for k, name in stack.names.items()}
        c = stack.constants(leaves["mix"].dtype, leaves["mix"].device) if isinstance(e.hypernet, Bilinear) else None
        if c is None or c.scale is None or len(leaves) < 3 or len(c.row) + len(c.col) > 2:
            continue
        unmixed = torch.eye(e.hypernet.factor_width).to(leaves["mix"]).expand(len(leaves["row_weight"]), -1, -1)
        sides = Evaluation(c._replace(scale=None, groups=None), leaves | {"mix": unmixed}).tiles()
        left, right = (x.unbind() for x in sides)
        mix_T = leaves["mix"] * c.scale[:, None, None]
        for span in e.spans:
            tensor, group = plan.tensors[span.tensor], e.groups[span.first]
            if len(tensor.slots) == span.slot.grid.n_tiles == 1:
                factors[tensor.name] = left[group], mix_T[span.first], right[group]
    return factors


class _Mode(NamedTuple):
    net: PureNet
    modules: list[RowWise]
    paths: list[str]  # modules that run as `RowWise`; empty if the p-net is called for each row


class _Call(NamedTuple):
    args: Any
    kwargs: Any
    split: list[bool]  # per input: True if its first dimension is the batch
    use: Callable[..., Any] = lambda net, rows, *args, **kwargs: net(*args, **kwargs)

    def of(self, rows: Tensor) -> _Call:
        return _Call(*cut(rows, self.args, self.kwargs, self.split), self.split, self.use)


class ManyGenomes(nn.Module):
    """A module that applies a different genome to each row of a batch, made by `materialize_many`.

    Attributes:
        n_genomes: the number of genomes.
        row_wise: paths of the modules that computed the last batch under `vmap` or with factors for each row. Before
            the first batch, the list has the modules in which genomes differ. "" is the p-net itself. The list is empty
            if the p-net was called once for each row.
    """

    def __init__(
        self, plans: Sequence[Plan], genomes: Sequence[GenomeLike], pnet: nn.Module, grown: int | None
    ) -> None:
        super().__init__()
        by_id = {id(plan): plan for plan in plans}
        kinds = [*dict.fromkeys(by_id.values())]
        numbers = {key: kinds.index(plan) for key, plan in by_id.items()}
        self._kinds, self.n_genomes, self._most = [numbers[id(plan)] for plan in plans], len(genomes), grown
        groups = [[i for i, own in enumerate(self._kinds) if own == kind] for kind in range(len(kinds))]
        self._places = {i: n for own in groups for n, i in enumerate(own)}
        for plan, own in zip(kinds, groups, strict=True):
            check_genomes(plan, [genomes[i] for i in own], pnet)
        self._stacks = [stacked_genomes([genomes[i] for i in own]) for own in groups]
        self._frame = _Frame.of(kinds, pnet, self._stacks)
        self._rows = self._frame.varying(self._stacks)
        base, frozen = self._frame.base, [key for form in self._frame.forms.values() for key in form.frozen]
        tensors = {} if base is None else {k: x for k, x in base.params.items() if k not in self._frame.tensors}
        tensors |= {} if base is None else {key: base.params[key.rpartition("_form.")[0]] for key in frozen}
        self._keys = [*tensors]
        for i, x in enumerate(tensors.values()):
            self.register_buffer(f"tensor_{i}", x, persistent=False)
        # Empty buffers, one per dtype, so that `to` also determines the device and dtype of generated tensors.
        for dtype in {DTYPES[x.dtype] for plan in kinds for x in (*plan.tensors, *plan.buffers)} | {kinds[0].dtype}:
            like = next(x for stack in self._stacks for x in stack.values())
            self.register_buffer(f"like_{dtype_name(dtype)}", like.new_empty(0, dtype=dtype), persistent=False)
        owners, direct = set[str](), set[str]()
        for name in (name for key in self._rows for name in self._names(key)):
            path = name.partition(".parametrizations.")[0].rpartition(".")[0]
            (direct if isinstance(self._frame.forms.get(name), RowFactors) else owners).add(path)
        self._owners = outermost(owners)
        self.row_wise = self._paths = outermost(owners | direct)
        self._build()

    def _build(self) -> None:
        self._lock, self._mode = threading.RLock(), cache(self._make_mode)
        self._known: dict[Any, _Mode] = {}  # {structure of inputs (`_kind`): mode whose batches agree with single rows}
        self._generators, self._grown = cache(self._frame.generator), lru_cache(self._most)(self._grow)
        self._last: tuple[Any, Params] = None, {}  # the last batch: numbers of its genomes, and their tensors

    def _apply(self: Self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self._frame.base is not None and (base := self._frame.base.cast(fn)) is not None:
            self._frame = self._frame._replace(base=base)
        self._build()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {k: x for k, x in self.__dict__.items() if k not in _TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._build()

    def _names(self, key: str) -> list[str]:
        tensor = self._frame.tensors.get(key.partition("_form.")[0])
        return [key] if tensor is None else [tensor.name, *tensor.aliases]

    def _make_mode(self, paths: tuple[str, ...] | None) -> _Mode:
        frame = self._frame
        modules = [RowWise(frame.pnet, path, frame.forms, self._rows) for path in paths or ()]

        def adapt(skeleton: nn.Module) -> list[str]:
            unfused(skeleton.eval())
            for module in modules:
                module.install(skeleton)
            # Do not check the shapes of tensors in which genomes differ, which have an additional dimension of rows.
            return [*self._rows] if modules else []

        # If no module runs under `vmap`, the net for single rows also computes batches.
        net = self._mode(None).net if paths == () else PureNet(frame.pnet, frame.forms, adapt, frame.base)
        return _Mode(net, modules, [] if paths is None else [*paths] if paths == ("",) else self._paths)

    def forward(self, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the p-net's outputs: row b is `net(x[b : b + 1])` with genome `index[b]`. `index` is int64 [B].

        Inputs with first dimension B are divided into rows. Inputs of any other shape go to every row unchanged.

        Raises:
            TypeError: if the index is not an int64 tensor, or if inputs or outputs contain an object, such as a cache,
                that is neither a tensor nor a number, text, dtype or device.
            ValueError: if the index is not [B] or out of range, if no input has B rows, or some output does not.
        """
        # Do not compile: a compiled graph would skip the first call's comparison with single rows.
        call: Any = torch.compiler.disable(self._call) if torch.compiler.is_dynamo_compiling() else self._call
        return call(index, args, kwargs)

    def generate(self, index: Tensor, tokens: Tensor, *, seeds: Sequence[int] | None = None, **options: Any) -> Tensor:
        """Generate tokens [B, L] by the p-net's `generate` (transformers), with a cache. Row b uses genome `index[b]`.

        Args:
            index: numbers of the genomes, int64 [B].
            tokens: prompts [B, T], which have equal lengths or are padded on the left.
            seeds: one seed per row, for `do_sample=True`. Row b then draws the same tokens as a call for row b alone
                after `torch.manual_seed(seeds[b])`. Without seeds, all rows draw from torch's default generator.
            options: options of `generate`, such as `attention_mask`, `max_new_tokens`, `do_sample` or `temperature`.
                The result has one sequence per row.

        Raises:
            ValueError: if the p-net has no `generate` or cannot run rows as a batch, if options ask for several
                sequences per row, or if the number of seeds is not B. Also the errors of `forward`.
        """
        beams = {k: n for k in ("num_beams", "num_return_sequences") if (n := options.get(k) or 1) != 1}
        if beams or not hasattr(self._frame.pnet, "generate"):
            raise ValueError(f"expected a p-net with generate, and one sequence per row, got {beams or 'no generate'}")
        if seeds is not None and len(seeds) != len(index):
            raise ValueError(f"expected a seed for each of {len(index)} rows, got {len(seeds)}")
        masks = {k: options.pop(k) for k in ("attention_mask",) if k in options}
        return self._call(index, (tokens,), {"use_cache": False, **masks}, partial(generate_rows, seeds, options))

    def _call(self, index: Tensor, args: Any, kwargs: Any, *use: Callable[..., Any]) -> Any:
        inputs = tree_leaves((args, kwargs), "inputs")
        call = _Call(args, kwargs, check_call(index, self.n_genomes, inputs), *use)
        with self._lock:
            if len(index) == 1:
                return _checked(self._alone(index, 0, call), 1, plain=True)
            autocast = [torch.is_autocast_enabled(kind) for kind in {x.device.type for x in self.buffers()}]
            kind = (*autocast, *map(_kind, inputs, call.split))
            if kind not in self._known:
                self._known[kind] = self._first(*self._trial(index, call))
            mode = self._known[kind]
            self.row_wise, entire = mode.paths, mode.paths == [""]
            if use and self._rows and (entire or not mode.paths):
                raise ValueError("expected a p-net that can run rows as a batch, got another: use gb.materialize")
            if self._rows and not mode.paths:
                each = [_checked(self._alone(index, b, call), 1, plain=True) for b in range(len(index))]
                return joined(each, torch.arange(len(each), device="cpu"))
            return _checked(self._together(mode, index, call), len(index), plain=entire)

    def _trial(self, index: Tensor, call: _Call) -> tuple[Tensor, _Call]:
        sizes = {size for x in _tensors((call.args, call.kwargs)) for size in x.shape}
        n = next(n for n in (5, 7, 11, 13, 17, *range(19, 9999)) if n not in sizes)
        numbers = torch.arange(n, device="cpu")
        rows = call.of((len(index) - 1 - numbers) % len(index))
        return (numbers + 1) % self.n_genomes, _Call(rows.args, rows.kwargs, rows.split)

    def _first(self, index: Tensor, call: _Call) -> _Mode:
        alone = [_checked(self._alone(index, b, call), 1) for b in range(len(index))]
        expected, reason = [_tensors(out) for out in alone], ""
        tolerance = _tolerance((*self.buffers(), *_tensors((call.args, call.kwargs)), *expected[0]))
        for paths in dict.fromkeys((tuple(self._owners), ("",) if self._rows else ())):
            _checked(alone[0], 1, plain=paths == ("",))
            try:
                out = self._together(self._mode(paths), index, call)
            except Exception as error:  # A module may raise any error inside of vmap.
                reason = str(error).partition("\n")[0]
                continue
            found = _tensors(_checked(out, len(index)))
            if all(_same([x[b : b + 1] for x in found], own, tolerance) for b, own in enumerate(expected)):
                return self._mode(paths)
            reason = "a batch gives other outputs than its rows"
        warnings.warn(f"rows run one by one, as vmap cannot run the p-net: {reason}", stacklevel=5)
        return self._mode(None)

    def _together(self, mode: _Mode, index: Tensor, call: _Call) -> Any:
        tensors = self._taken(index)
        frozen = {} if self._frame.base is None else self._frame.base.on(next(self.buffers()).device)[1]
        for module in mode.modules:
            module.tensors = tensors | frozen, len(index)
        buffers = {k: tensors.pop(k) for k in self._frame.buffers}
        return mode.net.run(tensors, buffers, call.use, range(len(index)), *call.args, **call.kwargs)

    def _alone(self, index: Tensor, b: int, call: _Call) -> Any:
        row, tensors = call.of(torch.tensor([b], device="cpu")), self._taken(index[b])
        buffers = {k: tensors.pop(k).clone() for k in self._frame.buffers}
        return self._mode(None).net.run(tensors, buffers, call.use, [b], *row.args, **row.kwargs)

    def _taken(self, index: Tensor) -> Params:
        numbers: Any = index.tolist()
        if self._last[0] != numbers:
            # Keep the stacked tensors, because each token of a generated text uses the same genomes again.
            each = [self._grown(i) for i in (numbers if index.ndim else [numbers])]
            tensors, stacked = dict(each[0]), dict[tuple[int, ...], Tensor]()
            for key in self._rows if index.ndim else ():
                rows = [x[key] for x in each]
                # If several layers share a left or right factor, stack the factor of all genomes only once.
                place = (*map(Tensor.data_ptr, rows), *rows[0].shape)
                tensors[key] = stacked[place] = stacked[place] if place in stacked else torch.stack(rows)
            self._last = numbers, tensors
        return {key: self.get_buffer(f"tensor_{i}") for i, key in enumerate(self._keys)} | self._last[1]

    def _grow(self, number: int) -> Params:
        kind, place = self._kinds[number], self._places[number]
        genome = {k: x[place] for k, x in self._stacks[kind].items()}
        grown = self._frame.grow(kind, self._generators(kind), genome)
        return {k: x.to(self.get_buffer(f"like_{dtype_name(x.dtype)}")) for k, x in grown.items()}


def check_call(index: Tensor, n_genomes: int, inputs: list[tuple[str, Any]]) -> list[bool]:
    """Return for each input whether its first dimension is the batch. Raises the errors of `ManyGenomes.forward`."""
    if not isinstance(index, Tensor) or index.dtype != torch.int64:
        got = str(index.dtype) if isinstance(index, Tensor) else type(index).__name__
        raise TypeError(f"index must be an int64 tensor [B] of genomes' numbers, got {got}")
    if index.ndim != 1 or not len(index):
        raise ValueError(f"index must have shape [B] with B >= 1, got {tuple(index.shape)}")
    low, high = int(index.min()), int(index.max())
    if low < 0 or high >= n_genomes:
        raise ValueError(f"index must be within 0 .. {n_genomes - 1}, got {low} .. {high}")
    for at, x in inputs:
        if not isinstance(x, (Tensor, *PLAIN)):
            raise TypeError(f"inputs must be tensors or plain values, got a {type(x).__name__} as {at}: pass tensors")
    split = [isinstance(x, Tensor) and x.shape[:1] == index.shape for _, x in inputs]
    if not any(split):
        shapes = [tuple(x.shape) for _, x in inputs if isinstance(x, Tensor)]
        raise ValueError(f"an input must have {len(index)} rows, one per entry of index, got inputs of shapes {shapes}")
    return split


def _kind(named: tuple[str, Any], has_rows: bool) -> Any:
    at, x = named
    return (at, has_rows, x.dtype, x.shape[has_rows:]) if isinstance(x, Tensor) else (at, type(x), x)


def _checked(out: Any, n_rows: int, plain: bool = False) -> Any:
    """Check that an output's tensors have `n_rows` rows. `plain` refuses objects that rows cannot share (a cache)."""
    for at, x in tree_leaves(out, "output"):
        if isinstance(x, Tensor) and x.shape[:1] != (n_rows,):
            got = f"expected outputs with first dimension {n_rows}, the batch, got {at} of shape {tuple(x.shape)}"
            raise ValueError(f"{got}: leave it out (a loss: call without labels)")
        if plain and not isinstance(x, (Tensor, *PLAIN)):
            got = f"expected tensors and plain values as outputs, got a {type(x).__name__} as {at}"
            raise TypeError(f"{got}: switch it off (a cache: use_cache=False)")
    return out


def cut(rows: Tensor, args: Any, kwargs: Any, split: list[bool]) -> tuple[Any, Any]:
    """Select `rows` of each input whose entry in `split` is True. Other inputs stay whole."""
    flags = iter(split)
    return tree_map(lambda x: x[rows.to(x.device)] if next(flags) else x, (args, kwargs))


def _tensors(tree: Any) -> list[Tensor]:
    return [x.detach() for _, x in tree_leaves(tree) if isinstance(x, Tensor)]


def _tolerance(tensors: Iterable[Tensor]) -> float:
    """Return the tolerated relative error of outputs for a batch against outputs for single rows: 2e-3 in float32."""
    floating = [x for x in tensors if differentiable(x.dtype)]
    dtypes = {x.dtype for x in floating}
    for device in {x.device.type for x in floating}:
        dtypes |= {torch.get_autocast_dtype(device)} if torch.is_autocast_enabled(device) else set()
    return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0) ** 0.4


def _same(found: list[Tensor], expected: list[Tensor], tolerance: float) -> bool:
    if [(x.shape, x.dtype) for x in found] != [(x.shape, x.dtype) for x in expected]:
        return False
    for x, y in zip(found, expected, strict=True):
        # Exclude equal entries: a large entry, such as a mask's 1e9, would raise the tolerance for all other entries.
        largest = float(torch.where(x == y, 0, y).nan_to_num(0, 0, 0).abs().max()) if x.numel() else 0.0
        if not torch.equal(x, y) and not torch.allclose(x, y, 0, tolerance * largest, equal_nan=True):
            return False
    return True


def stacked_genomes(genomes: Sequence[GenomeLike]) -> Params:
    """Stack leaves and buffers of N genomes to [N, ...], by name. Tensors that all genomes share are stored once."""
    flat = [flat_genome(genome) | flatten_tree(genome.buffers, BUFFERS) for genome in genomes]

    def stack(first: Tensor, *others: Tensor) -> Tensor:
        same = all(x is first or torch.equal(x, first) for x in others)
        return first.detach().expand(len(flat), *first.shape) if same else torch.stack([first, *others]).detach()

    return {k: stack(*(x[k] for x in flat)) for k in flat[0]}


def outermost(paths: Iterable[str]) -> list[str]:
    """Return the sorted paths of the modules that are not inside another module of `paths`."""
    every = sorted({*paths})
    return [p for p in every if not any(p != other and f"{p}.".startswith(other and f"{other}.") for other in every)]
