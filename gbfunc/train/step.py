"""The training step: a pure function of (state, batch), and the state's `init`.

state, batch -> loss and gradient (`gradients`) -> sums over ranks -> optimizer -> new state
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.genome import check_genome, check_plan, init_genome
from gbfunc.parallel import (
    Layout,
    Mesh,
    Placement,
    Rows,
    check_equal,
    from_rank_0,
    gather_state,
    make_layout,
    reduce_step,
    shard_state,
    single_rank_mesh,
    text_of,
    zero_uncounted,
)
from gbfunc.plan import DTYPES, Plan, StoredDtype, rounded
from gbfunc.pnet import eval_mode_warning, parameter_infos
from gbfunc.train.gradients import LossFn, Objective
from gbfunc.train.optimizers import Optimizer, OptState
from gbfunc.train.options import Lazy, Remat, StepOptions
from gbfunc.trees import BUFFERS, DIRECT, flat_genome, flatten_tree, like_genome, n_rows, tree_map, unflatten_tree
from gbfunc.types import Genome, GNets, Kernel, Params

_MIX = 0x9E3779B97F4A7C15
"""2**64 / golden ratio (Knuth, TAOCP 3, section 6.4): spreads steps over seeds."""


class TrainState(NamedTuple):
    """All that a step carries over: a pytree of tensors.

    Attributes:
        gnets: leaves of every ensemble.
        direct: direct parameters.
        buffers: the p-net's buffers.
        opt: the optimizer's state.
        step: steps taken, int64 on the CPU.
        seed: seed of dropout and noise, int64 on the CPU.
    """

    gnets: GNets
    direct: Params
    buffers: Params
    opt: Any
    step: Tensor
    seed: Tensor


class StepInfo(NamedTuple):
    """What a step reports.

    Attributes:
        loss: the loss, detached, averaged over microbatches.
        grad_norm: Euclidean norm of the genome's gradient before clipping.
        finite: whether loss and gradient are finite, a tensor that works as a bool; where not, the step changed
            nothing but `step` (on an accelerator the optimizer's count of steps, too).
        aux: what the loss function returned beside the loss, detached, averaged over microbatches; {} without.
    """

    loss: Tensor
    grad_norm: Tensor
    finite: Tensor
    aux: Any


class TrainStep:
    """`train_step(state, batch) -> (state, info)`, and `train_step.init(seed) -> state`. Made by `make_train_step`.

    Attributes:
        plan: the plan.
        mesh: the ranks that take each step together.
    """

    def __init__(
        self, pnet: nn.Module, objective: Objective, optimizer: Optimizer, layout: Layout, options: StepOptions
    ) -> None:
        plan = layout.plan
        self.plan, self.mesh, self._layout = plan, layout.mesh, layout
        self._shapes = layout.shapes if layout.sharded else None
        self._ranks, self._checked = layout.mesh.world, False
        self._pnet, self._objective, self._optimizer, self._options = pnet, objective, optimizer, options
        self._roles = {f"gnets/{e.name}/{k}": leaf.role for e in plan.ensembles for k, leaf in e.leaves.items()}
        self._roles |= {f"direct/{t.name}": "direct" for t in plan.direct}
        # Running statistics; caches, which are not persistent, stay each rank's.
        self._averaged = [b.name for b in plan.buffers if b.persistent and DTYPES[b.dtype].is_floating_point]
        frozen = {f"direct/{p.name}" for p in parameter_infos(pnet) if not p.tensor.requires_grad}
        self._frozen = frozen & self._roles.keys()
        self._expected = layout.shapes | {f"{BUFFERS}{b.name}": b.shape for b in plan.buffers}

    @torch.inference_mode(False)
    def init(self, seed: int = 0, *, device: torch.device | str | None = None) -> TrainState:
        """A fresh state; the same seed gives the same genome, whatever the mesh and the placement.

        With a mesh of more than one rank, all of them call this: direct parameters and buffers are those of rank 0's
        p-net, and where the genome is split, each rank gets its part.

        Args:
            seed: of the g-nets, of dropout and of noise: 0 <= seed < 2**63.
            device: where it lives; None is the p-net's device, with a mesh of many GPUs the mesh's.

        Raises:
            ValueError: for a seed out of range.
            CollectiveError: if a rank is missing.
        """
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed must be an int with 0 <= seed < 2**63, got {seed!r}")
        if device is None and self.mesh.world > 1 and self.mesh.device.type != "cpu":
            device = self.mesh.device
        genome: Genome = init_genome(self.plan, self._pnet, seed, device=device)
        if self.mesh.world > 1:
            named = flatten_tree(genome)
            equal = from_rank_0(self.mesh, list(named.values()))
            genome = unflatten_tree(dict(zip(named, equal, strict=True)), genome)
        named = flat_genome(genome)
        opt = self._optimizer.init({k: v for k, v in named.items() if k not in self._frozen}, self._roles)
        step, number = (torch.tensor(n, dtype=torch.int64, device="cpu") for n in (0, seed))
        return self.shard(TrainState(*genome, opt, step, number))

    @property
    def placement(self) -> Placement:
        """Where the genome lives: `"replicated"`, `"sharded"` or `"factors"`."""
        return self._layout.placement

    @property
    def ownership(self) -> Mapping[str, Rows]:
        """Rows `(first, count, total)` of each trained leaf on this rank, by `gnets/ENSEMBLE/LEAF` or `direct/NAME`."""
        return self._layout.ownership

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decides its course: the optimizer's class, learning rate and options, and `clip_norm`."""
        return {**self._optimizer.settings, "clip_norm": self._options.clip_norm}

    def shard(self, state: TrainState) -> TrainState:
        """This rank's part of a whole state; the state itself where the genome is not split.

        Raises:
            ValueError: if the state is not a whole one of the plan.
        """
        return shard_state(self._layout, state)

    def gather(self, gnet_params: TrainState) -> TrainState:
        """The whole state, on every rank, for `gb.save`, `gb.generate` and `gb.materialize`; all ranks must call.

        Raises:
            ValueError: if the state is not this rank's part of a state of the plan.
            CollectiveError: if a rank is missing.
        """
        return gather_state(self._layout, gnet_params)

    @property
    def dense_reads(self) -> dict[str, int]:
        """How often the p-net has read weights as dense tensors, of those that are not kept so: by name."""
        return self._objective.dense_reads

    def __call__(self, gnet_params: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """One step on one batch.

        Args:
            gnet_params: the state; untouched unless the step donates.
            batch: what the loss function takes; with microbatches, its tensors are split along their first dimension.
                With a mesh, this rank's share of the global batch (`mesh.shard_batch(batch)`): all its tensors have the
                share's rows as their first dimension, which may be 0, and aux may hold scalars only.

        Raises:
            CollectiveError: if a rank is missing.
            FloatingPointError: for a loss or gradient that is not finite, with `on_nonfinite="raise"`.
            TypeError: if the state is none.
            ValueError: for a state that does not fit the plan, a batch that microbatches cannot split, or a loss that
                is no scalar or does not depend on what is trained.
        """
        state, named = checked_state(gnet_params)
        both = named | {f"{BUFFERS}{k}": v for k, v in state.buffers.items()}
        if dict(zip(both, map(attrgetter("shape"), both.values()), strict=True)) != self._expected:
            check_genome(self.plan, state, self._shapes)
        named = named if self._options.donate else own_direct(named)
        flat = {k: v.detach().requires_grad_() for k, v in named.items() if k not in self._frozen}
        if not flat:
            words = "no parameter is generated, and no direct one requires grad"
            raise ValueError(f"the loss does not depend on any trained leaf: there is none ({words})")
        if self._ranks > 1:
            self._check_ranks(state, flat, batch)
        buffers = {k: v.clone() for k, v in state.buffers.items()}
        frozen = {k: named[k] for k in self._frozen}
        leaves, seed = self._rounded(flat | frozen), step_seed(state.seed, state.step)
        loss, aux, gradients, rows, counts = self._objective(leaves, flat, buffers, batch, seed)
        # A module may change a buffer with a graph attached, which must not live from step to step.
        buffers = {k: v.detach() for k, v in buffers.items()}
        if self._ranks > 1:
            before = {k: state.buffers[k] for k in self._averaged}
            gradients = gradients if counts else zero_uncounted(self._layout, gradients)
            loss, aux, gradients, buffers, norm = reduce_step(self._layout, rows, loss, aux, gradients, buffers, before)
        else:
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]))
        info = StepInfo(loss, norm, torch.isfinite(loss) & torch.isfinite(norm), aux)
        if self._options.clip_norm is not None:
            factor = (self._options.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            gradients = {k: g * factor for k, g in gradients.items()}
        return self._committed(state, {k: v.detach() for k, v in flat.items()}, frozen, gradients, buffers, info), info

    def _rounded(self, leaves: Params) -> Params:
        """The leaves that the loss sees."""
        with torch.enable_grad():
            return leaves if self._options.rounding is None else rounded(leaves, self._options.rounding)

    def _committed(
        self, state: TrainState, params: Params, frozen: Params, gradients: Params, buffers: Params, info: StepInfo
    ) -> TrainState:
        """The state after the optimizer's step, or as it was where loss or gradient are not finite.

        On an accelerator nothing is read back to know, but at the first step, before which the optimizer has no state:
        both are computed, and one is chosen there. The optimizer's count of steps, on the CPU, counts either.
        """
        options, device = self._options, info.finite.device.type
        read = self._reads(device) or options.on_nonfinite == "raise" or int(state.opt.step) == 0
        if read and not info.finite:
            if options.on_nonfinite == "raise":
                numbers = f"loss {float(info.loss)}, gradient norm {float(info.grad_norm)}"
                raise FloatingPointError(f"step {int(state.step)}: {numbers}; the state is as it was")
            return state._replace(step=state.step + 1)
        new, opt = self._update(gradients, state.opt, params, donate=options.donate and read)
        if not read:
            old = (params, state.opt.leaves, state.buffers)

            def choose(x: Tensor, y: Tensor) -> Tensor:
                return torch.where(info.finite, x, y) if x.device.type == device else x

            new, leaves, buffers = tree_map(choose, (new, opt.leaves, buffers), old)
            opt = opt._replace(leaves=leaves)
        return like_genome(new | frozen, state)._replace(buffers=buffers, opt=opt, step=state.step + 1)

    @staticmethod
    def _reads(device: str) -> bool:
        """Whether reading a number of a device of this type costs nothing."""
        return device == "cpu"

    def _update(self, gradients: Params, opt: OptState, params: Params, donate: bool) -> tuple[Params, OptState]:
        """The optimizer's step on the leaves of which this rank has rows."""
        empty = {k for k in self._layout.split if not len(params[k])}
        if not empty:
            return self._optimizer.update(gradients, opt, params, self._roles, donate=donate)
        present = {k: v for k, v in params.items() if k not in empty}
        some = opt._replace(leaves={k: opt.leaves[k] for k in present})
        gradients = {k: gradients[k] for k in present}
        new, made = self._optimizer.update(gradients, some, present, self._roles, donate=donate)
        return params | new, made._replace(leaves=opt.leaves | made.leaves)

    def _check_ranks(self, state: TrainState, flat: Params, batch: Any) -> None:
        """Compare what must be equal between ranks, at the first step and every so many."""
        if self._checked and (not self._options.check_every or int(state.step) % self._options.check_every):
            return
        self._checked = True
        if not self._objective.takes_parts:
            rows = {"rows of the batch": str(n_rows(batch))}
            check_equal(self.mesh, rows, "tensor ranks must get the same batch", "tensor")
        same = {k: v for k, v in flat.items() if k not in self._layout.split}
        what = "ranks must hold the same state (make it by train_step.init(seed), or load the same on all of them)"
        check_equal(self.mesh, {**same, "step": state.step, "seed": state.seed}, what)
        check_equal(self.mesh, {k: flat[k] for k in self._layout.split}, what, "replicas")


def own_direct(leaves: Params) -> Params:
    """The leaves, with copies of direct ones: a forward may change those in place (`nn.Embedding(max_norm=)`)."""
    return {k: v.detach().clone() if k.startswith(DIRECT) else v for k, v in leaves.items()}


def step_seed(seed: Tensor, step: Tensor) -> int:
    """The seed of dropout and noise at a step."""
    return (int(seed) + _MIX * (int(step) + 1)) % 2**63


def checked_state(state: Any) -> tuple[TrainState, Params]:
    """A state and its leaves by name; TypeError for anything else, ValueError where no gradient can be taken."""
    if not all(map(partial(hasattr, state), TrainState._fields)):
        raise TypeError(
            f"train_step takes (state, batch), the state from train_step.init(seed), got a {type(state).__name__} first"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError("a training step needs gradients: call it outside of torch.inference_mode")
    named = flat_genome(state)
    if any(map(Tensor.is_inference, named.values())):
        raise ValueError("the state was made in torch.inference_mode, where there are no gradients: make it outside")
    return state, named


def make_train_step(
    plan: Plan,
    pnet: nn.Module,
    loss_fn: LossFn,
    optimizer: Optimizer,
    *,
    donate: bool = False,
    microbatches: int = 1,
    clip_norm: float | None = None,
    amp: torch.dtype | None = None,
    lazy: Lazy = "auto",
    remat: Remat = "none",
    on_nonfinite: Literal["skip", "raise"] = "skip",
    kernel: Kernel = "auto",
    compile: bool = False,
    mesh: Mesh | None = None,
    placement: Placement | Literal["auto"] = "auto",
    check_every: int = 100,
    parallel: Mapping[str, Any] | None = None,
    pipeline: str | None = None,
    stages: Sequence[str] | None = None,
    rounding: StoredDtype | None = None,
) -> TrainStep:
    """Make the step that trains a genome: pure, `(gnet_params, batch) -> (gnet_params, info)`.

    The p-net is copied without its weights: it is never changed, and the step keeps the training mode it has now.
    Direct parameters that do not require grad stay as they are.

    Args:
        plan: the plan.
        pnet: the p-net that it was made for.
        loss_fn: `(net, batch) -> loss` or `(loss, aux)`, `net` being the p-net on its generated weights (`GrownNet`):
            its parts can be called and its tensors read, as in an ordinary module; nothing of it can be changed.
        optimizer: from `torch_optimizer`.
        donate: the step may update the state's buffers in place: less memory and time; use only the state it returns.
        microbatches: split each batch in so many equal parts; weights are generated once, and the loss is their mean.
        clip_norm: largest Euclidean norm of the genome's gradient.
        amp: `torch.bfloat16` or `torch.float16` runs the p-net under autocast; weights are generated in float32.
        lazy: whether weights stay factors (see `generate`): True wherever they can, False nowhere, `"auto"` where a
            count of operations and bytes says that it pays for the rows of input; values agree up to rounding. Only
            layers with torch's forward apply factors: other code reads the dense weight (counted by `dense_reads`).
        remat: what backward makes again instead of keeping: nothing (`"none"`, the fastest), what lies between genome
            and weights (`"generate"`), or the weights too, each made just before its layer uses it (`"layer"`; where
            the genome is split each is gathered again, none stays factors, and all ranks must use the same layers).
        on_nonfinite: what to do on a loss or gradient that is not finite: `"skip"` keeps the state and reports it,
            `"raise"` raises.
        kernel: implementation of ReLU, periodic and bilinear g-nets: "compiled" (C++ on a CPU; on a GPU Triton, for
            ReLU g-nets alone), "eager" (PyTorch), "reference" (the definition) or "auto", compiled where that pays.
        compile: generation, p-net and loss become one compiled graph (`torch.compile`); the first step takes long.
        mesh: the ranks (`gb.mesh`) that take each step together, each on its share of the batch: the loss is the mean
            over the global batch, and all ranks call with the same arguments. None is this process alone.
        placement: where the genome lives on the mesh: `"replicated"`, each rank generates every weight, and only the
            genome's gradient is summed; `"sharded"`, each rank along the g-net axis holds an equal share of every
            ensemble's tiles, which are gathered; `"factors"`, the same, but types that have factors gather those;
            `"auto"`, by a count of bytes and operations (`gbfunc.parallel.placement`).
        check_every: steps between checks that ranks hold the same state, 0 for a check of the first step alone.
        parallel: how layers are split over the mesh's tensor axis: styles of `torch.distributed.tensor.parallel` by
            name of module, wildcards too, as `parallelize_module` takes them; `gbfunc.parallel.styles.tensor_styles`
            has those of some p-nets. Each rank generates and applies its pieces; with `lazy`, thin products travel.
            All ranks along the axis get the same rows, or, where the first layer takes a sharded input, each its part.
        pipeline: the schedule by which microbatches go through the mesh's pipeline axis, each rank running some of the
            p-net's blocks: `"gpipe"`, `"1f1b"`, `"interleaved"` or `"zbv"` (torch's). All ranks along the axis get the
            same rows, of which `microbatches` must be a divisor; the loss function must run on the meta device up to
            the p-net's call.
        stages: names of the blocks that begin a stage, but for the first one; None balances counted operations.
        rounding: the loss sees the genome as `save` with this dtype stores it, and gradients go straight through the
            rounding: a short training with it, after one without, recovers most of what rounding alone costs.

    Raises:
        ValueError: for options out of range, a p-net that is not the plan's, or one that cannot be a pure function (see
            `check_pnet`).
    """
    options = StepOptions(
        donate,
        microbatches,
        clip_norm,
        amp,
        lazy,
        remat,
        on_nonfinite,
        kernel,
        compile,
        placement,
        check_every,
        pipeline,
        None if stages is None else tuple(stages),
        rounding,
    )
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must come from gb.torch_optimizer, got {type(optimizer).__name__}")
    check_plan(plan, pnet)
    if (word := eval_mode_warning(pnet)) is not None:
        warnings.warn(word, UserWarning, stacklevel=2)
    layout = make_layout(plan, single_rank_mesh() if mesh is None else mesh, placement, lazy=lazy is not False)
    options.check_placement(layout.sharded, layout.placement)
    what = "ranks must have the same plan (make the p-net after the same torch.manual_seed on all of them)"
    check_equal(layout.mesh, {"plan": plan.to_json(), "placement": layout.placement}, what)
    texts = {"options": text_of(options), "optimizer": text_of(optimizer.settings), "parallel": text_of(parallel)}
    check_equal(layout.mesh, texts, "ranks must have the same options")
    if parallel is None and layout.mesh.sizes["tensor"] > 1:
        raise ValueError("the mesh has a tensor axis: parallel= must say how layers are split over it")
    if parallel is not None and compile:
        raise ValueError("compile=True and parallel= do not go together")
    if pipeline is None and layout.mesh.sizes["pipeline"] > 1:
        raise ValueError("the mesh has a pipeline axis: pipeline= must say by which schedule")
    if plan.base is not None and (parallel is not None or pipeline is not None):
        raise ValueError("a p-net with a base is not split: parallel= and pipeline= are for plans without one")
    tensor = None
    if parallel is not None:
        # Torch's DTensor takes half a second to import.
        from gbfunc.parallel.tensor import TensorParallel

        tensor = TensorParallel(pnet, parallel, layout.mesh)
    return TrainStep(pnet, Objective(pnet, loss_fn, layout, options, tensor), optimizer, layout, options)
