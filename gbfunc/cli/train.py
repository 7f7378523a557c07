"""`gbfunc train` and `gbfunc demo`: what is trained, kept, logged, written and measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

import gbfunc as gb
from gbfunc.cli.birth import TAUGHT_FILE, learn_from_birth
from gbfunc.cli.checkpoints import FOLDER, checkpoints
from gbfunc.cli.commands import Demo, Train
from gbfunc.cli.genomes import BEST_FILE, GENOME_FILE, genome_metrics, measure, read_genome, with_teacher
from gbfunc.cli.job import Job, about, dtype_of, make_job, resolved
from gbfunc.cli.meter import Meter, data_digest, provenance
from gbfunc.cli.options import CheckpointOptions, RunOptions
from gbfunc.cli.output import (
    Best,
    open_folder,
    open_logs,
    print_metrics,
    print_reasons,
    print_table,
    reporter,
    tell,
    write_figure,
    write_run,
)
from gbfunc.cli.parser import settings_of, write_config
from gbfunc.cli.ranks import check_alike, in_turn, open_mesh, split_over
from gbfunc.formats import AUTO
from gbfunc.tasks.pnets.base import n_params, narrowed
from gbfunc.tasks.training import (
    Fit,
    Trainer,
    better,
    dense_trainer,
    fit,
    genome_trainer,
    going_on,
    joined,
    slowed,
    total_steps,
)


def run_train(options: Train) -> None:
    """Train, write the results, print them."""
    output = options.output
    _check_overwrites(output)
    if options.birth.from_birth is not None:
        return learn_from_birth(options)
    with open_mesh(options.execution, options.training.device) as mesh:
        here = replace(options, training=replace(options.training, device=str(mesh.device)))
        here, codes = with_codes(here)
        given: dict[str, Any] = {"dense": here.dense, "stored": here.output.dtype}

        def load() -> Job:
            job = make_job(here.data, here.genome, here.training, **given)
            return with_teacher(job, here.teacher, here.training.device)

        # Data and models may be downloaded, or prepared in files, which all ranks then read.
        job = in_turn(mesh, load)
        check_alike(mesh, here, data_digest(job.task) if mesh.world > 1 else "")
        if mesh.rank == 0:
            print_reasons(job.recipe, codes)
        with open_folder(output.out if mesh.rank == 0 else None) as folder:
            split = split_over(mesh, options.execution, job.pnet, job.recipe.batch_size)
            meter = Meter(output.peak_flops, output.profile)
            result, _, metrics = train_genome(job, here, folder, split, meter)
            if mesh.rank == 0:
                if output.out is not None:
                    write_run(folder, metrics, {str(metrics["network"]): result.history}, job.task)
                print_metrics(metrics, job.task)


def run_demo(options: Demo) -> None:
    """Train all three, write the results, print one table."""
    job = make_job(options.data, options.genome, options.training, stored=options.output.dtype)
    seed, out = options.data.seed, options.output.out
    task, metric = job.task, job.task.metric
    small_pnet = narrowed(task.pnet, job.plan.genome_params)
    with open_folder(out) as folder:
        result, generated, metrics = train_genome(job, options, folder)
        runs = {"genome": result.history}
        dense, small = (pnet.build(seed).to(options.training.device) for pnet in (task.pnet, small_pnet))
        for label, net in (("dense p-net", dense), ("small dense net", small)):
            runs[label] = run_fit(dense_trainer(net, task, job.recipe), job, seed, label).history
            net.eval()
        metrics |= {
            **measure(task, dense, "dense_"),
            **measure(task, small, "small_dense_"),
            "small_dense_params": n_params(small),
            "small_dense_bytes": sum(p.nbytes for p in small.parameters()),
            "small_dense_config": dict(small_pnet.config),
            "pnet_label": task.pnet.label,
            "small_dense_label": small_pnet.label,
        }
        if out is not None:
            from gbfunc.plots import weight_images

            nets = {"generated": generated.state_dict(), "dense": dense.state_dict()}
            image = task.interface.inputs[1:] if len(task.interface.inputs) == 3 else None
            if any(w.ndim in (2, 4) for w in nets["dense"].values()):
                write_figure(folder / "weights.png", weight_images(nets, image))
            write_run(folder, metrics, runs, task)
    rows = []
    for network, prefix, params, n_bytes in (
        (f"{task.pnet.label}, dense", "dense_", "pnet_params", "dense_bytes"),
        (f"{task.pnet.label}, generated", "", "genome_params", "genome_bytes"),
        (f"{small_pnet.label}, dense", "small_dense_", "small_dense_params", "small_dense_bytes"),
    ):
        ratio, shown = job.plan.pnet_params / metrics[params], metric.show(metrics[f"{prefix}test_{metric.name}"])
        rows.append((network, f"{metrics[params]:,}", f"{ratio:.1f}x", f"{metrics[n_bytes]:,}", shown))
    note = "Bytes: the genome's whole file; dense nets in float32, without a file's header."
    print_table(("network", "parameters", "ratio", "bytes on disk", f"test {metric.label}"), rows, notes=[note])


def with_codes(options: Train) -> tuple[Train, str | None]:
    """Choose codes for an adapter's file of so many bytes, where no other option is against them; and say why."""
    output, execution = options.output, options.execution
    dtype = dtype_of(options.data, options.genome, output.dtype)
    against = options.dense or (output.finetune, options.training.optimizer, execution.local_steps) != (None,) * 3
    if dtype == output.dtype or against or execution.placement not in ("auto", "replicated"):
        return options, None
    why = "the bytes hold some five times the numbers in codes; their steps are found from 60 % of the training on"
    return replace(options, output=replace(output, dtype=dtype)), why


