"""What two ranks of a pipeline must find as one process does, or refuse."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import optree
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import gbfunc as gb
from gbfunc.parallel import CollectiveError, Mesh
from tests.support.pipeline_nets import (
    NETS,
    REFUSED,
    WIDTH,
    Blocks,
    Sharpened,
    gates,
    hugging,
    next_token,
    sequence,
    straight,
    unet,
)
from tests.support.ranks import PATIENCE


def gradient(
    mesh: Mesh | None,
    make: Callable[[], nn.Module],
    loss_fn: Any,
    schedule: str = "gpipe",
    dtype: torch.dtype = torch.float64,
    seeds: tuple[int, ...] = (0, 1),
    sizes: tuple[int, ...] = (6, 5),
    **more: Any,
) -> Any:
    """Loss, aux and the gradient, in the change that plain SGD of rate 1 makes; batches of several lengths."""
    torch.manual_seed(0)
    pnet = make().to(dtype)
    plan = gb.make_plan(pnet, gb.periodic(2), max_tile=6)
    sgd = gb.torch_optimizer(torch.optim.SGD, lr=1.0)
    options: dict[str, Any] = more if mesh is None else {"mesh": mesh, "pipeline": schedule, **more}
    step = gb.make_train_step(plan, pnet, loss_fn, sgd, microbatches=4, **options)
    state, found = step.init(3), []
    for seed, size in zip(seeds, sizes, strict=True):
        tokens = torch.randint(0, 11, (8, size), generator=torch.Generator().manual_seed(seed))
        new, info = step(state, tokens)
        a, b = step.gather(state), step.gather(new)
        moved = optree.tree_map(lambda x, y: x - y, (a.gnets, a.direct), (b.gnets, b.direct))  # pyright: ignore
        found.append({"loss": info.loss, "aux": info.aux, "moved": moved, "buffers": new.buffers})
        state = new
    return {"reports": [x["loss"] for x in found], "state": found}


CASES: dict[str, Callable[[Mesh | None], Any]] = {
    f"{name} {schedule}": partial(gradient, make=make, loss_fn=loss_fn, schedule=schedule)
    for name, (make, loss_fn, schedules) in NETS.items()
    for schedule in schedules
}
CASES["rounding"] = partial(gradient, make=partial(Blocks, unet), loss_fn=next_token, rounding="int8")
CASES["half"] = partial(
    gradient, make=partial(Blocks, gates), loss_fn=next_token, dtype=torch.float32, amp=torch.bfloat16
)


def with_dropout() -> nn.Module:
    return Blocks(straight, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)))


def words_of(init_method: str, which: str) -> str:
    """The words of an error on this rank."""
    up_down = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    lstm = partial(nn.LSTM, WIDTH, WIDTH, 2, proj_size=WIDTH // 2, bidirectional=True, batch_first=True)
    sharpened = partial(Blocks, straight, Sharpened)
    make, more = {
        "zbv": (partial(Blocks, sequence, lstm), {"schedule": "zbv"}),
        "softmax over a part": (sharpened, {"parallel": up_down}),
        "sequence parallel": (sharpened, {"parallel": up_down | {"head": SequenceParallel()}}),
    }[which]
    axes: dict[str, Any] = {"pipeline": 2, "tensor": 2} if "parallel" in more else {"pipeline": 2}
    try:
        with gb.mesh(**axes, init_method=init_method, timeout=20 * PATIENCE) as mesh:
            gradient(mesh, make, next_token, **more)
    except (CollectiveError, ValueError) as error:
        return str(error)
    return "nothing"


def before_fork(**arguments: Any) -> None:
    """Import what takes seconds."""
    with suppress(ImportError):
        for name in ("t5", "bert", "llama"):
            hugging(name)


def run_cases(init_method: str) -> dict[str, Any]:
    """All cases on this rank, and the words of p-nets and batches that are refused."""
    found: dict[str, Any] = {}
    with gb.mesh(pipeline=2, init_method=init_method, timeout=60 * PATIENCE) as mesh:
        for name, case in CASES.items():
            try:
                found[name] = case(mesh)
            except CollectiveError:
                raise RuntimeError(f"case {name} on rank {mesh.rank}") from None
            except Exception:
                found[name] = traceback.format_exc()
        refused: dict[str, Any] = {name: {"make": make} for name, (make, _) in REFUSED.items()}
        refused["another batch"] = {"make": partial(Blocks, gates), "seeds": (mesh.rank, 2)}
        refused["another shape"] = {"make": partial(Blocks, gates), "sizes": (6, 5 + mesh.rank)}
        refused["dropout"] = {"make": with_dropout}
        for name, arguments in refused.items():
            try:
                gradient(mesh, loss_fn=next_token, **arguments)
                found[name] = "nothing"
            except ValueError as error:
                found[name] = str(error)
    return found
