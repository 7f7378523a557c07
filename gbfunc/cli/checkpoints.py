"""Checkpoints of a command's training: where to go on, when to save, and a last one before it is stopped."""

from __future__ import annotations

import hashlib
import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch

import gbfunc as gb
from gbfunc.cli.job import read_json
from gbfunc.cli.networks import teacher_file
from gbfunc.cli.options import AUTO, CheckpointOptions, RunOptions, TeacherOptions
from gbfunc.cli.signals import Stopped, listening
from gbfunc.parallel import sum_ranks
from gbfunc.tasks import Recipe, Task
from gbfunc.tasks.training import Position, total_steps
from gbfunc.train import TrainStep
from gbfunc.types import JSON

FOLDER = "checkpoints"

_STEPS_BETWEEN_AGREEMENTS = 10

_COURSE = {"lr", "direct_lr", "dense_lr", "schedule", "warmup", "epochs", "steps", "clip_norm"}
_COURSE |= {"optimizer", "optimizer_config", "weight_decay", "betas", "eps"}
"""Settings that may become others on the way, where the user allows it."""
_LATER = {"schedule", "optimizer", "optimizer_config", "task_config"}
"""Settings of which older checkpoints say nothing."""


@dataclass
class Kept:
    """The checkpoints of one training, as its loop asks for them (`gbfunc.tasks.training.Checkpoints`)."""

    train_step: TrainStep  # the step that trains
    settings: JSON  # what must be the same for a training to go on
    source: Path | None  # file or folder to go on from; None begins afresh
    needed: bool  # whether there must be something to go on from
    may_change: bool  # whether learning rate, length and optimizer may be others than before
    writer: gb.Checkpointer | None  # where to save; None saves nothing
    every: int  # steps from one checkpoint to the next
    finetune: int | None = None  # steps of `--finetune`, which follow
    signals: list[int] = field(default_factory=list)  # that came and ask for an end

    def resume(self, state: gb.TrainState) -> tuple[gb.TrainState, Position | None]:
        """The state to begin with and how far it has come, which is reported on standard error."""
        if self.source is None:
            return state, None
        if self.needed and self.train_step.mesh.world == 1 and not self.source.exists():
            raise FileNotFoundError(f"--resume: no such file or folder: {self.source}")
        changes: list[str] = []
        changed = changes.append if self.may_change else None
        try:
            loaded = gb.load_checkpoint(self.source, self.train_step, state, check=self._check, changed=changed)
        except ValueError as error:
            if not _holds_genome(self.source):
                raise
            place = f"a training that kept some has them in {self.source.parent / FOLDER}"
            raise ValueError(f"--resume: {self.source} is a genome, not a checkpoint: {place}") from error
        tell = _tell if self.train_step.mesh.rank == 0 else lambda line: None
        for line in loaded.skipped:
            tell(f"skipped {line}")
        if loaded.path is None:
            if self.needed:
                raise FileNotFoundError(f"--resume: no valid checkpoint in {self.source}")
            tell(f"no checkpoint to resume in {self.source}: training begins")
            return state, None
        position, saved = loaded.extra["position"], loaded.extra["settings"]
        if (taken := position["done"] + position["more"]) > self.settings["steps"]:
            raise ValueError(f"{loaded.path} is of step {taken}, the training shall have {self.settings['steps']}")
        for line in [*self._differing(saved).values()] or changes:
            tell(f"changed: {line}")
        order = torch.frombuffer(bytearray.fromhex(position["order"]), dtype=torch.uint8)
        told = f"resumed {loaded.path}"
        if position["done"] == self.settings["steps"]:
            tuned = f"then --finetune takes its {self.finetune} steps"
            again = "only measured again" if self.finetune is None else tuned
            told += f": training is finished, {again}"
        tell(told)
        return loaded.state, Position(**position | {"order": order})

    def _check(self, extra: JSON) -> None:
        if "position" not in extra or "settings" not in extra:
            raise ValueError("it was not saved by gbfunc train")
        differing = self._differing(extra["settings"])
        if not differing.keys() <= (_COURSE if self.may_change else set()):
            allowed = "; --allow-changes goes on nevertheless" if differing.keys() <= _COURSE else ""
            raise ValueError(f"it was trained with other settings: {', '.join(differing.values())}{allowed}")

    def _differing(self, saved: JSON) -> dict[str, str]:
        """The settings that were others, in words."""
        now = {k: v for k, v in self.settings.items() if k in saved or k not in _LATER}
        names = sorted(k for k in saved.keys() | now.keys() if saved.get(k) != now.get(k))
        return {k: f"{k} {saved.get(k)}, now {now.get(k)}" for k in names}

    def due(self, steps: int) -> bool:
        """Whether to save after so many steps; the same on all ranks, which must all ask after every step."""
        if self.writer is None:
            return False
        mesh, saves = self.train_step.mesh, steps % self.every == 0
        if mesh.world > 1:
            if not saves and steps % _STEPS_BETWEEN_AGREEMENTS:
                return False
            # A signal reaches ranks at different steps, or some alone: they stop together, as one that got SIGTERM.
            signum = torch.tensor(next(iter(self.signals), 0), device=mesh.device)
            if int(sum_ranks(mesh, signum)) and not self.signals:
                self.signals.append(signal.SIGTERM)
        return saves or bool(self.signals)

    def save(self, state: gb.TrainState, steps: int, position: Position, *, wait: bool = False) -> None:
        """Save, in the background unless `wait`.

        Raises:
            Stopped: after a signal, with this checkpoint on disk.
            OSError: after a signal, if it cannot be written; otherwise that is reported on standard error.
        """
        if self.writer is None:
            return
        order = position.order.numpy().tobytes().hex()
        extra = {"settings": self.settings, "position": position._asdict() | {"order": order}}
        try:
            self.writer.save(state, extra)
        except OSError as error:
            # The one before. The disk may have room again for this one: what is trained must not be lost.
            _tell(f"warning: {error}")
        signum = next(iter(self.signals), None)
        if not wait and signum is None:
            return
        try:
            path = self.writer.wait()
        except OSError as error:
            if signum is not None:
                raise
            _tell(f"warning: {error}")
            return
        if signum is not None:
            name = signal.Signals(signum).name
            place = path or "what rank 0 saved"
            raise Stopped(signum, f"stopped by {name} after step {steps}: --resume auto goes on from {place}")


