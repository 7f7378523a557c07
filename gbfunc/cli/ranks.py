"""The ranks that a command was started on: their mesh, how the p-net is split over it, and whose turn it is."""

from __future__ import annotations

import os
import timeit
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.cli.config import options_of, values_of
from gbfunc.cli.options import ExecutionOptions
from gbfunc.cli.provenance import data_digest
from gbfunc.parallel import Mesh, check_equal, gather_objects, text_of
from gbfunc.tasks import Task
from gbfunc.tasks.pnets import import_factory
from gbfunc.train.local import nesterov

T = TypeVar("T")

AXES = ("data", "pipeline", "gnets", "tensor")
_MICROBATCHES_PER_RANK = 4
"""Of a pipeline, where the user names none: GPipe's bubble is small from there on (Huang et al., 2019, section 2.3)."""

_SLOW = 1.5
"""Slowdown by autocast from which it is warned of: the memory that it saves may be worth less."""


def open_mesh(options: ExecutionOptions, device: str) -> Mesh:
    """The ranks that the command was started on; `ValueError` for a mesh that is no grid of all, or a bad device."""
    find_device(device)
    axes = parse_mesh(options.mesh)
    data, pipeline, tensor = (axes.get(name, 1) for name in ("data", "pipeline", "tensor"))
    return gb.mesh(data, axes.get("gnets"), device, pipeline=pipeline, tensor=tensor)


def parse_mesh(text: str | None) -> dict[str, int]:
    """`"data=2,tensor=4"` as numbers; an axis that is not named is chosen by `gb.mesh`."""
    axes: dict[str, int] = {}
    for part in () if text is None else text.split(","):
        name, _, value = map(str.strip, part.partition("="))
        if name not in AXES or name in axes or not value.isdecimal() or not int(value):
            known = ", ".join(AXES)
            raise ValueError(f"--mesh must name ranks along axes ({known}), such as data=2,tensor=2, got {text!r}")
        axes[name] = int(value)
    if "gnets" in axes and "data" not in axes:
        raise ValueError(f"--mesh must name data too, such as data=1,{text}, got {text!r}")
    return axes


def find_device(name: str) -> torch.device:
    """The device called `name`; `ValueError` if there is none, or if it cannot be used here."""
    try:
        device = torch.device(name)
        torch.zeros((), device=device).item()  # which a device without data, such as meta, refuses
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(f"--device {name!r} cannot be used: {reason}") from error
    return device


def amp_slowdown(dtype: torch.dtype, device: torch.device) -> float:
    """Time of a matrix product in another dtype over that in float32: above 1 on a CPU without such arithmetic."""

    def seconds(x: Tensor) -> float:
        return min(timeit.repeat(lambda: x @ x, number=1, repeat=5))

    return seconds(torch.ones(512, 512, dtype=dtype, device=device)) / seconds(torch.ones(512, 512, device=device))


def amp_warning(amp: str, slowdown: float) -> str | None:
    """What to say of an autocast that takes so many times as long as float32; None where that is not much more."""
    if slowdown < _SLOW:
        return None
    return (
        f"warning: --amp {amp} is slow on this CPU, which has no such arithmetic: a matrix product takes "
        f"{slowdown:.1f} times as long as in float32, and a step is the longer the more of it are such products"
    )


