"""`gbfunc plan`: what a genome would hold, and with `--ranks` how it would train on them, without training it."""

from __future__ import annotations

import re
from dataclasses import replace

import torch

import gbfunc as gb
from gbfunc.cli.commands import Plan
from gbfunc.cli.job import Job, about, dtype_of, make_job
from gbfunc.cli.ranks import styles_of
from gbfunc.parallel.planner import DeviceSpec
from gbfunc.tasks.base import example_batches

_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SCALES |= {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def run_plan(options: Plan) -> None:
    """Print the plan's report, and the layouts."""
    device = read_device(options)
    stored = dtype_of(options.data, options.genome, options.output.dtype)
    job = make_job(options.data, options.genome, stored=stored)
    reports = [job.plan.report(stored, metadata=about(job.task, options.data))]
    if options.ranks is not None:
        reports.append(_layouts(options, job, options.ranks, device))
    print("\n\n".join(reports))


def read_device(options: Plan) -> DeviceSpec:
    """Find what a rank has: from the file, and from other options."""
    device = DeviceSpec()
    if options.device is not None:
        if not options.device.is_file():
            raise FileNotFoundError(f"no such device file: {options.device} (gbfunc bench --calibrate prints one)")
        device = DeviceSpec.from_json(options.device.read_text(encoding="utf-8"))
    if options.memory is not None:
        device = replace(device, memory=parse_bytes("--memory", options.memory))
    if options.link is not None:
        device = replace(device, link=parse_bytes("--link", options.link, rate=True))
    return device


def _layouts(options: Plan, job: Job, ranks: int, device: DeviceSpec) -> str:
    task, recipe = job.task, job.recipe
    if task.batches is not example_batches:
        raise ValueError(f"--ranks plans tasks of examples, the batches of {task.name} come from an environment")
    one = next(task.batches(task.train, replace(recipe, batch_size=1), torch.Generator(), lambda: job.pnet))
    rows = options.batch_size or recipe.batch_size
    batch = tuple(torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device="meta") for x in one)
    return gb.plan_parallel(
        job.plan,
        job.pnet,
        batch,
        ranks=ranks,
        device=device,
        loss_fn=task.loss,
        microbatches=options.microbatches,
        parallel=None if options.parallel is None else styles_of(options.parallel, job.pnet),
    ).report()


def parse_bytes(option: str, text: str, *, rate: bool = False) -> float:
    """Read bytes (a second) from an option.

    >>> parse_bytes("--memory", "16GB"), parse_bytes("--link", "100 Gbit/s", rate=True)
    (16000000000.0, 12500000000.0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([KMGT]i|[kMGT]|)(B|bit)(?:/s)?\s*", text)
    if match is None or (match[3] == "bit" and not rate) or not float(match[1]):
        such = "a rate such as 100Gbit or 12.5GB" if rate else "a size such as 16GB or 512MiB"
        raise ValueError(f"{option} must be {such}, got {text!r}")
    return float(match[1]) * _SCALES[match[2]] / (8 if match[3] == "bit" else 1)