@contextmanager
def checkpoints(options: RunOptions, task: Task, recipe: Recipe, train_step: TrainStep | None) -> Iterator[Kept | None]:
    """The checkpoints that the options ask for; while they are open, SIGINT and SIGTERM save before they stop."""
    output = options.output
    if not isinstance(output, CheckpointOptions) or train_step is None:
        yield None
        return
    every, resume, out = output.checkpoint_every, output.resume, output.out
    if every is None and resume is None:
        yield None
        return
    if not task.resumable:
        raise ValueError(f"--checkpoint-every and --resume are for tasks with examples, got --task {task.name}")
    if every is not None and every < 1:
        raise ValueError(f"--checkpoint-every must be at least 1, got {every}")
    if output.keep < 1:
        raise ValueError(f"--keep must be at least 1, got {output.keep}")
    if out is None and (every is not None or resume == AUTO):
        raise ValueError("--checkpoint-every and --resume auto need --out, the folder that holds the checkpoints")
    folder = (out or Path()) / FOLDER
    source = None if resume is None else folder if resume == AUTO else Path(resume)
    if source is not None and (source / FOLDER).is_dir():
        source /= FOLDER
    if source is None and any(folder.glob("step-*")):
        raise ValueError(f"{folder} holds checkpoints: go on from them with --resume auto, or choose another --out")
    settings = _settings(options, task, recipe)
    kept = Kept(train_step, settings, source, resume != AUTO, output.allow_changes, None, every or 0, output.finetune)
    if every is None:
        yield kept
        return
    with gb.Checkpointer(folder, train_step, keep=output.keep) as kept.writer, listening(kept.signals):
        yield kept


def _settings(options: RunOptions, task: Task, recipe: Recipe) -> JSON:
    """What decides the course of a training beside the plan, as JSON."""
    plain = {f.name: v for f in fields(recipe) if isinstance(v := getattr(recipe, f.name), int | float | str | tuple)}
    plain |= {"optimizer": recipe.optimizer.__name__, "optimizer_config": dict(recipe.optimizer_config)}
    plain |= {"schedule": recipe.schedule_name}
    known = {"task": options.data.task, "seed": options.data.seed, "steps": total_steps(task, recipe)}
    known |= {"task_config": read_json("--task-config", options.data.task_config)}
    if (amp := getattr(getattr(options, "execution", None), "amp", None)) is not None:
        known |= {"amp": amp}
    teacher = getattr(options, "teacher", TeacherOptions())
    if teacher.teacher is not None:
        known |= {"teacher": hashlib.sha256(teacher_file(teacher.teacher).read_bytes()).hexdigest()[:16]}
        known |= {"teacher_weight": teacher.teacher_weight, "temperature": teacher.temperature}
    return json.loads(json.dumps(plain | known))


def _holds_genome(path: Path) -> bool:
    try:
        gb.load(path)
    except (ValueError, OSError):
        return False
    return True


def _tell(line: str) -> None:
    print(f"gbfunc: {line}", file=sys.stderr, flush=True)
