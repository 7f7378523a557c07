"""A training from the command line: what is trained, kept, logged, written and measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

import gbfunc as gb
from gbfunc.cli.about import about
from gbfunc.cli.birth import TAUGHT_FILE, learn_from_birth
from gbfunc.cli.checkpoints import FOLDER, checkpoints
from gbfunc.cli.commands import Train
from gbfunc.cli.config import settings_of, values_of, write_config
from gbfunc.cli.job import Job, asked_recipe, check_seed, dtype_of, hypernet_of, make_job, resolved
from gbfunc.cli.meter import Meter
from gbfunc.cli.networks import BEST_FILE, GENOME_FILE, genome_metrics, measure, read_genome, with_teacher
from gbfunc.cli.options import (
    BirthOptions,
    CheckpointOptions,
    ExecutionOptions,
    GenomeOptions,
    OutputOptions,
    RunOptions,
    TeacherOptions,
)
from gbfunc.cli.output import Best, open_folder, open_logs, print_metrics, print_reasons, reporter, write_run
from gbfunc.cli.provenance import provenance
from gbfunc.cli.ranks import amp_slowdown, amp_warning, check_alike, find_device, in_turn, open_mesh, split_over
from gbfunc.formats import AUTO
from gbfunc.lab.birth import RATES
from gbfunc.tasks.logs import OnLog
from gbfunc.tasks.rounding import better, going_on, joined, slowed
from gbfunc.tasks.training import Fit, Trainer, fit, genome_trainer, total_steps
from gbfunc.train import TrainStep


def run(options: Train) -> None:
    """Train, write the results, print them."""
    output, born = options.output, options.birth.from_birth
    if born is not None:
        return _learn(options, born)
    if options.birth != BirthOptions():
        raise ValueError("--other and --other-data-dir are what a genome's network learns: say --from-birth too")
    with open_mesh(options.execution, options.training.device) as mesh:
        here = replace(options, training=replace(options.training, device=str(mesh.device)))
        amp = options.execution.amp
        if amp is not None and mesh.rank == 0 and mesh.device.type == "cpu":
            if (words := amp_warning(amp, amp_slowdown(getattr(torch, amp), mesh.device))) is not None:
                print(f"gbfunc: {words}", file=sys.stderr)
        meter = Meter(output.peak_flops, output.profile)
        # Data and models may be downloaded, or prepared in files, which all ranks then read.
        here, codes = with_codes(here)
        job = in_turn(mesh, lambda: job_of(here))
        check_alike(mesh, here, job.task)
        if mesh.rank == 0:
            print_reasons(job.recipe, codes)
        with results_folder(output.out if mesh.rank == 0 else None) as folder:
            split = split_over(mesh, options.execution, job.pnet, job.recipe.batch_size)
            result, _, metrics = train_genome(job, here, folder, split, meter)
            if output.out is not None and mesh.rank == 0:
                write_run(folder, metrics, {str(metrics["network"]): result.history}, job.task)
            if mesh.rank == 0:
                print_metrics(metrics, job.task)


def with_codes(options: Train) -> tuple[Train, str | None]:
    """Codes for an adapter's file of so many bytes, where no other option is against them; and why, if so."""
    output, execution = options.output, options.execution
    dtype = dtype_of(options.data, options.genome, output.dtype)
    against = options.dense or (output.finetune, options.training.optimizer, execution.local_steps) != (None,) * 3
    if dtype == output.dtype or against or execution.placement not in ("auto", "replicated"):
        return options, None
    why = "the bytes hold some five times the numbers in codes; their steps are found from 60 % of the training on"
    return replace(options, output=replace(output, dtype=dtype)), why


def job_of(options: Train) -> Job:
    """What to train."""
    _check_overwrites(options.output)
    genome, stored = options.genome, options.output.dtype
    job = make_job(options.data, genome, options.training, dense=options.dense, stored=stored)
    return with_teacher(job, options.teacher, options.training.device)


