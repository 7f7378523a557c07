"""What a training was of, beside its settings: versions, command, commit, machine, digests of data and plan."""

from __future__ import annotations

import hashlib
import platform
import shlex
import subprocess
import sys
from typing import Any

import torch
from torch import Tensor

import gbfunc as gb
from gbfunc.tasks import Task


def provenance(task: Task, plan: gb.Plan, device: torch.device) -> dict[str, Any]:
    """What `metrics.json` holds of it; the commit is that of the present folder, None where it is in no repository."""
    # Its room imports what generates and compiles.
    from gbfunc.lab.bench.report import describe

    return {
        "command": shlex.join(sys.argv),
        "versions": {"gbfunc": gb.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "commit": commit(),
        "device": describe(device, torch.get_num_threads())["machine"],
        "data_digest": data_digest(task),
        "plan_digest": plan.digest(),
    }


def commit() -> str | None:
    """The commit of the present folder, `-dirty` behind it where files were changed since."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def data_digest(task: Task) -> str:
    """SHA-256 of all tensors of the three splits, with their shapes and dtypes."""
    digest = hashlib.sha256()
    for split in (task.train, task.val, task.test):
        for name, x in sorted(vars(split).items()):
            digest.update(name.encode())
            if isinstance(x, Tensor):
                digest.update(f"{x.dtype} {tuple(x.shape)}".encode())
                digest.update(x.cpu().contiguous().view(torch.uint8).numpy().data if x.numel() else b"")
            elif isinstance(x, int | float | str):
                digest.update(repr(x).encode())
    return digest.hexdigest()
