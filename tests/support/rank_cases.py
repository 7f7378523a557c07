"""What many ranks must find as one process does: each case returns tensors, for a mesh or for none."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.hypernets import HYPERNETS, Hypernet
from gbfunc.parallel import Mesh
from gbfunc.train.optimizers import Optimizer
from tests.support.ranks import PATIENCE, said
from tests.support.zoo import ZOO, loss_fn


def three_tanh(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 3), nn.Tanh(), nn.Linear(3, 1))


PLACEMENTS = ("replicated", "sharded", "factors")
TYPES: Mapping[str, Hypernet] = MappingProxyType(
    {one.type: one for one in (gb.periodic(2), gb.bilinear(2, "shapes"), gb.constant(0.1), gb.gnet((3,)))}
    | {one.type: one for one in (gb.stochastic((3,)), gb.low_rank(2), gb.xox(2), gb.from_module(three_tanh))}
    | {"shared": gb.periodic(2, "layers")}
)
"""One of each type, and one whose tiles share leaves."""

assert set(HYPERNETS) - {"new_rows"} <= set(TYPES)

ADAMW = gb.torch_optimizer(torch.optim.AdamW, lr=0.02, weight_decay=0.1)
MOMENTUM = gb.torch_optimizer(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True)
SGD = gb.torch_optimizer(torch.optim.SGD, lr=1.0)
SIZES = (8, 7, 3, 1)
"""Rows of the global batches: even, uneven, and fewer than ranks."""


def squared(net: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    x, y = batch
    out = net(x)
    return F.mse_loss(out, y), {"mae": (out - y).abs().mean()}


def pnet_of(sizes: tuple[int, int, int] = (6, 14, 5)) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2])).double()


def batches(rows: tuple[int, ...] = SIZES, sizes: tuple[int, int, int] = (6, 14, 5)) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(n, k, generator=draw, dtype=torch.float64) for k in (sizes[0], sizes[-1])) for n in rows]  # pyright: ignore


def trajectory(
    mesh: Mesh | None,
    placement: Any = "auto",
    hypernet: Hypernet = TYPES["periodic"],
    *,
    optimizer: Optimizer = ADAMW,
    max_tile: Any = (4, 4),
    rows: tuple[int, ...] = SIZES,
    sizes: tuple[int, int, int] = (6, 14, 5),
    single_rank: Mapping[str, Any] = MappingProxyType({}),
    planned: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Any:
    """`single_rank` replaces options where there is no mesh; `planned` are more options of the plan."""
    pnet = pnet_of(sizes)
    plan = gb.make_plan(pnet, hypernet, max_tile=max_tile, **planned)
    if mesh is None:
        options |= single_rank
    step = gb.make_train_step(plan, pnet, squared, optimizer, mesh=mesh, placement=placement, **options)
    state, reports = step.init(3), []
    for batch in batches(rows, sizes):
        state, info = step(state, batch if mesh is None else mesh.shard_batch(batch))
        assert info.finite
        reports.append(torch.stack([info.loss, info.grad_norm, info.aux["mae"]]))
    whole = step.gather(state)
    own = step.shard(whole)
    same = zip(optree.tree_leaves(own.gnets), optree.tree_leaves(state.gnets), strict=True)  # pyright: ignore
    assert all(torch.equal(a, b) for a, b in same), "shard must undo gather"
    held = sum(leaf.numel() for leaf in optree.tree_leaves((state.gnets, state.opt)))  # pyright: ignore
    return {"reports": torch.stack(reports), "state": whole, "held": held}


def animal(mesh: Mesh | None, placement: Any, name: str) -> Any:
    pnet = ZOO[name].pnet().double()
    plan = ZOO[name].plan(pnet)
    step = gb.make_train_step(plan, pnet, loss_fn, MOMENTUM, mesh=mesh, placement=placement, clip_norm=1.0)
    state, losses, batch = step.init(5), [], ZOO[name].batch(torch.float64)
    for part in (batch, batch[:7]):
        state, info = step(state, part if mesh is None else mesh.shard_batch(part))
        losses.append(info.loss)
    return {"reports": torch.stack(losses), "state": step.gather(state), "held": 0}


STILL = ("attention", "tied", "lstm", "conv1d", "weight_norm", "mixed", "frozen", "no_direct", "only_direct")
STILL += ("transposed_conv", "conv_bn_eval")

ADAPTER = {"base": "own", "modules_to_save": ["2"]}
CASES: dict[str, Callable[[Mesh | None], Any]] = {}
for _placement in PLACEMENTS:
    for _lazy in (True, False) if _placement != "sharded" else (False,):
        CASES[f"AdamW {_placement} adapter lazy={_lazy}"] = partial(
            trajectory, placement=_placement, hypernet=TYPES["bilinear"], planned=ADAPTER, lazy=_lazy
        )
    for _name, _hypernet in TYPES.items():
        _given: dict[str, Any] = {"placement": _placement, "hypernet": _hypernet}
        CASES[f"AdamW {_placement} {_name}"] = partial(trajectory, clip_norm=0.3, **_given)
    _manners: dict[str, dict[str, Any]] = {
        "donate": {"optimizer": MOMENTUM, "donate": True},
        "microbatches": {"microbatches": 3, "single_rank": {"microbatches": 1}},
        "remat generate": {"remat": "generate"},
        "remat layer": {"remat": "layer", "lazy": False},
        "remat layer stochastic": {"remat": "layer", "hypernet": gb.stochastic((3,))},
        "remat layer shared": {"remat": "layer", "hypernet": TYPES["shared"]},
        "remat layer one tile": {"remat": "layer", "max_tile": None, "sizes": (3, 4, 1), "lazy": False},
        "not lazy": {"lazy": False},
        "seven tiles": {"max_tile": (2, 6), "hypernet": gb.gnet((3,)), "sizes": (6, 14, 1)},
        "one tile": {"max_tile": None, "sizes": (3, 4, 1), "hypernet": gb.periodic(2)},
        "tile by tile": {"optimizer": gb.torch_optimizer(torch.optim.Adafactor, lr=0.05), "max_tile": (6, 14)},
    }
    for _name, _options in _manners.items():
        CASES[f"{_name} {_placement}"] = partial(trajectory, placement=_placement, **_options)
    for _name in STILL:
        CASES[f"zoo {_placement} {_name}"] = partial(animal, placement=_placement, name=_name)
CASES["auto"] = trajectory
EAGER = {f"compile {p}": partial(trajectory, placement=p, rows=(8, 8)) for p in PLACEMENTS}
COMPILED = {name: partial(case, compile=True) for name, case in EAGER.items()}


def run_cases(init_method: str, data: int, names: list[str]) -> dict[str, Any]:
    with gb.mesh(data=data, init_method=init_method, timeout=30 * PATIENCE) as mesh:
        return {name: said((CASES | COMPILED)[name], mesh) for name in names}
