"""Measure adapters in training and in serving. Each measurement prints a JSON row.

`python notebooks/results/serving.py` measures a GPT with 6 layers of width 384: training steps with 32 texts (of all
weights, of an adapter's genome, and of LoRA of rank 1 by the package peft; Hu et al., 2022), and forward passes of 100
rows, of the base and with an adapter per row.

`python notebooks/results/serving.py FOLDER` measures 1,000 adapters of two plans for a causal language model of
transformers (SmolLM2-135M) in float32: the memory in addition to the base, the difference of the logits from networks
that are generated one by one, and the tokens per second of `generate` for 8 rows with 8 adapters. For comparison, the
tokens per second are also measured for the base and for peft's mixed batch (`adapter_names`).
"""

import ctypes
import gc
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model

import gbfunc as gb
from gbfunc.lab.bench.cases import Step, genome_step, loss_fn, plain_step, sequences
from gbfunc.lab.bench.report import time_together
from gbfunc.tasks.pnets.base import seeded
from gbfunc.tasks.pnets.gpt import GPT

TEXTS, ROWS, LENGTH, WORDS, LAYERS, WIDTH = 32, 100, 16, 1_000, 6, 384
ADAPTERS, TOGETHER, NEW = 1_000, 8, 32


def genome(drawn: gb.Genome, seed: int) -> gb.Genome:
    """Return a genome with nonzero deltas. A new genome has zero deltas."""
    generator = torch.Generator().manual_seed(seed)
    gnets = {
        e: {k: x + 0.1 * torch.randn(x.shape, generator=generator) for k, x in leaves.items()}
        for e, leaves in drawn.gnets.items()
    }
    return drawn._replace(gnets=gnets)


