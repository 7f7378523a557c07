"""A training from the command line: what is trained, kept, logged, written and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

import gbfunc as gb
from gbfunc.cli.about import about
from gbfunc.cli.checkpoints import checkpoints
from gbfunc.cli.config import settings_of, write_config
from gbfunc.cli.job import Job, hypernet_of, resolved
from gbfunc.cli.meter import Meter
from gbfunc.cli.networks import genome_metrics, measure, read_genome
from gbfunc.cli.options import RunOptions
from gbfunc.cli.output import Best, make_folder, open_logs, reporter
from gbfunc.cli.provenance import provenance
from gbfunc.cli.ranks import Spread
from gbfunc.cli.teacher import BEST_FILE, GENOME_FILE
from gbfunc.tasks.logs import OnLog
from gbfunc.tasks.rounding import going_on, joined, slowed
from gbfunc.tasks.training import Fit, Trainer, fit, genome_trainer, total_steps


@contextmanager
def results_folder(out: Path | None) -> Iterator[Path]:
    """The folder for results, made if need be; one that is removed afterwards where `out` is None."""
    with nullcontext(make_folder(out)) if out is not None else TemporaryDirectory(prefix="gbfunc-") as folder:
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
    spread: Spread | None = None,
    meter: Meter | None = None,
) -> tuple[Fit, nn.Module, dict[str, object]]:
    """Train a job's genome, save it, read the file back and measure what it holds.

    Checkpoints are kept where the options can ask for them. Of many ranks, each writes into a folder of another name.

    Args:
        job: what to train.
        options: the user's.
        folder: where to write.
        spread: over which ranks, and how; None for this process alone.
        meter: what measures the steps.

    Returns:
        The training, the network read back, and its metrics.
    """
    task, recipe, output, seed = job.task, job.recipe, options.output, options.data.seed
    _check_finetune(output.finetune, output.dtype, task.resumable)
    label, meter = "dense" if job.dense else "genome", meter or Meter()
    settings = settings_of(options, resolved(job, options))
    split = {} if spread is None else spread.arguments(job.pnet, recipe.batch_size)
    trainer = meter.metered(genome_trainer(job.plan, job.pnet, task, recipe, seed, **split), split)
    step = trainer.train_step
    assert step is not None
    # Not before a step is taken: what is refused leaves the folder of another training as it was.
    trainer = trainer._replace(step=_then(trainer.step, lambda: write_config(folder / "config.toml", settings)))
    steps, best_path, metadata = total_steps(task, recipe), folder / BEST_FILE, about(task, options.data)

    def write(genome: gb.TrainState, path: Path) -> None:
        gb.save(path, job.plan, genome, output.dtype, metadata)

    def hooks(on_log: OnLog | None, best: Best, step: gb.TrainStep) -> dict[str, Any]:
        # All ranks gather, whichever of them finds its network better.
        keep = {} if output.out is None else {"on_validation": lambda state, rows: best(step.gather(state), rows)}
        return {"on_log": on_log, "log_every": output.log_every, **keep}

    logs = output.log if step.mesh.rank == 0 else ()
    with open_logs(logs, output.out, settings, recipe.schedule(recipe, recipe.lr, steps)) as on_log:
        best = Best(best_path, task.metric, write)
        with checkpoints(options, task, recipe, step) as kept, meter.profiling(step.mesh, steps):
            result = run_fit(trainer, job, seed, label, checkpoints=kept, **hooks(on_log, best, step))
            best_step = best.step(result.history)
        if output.finetune is not None:
            job = job._replace(recipe=slowed(recipe, output.finetune))
            more = genome_trainer(job.plan, job.pnet, task, job.recipe, seed, rounding=output.dtype, **split)
            best = Best(best_path, task.metric, write)
            tuned = run_fit(going_on(more, result.state), job, seed, "rounded", **hooks(None, best, step))
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
    metrics |= meter.metrics(step, task, job.pnet, recipe.batch_size, result.steps / max(result.step_seconds, 1e-9))
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


def _check_finetune(steps: int | None, dtype: str | None, resumable: bool) -> None:
    """Raise `ValueError` for a `--finetune` that cannot be."""
    if steps is not None and (steps < 1 or dtype is None):
        raise ValueError(f"--finetune must be at least 1 and needs --dtype, got {steps} and {dtype}")
    if steps is not None and not resumable:
        raise ValueError("--finetune is for tasks with examples, and the control task has none")
