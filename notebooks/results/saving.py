"""Measure steps of an MLP 2048-2048-2048-10 with and without a save after each: `python notebooks/results/saving.py`.

A save is written while the next step runs. The rows are for genomes of 81,418 parameters (103x) and of 1,041,610.
"""

import json
import tempfile

import torch

import gbfunc as gb
from gbfunc.lab.bench.cases import loss_fn, mlp_case
from gbfunc.lab.bench.report import time_together


def measure(features: int, tile: int) -> None:
    case = mlp_case((2048, 2048, 2048, 10), 256, (), h=features, tile=tile)
    net, batch = case.pnet(), case.batch()
    plan = gb.make_plan(net, **case.periodic)
    optimizer = gb.torch_optimizer(torch.optim.AdamW, lr=1e-8)
    train_step = gb.make_train_step(plan, net, loss_fn, optimizer, donate=True)
    states = {name: train_step.init(seed=0) for name in ("plain", "saved")}

    def step(name: str) -> None:
        if name == "saved":
            checkpointer.save(states[name])
        states[name], _ = train_step(states[name], batch)

    with tempfile.TemporaryDirectory() as folder, gb.Checkpointer(folder, train_step) as checkpointer:
        calls = {name: lambda name=name: step(name) for name in states}
        for name, timing in time_together(calls, torch.device("cpu"), rounds=7).items():
            row = {"params": plan.genome_params, "steps": name, "ms": round(1e3 * timing.seconds, 1)}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    measure(32, 256)
    measure(36, 64)
