"""From options to what a command works on: data, p-net, plan and recipe."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import nn

import gbfunc as gb
from gbfunc.cli.about import about
from gbfunc.cli.options import DataOptions, DtypeName, GenomeOptions, PNetOptions, RunOptions, TrainingOptions
from gbfunc.cli.plan_config import read_plan_config
from gbfunc.cli.ranks import find_device
from gbfunc.formats import AUTO, file_bytes
from gbfunc.hypernets import HYPERNETS, Hypernet
from gbfunc.tasks import TASKS, Recipe, Task, find_task
from gbfunc.tasks.base import SCHEDULES
from gbfunc.tasks.pnets import PlanOptions, find_pnet, options_for
from gbfunc.types import JSON

ALL_LINEAR = "all-linear"
_ADAPTER = ("base", "target_modules", "modules_to_save")
_SIZES = ("genome_params", "genome_bytes", "compression")


class Job(NamedTuple):
    """What a command works on."""

    task: Task  # data and p-net, on the device to train on
    recipe: Recipe  # settings, with the user's in place
    pnet: nn.Module  # the p-net with its initial weights
    plan: gb.Plan  # which of its tensors are generated, and how
    dense: bool = False  # whether none is: the p-net's weights themselves are trained


def load_task(options: DataOptions) -> Task:
    """The task that the options name, with the p-net that they name."""
    given = _given(options, "env", "env_steps")
    if options.task != "control" and given:
        raise ValueError(f"{_flags(given)} is for the control task, got --task {options.task}")
    given |= _given(options, "pretrained")
    if options.task in set(TASKS) - {"trec", "texts"} and "pretrained" in given:
        raise ValueError(f"--pretrained is for the tasks trec and texts, got --task {options.task}")
    task = find_task(options.task, options.data_dir, read_json("--task-config", options.task_config) | given)
    config, sizes = read_json("--pnet-config", options.pnet_config), _given(options, "sizes")
    if sizes and (twice := config.keys() & {"sizes", "hidden"}):
        raise ValueError(f"--sizes and --pnet-config ({sorted(twice)[0]}) both say the sizes of the layers: give one")
    config |= sizes
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
    """Options as the user types them: `--a, --b and --c`."""
    flags = [f"--{name.replace('_', '-')}" for name in names]
    return " and ".join([*([", ".join(flags[:-1])] if flags[1:] else []), *flags[-1:]])


def read_json(option: str, text: str) -> dict[str, Any]:
    """The object that an option holds."""
    expected = f"{option} must be a JSON object such as '{{\"width\": 64}}', got {text!r}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{expected}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(expected)
    return value


def make_job(
    data: DataOptions,
    genome: GenomeOptions,
    training: TrainingOptions | None = None,
    *,
    dense: bool = False,
    stored: str | None = None,
) -> Job:
    """Load the data and plan the genome; without `training` as the task has it, on the CPU, in a file as `stored`."""
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
        reasons = {name: why for name, why in recipe.reasons.items() if name != "lr"}
        recipe = replace(recipe, lr=recipe.dense_lr, direct_lr=None, reasons=reasons)
    else:
        plan = _sized_plan(task, pnet, genome, stored, about(task, data))
        recipe = task.recipe(plan.genome_params)
    return Job(task, asked_recipe(recipe, training), pnet, plan, dense)


def resolved(job: Job, options: RunOptions) -> dict[str, Any]:
    """Those options of a training that the user may leave open, as they are in it; None where they do not apply."""
    recipe, plan = job.recipe, job.plan
    size = {"genome_params": None, "genome_bytes": None, "compression": None}
    size |= {} if job.dense else size_of(job.task, options.genome)
    decay = recipe.optimizer_options.get("weight_decay")
    config = {name: value for name, value in recipe.optimizer_options.items() if name != "weight_decay"}
    same_dtype = {leaf.dtype for leaf in plan.leaves.values()} == {plan.dtype}
    return {
        **size,
        "hypernet": hypernet_of(job),
        **{name: getattr(recipe, name) for name in ("batch_size", "lr", "direct_lr", "warmup", "clip_norm")},
        **{"epochs": None if recipe.steps else recipe.epochs, "steps": recipe.steps},
        "measure_every": recipe.measure_every if isinstance(recipe.measure_every, int) else None,
        "schedule": recipe.schedule_name,
        "optimizer": recipe.optimizer.__name__,
        "optimizer_config": json.dumps(config),
        "weight_decay": decay,
        "dtype": options.output.dtype or (str(plan.dtype).removeprefix("torch.") if same_dtype else None),
    }


def dtype_of(data: PNetOptions, genome: GenomeOptions, dtype: DtypeName | None) -> DtypeName | None:
    """How the genome is stored: as the user says, or else as codes for an adapter's file of so many bytes."""
    return AUTO if dtype is None and data.pretrained is not None and genome.genome_bytes is not None else dtype


