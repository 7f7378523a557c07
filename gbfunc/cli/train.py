"""The commands `train` and `demo`: train a genome, write logs and files, and measure the generated network."""

from __future__ import annotations

import copy
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import gbfunc as gb
from gbfunc.cli import Stopped, output
from gbfunc.cli.checkpoints import FOLDER, checkpoints
from gbfunc.cli.commands import Demo, Train
from gbfunc.cli.genomes import BEST_FILE, GENOME_FILE, genome_metrics, measure, read_genome, read_teacher
from gbfunc.cli.job import Job, about, data_digest, dtype_of, make_job, provenance, resolved
from gbfunc.cli.options import RunOptions
from gbfunc.cli.output import tell
from gbfunc.cli.parser import settings_of, write_config
from gbfunc.cli.ranks import check_alike, find_device, in_turn, open_mesh, split_over
from gbfunc.formats import AUTO
from gbfunc.lab.bench.report import peak_resident
from gbfunc.parallel import Mesh, gather_objects
from gbfunc.tasks import training
from gbfunc.tasks.base import ACCURACY, taught
from gbfunc.tasks.data import steps_per_epoch
from gbfunc.tasks.pnets.base import n_params, narrowed
from gbfunc.train.captured import CapturedTrainStep
from gbfunc.train.step import TrainStep
from gbfunc.types import dtype_name

Run = TypeVar("Run", bound=RunOptions)


def run_train(options: Train) -> None:
    out, dtype = options.output.out, dtype_of(options)
    finished = out is not None and (out / "metrics.json").exists() and (out / GENOME_FILE).exists()
    resumes = options.output.resume is not None and any(((out or Path()) / FOLDER).glob("step-*"))
    if finished and not resumes and not options.output.overwrite:
        raise ValueError(f"{out} has a finished training: --overwrite replaces it, or choose another --out")
    with open_mesh(options.execution, options.training.device) as mesh:
        here = _settled(options, dtype, mesh.device)

        def load() -> tuple[Job, nn.Module | None]:
            job, asked = make_job(here.data, here.genome, here.training, dense=here.dense, stored=dtype), here.teacher
            if asked.teacher is None:
                return job, None
            teacher = read_teacher(asked.teacher, job.task, here.data).to(mesh.device)
            asks = here.training.epochs or here.training.steps or job.recipe.steps
            if job.plan.base is None and not here.dense and not asks:
                # Train twice as long as the recipe, because distillation needs long trainings (Beyer et al., 2022).
                reasons = {**job.recipe.reasons, "epochs": "twice the recipe's, because there is a teacher"}
                job = job._replace(recipe=replace(job.recipe, epochs=2 * job.recipe.epochs, reasons=reasons))
            return job._replace(task=taught(job.task, teacher, asked.teacher_weight, asked.temperature)), teacher

        # Rank 0 downloads and prepares files. Then the other ranks read the files.
        job, teacher = in_turn(mesh, load)
        check_alike(mesh, here, data_digest(job.task) if mesh.world > 1 else "")
        if is_first := mesh.rank == 0:
            for name, why in job.recipe.reasons.items():
                value = getattr(job.recipe, name, None)
                tell(f"{name}{f' {value:.3g}' if isinstance(value, int | float) else ''}: {why}")
            if dtype != options.output.dtype:
                tell(f"dtype {dtype}: most parameters for the number of bytes; --dtype chooses another")
        with output.open_folder(out if is_first else None, locked=True) as folder:
            split = split_over(mesh, options.execution, job.pnet, job.recipe.batch_size)
            result, _, metrics = train_genome(job, here, folder, split, teacher)
            if is_first:
                with output.written(folder, out, job.task, metrics, {metrics["network"]: result.history}):
                    output.print_metrics(metrics, job.task)


def _settled(options: Run, dtype: str | None, device: torch.device) -> Run:
    training = replace(options.training, device=str(device))
    return replace(options, training=training, output=replace(options.output, dtype=dtype))


