"""From a genome's file to a network and its metrics: `gbfunc eval` and `gbfunc sample`, and teachers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

import gbfunc as gb
from gbfunc.cli.commands import Eval, Sample
from gbfunc.cli.job import SAID, Job, load_task, read_json
from gbfunc.cli.options import DataOptions, TeacherOptions
from gbfunc.cli.output import print_metrics
from gbfunc.storage.genome_file import is_genome, load_dtype
from gbfunc.tasks import Task, continue_text
from gbfunc.tasks.base import History, taught
from gbfunc.tasks.pnets import Interface, PNet, find_pnet
from gbfunc.tasks.pnets.base import brief, is_import_path
from gbfunc.tasks.pnets.hugging_face import PREFIX
from gbfunc.tasks.text import pretrained_tokens
from gbfunc.types import JSON

GENOME_FILE, BEST_FILE, WEIGHTS_FILE = "genome.safetensors", "best.safetensors", "model.safetensors"

Options = TypeVar("Options", bound=DataOptions)


def run_eval(options: Eval) -> None:
    """Report the bytes of the file; measure and print."""
    plan, task, net = read_genome(options.genome, options)
    metrics = genome_metrics(plan, options.genome, net, task)
    print(byte_report(options.genome), end="\n\n")
    print_metrics(metrics, task)


def byte_report(path: Path) -> str:
    """Report a plan with the bytes of its genome's file."""
    plan, genome = gb.load(path)
    return plan.report(load_dtype(path), genome, gb.load_metadata(path))


def run_sample(options: Sample) -> None:
    """Print the prompt and what follows it."""
    _, task, net = read_genome(options.genome, options)
    numbers = {"temperature": options.temperature, "seed": options.seed}
    print(options.prompt + continue_text(net, task, options.prompt, options.tokens, **numbers))


def read_genome(
    path: Path, data: DataOptions, task: Task | None = None, *, alone: bool = False
) -> tuple[gb.Plan, Task, nn.Module]:
    """Read a genome file: its plan, its task, and the p-net on the CPU with the weights that the genome generates.

    Args:
        path: the file.
        data: options of the task and the p-net; the file fills in what the user leaves open.
        task: a task that is loaded already, instead of the options.
        alone: make the task without its data, where the user names no folder and the file describes the inputs.
    """
    said = said_by(path)
    plan, genome = gb.load(path)
    if task is None:
        data = described(path, data)
        bare = alone and data.data_dir is None and "interface" in said
        task = _task_of(data, said) if bare else load_task(data)
        task = task.with_pnet(_fitted(task, plan, path, read_json("--pnet-config", data.pnet_config)))
        for key in ("classes", "alphabet"):
            held, here = said.get(key), task.about.get(key)
            if held is not None and here is not None and held != here:
                names = (
                    f"{key} {held}, the data {here}" if key == "classes" else "another alphabet than the data's text"
                )
                raise ValueError(f"{path} holds {names}: --data-dir must name data with the same ones")
    # A base may be the weights of a seed.
    return plan, task, _network(path, plan, genome, task.build(getattr(data, "seed", 0)))


def said_by(path: Path) -> Mapping[str, Any]:
    """Read what a genome's file says of its task and inputs; nothing where that is no object."""
    if not path.is_file():
        raise FileNotFoundError(f"no such genome file: {path}")
    said = gb.load_metadata(path)
    return said if isinstance(said, Mapping) else {}


def described(path: Path, options: Options) -> Options:
    """Fill in the options with what a genome's file says, where the user says nothing."""
    said = said_by(path)
    # The file says nothing of another task than its own.
    said = said if options.task in ("", said.get("task")) else {}
    held = {field.name for field in fields(options)}
    taken: JSON = {}
    for name, usual in SAID.items():
        if name in held and name in said and getattr(options, name) == usual:
            taken[name] = _option(path, name, said[name], usual)
    return replace(options, **{"task": options.task or "digits"} | taken)


