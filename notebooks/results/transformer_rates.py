"""Learning rates of a small transformer that starts from random weights, on the questions of TREC.

    python notebooks/results/transformer_rates.py --data-dir DATA/trec

Each row trains the same Electra for 150 steps of 32 questions and prints the mean loss of the last 20 steps and the
test accuracy. Needs `gbfunc[hf]`.
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import ElectraConfig, ElectraForSequenceClassification

import gbfunc as gb

STEPS, WARMUP, DENSE_RATE = 150, 20, 1e-3


def build() -> nn.Module:
    """Make the network with the random weights of seed 0."""
    torch.manual_seed(0)
    sizes = {"embedding_size": 64, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3}
    config = ElectraConfig(vocab_size=2003, num_attention_heads=4, max_position_embeddings=32, num_labels=6, **sizes)
    return ElectraForSequenceClassification(config)


def read(path: Path) -> tuple[list[int], list[list[str]]]:
    """Read lines of TREC: a class from 0 to 5, a space, the question."""
    rows = [line.split(" ", 1) for line in path.read_text(encoding="utf-8").splitlines()]
    return [int(a) for a, _ in rows], [re.findall(r"\w+|[^\w\s]", b.lower()) for _, b in rows]


def encode(texts: Sequence[Sequence[str]], numbers: dict[str, int]) -> tuple[Tensor, Tensor]:
    """Return tokens and masks [N, 24]: 0 pads, 1 is an unknown word, 2 begins a question."""
    tokens = torch.zeros(len(texts), 24, dtype=torch.int64)
    for i, words in enumerate(texts):
        row = [2, *(numbers.get(word, 1) for word in words[:23])]
        tokens[i, : len(row)] = torch.tensor(row)
    return tokens, (tokens > 0).long()


def train(net: nn.Module, rates: tuple[float, float], train_set: Sequence[Tensor], test_set: Sequence[Tensor]) -> str:
    """Train g-nets at the first rate and all other parameters at the second. Return loss and accuracy."""
    torch.manual_seed(0)
    groups: tuple[list[Tensor], list[Tensor]] = [], []
    for name, parameter in net.named_parameters():
        groups[not name.startswith("gnets:")].append(parameter)
    optimizer = torch.optim.Adam([{"params": p, "lr": r} for p, r in zip(groups, rates, strict=True) if p])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) / WARMUP, (STEPS - s) / STEPS))
    losses: list[float] = []
    for _ in range(STEPS):
        rows = torch.randperm(len(train_set[0]))[:32]
        tokens, mask, labels = (x[rows] for x in train_set)
        loss = net(tokens, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    net.eval()
    tokens, mask, labels = test_set
    with torch.no_grad():
        right = net(tokens, attention_mask=mask).logits.argmax(1) == labels
    return f"{sum(losses[-20:]) / 20:.2f} | {right.float().mean():.1%}"


def main() -> None:
    """Print the rows of the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    folder = parser.parse_args().data_dir
    labels, texts = read(folder / "train.txt")
    test_labels, test_texts = read(folder / "test.txt")
    counts = Counter(word for words in texts for word in words)
    numbers = {word: i + 3 for i, (word, _) in enumerate(counts.most_common(2000))}
    train_set = *encode(texts, numbers), torch.tensor(labels)
    test_set = *encode(test_texts, numbers), torch.tensor(test_labels)
    print("| plan | parameters | rate of g-nets | rate of direct parameters | loss | accuracy |", flush=True)
    dense = build()
    count = sum(p.numel() for p in dense.parameters())
    print(f"| dense network | {count:,} | | {DENSE_RATE} | {train(dense, (0.0, DENSE_RATE), train_set, test_set)} |")
    rank = {"rules": [("word_embeddings", gb.low_rank(rank=32))], "genome_params": 87_000}
    for options in ({"genome_bytes": 40_000}, {"compression": 3.0}, rank):
        plan = gb.make_plan(build(), gb.periodic(share="layers"), **options)
        rate = plan.suggested_lr()
        for rates in ((rate, rate), (DENSE_RATE, DENSE_RATE), (rate, DENSE_RATE)):
            net = gb.GenomeModule(plan, build())
            told = train(net, rates, train_set, test_set)
            print(f"| {options} | {plan.genome_params:,} | {rates[0]} | {rates[1]} | {told} |", flush=True)


if __name__ == "__main__":
    main()
