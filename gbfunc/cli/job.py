"""From options to a plan, from a plan to a genome's file, from a file to a network and its metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

import gbfunc as gb
from gbfunc.cli.about import about, described
from gbfunc.cli.checkpoints import Kept, checkpoints
from gbfunc.cli.meter import Meter
from gbfunc.cli.options import DataOptions, GenomeOptions, RunOptions, TeacherOptions, TrainingOptions
from gbfunc.cli.output import make_folder, reporter
from gbfunc.cli.ranks import Spread, find_device
from gbfunc.cli.rounding import check_finetune, going_on, joined, slowed
from gbfunc.cli.teacher import GENOME_FILE, is_genome, teacher_file
from gbfunc.hypernets import HYPERNETS, Hypernet
from gbfunc.tasks import TASKS, Recipe, Task, find_task
from gbfunc.tasks.base import SCHEDULES, History
from gbfunc.tasks.pnets import PlanOptions, PNet, brief, find_pnet, options_for
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
        dense: whether none is: the p-net's weights themselves are trained.
    """

    task: Task
    recipe: Recipe
    pnet: nn.Module
    plan: gb.Plan
    dense: bool = False


def load_task(options: DataOptions) -> Task:
    """The task that the options name, with the p-net that they name.

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
    config = read_json("--pnet-config", options.pnet_config) | _given(options, "sizes")
    if options.pnet is None and not config:
        return task
    if options.pretrained is not None and options.pnet not in (None, task.pnet.name):
        raise ValueError(f"{options.pretrained} holds a network of type {task.pnet.name}, got --pnet {options.pnet}")
    if options.pnet in (None, task.pnet.name):
        # What the user leaves open is as the task has it.
        config = {**task.pnet.config, **config}
    return task.with_pnet(find_pnet(options.pnet or task.pnet.name, task.interface, config))


def _given(options: object, *names: str) -> dict[str, Any]:
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


def make_job(
    data: DataOptions, genome: GenomeOptions, training: TrainingOptions | None = None, *, dense: bool = False
) -> Job:
    """Load the data and plan the genome; raises as `load_task`, also for options that do not fit each other.

    Args:
        data: which data and p-net, with its seed.
        genome: how large, and of what.
        training: how it is to be trained; None as the task has it, on the CPU.
        dense: the p-net's weights themselves are asked for, in place of a genome.
    """
    seed, training = getattr(data, "seed", 0), training or TrainingOptions()
    check_seed(seed)
    device = find_device(training.device)
    task = load_task(data).to(device)
    task = task.with_pnet(task.pnet.planned(plan_changes(genome)))
    pnet = task.build(seed).to(device)
    if dense:
        if given := [name for name in vars(genome) if getattr(genome, name) != getattr(GenomeOptions, name)]:
            raise ValueError(f"--dense trains every weight itself: drop {_flags(given)}")
        plan = gb.make_plan(pnet, rules=[(".", None)])
        recipe = task.recipe(plan.genome_params)
        recipe = replace(recipe, lr=recipe.dense_lr, direct_lr=None)
    else:
        plan = _sized_plan(task, pnet, *size_of(task, genome))
        recipe = task.recipe(plan.genome_params)
    return Job(task, asked_recipe(recipe, training), pnet, plan, dense)


def resolved(job: Job, options: RunOptions) -> dict[str, Any]:
    """Those options of a training that the user may leave open, as they are in it; None where they do not apply."""
    recipe, plan = job.recipe, job.plan
    params, ratio = (None, None) if job.dense else size_of(job.task, options.genome)
    names = {schedule: name for name, schedule in SCHEDULES.items()}
    decay = recipe.optimizer_options.get("weight_decay")
    config = {name: value for name, value in recipe.optimizer_options.items() if name != "weight_decay"}
    same_dtype = {leaf.dtype for leaf in plan.leaves.values()} == {plan.dtype}
    return {
        "genome_params": params,
        "compression": ratio,
        "hypernet": hypernet_of(job),
        **{name: getattr(recipe, name) for name in ("batch_size", "lr", "direct_lr", "warmup", "clip_norm")},
        **{"epochs": None if recipe.steps else recipe.epochs, "steps": recipe.steps},
        "measure_every": recipe.measure_every,
        "schedule": names.get(recipe.schedule),
        "optimizer": recipe.optimizer.__name__,
        "optimizer_config": json.dumps(config),
        "weight_decay": decay,
        "dtype": options.output.dtype or (str(plan.dtype).removeprefix("torch.") if same_dtype else None),
    }


def hypernet_of(job: Job) -> str | None:
    """Type of the g-nets that generate most weights; None where there is none."""
    return None if job.dense else job.task.pnet.plan(job.plan.genome_params).hypernet.type


def size_of(task: Task, genome: GenomeOptions) -> tuple[int | None, float | None]:
    """Parameters of the genome or a ratio, the task's where the user gives none."""
    params, ratio = genome.genome_params, genome.compression
    if ratio is not None and not 0 < ratio < float("inf"):
        raise ValueError(f"--compression must be a positive number, got {ratio}")
    if params is None and ratio is None:
        return task.genome_params, None if task.genome_params else task.compression
    # Both given is for the plan to refuse.
    return params, ratio


