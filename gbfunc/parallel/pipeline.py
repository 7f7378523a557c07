"""Pipeline parallelism: each rank generates and runs some blocks of the p-net, in the order of a schedule of torch.

    rank 0    embedding, blocks 0 .. i - 1    -- activations -->    rank 1    blocks i .., norm, head, loss

A rank has only the weights of its blocks. `gbfunc.parallel.chain` traces `loss_fn(net, batch)` as one graph and cuts
the graph before every stage. A stage sends all values that later stages need, including integers and masks. Layers
stay modules in the graph, so that layers may use factors instead of dense weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_unflatten

from gbfunc.parallel.chain import Chain, balanced_stages, crossing, find_blocks, stage_graph, stage_of, trace_chain
from gbfunc.parallel.mesh import Mesh
from gbfunc.parallel.pipeline_order import SCHEDULES, schedule_class, stages_of
from gbfunc.trees import differentiable, tree_leaves
from gbfunc.types import Params


class _Stage(nn.Module):
    def __init__(self, pipeline: Pipeline, index: int) -> None:
        super().__init__()
        self.pipeline, self.index = pipeline, index

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self.pipeline.leaves.values())

    def forward(self, received: Tensor) -> Tensor:
        out = self.pipeline.call(self.index, received)
        # Make the output depend on the input. Otherwise torch's zero-bubble schedule gives this stage no gradients.
        return out + received[:0].sum().abs() if self.pipeline.order == "zbv" else out


class Parcel:
    """Packs all values for the next stage into one vector, for one message. Integers and masks are sent as bytes."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes, values = nodes, [node.meta["val"] for node in nodes]
        dtypes = [x.dtype for x in values if differentiable(x.dtype)]
        self.dtype = reduce(torch.promote_types, dtypes) if dtypes else torch.float32
        item = self.dtype.itemsize
        self._sizes = [x.numel() if differentiable(x.dtype) else -(-x.nbytes // item) for x in values]
        self.like = torch.empty(sum(self._sizes), dtype=self.dtype, device="meta", requires_grad=True)

    def pack(self, values: Sequence[Tensor]) -> Tensor:
        flat = []
        for x, n in zip(values, self._sizes, strict=True):
            if not differentiable(x.dtype):
                data = x.reshape(-1).contiguous().view(torch.uint8)
                x = F.pad(data, (0, n * self.dtype.itemsize - len(data))).view(self.dtype)
            flat.append(x.reshape(-1).to(self.dtype))
        sent = torch.cat(flat)
        return sent if sent.requires_grad else sent.requires_grad_()

    def unpack(self, received: Tensor) -> list[Tensor]:
        values = []
        for node, x in zip(self.nodes, received.reshape(-1).split(self._sizes), strict=True):
            like = node.meta["val"]
            if differentiable(like.dtype):
                x = x.real if x.is_complex() and not like.is_complex() else x
                x = x.reshape(like.shape).to(like.dtype)
                # Make the gradient contiguous: torch's zero-bubble schedule cannot send other gradients.
                x.register_hook(Tensor.contiguous)
            else:
                x = x.detach().view(torch.uint8)[: like.nbytes].clone().view(like.dtype).reshape(like.shape)
            values.append(x.clone() if node.meta["written"] else x)
        return values


class _Plan(NamedTuple):
    chain: Chain
    parcels: Sequence[Parcel]  # For each stage, the values that the stage receives
    graphs: Mapping[int, tuple[fx.Graph, Sequence[Any]]]  # Graph and inputs of each of this rank's stages
    schedule: Any


class Pipeline:
    """Splits a p-net over the pipeline axis of a mesh and sends microbatches through the stages.

    `splits` names the first block of every stage except the first stage. If `splits` is None, stages get similar
    numbers of operations. `adapt` installs tensor-parallel layers in a copy of the p-net.
    """

    names: frozenset[str]  # Names of the parameters that this rank needs, set by `prepare`
    absent: Params  # Parameters that this rank does not need, on the meta device
    call: Callable[[int, Tensor], Tensor]  # Maps a stage and the received tensor to the tensor to send, or the loss
    leaves: Mapping[str, Tensor] = MappingProxyType({})

    def __init__(
        self,
        pnet: nn.Module,
        order: str,
        mesh: Mesh,
        microbatches: int,
        splits: Sequence[str] | None = None,
        adapt: Callable[[nn.Module], Any] = lambda net: None,
    ) -> None:
        if order not in SCHEDULES:
            raise ValueError(f"pipeline must be one of {tuple(SCHEDULES)}, got {order!r}")
        self._pnet, self.mesh, self.microbatches, self._splits = pnet, mesh, microbatches, splits
        self._axis, self._adapt, self.order = mesh.axis("pipeline"), adapt, order
        self.ranks, stages = self._axis.size, stages_of(order, self._axis.size)
        self.mine, self.stages = stages[self._axis.rank], sum(map(len, stages))
        self._blocks = find_blocks(pnet, self.stages, splits)
        if microbatches < self.ranks:
            raise ValueError(f"a pipeline of {self.ranks} ranks needs as many microbatches or more, got {microbatches}")
        self._starts: tuple[int, ...] = ()
        self._plans: dict[Any, _Plan] = {}

    def prepare(self, loss_fn: Callable[[Any, Any], Any], microbatch: Any, like: nn.Module | None = None) -> None:
        """Trace the loss of a microbatch, if its shapes are new. Each layer takes its training mode from `like`."""
        device, leaves, net = self.mesh.device, tree_leaves(microbatch), like or self._pnet
        key = tuple((path, (x.shape, x.dtype) if isinstance(x, Tensor) else x) for path, x in leaves)
        key = torch.is_autocast_enabled(device.type), any(module.training for module in net.modules()), key
        if key not in self._plans:

            def adapt(skeleton: nn.Module) -> None:
                for module, same in zip(skeleton.modules(), net.modules(), strict=True):
                    module.training = same.training
                self._adapt(skeleton)

            self._plans[key] = self._plan(trace_chain(self._pnet, self._blocks, loss_fn, microbatch, device, adapt))
        self._current = self._plans[key]

    def _place(self, chain: Chain) -> None:
        if self._splits is None:
            self._starts = balanced_stages(chain.flops, self.stages)
        else:
            self._starts = (0, *map(self._blocks.index, self._splits), len(self._blocks))
        used = {k for k, cells in chain.places.items() if {stage_of(self._starts, c) for c in cells} & {*self.mine}}
        own = {id(self._pnet.get_parameter(k)) for k in used}
        named = dict(self._pnet.named_parameters())
        self.names = frozenset(k for k, p in named.items() if id(p) in own)
        self.absent = {k: torch.empty_like(p, device="meta") for k, p in named.items() if k not in self.names}

    def _plan(self, chain: Chain) -> _Plan:
        from torch.distributed.pipelining import PipelineStage

        if not self._starts:
            self._place(chain)
        parcels = [Parcel(crossing(chain, self._starts, stage)) for stage in range(self.stages)]
        if not all(parcel.nodes for parcel in parcels[1:]):
            raise ValueError("in a pipeline each stage must need a tensor of the stages before it: take fewer ranks")
        returned = [x for x in chain.outputs[0] if isinstance(x, fx.Node)]
        graphs = {}
        for stage in self.mine:
            sent = parcels[stage + 1].nodes if stage < self.stages - 1 else returned
            graphs[stage] = stage_graph(chain, self._starts, stage, parcels[stage].nodes, sent)
        dtype = next((p.dtype for p in self._pnet.parameters() if p.is_floating_point()), torch.float32)
        number, loss = (torch.empty(1, dtype=d, device="meta", requires_grad=True) for d in (torch.float32, dtype))
        # The first stage receives the index of the microbatch instead of values; the last stage returns the loss.
        passed = [number.detach(), *(parcel.like for parcel in parcels[1:]), loss]
        device, group = self.mesh.device, self._axis.group
        stages = [
            PipelineStage(_Stage(self, i), i, self.stages, device, passed[i], passed[i + 1], group=group)
            for i in self.mine
        ]
        options: Any = {"loss_fn": lambda out, _: out.sum(), "scale_grads": False}
        schedule = schedule_class(self.order)(stages[0] if len(stages) == 1 else stages, self.microbatches, **options)
        return _Plan(chain, parcels, graphs, schedule)

    def compute(self, net: nn.Module, stage: int, microbatch: Any, received: Tensor) -> Any:
        """Run a stage. Return the tensor to send or, from the last stage, the output of the loss function."""
        chain, parcels, graphs, *_ = self._current
        graph, origins = graphs[stage]
        tensors = [x for _, x in tree_leaves(microbatch) if isinstance(x, Tensor)]
        inputs = [tensors[x] if isinstance(x, int) else x for x in origins]
        values = fx.Interpreter(net, graph=graph).run(*(parcels[stage].unpack(received) if stage else ()), *inputs)
        if stage < self.stages - 1:
            return parcels[stage + 1].pack(values)
        (leaves, structure), computed = chain.outputs, iter(values)
        return tree_unflatten([next(computed) if isinstance(x, fx.Node) else x for x in leaves], structure)

    def run(self, call: Callable[[int, Tensor], Tensor], leaves: Params) -> dict[str, Tensor]:
        """Run `call(stage, received)` for all microbatches. Return {leaf: its total gradient}."""
        self.call, self.leaves = call, leaves
        crossed = [(s + 1, s + 1) for s in self.mine] + [(s - 1, s) for s in self.mine]
        sent = [self._current.parcels[i] for other, i in crossed if 0 <= other < self.stages and other not in self.mine]
        self.mesh.traffic["pipeline"] += sum(parcel.like.nbytes for parcel in sent) * self.microbatches
        numbers = torch.arange(self.microbatches, dtype=torch.float32, device=self.mesh.device)
        try:
            with self.mesh.failing("a pipelined step"):
                self._current.schedule.step(numbers, target=numbers)
        except RuntimeError as error:
            if self.order == "zbv" and "the graph a second time" in str(error):
                raise ValueError(
                    "torch's zero-bubble schedule cannot divide the backward of a recurrent layer, or of a parameter "
                    "that several blocks of a stage use: take another pipeline= than 'zbv'"
                ) from error
            # Raise the stage's error, the cause of torch's error, which says only which schedule failed.
            if error.__cause__ is None or isinstance(error, ConnectionError):
                raise
            raise error.__cause__ from None
        finally:
            del self.call, self.leaves
            gradients = {k: x.grad for k, x in leaves.items() if x.grad is not None}
            # Reset `grad`: the leaves may be the genome's own tensors, and the next run would add to `grad`.
            for x in leaves.values():
                x.grad = None
        return gradients
