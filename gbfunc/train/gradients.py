"""Loss and gradient of a genome on one batch: the ways from the loss back to the g-nets.

* at once: one graph from the loss through the p-net's weights to the g-nets;
* accumulated (`microbatches`, `remat="generate"`): gradients add up on the weights, and go through the g-nets once;
* layer by layer (`remat="layer"`): at once, on weights that are made for each use, and again in backward.

In each of them weights may stay factors (`lazy`), which are never formed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from gbfunc.generate import Generator
from gbfunc.genome import Noise, sample_noise
from gbfunc.parallel import Gather, Layout, gather_objects
from gbfunc.plan import Plan
from gbfunc.pnet import GrownNet, PureNet
from gbfunc.train.options import StepOptions
from gbfunc.trees import DIRECT, mean_tree, n_rows, split_batch, split_rows, tree_map
from gbfunc.types import Params

if TYPE_CHECKING:
    from gbfunc.parallel.tensor import TensorParallel

LossFn = Callable[[GrownNet, Any], Any]
"""`(net, batch) -> loss` or `(loss, aux)`; `net` is the p-net on its generated weights."""

_FP16_SCALE = 2.0**10
"""Loss scale under float16, which keeps small gradients of activations from underflow (Micikevicius et al., 2018)."""

_FP16_SCALE_PER_ROW = 2.0**4
"""The same with a mesh, where each rank's loss is scaled by its rows: equal at 64 rows."""

_RANK_MIX = 0xBF58476D1CE4E5B9
"""An odd constant of splitmix64 (Steele et al., 2014): spreads ranks over seeds."""

_STAGE_MIX = 0x94D049BB133111EB
"""Another one: spreads stages of a pipeline."""

_DEFAULT_GENERATORS = threading.RLock()
"""Held while a step seeds torch's default generators, which all threads share."""

_COMPILED = itertools.count()  # numbers the functions that are compiled

Gradients = tuple[Tensor | None, ...]

_NO_GRADIENT = (
    "the loss does not depend on any trained leaf: it must come from net(...), the first argument of loss_fn, with its "
    "graph, and not from the p-net itself"
)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's default generators (dropout draws from them), and put them back after; threads take turns."""
    gpus = []
    if device.type == "cuda":
        gpus = [torch.cuda.current_device() if device.index is None else device.index]
    with _DEFAULT_GENERATORS, torch.random.fork_rng(gpus):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[i] for i in gpus)):
            generator.manual_seed(seed)
        yield


def _with_own_code(method: Any) -> Any:
    """A method with code of its own name: torch.compile keeps what it learns of shapes by file, line and name."""
    code = method.__code__.replace(co_name=f"{method.__name__}_{next(_COMPILED)}")
    return MethodType(FunctionType(code, method.__globals__), method.__self__)


def noise_of(plan: Plan, seed: int, like: Tensor) -> Noise | None:
    """The noise of stochastic g-nets in a step of this seed; None where there are none."""
    # Not dropout's seed: equal seeds draw the same numbers.
    return sample_noise(plan, torch.Generator().manual_seed(seed ^ 1), like) if plan.stochastic else None


class LossAndGrads(NamedTuple):
    """Loss and gradient of one rank's share of the batch.

    Attributes:
        loss: mean over the share.
        aux: what the loss function returned beside it.
        gradients: by flat name; with a mesh of more than one rank, summands of that of the rows' losses.
        rows: of the share, divided by the ranks that have the same ones.
        counts: whether the gradients count: not those of rows of zeros in the place of an empty share.
    """

    loss: Tensor
    aux: Any
    gradients: Params
    rows: float
    counts: bool


class _Given(NamedTuple):
    """What the loss is a function of."""

    leaves: Params
    noise: Noise | None
    buffers: Params
    batch: Any
    rows: int