def in_turn(mesh: Mesh, prepare: Callable[[], T]) -> T:
    """What `prepare` returns, on every rank: rank 0 calls it first, then a rank of each other machine, then the rest.

    So what one downloads or writes, the others read. They wait for as long as the mesh's timeout.

    Raises:
        ValueError: if another rank fails; what `prepare` raises, if this one does.
    """
    turn = 0 if mesh.rank == 0 else 1 if os.environ.get("LOCAL_RANK") == "0" else 2
    made: list[T] = []
    for now in sorted(set(gather_objects(mesh, turn))):
        failure = None
        if now == turn:
            try:
                made.append(prepare())
            except Exception as error:
                failure = error
        failures = gather_objects(mesh, None if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        if failed := [rank for rank, words in enumerate(failures) if words is not None]:
            raise ValueError(f"rank {failed[0]} cannot begin: {failures[failed[0]]}")
    return made[0]


def check_alike(mesh: Mesh, options: Any, task: Task) -> None:
    """Raise `ValueError` where ranks were given other options or have other data; paths may be others.

    Ranks that save or measure after other steps would wait for each other, and those whose data are others would take
    the same examples twice, or validate on what they train on.
    """
    own = {name for name, field in options_of(options).items() if "Path" in str(field.type)}
    own |= {"device", "resume", "pretrained", "log"}
    said = {name: x is not None if name in own else x for name, x in values_of(options)}
    texts = {"options": text_of(said), "data": data_digest(task) if mesh.world > 1 else ""}
    check_equal(mesh, texts, "ranks must have the same options and data")


def split_over(mesh: Mesh, options: ExecutionOptions, pnet: nn.Module, batch_size: int) -> dict[str, Any]:
    """How a training is spread over ranks, as `genome_trainer` takes it."""
    stages, pieces = mesh.sizes["pipeline"], mesh.sizes["tensor"]
    amp = None if options.amp is None else getattr(torch, options.amp)
    split: dict[str, Any] = {"mesh": mesh, "placement": options.placement, "amp": amp, "compile": options.compile}
    split |= {"remat": options.remat, **local_steps(options)}
    if options.pipeline is not None and stages == 1:
        raise ValueError(f"--pipeline {options.pipeline} needs a pipeline axis, such as --mesh pipeline=2")
    if options.microbatches is not None and options.microbatches < 1:
        raise ValueError(f"--microbatches must be at least 1, got {options.microbatches}")
    if options.parallel is not None and pieces == 1:
        raise ValueError(f"--parallel {options.parallel} needs a tensor axis, such as --mesh tensor=2")
    if pieces > 1:
        split["parallel"] = _styles(pnet, pieces) if options.parallel is None else styles_of(options.parallel, pnet)
    if stages == 1:
        return split | {"microbatches": options.microbatches or 1}
    microbatches = pipeline_microbatches(batch_size, mesh.shards, stages, options.microbatches)
    return split | {"pipeline": options.pipeline or "1f1b", "microbatches": microbatches}


def local_steps(options: ExecutionOptions) -> dict[str, Any]:
    """Local steps and their outer optimizer, as `make_train_step` takes them."""
    steps, lr, momentum = options.local_steps, options.outer_lr, options.outer_momentum
    if steps is None:
        if (lr, momentum) != (ExecutionOptions.outer_lr, ExecutionOptions.outer_momentum):
            raise ValueError("--outer-lr and --outer-momentum are of the exchange of local steps: say --local-steps")
        return {}
    if steps < 1:
        raise ValueError(f"--local-steps must be at least 1, got {steps}")
    if not lr > 0 or not 0 <= momentum < 1:
        words = "--outer-lr must be above 0, and --outer-momentum from 0 to below 1"
        raise ValueError(f"{words}, got {lr} and {momentum}")
    return {"local_steps": steps, "outer": nesterov(lr, momentum)}


def _styles(pnet: nn.Module, ranks: int) -> Any:
    """How the layers of a known p-net are split."""
    # Torch's DTensor takes half a second to import.
    from gbfunc.parallel.styles import tensor_styles

    try:
        return tensor_styles(pnet)
    except ValueError as error:
        raise ValueError(
            f"--mesh tensor={ranks} cannot split this p-net: {error} (--parallel module:function)"
        ) from error


def styles_of(path: str, pnet: nn.Module) -> Mapping[str, Any]:
    """The styles that a function of the user's gives for a p-net."""
    styles = import_factory(path, "styles by the names of modules")(pnet)
    if not isinstance(styles, Mapping):
        raise ValueError(f"--parallel {path} must return styles by the names of modules, got {type(styles).__name__}")
    return styles


def pipeline_microbatches(batch_size: int, shards: int, ranks: int, given: int | None) -> int:
    """Microbatches of a pipeline of `ranks`: those given, or the most up to 4 a rank that divide a shard of the batch.

    A multiple of the ranks is preferred, as interleaved schedules need one.

    >>> pipeline_microbatches(12, shards=1, ranks=2, given=None)
    6
    """
    rows, rest = divmod(batch_size, shards)
    if rest:
        raise ValueError(f"a pipeline needs a batch size that its {shards} shards divide, got {batch_size}")
    fitting = [n for n in range(ranks, rows + 1) if rows % n == 0]
    if not fitting:
        raise ValueError(f"a pipeline of {ranks} ranks needs as many rows in each shard of the batch, got {rows}")
    if given is not None and given not in fitting:
        known = ", ".join(map(str, fitting))
        raise ValueError(
            f"--microbatches must divide the {rows} rows of a shard of the batch, at least one for each of the {ranks} "
            f"ranks of the pipeline ({known} would fit), got {given}"
        )
    if given is not None:
        return given
    few = [n for n in fitting if n <= _MICROBATCHES_PER_RANK * ranks] or fitting[:1]
    return max(few, key=lambda n: (n % ranks == 0, n))
