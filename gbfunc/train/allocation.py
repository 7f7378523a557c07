"""Chooses the quantization steps of a genome for a given file size, from the optimizer's means of squared gradients."""

from typing import Any

import torch
from torch import Tensor

from gbfunc.formats import Steps, allocate, compact, document, file_bytes
from gbfunc.formats.step_stream import code_bits
from gbfunc.formats.steps import parts_of
from gbfunc.genome import check_genome
from gbfunc.parallel import weighted_mean
from gbfunc.plan import Plan
from gbfunc.train.step import StepInfo, TrainState, TrainStep, checked_state
from gbfunc.trees import stored_tensors, tree_leaves
from gbfunc.types import Genome

# Fractions of the training after which quantization steps are chosen: first after 60 %, and again four times.
_WHEN = (0.6, 0.65, 0.7, 0.775, 0.85)
_UNSET = -1000.0  # fills the places of missing quantization steps in the tensor `TrainState.codes`
_SQUARES = ("exp_avg_sq", "square_avg")  # torch's names for running means of squared gradients


def allocate_steps(
    plan: Plan, gnet_params: TrainState, genome_bytes: int, *, batch_size: int = 0, metadata: Any = None
) -> Steps:
    r"""Choose quantization steps with which a genome fits into `genome_bytes`, and rounding raises the loss least.

    A *part* is the numbers of a leaf that belong to one tensor of the p-net. Each part has a quantization step $s$. All
    parts get the same $s \sqrt{\overline{g^2}}$, where $\overline{g^2}$ is the mean square of the part's gradient in
    the optimizer's state. Then the loss grows least (reverse water-filling, see `gbfunc.formats.steps`).

    Pass the result to `save`, and to `make_train_step(rounding=)`. The loss is then computed from the rounded genome
    that the file will contain. With a `batch_size`, the loss has a penalty on the number of bits in the file. Call this
    function after 60 % of the training, continue with a training step made with the result, and call the function again
    a few times: training reduces the bits that some numbers need, which allows finer quantization steps for all.

    Args:
        plan: the plan.
        gnet_params: the state, not split over ranks. Its optimizer must average squared gradients, as Adam does.
        genome_bytes: maximum size of the whole file in bytes. The file may be smaller, because a part's quantization
            step is at least the part's largest value divided by 2,047.
        batch_size: number of examples in a batch; 0 adds no penalty to the loss.
        metadata: the metadata that `save` will store; it counts towards the size.

    Raises:
        ValueError: if the optimizer has no finite mean squares of gradients or has made no update, if the state does
            not fit the plan, if `genome_bytes` is too small, or if quantization would distort a frozen parameter.

    >>> steps = gb.allocate_steps(plan, state, genome_bytes=1_000, batch_size=128)  # doctest: +SKIP
    >>> train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer, rounding=steps)  # doctest: +SKIP
    >>> gb.save("net.genome", plan, state, steps)  # doctest: +SKIP
    """
    check_genome(plan, gnet_params, buffers=False)
    leaves, opt, text = stored_tensors(gnet_params), gnet_params.opt, document(plan, metadata)
    name = next((name for leaf in opt.leaves.values() for name in _SQUARES if name in leaf), None)
    if name is None or int(opt.step) == 0:
        what = "no step was taken" if name else f"its optimizer keeps {[*next(iter(opt.leaves.values()), {})]}"
        raise ValueError(f"expected mean squares of gradients, as Adam has after a step: {what}; train with Adam first")
    squares = {k: leaf[name].detach().cpu().to(torch.float32) for k, leaf in opt.leaves.items()}
    if broken := [k for k, x in squares.items() if not x.isfinite().all()]:
        raise ValueError(f"the mean squares of the gradients of {broken[0]!r} are not finite: training has diverged")
    steps = allocate(plan, leaves, squares, 0.0, batch_size)
    coarsest = len(compact.pack(text, plan, leaves, steps)[0])
    if coarsest > genome_bytes:
        raise ValueError(f"genome_bytes must be at least {coarsest:,} for this plan, got {genome_bytes:,}: raise it")
    over, bits = coarsest - genome_bytes, code_bits(plan, leaves, steps)
    while True:
        # Subtract from the bits that `steps` take. A limit between these bits and the last limit would change nothing.
        bits = max(0.0, bits - 8.0 * over)
        steps = allocate(plan, leaves, squares, bits, batch_size)
        over = len(compact.pack(text, plan, leaves, steps)[0]) - genome_bytes
        if over <= 0 or bits == 0:
            return steps
        bits = code_bits(plan, leaves, steps)


class AutoTrainStep(TrainStep):
    """A `TrainStep` with `rounding="auto"`: despite its name, `state.codes` holds the current quantization steps."""

    _last: tuple[Tensor | None, Steps | None] = None, None

    def init(self, seed: int = 0, **options: Any) -> TrainState:
        """Create a new state, without quantization steps."""
        return super().init(seed, **options)._replace(codes=_packed(self.plan, None))

    def __call__(self, gnet_params: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """Train on one batch. After each fraction in `_WHEN` of `total_steps`, first choose new quantization steps."""
        checked_state(gnet_params)
        if int(gnet_params.step) in {round((self._options.total_steps or 0) * part) for part in _WHEN} - {0}:
            first = (len(x) for _, x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim)
            rows = torch.tensor(next(first, 0) / (self.mesh.world / self.mesh.shards))
            total = round(float(weighted_mean(self._layout, rows, [])[0]))
            gnet_params = gnet_params._replace(codes=_packed(self.plan, self._allocated(gnet_params, total)))
        return super().__call__(gnet_params, batch)

    def rounding(self, state: TrainState) -> Steps | None:
        """Return the quantization steps in the state; None before the first choice."""
        if self._last[0] is not state.codes:
            self._last = state.codes, _unpacked(self.plan, state.codes)
        return self._last[1]

    def stored(self, state: TrainState) -> Steps:
        """Return the state's quantization steps; new ones if the state has none or the file exceeds `genome_bytes`."""
        steps, options = self.rounding(state), self._options
        genome = Genome(state.gnets, state.direct, state.buffers)
        size = sum(file_bytes(self.plan, steps, genome, options.metadata).values()) if steps else 0
        return steps if steps and size <= (options.genome_bytes or 0) else self._allocated(state)

    def _allocated(self, state: TrainState, batch_size: int = 0) -> Steps:
        n_bytes, metadata = self._options.genome_bytes or 0, self._options.metadata
        return allocate_steps(self.plan, state, n_bytes, batch_size=batch_size, metadata=metadata)


def _packed(plan: Plan, steps: Steps | None) -> Tensor:
    """Pack `steps.rate` and the indices of the quantization steps into a tensor. `_UNSET` replaces missing numbers."""
    values = torch.full((1 + len(parts_of(plan)),), _UNSET, dtype=torch.float64, device="cpu")
    if steps is not None:
        # `parts_of` lists running statistics last. If they have no quantization steps, their numbers stay `_UNSET`.
        known = [steps.rate, *steps.of_parts(parts_of(plan, steps.statistics))]
        values[: len(known)] = torch.tensor(known, dtype=torch.float64, device="cpu")
    return values


def _unpacked(plan: Plan, values: Tensor) -> Steps | None:
    rate, *indices = values[values != _UNSET].tolist() or [None]
    return None if rate is None else Steps.of(parts_of(plan)[: len(indices)], [*map(int, indices)], rate)
