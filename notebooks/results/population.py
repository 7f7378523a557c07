"""Measure steps of 16 genomes together and one by one: `python notebooks/results/population.py --threads 1`.

Prints a row per batch size and step, for an MLP 784-256-256-64-10 with 16 features: the time, and the ratio to the
dense step. On a GPU (`--device cuda`), a step of 256 genomes as a CUDA graph is measured as well.
"""

import argparse
import json
from functools import partial

import torch
from torch import Tensor

import gbfunc as gb
from gbfunc.lab.bench.cases import Setting, Setup, Step, build, loss_fn, mlp_case
from gbfunc.lab.bench.report import time_together


def population_step(setup: Setup, *, together: bool, n: int = 16, cuda_graph: bool = False) -> Step:
    """Build a step that trains n genomes together, or one by one."""
    optimizer = gb.torch_optimizer(torch.optim.AdamW, lr=setup.setting.lr)
    train_step = gb.make_train_step(setup.plan, setup.pnet, loss_fn, optimizer, donate=True, cuda_graph=cuda_graph)
    many = gb.population(train_step, n)
    all_states, states = many.init(), [] if together else [train_step.init(seed=i) for i in range(n)]

    def at_once() -> Tensor:
        nonlocal all_states
        all_states, info = many(all_states, setup.batch)
        return info.loss.mean()

    def one_by_one() -> Tensor:
        losses = []
        for i, state in enumerate(states):
            states[i], info = train_step(state, setup.batch)
            losses.append(info.loss)
        return torch.stack(losses).mean()

    return at_once if together else one_by_one


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[256, 64])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    setting = Setting(torch.device(options.device), options.threads)
    kinds = {
        "together": partial(population_step, together=True),
        "one by one": partial(population_step, together=False),
    }
    if setting.device.type == "cuda":
        kinds["256 captured"] = partial(population_step, together=True, n=256, cuda_graph=True)
    for size in options.batches:
        case = mlp_case((784, 256, 256, 64, 10), size, (), h=16)
        pnet, (x, target) = case.pnet().to(setting.device), case.batch()
        batch = x.to(setting.device), target.to(setting.device)
        setup = Setup(case, gb.make_plan(pnet, **case.periodic or {}), pnet, batch, setting)
        steps = {"dense": build(case, "dense", setting)[0], **{name: kind(setup) for name, kind in kinds.items()}}
        times = time_together(steps, setting.device, rounds=7)
        for name, timing in times.items():
            row = {"batch": size, "step": name, "ms": 1e3 * timing.seconds}
            print(json.dumps(row | {"ratio_to_dense": timing.seconds / times["dense"].seconds}), flush=True)


if __name__ == "__main__":
    main()