def gpt() -> GPT:
    with seeded(0):
        return GPT(WORDS, LENGTH, LAYERS, WIDTH, WIDTH // 32, 4 * WIDTH, bias=True)


def training(net: torch.nn.Module, batch: Any) -> Step:
    return plain_step(lambda: loss_fn(net, batch), [p for p in net.parameters() if p.requires_grad], 1e-8)


def show(calls: dict[str, Any]) -> None:
    for name, timing in time_together(calls, torch.device("cpu"), rounds=7).items():
        print(json.dumps({"variant": name, "ms": round(1e3 * timing.seconds, 2)}), flush=True)


def memory() -> dict[str, float]:
    """Return the resident memory of the process in MB: now, and the peak since the last call."""
    gc.collect()
    # Return freed memory to the system before the measurement.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text("5")
    return {k: int(status[k].split()[0]) * 1024 / 1e6 for k in ("VmRSS", "VmHWM")}


def tokens_per_second(calls: dict[str, Any], rounds: int = 3) -> None:
    """Print the best of several rounds, by processor time. Calls alternate, because other processes use the machine."""
    best: dict[str, float] = {}
    for _ in range(1 + rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()
            best[name] = min(best.get(name, 1e9), time.process_time() - start)
    for name, seconds in best.items():
        print(json.dumps({"variant": name, "tokens per second": round(TOGETHER * NEW / seconds, 1)}), flush=True)


def serve(folder: str) -> None:
    net: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for x in net.parameters():
        # Copy the weights from the mapped file into memory, so that they count.
        x.data = x.data.clone()
    words = torch.randint(0, net.config.vocab_size, (TOGETHER, LENGTH), generator=torch.Generator().manual_seed(0))
    options = {"attention_mask": torch.ones_like(words), "max_new_tokens": NEW, "min_new_tokens": NEW}
    options |= {"do_sample": False, "pad_token_id": 0}
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    plans = [
        gb.make_plan(net, gb.bilinear(n, share="shapes"), base="own", target_modules=layers)
        for n, layers in ((2, [*attention, "gate_proj"]), (1, [*attention, "gate_proj", "up_proj", "down_proj"]))
    ]
    drawn = [gb.init_genome(plan, net) for plan in plans]
    print(json.dumps({"numbers of a genome": [plan.genome_params for plan in plans]}))
    for rows in (words, *words.split(1)):
        # Run each shape of inputs once, because torch keeps memory for every shape.
        net(rows, use_cache=False)
    net.generate(words, **options)
    memory()
    net.generate(words, **options)
    base = memory()

    def beside(what: str) -> None:
        more = memory()
        now, most = (round(more[k] - base[k], 1) for k in ("VmRSS", "VmHWM"))
        print(json.dumps({"MB beside the base": what, "now": now, "at most, beside its generate": most}), flush=True)

    genomes = [genome(drawn[i % 2], i) for i in range(ADAPTERS)]
    many = gb.materialize_many([plans[i % 2] for i in range(ADAPTERS)], genomes, net, grown=0)
    del genomes
    beside("1,000 adapters")
    index = torch.randperm(ADAPTERS, generator=torch.Generator().manual_seed(1))[:TOGETHER]
    many.generate(index, words, **options)
    memory()
    many.generate(index.flip(0), words, **options)
    beside("and a text of 8 rows")
    logits, errors = many(index, words, use_cache=False).logits, []
    for b, i in enumerate(index.tolist()):
        alone = gb.materialize(plans[i % 2], genome(drawn[i % 2], i), net)
        expected = alone(words[b : b + 1], use_cache=False).logits
        errors.append(float((logits[b : b + 1] - expected).abs().max() / expected.abs().max()))
    print(json.dumps({"largest difference of logits, relative": max(errors)}))
    turns = iter(torch.randint(0, ADAPTERS, (99, TOGETHER), generator=torch.Generator().manual_seed(2)))
    calls = {
        "base": lambda: net.generate(words, **options),
        "8 of 1,000 genomes, others in each batch": lambda: many.generate(next(turns), words, **options),
        "8 genomes, the same": lambda: many.generate(index, words, **options),
    }
    tokens_per_second(calls)
    names = [str(i) for i in range(TOGETHER)]
    for rank, layers in ((1, ["q_proj", "v_proj"]), (8, ["q_proj", "v_proj"]), (1, "all-linear"), (8, "all-linear")):
        config: Any = LoraConfig(r=rank, target_modules=layers, init_lora_weights=False)
        mixed: Any = get_peft_model(net, config, "0")
        for name in names[1:]:
            mixed.add_adapter(name, config)
        call = partial(mixed.eval().generate, input_ids=words, adapter_names=names, **options)
        tokens_per_second({f"8 LoRAs of rank {rank}, {layers}": call})
        net = mixed.unload()


def train_and_serve() -> None:
    net, batch = gpt(), sequences(TEXTS, LENGTH, WORDS)
    plan = gb.make_plan(net, gb.bilinear(5, share="shapes"), base="own")
    layers = [t.name.removesuffix(".weight") for t in plan.tensors if t.base]
    lora: Any = LoraConfig(r=1, lora_alpha=1, target_modules=layers)
    steps = {"dense": training(gpt(), batch), "adapter": genome_step(plan, net, batch, 1e-8)}
    show(steps | {"lora rank 1": training(get_peft_model(gpt(), lora), batch)})
    with torch.no_grad():
        rows_together(plan, net)


def rows_together(plan: gb.Plan, net: torch.nn.Module) -> None:
    net.eval()
    x, _ = sequences(ROWS, LENGTH, WORDS)
    genomes = [genome(gb.init_genome(plan, net, i), i) for i in range(ROWS)]
    many, index = gb.materialize_many(plan, genomes, net), torch.arange(ROWS)
    # Modules in turn, whose weights are all in memory: more would not fit.
    alone = [gb.materialize(plan, genomes[i], net, factored=True).eval() for i in range(10)]
    calls = {
        "base, all rows": lambda: net(x),
        "a genome per row, together": lambda: many(index, x),
        "a genome per row, one by one": lambda: [alone[i % 10](x[i : i + 1]) for i in range(ROWS)],
        "one genome merged, one row": lambda: gb.materialize(plan, genomes[0], net).eval()(x[:1]),
    }
    torch.testing.assert_close(many(index, x)[3:4], alone[3](x[3:4]), rtol=1e-4, atol=1e-5)
    show(calls)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 1:
        train_and_serve()
    else:
        with torch.no_grad():
            serve(sys.argv[1])
