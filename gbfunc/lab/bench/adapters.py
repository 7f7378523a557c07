"""What adapters are measured against: LoRA's step, and a network that serves one genome after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.plan import Plan

Step = Callable[[], Any]
"""One step; what it changes, it keeps."""

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, of equal first dimension."""

Loss = Callable[[Any], Tensor]
"""A network to its loss on the case's batch."""


def plain_step(loss: Callable[[], Tensor], leaves: Iterable[Tensor] | list[dict[str, Any]], lr: float) -> Step:
    """The loop that anyone would write: a loss, its gradients, a step of AdamW."""
    optimizer = torch.optim.AdamW(leaves, lr=lr, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def _lora(plan: Plan, pnet: nn.Module, loss: Loss, batch: Batch, lr: float) -> Step:
    """LoRA of rank 1 (Hu et al., 2022) as peft has it, on the layers that the plan changes."""
    from peft import LoraConfig, get_peft_model

    layers = [t.name.removesuffix(".weight") for t in plan.tensors if t.base]
    net: Any = get_peft_model(pnet, LoraConfig(r=1, lora_alpha=1, target_modules=layers))  # pyright: ignore[reportArgumentType]
    return plain_step(lambda: loss(net), [p for p in net.parameters() if p.requires_grad], lr)


def _genomes(plan: Plan, pnet: nn.Module, n: int) -> list[gb.Genome]:
    genomes = []
    for seed in range(n):
        genome, draw = gb.init_genome(plan, pnet, seed), torch.Generator().manual_seed(seed)
        gnets = {
            e: {k: x + 0.1 * torch.randn(x.shape, generator=draw).to(x) for k, x in leaves.items()}
            for e, leaves in genome.gnets.items()
        }
        genomes.append(genome._replace(gnets=gnets))
    return genomes


def _base(plan: Plan, pnet: nn.Module, loss: Loss, batch: Batch, lr: float) -> Step:
    """The base's forward on all rows."""
    net = pnet.eval()
    return torch.no_grad()(lambda: net(batch[0]))


def _together(plan: Plan, pnet: nn.Module, loss: Loss, batch: Batch, lr: float) -> Step:
    """A genome for each row, in one batch."""
    x = batch[0]
    many, index = gb.materialize_many(plan, _genomes(plan, pnet, len(x)), pnet), torch.arange(len(x))
    return torch.no_grad()(lambda: many(index, x))


def _one_by_one(plan: Plan, pnet: nn.Module, loss: Loss, batch: Batch, lr: float) -> Step:
    """A genome for each row, one after the other, each with its module: many, whose weights are all in memory."""
    x = batch[0]
    nets = [gb.materialize(plan, genome, pnet, factored=True).eval() for genome in _genomes(plan, pnet, 10)]
    return torch.no_grad()(lambda: [nets[i % len(nets)](x[i : i + 1]) for i in range(len(x))])


def _merged(plan: Plan, pnet: nn.Module, loss: Loss, batch: Batch, lr: float) -> Step:
    """One genome merged into the base, and one row."""
    (genome,), x = _genomes(plan, pnet, 1), batch[0][:1]
    return torch.no_grad()(lambda: gb.materialize(plan, genome, pnet).eval()(x))


ADAPTERS: Mapping[str, Callable[[Plan, nn.Module, Loss, Batch, float], Step]] = MappingProxyType(
    {
        "lora rank 1": _lora,
        "base, all rows": _base,
        "a genome per row, together": _together,
        "a genome per row, one by one": _one_by_one,
        "one genome merged, one row": _merged,
    }
)
"""Variants of cases with an adapter that are no training step of a genome."""
