"""Training steps as CUDA graphs: loss, gradient and update are recorded once per batch shape, and then replayed.

A replay reads its inputs from fixed memory: the state, the batch, the learning rates, and the seeds of torch's
generators. The returned state lies in the same memory: the next step overwrites it.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gbfunc.parallel import Layout
from gbfunc.train.gradients.loss import Objective, seeded
from gbfunc.train.optimizers import Optimizer
from gbfunc.train.options import StepOptions
from gbfunc.train.param_groups import LearningRate, learning_rate
from gbfunc.train.step import SHUFFLE_CHECK_STEP, StepInfo, TrainState, TrainStep, step_seed
from gbfunc.trees import flatten_tree, tree_leaves, tree_map, unflatten_tree

Step = Callable[[Any, Any], tuple[Any, Any]]  # `(state, batch) -> (state, info)`
EAGER_STEPS = 3  # number of eager steps for a batch shape before a graph is captured
MAX_GRAPHS = 4  # maximum number of batch shapes that have a graph

_ADVICE = (
    "a p-net or a loss function that reads a number of the GPU (item(), float(), a tensor in an `if`) or computes on "
    "the CPU cannot be captured, and neither can an optimizer with a count of steps on the CPU (take Adam or AdamW, or "
    "capturable=True) or a class that reads the rate of a schedule (fused=True): take cuda_graph=False otherwise"
)


class CudaGraph:
    """A CUDA graph: `capture` records a function, and `replay` runs the recorded kernels."""

    def __init__(self, like: Tensor) -> None:
        if like.device.type != "cuda":
            raise ValueError(f"cuda_graph=True needs a state on a CUDA device, got {like.device}")
        self._graph = torch.cuda.CUDAGraph()
        self.replay = self._graph.replay

    def capture(self, function: Callable[[], Any]) -> Any:
        """Record the function without running its kernels; the returned tensors lie in the graph's memory."""
        with torch.cuda.graph(self._graph):
            return function()


class Rates:
    """Learning rates of schedules. Eager steps get numbers. Recorded steps get tensors, which `set` updates."""

    def __init__(self) -> None:
        self.tensors: dict[LearningRate, Tensor | None] = {}
        self.captured = False

    def __call__(self, lr: LearningRate, step: int) -> float | Tensor:
        """Return the learning rate at a training step."""
        known = self.tensors.setdefault(lr, None)
        return known if self.captured and known is not None else learning_rate(lr, step)

    def set(self, step: int, device: torch.device) -> None:
        """Write the learning rates of a training step into the tensors that graphs read."""
        for lr, x in self.tensors.items():
            x = torch.zeros((), device=device) if x is None else x
            self.tensors[lr] = x.fill_(learning_rate(lr, step))


