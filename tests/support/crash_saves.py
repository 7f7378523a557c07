"""Kill -9 at random moments of saving: a process that saves without end, is killed, and what it leaves is read.

As a script: `crash_saves.py FOLDER ROUNDS SEED` prints a JSON object. Children are forked from one warm parent, so that
a round takes the time of a few saves.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import gbfunc as gb
from gbfunc.train.step import TrainStep
from tests.support.zoo import step_of

KEEP = 2
STRIDE = 1_000
"""Steps are counted on from round to round by so many."""


def state_at(step: TrainStep, steps: int) -> gb.TrainState:
    """A state that any process can tell from its number alone."""
    state = step.init(seed=0)
    gnets = {e: {k: torch.full_like(v, steps) for k, v in leaves.items()} for e, leaves in state.gnets.items()}
    return state._replace(gnets=gnets, step=torch.tensor(steps))


def save_without_end(step: TrainStep, folder: Path, first: int, told: int) -> None:
    with gb.Checkpointer(folder, step, keep=KEEP) as checkpointer:
        # Every third without waiting: then the next save waits for it.
        for steps in range(first, first + STRIDE):
            checkpointer.save(state_at(step, steps), {"steps": steps, "filling": "x" * 20_000})
            if steps % 3:
                checkpointer.wait()
                os.write(told, f"{steps}\n".encode())


def kill_one(step: TrainStep, folder: Path, first: int, delay: float) -> int:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        save_without_end(step, folder, first, writer)
        os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as told:
        lines = [told.readline()]
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        lines += told.readlines()
    assert os.waitpid(child, 0)[1] == signal.SIGKILL, "it did not live until it was killed"
    return int([line for line in lines if line.endswith("\n")][-1])


def main(folder: Path, rounds: int, seed: int) -> dict[str, object]:
    """Kill so often; every time the newest checkpoint must be valid, and no older than the last that was told."""
    step, _ = step_of("conv_bn")
    draw = random.Random(seed)
    for i in range(rounds):
        told = kill_one(step, folder, (i + 1) * STRIDE, draw.uniform(0.0, 0.02))
        found = gb.load_checkpoint(folder, step, step.init(seed=1))
        steps = int(found.state.step)
        assert not found.skipped, found.skipped
        assert steps >= told, f"step {told} was on disk, {steps} is the newest"
        assert found.extra["steps"] == steps and all(
            bool((leaf == steps).all()) for leaves in found.state.gnets.values() for leaf in leaves.values()
        )
    # A kill may fall between a new checkpoint and the removal of an old one, which the next save makes up for.
    with gb.Checkpointer(folder, step, keep=KEEP) as checkpointer:
        checkpointer.save(state_at(step, (rounds + 1) * STRIDE))
    files = sorted(p.name for p in folder.iterdir())
    return {"rounds": rounds, "files": files}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
