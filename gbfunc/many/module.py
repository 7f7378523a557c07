"""Many genomes of one plan at once: a batch in which every row has its genome.

A module of the p-net that holds tensors in which genomes differ runs under `vmap` over the rows, each row with the
tensors of its genome; all else, and every product with tensors that genomes share, runs once for the batch:

    x [B, ...] --shared modules--> --vmap(module)(tensors[index], rows)--> ... --> y [B, ...]

Which modules these are is proven at the first call of each kind (`gbfunc.many.proof`).

Suffixes: N genomes, B rows of the batch.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gbfunc.base import BaseTensors
from gbfunc.generate import Generator, make_generator, to_serve
from gbfunc.layers.forms import WeightForm
from gbfunc.many.merge import check_genomes
from gbfunc.many.proof import (
    Draws,
    Pairs,
    Questions,
    RowsTogether,
    Watch,
    first_difference,
    proof_batch,
    tolerance_of,
    varied,
)
from gbfunc.many.row_wise import PLAIN, RowWise, prepare
from gbfunc.plan import Plan
from gbfunc.pnet import PureNet, skeleton_of
from gbfunc.trees import flat_genome, tree_leaves, tree_map
from gbfunc.types import GenomeLike, Params

Self = TypeVar("Self", bound="ManyGenomes")

_RANDOM = "a row gives another result each time (random numbers in eval mode, or tensors kept from call to call?)"


class _Way(NamedTuple):
    """The p-net as a function of a batch, with the modules that run row by row."""

    net: PureNet
    modules: list[RowWise]

    @property
    def looped(self) -> list[str]:
        return [module.path for module in self.modules if module.looped]


class _Proof(NamedTuple):
    """What is proven of a kind of calls.

    Attributes:
        way: a way that gives the outputs that rows give alone.
        questions: what it asks, as `Questions.of_rows`; empty where it asks nothing of the rows.
        known: answers of rows and batch with which it does.
    """

    way: _Way
    questions: list[bool]
    known: Pairs


class _Frame(NamedTuple):
    """What a module is built of beside its tensors; the p-net is without its weights."""

    plan: Plan
    pnet: nn.Module
    base: BaseTensors | None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Frame:
        # Nothing writes to it.
        return self


class ManyGenomes(nn.Module):
    """A p-net with many genomes: `net(index, *args, **kwargs)`, with the number of its genome for each row.

    Made by `materialize_many`. It is for inference: always in eval mode; gradients reach the inputs, not the genomes.
    Tensors are on the device of the genomes and move, or are cast, with `to`, a base's too.

    Attributes:
        n_genomes: number of genomes.
        row_wise: the modules of the p-net, by path, that had a genome for each row in the last batch (before the first
            one, those that hold what differs): under `vmap`, or `looped`; "" is the p-net itself.
        looped: those of them that ran one row after the other.
    """

    def __init__(self, plan: Plan, genomes: Sequence[GenomeLike], pnet: nn.Module) -> None:
        super().__init__()
        check_genomes(plan, genomes, pnet)
        self._frame, self.n_genomes = _Frame(plan, skeleton_of(pnet), plan.base_tensors(pnet)), len(genomes)
        generator = self._generator()
        with torch.no_grad():
            served = [to_serve(plan, generator, generator(flat_genome(genome))) for genome in genomes]
        # Names of the parameters that are factors.
        self._forms = set(served[0][1])
        given = [weights | inputs for weights, _, inputs in served]
        tensors = {k: [x[k] for x in given] for k in given[0]}
        buffers = {b.name: [g.buffers[b.name].detach() for g in genomes] for b in plan.buffers}
        self._keys, self._rows = {"weights": [*tensors], "buffers": [*buffers]}, set[str]()
        for i, (key, values) in enumerate((tensors | buffers).items()):
            shared = all(x is values[0] or torch.equal(x, values[0]) for x in values[1:])
            self._rows |= set() if shared else {key}
            self.register_buffer(f"tensor_{i}", values[0] if shared else torch.stack(values), persistent=False)
        self._varying = {name for key in self._rows for name in self._names(key)}
        self.row_wise = _outermost(_owner(name) for name in self._varying)
        self.looped: list[str] = []
        self._reported = set[str]()
        self._build()

    def _build(self) -> None:
        """Make what is not kept in a copy or a pickle."""
        # Calls from threads take turns.
        self._lock = threading.RLock()
        # By modules that run row by row, and the one that is proven for each kind of calls.
        self._built: dict[tuple[str, ...], _Way] = {}
        self._proven: dict[Any, _Proof] = {}
        self._alone = self._way([]).net

    def _apply(self: Self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        if self._frame.base is not None and (base := self._frame.base.cast(fn)) is not None:
            self._frame = self._frame._replace(base=base)
            self._build()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {k: x for k, x in self.__dict__.items() if k not in ("_lock", "_built", "_proven", "_alone")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._build()

    def _names(self, key: str) -> list[str]:
        """All names of a tensor of a tie."""
        for tensor in self._frame.plan.tensors:
            if key == tensor.name or key.startswith(f"{tensor.name}_form."):
                return [name + key.removeprefix(tensor.name) for name in (tensor.name, *tensor.aliases)]
        return [key]

    def _way(self, paths: list[str]) -> _Way:
        """The p-net whose modules at these paths take a tensor for each row."""
        modules = []
        for path in paths:
            varying = {_local(name, path) for name in self._varying if _inside(name, path)}
            forms = {_local(k, path): v for k, v in self._fresh_forms().items() if _inside(k, path)}
            modules.append(RowWise(self._frame.pnet, path, forms, varying))

        def adapt(skeleton: nn.Module) -> list[str]:
            prepare(skeleton)
            return [name for module in modules for name in module.install(skeleton)]

        return _Way(PureNet(self._frame.pnet, self._fresh_forms(), adapt, self._frame.base), modules)

    def _generator(self) -> Generator:
        return make_generator(self._frame.plan, pnet=self._frame.pnet, lazy=True, base=self._frame.base)

    def _fresh_forms(self) -> dict[str, WeightForm]:
        """Forms belong to one function each."""
        return {name: form for name, form in self._generator().forms.items() if name in self._forms}

    def forward(self, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The p-net's outputs: row b is `net(x[b : b + 1])` on genome `index[b]`.

        Args:
            index: int64 [B].
            *args: the p-net's inputs: tensors whose first dimension is B have a row each, others are for all rows.
            **kwargs: likewise.

        Raises:
            TypeError: if the index is not an int64 tensor, or an input or output is neither a tensor nor a plain value.
            ValueError: if it is not [B], names a genome that there is not, no input has B rows, some output has not,
                the p-net refuses a row alone, changes its buffers, or gives another result at each call.
        """
        if torch.compiler.is_dynamo_compiling():
            # A graph would not be proven again where rows answer otherwise.
            call: Any = torch.compiler.disable(self._call)
            return call(index, *args, **kwargs)
        return self._call(index, *args, **kwargs)

    def _call(self, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        inputs = tree_leaves((args, kwargs), "inputs")
        split = self._check(index, inputs)
        keys = [*self._keys["weights"], *self._keys["buffers"]]
        stored = {key: self.get_buffer(f"tensor_{i}") for i, key in enumerate(keys)}
        devices = {x.device.type for x in stored.values()}
        kind = (*map(torch.is_autocast_enabled, devices), *map(_kind, inputs, split))
        with self._lock:
            call = stored, [x for _, x in inputs], split, (args, kwargs)
            # One row needs no way, but of the first one is seen whether the p-net keeps tensors of a genome.
            if kind not in self._proven and (len(index) > 1 or not self._proven):
                self._proven[kind] = self._prove(*call, {})
            if len(index) == 1:
                return _checked(self._one(self._taken(stored, index[0]), args, kwargs), 1)
            given = self._taken(stored, index)
            out, new = self._answered(self._proven[kind], len(index), given, args, kwargs)
            if new:
                before, proof = self._proven[kind], self._prove(*call, new)
                if proof.questions and not new.keys() <= proof.known.keys():
                    # Answers hang on the tensors of genomes, which a proof changes.
                    proof = _Proof(self._loop(), [], {})
                elif proof.way is before.way:
                    proof = proof._replace(known=before.known | proof.known)
                self._proven[kind] = proof
                out, _ = self._answered(proof, len(index), given, args, kwargs)
            way = self._proven[kind].way
            self.row_wise, self.looped = [module.path for module in way.modules], way.looped
        _checked(out, len(index), one="" in self.row_wise)
        if set(self.looped) - self._reported:
            self._reported.update(self.looped)
            names = ", ".join(repr(path) if path else "the p-net" for path in self.looped)
            warnings.warn(
                f"run one row after the other, which vmap cannot or gives other outputs: {names}", stacklevel=3
            )
        return out

    def _answered(self, proof: _Proof, n_rows: int, given: Params, args: Any, kwargs: Any) -> tuple[Any, Pairs]:
        """The outputs, and answers of rows and batch to the way's questions that are not proven."""
        asked = Questions(n_rows, proof.way.modules, proof.questions)
        with ExitStack() as modes:
            for mode in (asked.leaving, asked) if proof.questions else ():
                modes.enter_context(mode)
            out = self._run(proof.way, n_rows, given, args, kwargs)
        return out, {k: b for k, b in asked.pairs(range(n_rows)).items() if k not in proof.known}

    def _loop(self) -> _Way:
        """The p-net on one row after the other."""
        way = self._way([""])
        way.modules[0].looped = True
        return way

    def _prove(self, stored: Params, inputs: list[Any], split: list[bool], call: Any, new: Pairs) -> _Proof:
        """A way that gives the outputs that rows give alone: the first one, from that with the fewest modules on.

        Those of `new` answers are among the rows.
        """
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        n_rows = next(len(x) for x, of in zip(inputs, split, strict=True) if of)
        sizes = {size for x in (*tensors, *stored.values()) for size in x.shape}
        batch = proof_batch(n_rows, sizes, new.values())
        own, alone = stored | {key: varied(stored[key]) for key in self._rows}, list[Watch]()

        def part(positions: list[int], which: Any) -> Any:
            of, rows = iter(split), [batch.rows[i] for i in positions]
            args, kwargs = tree_map(lambda x: x[rows] if next(of) else x, call)
            return self._taken(own, torch.tensor(which)), args, kwargs

        for i in batch.checked:
            alone.append(Watch())
            given, args, kwargs = part([i], batch.variants[i])
            try:
                with alone[-1].of(self._alone.skeleton), Draws() as draws:
                    out = self._one(given, args, kwargs, buffers_stay=True)
            except Exception as error:
                shapes = [tuple(x.shape) for _, x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
                raise ValueError(f"row {batch.rows[i]} alone, with inputs {shapes}, is refused: {error}") from error
            if draws.used_in(out):
                raise ValueError(_RANDOM)
            _checked(out, 1)
        called = {path for path, _ in alone[0].outputs}
        paths = [_owner(name) for name in self._varying] if "" in self.row_wise else self.row_wise
        paths = _outermost(_outward(path, called) for path in paths)
        while True:
            way = self._built.get(tuple(paths)) or self._way(paths)
            watch, problem = Watch(batch), None
            together = RowsTogether(len(batch.rows), way.modules, watch.running)
            try:
                with watch.of(way.net.skeleton), together.leaving, together:
                    self._run(way, len(batch.rows), *part([*range(len(batch.rows))], batch.variants))
                failed = together.found
                if failed is None:
                    tolerance = tolerance_of([*stored.values(), *tensors])
                    failed = first_difference(alone, watch, {*paths, ""}, tolerance)
            except Exception as error:
                failed, problem = watch.running[-1] if watch.running else "", error
            if failed is None:
                # Another kind of calls may do without loops.
                self._built |= {} if way.looped else {tuple(paths): way}
                asks = together.of_rows if any(together.of_rows) else []
                return _Proof(way, asks, together.pairs(batch.checked))
            if paths == [""]:
                (pnet,) = way.modules
                if pnet.looped or problem is not None:
                    raise ValueError(f"{_RANDOM}{'' if problem is None else f': {problem}'}") from problem
                self._built.pop(("",), None)
                pnet.looped, self._built[("",)] = True, way
                continue
            wider = {path for path in called if any(path != q and _inside(q, path) for q in paths)} - {*paths}
            paths = _outermost([*paths, _outward(failed, wider | {""})])

    def _run(self, way: _Way, n_rows: int, given: Params, args: Any, kwargs: Any) -> Any:
        for module in way.modules:
            module.n_rows = n_rows
        weights, buffers = ({key: given[key] for key in self._keys[kind]} for kind in ("weights", "buffers"))
        return way.net(weights, buffers, *args, **kwargs)

    def _one(self, given: Params, args: Any, kwargs: Any, buffers_stay: bool = False) -> Any:
        """The p-net's outputs with one genome; ValueError if buffers should stay as they are and do not."""
        buffers = {key: given[key].clone() for key in self._keys["buffers"]}
        out = self._alone({key: given[key] for key in self._keys["weights"]}, buffers, *args, **kwargs)
        for key in buffers if buffers_stay else ():
            if not torch.allclose(buffers[key], given[key], 0, 0, equal_nan=True):
                raise ValueError(f"the p-net changes its buffer {key!r} in eval mode")
        return out

    def _taken(self, stored: Params, index: Tensor) -> Params:
        """Tensors of genomes by number: one genome, or one for each row."""
        return {key: x[index.to(x.device)] if key in self._rows else x for key, x in stored.items()}

    def _check(self, index: Tensor, inputs: list[tuple[str, Any]]) -> list[bool]:
        """Which inputs have a row each; raises as `forward`."""
        if not isinstance(index, Tensor) or index.dtype != torch.int64:
            got = str(index.dtype) if isinstance(index, Tensor) else type(index).__name__
            raise TypeError(f"index must be an int64 tensor [B] of genomes' numbers, got {got}")
        if index.ndim != 1 or not len(index):
            raise ValueError(f"index must have shape [B] with B >= 1, got {tuple(index.shape)}")
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= self.n_genomes:
            raise ValueError(f"index must be within 0 .. {self.n_genomes - 1}, got {low} .. {high}")
        for at, x in inputs:
            if not isinstance(x, (Tensor, *PLAIN)):
                raise TypeError(f"{at} is a {type(x).__name__}: inputs must be tensors and plain values")
        split = [isinstance(x, Tensor) and x.shape[:1] == index.shape for _, x in inputs]
        if not any(split):
            shapes = [tuple(x.shape) for _, x in inputs if isinstance(x, Tensor)]
            raise ValueError(f"index has {len(index)} rows, and no input has: their shapes are {shapes}")
        return split


def _kind(named: tuple[str, Any], has_rows: bool) -> Any:
    """Of an input, all but the number of rows."""
    at, x = named
    return (at, has_rows, x.dtype, x.shape[has_rows:]) if isinstance(x, Tensor) else (at, type(x), x)


def _checked(out: Any, n_rows: int, one: bool = False) -> Any:
    """An output; ValueError if a tensor has not this many rows, TypeError for an object of `one` row of several."""
    for at, x in tree_leaves(out, "output"):
        if isinstance(x, Tensor) and x.shape[:1] != (n_rows,):
            got = f"{at} of {n_rows} {'row' if n_rows == 1 else 'rows'} has shape {tuple(x.shape)}"
            raise ValueError(f"{got}, and batches must come first: leave it out (a loss: call without labels)")
        if one and not isinstance(x, (Tensor, *PLAIN)):
            raise TypeError(f"{at} is a {type(x).__name__}, of one row: switch it off (a cache: use_cache=False)")
    return out


def _inside(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


def _local(name: str, path: str) -> str:
    return name.removeprefix(f"{path}.") if path else name


def _owner(name: str) -> str:
    """The path of the module that a tensor belongs to."""
    return name.partition("_form.")[0].partition(".parametrizations.")[0].rpartition(".")[0]


def _outward(path: str, among: Collection[str]) -> str:
    """The innermost of some modules that is this one or around it."""
    while path not in among:
        path = path.rpartition(".")[0]
    return path


def _outermost(paths: Iterable[str]) -> list[str]:
    """Paths without those inside of others."""
    given = set(paths)
    return sorted(path for path in given if not any(other != path and _inside(path, other) for other in given))


def materialize_many(plan: Plan, genomes: Sequence[GenomeLike], pnet: nn.Module) -> ManyGenomes:
    """One module for many genomes of a plan, each row of a batch with its genome: to serve, compare or ensemble them.

    Row b of `net(index, x)` is `net(x[b : b + 1])` on genome `index[b]`, in eval mode. What genomes share is computed
    once for the batch: a base, and tensors that are equal in all of them. Factors stay factors. Modules with tensors
    that differ run under `torch.func.vmap`; the p-net around them runs as it is.

    The first call of each kind (structure, dtypes and shapes of the inputs, but for the number of rows) proves it: some
    rows alone against a batch. Where they differ, modules further out run under `vmap`, in the end the p-net itself,
    and what `vmap` cannot run goes row after row, with a warning. `row_wise` and `looped` name these modules. Operators
    that take rows together count as a difference whatever the values. What the p-net asks of all rows (`any`, `all`: is
    anything padded?), and of inputs for all rows (`if t > 1`, `t.tolist()`), is noted in later calls too, and a batch
    that answers as none did before is proven again. So `torch.compile` leaves the net as it is, between its graphs.

    Torch's fused encoders (`nn.TransformerEncoder` in eval mode without gradients) are not used: at padded positions of
    `src_key_padding_mask`, where they may give zeros, outputs are those of the layers' own forward.

    Args:
        plan: the plan.
        genomes: genomes of the plan, on one device; all are generated now, and their tensors kept.
        pnet: the p-net the plan was made for, or its base; it is not changed, and must not be while it is used here.

    Raises:
        ValueError: if genomes, plan and p-net do not fit together.

    >>> import gbfunc as gb
    >>> pnet = nn.Linear(30, 20)
    >>> plan = gb.make_plan(pnet, gb.periodic(features=2))
    >>> genomes = [gb.init_genome(plan, pnet, seed) for seed in range(5)]
    >>> net = gb.materialize_many(plan, genomes, pnet)
    >>> net(torch.tensor([3, 0, 3]), torch.ones(3, 30)).shape
    torch.Size([3, 20])
    """
    return ManyGenomes(plan, genomes, pnet)
