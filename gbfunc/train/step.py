"""The training step: a pure function `(state, batch) -> (state, info)`, and `init`, which makes the first state.

state, batch -> loss and gradient (`gradients`) -> sums over ranks -> optimizer -> new state
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.formats import Stored, as_stored
from gbfunc.genome import check_genome, check_seed, init_genome
from gbfunc.parallel import Layout, Placement, from_rank_0, gather_state, shard_state
from gbfunc.pnet.describe import parameter_infos
from gbfunc.train.gradients.loss import Objective
from gbfunc.train.optimizers import Optimizer, OptState, chosen
from gbfunc.train.options import StepOptions
from gbfunc.trees import BUFFERS, DIRECT, GNET, flat_genome, flatten_tree, unflatten_tree
from gbfunc.types import Genome, GenomeLike, GNets, Params

_SHAPE, _KIND = attrgetter("shape"), attrgetter("shape", "dtype")
_READ = {"cpu"}  # devices from which Python reads a value without waiting
SHUFFLE_CHECK_STEP = 200  # at this training step, warn if permuted targets give about the loss of true targets, or less
_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio (Knuth, TAOCP 3, section 6.4): gives each step a seed
_CONSTANT = (
    "after {} steps the loss, {:.4g}, is as large as that of a constant prediction: targets in another order give no "
    "larger one; try another learning rate (plan.suggested_lr()), then a larger genome"
)


class TrainState(NamedTuple):
    """The state of a training: a pytree of tensors. Functions that take a `Genome` also take a `TrainState`.

    Attributes:
        gnets: the g-nets' parameters, as in `Genome`.
        direct: parameters of the p-net that are trained directly, by name.
        buffers: buffers of the p-net, by name.
        opt: the optimizer's state.
        step: number of training steps so far, int64 on the CPU.
        seed: seed of dropout and noise, int64 on the CPU.
        codes: the quantization steps that `rounding="auto"` chose; otherwise empty.
    """

    gnets: GNets
    direct: Params
    buffers: Params
    opt: Any
    step: Tensor
    seed: Tensor
    codes: Tensor = torch.zeros(0, dtype=torch.float64, device="cpu")


# Allow `torch.load(weights_only=True)` to load these classes.
torch.serialization.add_safe_globals([Genome, OptState, TrainState])


class StepInfo(NamedTuple):
    """The report of a training step.

    Attributes:
        loss: the loss, detached, averaged over microbatches.
        grad_norm: Euclidean norm of the genome's gradient before clipping.
        finite: a bool tensor, whether loss and gradient are finite. If False, the training step has changed nothing but
            the state's `step` and, on an accelerator, the optimizer's count of updates.
        aux: the second output of the loss function, detached, averaged over microbatches; {} if there is none.
    """

    loss: Tensor
    grad_norm: Tensor
    finite: Tensor
    aux: Any


class TrainStep:
    """A training step: `init(seed) -> state` and `train_step(state, batch) -> (state, info)`; see `make_train_step`.

    Attributes:
        mesh: the ranks that run each training step together.
    """

    def __init__(
        self, pnet: nn.Module, objective: Objective, optimizer: Optimizer, layout: Layout, options: StepOptions
    ) -> None:
        plan = layout.plan
        self.plan, self.mesh, self._layout = plan, layout.mesh, layout
        self._pnet, self._objective, self._optimizer, self._options = pnet, objective, optimizer, options
        self._roles = {f"{GNET}{e.name}/{k}": leaf.role for e in plan.ensembles for k, leaf in e.leaves.items()}
        self._roles |= {f"{DIRECT}{t.name}": "direct" for t in plan.direct}
        frozen = {f"{DIRECT}{p.name}" for p in parameter_infos(pnet) if not p.tensor.requires_grad}
        self._frozen = frozen & self._roles.keys()
        self._trained = [name for name in self._roles if name not in self._frozen]
        self._empty = {k for k in layout.split if not layout.shapes[k][0]}  # leaves without tiles on this rank
        self._shapes = layout.shapes if layout.sharded else None
        self._expected = layout.shapes | {f"{BUFFERS}{b.name}": b.shape for b in plan.buffers}

    @torch.inference_mode(False)
    def init(self, seed: int = 0, *, genome: GenomeLike = None, device: torch.device | str | None = None) -> TrainState:
        """Create a new state. The same seed gives the same genome for any mesh and placement.

        Without `genome`, direct parameters and buffers start with the values of the p-net or, on a mesh, of rank 0's
        p-net. All ranks of a mesh must call this method. If the mesh splits the genome, each rank gets its own tiles.

        Args:
            seed: seed of the g-nets' initial parameters, of dropout and of noise: 0 <= seed < 2**63.
            genome: the genome from which the training starts, such as one from `gb.load`; by default, a random one.
            device: device of the state; by default the p-net's device or, on a mesh of several GPUs, the rank's GPU.
        """
        seed = check_seed(seed)
        if device is None and self.mesh.world > 1 and self.mesh.device.type != "cpu":
            device = self.mesh.device
        drawn: Genome = init_genome(self.plan, self._pnet, seed, device=device)
        named = flatten_tree(drawn)
        if genome is not None:
            check_genome(self.plan, genome)
            named = {k: x.detach().to(named[k], copy=True) for k, x in flatten_tree(genome).items() if k in named}
        drawn = unflatten_tree(dict(zip(named, from_rank_0(self.mesh, [*named.values()]), strict=True)), drawn)
        named = flat_genome(drawn)
        if (loss := self._objective.strategy.loss) is not None:
            loss.generator.prepare(named)
        opt = self._optimizer.init({k: named[k] for k in self._trained}, self._roles)
        step, number = (torch.tensor(n, dtype=torch.int64, device="cpu") for n in (0, seed))
        return self.shard(TrainState(*drawn, opt, step, number))

    def rounding(self, state: TrainState) -> Stored | None:
        """Return the dtype or quantization steps to which the next training step rounds, or None without rounding."""
        return self._options.rounding

    def stored(self, state: TrainState) -> Stored | None:
        """Return the dtype or quantization steps for `gb.save`. With "auto", the file has at most `genome_bytes`."""
        return self._options.rounding

    def __deepcopy__(self, memo: Any) -> TrainStep:
        return self  # A copy is the same object, because a training step has no state.

    @property
    def placement(self) -> Placement:
        """How the genome is placed on ranks: `"replicated"`, `"sharded"` or `"factors"`."""
        return self._layout.placement

    @property
    def settings(self) -> Mapping[str, Any]:
        """The optimizer's class, learning rate and options, and `clip_norm`."""
        return {**self._optimizer.settings, "clip_norm": self._options.clip_norm}

    def shard(self, state: TrainState) -> TrainState:
        """Return this rank's part of a state: all tensors, but only this rank's rows of leaves that are split."""
        return shard_state(self._layout, state)

    def gather(self, gnet_params: TrainState) -> TrainState:
        """Return the state with all rows of split leaves, as for `gb.save`. All ranks must call this method."""
        return gather_state(self._layout, gnet_params)

    def fitted(self, tensors: Params) -> Params:
        """Return a saved state's tensors, which fit any mesh. Raise ValueError for a state saved with `local_steps`."""
        if any(name.startswith("opt/ranks/") for name in tensors):
            raise ValueError("it is from a training with local steps: pass local_steps= as well")
        return tensors

    @property
    def dense_reads(self) -> dict[str, int]:
        """How often eager code read the dense tensor of a weight that layers use as factors, by the weight's name."""
        loss = self._objective.strategy.loss
        return {} if loss is None else loss.net.dense_reads

    def __call__(self, gnet_params: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """Train on one batch.

        Args:
            gnet_params: the state, from `init` or the last step. With `donate=True`, the step overwrites this state.
            batch: the batch for the loss function. Microbatches split all tensors along dimension 0. With a
                mesh, `batch` is this rank's share of the global batch (`mesh.shard_batch(batch)`): the first dimension
                of every tensor is the number of rows of the share, possibly 0, and `aux` may hold only scalars.

        Raises:
            CollectiveError: if another rank does not answer.
            FloatingPointError: with `on_nonfinite="raise"`, if the loss or the gradient is not finite.
            ValueError: if the state does not fit the plan, if the batch cannot be split into microbatches, if the loss
                is not a scalar or does not depend on trained leaves, or if a forward changes a buffer's shape or dtype.
        """
        state, options = gnet_params, self._options
        named = checked_state(state)
        shapes = {**named, **{f"{BUFFERS}{k}": v for k, v in state.buffers.items()}}
        if dict(zip(shapes, map(_SHAPE, shapes.values()), strict=True)) != self._expected:
            check_genome(self.plan, state, self._shapes)
        named = named if options.donate else own_direct(named)
        flat = {k: named[k].detach().requires_grad_() for k in self._trained}
        if not flat:
            words = "no parameter is generated, and no direct one requires grad"
            raise ValueError(f"the loss does not depend on any trained leaf: there is none ({words})")
        leaves, rate = named | flat, dict[str, Tensor]()
        if (rounding := self.rounding(state)) is not None:
            with torch.enable_grad():
                leaves, rate = as_stored(self.plan, leaves, rounding)
        step = int(state.step)
        loss, aux, gradients, buffers, norm = self._objective(
            leaves, flat, state.buffers, batch, step_seed(int(state.seed), step), step
        )
        if step == SHUFFLE_CHECK_STEP and self.mesh.world == 1 and (others := _other_targets(batch)):
            *turned, equal = (
                float(self._objective(leaves, flat, state.buffers, other, step_seed(int(state.seed), step), step).loss)
                for other in others
            )
            # If equal targets give exactly the same loss, the loss function does not use the targets: do not warn.
            if float(loss) > min(turned) - 0.01 * abs(min(turned)) and equal != float(loss):
                warnings.warn(_CONSTANT.format(step, float(loss)), UserWarning, stacklevel=2)
        if [*map(_KIND, buffers.values())] != [*map(_KIND, state.buffers.values())]:
            check_genome(self.plan, state._replace(buffers=buffers), self._shapes)
            check_dtypes(state.buffers, buffers)
        # x - x is 0 if x is finite, otherwise nan, and nan != nan. `isfinite` would take three times as long.
        info = StepInfo(loss, norm, (loss - loss) == (norm - norm), aux)
        if options.clip_norm is not None:
            factor = (options.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            clipped = torch._foreach_mul([*gradients.values()], factor)  # pyright: ignore[reportPrivateImportUsage]
            gradients = dict(zip(gradients, clipped, strict=True))
        params = {k: named[k].detach() if named[k].requires_grad else named[k] for k in flat}
        if rate:
            gradients = {k: g + rate[k] for k, g in gradients.items()}
        found = self._updated(state, params, gradients, buffers, info)
        if found is None:
            return state._replace(step=state.step + 1), info
        new, opt, buffers = found
        named |= new
        gnets = {e: {k: named[f"{GNET}{e}/{k}"] for k in tensors} for e, tensors in state.gnets.items()}
        direct = {k: named[f"{DIRECT}{k}"] for k in state.direct}
        return TrainState(gnets, direct, buffers, opt, state.step + 1, state.seed, state.codes), info

    def _updated(
        self, state: TrainState, params: Params, gradients: Params, buffers: Params, info: StepInfo
    ) -> tuple[Params, OptState, Params] | None:
        """Return new leaves, optimizer state and buffers. Return None if loss or gradient is not finite.

        On an accelerator, the CPU would have to wait for `info.finite`. From the second update on, the accelerator
        therefore selects the old or the new values itself, and the result is never None.
        """
        options, device, old = self._options, info.finite.device.type, state.opt
        read = device in _READ or options.on_nonfinite == "raise" or int(old.step) == 0
        if read and not info.finite:
            if options.on_nonfinite == "raise":
                got = f"got loss {float(info.loss)}, gradient norm {float(info.grad_norm)}; the state is unchanged"
                raise FloatingPointError(f"step {int(state.step)}: expected finite numbers, {got}: lower the rate")
            return None
        present, opt = params, old
        if self._empty:
            present = {k: v for k, v in params.items() if k not in self._empty}
            gradients = {k: gradients[k] for k in present}
            opt = old._replace(leaves={k: old.leaves[k] for k in present})
        chosen_by = {} if read else {"finite": info.finite}
        new, opt = self._optimizer.update(gradients, opt, present, self._roles, donate=options.donate, **chosen_by)
        if self._empty:
            new, opt = params | new, opt._replace(leaves=old.leaves | opt.leaves)
        if chosen_by and buffers:
            buffers = chosen(info.finite, buffers, state.buffers)
        return new, opt, buffers


def _other_targets(batch: Any) -> list[Any]:
    """Return copies of a batch `(x, y)` or `{"labels": y}`: up to four with permuted y, one with equal rows in y."""
    labelled = isinstance(batch, dict)
    y = batch.get("labels") if labelled else batch[1] if type(batch) in (tuple, list) and len(batch) == 2 else None
    if not isinstance(y, Tensor) or not y.ndim or len(y) < 2:
        return []
    # Make targets contiguous, because new strides would recompile the training step.
    others = *(y.roll(n, 0) for n in range(1, min(5, len(y)))), y[:1].expand_as(y).contiguous()
    return [{**batch, "labels": other} if labelled else (batch[0], other) for other in others]


def check_dtypes(before: Params, after: Params) -> None:
    """Raise ValueError if a forward changed the dtype of a buffer."""
    for name, x in before.items():
        if after[name].dtype != x.dtype:
            words = f"a forward must keep the dtype {x.dtype} of the buffer {name!r}, got {after[name].dtype}"
            raise ValueError(f"{words}: cast the buffer back, or register it with this dtype")


def own_direct(leaves: Params) -> Params:
    """Copy direct parameters, because a forward may change them in place (`nn.Embedding(max_norm=)`)."""
    return {k: v.detach().clone() if k.startswith(DIRECT) else v for k, v in leaves.items()}


def step_seed(seed: int, step: int) -> int:
    """Return the seed of dropout and noise at a training step."""
    return (seed + _MIX * (step + 1)) % 2**63


def checked_state(state: Any) -> Params:
    """Return a state's leaves by the names of `flat_genome`. Raise TypeError if `state` is not a `TrainState`."""
    for field in TrainState._fields:
        if not hasattr(state, field):
            words = f"train_step takes (state, batch), got a {type(state).__name__} first"
            raise TypeError(f"{words}: make the state by train_step.init(seed), or train_step.init(genome=genome)")
    named = {f"{GNET}{e}/{k}": x for e, leaves in state.gnets.items() for k, x in leaves.items()}
    named |= {f"{DIRECT}{k}": x for k, x in state.direct.items()}
    return named
