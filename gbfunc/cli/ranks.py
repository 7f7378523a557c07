"""Runs a command on several ranks: builds the mesh, chooses how to split the p-net, and checks that ranks agree."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import gbfunc as gb
from gbfunc.cli.options import ExecutionOptions, options_of, values_of
from gbfunc.parallel import Mesh, check_equal, gather_objects, text_of
from gbfunc.parallel.mesh import AXES
from gbfunc.tasks.pnets.base import import_factory
from gbfunc.train.local import nesterov


def open_mesh(options: ExecutionOptions, device: str) -> Mesh:
    axes: dict[str, Any] = {"data": 1, "gnets": None} | parse_mesh(options.mesh)
    return gb.mesh(axes.pop("data"), axes.pop("gnets"), find_device(device), **axes)


def parse_mesh(text: str | None) -> dict[str, int]:
    axes: dict[str, int] = {}
    for item in () if text is None else text.split(","):
        name, _, value = map(str.strip, item.partition("="))
        if name not in AXES or name in axes or not value.isdecimal() or not int(value):
            expected = f"ranks along axes ({', '.join(AXES)}), such as data=2,tensor=2"
            raise ValueError(f"--mesh must name {expected}, got {text!r}")
        axes[name] = int(value)
    return axes


def find_device(name: str) -> torch.device:
    """Return the device `name`; "auto" is a GPU if the machine has one per rank, otherwise the CPU."""
    gpus = torch.cuda.device_count()
    if name == "auto":
        return torch.device("cuda" if gpus and gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)) else "cpu")
    if name.startswith("cuda") and not gpus:
        raise ValueError(f"--device {name} needs a GPU, and torch finds none here: try --device auto")
    try:
        device = torch.device(name)
        torch.zeros((), device=device).item()  # Fails on devices without data, such as meta.
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(f"--device {name!r} cannot be used: {reason}") from error
    return device


def in_turn(mesh: Mesh, prepare: Callable[[], Any]) -> Any:
    """Call `prepare` on rank 0, then on one rank per other machine, then on the rest, which find prepared files."""
    turn = 0 if mesh.rank == 0 else 1 if os.environ.get("LOCAL_RANK") == "0" else 2
    prepared = failure = None
    for now in range(3):
        try:
            prepared = prepare() if now == turn else prepared
        except Exception as error:
            failure = error
        for rank, words in enumerate(gather_objects(mesh, failure and f"{type(failure).__name__}: {failure}")):
            if words is not None:
                raise failure or ValueError(f"rank {rank} cannot begin: {words}")
    return prepared


def check_alike(mesh: Mesh, options: Any, data_digest: str) -> None:
    """Raise `ValueError` if ranks differ in options (except paths) or data: ranks could wait for each other forever."""
    local = {name for name, field in options_of(options).items() if "Path" in str(field.type)}
    local |= {"device", "resume", "pretrained", "log"}
    compared = {name: x is not None if name in local else x for name, x in values_of(options).items()}
    check_equal(mesh, {"options": text_of(compared), "data": data_digest}, "ranks must have the same options and data")


def split_over(mesh: Mesh, options: ExecutionOptions, pnet: nn.Module, batch_size: int) -> dict[str, Any]:
    stages, pieces = mesh.sizes["pipeline"], mesh.sizes["tensor"]
    split: dict[str, Any] = {name: getattr(options, name) for name in ("placement", "compile", "remat")}
    split |= {"mesh": mesh, "amp": options.amp and getattr(torch, options.amp)}
    if options.local_steps is not None:
        split |= {"local_steps": options.local_steps, "outer": nesterov(options.outer_lr, options.outer_momentum)}
    for option, axis in (("pipeline", "pipeline"), ("parallel", "tensor")):
        if (value := getattr(options, option)) is not None and mesh.sizes[axis] == 1:
            raise ValueError(f"--{option} {value} needs a {axis} axis, such as --mesh {axis}=2")
    if pieces > 1:
        # Import here, because the import of DTensor takes half a second.
        from gbfunc.parallel.styles import tensor_styles

        try:
            split["parallel"] = tensor_styles(pnet) if options.parallel is None else styles_of(options.parallel, pnet)
        except ValueError as error:
            hint = " (--parallel module:function)" if options.parallel is None else ""
            raise ValueError(f"--mesh tensor={pieces} cannot split this p-net: {error}{hint}") from error
    if stages == 1:
        return split | {"microbatches": options.microbatches or 1}
    microbatches = options.microbatches or pipeline_microbatches(batch_size, mesh.shards, stages)
    return split | {"pipeline": options.pipeline or "1f1b", "microbatches": microbatches}


def styles_of(path: str, pnet: nn.Module) -> Mapping[str, Any]:
    styles = import_factory(path, "styles by the names of modules")(pnet)
    if not isinstance(styles, Mapping):
        raise ValueError(f"--parallel {path} must return styles by the names of modules, got {type(styles).__name__}")
    return styles


def pipeline_microbatches(batch_size: int, shards: int, ranks: int) -> int:
    """Choose from `ranks` to 4 `ranks` microbatches: a divisor of a shard's rows, if possible a multiple of `ranks`."""
    rows, rest = divmod(batch_size, shards)
    # With 4 microbatches per rank, ranks hardly wait for each other (GPipe: Huang et al., 2019, section 2.3).
    fitting = [n for n in range(ranks, 4 * ranks + 1) if rows % n == 0]
    if rest or not fitting or rows < ranks:
        needs = f"{ranks} to {4 * ranks} microbatches that divide the rows of each of its {shards} shards"
        got = f"a batch of {batch_size}: change --batch-size or --microbatches"
        raise ValueError(f"a pipeline needs {needs}, got {got}")
    return max(fitting, key=lambda n: (n % ranks == 0, n))