def _option(path: Path, name: str, value: Any, usual: str | None) -> str:
    if isinstance(value, dict) and usual == "{}":
        return json.dumps(value)
    if not isinstance(value, str) or usual == "{}":
        raise ValueError(f"{path} says {name} {value!r}, expected {'an object' if usual == '{}' else 'text'}")
    # A file runs no code: an environment's name may import a module, too.
    code = value.removeprefix(PREFIX) if name == "pnet" else value
    if is_import_path(code) or (name == "env" and ":" in code):
        raise ValueError(f"{path} was trained with --{name} {value}, which is code: pass that option if you trust it")
    return value


def _task_of(options: DataOptions, said: Mapping[str, Any]) -> Task:
    """Make the task that a genome's file describes, without its data."""
    try:
        inputs, *rest = said["interface"]
        interface = Interface(tuple(inputs), *rest)
        if not all(type(n) is int and n >= 1 for n in (*interface.inputs, interface.outputs)):
            raise TypeError(f"expected positive numbers, got {said['interface']!r}")
    except (TypeError, ValueError) as error:
        raise ValueError(f"the genome's file does not say what its inputs are ({error!r}): pass --data-dir") from error
    if options.task != (held := said.get("task", options.task)):
        raise ValueError(f"the genome's file is of the task {held}, got --task {options.task}: pass --data-dir too")
    config: JSON = read_json("--pnet-config", options.pnet_config)
    encode = None
    if interface.vocabulary:
        if options.pretrained is None:
            raise ValueError("the genome's tokens were learned from its texts: pass --data-dir, the folder with them")
        config["pretrained"] = options.pretrained
        encode = pretrained_tokens(options.pretrained, interface.inputs[0]).encode
    pnet = find_pnet(options.pnet or "mlp", interface, config)
    return Task(options.task, interface, None, None, None, pnet, encode=encode)


def _network(path: Path, plan: gb.Plan, genome: gb.Genome, pnet: nn.Module) -> nn.Module:
    try:
        return gb.materialize(plan, genome, pnet).eval()
    except ValueError as error:
        if plan.base is None:
            raise
        named = plan.base.name or f"a network of {plan.base.params:,} parameters"
        raise ValueError(f"{path} is an adapter of {named}, the base that --pretrained must name: {error}") from error


def _fitted(task: Task, plan: gb.Plan, path: Path, config: Mapping[str, Any]) -> PNet:
    """Give the task's p-net the widths that a genome's file holds, which the user's `config` must not contradict."""
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
    """Find sizes of the whole model, metrics of what a genome file holds, and what the task says of its training."""
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
    """Measure a network on validation and test data: `{prefix}val_accuracy`, `{prefix}test_accuracy`, ..."""
    measured = {split: task.measured(net, getattr(task, split)) for split in ("val", "test")}
    return {f"{prefix}{split}_{name}": v for split, metrics in measured.items() for name, v in metrics.items()}


def with_teacher(job: Job, options: TeacherOptions, device: str) -> Job:
    """Let the job's loss follow the teacher that the options name, if they name one."""
    if options.teacher is None:
        return job
    teacher = read_teacher(options.teacher, job.task).to(device)
    return job._replace(task=taught(job.task, teacher, options.teacher_weight, options.temperature))


def teacher_file(path: Path) -> Path:
    """Find the file that `--teacher` names, itself or by the folder it is in."""
    for file in [path / GENOME_FILE, path / WEIGHTS_FILE] if path.is_dir() else [path]:
        if file.is_file():
            return file
    if path.is_dir():
        raise FileNotFoundError(f"--teacher: {path} holds neither {GENOME_FILE} nor {WEIGHTS_FILE}")
    raise FileNotFoundError(f"--teacher: no such file or folder: {path}")


def read_teacher(path: Path, task: Task) -> nn.Module:
    """Read the network of a genome file, of a file with the weights of the task's p-net, or of a folder with one."""
    path = teacher_file(path)
    try:
        if is_genome(path):
            plan, genome = gb.load(path)
            return _network(path, plan, genome, _fitted(task, plan, path, {}).build(0))
    except SafetensorError as error:
        raise ValueError(f"--teacher: {path} is no safetensors file: {error}") from error
    net = task.build(0)
    try:
        load_model(net, path)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"--teacher: {path} does not hold the weights of {task.pnet.name}: {error}") from error
    return net.eval()
