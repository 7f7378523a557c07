"""Tasks: data sets, and p-nets to train on them. A new task is one file and one entry in `TASKS`.

The functions that make tasks and p-nets raise `ValueError` for damaged files, and for options that are out of range or
contradict each other. They raise `FileNotFoundError` for missing files, and `ImportError` for missing packages.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gbfunc.tasks.base import Metric, Net, Recipe, Task, accuracy, logits_of, loss_fn, token_loss
from gbfunc.tasks.chat import chat
from gbfunc.tasks.control import control
from gbfunc.tasks.data import Split, endless_batches
from gbfunc.tasks.images import cifar10, digits, fashion_mnist, mnist
from gbfunc.tasks.pictures import images
from gbfunc.tasks.pnets.base import import_factory, is_import_path, options_for
from gbfunc.tasks.text import continue_text, text, texts, trec

__all__ = ["TASKS", "Metric", "Net", "Recipe", "Split", "Task", "accuracy"]
__all__ += ["continue_text", "endless_batches", "find_task", "logits_of", "loss_fn", "token_loss"]

TASKS: Mapping[str, Callable[..., Task]] = MappingProxyType(
    {
        "digits": digits,
        "mnist": mnist,
        "fashion-mnist": fashion_mnist,
        "cifar10": cifar10,
        "images": images,
        "text": text,
        "chat": chat,
        "trec": trec,
        "texts": texts,
        "control": control,
    }
)
"""{name: function `(**options) -> Task` that makes the task}. Tasks that read files have an option `data_dir`."""


def find_task(name: str, data_dir: Path | str | None, config: Mapping[str, Any]) -> Task:
    """Make the task `name`, a key of `TASKS` or a user's `package.module:function`, with the options `config`.

    `data_dir` is the file or folder with the task's data. Raises `ValueError` if the name or an option is unknown, if
    the data are damaged, or if `data_dir` is given for a task that reads no files.
    """
    factory = import_factory(name, "a Task") if is_import_path(name) else TASKS.get(name)
    if factory is None:
        raise ValueError(f"no task {name!r}: choose one of {', '.join(TASKS)}, or package.module:function")
    if data_dir is not None and "data_dir" not in signature(factory).parameters:
        raise ValueError(f"the task {name} reads no files (it has no parameter data_dir), got {data_dir}: leave it out")
    folder = None if data_dir is None else Path(data_dir)
    task = factory(**options_for(f"the task {name}", factory, config, data_dir=folder))
    if not isinstance(task, Task):
        raise ValueError(f"{name} must return a gbfunc.tasks.Task, got {type(task).__name__}")
    if bad := [type(x).__name__ for x in (task.train, task.val, task.test) if not hasattr(x, "to")]:
        raise ValueError(f"train, val and test of {name} must be splits, such as gbfunc.tasks.Split, got {bad[0]}")
    return task