def run_demo(options: Demo) -> None:
    options = _settled(options, dtype_of(options), find_device(options.training.device))
    job = make_job(options.data, options.genome, options.training, stored=options.output.dtype)
    seed, out = options.data.seed, options.output.out
    task, metric = job.task, job.task.metric
    small_pnet = narrowed(task.pnet, job.plan.genome_params)
    with output.open_folder(out, locked=True) as folder:
        result, generated, metrics = train_genome(job, options, folder)
        runs = {"genome": result.history}
        dense, small = (pnet.build(seed).to(options.training.device) for pnet in (task.pnet, small_pnet))
        for label, net in (("dense p-net", dense), ("small dense net", small)):
            runs[label] = run_fit(training.dense_trainer(net, task, job.recipe), job, seed, label).history
            net.eval()
        metrics |= measure(task, dense, "dense_") | measure(task, small, "small_dense_")
        n_bytes = sum(p.nbytes for p in small.parameters())
        metrics |= {"small_dense_params": n_params(small), "small_dense_bytes": n_bytes}
        rows = []
        for network, prefix, params, n_bytes in (
            (f"{task.pnet.name}, dense", "dense_", "pnet_params", "dense_bytes"),
            (f"{task.pnet.name}, generated", "", "genome_params", "genome_bytes"),
            (f"smaller {small_pnet.name}, dense", "small_dense_", "small_dense_params", "small_dense_bytes"),
        ):
            ratio, shown = job.plan.pnet_params / metrics[params], metric.show(metrics[f"{prefix}test_{metric.name}"])
            rows.append((network, f"{metrics[params]:,}", f"{ratio:.1f}x", f"{metrics[n_bytes]:,}", shown))
        caption = "Bytes: the genome's whole file; dense nets in float32, without a file's header."
        columns = ("network", "parameters", "ratio", "bytes on disk", f"test {metric.label}")
        with output.written(folder, out, task, metrics, runs):
            output.print_table(columns, rows, captions=[caption])
            if out is not None and any(p.ndim in (2, 4) for p in dense.parameters()):
                from gbfunc.plots import weight_images

                nets = {"generated": generated.state_dict(), "dense": dense.state_dict()}
                image = task.interface.inputs[1:] if len(task.interface.inputs) == 3 else None
                output.write_figure(folder / "weights.png", lambda: weight_images(nets, image))


@dataclass
class Meter:
    """Counts the steps and sent bytes of one training, and profiles a few steps (`--profile`)."""

    split: Mapping[str, Any]  # Options that split the p-net over ranks
    peak_flops: float | None = None  # Peak operations per second of one rank
    profile: Path | None = None
    sent: Counter[str] = field(default_factory=Counter)  # {axis of the mesh: bytes that this rank sent}
    steps: int = 0
    batch: Any = None  # The first batch, on which `metrics` counts operations
    after: Callable[[], None] = lambda: None

    def metered(self, trainer: training.Trainer, begin: Callable[[], None]) -> training.Trainer:
        assert trainer.train_step is not None
        traffic = trainer.train_step.mesh.traffic

        def step(state: Any, batch: Any) -> tuple[Any, Tensor, dict[str, Tensor]]:
            before = traffic.copy()
            stepped = trainer.step(state, batch)
            if self.batch is None:
                self.batch = batch
                begin()
            self.sent.update(traffic - before)
            self.steps += 1
            self.after()
            return stepped

        return trainer._replace(step=step)

    @contextmanager
    def profiling(self, mesh: Mesh) -> Iterator[None]:
        if self.profile is None:
            yield
            return
        schedule = torch.profiler.schedule(wait=0, warmup=1, active=3, repeat=1)
        sort = "self_cuda_time_total" if mesh.device.type == "cuda" else "self_cpu_time_total"

        def write(profiler: torch.profiler.profile) -> None:
            profiler.export_chrome_trace(str(folder / f"rank-{mesh.rank}.json"))
            if mesh.rank == 0:
                table = profiler.key_averages().table(sort_by=sort, row_limit=50)
                (folder / "table.txt").write_text(table, encoding="utf-8")

        watching = torch.profiler.profile(schedule=schedule, on_trace_ready=write)
        with output.open_folder(self.profile, "--profile") as folder, watching as profiler:
            self.after = profiler.step
            yield

    def metrics(self, train_step: TrainStep, job: Job, steps_per_second: float) -> dict[str, object]:
        mesh, steps, task = train_step.mesh, max(1, self.steps), job.task
        peak = torch.cuda.max_memory_allocated(mesh.device) if mesh.device.type == "cuda" else peak_resident()
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
        if self.batch is not None:
            # Use attention without fused kernels, because `FlopCounterMode` does not count all fused kernels.
            with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
                task.loss(copy.deepcopy(job.pnet), self.batch)
            # Backward has twice the operations of forward.
            flops = 3 * counter.get_total_flops()
            found |= {"model_flops_per_step": flops, "model_flops_per_second": steps_per_second * flops}
            if self.peak_flops is not None:
                found["peak_flops_share"] = steps_per_second * flops / (self.peak_flops * mesh.world)
        return found


