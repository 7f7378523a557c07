"""The module of a genome under DDP and FSDP2, and the functional step, on the same ranks and the same rows."""

# Annotations are no strings here: DDP reads those of its hooks.
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import gbfunc as gb
from gbfunc.parallel import Mesh
from gbfunc.trees import flatten_tree
from tests.support.adapters import RATE, adapter, tokens, trained
from tests.support.ranks import PATIENCE
from tests.support.versions import fully_shard
from tests.support.zoo import ZOO, dtype_of, loss_fn

NAMES = ("mlp", "conv_bn", "tied", "attention", "shared", "frozen", "float64", "adapter")
STEPS = 3


def by_ddp(module: gb.GenomeModule, share: Tensor) -> tuple[list[Tensor], list[int], gb.Genome]:
    ddp, sent = DistributedDataParallel(module), []

    def count(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # pyright: ignore
        sent.append(bucket.buffer().numel())
        return allreduce_hook(group, bucket)

    ddp.register_comm_hook(None, count)
    losses = trained(ddp, share, STEPS)
    return losses, sent, module.to_genome()


def by_step(plan: gb.Plan, pnet: nn.Module, share: Tensor, mesh: Mesh) -> tuple[list[Tensor], gb.TrainState]:
    step = gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.SGD, lr=RATE), mesh=mesh)
    state, losses = step.init(0), []
    for _ in range(STEPS):
        state, info = step(state, share)
        losses.append(info.loss)
    return losses, state


def by_fsdp(plan: gb.Plan, pnet: nn.Module, share: Tensor) -> gb.Genome:
    mesh = init_device_mesh("cpu", (2,))
    module = gb.GenomeModule(plan, pnet)
    fully_shard(next(iter(module.children())), mesh=mesh)
    fully_shard(module, mesh=mesh)
    trained(module, share, STEPS)
    return module.to_genome()


def case(name: str) -> tuple[nn.Module, gb.Plan, Tensor]:
    if name == "adapter":
        pnet, plan, _ = adapter()
        return pnet, plan, tokens(8)
    pnet = ZOO[name].pnet()
    return pnet, ZOO[name].plan(pnet), ZOO[name].batch(dtype_of(pnet))


def run(init_method: str) -> dict[str, Any]:
    found = {}
    with gb.mesh(data=2, init_method=init_method, timeout=30 * PATIENCE) as mesh:
        for name in NAMES:
            pnet, plan, batch = case(name)
            share = mesh.shard_batch(batch)
            # Rank 1 begins elsewhere: DDP sends rank 0's leaves and buffers first.
            module = gb.GenomeModule(plan, pnet, seed=mesh.rank)
            trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
            losses, sent, genome = by_ddp(module, share)
            expected, state = by_step(plan, pnet, share, mesh)
            found[name] = {
                "losses": torch.stack(losses),
                "expected": torch.stack(expected),
                "sent": sum(sent) / STEPS,
                "trained": trained,
                "genome": flatten_tree(gb.Genome(genome.gnets, genome.direct, {})),
                "state": flatten_tree(gb.Genome(state.gnets, state.direct, {})),
            }
            if name == "mlp":
                genome = by_fsdp(plan, pnet, share)
                found[name]["sharded"] = flatten_tree(gb.Genome(genome.gnets, genome.direct, {}))
    return found
