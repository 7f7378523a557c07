"""A small pretrained network with a new head, and genomes that adapt it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.trees import tree_map
from tests.support.zoo import loss_fn

RATE = 0.1


def trained(module: nn.Module, batch: Any, steps: int = 3, loss: Callable[..., Any] = loss_fn) -> list[Tensor]:
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=RATE)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(module, batch)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return losses


class Pretrained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.query, self.value = nn.Linear(8, 12), nn.Linear(12, 8)
        self.dropout = nn.Dropout(0.5)
        self.classifier = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        hidden = hidden + self.norm(self.conv(hidden.unsqueeze(1))).mean(1)
        hidden = hidden + self.value(torch.tanh(self.query(hidden)))
        return self.classifier(self.dropout(hidden.mean(1)))


def pretrained(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        pnet = Pretrained()
        pnet(torch.randint(0, 11, (16, 5)))
    return pnet.eval()


def tokens(rows: int = 6) -> Tensor:
    return torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(2))


def moved(genome: gb.Genome, amount: float = 0.3, seed: int = 3) -> gb.Genome:
    draw = torch.Generator().manual_seed(seed)
    add: Any = lambda x: x + amount * torch.randn(x.shape, generator=draw).to(x) if x.is_floating_point() else x  # noqa: E731
    return gb.Genome(tree_map(add, genome.gnets), tree_map(add, genome.direct), genome.buffers)


def adapter(hypernet: Any = None, **options: Any) -> tuple[nn.Module, gb.Plan, gb.Genome]:
    pnet = pretrained()
    hypernet = gb.low_rank(2) if hypernet is None else hypernet
    options = {"target_modules": ["query", "value", "conv", "embedding"], "modules_to_save": ["classifier"], **options}
    plan = gb.make_plan(pnet, hypernet, base="own", **options)
    return pnet, plan, moved(gb.init_genome(plan, pnet))
