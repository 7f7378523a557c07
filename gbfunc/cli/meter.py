"""Speed, bytes sent, profile and origin (versions, digests) of a training."""

from __future__ import annotations

import copy
import hashlib
import platform
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import gbfunc as gb
from gbfunc.cli.job import Job
from gbfunc.cli.output import open_folder
from gbfunc.lab.bench.report import describe, peak_resident
from gbfunc.parallel import Mesh, gather_objects
from gbfunc.tasks import Task
from gbfunc.tasks.base import LossFn
from gbfunc.tasks.training import Trainer
from gbfunc.train import TrainStep


@dataclass
class Meter:
    """Measures the steps of one training, and profiles a few steps."""

    split: Mapping[str, Any]  # how the p-net is split over ranks
    peak_flops: float | None = None  # of one rank, per second
    profile: Path | None = None
    sent: Counter[str] = field(default_factory=Counter)  # bytes, by axis
    steps: int = 0
    batch: Any = None  # the first one
    after: Callable[[], None] = lambda: None

    def metered(self, trainer: Trainer, begin: Callable[[], None]) -> Trainer:
        assert trainer.train_step is not None
        traffic = trainer.train_step.mesh.traffic

        def step(state: Any, batch: Any) -> tuple[Any, Tensor, dict[str, Tensor]]:
            before = traffic.by_axis.copy()
            stepped = trainer.step(state, batch)
            if self.batch is None:
                self.batch = batch
                begin()
            self.sent.update(traffic.by_axis - before)
            self.steps += 1
            self.after()
            return stepped

        return trainer._replace(step=step)

    @contextmanager
    def profiling(self, mesh: Mesh, steps: int) -> Iterator[None]:
        if self.profile is None:
            yield
            return
        if steps < 2:
            raise ValueError(f"--profile needs a training of 2 steps or more, as the first warms up, got {steps}")
        active = min(3, steps - 1)
        schedule = torch.profiler.schedule(wait=min(3, steps - 1 - active), warmup=1, active=active, repeat=1)
        sort = "self_cuda_time_total" if mesh.device.type == "cuda" else "self_cpu_time_total"

        def write(profiler: torch.profiler.profile) -> None:
            profiler.export_chrome_trace(str(folder / f"rank-{mesh.rank}.json"))
            if mesh.rank == 0:
                table = profiler.key_averages().table(sort_by=sort, row_limit=50)
                (folder / "table.txt").write_text(table, encoding="utf-8")

        watching = torch.profiler.profile(schedule=schedule, on_trace_ready=write)
        with open_folder(self.profile, "--profile") as folder, watching as profiler:
            self.after = profiler.step
            yield

    def metrics(self, train_step: TrainStep, job: Job, seed: int, steps_per_second: float) -> dict[str, object]:
        mesh, steps, task, pnet = train_step.mesh, max(1, self.steps), job.task, job.pnet
        if self.batch is None and task.resumable:
            # A finished training took no step here: draw its first batch again.
            order = torch.Generator().manual_seed(seed)
            self.batch = next(task.batches(task.train, job.recipe, order, lambda: pnet))
        on_cuda = mesh.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(mesh.device) if on_cuda else peak_resident()
        ranks = gather_objects(mesh, (dict(self.sent), peak))
        axes = [name for name in (*mesh.sizes, "replicas", "world") if any(name in sent for sent, _ in ranks)]
        examples = steps_per_second * job.recipe.batch_size
        found: dict[str, object] = {
            "ranks": mesh.world,
            "mesh": dict(mesh.sizes),
            "placement": train_step.placement,
            "microbatches": self.split.get("microbatches", 1),
            "bytes_sent_per_step": max(sum(sent.values()) for sent, _ in ranks) / steps,
            "bytes_sent_per_step_by_axis": {a: max(sent.get(a, 0) for sent, _ in ranks) / steps for a in axes},
            "peak_memory_bytes": max(peak for _, peak in ranks),
            "samples_per_second": examples,
        }
        if task.interface.tokens:
            found["tokens_per_second"] = examples * task.interface.inputs[0]
        if "pipeline" in self.split:
            found["pipeline"] = self.split["pipeline"]
        if self.batch is None:
            return found
        # Backward takes twice the operations of forward.
        flops = 3 * _forward_flops(pnet, task.loss, self.batch)
        found |= {"model_flops_per_step": flops, "model_flops_per_second": steps_per_second * flops}
        if self.peak_flops is not None:
            found["peak_flops_share"] = steps_per_second * flops / (self.peak_flops * mesh.world)
        return found


@torch.no_grad()
def _forward_flops(pnet: nn.Module, loss: LossFn, batch: Any) -> int:
    """Count the operations of one forward of the dense p-net."""
    with FlopCounterMode(display=False) as counter:
        loss(copy.deepcopy(pnet), batch)
    return counter.get_total_flops()


def provenance(task: Task, plan: gb.Plan, device: torch.device) -> dict[str, Any]:
    return {
        "command": shlex.join(sys.argv),
        "versions": {"gbfunc": gb.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": describe(device, torch.get_num_threads())["machine"],
        "data_digest": data_digest(task),
        "plan_digest": plan.digest(),
    }


def data_digest(task: Task) -> str:
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