def run_fit(trainer: training.Trainer, job: Job, seed: int, label: str, **hooks: Any) -> training.Fit:
    silent = trainer.train_step is not None and trainer.train_step.mesh.rank > 0
    with output.reporter(label, training.total_steps(job.task, job.recipe), silent=silent) as report:
        return training.fit(trainer, job.task, job.recipe, seed, report=report, **hooks)


def fitted(job: Job, teacher: nn.Module | None, measured: Mapping[str, float], seed: int) -> gb.Genome | None:
    """Fit a genome to a teacher's weights. None if the genome's accuracy is nearer to chance than to the teacher's."""
    task, plan, metric = job.task, job.plan, job.task.metric
    if teacher is None:
        return None
    tell(f"the teacher has validation {metric.label} {metric.show(most := measured[metric.name])}")
    if metric not in ACCURACY or job.hypernet is None:
        return None
    if most < 0.1 + (least := float(task.val.y.bincount().max()) / len(task.val)):
        tell("warning: the teacher is near chance: check its training and the scale of its inputs")
    try:
        genome, _ = gb.fit_genome(plan, teacher, pnet=None if plan.base is None else job.pnet, seed=seed)
    except ValueError:
        # The teacher's architecture is not that of the p-net, or the plan has no weights that can be fitted.
        return None
    reached = task.measured(gb.materialize(plan, genome, job.pnet).eval(), task.val)[metric.name]
    helps = reached - least > 0.5 * (most - least)
    words = f"a genome fitted to the teacher's weights has validation {metric.label} {metric.show(reached)}"
    tell(f"{words}: training begins from {'this genome' if helps else 'random g-nets'}")
    return genome if helps else None