class Objective:
    """The loss as a function of the genome, with its gradient."""

    def __init__(
        self,
        pnet: nn.Module,
        loss_fn: LossFn,
        layout: Layout,
        options: StepOptions,
        tensor: TensorParallel | None = None,
    ) -> None:
        self._plan, self._pnet, self._loss_fn, self._layout, self._options = layout.plan, pnet, loss_fn, layout, options
        self._tensor = tensor
        self._base = layout.plan.base_tensors(pnet)
        # Whether ranks may have parts of the same rows: an empty one is then as good as any.
        self.takes_parts = tensor is not None and tensor.takes_parts
        self._sharded, self._shard, self._ranks = layout.sharded, layout.mesh.shard, layout.mesh.world
        half = options.amp == torch.float16
        self._scale = (_FP16_SCALE if self._ranks == 1 else _FP16_SCALE_PER_ROW) if half else 1.0
        self._from_genome = torch.compile(_with_own_code(self._forward)) if options.compile else self._forward
        self._way = self._accumulated if options.microbatches > 1 or options.remat == "generate" else self._at_once
        self.net: Any = None
        self._pipeline = None
        if options.pipeline is None or layout.mesh.sizes["pipeline"] == 1:
            self._build(None)
        else:
            from gbfunc.parallel.pipeline import Pipeline

            self._pipeline = Pipeline(pnet, options.pipeline, layout.mesh, options.microbatches, options.stages)
            self._way = self._pipelined

    @property
    def dense_reads(self) -> dict[str, int]:
        """How often the p-net has read weights as dense tensors, of those that are not: by name."""
        return self.net.dense_reads if self.net else {}

    def _build(self, names: Collection[str] | None) -> None:
        """The generator of these parameters (None: of all), and the p-net that takes them."""
        options, tensor, pipeline = self._options, self._tensor, self._pipeline
        # Dynamo of torch 2.5 does not trace forms of layers: there a compiled step forms every weight.
        lazy = options.lazy if not options.compile or torch.__version__ >= "2.6" else False
        self._generator = Generator(
            self._plan,
            kernel=options.kernel,
            layout=self._layout,
            pnet=self._pnet,
            lazy=lazy,
            remat=options.remat == "layer",
            names=names,
            pieces=tensor.pieces if tensor else None,
            base=self._base,
        )
        adapted = [part.adapt for part in (tensor, pipeline) if part is not None]
        self.net = PureNet(
            self._pnet,
            self._generator.forms,
            lambda net: {n for adapt in adapted for n in adapt(net)},
            self._base,
            "" if pipeline is None else pipeline.whole,
        )

    def __call__(self, leaves: Params, trained: Params, buffers: Params, batch: Any, seed: int) -> LossAndGrads:
        """Loss, aux and gradients by name.

        Args:
            leaves: the genome's, flat by name, as the loss sees them.
            trained: those that gradients are wanted for, which require grad; `leaves` are them, or made of them.
            buffers: clones of the p-net's buffers, which are updated.
            batch: the batch, with a mesh this rank's share of it.
            seed: of dropout and of stochastic g-nets.

        Raises:
            ValueError: for a loss that is no scalar or does not depend on what is trained, or a batch that microbatches
                cannot split.
        """
        wanted = list(trained.values())
        noise = noise_of(self._plan, seed, wanted[0])
        rows, counts, scale = 1, True, self._scale
        if self._ranks > 1:
            rows = n_rows(batch)
            rows, counts = (1, True) if rows is None else (rows, rows > 0 or self.takes_parts)
            # Two: some layers refuse a single row. A pipeline needs all of its microbatches.
            batch = batch if counts else _zeros(batch, max(2, self._options.microbatches if self._pipeline else 0))
            seed = (seed + _RANK_MIX * self._shard) % 2**63
        if self._pipeline is not None:
            seed = (seed + _STAGE_MIX * self._pipeline.rank) % 2**63
            self._pipeline.prepare(self._loss_fn, self._split(batch, rows)[0][0])
            if self.net is None:
                self._build(self._pipeline.names)
        assert self.net is not None
        if self._generator.gather is not None:
            self._generator.gather = Gather(self._layout, counts)
        with seeded(seed, wanted[0].device), torch.enable_grad(), self.net.held():
            loss, aux, gradients, counted = self._way(_Given(leaves, noise, buffers, batch, rows), wanted)
        if all(g is None for g in gradients) and self._pipeline is None:
            raise ValueError(_NO_GRADIENT)
        named = zip(trained.items(), gradients, strict=True)
        filled = {k: _filled(v, g, scale) for (k, v), g in named}
        if self._tensor is not None:
            self._tensor.compare(loss)
            counted /= self._tensor.ranks if self._tensor.spread is None else 1
        return LossAndGrads(loss, aux, filled, counted if rows else 0, counts)

    def of_many(
        self, frozen: Params, trained: Params, buffers: Params, batch: Any, seeds: list[int], same: bool
    ) -> tuple[Tensor, Any, Params, Params]:
        """Losses [n], aux, gradients by name and buffers of n genomes at once, stacked as their leaves are.

        Arguments are as for a call, with the members as the first dimension, in the batch unless all have the `same`;
        `frozen` are the leaves that are not trained.
        """
        like = next(iter(trained.values()))
        drawn = [noise_of(self._plan, seed, like) for seed in seeds]
        noise = None if drawn[0] is None else tree_map(lambda *tensors: torch.stack(tensors), *drawn)
        self._generator.prepare(frozen | trained)

        def one(frozen: Params, trained: Params, noise: Noise | None, buffers: Params, small: Any) -> Any:
            def loss_of(trained: Params, buffers: Params) -> Any:
                weights = self._generator(frozen | trained, noise)
                loss, aux = self._loss(weights, buffers, batch if same else small)
                return loss * self._scale, (loss, tree_map(torch.as_tensor, aux), buffers)

            return grad(loss_of, has_aux=True)(trained, buffers)

        rows = None if same else tree_map(lambda x: 0 if isinstance(x, Tensor) else None, batch)
        dims = (0, 0, None if noise is None else 0, 0, rows)
        with seeded(seeds[0], like.device):
            # Not a gradient around vmap: inside of it no tensor would be seen to require one.
            many = vmap(one, dims, randomness="different")
            gradients, (loss_n, aux, buffers) = many(frozen, trained, noise, buffers, None if same else batch)
        return loss_n, aux, {k: g / self._scale for k, g in gradients.items()}, buffers

    def _forward(self, given: _Given) -> tuple[Tensor, Any]:
        """Loss and aux in one graph: what `compile` compiles."""
        return self._loss(self._generator(given.leaves, given.noise), given.buffers, given.batch)

    def _loss(self, weights: Params, buffers: Params, batch: Any) -> tuple[Tensor, Any]:
        """Loss and aux for these weights; buffers are updated."""
        if self._pipeline is not None:
            weights = self._pipeline.fill(weights, self._tensor.shapes if self._tensor else {})
        weights = weights if self._tensor is None else self._tensor.place(weights)
        amp = self._options.amp
        device = next((w.device.type for w in weights.values()), "cpu")
        with torch.autocast(device, amp) if amp else nullcontext():
            out = self.net.run(weights, buffers, self._loss_fn, batch)
        loss, aux = loss_and_aux(out)
        loss = loss if self._tensor is None else self._tensor.whole(loss)
        if not loss.requires_grad:
            raise ValueError(_NO_GRADIENT)
        return loss.reshape(()), aux

    def _at_once(self, given: _Given, wanted: list[Tensor]) -> tuple[Tensor, Any, Gradients, float]:
        """Loss, aux, gradients of the scaled sum of the rows' losses, and rows, in one graph."""
        if self._options.compile:
            self._generator.prepare(given.leaves)
            if not self.net.compiled:
                self._rehearse(given, wanted[0].device)
        with self._counted(wanted):
            loss, aux = self._from_genome(given)
            rows = self._rows(given.rows)
            with self._backward():
                gradients = torch.autograd.grad(loss * (self._scale * rows), wanted, allow_unused=True)
        return loss.detach(), _detached(aux, given), gradients, rows

    def _rehearse(self, given: _Given, device: torch.device) -> None:
        """Run the loss function once as it is: in compiled code nothing would refuse what changes the p-net."""
        with seeded(0, device):
            self._forward(given._replace(buffers={k: b.clone() for k, b in given.buffers.items()}))
        self.net.compiled = True

    def _backward(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._tensor is None else self._tensor.backward()

    def _rows(self, rows: float) -> float:
        """Rows whose mean the last loss was: those of this rank's outputs, where they are spread over ranks."""
        spread = self._tensor.spread if self._tensor is not None else None
        # Rows of zeros have a weight as well; what comes of them does not count.
        return (rows or 1) if spread is None else spread

    def _accumulated(self, given: _Given, wanted: list[Tensor]) -> tuple[Tensor, Any, Gradients, float]:
        """The same, with gradients that add up on the weights and go through the g-nets once."""
        buffers, batch, rows = given.buffers, given.batch, given.rows
        weights, cut, live = self._cut(given)
        sums: Params = {}
        counts, losses, auxes = [], [], []
        for small, n in self._split(batch, rows):
            loss, aux = self._loss(cut, buffers, small)
            counts.append(self._rows(n))
            buffers.update({k: v.detach() for k, v in buffers.items()})
            losses.append(loss.detach())
            auxes.append(_detached(aux, given))
            weighted = loss * (self._scale * counts[-1])
            with self._backward():
                gradients = torch.autograd.grad(weighted, [cut[k] for k in live], allow_unused=True)
            for k, g in zip(live, gradients, strict=True):
                if g is not None:
                    sums[k] = sums[k] + g if k in sums else g
        gradients = self._through_gnets(given, weights, sums, wanted)
        # The mean over no rows is not a number.
        kept, total = [i for i, n in enumerate(counts) if n] or [0], sum(counts)
        fractions = [counts[i] / (total or 1) for i in kept]
        aux = mean_tree([auxes[i] for i in kept], fractions) if len(kept) > 1 else auxes[kept[0]]
        return mean_tree([losses[i] for i in kept], fractions), aux, gradients, total

    def _cut(self, given: _Given) -> tuple[Params, Params, list[str]]:
        """The weights, the same without their graph, and the names of those that take gradients."""
        again = self._options.remat == "generate"
        with torch.no_grad() if again else nullcontext():
            weights = self._generator(given.leaves, given.noise)
        trained = weights.keys() - self._generator.frozen
        live = [
            k for k in weights if k in trained and (weights[k].requires_grad or (again and _differentiable(weights[k])))
        ]
        cut = {k: w.detach() for k, w in weights.items()} | {k: weights[k].detach().requires_grad_() for k in live}
        return weights, cut, live

    def _through_gnets(self, given: _Given, weights: Params, sums: Params, wanted: list[Tensor]) -> Gradients:
        """Gradients of the genome from those of the weights."""
        if self._options.remat == "generate":
            weights = self._generator(given.leaves, given.noise)
        used = [k for k in sums if weights[k].requires_grad]
        if not used and self._pipeline is None:
            raise ValueError(_NO_GRADIENT)
        return torch.autograd.grad([weights[k] for k in used], wanted, [sums[k] for k in used], allow_unused=True)

    def _pipelined(self, given: _Given, wanted: list[Tensor]) -> tuple[Tensor, Any, Gradients, float]:
        """The same, with microbatches that go from rank to rank, each of which has some blocks."""
        pipeline, before = self._pipeline, {k: x.clone() for k, x in given.buffers.items()}
        assert pipeline is not None
        weights, cut, live = self._cut(given)
        parts = self._split(given.batch, given.rows)
        ends: list[tuple[Tensor, Any, float]] = []

        def call(number: int) -> Tensor:
            small, n = parts[number]
            loss, aux = self._loss(cut, given.buffers, small)
            if self._tensor is not None and self._tensor.by_class:
                raise ValueError("classes split over ranks (loss_parallel) and pipeline= do not go together")
            n = self._rows(n)
            ends.append((loss.detach(), _detached(aux, given), n))
            return loss * (self._scale * n)

        sums = pipeline.run(call, {k: cut[k] for k in live})
        gradients = self._through_gnets(given, weights, sums, wanted)
        changed = {k: x.detach() for k, x in given.buffers.items() if k in pipeline.buffers and not _same(x, before[k])}
        given.buffers.update(before)
        for other, moved in gather_objects(self._layout.mesh, (ends, changed), "pipeline"):
            ends = other or ends
            given.buffers.update({k: x.to(before[k].device) for k, x in moved.items()})
        rows = sum(n for _, _, n in ends)
        fractions = [n / rows for _, _, n in ends]
        device = wanted[0].device
        loss = mean_tree([loss.to(device) for loss, _, _ in ends], fractions)
        if not torch.isfinite(loss) and not pipeline.ran:
            raise ValueError(
                f"the first loss of the pipeline is {float(loss)}: unless the p-net's own is, a parameter or tensor is "
                "used in a stage that does not have it (name the stages' first blocks by stages=)"
            )
        pipeline.ran = True
        # All ranks along the axis have the same loss.
        return loss, mean_tree([aux for _, aux, _ in ends], fractions), gradients, rows / pipeline.ranks

    def _counted(self, wanted: list[Tensor]) -> AbstractContextManager[None]:
        """Counts and names what a compiled graph's collectives, which have no Python inside, send and fail of."""
        if not self._options.compile or not self._sharded:
            return nullcontext()
        mesh = self._layout.mesh
        out, back = self._layout.wire_bytes(max(x.element_size() for x in wanted))
        mesh.traffic.add("gather", out)
        mesh.traffic.add("reduce_scatter", back)
        return mesh.faults.named("a compiled step")

    def _split(self, batch: Any, rows: int) -> list[tuple[Any, float]]:
        """The microbatches, each with its rows; equal ones but for uneven shares of a mesh."""
        n = self._options.microbatches
        if n == 1:
            return [(batch, rows)]
        if self._ranks == 1 or self._pipeline is not None or n_rows(batch) is None:
            return [(small, rows / n) for small in split_batch(batch, n)]
        # Ranks with fewer rows may take fewer microbatches: only generation has collectives, unless layers have some.
        n = n if self.takes_parts else min(n, n_rows(batch) or n)
        return [(small, n_rows(small) or 0) for small in split_rows(batch, n)]


def _filled(leaf: Tensor, gradient: Tensor | None, scale: float) -> Tensor:
    """The gradient of a leaf, dense (`nn.Embedding(sparse=True)` has a sparse one), of the loss without its scale."""
    if gradient is None:
        return torch.zeros_like(leaf)
    gradient = gradient.to_dense() if gradient.is_sparse else gradient
    return gradient if scale == 1.0 else gradient / scale


def _differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def loss_and_aux(out: Any) -> tuple[Tensor, Any]:
    """What a loss function returned, as a scalar tensor and aux; ValueError for anything else."""
    pair = isinstance(out, tuple) and len(out) == 2
    loss, aux = out if pair else (out, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = str(tuple(loss.shape)) if isinstance(loss, Tensor) else type(loss).__name__
        got = f"a tuple of {len(out)}" if isinstance(out, tuple) and not pair else got
        raise ValueError(f"loss_fn must return a scalar tensor, or (scalar tensor, aux), got {got}")
    return loss, aux


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.nan_to_num(), y.nan_to_num()) if x.is_floating_point() else torch.equal(x, y)


def _detached(aux: Any, given: _Given) -> Any:
    """Aux without its graph, and with copies of what the step changes later: buffers and direct parameters."""
    changing: set[int] | None = None

    def detached(x: Any) -> Any:
        nonlocal changing
        if not isinstance(x, Tensor):
            return x
        if changing is None:
            tensors = (*given.buffers.values(), *(v for k, v in given.leaves.items() if k.startswith(DIRECT)))
            changing = {t.untyped_storage().data_ptr() for t in tensors}
        x = x.detach()
        return x.clone() if x.layout == torch.strided and x.untyped_storage().data_ptr() in changing else x

    return tree_map(detached, aux)


def _zeros(batch: Any, rows: int) -> Any:
    """Rows of zeros in the place of an empty share: all ranks must build the same graph, with its collectives."""
    return tree_map(lambda x: x.new_zeros((rows, *x.shape[1:])) if isinstance(x, Tensor) and x.ndim else x, batch)