def _check_overwrites(output: CheckpointOptions) -> None:
    """Raise `ValueError` where the results of a finished training would be lost."""
    out = output.out
    if out is None or output.overwrite or not (out / "metrics.json").exists():
        return
    if output.resume is not None and any((out / FOLDER).glob("step-*")):
        return
    if (out / GENOME_FILE).exists() or (out / TAUGHT_FILE).exists():
        raise ValueError(f"{out} holds a finished training: --overwrite replaces it, or choose another --out")


def run_fit(trainer: Trainer, job: Job, seed: int, label: str, **hooks: Any) -> Fit:
    """Train by a job's recipe, with progress on standard error; one of many ranks speaks; `hooks` go to `fit`."""
    silent = trainer.train_step is not None and trainer.train_step.mesh.rank > 0
    with reporter(label, total_steps(job.task, job.recipe), silent=silent) as report:
        return fit(trainer, job.task, job.recipe, seed, report=report, **hooks)


def train_genome(
    job: Job,
    options: RunOptions,
    folder: Path,
    split: Mapping[str, Any] = MappingProxyType({}),
    meter: Meter | None = None,
) -> tuple[Fit, nn.Module, dict[str, Any]]:
    """Train a job's genome, save it, read the file back and measure the network that the file holds.

    Checkpoints are kept where the options can ask for them. Of many ranks, each writes into a folder of another name.

    Returns:
        The training, the network, and the metrics.
    """
    task, recipe, output, seed = job.task, job.recipe, options.output, options.data.seed
    if output.dtype == AUTO and (options.genome.genome_bytes is None or output.finetune is not None):
        raise ValueError("--dtype auto needs --genome-bytes, and no --finetune: the training itself rounds")
    if output.finetune is not None and not task.resumable:
        raise ValueError("--finetune is for tasks with examples, and the control task has none")
    label, meter = "dense" if job.dense else "genome", meter or Meter()
    settings = settings_of(options, resolved(job, options))
    steps, best_path, metadata = total_steps(task, recipe), folder / BEST_FILE, about(task, options.data)
    coded = {"rounding": AUTO, "genome_bytes": options.genome.genome_bytes, "metadata": metadata}
    coded = coded if output.dtype == AUTO else {}
    trainer = genome_trainer(job.plan, job.pnet, task, recipe, seed, **split, **coded)
    step, coder = trainer.train_step, trainer.coder
    assert step is not None

    def write(genome: gb.TrainState, path: Path) -> None:
        gb.save(path, job.plan, genome, output.dtype if coder is None else coder.final(genome), metadata)

    def keep_best(best: Best, state: gb.TrainState, rows: list[dict[str, float]]) -> None:
        # All ranks gather, whichever of them finds its network better. Before there are steps nothing is as in a file.
        genome = step.gather(state)
        if coder is None or coder.steps is not None:
            best(genome, rows)

    def train(trainer: Trainer, job: Job, label: str, **hooks: Any) -> tuple[Fit, int]:
        best = Best(best_path, task.metric, write)
        if output.out is not None:
            hooks["on_validation"] = partial(keep_best, best)
        result = run_fit(trainer, job, seed, label, log_every=output.log_every, **hooks)
        return result, best.step(result.history)

    logs = output.log if step.mesh.rank == 0 else ()
    with open_logs(logs, output.out, settings, recipe.schedule(recipe, recipe.lr, steps)) as (begin_logs, on_log):

        def begin() -> None:
            begin_logs()
            write_config(folder / "config.toml", settings)

        # Not before a step is taken: what is refused leaves the folder of another training as it was.
        trainer = meter.metered(trainer, split, begin)
        with checkpoints(options, task, settings, steps, step) as kept, meter.profiling(step.mesh, steps):
            result, best_step = train(trainer, job, label, checkpoints=kept, on_log=on_log)
        if output.finetune is not None:
            job = job._replace(recipe=slowed(recipe, output.finetune))
            more = genome_trainer(job.plan, job.pnet, task, job.recipe, seed, rounding=output.dtype, **split)
            more = going_on(more, step.gather(result.state))
            before = task.measured(more.net(more.state), task.val)
            tuned, best_step = train(more, job, "rounded")
            if not better(task, before, tuned):
                if step.mesh.rank == 0:
                    was = f"validation {task.metric.label} {task.metric.show(before[task.metric.name])}"
                    tell(f"--finetune made it worse: kept as it was, {was}")
                tuned = tuned._replace(state=result.state)
            best_step += result.steps
            result = joined(result, tuned)
    path = folder / GENOME_FILE
    write(step.gather(result.state), path)
    plan, _, net = read_genome(path, options.data, task)
    net.to(options.training.device)
    metrics = genome_metrics(plan, path, net, task, result.history) | {
        "network": label,
        "hypernet": job.hypernet,
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