def train_genome(
    job: Job,
    options: RunOptions,
    folder: Path,
    split: Mapping[str, Any] = MappingProxyType({}),
    teacher: nn.Module | None = None,
) -> tuple[training.Fit, nn.Module, dict[str, Any]]:
    task, recipe, asked, seed = job.task, job.recipe, options.output, options.data.seed
    n_bytes, rounding = options.genome.genome_bytes, AUTO if asked.dtype == AUTO else None
    if rounding and (n_bytes is None or asked.finetune is not None):
        cure = "pass --genome-bytes" if n_bytes is None else "drop --finetune, because the training itself rounds"
        raise ValueError(f"--dtype auto trains for a size in bytes: {cure}")
    if asked.finetune is not None and not task.resumable:
        raise ValueError("--finetune needs a task with examples, got the control task, which has none: drop --finetune")
    label = "genome" if job.hypernet else "dense"
    settings = settings_of(options, resolved(job, options.genome, asked.dtype))
    meter = Meter(split, getattr(asked, "peak_flops", None), getattr(asked, "profile", None))
    origin = provenance(task, job.plan, device := torch.device(options.training.device))
    steps, best_path, metadata = training.total_steps(task, recipe), folder / BEST_FILE, about(task, options.data)
    trainer = training.genome_trainer(
        job.plan, job.pnet, task, recipe, seed, rounding=rounding, genome_bytes=n_bytes, metadata=metadata, **split
    )
    taught_by = {} if teacher is None else task.measured(teacher, task.val)
    step, begins_at = trainer.train_step, fitted(job, teacher, taught_by, seed)
    assert step is not None
    if begins_at is not None and step.placement == "replicated":
        trainer = training.going_on(trainer, begins_at)

    def write(genome: gb.TrainState, path: Path) -> None:
        gb.save(path, job.plan, genome, step.stored(genome) or asked.dtype, metadata)

    def train(trainer: training.Trainer, job: Job, label: str, **hooks: Any) -> tuple[training.Fit, int]:
        best = output.Best(best_path, task.metric, write)

        def keep_best(state: gb.TrainState, rows: list[dict[str, float]]) -> None:
            # Call `gather` even if the metric did not improve: all ranks must call the collective. With the dtype
            # `auto`, no genome can be written before the training has determined the quantization steps.
            genome = step.gather(state)
            if rounding is None or step.rounding(genome) is not None:
                best(genome, rows)

        if asked.out is not None:
            hooks["on_validation"] = keep_best
        try:
            result = run_fit(trainer, job, seed, label, log_every=asked.log_every, **hooks)
        except KeyboardInterrupt:
            saved = f"{best_path} has the best genome so far" if best_path.exists() else "no genome is kept"
            cure = "--out DIR --checkpoint-every STEPS saves checkpoints to resume from"
            raise Stopped(signal.SIGINT, f"interrupted: {saved if asked.out else 'nothing is kept'}; {cure}") from None
        return result, int(best.row(result.history)["step"])

    logs, rates = asked.log if step.mesh.rank == 0 else (), recipe.schedule(recipe, recipe.lr, steps)
    with output.open_logs(logs, asked.out, settings, rates) as (begin_logs, on_log):

        def begin() -> None:
            begin_logs()
            write_config(folder / "config.toml", settings)
            if step.mesh.rank == 0:
                graphs = ", steps as CUDA graphs" if isinstance(step, CapturedTrainStep) else ""
                kept = "" if asked.out else "; no files are kept: --out DIR keeps the genome"
                tell(f"training on {step.mesh.device}, {origin['device']}{graphs}{kept}")

        # Open logs at the first step: a training that fails earlier must not change the folder.
        trainer = meter.metered(trainer, begin)
        unit = 1 if task.resumable else steps_per_epoch(task.train, recipe.batch_size)
        with checkpoints(options, settings, steps, unit, step) as saved, meter.profiling(step.mesh):
            result, best_step = train(trainer, job, label, checkpoints=saved, on_log=on_log)
        if asked.finetune is not None:
            job = job._replace(recipe=training.slowed(recipe, asked.finetune))
            more = training.genome_trainer(job.plan, job.pnet, task, job.recipe, seed, rounding=asked.dtype, **split)
            more = training.going_on(more, step.gather(result.state))
            metric, before = task.metric, task.measured(more.net(more.state), task.val)[task.metric.name]
            tuned, best_step = train(more, job, "rounded")
            if not metric.sign * (tuned.history[-1][f"val_{metric.name}"] - before) >= 0:
                if step.mesh.rank == 0:
                    was = f"validation {metric.label} {metric.show(before)}"
                    tell(f"--finetune made it worse: the genome before --finetune is kept, {was}")
                tuned = tuned._replace(state=result.state)
            best_step += result.steps
            result = training.joined(result, tuned)
    path = folder / GENOME_FILE
    write(step.gather(result.state), path)
    plan, _, net = read_genome(path, options.data, task)
    net.to(device)
    metrics = genome_metrics(plan, path, net, task, result.history)
    metrics |= {"network": label, "hypernet": job.hypernet, "dtype": asked.dtype or dtype_name(plan.dtype)}
    metrics |= {"train_loss": result.history[-1]["train_loss"], "seconds": result.seconds}
    metrics |= {"steps": result.steps, "seed": seed}
    if best_path.exists() and asked.out is not None:
        best_net = read_genome(best_path, options.data, task)[2].to(device)
        metrics |= {"best_step": best_step, **measure(task, best_net, "best_")}
    metrics |= {f"teacher_val_{name}": value for name, value in taught_by.items()}
    metrics |= meter.metrics(step, job, result.steps / max(result.step_seconds, 1e-9))
    return result, net, metrics | {"config": settings} | origin
