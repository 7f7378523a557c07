"""A p-net with everything that a loss function may reach for, in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gbfunc as gb


class Coder(nn.Module):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 7}
        self.encoder = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.5))
        self.layers = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.heads = nn.ModuleDict({"a": nn.Linear(7, 3), "b": nn.Linear(7, 2)})
        self.scale = nn.Parameter(torch.ones(7))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.heads["a"](self.code(x))

    def code(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        for layer in self.layers:
            h = h + layer(h).tanh() * self.scale
        return h

    def part(self, name: str) -> nn.Module:
        return self.heads[name]

    def widen(self) -> None:
        self.heads["c"] = nn.Linear(7, 4)


def made(make: Callable[[], nn.Module], hypernet: Any = None, **options: Any) -> tuple[nn.Module, gb.Plan]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pnet = make().double()
    return pnet, gb.make_plan(pnet, hypernet or gb.low_rank(1), **{"max_tile": 4, **options})


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
