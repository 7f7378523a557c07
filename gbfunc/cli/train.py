"""`gbfunc train`: train a genome on a task."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import FlagCreatePairsOff, arg

from gbfunc.cli.options import RECIPE, CheckpointOptions, TrainingOptions, find_dtype
from gbfunc.cli.ranks import RankOptions, open_mesh

if TYPE_CHECKING:
    from torch import nn

    import gbfunc as gb
    from gbfunc.cli.fit import Fit
    from gbfunc.cli.job import Job
    from gbfunc.parallel import Placement

GENOME_FILE = "genome.safetensors"


@dataclass(frozen=True)
class Train(CheckpointOptions, RankOptions):
    """Train a genome on real data; measure it as its file holds it. On many ranks: torchrun ... -m gbfunc train ..."""

    dense: FlagCreatePairsOff[bool] = False
    """Train the p-net's own weights, without a genome: the yardstick. The file then holds them all."""

    env_steps: Annotated[int | None, arg(metavar="INT", help_behavior_hint=RECIPE)] = None
    """Length of the control task's training, in steps of its environments together."""

    def run(self) -> None:
        """Train, write the results, print them."""
        if self.task == "control":
            if self.checkpoint_every is not None or self.resume is not None:
                raise ValueError("--checkpoint-every and --resume are for tasks with examples, got --task control")
            from gbfunc.cli.control import run_train

            return run_train(self)
        if self.env_steps is not None:
            raise ValueError(f"--env-steps is for the control task, got --task {self.task}")
        from gbfunc.cli.job import make_job, results_folder
        from gbfunc.cli.output import print_metrics, write_run

        with open_mesh(self, self.device) as mesh:
            own = replace(self, device=str(mesh.device))
            job = make_job(own)
            with results_folder(self.out if mesh.rank == 0 else None) as folder:
                result, _, metrics = train_genome(job, own, folder, mesh, self.placement)
                if self.out is not None and mesh.rank == 0:
                    write_run(folder, metrics, {str(metrics["network"]): result.history}, job.task.metric)
                if mesh.rank == 0:
                    print_metrics(metrics, job.task.metrics)


def train_genome(
    job: Job,
    options: TrainingOptions,
    folder: Path,
    mesh: gb.Mesh | None = None,
    placement: Placement | Literal["auto"] = "auto",
) -> tuple[Fit, nn.Module, dict[str, object]]:
    """Train a job's genome, save it, read the file back and measure what it holds.

    Checkpoints are kept where the options can ask for them. Of many ranks, each writes into a folder of its own.

    Returns:
        The training, the network read back, and its metrics.
    """
    import gbfunc as gb
    from gbfunc.cli.checkpoints import checkpoints
    from gbfunc.cli.fit import fit, genome_trainer, total_steps
    from gbfunc.cli.job import genome_metrics, is_dense, read_genome
    from gbfunc.cli.ranks import rank_metrics

    steps, label = total_steps(job.task, job.recipe), "dense" if is_dense(options) else "genome"
    trainer = genome_trainer(job, steps, options.seed, mesh, placement)
    with checkpoints(options, job, trainer.train_step, steps) as kept:
        result = fit(trainer, job.task, job.recipe, label=label, seed=options.seed, checkpoints=kept)
    path = folder / GENOME_FILE
    step = trainer.train_step
    genome = result.state if step is None else step.gather(result.state)
    gb.save(path, job.plan, genome, find_dtype(options.dtype))
    plan, _, net = read_genome(path, options, job.task)
    planned = None if is_dense(options) else job.task.pnet.plan(plan.genome_params).hypernet.type
    net.to(options.device)
    metrics = genome_metrics(plan, path, net, job.task) | {
        "network": label,
        "hypernet": options.hypernet or planned,
        "dtype": options.dtype or str(plan.dtype).removeprefix("torch."),
        "train_loss": result.history[-1]["train_loss"],
        "seconds": result.seconds,
        "steps": result.steps,
        "seed": options.seed,
    }
    if step is not None:
        metrics |= rank_metrics(step, result.steps, job.recipe.batch_size, result.seconds)
    return result, net, metrics
