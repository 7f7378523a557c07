"""`gbfunc train`: train a genome on a task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gbfunc.cli.options import CheckpointOptions, TrainingOptions

if TYPE_CHECKING:
    from torch import nn

    from gbfunc.cli.fit import Fit
    from gbfunc.cli.job import Job

GENOME_FILE = "genome.safetensors"


@dataclass(frozen=True)
class Train(CheckpointOptions):
    """Train a genome on real data; measure it as its file holds it."""

    def run(self) -> None:
        """Train, write the results, print them."""
        if self.task == "control":
            if self.checkpoint_every is not None or self.resume is not None:
                raise ValueError("--checkpoint-every and --resume are for tasks with examples, got --task control")
            from gbfunc.cli.control import run_train

            return run_train(self)
        if self.dense or self.env_steps is not None:
            raise ValueError(f"--dense and --env-steps are for the control task, got --task {self.task}")
        from gbfunc.cli.job import make_job, results_folder
        from gbfunc.cli.output import print_metrics, write_run

        job = make_job(self)
        with results_folder(self.out) as folder:
            result, _, metrics = train_genome(job, self, folder)
            if self.out is not None:
                write_run(folder, metrics, {"genome": result.history}, job.task.metric)
            print_metrics(metrics, job.task.metrics)


def train_genome(job: Job, options: TrainingOptions, folder: Path) -> tuple[Fit, nn.Module, dict[str, object]]:
    """Train a job's genome, save it, read the file back and measure what it holds.

    Checkpoints are kept where the options can ask for them.

    Returns:
        The training, the network read back, and its metrics.
    """
    import gbfunc as gb
    from gbfunc.cli.checkpoints import checkpoints
    from gbfunc.cli.fit import fit, genome_trainer, total_steps
    from gbfunc.cli.job import genome_metrics, read_genome

    steps = total_steps(job.task, job.recipe)
    trainer = genome_trainer(job, steps, options.seed)
    with checkpoints(options, job, trainer.train_step, steps) as kept:
        result = fit(trainer, job.task, job.recipe, label="genome", seed=options.seed, checkpoints=kept)
    path = folder / GENOME_FILE
    gb.save(path, job.plan, result.state)
    plan, _, net = read_genome(path, options, job.task)
    net.to(options.device)
    metrics = genome_metrics(plan, path, net, job.task) | {
        "hypernet": options.hypernet or job.task.pnet.plan(plan.genome_params).hypernet.type,
        "train_loss": result.history[-1]["train_loss"],
        "seconds": result.seconds,
        "steps": result.steps,
        "seed": options.seed,
    }
    return result, net, metrics
