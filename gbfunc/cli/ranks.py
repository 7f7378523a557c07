"""A command on many ranks, as `torchrun` starts it: options, the mesh, and what ranks measure of a training."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from gbfunc.cli.options import find_device

if TYPE_CHECKING:
    import gbfunc as gb

_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024


@dataclass(frozen=True)
class RankOptions:
    """Where the genome lives, where `torchrun` starts the command on many ranks. Batch sizes are global."""

    placement: Literal["auto", "replicated", "sharded", "factors"] = "auto"
    """With many ranks: all of the genome on each, or shares of its tiles, whose weights or factors are gathered."""

    mesh: Annotated[str | None, arg(metavar="data=INT,gnets=INT", help_behavior_hint="(default: data=1)")] = None
    """With many ranks: those along which the genome is replicated x those along which it can be sharded."""


def open_mesh(options: RankOptions, device: str) -> gb.Mesh:
    """The ranks that the command was started on; one where nothing else is said.

    Raises:
        ValueError: for a mesh that is no grid of all ranks, or a device that cannot be used.
    """
    import gbfunc as gb

    find_device(device)
    axes = parse_mesh(options.mesh)
    return gb.mesh(axes.get("data", 1), axes.get("gnets"), device)


def parse_mesh(text: str | None) -> dict[str, int]:
    """`"data=2,gnets=4"` as numbers; an axis that is not named is chosen by `gb.mesh`.

    Raises:
        ValueError: for anything else.
    """
    found: dict[str, int] = {}
    for part in (text or "").split(",") if text is not None else ():
        name, _, value = part.partition("=")
        if name.strip() not in ("data", "gnets") or name.strip() in found or not value.strip().isdecimal():
            raise ValueError(f"--mesh must name ranks along its axes, such as data=2,gnets=4, got {text!r}")
        found[name.strip()] = int(value)
    if "gnets" in found and "data" not in found:
        raise ValueError(f"--mesh must name data too, such as data=1,{text}, got {text!r}")
    return found


def rank_metrics(train_step: gb.TrainStep, steps: int, batch_size: int, seconds: float) -> dict[str, object]:
    """How a training ran: its ranks, speed, and for this rank bytes sent a step and peak memory in bytes."""
    import torch

    mesh = train_step.mesh
    cuda = mesh.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated(mesh.device) if cuda else _PEAK_UNIT * _max_rss()
    return {
        "ranks": mesh.world,
        "mesh": {"data": mesh.data, "gnets": mesh.gnets},
        "placement": train_step.placement,
        "samples_per_second": steps * batch_size / max(seconds, 1e-9),
        "bytes_sent_per_step": mesh.traffic.total / max(1, steps),
        "peak_memory_bytes": peak,
    }


def _max_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
