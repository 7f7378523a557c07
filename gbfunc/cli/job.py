"""From options to a plan, from a plan to a genome's file, from a file to a network and its metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

import gbfunc as gb
from gbfunc.cli.checkpoints import Kept, checkpoints
from gbfunc.cli.meter import Meter
from gbfunc.cli.options import DataOptions, ModelOptions, TeacherOptions, TrainingOptions
from gbfunc.cli.output import make_folder, reporter
from gbfunc.cli.ranks import Spread, find_device
from gbfunc.cli.teacher import GENOME_FILE, is_genome, teacher_file
from gbfunc.tasks import TASKS, Recipe, Task, find_task
from gbfunc.tasks.base import History
from gbfunc.tasks.pnets import PNet, brief, find_pnet
from gbfunc.tasks.teaching import taught
from gbfunc.tasks.training import Fit, Trainer, fit, genome_trainer, total_steps

ALL_LINEAR = "all-linear"
_ADAPTER = ("base", "target_modules", "modules_to_save")


class Job(NamedTuple):
    """What a command works on.

    Attributes:
        task: data and p-net, on the device to train on.
        recipe: settings, with the user's in place.
        pnet: the p-net with its initial weights.
        plan: which of its tensors are generated, and how.
    """

    task: Task
    recipe: Recipe
    pnet: nn.Module
    plan: gb.Plan


def load_task(options: DataOptions, sizes: tuple[int, ...] | None = None) -> Task:
    """The task that the options name, with the p-net that they name.

    Args:
        options: which.
        sizes: layer sizes, for a p-net that takes them.

    Raises:
        ValueError: if its data is damaged, or if the p-net does not fit it.
        FileNotFoundError: if its data is missing.
        ImportError: if a package is missing.
    """
    given = _given(options, "env", "env_steps")
    if options.task != "control" and given:
        raise ValueError(f"{_flags(given)} is for the control task, got --task {options.task}")
    given |= _given(options, "pretrained")
    if options.task in set(TASKS) - {"trec", "texts"} and "pretrained" in given:
        raise ValueError(f"--pretrained is for the tasks trec and texts, got --task {options.task}")
    task = find_task(options.task, options.data_dir, read_json("--task-config", options.task_config) | given)
    config = read_json("--pnet-config", options.pnet_config) | ({} if sizes is None else {"sizes": sizes})
    if options.pnet is None and not config:
        return task
    if options.pretrained is not None and options.pnet not in (None, task.pnet.name):
        raise ValueError(f"{options.pretrained} holds a network of type {task.pnet.name}, got --pnet {options.pnet}")
    if options.pnet in (None, task.pnet.name):
        # What the user leaves open is as the task has it.
        config = {**task.pnet.config, **config}
    return task.with_pnet(find_pnet(options.pnet or task.pnet.name, task.interface, config))


def _given(options: DataOptions, *names: str) -> dict[str, Any]:
    """Those options that a command has and the user has set."""
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def _flags(names: Iterable[str]) -> str:
    """Options as the user types them."""
    return " and ".join(f"--{name.replace('_', '-')}" for name in names)


def read_json(option: str, text: str) -> dict[str, Any]:
    """The object that an option holds.

    Raises:
        ValueError: if it is no JSON object.
    """
    expected = f"{option} must be a JSON object such as '{{\"width\": 64}}', got {text!r}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{expected}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(expected)
    return value


def make_job(options: ModelOptions) -> Job:
    """Load the data and plan the genome; raises as `load_task`, also for options that do not fit each other."""
    check_seed(options.seed)
    device = find_device(getattr(options, "device", "cpu"))
    task = load_task(options, options.sizes).to(device)
    task = task.with_pnet(task.pnet.planned(**plan_changes(options)))
    pnet = task.build(options.seed).to(device)
    genome_params, compression = options.genome_params, options.compression
    if compression is not None and not 0 < compression < float("inf"):
        raise ValueError(f"--compression must be a positive number, got {compression}")
    if genome_params is None and compression is None:
        genome_params, compression = task.genome_params, None if task.genome_params else task.compression
    if is_dense(options):
        if given := _given(options, "genome_params", "compression", "hypernet", *_ADAPTER):
            raise ValueError(f"--dense trains every weight itself: drop {_flags(given)}")
        plan = gb.make_plan(pnet, rules=[(".", None)])
        recipe = task.recipe(plan.genome_params)
        recipe = replace(recipe, lr=recipe.dense_lr, direct_lr=None)
    else:
        # Both given is for the plan to refuse.
        plan = _sized_plan(task, pnet, options.hypernet, genome_params, compression)
        recipe = task.recipe(plan.genome_params)
    return Job(task, asked_recipe(recipe, options), pnet, plan)


def asked_recipe(recipe: Recipe, options: ModelOptions) -> Recipe:
    """A recipe with the user's settings in place; `ValueError` for settings that no training can use."""
    given = _given(options, "epochs", "steps", "batch_size", "lr")
    if "epochs" in given and "steps" in given:
        raise ValueError(f"give at most one of --epochs and --steps, got {given['epochs']} and {given['steps']}")
    recipe = replace(recipe, **({"steps": None, "measure_every": None} if "epochs" in given else {}) | given)
    _check_recipe(recipe)
    return recipe


