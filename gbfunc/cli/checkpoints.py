"""Saves checkpoints during a training and when a signal stops the training; resumes a training from a checkpoint."""

import hashlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch

import gbfunc as gb
from gbfunc.cli import Stopped, handling
from gbfunc.cli.genomes import teacher_file
from gbfunc.cli.options import AUTO, CheckpointOptions, RunOptions, TeacherOptions, values_of
from gbfunc.cli.output import tell
from gbfunc.parallel import sum_ranks
from gbfunc.tasks.training import Position
from gbfunc.train.step import TrainStep
from gbfunc.types import JSON

FOLDER = "checkpoints"


@dataclass
class Checkpoints:
    """The checkpoints of one training. `gbfunc.tasks.training.fit` calls `resume`, `due` and `save`."""

    train_step: TrainStep
    steps: int  # Total number of training steps
    settings: JSON  # Settings that must not change when a training is resumed
    source: Path | None  # File or folder to resume from; None starts a new training
    output: CheckpointOptions
    unit: int  # A training can resume after multiples of this number of steps: 1, or an epoch
    writer: gb.Checkpointer | None = None  # Writes checkpoints; None saves nothing
    signals: list[int] = field(default_factory=list)  # Signals received so far

    def resume(self, state: gb.TrainState) -> tuple[gb.TrainState, Position | None]:
        source, mesh, needed = self.source, self.train_step.mesh, self.output.resume != AUTO
        if source is None:
            return state, None
        changes: list[str] = []
        changed = changes.append if self.output.allow_changes else None
        try:
            loaded = gb.load_checkpoint(source, self.train_step, state, check=self._check, changed=changed)
        except ValueError as error:
            words = str(error).replace("changed= allows that", "--allow-changes goes on nevertheless")
            raise ValueError(f"--resume: {words}") from error
        lines = [f"skipped {line}" for line in loaded.skipped] + [f"changed: {line}" for line in changes]
        position = None
        if loaded.path is None:
            if needed:
                raise FileNotFoundError(f"--resume: no valid checkpoint in {source}: start without --resume")
            lines.append(f"no checkpoint to resume in {source}: training begins")
        else:
            saved, finetune = loaded.extra["position"], self.output.finetune
            order = torch.frombuffer(bytearray.fromhex(saved["order"]), dtype=torch.uint8)
            position = Position(**saved | {"order": order})
            if position.steps > self.steps:
                raise ValueError(f"{loaded.path} must have at most {self.steps} steps, got {position.steps} (--steps)")
            after = "only measured again" if finetune is None else f"then --finetune takes its {finetune} steps"
            end = f": training is finished, {after}" if position.measured == self.steps else ""
            lines.append(f"resumed {loaded.path}{end}")
        for line in lines if mesh.rank == 0 else ():
            tell(line)
        return loaded.state, position

    def _check(self, extra: JSON) -> None:
        if "position" not in extra or "settings" not in extra:
            raise ValueError("expected a checkpoint of gbfunc train, got one of another program")
        saved, now = extra["settings"], self.settings
        if names := sorted(k for k in saved.keys() | now.keys() if saved.get(k) != now.get(k)):
            differing = ", ".join(f"{k} {saved.get(k)}, now {now.get(k)}" for k in names)
            raise ValueError(f"it was trained with other settings: {differing}; give the same settings")

    def receive(self, signum: int, frame: FrameType | None) -> None:
        # Ctrl-C under torchrun causes SIGINT and then SIGTERM. Therefore only a second SIGINT stops without saving.
        if signum == signal.SIGINT and signum in self.signals:
            raise KeyboardInterrupt
        self.signals.append(signum)

    def due(self, steps: int) -> bool:
        """Return, equally on all ranks, whether to save a checkpoint. All ranks must call `due` after every step."""
        if self.writer is None or steps % self.unit:
            return False
        assert self.output.checkpoint_every is not None
        mesh, saves = self.train_step.mesh, steps % self.output.checkpoint_every == 0
        if mesh.world > 1:
            if not saves and steps % 10:
                return False
            # All ranks must stop together, but a signal may reach some ranks later or never. If any rank has received
            # a signal, the other ranks stop as if they had received SIGTERM.
            signum = torch.tensor(next(iter(self.signals), 0), device=mesh.device)
            if int(sum_ranks(mesh, signum)) and not self.signals:
                self.signals.append(signal.SIGTERM)
        return saves or bool(self.signals)

    def save(self, state: gb.TrainState, steps: int, position: Position, *, wait: bool = False) -> None:
        if self.writer is None:
            return
        saved = position._asdict() | {"order": position.order.numpy().tobytes().hex()}
        try:
            self.writer.save(state, {"settings": self.settings, "position": saved})
        except OSError as error:
            # The previous checkpoint, written in the background, failed. The present checkpoint may succeed, so go on.
            tell(f"warning: {error}")
        signum, path = next(iter(self.signals), None), None
        try:
            path = self.writer.wait() if wait or signum is not None else None
        except OSError as error:
            if signum is not None:
                raise
            tell(f"warning: {error}")
        if signum is not None:
            words = f"stopped by {signal.Signals(signum).name} after step {steps}"
            raise Stopped(signum, f"{words}: --resume auto goes on from {path or 'what rank 0 saved'}")


@contextmanager
def checkpoints(
    options: RunOptions, settings: JSON, steps: int, unit: int, train_step: TrainStep
) -> Iterator[Checkpoints | None]:
    """Yield a training's checkpoints, if any. With --checkpoint-every, a signal saves one and stops the training."""
    output = options.output
    if not isinstance(output, CheckpointOptions) or (output.checkpoint_every, output.resume) == (None, None):
        yield None
        return
    if (output.checkpoint_every or 0) % unit:
        expected = f"a multiple of {unit}, the steps of an epoch, since this task resumes only between epochs"
        raise ValueError(f"--checkpoint-every must be {expected}; got {output.checkpoint_every}")
    if output.out is None and output.resume == AUTO:
        raise ValueError("--resume auto needs --out, the folder with the checkpoints")
    folder = (output.out or Path()) / FOLDER
    source = None if output.resume is None else folder if output.resume == AUTO else Path(output.resume)
    if source is not None and (source / FOLDER).is_dir():
        source /= FOLDER
    if source is None and any(folder.glob("step-*")):
        raise ValueError(f"{folder} has checkpoints: resume with --resume auto, or choose another --out")
    # These settings must equal the checkpoint's. `load_checkpoint` also compares plan, schedule and optimizer.
    same = {x: settings.get(x) for x in ("task", "task_config", "env", "seed", "batch_size", "measure_every", "amp")}
    teacher = getattr(options, "teacher", TeacherOptions())
    if teacher.teacher is not None:
        digest = hashlib.sha256(teacher_file(teacher.teacher).read_bytes()).hexdigest()
        same |= values_of(teacher) | {"teacher": digest[:16]}
    opened = Checkpoints(train_step, steps, same, source, output, unit)
    if output.checkpoint_every is None:
        yield opened
        return
    listening = handling(opened.receive, signal.SIGINT, signal.SIGTERM)
    with gb.Checkpointer(folder, train_step, keep=output.keep) as opened.writer, listening:
        yield opened