def _check_overwrites(output: CheckpointOptions) -> None:
    """Raise `ValueError` where the results of a finished training would be lost."""
    out = output.out
    if out is None or output.overwrite or not (out / "metrics.json").exists():
        return
    if output.resume is not None and any((out / FOLDER).glob("step-*")):
        return
    if (out / GENOME_FILE).exists() or (out / TAUGHT_FILE).exists():
        raise ValueError(f"{out} holds a finished training: --overwrite replaces it, or choose another --out")


def _learn(options: Train, path: Path) -> None:
    output = replace(CheckpointOptions(), out=options.output.out, overwrite=options.output.overwrite)
    plain = replace(options, dense=False, genome=GenomeOptions(), output=output, teacher=TeacherOptions())
    plain = replace(plain, execution=ExecutionOptions())
    if given := [name for (name, x), (_, y) in zip(values_of(options), values_of(plain), strict=True) if x != y]:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--from-birth trains the weights that its genome grows: drop {flags}")
    _check_overwrites(options.output)
    check_seed(options.data.seed)
    plan, task, grown = read_genome(path, options.data)
    recipe = task.recipe(plan.genome_params)
    recipe = asked_recipe(replace(recipe, lr=recipe.dense_lr, epochs=1, steps=None), options.training)
    rates = RATES if options.training.lr is None else (1.0,)
    device = find_device(options.training.device)
    recipe = replace(recipe, dense_lr=recipe.lr)
    seed, out = options.data.seed, options.output.out
    with nullcontext() if out is None else open_folder(out):
        learn_from_birth(options.birth, grown.to(device), task.to(device), recipe, seed, rates, out)


@contextmanager
def results_folder(out: Path | None) -> Iterator[Path]:
    """The folder for results, made if need be; one that is removed afterwards where `out` is None."""
    with open_folder(out) if out is not None else TemporaryDirectory(prefix="gbfunc-") as folder:
        yield Path(folder)


def run_fit(trainer: Trainer, job: Job, seed: int, label: str, **hooks: Any) -> Fit:
    """Train by a job's recipe, with progress on standard error; of many ranks, one speaks; `hooks` as of `fit`."""
    task, recipe = job.task, job.recipe
    silent = trainer.train_step is not None and trainer.train_step.mesh.rank > 0
    with reporter(label, total_steps(task, recipe), silent=silent) as report:
        return fit(trainer, task, recipe, seed, report=report, **hooks)