def plan_changes(options: ModelOptions) -> dict[str, Any]:
    """What the user changes of the p-net's `PlanOptions`, in their form."""
    given = _given(options, *_ADAPTER)
    if given.get("base") == "none":
        if len(given) > 1:
            raise ValueError(f"--base none has no adapter: drop {_flags(name for name in given if name != 'base')}")
        return {"base": None, "target_modules": None, "modules_to_save": ()}
    names = given.get("target_modules", ())
    if len(names) == 1 and (names[0] == ALL_LINEAR or not re.fullmatch(r"[\w.]+", names[0])):
        given["target_modules"] = names[0]
    return given


def with_teacher(job: Job, options: TeacherOptions, device: str) -> Job:
    """The same job, whose loss follows the teacher that the options name, if they do.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a file that holds no network of the task, or options that are out of range or have no effect.
    """
    if options.teacher is None:
        if (options.teacher_weight, options.temperature) != (TeacherOptions.teacher_weight, TeacherOptions.temperature):
            raise ValueError("--teacher-weight and --temperature are for a teacher: say --teacher too")
        return job
    teacher = read_teacher(options.teacher, job.task).to(device)
    return job._replace(task=taught(job.task, teacher, options.teacher_weight, options.temperature))


def read_teacher(path: Path, task: Task) -> nn.Module:
    """The trained network of a genome file, of a file with the weights of the task's p-net, or of a folder with one.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, or holds no network of the task.
    """
    path = teacher_file(path)
    if is_genome(path):
        plan, genome = gb.load(path)
        return _network(path, plan, genome, _fitted(task, plan, path, {}).build(0))
    net = task.build(0)
    try:
        load_model(net, path)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"--teacher: {path} does not hold the weights of {task.pnet.name}: {error}") from error
    return net.eval()


def _sized_plan(task: Task, pnet: nn.Module, hypernet: str | None, params: int | None, ratio: float | None) -> gb.Plan:
    """The task's plan; a ratio that cannot be reached is refused in its terms."""
    try:
        return task.plan(pnet, hypernet, genome_params=params, compression=ratio)
    except ValueError as error:
        if ratio is None or params is not None or not hasattr(error, "least"):
            raise
        reason = str(error).partition("cannot be reached: ")[2] or str(error)
        raise ValueError(f"a genome {ratio:,.15g} times smaller cannot be reached: {reason}") from error


def is_dense(options: ModelOptions) -> bool:
    """Whether the p-net's weights themselves are asked for, in place of a genome."""
    return bool(getattr(options, "dense", False))


def check_seed(seed: int) -> None:
    """Raise `ValueError` for a seed that no generator takes."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2**63, got {seed}")


def _check_recipe(recipe: Recipe) -> None:
    """Raise `ValueError` for settings that no training can use; `fit` checks the batch size."""
    for name in ("epochs", "steps"):
        if (value := getattr(recipe, name)) is not None and value < 1:
            raise ValueError(f"--{name} must be at least 1, got {value}")
    if not 0 < recipe.lr < float("inf"):
        raise ValueError(f"--lr must be a positive number, got {recipe.lr}")


@contextmanager
def results_folder(out: Path | None) -> Iterator[Path]:
    """The folder for results, made if need be; one that is removed afterwards where `out` is None."""
    with nullcontext(make_folder(out)) if out is not None else TemporaryDirectory(prefix="gbfunc-") as folder:
        yield Path(folder)


def read_genome(path: Path, options: DataOptions, task: Task | None = None) -> tuple[gb.Plan, Task, nn.Module]:
    """Rebuild the p-net that a genome file describes, with its generated weights.

    Args:
        path: the file.
        options: which data.
        task: the data, where it is loaded already.

    Returns:
        Its plan, its task, and the network on the CPU.

    Raises:
        ValueError: if the file is damaged, or if its p-net does not fit the task.
        FileNotFoundError: if there is no such file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such genome file: {path}")
    plan, genome = gb.load(path)
    if task is None:
        task = load_task(options)
        task = task.with_pnet(_fitted(task, plan, path, read_json("--pnet-config", options.pnet_config)))
    # A base may be the weights of a seed.
    return plan, task, _network(path, plan, genome, task.build(getattr(options, "seed", 0)))


