"""Continue the training of a genome with a new optimizer, and print the loss of the first epoch at several rates.

    python notebooks/results/continued.py

Trains a genome on digits for 20 epochs with a one-cycle schedule and saves it. Then trains the saved genome for 10
epochs at several parts of the suggested rate.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import gbfunc as gb
from gbfunc.tasks import find_task


def loss_fn(net: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def trained(train_step: Any, state: Any, data: Any, epochs: int, seed: int) -> tuple[Any, list[float]]:
    """Train for some epochs. Return the state and the loss of every step."""
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(epochs):
        for batch in data.train.batches(64, generator):
            state, info = train_step(state, batch)
            losses.append(float(info.loss))
    return state, losses


def main() -> None:
    """Print, for each seed and rate, the largest loss of the first epoch and the mean loss of the last epoch."""
    torch.set_num_threads(1)
    data = find_task("digits", None, {})
    per_epoch = len(data.train) // 64
    for seed in range(3):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 1100), nn.ReLU(), nn.Linear(1100, 10))
        plan = gb.make_plan(net, genome_bytes=2_000)
        rate = plan.suggested_lr()
        schedule = gb.torch_schedule(torch.optim.lr_scheduler.OneCycleLR, 2 * rate, 20 * per_epoch)
        train_step = gb.make_train_step(plan, net, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=schedule))
        state, losses = trained(train_step, train_step.init(seed), data, 20, seed)
        print(f"seed {seed}: mean loss {sum(losses[-per_epoch:]) / per_epoch:.4f} in epoch 20")
        with TemporaryDirectory() as folder:
            gb.save(path := Path(folder, "genome.safetensors"), plan, state)
            _, genome = gb.load(path)
        for part in (1.0, 0.3, 0.1, 0.03):
            again = gb.make_train_step(plan, net, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=part * rate))
            _, losses = trained(again, again.init(genome=genome), data, 10, seed)
            last = sum(losses[-per_epoch:]) / per_epoch
            most = max(losses[:per_epoch])
            print(f"  {part:.2f} of the rate: at most {most:.4f} in epoch 21, mean {last:.4f} in epoch 30")


if __name__ == "__main__":
    main()
