"""Computes the loss and the gradient of a genome, in one graph from the leaves through the weights to the loss.

leaves --generator--> weights --p-net, loss function--> loss --backward--> gradients of the leaves
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors

from gbfunc.generation import make_generator
from gbfunc.genome import Noise, sample_noise
from gbfunc.layers.forms import outside_autocast
from gbfunc.parallel import Layout
from gbfunc.plan import Plan
from gbfunc.pnet.describe import without_sparse
from gbfunc.pnet.pure import PureNet
from gbfunc.tiling import Piece
from gbfunc.train.options import StepOptions
from gbfunc.trees import DIRECT, differentiable, holds_tensors, tree_map
from gbfunc.types import Params

LossFn = Callable[[Any, Any], Any]  # `(net, batch) -> loss` or `(loss, aux)`; `net` has generated weights
Gradients = tuple[Tensor | None, ...]

NO_GRADIENT = (
    "the loss does not depend on any trained leaf: it must come from net(...), the first argument of loss_fn, with its "
    "graph, and not from the p-net itself, nor from a torch.utils.checkpoint with use_reentrant=True, which cuts the "
    "graph"
)

_OWN_READ = (
    "the loss depends on parameters of the p-net itself, which are not generated: a forward must read self.NAME, a "
    "loss function NAME.detach(), for NAME "
)
_FLATTENED = 1 << 15  # Gradients of at most this many numbers are joined to one vector, for a norm in half the time.
_DEFAULT_GENERATORS = threading.RLock()  # Threads share torch's generators: one thread at a time may seed them.


class StepInputs(NamedTuple):
    """The arguments of a training step's loss on this rank."""

    leaves: Params  # by the names of `flat_genome`
    noise: Noise | None
    buffers: Params  # clones, which the forward updates in place
    batch: Any  # this rank's share of the batch
    rows: int  # number of rows in the share; 1 for the whole batch in one process, where the loss stays a mean
    counts: bool  # False for an empty share: rows of zeros replace the share, and the gradients are discarded

    def copied(self) -> StepInputs:
        """Copy the buffers and the batch, because a forward may change them in place."""
        batch = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.batch)
        return self._replace(buffers={k: b.clone() for k, b in self.buffers.items()}, batch=batch)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the direct parameters at the end of the context, because a forward may change them in place."""
        before = [(x.detach(), x.detach().clone()) for k, x in self.leaves.items() if k.startswith(DIRECT)]
        try:
            yield
        finally:
            for x, values in before:
                x.copy_(values)

    def detached(self, aux: Any) -> Any:
        """Detach `aux`. Copy tensors of `aux` that share memory with buffers or direct parameters."""
        if type(aux) is dict and not aux:
            return aux
        direct = (x for k, x in self.leaves.items() if k.startswith(DIRECT))
        changing = {x.untyped_storage().data_ptr() for x in (*self.buffers.values(), *direct)}

        def detached(x: Any) -> Any:
            if isinstance(x, Tensor):
                x = x.detach()
                return x.clone() if x.layout == torch.strided and x.untyped_storage().data_ptr() in changing else x
            if holds_tensors(x):
                raise ValueError(f"aux has a {type(x).__name__} with tensors: give them as a dict")
            return x

        return tree_map(detached, aux)


class Result(NamedTuple):
    """Loss and gradients of this rank's share of the batch."""

    loss: Tensor  # mean over the share's rows
    aux: Any
    gradients: Gradients  # of `scale` times the sum of the rows' losses; None for tensors that the loss does not use
    rows: float  # number of rows in the share (see `StepInputs.rows`)


