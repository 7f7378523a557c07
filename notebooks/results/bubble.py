"""Measure the bubble of a pipeline: `torchrun --nproc-per-node 4 notebooks/results/bubble.py gpipe` prints a JSON row.

The bubble is the part of a step's time that a rank spends waiting. Ranks that share cores do not compute at the same
time. Therefore the forward and the backward of each block wait for a fixed time instead of computing. The measured
bubble shows the order of the schedule and the time of sending. The row also has the bubble of the formula (p - 1) / (m
+ p - 1) for p ranks and m microbatches (Narayanan et al., 2021).
"""

import json
import os
import statistics
import sys
import time

import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.lab.bench.cases import genome_step

WIDTH, STEPS, MICROBATCHES, FORWARD, BACKWARD = 8, 3, 8, 0.1, 0.2


# The wait is an operator, so that the recorded graph of a pipeline contains it.
@torch.library.custom_op("bubble::wait", mutates_args=())
def wait(x: Tensor, seconds: float) -> Tensor:
    time.sleep(seconds)
    return x.clone()


wait.register_fake(lambda x, seconds: torch.empty_like(x))
wait.register_autograd(lambda ctx, grad: (wait(grad, BACKWARD), None))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return wait(self.layer(x), FORWARD)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with gb.mesh(pipeline=int(os.environ["WORLD_SIZE"]), timeout=120) as mesh:
        ranks = mesh.sizes["pipeline"]
        torch.manual_seed(0)
        pnet = nn.Sequential(*(Block() for _ in range(ranks)))
        batch = torch.ones(MICROBATCHES, WIDTH), torch.zeros(MICROBATCHES, dtype=torch.int64)
        options = {"mesh": mesh, "pipeline": sys.argv[1], "microbatches": MICROBATCHES}
        step = genome_step(gb.make_plan(pnet, gb.periodic(2)), pnet, batch, 1e-8, **options)
        seconds = []
        for _ in range(1 + STEPS):
            mesh.barrier()
            start = time.perf_counter()
            float(step())
            mesh.barrier()
            seconds.append(time.perf_counter() - start)
        busy = MICROBATCHES * (FORWARD + BACKWARD)
        bubble = {
            "measured": 1 - busy / statistics.median(seconds[1:]),
            "formula": (ranks - 1) / (MICROBATCHES + ranks - 1),
        }
        if mesh.rank == 0:
            print(json.dumps({"schedule": sys.argv[1], "ranks": ranks, **{k: round(v, 3) for k, v in bubble.items()}}))
