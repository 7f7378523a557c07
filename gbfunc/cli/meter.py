"""What a training does to the machine, and where it comes from: speed, bytes sent, a profile, versions, digests."""

from __future__ import annotations

import copy
import hashlib
import platform
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import gbfunc as gb
from gbfunc.cli.job import Job
from gbfunc.cli.output import open_folder
from gbfunc.lab.bench.memory import peak_resident
from gbfunc.parallel import Mesh, ScheduleCosts, gather_objects, make_schedule, simulate
from gbfunc.pnet import skeleton_of
from gbfunc.tasks import Task
from gbfunc.tasks.base import LossFn
from gbfunc.tasks.training import Trainer
from gbfunc.train import TrainStep
from gbfunc.trees import tree_map

_PROFILED = 3
_TABLE_ROWS = 50


class Meter:
    """Measures the steps of one training, against the most that a rank can do; a profile of a few goes to a folder."""

    def __init__(self, peak_flops: float | None = None, profile: Path | None = None) -> None:
        self._peak_flops, self._profile = peak_flops, profile
        self._sent: Counter[str] = Counter()
        self._steps = 0
        self._split: Mapping[str, Any] = {}
        self._batch: Any = None
        self._after: Callable[[], None] = lambda: None

    def metered(self, trainer: Trainer, split: Mapping[str, Any], begin: Callable[[], None]) -> Trainer:
        """Count a trainer's steps and what they send; call `begin` after the first step.

        `split` says how the p-net is split over ranks.
        """
        self._split = split
        assert trainer.train_step is not None
        traffic = trainer.train_step.mesh.traffic

        def step(state: Any, batch: Any) -> tuple[Any, Tensor, dict[str, Tensor]]:
            before = traffic.by_axis.copy()
            stepped = trainer.step(state, batch)
            if self._batch is None:
                self._batch = batch
                begin()
            self._sent.update(traffic.by_axis - before)
            self._steps += 1
            self._after()
            return stepped

        return trainer._replace(step=step)

    @contextmanager
    def profiling(self, mesh: Mesh, steps: int) -> Iterator[None]:
        """Profile a few early ones of the `steps` that are taken inside: a trace of each rank, and rank 0's table."""
        if self._profile is None:
            yield
            return
        if steps < 2:
            raise ValueError(f"--profile needs a training of 2 steps or more, as the first warms up, got {steps}")
        active = min(_PROFILED, steps - 1)
        schedule = torch.profiler.schedule(wait=min(3, steps - 1 - active), warmup=1, active=active, repeat=1)
        sort = "self_cuda_time_total" if mesh.device.type == "cuda" else "self_cpu_time_total"

        def write(profiler: torch.profiler.profile) -> None:
            profiler.export_chrome_trace(str(folder / f"rank-{mesh.rank}.json"))
            if mesh.rank == 0:
                table = profiler.key_averages().table(sort_by=sort, row_limit=_TABLE_ROWS)
                (folder / "table.txt").write_text(table, encoding="utf-8")

        with (
            open_folder(self._profile, "--profile") as folder,
            torch.profiler.profile(schedule=schedule, on_trace_ready=write) as profiler,
        ):
            self._after = profiler.step
            yield

    def metrics(self, train_step: TrainStep, job: Job, seed: int, steps_per_second: float) -> dict[str, object]:
        """Describe how a training ran; all ranks call. Bytes and memory are those of the rank that has most."""
        mesh, steps, task, pnet = train_step.mesh, max(1, self._steps), job.task, job.pnet
        if self._batch is None and task.resumable:
            # A training that was finished before took no step here: its first batch is drawn again.
            order = torch.Generator().manual_seed(seed)
            self._batch = next(task.batches(task.train, job.recipe, order, lambda: pnet))
        cuda = mesh.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(mesh.device) if cuda else peak_resident()
        ranks = gather_objects(mesh, (dict(self._sent), peak))
        axes = [name for name in (*mesh.sizes, "replicas", "world") if any(name in sent for sent, _ in ranks)]
        examples, tokens = steps_per_second * job.recipe.batch_size, task.interface.tokens
        pipeline, microbatches = self._split.get("pipeline"), self._split.get("microbatches", 1)
        found: dict[str, object] = {
            "ranks": mesh.world,
            "mesh": dict(mesh.sizes),
            "placement": train_step.placement,
            "microbatches": microbatches,
            "bytes_sent_per_step": max(sum(sent.values()) for sent, _ in ranks) / steps,
            "bytes_sent_per_step_by_axis": {a: max(sent.get(a, 0) for sent, _ in ranks) / steps for a in axes},
            "peak_memory_bytes": max(peak for _, peak in ranks),
            "samples_per_second": examples,
            **({"tokens_per_second": examples * task.interface.inputs[0]} if tokens else {}),
            **({"pipeline": pipeline} if pipeline else {}),
        }
        if self._batch is None:
            # Nothing was trained here.
            return found
        if pipeline:
            stages = mesh.sizes["pipeline"]
            found["pipeline_bubble"] = pipeline_bubble(
                pnet, task.loss, self._batch, pipeline, stages, microbatches, mesh.shards
            )
        # Backward takes twice the operations of forward.
        flops = 3 * forward_flops(pnet, task.loss, self._batch)
        found |= {"model_flops_per_step": flops, "model_flops_per_second": steps_per_second * flops}
        if self._peak_flops is not None:
            found["peak_flops_share"] = steps_per_second * flops / (self._peak_flops * mesh.world)
        return found