def asked_recipe(recipe: Recipe, training: TrainingOptions) -> Recipe:
    """A recipe with the user's settings in place.

    Raises:
        ValueError: for settings that no training can use, or that do not fit each other; `fit` checks the batch size.
    """
    given = {name: value for name, value in vars(training).items() if value is not None}
    given = {name: value for name, value in given.items() if name in {f.name for f in fields(Recipe)}}
    if "epochs" in given and "steps" in given:
        raise ValueError(f"give at most one of --epochs and --steps, got {given['epochs']} and {given['steps']}")
    for name in given.keys() & {"epochs", "steps", "measure_every"}:
        if given[name] < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {given[name]}")
    for name in given.keys() & {"lr", "direct_lr"}:
        if not 0 < given[name] < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} must be a positive number, got {given[name]}")
    if not 0 <= given.get("warmup", 0.0) <= 1:
        raise ValueError(f"--warmup must be a part of the steps, 0 to 1, got {given['warmup']}")
    config = read_json("--optimizer-config", training.optimizer_config)
    given["optimizer_config"] = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}
    given |= {"schedule": SCHEDULES[training.schedule]} if training.schedule else {}
    given |= {"optimizer": find_optimizer(training.optimizer)} if training.optimizer else {}
    return replace(recipe, **({"steps": None, "measure_every": None} if "epochs" in given else {}) | given)


def find_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """The class of `torch.optim` with a name; `ValueError` if there is none."""
    classes = {k: c for k, c in vars(torch.optim).items() if isinstance(c, type) and k != "Optimizer"}
    if name not in classes:
        raise ValueError(f"--optimizer must be a class of torch.optim ({', '.join(sorted(classes))}), got {name!r}")
    return classes[name]


def plan_changes(genome: GenomeOptions) -> Callable[[PlanOptions], PlanOptions]:
    """What the user changes of the p-net's `PlanOptions`."""
    given = _given(genome, *_ADAPTER)
    if given.get("base") == "none":
        if len(given) > 1:
            raise ValueError(f"--base none has no adapter: drop {_flags(name for name in given if name != 'base')}")
        given = {"base": None, "target_modules": None, "modules_to_save": ()}
    names = given.get("target_modules") or ()
    if len(names) == 1 and (names[0] == ALL_LINEAR or not re.fullmatch(r"[\w.]+", names[0])):
        given["target_modules"] = names[0]
    if genome.max_tile is not None:
        given["max_tile"] = genome.max_tile[0] if len(genome.max_tile) == 1 else genome.max_tile
    rules = tuple(map(_rule, genome.rule))
    config = read_json("--hypernet-config", genome.hypernet_config)

    def change(options: PlanOptions) -> PlanOptions:
        name = genome.hypernet or options.hypernet.type
        if config or name != options.hypernet.type:
            options = options.with_hypernet(_hypernet("--hypernet-config", name, config))
        include, exclude = (*options.include, *genome.include), (*options.exclude, *genome.exclude)
        return options._replace(**given, rules=(*rules, *options.rules), include=include, exclude=exclude)

    return change


def _rule(text: str) -> tuple[str, Hypernet | None]:
    """A pattern and the type of g-net that its parameters get, None for direct ones."""
    match = re.fullmatch(r"(.+?)=(\w+)(\{.*\})?", text)
    if match is None:
        raise ValueError(f"--rule must be REGEX=TYPE or REGEX=none, such as 'head=low_rank', got {text!r}")
    pattern, name, config = match.groups()
    return pattern, None if name == "none" else _hypernet("--rule", name, read_json("--rule", config or "{}"))