class GenomeLoss:
    """Computes the loss and aux of a genome: `generator` generates the weights, and `net` applies the p-net.

    `names` and `pieces` (blocks of matrices) select what a rank generates. `adapt` installs layers split over ranks.
    """

    def __init__(
        self,
        pnet: nn.Module,
        loss_fn: LossFn,
        layout: Layout,
        options: StepOptions,
        *,
        names: Collection[str] | None = None,
        pieces: Mapping[str, Piece] | None = None,
        adapt: Callable[[nn.Module], Collection[str]] = lambda net: (),
    ) -> None:
        self.function, self._amp = loss_fn, options.amp
        base = layout.plan.base_tensors(pnet)
        # torch 2.5 cannot compile layers that use factors, so generate dense weights.
        lazy = options.lazy if not options.compile or torch.__version__ >= "2.6" else False
        make = partial(make_generator, layout.plan, kernel=options.kernel, layout=layout, pnet=pnet, base=base)
        self.generator = make(lazy=lazy, remat=options.remat == "layer", names=names, pieces=pieces)
        self.net = PureNet(pnet, self.generator.forms, adapt, base)
        without_sparse(self.net.skeleton, {name for t in layout.plan.generated for name in (t.name, *t.aliases)})
        # `gradients` raises an error if the loss depends on these parameters instead of generated weights.
        self._own = {name: p for name, p in pnet.named_parameters() if differentiable(p.dtype)}

    @property
    def tolerance(self) -> float:
        """The largest relative distance between two gradients that rounding in the p-net's coarsest dtype may cause."""
        dtypes = {torch.float32, *(p.dtype for p in self._own.values())} | ({self._amp} if self._amp else set())
        return max(torch.finfo(dtype).eps for dtype in dtypes) ** 0.4

    def weights(self, inputs: StepInputs) -> Params:
        """Generate each weight, or the tensors from which a layer computes the weight (`WeightForm.inputs`)."""
        return self.generator(inputs.leaves, inputs.noise, counts=inputs.counts)

    def __call__(self, inputs: StepInputs) -> tuple[Tensor, Any]:
        return self.on(self.weights(inputs), inputs.buffers, inputs.batch)

    def with_gradients(
        self, inputs: StepInputs, names: list[str], factor: Tensor | float | None
    ) -> tuple[Tensor, Any, Params, list[Tensor]]:
        """Return loss, aux as tensors, new buffers, and gradients of `loss * factor` for the leaves `names`."""

        def loss_of(trained: Params, buffers: Params) -> tuple[Tensor, Any]:
            loss, aux = self(inputs._replace(leaves=inputs.leaves | trained, buffers=buffers))
            return loss if factor is None else loss * factor, (loss, tree_map(torch.as_tensor, aux), buffers)

        trained = {k: inputs.leaves[k] for k in names}
        found, (loss, aux, buffers) = torch.func.grad(loss_of, has_aux=True)(trained, inputs.buffers)
        return loss, aux, buffers, [found[k].detach() for k in names]

    def on(self, weights: Params, buffers: Params, batch: Any) -> tuple[Tensor, Any]:
        """Return the loss and aux of the p-net with `weights` on a batch, and update `buffers`."""
        loss, aux = self.returned(self.call(weights, buffers, self.function, batch))
        if not loss.requires_grad:
            raise ValueError(NO_GRADIENT)
        return loss.reshape(()) if loss.ndim else loss, aux

    def call(self, weights: Params, buffers: Params, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function(net, *args)`, where `net` is the p-net with `weights`, and update `buffers`."""
        device = next((w.device.type for w in weights.values()), "cpu") if self._amp else ""
        with torch.autocast(device, self._amp) if self._amp else nullcontext():
            return self.net.run(weights, buffers, function, *args)

    def without_amp(self) -> GenomeLoss:
        """Return the same loss without autocast, in the p-net's own precision."""
        other = copy(self)
        other._amp = None
        return other

    def returned(self, out: Any) -> tuple[Tensor, Any]:
        return loss_and_aux(out)

    def rows(self, rows: float) -> float:
        # The mean loss is multiplied by this number. An empty share's loss is discarded, so 1 saves a multiplication.
        return rows or 1

    def gradients(self, loss: Tensor, wanted: list[Tensor]) -> Gradients:
        """Return the gradients of `wanted`; raise ValueError if the loss uses the p-net's original parameters."""
        own = {k: x for k, x in self._own.items() if x.requires_grad}
        inputs = [*wanted, *own.values()]
        # Under the caller's autocast, backward would compute the matrix products of the g-nets in half precision.
        with outside_autocast(loss.device):
            found = torch.autograd.grad(loss, inputs, allow_unused=True) if inputs else ()
        read = [k for k, g in zip(own, found[len(wanted) :], strict=True) if g is not None]
        if read:
            raise ValueError(f"{_OWN_READ}{' or '.join(map(repr, read))}")
        return found[: len(wanted)]


class Strategy:
    """Base class of algorithms that compute a genome's gradient. Most algorithms have their own file in this folder."""

    loss: GenomeLoss | None = None  # None until the first call builds the loss
    least_rows: int = 2  # number of rows of zeros that replace an empty share of a batch; some layers need two rows

    def __call__(self, inputs: StepInputs, wanted: list[Tensor]) -> Result:
        raise NotImplementedError


class OneGraph(Strategy):
    """Runs one eager graph from the leaves to the loss. `scale` multiplies the loss to avoid underflow in float16."""

    loss: GenomeLoss

    def __init__(self, loss: GenomeLoss, scale: float) -> None:
        self.loss, self._scale = loss, scale

    def __call__(self, inputs: StepInputs, wanted: list[Tensor]) -> Result:
        with self.loss.net.kept():
            return self._result(inputs, wanted, *self.loss(inputs))

    def _result(self, inputs: StepInputs, wanted: list[Tensor], loss: Tensor, aux: Any) -> Result:
        rows = self.loss.rows(inputs.rows)
        factor = self._scale * rows
        gradients = self.loss.gradients(loss if factor == 1 else loss * factor, wanted)
        if all(g is None for g in gradients):
            raise ValueError(NO_GRADIENT)
        return Result(loss.detach(), inputs.detached(aux), gradients, rows)


class LossAndGrads(NamedTuple):
    """The loss and the gradient of a batch, detached."""

    loss: Tensor
    aux: Any
    gradients: Params
    buffers: Params  # after the forward
    norm: Tensor  # Euclidean norm of the gradient


class Objective:
    """Computes loss and gradient in one process. The loss is multiplied, and the gradient divided, by `scale`."""

    def __init__(self, plan: Plan, strategy: Strategy, scale: float) -> None:
        self._plan, self.strategy, self.scale = plan, strategy, scale

    def __call__(
        self, leaves: Params, trained: Params, buffers: Params, batch: Any, seed: int, step: int
    ) -> LossAndGrads:
        """Return the loss at `leaves`, and the gradient with respect to `trained`, the leaves before rounding."""
        noise = noise_of(self._plan, seed, next(iter(trained.values())))
        inputs = StepInputs(leaves, noise, {k: v.clone() for k, v in buffers.items()}, batch, 1, True)
        try:
            loss, aux, gradients, _ = self._with_gradients(inputs, trained, seed)
        except TypeError as error:
            got, net = (type(x).__name__ for x in (batch, self.strategy.loss and self.strategy.loss.net.skeleton))
            if not re.fullmatch(rf"'{got}' object is not callable|.*('|iterable ){net}'? object.*", str(error)):
                raise
            raise TypeError(f"loss_fn must take (net, batch), in this order: {error}") from error
        tensors = [*gradients.values()]
        if sum(map(Tensor.numel, tensors)) > _FLATTENED:
            tensors = torch._foreach_norm(tensors)  # pyright: ignore[reportPrivateImportUsage]
        norm = torch.linalg.vector_norm(_flatten_dense_tensors([*tensors]))
        return LossAndGrads(loss, aux, gradients, detached(inputs.buffers), norm)

    def _with_gradients(self, inputs: StepInputs, trained: Params, seed: int) -> tuple[Tensor, Any, Params, float]:
        """Return loss, aux, gradients of the sum of losses over rows, and this rank's number of rows."""
        wanted = [*trained.values()]
        with seeded(seed, wanted[0].device), torch.enable_grad():
            loss, aux, found, rows = self.strategy(inputs, wanted)
        scale = self.scale
        gradients: Params = {}
        for (name, leaf), gradient in zip(trained.items(), found, strict=True):
            gradient = torch.zeros_like(leaf) if gradient is None else gradient
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            gradients[name] = gradient if scale == 1.0 else gradient / scale
        return loss, aux, gradients, rows


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return torch's default generators of the CPU and of a device."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


def capturing(device: torch.device) -> bool:
    """Return True while a CUDA graph is being captured on the device."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's default generators, which dropout uses, and restore them at the end. Threads take turns."""
    if capturing(device):  # `Graphs` seeds torch's generators before each replay of a CUDA graph.
        yield
        return
    generators = generators_of(device)
    with _DEFAULT_GENERATORS:
        states = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)


def detached(buffers: Params) -> Params:
    """Detach buffers, because a forward may assign tensors with a graph to buffers."""
    return {k: v.detach() for k, v in buffers.items()}


def noise_of(plan: Plan, seed: int, like: Tensor) -> Noise | None:
    """Draw the noise that stochastic g-nets add to weights, from a training step's seed; None without such g-nets."""
    # Change the seed: with the seed of dropout, the noise would equal dropout's random numbers.
    return sample_noise(plan, torch.Generator().manual_seed(seed ^ 1), like) if plan.stochastic else None


def loss_and_aux(out: Any) -> tuple[Tensor, Any]:
    """Return loss and aux from a loss function's result. Raises ValueError unless the loss is a scalar tensor."""
    pair = isinstance(out, tuple) and len(out) == 2
    loss, aux = out if pair else (out, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        got = f"{tuple(loss.shape)}, {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        got = f"a tuple of {len(out)}" if isinstance(out, tuple) and not pair else got
        raise ValueError(f"loss_fn must return a scalar tensor of real numbers, or (scalar tensor, aux), got {got}")
    return loss, aux
