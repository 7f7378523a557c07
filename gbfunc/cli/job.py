"""Makes task, recipe, p-net and plan from the options of a command. `run_plan` is the command `gbfunc plan`."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.cli.commands import Plan
from gbfunc.cli.options import DataOptions, GenomeOptions, PNetOptions, TrainingOptions, flags, values_of
from gbfunc.cli.ranks import find_device, styles_of
from gbfunc.encoding import Encoding, encoding_from_json, table
from gbfunc.formats import AUTO, file_bytes
from gbfunc.hypernets import HYPERNETS, Hypernet
from gbfunc.lab.bench.report import describe
from gbfunc.parallel import text_of
from gbfunc.parallel.planner import DeviceSpec
from gbfunc.pnet.describe import copy_with
from gbfunc.tasks import Recipe, Task, find_task
from gbfunc.tasks.base import SCHEDULES, example_batches, logits_of, loss_fn, token_loss
from gbfunc.tasks.pnets import find_pnet
from gbfunc.tasks.pnets.base import PlanOptions, options_for, seeded
from gbfunc.types import JSON, dtype_name
from gbfunc.untrusted import read_arrays

_SIZES = ("genome_params", "genome_bytes", "compression")
SAID = {"task": "", "task_config": "{}", "pnet": None, "pnet_config": "{}", "pretrained": None, "env": None}
"""{option whose value a genome's file may contain: default value}"""


class Job(NamedTuple):
    """The task, recipe, p-net and plan that the options of a command describe."""

    task: Task  # Data and p-net, on the device for training
    recipe: Recipe  # The task's settings, changed by the user's options
    pnet: nn.Module  # The p-net with its initial weights
    plan: gb.Plan
    hypernet: str | None  # Type of the g-nets; None if the p-net's own weights are trained (--dense)


def load_task(options: DataOptions) -> Task:
    more = chosen(options, "env", "env_steps", "pretrained")
    task = find_task(options.task, options.data_dir, read_json("--task-config", options.task_config) | more)
    config, name = read_json("--pnet-config", options.pnet_config), options.pnet or task.pnet.name
    if sizes := getattr(options, "sizes", None):
        first, last = math.prod(task.interface.inputs), task.interface.outputs
        if name not in ("mlp", "actor_critic"):
            raise ValueError(f"--sizes is for the p-nets mlp and actor_critic, got {name}: give --pnet-config")
        if "hidden" in config:
            raise ValueError("expected the sizes of layers once, got --sizes and --pnet-config (hidden): drop one")
        if len(sizes) < 2 or (sizes[0], sizes[-1]) != (first, last):
            expected = f"start with {first} inputs and end with {last} outputs"
            raise ValueError(f"--sizes must {expected}, got {' '.join(map(str, sizes))}")
        config["hidden"] = list(sizes[1:-1])
    if options.pnet is None and not config:
        return task
    if options.pretrained is not None and options.pnet not in (None, task.pnet.name):
        raise ValueError(f"{options.pretrained} has a network of type {task.pnet.name}, got --pnet {options.pnet}")
    if options.pnet in (None, task.pnet.name):
        # Options that the user did not set keep the task's values.
        config = {**task.pnet.config, **config}
    return task.with_pnet(find_pnet(name, task.interface, config))


def chosen(options: object, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def read_json(option: str, text: str) -> dict[str, Any]:
    expected = f"{option} must be a JSON object such as '{{\"width\": 64}}', got {text!r}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{expected}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(expected)
    return value


def about(task: Task, options: DataOptions) -> JSON:
    """Return the metadata of a genome file: task, p-net and inputs, without options that have their default values."""
    said: JSON = {"task": options.task, "pnet": task.pnet.name}
    for name, usual in SAID.items():
        if name not in said and (value := getattr(options, name)) != usual:
            said[name] = json.loads(value) if usual == "{}" else value
    if sizes := getattr(options, "sizes", None):
        said["pnet_config"] = {**said.get("pnet_config", {}), "hidden": list(sizes[1:-1])}
    interface = list(task.interface)
    while interface[-1] == task.interface._field_defaults.get(task.interface._fields[len(interface) - 1]):
        interface.pop()
    numbers = {k: x.flatten().tolist() for k, x in task.about.items() if isinstance(x, Tensor)}
    numbers = {k: [float(f"{x:.6g}") for x in xs] for k, xs in numbers.items()}
    known = {**task.about, **{k: xs if len(xs) > 1 else xs[0] for k, xs in numbers.items()}}
    return said | {"interface": interface} | {k: x for k, x in known.items() if (k, x) != ("white", 255)}


def make_job(
    data: PNetOptions,
    genome: GenomeOptions,
    training: TrainingOptions | None = None,
    *,
    dense: bool = False,
    stored: str | None = None,
) -> Job:
    training = training or TrainingOptions()
    device = find_device(training.device)
    task = load_task(data).to(device)
    plan_of, change = task.pnet.plan, plan_changes(genome)
    task = task.with_pnet(replace(task.pnet, plan=lambda size: change(plan_of(size))))
    pnet = task.build(data.seed).to(device)
    _check_forward(task, pnet)
    plan = _sized_plan(task, pnet, genome, stored, about(task, data)) if not dense else None
    plan = plan or gb.make_plan(pnet, rules=[(".", None)])
    recipe = task.recipe(plan.genome_params)
    if dense:
        reasons = {name: why for name, why in recipe.reasons.items() if name != "lr"}
        recipe = replace(recipe, lr=recipe.dense_lr, direct_lr=None, reasons=reasons)
    hypernet = None if dense else task.pnet.plan(plan.genome_params).hypernet.type
    return Job(task, _recipe_with(recipe, training), pnet, plan, hypernet)


def _check_forward(task: Task, pnet: nn.Module) -> None:
    if task.batches is not example_batches or task.loss not in (loss_fn, token_loss):
        return
    x, (_, outputs, tokens, *_) = next(iter(task.train.chunks(2)))[0], task.interface
    buffers = dict(pnet.named_buffers())
    net = copy_with(pnet, lambda name, x: x.clone() if name in buffers else x)  # A forward may change buffers.
    words = f"the p-net {task.pnet.name} with inputs {'[B, C, H, W] = ' * (x.ndim == 4)}{list(x.shape)}"
    with torch.no_grad(), seeded(0):
        try:
            found, expected = [*logits_of(net(x)).shape], [*x.shape[: 1 + tokens], outputs]
        except Exception as error:
            words += f" raises {type(error).__name__}: {error}"
            with suppress(Exception):
                net(x.flatten(1))
                words += ": start with nn.Flatten()"
            raise ValueError(words) from error
    if found[:-1] != expected[:-1] or found[-1] < outputs:
        raise ValueError(f"{words} must give outputs {expected}, got {found}: change its last layer")


def resolved(job: Job, genome: GenomeOptions, dtype: str | None) -> dict[str, Any]:
    """Return the values of options whose defaults depend on the recipe or the plan. None: the training has no value."""
    recipe, plan = job.recipe, job.plan
    config = recipe.optimizer_options
    decay = config.pop("weight_decay", None)
    same_dtype = {leaf.dtype for leaf in plan.leaves.values()} == {plan.dtype}
    return {
        **dict.fromkeys(_SIZES),
        **({} if job.hypernet is None else _size_of(job.task, genome)),
        "hypernet": job.hypernet,
        **{name: getattr(recipe, name) for name in ("steps", "batch_size", "lr", "direct_lr", "warmup", "clip_norm")},
        "epochs": None if recipe.steps else recipe.epochs,
        "measure_every": recipe.measure_every if isinstance(recipe.measure_every, int) else None,
        "schedule": next((name for name, schedule in SCHEDULES.items() if schedule is recipe.schedule), None),
        "optimizer": recipe.optimizer.__name__,
        "optimizer_config": json.dumps(config),
        "weight_decay": decay,
        "dtype": dtype or (dtype_name(plan.dtype) if same_dtype else None),
    }


def dtype_of(options: Any) -> str | None:
    """Choose the dtype of a genome's file: --dtype if given, "auto" or "int8" for --genome-bytes, otherwise None."""
    values = values_of(options)
    if values["dtype"] is not None or values["genome_bytes"] is None:
        return values["dtype"]
    finds_steps = values.get("optimizer") in (None, "Adam", "AdamW") and values.get("local_steps") is None
    return AUTO if finds_steps and values.get("placement") in (None, "auto", "replicated") else "int8"


def _recipe_with(recipe: Recipe, training: TrainingOptions) -> Recipe:
    own = chosen(training, *(field.name for field in fields(Recipe)))
    config = read_json("--optimizer-config", training.optimizer_config)
    if twice := config.keys() & {"lr", "direct", *(["weight_decay"] if "weight_decay" in own else [])}:
        raise ValueError(f"--optimizer-config has {sorted(twice)}: use --lr, --direct-lr and --weight-decay for these")
    own["optimizer_config"] = _with_tuples(config)
    for name, find in (("schedule", SCHEDULES.__getitem__), ("optimizer", find_optimizer)):
        own |= {name: find(own[name])} if name in own else {}
    by_epochs = {"steps": None, "measure_every": None} if "epochs" in own else {}
    # Drop the recipe's reasons for the values of settings that the user's own values replace.
    known = own.keys() | ({"epochs"} if "steps" in own else set())
    reasons = {name: why for name, why in recipe.reasons.items() if name not in known}
    return replace(recipe, **(by_epochs | own), reasons=reasons)


def find_optimizer(name: str) -> type[torch.optim.Optimizer]:
    classes = {k: c for k, c in vars(torch.optim).items() if isinstance(c, type) and k != "Optimizer"}
    if name not in classes:
        raise ValueError(f"--optimizer must be a class of torch.optim ({', '.join(sorted(classes))}), got {name!r}")
    return classes[name]


def plan_changes(genome: GenomeOptions) -> Callable[[PlanOptions], PlanOptions]:
    own = chosen(genome, "base", "target_modules", "modules_to_save", "max_tile")
    if own.get("base") == "none":
        if odd := own.keys() & {"target_modules", "modules_to_save"}:
            raise ValueError(f"--base none has no adapter: drop {flags(sorted(odd, reverse=True))}")
        own |= {"base": None, "target_modules": None, "modules_to_save": ()}
    names = own.get("target_modules") or ()
    if len(names) == 1 and (names[0] == "all-linear" or not re.fullmatch(r"[\w.]+", names[0])):
        own["target_modules"] = names[0]
    if len(own.get("max_tile", ())) == 1:
        (own["max_tile"],) = own["max_tile"]
    rules, encodings = tuple(map(_rule, genome.rule)), _encodings(genome.encodings)
    config = read_json("--hypernet-config", genome.hypernet_config)

    def is_direct(name: str) -> bool:
        # Ignore invalid regular expressions here: `make_plan` raises an error for them.
        with suppress(re.error):
            ruled = [hypernet for pattern, hypernet in rules if re.search(pattern, name)]
            return ruled[:1] == [None] or any(re.search(pattern, name) for pattern in genome.exclude)
        return False

    def change(options: PlanOptions) -> PlanOptions:
        name = genome.hypernet or options.hypernet.type
        if config or name != options.hypernet.type:
            options = options.with_hypernet(_hypernet("--hypernet-config", name, config))
        # Drop the task's codes for parameters that the user made direct: only generated parameters have codes.
        codes = {k: code for k, code in options.encodings.items() if not is_direct(k)}
        return options._replace(
            **own,
            rules=(*rules, *options.rules),
            include=(*options.include, *genome.include),
            exclude=(*options.exclude, *genome.exclude),
            encodings={**codes, **encodings},
        )

    return change


def _rule(text: str) -> tuple[str, Hypernet | None]:
    match = re.fullmatch(r"(.+?)=(\w+)(\{.*\})?", text)
    if match is None:
        raise ValueError(f"--rule must be REGEX=TYPE or REGEX=none, such as 'head=low_rank', got {text!r}")
    return match[1], _hypernet("--rule", match[2], read_json("--rule", match[3] or "{}"))


def _hypernet(where: str, name: str, config: Mapping[str, Any]) -> Any:
    if name == "none":
        return None
    known = [known for known in HYPERNETS if known != "module"]
    if name not in known:
        raise ValueError(f"{where}: no type of g-net {name!r}: choose one of {', '.join(known)}, or none")
    try:
        options = options_for(f"{where}: the g-net {name}", HYPERNETS[name], _with_tuples(config))
        return HYPERNETS[name](**options)
    except TypeError as error:
        raise ValueError(f"{where}: the options of the g-net {name} do not fit: {error}") from error


def _with_tuples(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}


def _encodings(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, pair in read_json("--encodings", text).items():
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"--encodings: {name!r}: expected codes of [rows, columns], got {pair!r}")
        try:
            found[name] = tuple(None if code == "default" else _encoding(_described(code)) for code in pair)
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"--encodings: {name!r}: {error}") from error
    return found


def _described(value: Any) -> Any:
    value = {"type": value} if isinstance(value, str) else value
    if not isinstance(value, dict):
        return value
    return {key: _described(x) if key in ("channels", "positions") else x for key, x in value.items()}


def _encoding(found: Any) -> Encoding:
    if isinstance(found, dict) and found.get("type") == "table" and "file" in found:
        return table(*read_arrays(Path(found["file"])).values())
    return encoding_from_json(found)


def _size_of(task: Task, genome: GenomeOptions) -> dict[str, Any]:
    usual = "genome_params" if task.genome_params else "compression"
    return chosen(genome, *_SIZES) or {usual: getattr(task, usual)}


def _sized_plan(task: Task, pnet: nn.Module, genome: GenomeOptions, stored: str | None, metadata: JSON) -> gb.Plan:
    size = _size_of(task, genome)
    try:
        if (limit := size.get("genome_bytes")) is None:
            return task.plan(pnet, **size)
        left = limit
        while True:
            plan = replace(task.plan(pnet, genome_bytes=left, stored=stored), target=f"at most {limit:,} bytes")
            over = sum(file_bytes(plan, stored, metadata=metadata).values()) - limit
            if over <= 0:
                return plan
            left -= over
    except ValueError as error:
        if chosen(genome, *_SIZES) or not (hasattr(error, "least") or str(error).startswith("genome_params=")):
            raise
        raise ValueError(f"{error}; this size is the task's default: {flags(_SIZES)} set others") from error


def provenance(task: Task, plan: gb.Plan, device: torch.device) -> dict[str, Any]:
    return {
        "command": shlex.join(sys.argv),
        "versions": {"gbfunc": gb.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": describe(device, torch.get_num_threads())["machine"],
        "data_digest": data_digest(task),
        "plan_digest": plan.digest(),
    }


def data_digest(task: Task) -> str:
    splits = [vars(split) for split in (task.train, task.val, task.test)]
    known = [{k: x for k, x in split.items() if isinstance(x, Tensor | int | float | str)} for split in splits]
    return hashlib.sha256(text_of(known).encode()).hexdigest()


def run_plan(options: Plan) -> None:
    device = DeviceSpec()
    if options.device is not None:
        if not options.device.is_file():
            raise FileNotFoundError(f"no such device file: {options.device} (gbfunc bench --calibrate prints one)")
        device = DeviceSpec.from_json(options.device.read_text(encoding="utf-8"))
    for name, text in chosen(options, "memory", "link").items():
        device = replace(device, **{name: parse_bytes(f"--{name}", text, rate=name == "link")})
    stored = dtype_of(options)
    job = make_job(options.data, options.genome, stored=stored)
    task, recipe, pnet = job.task, job.recipe, job.pnet
    reports = [job.plan.report(stored, metadata=about(task, options.data))]
    if options.ranks is not None:
        if task.batches is not example_batches:
            raise ValueError(f"--ranks needs a task with examples, got {task.name}, whose batches need an environment")
        one = next(task.batches(task.train, replace(recipe, batch_size=1), torch.Generator(), lambda: pnet))
        rows = options.batch_size or recipe.batch_size
        batch = tuple(torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device="meta") for x in one)
        styles = None if options.parallel is None else styles_of(options.parallel, pnet)
        how: Any = {"loss_fn": task.loss, "parallel": styles, "microbatches": options.microbatches}
        layouts = gb.plan_parallel(job.plan, pnet, batch, ranks=options.ranks, device=device, **how)
        reports.append(layouts.report())
    print("\n\n".join(reports))


def parse_bytes(option: str, text: str, *, rate: bool = False) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([KMGT]i|[kMGT]|)(B|bit)(?:/s)?\s*", text)
    if match is None or (match[3] == "bit" and not rate) or not float(match[1]):
        expected = "a rate such as 100Gbit or 12.5GB" if rate else "a size such as 16GB or 512MiB"
        raise ValueError(f"{option} must be {expected}, got {text!r}")
    unit = (1024 if match[2].endswith("i") else 1000) ** " KMGT".index(match[2][:1].upper() or " ")
    return float(match[1]) * unit / (8 if match[3] == "bit" else 1)
