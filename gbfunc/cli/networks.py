"""From a genome's file to a network and its metrics, and the teachers that are such networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

import gbfunc as gb
from gbfunc.cli.about import described, said_by
from gbfunc.cli.job import Job, load_task, read_json
from gbfunc.cli.options import DataOptions, TeacherOptions
from gbfunc.storage.genome_file import is_genome
from gbfunc.tasks import Task
from gbfunc.tasks.base import History
from gbfunc.tasks.pnets import PNet, brief, find_pnet
from gbfunc.tasks.teaching import taught

GENOME_FILE, BEST_FILE, WEIGHTS_FILE = "genome.safetensors", "best.safetensors", "model.safetensors"


def read_genome(
    path: Path, data: DataOptions, task: Task | None = None, load: Callable[[Any], Task] = load_task
) -> tuple[gb.Plan, Task, nn.Module]:
    """The plan of a genome file, its task, and the p-net on the CPU with the weights that it generates.

    A `task` that is loaded already is taken as it is, else `load` gets the options with what the file says filled in.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such genome file: {path}")
    plan, genome = gb.load(path)
    if task is None:
        data = described(path, data)
        task = load(data)
        task = task.with_pnet(_fitted(task, plan, path, read_json("--pnet-config", data.pnet_config)))
        _check_words(path, task)
    # A base may be the weights of a seed.
    return plan, task, _network(path, plan, genome, task.build(getattr(data, "seed", 0)))


def _check_words(path: Path, task: Task) -> None:
    """Raise `ValueError` where numbers of classes or characters mean others in the data than in a genome's file."""
    said = said_by(path)
    for key in ("classes", "alphabet"):
        held, here = said.get(key), task.about.get(key)
        if held is not None and here is not None and held != here:
            names = f"{key} {held}, the data {here}" if key == "classes" else f"another text's {key} than the data's"
            raise ValueError(f"{path} holds {names}: --data-dir must name data with the same ones")


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
    measured = {split: task.measured(net, data) for split, data in splits.items()}
    return {f"{prefix}{split}_{name}": v for split, metrics in measured.items() for name, v in metrics.items()}


def with_teacher(job: Job, options: TeacherOptions, device: str) -> Job:
    """The job with a loss that follows the teacher that the options name, if they name one."""
    if options.teacher is None:
        if (options.teacher_weight, options.temperature) != (TeacherOptions.teacher_weight, TeacherOptions.temperature):
            raise ValueError("--teacher-weight and --temperature are for a teacher: say --teacher too")
        return job
    teacher = read_teacher(options.teacher, job.task).to(device)
    return job._replace(task=taught(job.task, teacher, options.teacher_weight, options.temperature))


def teacher_file(path: Path) -> Path:
    """The file that `--teacher` names, itself or as the folder it is in."""
    files = [path / name for name in (GENOME_FILE, WEIGHTS_FILE)] if path.is_dir() else [path]
    for file in files:
        if file.is_file():
            return file
    if path.is_dir():
        raise FileNotFoundError(f"--teacher: {path} holds neither {GENOME_FILE} nor {WEIGHTS_FILE}")
    raise FileNotFoundError(f"--teacher: no such file or folder: {path}")


def read_teacher(path: Path, task: Task) -> nn.Module:
    """The trained network of a genome file, of a file with the weights of the task's p-net, or of a folder with one."""
    path = teacher_file(path)
    try:
        generated = is_genome(path)
    except SafetensorError as error:
        raise ValueError(f"--teacher: {path} is no safetensors file: {error}") from error
    if generated:
        plan, genome = gb.load(path)
        return _network(path, plan, genome, _fitted(task, plan, path, {}).build(0))
    net = task.build(0)
    try:
        load_model(net, path)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"--teacher: {path} does not hold the weights of {task.pnet.name}: {error}") from error
    return net.eval()
