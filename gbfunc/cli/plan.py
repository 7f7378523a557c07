"""`gbfunc plan`: what a genome would hold, and with `--ranks` how it would train on them, without training it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from tyro.conf import arg

import gbfunc as gb
from gbfunc.cli.job import Job, make_job
from gbfunc.cli.options import RECIPE, ConfigOption, GenomeOptions, PNetOptions, StoredOptions
from gbfunc.tasks.base import example_batches

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SCALES = _DECIMAL | {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_HINT = "(default: 50 Gflop/s, 10 GB/s, 10Gbit, 16GB)"


@dataclass(frozen=True, kw_only=True)
class Plan(ConfigOption):
    """Show what a genome of a given size would hold, tensor by tensor, without training it; and layouts of ranks."""

    data: PNetOptions = PNetOptions()
    genome: GenomeOptions = GenomeOptions()
    output: StoredOptions = StoredOptions()

    ranks: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: none)")] = None
    """Plan its training on so many ranks too: memory, bytes and seconds of every layout, the fastest first."""

    memory: Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="(default: the device's)")] = None
    """Memory of a rank, with --ranks: 16GB, 80GiB."""

    link: Annotated[str | None, arg(metavar="RATE", help_behavior_hint="(default: the device's)")] = None
    """What a rank can send per second, with --ranks: 100Gbit, 12.5GB."""

    device: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint=_HINT)] = None
    """What a rank is like, with --ranks: the JSON that `gbfunc bench --calibrate` prints."""

    batch_size: Annotated[int | None, arg(metavar="INT", help_behavior_hint=RECIPE)] = None
    """Examples per step of all ranks together, with --ranks."""

    microbatches: Annotated[int | None, arg(metavar="INT", help_behavior_hint="(default: the fastest)")] = None
    """Microbatches per step, with --ranks."""

    def run(self) -> None:
        """Print the plan's report, and the layouts."""
        given = [name for name in _OF_RANKS if getattr(self, name) is not None]
        if self.ranks is None and given:
            raise ValueError(f"--{given[0].replace('_', '-')} is for layouts of ranks: say --ranks too")
        device = self.read_device()
        if self.ranks is not None and self.ranks < 1:
            raise ValueError(f"--ranks must be at least 1, got {self.ranks}")
        job = make_job(self.data, self.genome)
        print(job.plan.report(self.output.dtype))
        if self.ranks is not None:
            print()
            print(self.layouts(job, device).report())

    def read_device(self) -> gb.DeviceSpec:
        """What a rank has: of the file, and what other options say."""
        device = gb.DeviceSpec()
        if self.device is not None:
            if not self.device.is_file():
                raise FileNotFoundError(f"no such device file: {self.device} (gbfunc bench --calibrate prints one)")
            device = gb.DeviceSpec.from_json(self.device.read_text(encoding="utf-8"))
        if self.memory is not None:
            device = replace(device, memory=parse_bytes("--memory", self.memory))
        if self.link is not None:
            device = replace(device, link=parse_bytes("--link", self.link, rate=True))
        return device

    def layouts(self, job: Job, device: gb.DeviceSpec) -> gb.ParallelPlan:
        """The layouts of a job on the ranks."""
        task, recipe = job.task, job.recipe
        if task.batches is not example_batches:
            raise ValueError(f"--ranks plans tasks of examples, the batches of {task.name} come from an environment")
        for name in ("batch_size", "microbatches"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        one = next(task.batches(task.train, replace(recipe, batch_size=1), torch.Generator(), lambda: job.pnet))
        rows = self.batch_size or recipe.batch_size
        batch = tuple(torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device="meta") for x in one)
        assert self.ranks is not None
        return gb.plan_parallel(
            job.plan,
            job.pnet,
            batch,
            ranks=self.ranks,
            device=device,
            loss_fn=task.loss,
            microbatches=self.microbatches,
        )


_OF_RANKS = ("memory", "link", "device", "batch_size", "microbatches")


def parse_bytes(option: str, text: str, *, rate: bool = False) -> float:
    """Bytes (a second) of what an option says.

    Raises:
        ValueError: for anything else.

    >>> parse_bytes("--memory", "16GB"), parse_bytes("--link", "100 Gbit/s", rate=True)
    (16000000000.0, 12500000000.0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([KMGT]i|[kMGT]|)(B|bit)(?:/s)?\s*", text)
    if match is None or (match[3] == "bit" and not rate) or not float(match[1]):
        such = "a rate such as 100Gbit or 12.5GB" if rate else "a size such as 16GB or 512MiB"
        raise ValueError(f"{option} must be {such}, got {text!r}")
    return float(match[1]) * _SCALES[match[2]] / (8 if match[3] == "bit" else 1)
