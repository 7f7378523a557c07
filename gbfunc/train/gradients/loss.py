"""The loss as a function of the genome: generator, p-net and loss function, as every strategy uses them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.generate import Generator
from gbfunc.genome import Noise, sample_noise
from gbfunc.parallel import Layout
from gbfunc.parallel.undivided import Undivided
from gbfunc.plan import Plan
from gbfunc.pnet import GrownNet, PureNet
from gbfunc.train.options import StepOptions
from gbfunc.trees import DIRECT, tree_map
from gbfunc.types import Params

LossFn = Callable[[GrownNet, Any], Any]
"""`(net, batch) -> loss` or `(loss, aux)`; `net` is the p-net on its generated weights."""

Gradients = tuple[Tensor | None, ...]

NO_GRADIENT = (
    "the loss does not depend on any trained leaf: it must come from net(...), the first argument of loss_fn, with its "
    "graph, and not from the p-net itself, nor from one that calls torch.utils.checkpoint inside its forward "
    "(use_reentrant=True), which cuts the graph"
)

_DEFAULT_GENERATORS = threading.RLock()
"""Held while a step seeds torch's default generators, which all threads share."""


class Given(NamedTuple):
    """What the loss is a function of, on this rank.

    Attributes:
        leaves: of the genome, flat by name.
        noise: of stochastic g-nets.
        buffers: clones of the p-net's buffers, which are updated.
        batch: this rank's share.
        rows: of the share.
        counts: whether its gradients count: not those of rows of zeros in the place of an empty share.
    """

    leaves: Params
    noise: Noise | None
    buffers: Params
    batch: Any
    rows: int
    counts: bool

    def detached(self, aux: Any) -> Any:
        """Aux without its graph, and with copies of what the step changes later: buffers and direct parameters."""
        changing: set[int] | None = None

        def detached(x: Any) -> Any:
            nonlocal changing
            if not isinstance(x, Tensor):
                return x
            if changing is None:
                tensors = (*self.buffers.values(), *(v for k, v in self.leaves.items() if k.startswith(DIRECT)))
                changing = {t.untyped_storage().data_ptr() for t in tensors}
            x = x.detach()
            return x.clone() if x.layout == torch.strided and x.untyped_storage().data_ptr() in changing else x

        return tree_map(detached, aux)


class Result(NamedTuple):
    """What a strategy finds of this rank's share.

    Attributes:
        loss: mean over the share.
        aux: what the loss function returned beside it.
        gradients: of the scaled sum of the rows' losses, of each wanted tensor, None where it has no part in the loss.
        rows: of the share, divided by the ranks that have the same ones.
    """

    loss: Tensor
    aux: Any
    gradients: Gradients
    rows: float


class GenomeLoss:
    """Loss and aux of a p-net on the weights of a genome.

    Args:
        pnet: the p-net.
        loss_fn: the loss function.
        layout: where the genome lives.
        options: of the step.
        split: how layers are split over tensor ranks.
        names: parameters that this rank makes; None is all.
        adapt: changes the skeleton further.
        submodule_call_error: why no part of the p-net can be called alone, "" where it can.
        others: what the p-net takes for parameters that are not made here, from those that are.

    Attributes:
        generator: from leaves to weights.
        net: from weights to outputs.
    """

    def __init__(
        self,
        pnet: nn.Module,
        loss_fn: LossFn,
        layout: Layout,
        options: StepOptions,
        split: Undivided,
        *,
        names: Collection[str] | None = None,
        adapt: Callable[[nn.Module], Collection[str]] = lambda net: (),
        submodule_call_error: str = "",
        others: Callable[[Params, Mapping[str, tuple[int, ...]]], Params] = lambda weights, shapes: weights,
    ) -> None:
        self._loss_fn, self._split, self._others, self._amp = loss_fn, split, others, options.amp
        base = layout.plan.base_tensors(pnet)
        self.generator = Generator(
            layout.plan,
            kernel=options.kernel,
            layout=layout,
            pnet=pnet,
            lazy=options.usable_lazy,
            remat=options.remat == "layer",
            names=names,
            pieces=split.pieces,
            base=base,
        )
        forms = self.generator.forms
        self.net = PureNet(pnet, forms, lambda net: {*split.adapt(net), *adapt(net)}, base, submodule_call_error)

    def weights(self, given: Given) -> Params:
        """The weights, in their forms."""
        return self.generator(given.leaves, given.noise, counts=given.counts)

    def __call__(self, given: Given) -> tuple[Tensor, Any]:
        """Loss and aux in one graph."""
        return self.on(self.weights(given), given.buffers, given.batch)

    def on(self, weights: Params, buffers: Params, batch: Any) -> tuple[Tensor, Any]:
        """Loss and aux for these weights; buffers are updated."""
        weights = self._split.place(self._others(weights, self._split.shapes))
        with self._autocast(weights) if self._amp else nullcontext():
            out = self.net.run(weights, buffers, self._loss_fn, batch)
        loss, aux = loss_and_aux(out)
        loss = self._split.plain(loss)
        if not loss.requires_grad:
            raise ValueError(NO_GRADIENT)
        return loss.reshape(()), aux

    def _autocast(self, weights: Params) -> AbstractContextManager[Any]:
        device = next((w.device.type for w in weights.values()), "cpu")
        return torch.autocast(device, self._amp)

    def rows(self, rows: float) -> float:
        """Rows whose mean the last loss was: those of this rank's outputs, where these are a part of the rows."""
        # Rows of zeros have a weight as well; what comes of them does not count.
        return (rows or 1) if self._split.local_rows is None else self._split.local_rows

    def gradients(self, loss: Tensor, of: list[Tensor]) -> Gradients:
        """Gradients of a loss of the p-net; None for tensors that have no part in it."""
        # Backward under a caller's autocast would compute the products of generation in half precision.
        with self._split.backward(), outside_autocast(loss):
            return torch.autograd.grad(loss, of, allow_unused=True)


def outside_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """What switches a caller's autocast off for the device of a tensor."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


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


def noise_of(plan: Plan, seed: int, like: Tensor) -> Noise | None:
    """The noise of stochastic g-nets in a step of this seed; None where there are none."""
    # Not dropout's seed: equal seeds draw the same numbers.
    return sample_noise(plan, torch.Generator().manual_seed(seed ^ 1), like) if plan.stochastic else None


def loss_and_aux(out: Any) -> tuple[Tensor, Any]:
    """What a loss function returned, as a scalar tensor and aux; ValueError for anything else."""
    pair = isinstance(out, tuple) and len(out) == 2
    loss, aux = out if pair else (out, {})
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = str(tuple(loss.shape)) if isinstance(loss, Tensor) else type(loss).__name__
        got = f"a tuple of {len(out)}" if isinstance(out, tuple) and not pair else got
        raise ValueError(f"loss_fn must return a scalar tensor, or (scalar tensor, aux), got {got}")
    return loss, aux