@torch.no_grad()
def forward_flops(pnet: nn.Module, loss: LossFn, batch: Any) -> int:
    """Count the operations of one forward of the dense p-net, without computing where that works."""
    try:
        with FlopCounterMode(display=False) as counter:
            loss(skeleton_of(pnet), _on_meta(batch))
    except (RuntimeError, TypeError, ValueError):
        # A loss that reads numbers needs them.
        with FlopCounterMode(display=False) as counter:
            loss(copy.deepcopy(pnet), batch)
    return counter.get_total_flops()


def _on_meta(batch: Any) -> Any:
    return tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, batch)


def pipeline_bubble(
    pnet: nn.Module, loss: LossFn, batch: Any, kind: Any, ranks: int, microbatches: int, shards: int = 1
) -> float:
    """Simulate the part of the ranks' time (0 to 1) in which they wait in a pipeline.

    A stage takes as long as it has operations, twice that backward; messages and generation take no time.
    """
    from gbfunc.parallel.chain import balanced_stages, find_blocks
    from gbfunc.parallel.pipeline_order import SCHEDULES
    from gbfunc.parallel.tracing import trace_chain

    each, part = SCHEDULES[kind][1], shards * microbatches
    small = tree_map(lambda x: x[: len(x) // part] if isinstance(x, Tensor) else x, _on_meta(batch))
    chain = trace_chain(pnet, find_blocks(pnet, each * ranks), loss, small)
    starts = balanced_stages(chain.flops, each * ranks)
    forward = [sum(chain.flops[a:b]) for a, b in zip(starts, starts[1:], strict=False)]
    backward, free = [2 * flops for flops in forward], {"update": 0.0, "send": 0.0, "receive": 0.0}
    costs = ScheduleCosts(forward=forward, backward=backward, backward_input=forward, backward_weight=forward, **free)
    schedule = make_schedule(kind, layers=len(forward), ranks=ranks, microbatches=microbatches, costs=costs)
    return simulate(schedule).bubble


def provenance(task: Task, plan: gb.Plan, device: torch.device) -> dict[str, Any]:
    """Describe where a training comes from, beside its settings, for `metrics.json`."""
    # The room of this import loads what generates and compiles.
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
    """Find the commit of the present folder, with `-dirty` behind it where files were changed since."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False, timeout=10).stdout.strip() or None
    except (OSError, subprocess.TimeoutExpired):
        return None


def data_digest(task: Task) -> str:
    """Compute the SHA-256 of all tensors of the three splits, with their shapes and dtypes."""
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
