"""What two ranks of a pipeline must find as one process does, or refuse."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import gbfunc as gb
from gbfunc.parallel import CollectiveError, Mesh
from tests.support.pipeline_nets import (
    CHANGES,
    NETS,
    REFUSED,
    UNPROVEN,
    Blocks,
    Sharpened,
    Skipping,
    TwoWays,
    gate,
    hugging,
    next_token,
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
    seeds: tuple[int, int] = (0, 1),
    flags: bool = False,
    **more: Any,
) -> Any:
    """Loss, aux and the gradient: what plain SGD of rate 1 takes off the genome; `flags` raises one after a step."""
    torch.manual_seed(0)
    pnet = make().to(dtype)
    plan = gb.make_plan(pnet, gb.periodic(2), max_tile=6)
    sgd = gb.torch_optimizer(torch.optim.SGD, lr=1.0)
    options: dict[str, Any] = more if mesh is None else {"mesh": mesh, "pipeline": schedule, **more}
    step = gb.make_train_step(plan, pnet, loss_fn, sgd, microbatches=4, **options)
    state, found = step.init(3), []
    for seed in seeds:
        tokens = torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(seed))
        new, info = step(state, (tokens, len(found) > 0) if flags else tokens)
        a, b = step.gather(state), step.gather(new)
        moved = optree.tree_map(lambda x, y: x - y, (a.gnets, a.direct), (b.gnets, b.direct))  # pyright: ignore
        found.append({"loss": info.loss, "aux": info.aux, "moved": moved, "buffers": new.buffers})
        state = new
    return {"reports": [x["loss"] for x in found], "state": found}


CASES: dict[str, Callable[[Mesh | None], Any]] = {
    f"{name} {schedule}": partial(gradient, make=make, loss_fn=loss_fn, schedule=schedule)
    for name, (make, loss_fn) in NETS.items()
    for schedule in (
        ("gpipe", "1f1b", "interleaved", "zbv")
        if name in ("unet", "tuples", "shift in place", "stem", "detached", "signs")
        else ("gpipe",)
    )
}


def with_a_skip(net: Any, batch: tuple[Tensor, bool]) -> Tensor:
    """The last stage needs the first block's output where a flag says so."""
    return next_token(partial(net, skip=batch[1]), batch[0])


CASES["rounding"] = partial(gradient, make=partial(Blocks, unet), loss_fn=next_token, rounding="int8")
CASES["a flag"] = partial(gradient, make=Skipping, loss_fn=with_a_skip, flags=True)


def half(mesh: Mesh | None) -> Any:
    """Steps whose products are rounded to 8 bits."""
    return gradient(mesh, partial(Blocks, gate), next_token, dtype=torch.float32, amp=torch.bfloat16)


def change(init_method: str, name: str) -> str:
    """What this rank says when a block returns something else in another microbatch than the first."""
    try:
        with gb.mesh(pipeline=2, init_method=init_method, timeout=5 * PATIENCE) as mesh:
            gradient(mesh, CHANGES[name], next_token)
    except (CollectiveError, ValueError) as error:
        return str(error)
    return "nothing"


def softmax_over_a_part(init_method: str) -> str:
    """What this rank says of it, with stages and tensor ranks."""
    styles = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    try:
        with gb.mesh(pipeline=2, tensor=2, init_method=init_method, timeout=30 * PATIENCE) as mesh:
            gradient(mesh, partial(Blocks, straight, Sharpened), next_token, parallel=styles)
    except ValueError as error:
        return str(error)
    return "nothing"


def refused_by_zbv(init_method: str) -> str:
    """What this rank says of recurrent layers, whose backward torch's schedule would divide."""
    try:
        with gb.mesh(pipeline=2, init_method=init_method, timeout=5 * PATIENCE) as mesh:
            gradient(mesh, partial(Blocks, straight, TwoWays), next_token, "zbv")
    except (CollectiveError, ValueError) as error:
        return str(error)
    return "nothing"


def before_fork(**arguments: Any) -> None:
    """Import what takes seconds."""
    try:
        for name in ("t5", "gpt2"):
            hugging(name)
    except ImportError:
        pass


def run_cases(init_method: str) -> dict[str, Any]:
    """All cases on this rank, and the words of those that are refused."""
    found: dict[str, Any] = {}
    with gb.mesh(pipeline=2, init_method=init_method, timeout=60 * PATIENCE) as mesh:
        found["half"] = half(mesh)
        try:
            gradient(mesh, partial(Blocks, gate), next_token, seeds=(mesh.rank, 2))
        except ValueError as error:
            found["another batch"] = str(error)
        for name, case in CASES.items():
            try:
                found[name] = case(mesh)
            except CollectiveError:
                raise RuntimeError(f"case {name} on rank {mesh.rank}") from None
            except Exception:
                found[name] = traceback.format_exc()
        for name, make in {**UNPROVEN, **{name: make for name, (make, _) in REFUSED.items()}}.items():
            try:
                gradient(mesh, make, next_token)
                found[name] = "nothing"
            except ValueError as error:
                found[name] = str(error)
    return found