def _hypernet(option: str, name: str, config: Mapping[str, Any]) -> Hypernet:
    """The type of g-net with a name and options, which an option of the command line says."""
    if name not in HYPERNETS or name == "module":
        known = ", ".join(set(HYPERNETS) - {"module"})
        raise ValueError(f"{option}: no type of g-net {name!r}: choose one of {known}, or none")
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}
    try:
        return HYPERNETS[name](**options_for(f"{option}: the g-net {name}", HYPERNETS[name], options))
    except TypeError as error:
        raise ValueError(f"{option}: the options of the g-net {name} do not fit: {error}") from error


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


def _sized_plan(task: Task, pnet: nn.Module, params: int | None, ratio: float | None) -> gb.Plan:
    """The task's plan; a ratio that cannot be reached is refused in its terms."""
    try:
        return task.plan(pnet, genome_params=params, compression=ratio)
    except ValueError as error:
        if ratio is None or params is not None or not hasattr(error, "least"):
            raise
        reason = str(error).partition("cannot be reached: ")[2] or str(error)
        raise ValueError(f"a genome {ratio:,.15g} times smaller cannot be reached: {reason}") from error


def check_seed(seed: int) -> None:
    """Raise `ValueError` for a seed that no generator takes."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2**63, got {seed}")


@contextmanager
def results_folder(out: Path | None) -> Iterator[Path]:
    """The folder for results, made if need be; one that is removed afterwards where `out` is None."""
    with nullcontext(make_folder(out)) if out is not None else TemporaryDirectory(prefix="gbfunc-") as folder:
        yield Path(folder)


def read_genome(
    path: Path, data: DataOptions, task: Task | None = None, load: Callable[[Any], Task] = load_task
) -> tuple[gb.Plan, Task, nn.Module]:
    """Rebuild the p-net that a genome file describes, with its generated weights.

    Args:
        path: the file.
        data: which.
        task: the data, where it is loaded already.
        load: how to, from the options with what the file says filled in.

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
        data = described(path, data)
        task = load(data)
        task = task.with_pnet(_fitted(task, plan, path, read_json("--pnet-config", data.pnet_config)))
    # A base may be the weights of a seed.
    return plan, task, _network(path, plan, genome, task.build(getattr(data, "seed", 0)))


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
    label, seed, output = "dense" if job.dense else "genome", options.data.seed, options.output
    dtype = output.dtype
    check_finetune(output.finetune, dtype, job.task.resumable)
    meter = meter or Meter()
    split = {} if spread is None else spread.arguments(job.pnet, job.recipe.batch_size)
    trainer = meter.metered(genome_trainer(job.plan, job.pnet, job.task, job.recipe, seed, **split), split)
    step = trainer.train_step
    assert step is not None
    steps = total_steps(job.task, job.recipe)
    with checkpoints(options, job.task, job.recipe, step) as kept, meter.profiling(step.mesh, steps):
        result = run_fit(trainer, job, seed, label, kept)
    if output.finetune is not None:
        job = job._replace(recipe=slowed(job.recipe, output.finetune))
        more = genome_trainer(job.plan, job.pnet, job.task, job.recipe, seed, rounding=dtype, **split)
        result = joined(result, run_fit(going_on(more, result.state), job, seed, "rounded"))
    path = folder / GENOME_FILE
    gb.save(path, job.plan, step.gather(result.state), dtype, about(job.task, options.data))
    plan, _, net = read_genome(path, options.data, job.task)
    net.to(options.training.device)
    metrics = genome_metrics(plan, path, net, job.task, result.history) | {
        "network": label,
        "hypernet": hypernet_of(job),
        "dtype": dtype or str(plan.dtype).removeprefix("torch."),
        "train_loss": result.history[-1]["train_loss"],
        "seconds": result.seconds,
        "steps": result.steps,
        "seed": seed,
    }
    metrics |= meter.metrics(
        step, job.task, job.pnet, job.recipe.batch_size, result.steps / max(result.step_seconds, 1e-9)
    )
    return result, net, metrics