def train_genome(
    job: Job,
    options: RunOptions,
    folder: Path,
    split: Mapping[str, Any] = MappingProxyType({}),
    meter: Meter | None = None,
) -> tuple[Fit, nn.Module, dict[str, object]]:
    """Train a job's genome, save it, read the file back and measure the network that it holds: all three.

    Checkpoints are kept where the options can ask for them. Of many ranks, each writes into a folder of another name.
    """
    task, recipe, output, seed = job.task, job.recipe, options.output, options.data.seed
    _check_dtype(output, options.genome, task.resumable)
    label, meter = "dense" if job.dense else "genome", meter or Meter()
    settings = settings_of(options, resolved(job, options))
    steps, best_path, metadata = total_steps(task, recipe), folder / BEST_FILE, about(task, options.data)
    coded = {"rounding": AUTO, "genome_bytes": options.genome.genome_bytes, "metadata": metadata}
    coded = coded if output.dtype == AUTO else {}
    trainer = meter.metered(genome_trainer(job.plan, job.pnet, task, recipe, seed, **split, **coded), split)
    step, coder = trainer.train_step, trainer.coder
    assert step is not None

    def write(genome: gb.TrainState, path: Path) -> None:
        gb.save(path, job.plan, genome, output.dtype if coder is None else coder.final(genome), metadata)

    def keep_best(best: Best, step: TrainStep, state: gb.TrainState, rows: list[dict[str, float]]) -> None:
        # All ranks gather, whichever of them finds its network better. Before there are steps nothing is as in a file.
        genome = step.gather(state)
        if coder is None or coder.steps is not None:
            best(genome, rows)

    def hooks(on_log: OnLog | None, best: Best, step: TrainStep) -> dict[str, Any]:
        keep = {} if output.out is None else {"on_validation": partial(keep_best, best, step)}
        return {"on_log": on_log, "log_every": output.log_every, **keep}

    logs = output.log if step.mesh.rank == 0 else ()
    with open_logs(logs, output.out, settings, recipe.schedule(recipe, recipe.lr, steps)) as (begin_logs, on_log):
        # Not before a step is taken: what is refused leaves the folder of another training as it was.
        begin = _then(_then(trainer.step, begin_logs), lambda: write_config(folder / "config.toml", settings))
        trainer = trainer._replace(step=begin)
        best = Best(best_path, task.metric, write)
        with checkpoints(options, task, recipe, step) as kept, meter.profiling(step.mesh, steps):
            result = run_fit(trainer, job, seed, label, checkpoints=kept, **hooks(on_log, best, step))
            best_step = best.step(result.history)
        if output.finetune is not None:
            job = job._replace(recipe=slowed(recipe, output.finetune))
            more = genome_trainer(job.plan, job.pnet, task, job.recipe, seed, rounding=output.dtype, **split)
            best = Best(best_path, task.metric, write)
            more = going_on(more, step.gather(result.state))
            before = task.measured(more.net(more.state), task.val)
            tuned = run_fit(more, job, seed, "rounded", **hooks(None, best, step))
            if not better(task, before, tuned):
                if step.mesh.rank == 0:
                    was = f"validation {task.metric.label} {task.metric.show(before[task.metric.name])}"
                    print(f"gbfunc: --finetune made it worse: kept as it was, {was}", file=sys.stderr)
                tuned = tuned._replace(state=result.state)
            best_step = result.steps + best.step(tuned.history)
            result = joined(result, tuned)
    path = folder / GENOME_FILE
    write(step.gather(result.state), path)
    plan, _, net = read_genome(path, options.data, task)
    net.to(options.training.device)
    metrics = genome_metrics(plan, path, net, task, result.history) | {
        "network": label,
        "hypernet": hypernet_of(job),
        "dtype": output.dtype or str(plan.dtype).removeprefix("torch."),
        "train_loss": result.history[-1]["train_loss"],
        "seconds": result.seconds,
        "steps": result.steps,
        "seed": seed,
    }
    if best_path.exists() and output.out is not None:
        kept_net = read_genome(best_path, options.data, task)[2].to(options.training.device)
        metrics |= {"best_step": best_step, **measure(task, kept_net, "best_")}
    metrics |= meter.metrics(step, job, seed, result.steps / max(result.step_seconds, 1e-9))
    return result, net, metrics | {"config": settings} | provenance(task, plan, step.mesh.device)


def _then(step: Callable[[Any, Any], Any], act: Callable[[], None]) -> Callable[[Any, Any], Any]:
    """The step, which acts once, after its first call."""
    left = [act]

    def acting(state: Any, batch: Any) -> Any:
        result = step(state, batch)
        while left:
            left.pop()()
        return result

    return acting


def _check_dtype(output: OutputOptions, genome: GenomeOptions, resumable: bool) -> None:
    """Raise `ValueError` for a `--dtype` or `--finetune` that cannot be."""
    steps, dtype = output.finetune, output.dtype
    if dtype == AUTO and (genome.genome_bytes is None or steps is not None):
        raise ValueError("--dtype auto needs --genome-bytes, and no --finetune: the training itself rounds")
    if steps is not None and (steps < 1 or dtype is None):
        raise ValueError(f"--finetune must be at least 1 and needs --dtype, got {steps} and {dtype}")
    if steps is not None and not resumable:
        raise ValueError("--finetune is for tasks with examples, and the control task has none")