def hypernet_of(job: Job) -> str | None:
    """Type of the g-nets that generate most weights; None where there is none."""
    return None if job.dense else job.task.pnet.plan(job.plan.genome_params).hypernet.type


def size_of(task: Task, genome: GenomeOptions) -> dict[str, Any]:
    """The size that the user gives, as `make_plan` takes it, or else the task's."""
    ratio = genome.compression
    if ratio is not None and not 0 < ratio < float("inf"):
        raise ValueError(f"--compression must be a positive number, got {ratio}")
    given = _given(genome, *_SIZES)
    if len(given) > 1:
        got = " and ".join(f"{value:,.15g}" for value in given.values())
        raise ValueError(f"give at most one of {_flags(_SIZES)}, got {got}")
    return given or ({"genome_params": task.genome_params} if task.genome_params else {"compression": task.compression})


def asked_recipe(recipe: Recipe, training: TrainingOptions) -> Recipe:
    """A recipe with the user's settings in place."""
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
    if own := config.keys() & {"lr", "direct", *(["weight_decay"] if "weight_decay" in given else [])}:
        raise ValueError(f"--optimizer-config has {sorted(own)}: --lr, --direct-lr and --weight-decay say these")
    given["optimizer_config"] = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}
    given |= {"schedule": SCHEDULES[training.schedule]} if training.schedule else {}
    given |= {"optimizer": find_optimizer(training.optimizer)} if training.optimizer else {}
    whole = {"steps": None, "measure_every": None} if "epochs" in given else {}
    # Of what the user says there is nothing to explain.
    known = given.keys() | ({"epochs"} if "steps" in given else set())
    reasons = {name: why for name, why in recipe.reasons.items() if name not in known}
    return replace(recipe, **(whole | given), reasons=reasons)


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
    more = PlanOptions() if genome.plan_config is None else read_plan_config(genome.plan_config, _hypernet)
    rules = (*map(_rule, genome.rule), *more.rules)
    config = read_json("--hypernet-config", genome.hypernet_config)

    def change(options: PlanOptions) -> PlanOptions:
        name = genome.hypernet or options.hypernet.type
        if config or name != options.hypernet.type:
            options = options.with_hypernet(_hypernet("--hypernet-config", name, config))
        excluded = (*more.exclude, *genome.exclude)
        include, exclude = (*options.include, *more.include, *genome.include), (*options.exclude, *excluded)
        # Codes of the p-net's own are for what is generated.
        codes = {k: x for k, x in options.encodings.items() if not _is_direct(k, excluded, rules)}
        codes |= more.encodings
        rest = {"rules": (*rules, *options.rules), "include": include, "exclude": exclude, "encodings": codes}
        return options._replace(**given, **rest)

    return change


def _is_direct(name: str, exclude: Sequence[str], rules: Sequence[tuple[str, Hypernet | None]]) -> bool:
    """Whether the user's options keep a parameter direct."""
    try:
        ruled = [hypernet for pattern, hypernet in rules if re.search(pattern, name)]
        return ruled[:1] == [None] or any(re.search(pattern, name) for pattern in exclude)
    except re.error:
        # The plan says what is wrong with it.
        return False


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


def _sized_plan(task: Task, pnet: nn.Module, genome: GenomeOptions, stored: str | None, metadata: JSON) -> gb.Plan:
    """The task's plan; bytes are of the whole file, and a size that cannot be is refused in the user's terms."""
    size = size_of(task, genome)
    try:
        if (limit := size.get("genome_bytes")) is None:
            return task.plan(pnet, **size)
        left = limit
        while True:
            plan = task.plan(pnet, genome_bytes=left, stored=stored)
            plan = replace(plan, target=f"at most {limit:,} bytes")
            # What the file says of task and inputs counts, too.
            over = sum(file_bytes(plan, stored, metadata=metadata).values()) - limit
            if over <= 0:
                return plan
            left -= over
    except ValueError as error:
        words, ratio = str(error), size.get("compression")
        if ratio is not None and hasattr(error, "least"):
            reason = words.partition("cannot be reached: ")[2] or words
            words = f"a genome {ratio:,.15g} times smaller cannot be reached: {reason}"
        if not _given(genome, *_SIZES) and (hasattr(error, "least") or words.startswith("genome_params=")):
            words += f"; this size is the task's default: {_flags(_SIZES)} ask for others"
        if words == str(error):
            raise
        raise ValueError(words) from error


def check_seed(seed: int) -> None:
    """Raise `ValueError` for a seed that no generator takes."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed must be at least 0 and below 2**63, got {seed}")
