"""What happens on ranks: gathers in graphs, numbers that are not finite, states that drift apart, deaths."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.func import grad, vmap
from torch.nn.parallel import DistributedDataParallel

import gbfunc as gb
from gbfunc.hypernets.ensemble import dense_tiles
from gbfunc.parallel import CollectiveError, Gather, Layout, Mesh, all_gather, check_equal, reduce_scatter, text_of
from gbfunc.train.step import TrainStep
from tests.support.rank_cases import ADAMW, SGD, batches, pnet_of, squared
from tests.support.ranks import PATIENCE, said
from tests.support.versions import TRACES_WHOLE_NETS, fully_shard

ROWS = (3, 0, 2, 1)
"""Rows of each rank: uneven, one of them has none."""


@dataclass(frozen=True)
class Options:
    clip_norm: float | None = None
    microbatches: int = 1
    amp: torch.dtype | None = torch.bfloat16


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gather_laws(mesh: Mesh, backend: str = "aot_eager") -> dict[str, float]:
    """Distance of everything that a gather's graph can do from the same on one process.

    With f_r(x) = sum sin(c_r * gather(x)) on rank r, all ranks together have F = sum_r f_r of the joined rows.
    """
    n = mesh.world
    sizes, first = ROWS[:n], sum(ROWS[: mesh.rank])
    own = slice(first, first + sizes[mesh.rank])
    whole, scales = drawn(0, sum(sizes), 2), [drawn(10 + r, sum(sizes), 2) for r in range(n)]
    mine, u = whole[own].clone(), drawn(5, sum(sizes), 2)

    def joined(x: Tensor) -> Tensor:
        return sum(((c * x).sin().sum() for c in scales), torch.zeros(()))

    def local(x: Tensor) -> Tensor:
        return (scales[mesh.rank] * all_gather(mesh, [x], [sizes], "world")[0]).sin().sum()

    def off(found: Tensor, expected: Tensor) -> float:
        assert found.shape == expected.shape
        return float((found - expected).abs().max()) if found.numel() else 0.0

    found: dict[str, float] = {"forward": off(all_gather(mesh, [mine], [sizes], "world")[0], whole)}
    expected = grad(joined)(whole)
    x = mine.clone().requires_grad_()
    local(x).backward()
    assert x.grad is not None
    found["backward"] = off(x.grad, expected[own])
    found["grad"] = off(grad(local)(mine), expected[own])
    many = drawn(7, 3, sum(sizes), 2)
    stacked = many[:, own].clone()
    found["vmap"] = off(vmap(lambda x: all_gather(mesh, [x], [sizes], "world")[0])(stacked), many)
    found["vmap grad"] = off(vmap(grad(local))(stacked), vmap(grad(joined))(many)[:, own])
    back = vmap(lambda x: reduce_scatter(mesh, [x], [sizes], "world")[0], 1)(many.movedim(0, 1))
    found["vmap reduce_scatter"] = off(back, n * many[:, own])
    x = mine.clone().requires_grad_()
    (g,) = torch.autograd.grad(local(x), x, create_graph=True)
    (second,) = torch.autograd.grad((g * u[own]).sum(), x)
    found["double backward"] = off(second, grad(lambda x: (grad(joined)(x) * u).sum())(whole)[own])
    if TRACES_WHOLE_NETS:
        x = mine.clone().requires_grad_()
        compiled: Any = torch.compile(local, fullgraph=True, backend=backend)
        compiled(x).backward()
        assert x.grad is not None
        found["compile"] = off(x.grad, expected[own])
    return found


def uncounted(mesh: Mesh) -> dict[str, float]:
    """Distance of the gradient of a gather from that of the other ranks alone, where rank 0 has a NaN for its own."""
    plan = gb.make_plan(pnet_of(), gb.gnet((3,)), max_tile=(4, 4))
    layout = Layout(plan, mesh, "sharded")
    e = plan.ensembles[0]
    gather = Gather(layout, counts=mesh.rank != 0)
    factor = float("nan") if mesh.rank == 0 else 1.0

    def total(x: Tensor, slot: int | None) -> Tensor:
        if slot is None:
            return (factor * dense_tiles(gather.outputs({e.name: x}, layout.sizes)[e.name])).sum()
        sizes = layout.sizes_of(e, slot)
        mine = {e.name: x[: sizes[mesh.gnets_index]]}
        return (factor * dense_tiles(gather.outputs(mine, {e.name: sizes})[e.name])).sum()

    found: dict[str, float] = {}
    for name, slot in (("outputs", None), ("slot", 0), *([("compiled", None)] if TRACES_WHOLE_NETS else [])):
        x = torch.ones(layout.sizes[e.name][mesh.gnets_index], 4, 4, dtype=torch.float64, requires_grad=True)
        call: Any = torch.compile(total, fullgraph=True, backend="aot_eager") if name == "compiled" else total
        call(x, slot).backward()
        assert x.grad is not None
        n = len(x) if slot is None else layout.sizes_of(e, slot)[mesh.gnets_index]
        found[name] = float((x.grad[:n] - (mesh.world - 1)).abs().max()) if n else 0.0
    return found


def configurations(mesh: Mesh) -> dict[str, Any]:
    last = mesh.rank == mesh.world - 1
    table = gb.torch_schedule(torch.optim.lr_scheduler.StepLR, 0.2 if last else 0.1, steps=3, step_size=2)
    optimizer = gb.torch_optimizer(torch.optim.AdamW if last else torch.optim.Adam, lr=table)
    cases: dict[str, Any] = {
        "same": text_of(Options()),
        "options": text_of(Options(clip_norm=0.5 if last else None, microbatches=3 if last else 1)),
        "optimizer": text_of(optimizer.settings),
        "plan": gb.make_plan(pnet_of(), gb.periodic(3 if last else 2)).to_json(),
        "text": "x" * 200 + "yz"[last],
        "tensor": torch.ones(2) * mesh.rank,
    }
    return {name: said(check_equal, mesh, {"it": x, "too": "same"}, "ranks") for name, x in cases.items()}


def not_finite(mesh: Mesh) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pnet = pnet_of()
    plan = gb.make_plan(pnet, gb.periodic(2), max_tile=(4, 4))
    x, y = mesh.shard_batch(batches((8,))[0])
    if mesh.rank == mesh.world - 1:
        x = x * float("nan")
    for placement in ("replicated", "sharded"):

        def make(placement: Any = placement, **options: Any) -> TrainStep:
            return gb.make_train_step(plan, pnet, squared, ADAMW, mesh=mesh, placement=placement, **options)

        step = make()
        state = step.init()
        after, info = step(state, (x, y))
        found[placement] = (info.finite, after.gnets == state.gnets, int(after.step))
        found[f"{placement} raise"] = said(make(on_nonfinite="raise"), state, (x, y))
    return found


def refusals(mesh: Mesh) -> dict[str, Any]:
    pnet = pnet_of()
    plan, batch = gb.make_plan(pnet, gb.periodic(2), max_tile=(4, 4)), mesh.shard_batch(batches((8,))[0])

    def make(pnet: nn.Module = pnet, loss: Any = squared, plan: gb.Plan = plan, **options: Any) -> TrainStep:
        return gb.make_train_step(plan, pnet, loss, ADAMW, mesh=mesh, **options)

    def rows(net: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        out = net(batch[0])
        return out.square().mean(), out.sum(1)

    def by_rank(net: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        loss, _ = squared(net, batch)
        return loss, {"all": loss} | ({f"of {mesh.rank}": loss} if mesh.rank else {"of rank 0": loss, "more": loss})

    step = make(placement="sharded", check_every=1)
    state = step.init()
    bias = state.direct["0.bias"] + (0.5 if mesh.rank == 1 else 0.0)
    torch.manual_seed(mesh.rank)
    other, frozen = nn.Linear(3, 3), pnet_of()
    frozen.get_parameter("0.bias").requires_grad_(mesh.rank == 0)
    calls: dict[str, Callable[[], Any]] = {
        "generate": lambda: gb.generate(plan, state),
        "whole": lambda: step(step.gather(state), batch),
        "drift": lambda: step(state._replace(direct=state.direct | {"0.bias": bias}), batch),
        "plan": lambda: make(other, plan=gb.make_plan(other)),
        "remat": lambda: make(placement="sharded", remat="layer", microbatches=2),
        "lazy": lambda: make(placement="sharded", lazy=True),
        "placement": lambda: make(placement="elsewhere"),
        "aux": lambda: make(loss=rows)(make().init(), batch),
        "empty": lambda: make()(make().init(), tuple(x[:0] for x in batch)),
        "entries": lambda: make(loss=by_rank)(make().init(), batch),
        "frozen": lambda: make(frozen),
        "modes": lambda: make(pnet_of().train(mesh.rank == 0)),
        "object": lambda: mesh.shard_batch(SimpleNamespace(x=batch[0])),
    }
    wrappers: dict[str, Callable[[nn.Module], Any]] = {"DDP": DistributedDataParallel, "FSDP2": fully_shard}
    wrappers["FSDP"] = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    found = {name: said(call) for name, call in calls.items()}
    for name, wrap in wrappers.items():
        # As a whole, and a layer inside.
        nets = (wrap(nn.Sequential(nn.Linear(3, 3))), nn.Sequential(wrap(nn.Linear(3, 3)), nn.Linear(3, 3)))
        found[name] = [said(gb.make_plan, net) for net in nets]
    return found


def randomness(mesh: Mesh) -> dict[str, Any]:
    found: dict[str, Any] = {}
    nets = {"dropout": nn.Sequential(pnet_of(), nn.Dropout(0.5)), "noise": pnet_of()}
    for name, pnet in nets.items():
        plan = gb.make_plan(pnet, gb.stochastic((3,)) if name == "noise" else gb.periodic(2), max_tile=(4, 4))
        seen: list[Tensor] = []

        def keep(net: Callable[[Tensor], Tensor], batch: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(net(batch))
            return seen[-1].square().mean()

        step = gb.make_train_step(plan, pnet, keep, SGD, mesh=mesh, placement="sharded", lazy=False)
        step(step.init(), drawn(3, 16, 6))
        found[name] = seen[0].detach()
    return found


def batch_norm(mesh: Mesh) -> dict[str, Any]:
    first = nn.Linear(6, 4).double()
    with torch.no_grad():
        first.bias.fill_(float(mesh.rank))
        first.weight.copy_(drawn(8, 4, 6))
    pnet = nn.Sequential(first, nn.BatchNorm1d(4).double())
    plan = gb.make_plan(pnet, exclude=["."])
    x = drawn(4, 5, 6)
    rows = ([0, 1, 2], [3, 4], [], [])[mesh.rank]
    step = gb.make_train_step(plan, pnet, lambda net, b: net(b).square().mean(), SGD, mesh=mesh)
    state = step.init()
    after, _ = step(state, x[rows])
    outputs = [
        torch.nn.functional.linear(x[r], state.direct["0.weight"], state.direct["0.bias"]) for r in ([0, 1, 2], [3, 4])
    ]
    return {"buffers": after.buffers, "direct": state.direct, "outputs": outputs}


def sent(mesh: Mesh) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pnet = pnet_of()
    plan = gb.make_plan(pnet, gb.periodic(1), max_tile=(4, 4))
    for placement in ("replicated", "sharded", "factors"):
        step = gb.make_train_step(plan, pnet, squared, ADAMW, mesh=mesh, placement=placement, check_every=0)
        state, batch = step.init(), mesh.shard_batch(batches((8,))[0])
        state, _ = step(state, batch)
        before = mesh.traffic.copy()
        step(state, batch)
        found[placement] = mesh.traffic - before
    return found


def narrow(mesh: Mesh | None) -> dict[str, Any]:
    pnet = pnet_of().to(torch.bfloat16)
    plan = gb.make_plan(pnet, gb.gnet((3,)), max_tile=(4, 4))
    seen: list[Tensor] = []

    def keep(net: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
        seen.append(net(torch.eye(6, dtype=torch.bfloat16)).detach())
        return net(batch).float().square().mean()

    step = gb.make_train_step(plan, pnet, keep, SGD, mesh=mesh, placement="sharded", check_every=0)
    state = step.init(3)
    x = drawn(6, 8, 6).to(torch.bfloat16)
    x = x if mesh is None else mesh.shard_batch(x)
    step(state, x)
    before = mesh.traffic["gnets"] if mesh else 0
    after, _ = step(state, x)
    sent = mesh.traffic["gnets"] - before if mesh else 0
    return {"weights": seen[-1], "genome": step.gather(after).gnets, "sent": sent}


class Turned(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 4)
        self.by = nn.Parameter(torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, input: Tensor) -> Tensor:
        turned = super().forward(input) * self.by
        return turned.real + turned.imag.square()


def far_from_3(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (net(x) - 3).square().mean()


def of_dtypes(mesh: Mesh | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make, rows, options in (
        ("complex", Turned, 8, {}),
        ("complex, local", Turned, 8, {"local_steps": 1, "outer": gb.torch_optimizer(torch.optim.SGD, lr=1.0)}),
        ("half", lambda: nn.Linear(6, 4).half(), 70_000, {}),
    ):
        torch.manual_seed(0)
        pnet = make()
        of_ranks: dict[str, Any] = {} if mesh is None else {"mesh": mesh, **options}
        step = gb.make_train_step(gb.make_plan(pnet), pnet, far_from_3, SGD, **of_ranks)
        x = drawn(2, rows, 6).to(pnet.weight.dtype)
        after, info = step(step.init(3), x if mesh is None else mesh.shard_batch(x))
        whole = step.gather(after)
        seen = [] if "local" in name else [info.loss, info.grad_norm]
        found[name] = {"reports": seen, "state": (whole.gnets, whole.direct)}
    return found


def run_events(init_method: str, data: int = 1) -> dict[str, Any]:
    events = (gather_laws, uncounted, configurations, not_finite, refusals, randomness, batch_norm, sent, narrow)
    events += (of_dtypes,)
    with gb.mesh(data=data, init_method=init_method, timeout=30 * PATIENCE) as mesh:
        return {event.__name__: event(mesh) for event in events}


def die(init_method: str, victim: int, how: str, timeout: float) -> str:
    """Train until a rank is killed or gets stuck; the error that the others see."""
    mesh = gb.mesh(init_method=init_method, timeout=timeout)
    pnet = pnet_of()
    plan = gb.make_plan(pnet, gb.periodic(2), max_tile=(4, 4))
    step = gb.make_train_step(plan, pnet, squared, ADAMW, mesh=mesh, placement="sharded")
    state, batch = step.init(), mesh.shard_batch(batches((8,))[0])
    state, _ = step(state, batch)
    if mesh.rank == victim:
        if how != "stuck":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4 * timeout)
        return "stuck"
    try:
        for _ in range(3):
            state, _ = step(state, batch)
    except CollectiveError as error:
        words = str(error)
        try:
            mesh.barrier()
        except CollectiveError:
            return words
    return ""