class Graphs:
    """A training step with one graph per batch shape. With `fallback`, a step that cannot be recorded runs eagerly."""

    def __init__(self, step: Step, rates: Rates, fallback: bool = False) -> None:
        self._step, self._rates, self._fallback = step, rates, fallback
        self._calls: dict[Any, int] = {}
        self._graphs: dict[Any, tuple[Any, dict[str, Tensor], Any]] = {}  # by batch shape: (graph, inputs, info)
        self._state: Any = None  # the state that all graphs read and overwrite
        self._fixed: dict[str, Tensor] = {}  # tensors of `_state` by name

    def __call__(self, state: Any, batch: Any, seed: int) -> tuple[Any, Any]:
        """Train on one batch; `seed` is the seed of dropout."""
        if self._fallback and not next(iter(_device_tensors(state).values())).is_cuda:
            return self._step(state, batch)
        tensors, key = _batch_tensors(batch)
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] <= EAGER_STEPS:
            return self._step(state, batch)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._captured(key, state, batch)
            except (RuntimeError, ValueError) as error:
                if not self._fallback:
                    raise
                warnings.warn(f"steps are not captured: {error}", UserWarning, stacklevel=3)
                self._calls[key] = -(2**62)  # This batch shape runs eagerly from now on.
                return self._step(state, batch)
        graph, static, info = self._graphs[key]
        _write(self._fixed, _device_tensors(state))
        torch._foreach_copy_([*static.values()], [*tensors.values()])  # pyright: ignore[reportPrivateImportUsage]
        device = next(iter(self._fixed.values())).device
        self._rates.set(int(state.opt.step.flatten()[0]), device)
        with seeded(seed, device):
            graph.replay()
        opt = self._state.opt._replace(step=state.opt.step + 1)
        # Copy `info`, because the next replay overwrites the memory of its tensors.
        info = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, info)
        return self._state._replace(opt=opt, step=state.step + 1, seed=state.seed, codes=state.codes), info

    def _captured(self, key: Any, state: Any, batch: Any) -> tuple[Any, dict[str, Tensor], Any]:
        if len(self._graphs) == MAX_GRAPHS:
            words = f"cuda_graph=True supports {MAX_GRAPHS} shapes of batch, got another: {key[0]}"
            raise ValueError(f"{words} after {[k[0] for k in self._graphs]}: pass drop_last=True or pad the batches")
        moving = _device_tensors(state)
        device = next(iter(moving.values())).device
        graph = CudaGraph(next(iter(moving.values())))
        static = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, batch)
        tensors, _ = _batch_tensors(static)
        if other := {k: x for k, x in (moving | tensors).items() if x.device != device}:
            name, x = next(iter(other.items()))
            raise ValueError(f"a captured step needs all tensors on {device}, got {name} on {x.device}; {_ADVICE}")
        if self._state is None:
            tree = unflatten_tree({k: x.clone() for k, x in moving.items()}, _device_state(state))
            leaves = tree.pop("opt")
            self._state = state._replace(**tree, opt=state.opt._replace(leaves=leaves))
            self._fixed = _device_tensors(self._state)
        _write(self._fixed, moving)
        self._rates.set(int(state.opt.step.flatten()[0]), device)
        opt = self._state.opt._replace(step=state.opt.step)
        fixed = self._state._replace(step=state.step, seed=state.seed, opt=opt)

        def step() -> Any:
            after, info = self._step(fixed, static)
            # Copy the new state into the fixed memory, from which the next replay reads the state.
            _write(self._fixed, _device_tensors(after))
            return info

        self._rates.captured = True
        try:
            return graph, tensors, graph.capture(step)
        except RuntimeError as error:
            raise ValueError(f"cuda_graph=True: {str(error).splitlines()[0]}; {_ADVICE}") from error
        finally:
            self._rates.captured = False


class CapturedTrainStep(TrainStep):
    """A `TrainStep` that is captured as CUDA graphs."""

    def __init__(
        self, pnet: nn.Module, objective: Objective, optimizer: Optimizer, layout: Layout, options: StepOptions
    ) -> None:
        self.rates = Rates()
        optimizer = optimizer._replace(update=partial(optimizer.update, rate=self.rates))
        super().__init__(pnet, objective, optimizer, layout, options)
        self._graphs = self.of(super().__call__)

    def of(self, step: Step) -> Graphs:
        """Return `Graphs` that record another function with the same optimizer, such as the step of a population."""
        return Graphs(step, self.rates, self._options.cuda_graph == "auto")

    def __call__(self, gnet_params: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """Train as `TrainStep` does. The returned state lies in the graphs' memory: the next call overwrites it."""
        step = int(gnet_params.step)
        if step == SHUFFLE_CHECK_STEP:  # This step reads losses on the CPU, so run it without a graph.
            return super().__call__(gnet_params, batch)
        return self._graphs(gnet_params, batch, step_seed(int(gnet_params.seed), step))


def _device_state(state: Any) -> dict[str, Any]:
    return {"gnets": state.gnets, "direct": state.direct, "buffers": state.buffers, "opt": state.opt.leaves}


def _device_tensors(state: Any) -> dict[str, Tensor]:
    return flatten_tree(_device_state(state))


def _write(into: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    both = zip(into.values(), tensors.values(), strict=True)
    other = [(x, y) for x, y in both if x is not y and x.data_ptr() != y.data_ptr()]
    if other:
        torch._foreach_copy_([x for x, _ in other], [y for _, y in other])  # pyright: ignore[reportPrivateImportUsage]


def _batch_tensors(batch: Any) -> tuple[dict[str, Tensor], Any]:
    """Return a batch's tensors by name, and the key of the batch's graph: shapes, dtypes and all non-tensor values."""
    leaves = tree_leaves(batch, "batch")
    tensors = {name: x for name, x in leaves if isinstance(x, Tensor)}
    shapes = tuple((name, tuple(x.shape), x.dtype) for name, x in tensors.items())
    return tensors, (shapes, tuple((name, repr(x)) for name, x in leaves if not isinstance(x, Tensor)))
