"""Compare the outputs of trained networks with the outputs of the networks that are loaded from their files.

    python notebooks/results/rounding.py

Trains two networks on scikit-learn's digits for 10 epochs (seed 0), and prints the rows of the table in the guide
"Files and exports". Changes are the largest over all classes of all test images.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import gbfunc as gb
from gbfunc.tasks import find_task


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1100), nn.ReLU(), nn.Linear(1100, 10))


def convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs in (1, 64, 64, 64, 64):
        layers += [nn.Conv2d(inputs, 64, 3, padding=1), nn.BatchNorm2d(64), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def outputs(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return net.eval()(x)


def row(name: str, build: Any, hypernet: Any, genome_bytes: int) -> str:
    torch.manual_seed(0)
    data, generator = find_task("digits", None, {}), torch.Generator().manual_seed(0)
    plan = gb.make_plan(build(), hypernet, genome_bytes=genome_bytes)
    module = gb.GenomeModule(plan, build())
    optimizer = torch.optim.Adam(module.parameters(), lr=plan.suggested_lr())
    for _ in range(10):
        for x, y in data.train.batches(64, generator):
            F.cross_entropy(module(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    x = data.test.x
    before, cells = outputs(module, x), [name]
    cells += [f"{before.std():.1f}"]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "genome.safetensors"
        for dtype in ("float16", "float32"):
            size = gb.save(path, plan, module.to_genome(), dtype)
            plan_, genome = gb.load(path)
            after = outputs(gb.materialize(plan_, genome, build()), x)
            cells += [f"{size:,}", f"{(after - before).abs().max():.1e}"]
        after = outputs(gb.GenomeModule(plan_, build(), genome), x)
        cells += [f"{(after - before).abs().max():.1e}"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    torch.set_num_threads(1)
    print("| network | std of logits | float16: bytes | change | float32: bytes | change | `GenomeModule` |")
    print(row("MLP", mlp, gb.periodic(), 2_000), flush=True)
    shared = gb.periodic(share="shapes", frequency=2.5)
    print(row("five convolutions with batch norms", convnet, shared, 8_000), flush=True)


if __name__ == "__main__":
    main()