def _network(path: Path, plan: gb.Plan, genome: gb.Genome, pnet: nn.Module) -> nn.Module:
    """The p-net with the weights of a genome file; one that is not its base is refused in the user's terms."""
    try:
        return gb.materialize(plan, genome, pnet).eval()
    except ValueError as error:
        if plan.base is None:
            raise
        named = plan.base.name or f"a network of {plan.base.params:,} parameters"
        raise ValueError(f"{path} is an adapter of {named}, the base that --pretrained must name: {error}") from error


def _fitted(task: Task, plan: gb.Plan, path: Path, config: Mapping[str, Any]) -> PNet:
    """The task's p-net with the widths that a genome's file holds, which the user's `config` must not contradict."""
    pnet = task.pnet
    if pnet.fitted is None:
        return pnet
    shapes = {t.name: t.shape for t in plan.tensors}
    try:
        held = pnet.fitted(shapes)
    except ValueError as error:
        holds = f"{path} holds the genome of a p-net of {plan.pnet_params:,} parameters ({brief(shapes)})"
        raise ValueError(f"{holds}, which is no {pnet.name} for the task {task.name}: {error}") from error
    asked = find_pnet(pnet.name, task.interface, {**held.config, **config}).config
    if wrong := [name for name in asked if asked[name] != held.config[name]]:
        says, holds = (", ".join(f"{name} {values[name]}" for name in wrong) for values in (asked, held.config))
        raise ValueError(f"--pnet-config says {says}, but {path} holds {holds}")
    return held


def genome_metrics(plan: gb.Plan, path: Path, net: nn.Module, task: Task, history: History = ()) -> dict[str, object]:
    """Sizes of the whole model, metrics of what a genome file holds, and what the task says of its training."""
    genome_bytes = path.stat().st_size
    return {
        "task": task.name,
        "metric": task.metric.name,
        "pnet": task.pnet.name,
        "pnet_config": dict(task.pnet.config),
        "pnet_params": plan.pnet_params,
        "genome_params": plan.genome_params,
        "ratio_params": plan.pnet_params / plan.genome_params,
        "dense_bytes": plan.dense_bytes,
        "genome_bytes": genome_bytes,
        "ratio_bytes": plan.dense_bytes / genome_bytes,
        "base": None if plan.base is None else plan.base._asdict(),
        **measure(task, net),
        **task.facts(history),
    }


def measure(task: Task, net: nn.Module, prefix: str = "") -> dict[str, float]:
    """All metrics of a network on validation and test data: `{prefix}val_accuracy`, `{prefix}test_accuracy`, ..."""
    splits = {"val": task.val, "test": task.test}
    measured = {split: task.evaluate(net, data) for split, data in splits.items()}
    return {f"{prefix}{split}_{name}": v for split, metrics in measured.items() for name, v in metrics.items()}


def run_fit(trainer: Trainer, job: Job, seed: int, label: str, kept: Kept | None = None) -> Fit:
    """Train by a job's recipe, with progress on standard error; of many ranks, one speaks."""
    task, recipe = job.task, job.recipe
    silent = trainer.train_step is not None and trainer.train_step.mesh.rank > 0
    with reporter(label, total_steps(task, recipe), silent=silent) as report:
        return fit(trainer, task, recipe, seed, checkpoints=kept, report=report)


def train_genome(
    job: Job,
    options: TrainingOptions,
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
    label = "dense" if is_dense(options) else "genome"
    meter = meter or Meter()
    split = {} if spread is None else spread.arguments(job.pnet, job.recipe.batch_size)
    trainer = meter.metered(genome_trainer(job.plan, job.pnet, job.task, job.recipe, options.seed, **split), split)
    step = trainer.train_step
    assert step is not None
    steps = total_steps(job.task, job.recipe)
    with checkpoints(options, job.task, job.recipe, step) as kept, meter.profiling(step.mesh, steps):
        result = run_fit(trainer, job, options.seed, label, kept)
    path = folder / GENOME_FILE
    genome = step.gather(result.state)
    gb.save(path, job.plan, genome, getattr(torch, options.dtype) if options.dtype else None)
    plan, _, net = read_genome(path, options, job.task)
    planned = None if is_dense(options) else job.task.pnet.plan(plan.genome_params).hypernet.type
    net.to(options.device)
    metrics = genome_metrics(plan, path, net, job.task, result.history) | {
        "network": label,
        "hypernet": options.hypernet or planned,
        "dtype": options.dtype or str(plan.dtype).removeprefix("torch."),
        "train_loss": result.history[-1]["train_loss"],
        "seconds": result.seconds,
        "steps": result.steps,
        "seed": options.seed,
    }
    metrics |= meter.metrics(
        step, job.task, job.pnet, job.recipe.batch_size, result.steps / max(result.step_seconds, 1e-9)
    )
    return result, net, metrics
