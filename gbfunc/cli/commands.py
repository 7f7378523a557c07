"""The commands that train and use genomes: `demo`, `train`, `eval`, `sample`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from gbfunc.cli.birth import BirthOptions, learn_from_birth
from gbfunc.cli.config import values_of
from gbfunc.cli.job import Job, asked_recipe, check_seed, make_job
from gbfunc.cli.meter import Meter
from gbfunc.cli.networks import genome_metrics, measure, read_genome, with_teacher
from gbfunc.cli.options import (
    CheckpointOptions,
    ConfigOption,
    ExecutionOptions,
    GenomeFileOptions,
    GenomeOptions,
    RunOptions,
    TeacherOptions,
)
from gbfunc.cli.output import print_comparison, print_metrics, write_figure, write_run
from gbfunc.cli.ranks import Spread, find_device, in_turn, open_mesh
from gbfunc.cli.train import results_folder, run_fit, train_genome
from gbfunc.lab.birth import RATES
from gbfunc.tasks import continue_text
from gbfunc.tasks.pnets import n_params, narrowed
from gbfunc.tasks.training import dense_trainer


@dataclass(frozen=True, kw_only=True)
class Train(RunOptions):
    """Train a genome on a task; measure it as its file holds it. On many ranks: torchrun ... -m gbfunc train ..."""

    dense: bool = False
    """Train the p-net's weights themselves, without a genome: the dense baseline. The file then holds them all."""

    output: CheckpointOptions = CheckpointOptions()
    teacher: TeacherOptions = TeacherOptions()
    birth: BirthOptions = BirthOptions()
    execution: ExecutionOptions = ExecutionOptions()

    def run(self) -> None:
        """Train, write the results, print them."""
        if self.birth.from_birth is not None:
            return self._learn(self.birth.from_birth)
        if self.birth.other is not None:
            raise ValueError("--other is what the network of a genome learns: say --from-birth too")
        output = self.output
        with open_mesh(self.execution, self.training.device) as mesh:
            here = replace(self, training=replace(self.training, device=str(mesh.device)))
            meter = Meter(output.peak_flops, output.profile)
            # Data and models may be downloaded, or prepared in files, which all ranks then read.
            job = in_turn(mesh, here.job)
            with results_folder(output.out if mesh.rank == 0 else None) as folder:
                result, _, metrics = train_genome(job, here, folder, Spread.asked(mesh, self.execution), meter)
                if output.out is not None and mesh.rank == 0:
                    write_run(folder, metrics, {str(metrics["network"]): result.history}, job.task)
                if mesh.rank == 0:
                    print_metrics(metrics, job.task)

    def job(self) -> Job:
        """What to train."""
        job = make_job(self.data, self.genome, self.training, dense=self.dense)
        return with_teacher(job, self.teacher, self.training.device)

    def _learn(self, path: Path) -> None:
        """Train the network that a genome grows."""
        output = replace(CheckpointOptions(), out=self.output.out)
        plain = replace(self, dense=False, genome=GenomeOptions(), output=output, teacher=TeacherOptions())
        plain = replace(plain, execution=ExecutionOptions())
        if given := [name for (name, x), (_, y) in zip(values_of(self), values_of(plain), strict=True) if x != y]:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ValueError(f"--from-birth trains the weights that its genome grows: drop {flags}")
        check_seed(self.data.seed)
        plan, task, grown = read_genome(path, self.data)
        recipe = task.recipe(plan.genome_params)
        recipe = asked_recipe(replace(recipe, lr=recipe.dense_lr, epochs=1, steps=None), self.training)
        rates = RATES if self.training.lr is None else (1.0,)
        device = find_device(self.training.device)
        recipe = replace(recipe, dense_lr=recipe.lr)
        learn_from_birth(self.birth, grown.to(device), task.to(device), recipe, self.data.seed, rates, self.output.out)


@dataclass(frozen=True, kw_only=True)
class Demo(RunOptions):
    """Train a genome on real digits, and beside it the same p-net and a small net densely; compare them."""

    def run(self) -> None:
        """Train all three, write the results, print one table."""
        job = make_job(self.data, self.genome, self.training)
        seed, device, out = self.data.seed, self.training.device, self.output.out
        task, recipe = job.task, job.recipe
        small_pnet = narrowed(task.pnet, job.plan.genome_params)
        with results_folder(out) as folder:
            result, generated, metrics = train_genome(job, self, folder)
            dense = task.build(seed).to(device)
            small = small_pnet.build(seed).to(device)
            runs = {"genome": result.history}
            for label, net in (("dense p-net", dense), ("small dense net", small)):
                trainer = dense_trainer(net, task, recipe)
                runs[label] = run_fit(trainer, job, seed, label).history
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
            print_comparison(metrics, task.metric)


@dataclass(frozen=True, kw_only=True)
class Eval(ConfigOption, GenomeFileOptions):
    """Rebuild the p-net from a genome file and measure it; task and p-net are those that the file names."""

    def run(self) -> None:
        """Measure and print."""
        plan, task, net = read_genome(self.genome, self)
        print_metrics(genome_metrics(plan, self.genome, net, task), task)


@dataclass(frozen=True, kw_only=True)
class Sample(ConfigOption, GenomeFileOptions):
    """Write text with the language model of a genome file; --data-dir is the text it learned, for its characters."""

    task: Annotated[str, arg(metavar="NAME")] = "text"
    """What it learned: text, or package.module:function of your own."""

    prompt: Annotated[str, arg(metavar="TEXT", help_behavior_hint="(default: a new line)")] = "\n"
    """What it goes on from."""

    tokens: int = 300
    """How much to write: characters, or tokens of the task's vocabulary."""

    temperature: float = 0.8
    """Below 1 it writes more carefully, above 1 more freely; 0 takes the likeliest token each time."""

    seed: int = 0
    """Seed of what is drawn."""

    def run(self) -> None:
        """Print the prompt and what follows it."""
        check_seed(self.seed)
        _, task, net = read_genome(self.genome, self)
        follows = continue_text(net, task, self.prompt, self.tokens, temperature=self.temperature, seed=self.seed)
        print(self.prompt + follows)
