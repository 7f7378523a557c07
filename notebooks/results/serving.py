"""Adapters of a GPT, 6 layers of 384: `python notebooks/results/serving.py`, a JSON row each.

Training steps of 32 texts: all weights, the genome of an adapter, and LoRA of rank 1 (Hu et al., 2022) by the package
peft. Forward passes of 100 rows with an adapter for each row, beside those of the base.
"""

import json
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import gbfunc as gb
from gbfunc.lab.bench.cases import Step, genome_step, loss_fn, plain_step, sequences
from gbfunc.lab.bench.report import time_together
from gbfunc.tasks.pnets.base import seeded
from gbfunc.tasks.pnets.gpt import GPT

TEXTS, ROWS, LENGTH, WORDS, LAYERS, WIDTH = 32, 100, 16, 1_000, 6, 384


def genome(seed: int) -> gb.Genome:
    """A genome whose deltas are not zero, as they are at first."""
    drawn, generator = gb.init_genome(plan, net, seed), torch.Generator().manual_seed(seed)
    gnets = {
        e: {k: x + 0.1 * torch.randn(x.shape, generator=generator) for k, x in leaves.items()}
        for e, leaves in drawn.gnets.items()
    }
    return drawn._replace(gnets=gnets)


def gpt() -> GPT:
    with seeded(0):
        return GPT(WORDS, LENGTH, LAYERS, WIDTH, WIDTH // 32, 4 * WIDTH, bias=True)


def training(net: torch.nn.Module) -> Step:
    return plain_step(lambda: loss_fn(net, batch), [p for p in net.parameters() if p.requires_grad], 1e-8)


def show(calls: dict[str, Any]) -> None:
    for name, timing in time_together(calls, torch.device("cpu"), rounds=7).items():
        print(json.dumps({"variant": name, "ms": round(1e3 * timing.seconds, 2)}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    net, batch = gpt(), sequences(TEXTS, LENGTH, WORDS)
    plan = gb.make_plan(net, gb.bilinear(5, share="shapes"), base="own")
    layers = [t.name.removesuffix(".weight") for t in plan.tensors if t.base]
    lora: Any = LoraConfig(r=1, lora_alpha=1, target_modules=layers)
    steps = {"dense": training(gpt()), "adapter": genome_step(plan, net, batch, 1e-8)}
    show(steps | {"lora rank 1": training(get_peft_model(gpt(), lora))})
    torch.set_grad_enabled(False)
    net, (x, _) = net.eval(), sequences(ROWS, LENGTH, WORDS)
    many, index = gb.materialize_many(plan, [genome(i) for i in range(ROWS)], net), torch.arange(ROWS)
    # Modules in turn, whose weights are all in memory: more would not fit.
    alone = [gb.materialize(plan, genome(i), net, factored=True).eval() for i in range(10)]
    calls = {
        "base, all rows": lambda: net(x),
        "a genome per row, together": lambda: many(index, x),
        "a genome per row, one by one": lambda: [alone[i % 10](x[i : i + 1]) for i in range(ROWS)],
        "one genome merged, one row": lambda: gb.materialize(plan, genome(0), net).eval()(x[:1]),
    }
    torch.testing.assert_close(many(index, x)[3:4], alone[3](x[3:4]), rtol=1e-4, atol=1e-5)
    show(calls)
