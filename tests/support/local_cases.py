"""Trainings with local steps: on ranks, and by hand in one process."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

import gbfunc as gb
from gbfunc.parallel import Mesh
from gbfunc.train.local import nesterov
from gbfunc.train.step import TrainStep
from gbfunc.trees import BUFFERS, flat_genome, flatten_tree, like_genome
from tests.support.ranks import PATIENCE, said

ROWS = (8, 7, 5, 8, 4, 9, 8)
"""Rows of the global batches; on two ranks some have more than others."""

SGD = gb.torch_optimizer(torch.optim.SGD, lr=0.05)
ADAM = gb.torch_optimizer(torch.optim.Adam, lr=lambda step: 0.02 / (step + 1))


def pnet_of() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 14), nn.Tanh(), nn.BatchNorm1d(14), nn.Linear(14, 5)).double()


def data() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(n, k, generator=draw, dtype=torch.float64) for k in (6, 5)) for n in ROWS]  # pyright: ignore


def squared(net: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (net(batch[0]) - batch[1]).square().mean()


def make(mesh: Mesh | None, optimizer: Any = ADAM, **options: Any) -> TrainStep:
    pnet = pnet_of()
    plan = gb.make_plan(pnet, gb.periodic(2), max_tile=(4, 4))
    return gb.make_train_step(plan, pnet, squared, optimizer, mesh=mesh, **options)


def by_hand(ranks: int, length: int, until: int, lr: float, momentum: float) -> dict[str, Tensor]:
    """Leaves and buffers after steps on a share of the batches each, with `functional_call` and optimizers of torch."""
    pnet, step = pnet_of(), make(None)
    fresh = step.init(3)
    outer = {k: x.clone() for k, x in flat_genome(fresh).items()}
    start = {k: x.clone() for k, x in flatten_tree(fresh.buffers).items()}
    outer_optimizer = torch.optim.SGD([*outer.values()], lr=lr, momentum=momentum, nesterov=momentum > 0)
    replicas: list[Any] = []
    for _ in range(ranks):
        own = {k: x.clone().requires_grad_() for k, x in outer.items()}
        replicas.append((own, {k: x.clone() for k, x in start.items()}, torch.optim.Adam([*own.values()])))
    counted = [0.0] * ranks
    for number, (x, y) in enumerate(data()[:until]):
        for r, (own, buffers, optimizer) in enumerate(replicas):
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / (number + 1)
            weights = gb.generate(step.plan, like_genome(own, fresh))
            small, target = x.tensor_split(ranks)[r], y.tensor_split(ranks)[r]
            loss = (functional_call(pnet, {**weights, **buffers}, (small,)) - target).square().mean()
            gradients = torch.autograd.grad(loss, [*own.values()])
            for leaf, gradient in zip(own.values(), gradients, strict=True):
                leaf.grad = gradient
            optimizer.step()
            counted[r] += len(small)
        if (number + 1) % length:
            continue
        parts = [n / sum(counted) for n in counted]
        for k, theta in outer.items():
            theta.grad = sum(p * (theta - own[k].detach()) for p, (own, *_) in zip(parts, replicas, strict=True))  # pyright: ignore
        outer_optimizer.step()
        for k, before in start.items():
            if before.is_floating_point():
                start[k] = sum(p * buffers[k] for p, (_, buffers, _) in zip(parts, replicas, strict=True))  # pyright: ignore
        for own, buffers, _ in replicas:
            for k, theta in outer.items():
                own[k].data.copy_(theta)
            buffers |= {k: x.clone() for k, x in start.items() if x.is_floating_point()}
        counted = [0.0] * ranks
    return {k: x.detach() for k, x in (outer | {f"{BUFFERS}{k}": x for k, x in start.items()}).items()}


def trained(step: TrainStep, until: int, state: Any = None) -> Any:
    state = step.init(3) if state is None else state
    for batch in data()[int(state.step) : until]:
        state, _ = step(state, step.mesh.shard_batch(batch))
    return state


def named(state: Any) -> dict[str, Tensor]:
    return flat_genome(state) | flatten_tree(state.buffers, BUFFERS)


def nans_of_rank_0(mesh: Mesh) -> dict[str, Any]:
    """Rank 0's rows are not finite in the first round, all rows in the second."""
    step = make(mesh, local_steps=2)
    fresh = step.init(3)
    state, infos, batches = fresh, [], data()
    for number, batch in enumerate(batches[:4]):
        x, y = mesh.shard_batch(batch)
        x = x * float("nan") if mesh.rank == 0 or number > 1 else x
        state, info = step(state, (x, y))
        infos.append(bool(info.finite))
        if number == 1:
            first = state
    return {"finite": infos, "first": named(step.gather(first)), "second": named(step.gather(state))}  # pyright: ignore


def refusals(mesh: Mesh) -> list[str]:
    step = make(mesh, local_steps=2, check_every=2)
    state = step.init(3)
    attempts = (
        lambda: make(mesh, local_steps=2 + mesh.rank),
        lambda: make(mesh, local_steps=2, outer=nesterov(0.5 + mesh.rank)),
        lambda: make(mesh, local_steps=2, placement="sharded"),
        lambda: step(like_genome({k: x + mesh.rank for k, x in flat_genome(state).items()}, state), data()[0]),
        lambda: step(state, tuple(x[:0] for x in data()[0])),
        lambda: step(step.gather(state), data()[0]),
    )
    return [str(said(attempt)) for attempt in attempts]


def run_local(init_method: str, folder: Path) -> dict[str, Any]:
    with gb.mesh(2, init_method=init_method, timeout=30 * PATIENCE) as mesh:
        found: dict[str, Any] = {}
        for name, (length, until, outer) in CASES.items():
            step = make(mesh, local_steps=length, outer=outer)
            found[name] = named(step.gather(trained(step, until)))
        step = make(mesh, SGD, local_steps=1, outer=nesterov(1.0, 0.0))
        found["every"] = named(step.gather(trained(step, 7)))
        found["ordinary"] = named(trained(make(mesh, SGD), 7))
        found["nan"], found["refusals"] = nans_of_rank_0(mesh), refusals(mesh)
        # Saved in the middle of a round, and gone on with.
        step = make(mesh, local_steps=3, donate=True)
        state = trained(step, 5)
        with gb.Checkpointer(folder / "two", step) as checkpointer:
            checkpointer.save(state, {})
        mesh.barrier()
        loaded = gb.load_checkpoint(folder / "two", step, step.init(3))
        found["own"] = [{k: x.clone() for k, x in named(of).items()} for of in (trained(step, 5), loaded.state)]
        found["resumed"] = named(step.gather(trained(step, 7, loaded.state)))
        found["straight"] = named(step.gather(trained(step, 7)))
        # Bytes of six steps, after a first one that compares.
        for name, options in {"replicated": {}, "local": {"local_steps": 6}}.items():
            step = make(mesh, check_every=0, **options)
            state, _ = step(step.init(3), mesh.shard_batch(data()[0]))
            before = mesh.traffic.total()
            for batch in data()[1:]:
                state, _ = step(state, mesh.shard_batch(batch))
            found[name] = mesh.traffic.total() - before
        return found


CASES: dict[str, tuple[int, int, Any]] = {"default": (3, 6, None), "diloco": (2, 6, nesterov(0.7, 0.9))}
"""Steps of a round, steps in all, outer optimizer."""
