"""Train one genome for ten tasks, with a code of a few numbers per task: `python notebooks/results/tasks_code.py`.

Every g-net gets the code of the task as a further input, in addition to the codes of a row and a column. In a periodic
g-net, the code shifts the phases: `sin(A_i + B_j + c M)` with the code `c` of the task and a map `M` of each matrix.
Codes and maps are direct parameters of the plan. One file therefore holds the genome, the codes and the maps, and all
of them are counted. `for_task` returns the genome of one task, for `gb.generate` and `gb.materialize`. There are two
families of tasks: digits `turned` by multiples of 36 degrees, and digits `renamed` by ten permutations of the labels.

For comparison, the script trains ten genomes of at least 150 numbers each, one genome without codes, and a dense net
with the number of the task as an additional input. Then new tasks are learned by a new code alone, or by a new genome.

Options: `--families`, `--codes` (numbers of a code), `--sizes` (numbers in all), `--seeds`, `--steps`.

Suffixes: N tasks, B examples of a batch, P numbers of a genome, k numbers of a code.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from paper_lives import shown
from torch import Tensor, nn
from torch.func import functional_call, vmap

import gbfunc as gb
from gbfunc.tasks import find_task

TASKS, HIDDEN, BATCH, RATE, LEAST, START = 10, 64, 32, 4e-2, 150, 0.3
CODES = {"1.weight": (None, gb.grid(8, 8, bandwidth=3.0))}
Images = tuple[Tensor, Tensor]
Weights = dict[str, Tensor]
Logits = Callable[[Any, Tensor, Tensor], Tensor]  # arguments: leaves, one-hot number of the task, images [B, 1, 8, 8]


def pnet(inputs: int = 64, hidden: int = HIDDEN) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 10))


class Many(nn.Module):
    """A module with a p-net, the codes [N, k] of its tasks, and a map from a code to the phases of each ensemble."""

    def __init__(self, numbers: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.net = pnet()
        self.codes = nn.Parameter(torch.randn(TASKS, numbers))
        self.maps = nn.ParameterList([START / math.sqrt(numbers) * torch.randn(numbers, n) for n in sizes])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def for_task(plan: gb.Plan, genome: Any, code_k: Tensor) -> gb.Genome:
    """Return the genome of one task: the shared genome with phases that are shifted by the task's code."""
    gnets = dict(genome.gnets)
    for i, ensemble in enumerate(plan.ensembles):
        leaves, shift = gnets[ensemble.name], code_k @ genome.direct[f"maps.{i}"]
        gnets[ensemble.name] = leaves | {"phase": leaves["phase"] + shift.reshape(leaves["phase"].shape)}
    return gb.Genome(gnets, genome.direct, genome.buffers)


def plan_many(numbers: int, most: int) -> tuple[gb.Plan, Many]:
    """Plan a genome of at most `most` numbers for all tasks. The numbers include codes and maps."""
    own = {f"net.{name}": codes for name, codes in CODES.items()}
    for size in range(most, 90, -2):
        bare = gb.make_plan(pnet(), gb.periodic(), genome_params=size, encodings=CODES, max_tile=64)
        names = [(bare.tensors[span.tensor].name, e.hypernet) for e in bare.ensembles for span in e.spans]
        rules: Any = [(rf"^net\.{name}$", hypernet) for name, hypernet in names]
        options = {"rules": rules, "encodings": own, "max_tile": 64}
        many = Many(numbers, [])
        genome = gb.init_genome(first := gb.make_plan(many, exclude=["^codes"], **options), many)
        many = Many(numbers, [genome.gnets[e.name]["phase"].numel() for e in first.ensembles])
        plan = gb.make_plan(many, exclude=["^(codes|maps)"], **options)
        if plan.genome_params <= most:
            return plan, many
    raise ValueError(f"{most} numbers are too few for a genome with {TASKS} codes of {numbers}")


def tasks_of(family: str, images: Images, offset: float = 0.0, seed: int = 0, n: int = TASKS) -> Images:
    """Return images [N, M, 1, 8, 8] and labels [N, M] of the tasks of a family."""
    x, y = images
    if family == "renamed":
        draws = torch.Generator().manual_seed(seed)
        orders = torch.stack([torch.randperm(10, generator=draws) for _ in range(n)])
        return x.expand(n, *x.shape), orders[:, y]
    turned = []
    for i in range(n):
        angle = 2 * math.pi * (i + offset) / TASKS
        turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
        places = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
        turned.append(F.grid_sample(x, places, padding_mode="border", align_corners=False))
    return torch.stack(turned), y.expand(n, -1)


def learn(leaves: Any, logits: Logits, data: Images, steps: int, seed: int, shared: bool, rate: float = RATE) -> None:
    """Train leaves in place on batches of all tasks at once. If `shared`, all tasks have the same leaves."""
    tensors = [x.requires_grad_() for x in leaves.values()]
    adam = torch.optim.Adam(tensors, lr=rate, betas=(0.9, 0.95))
    cycle = torch.optim.lr_scheduler.OneCycleLR(adam, rate, steps, pct_start=0.1)
    draws = torch.Generator().manual_seed(seed)
    names, run = torch.eye(len(data[0]), TASKS), vmap(logits, in_dims=(None if shared else 0, 0, 0))
    for _ in range(steps):
        index = torch.randint(data[0].shape[1], (len(data[0]), min(BATCH, data[0].shape[1])), generator=draws)
        x, y = (torch.stack([of[i] for of, i in zip(part, index, strict=True)]) for part in data)
        x = x + 0.4 * torch.randn(x.shape, generator=draws)
        loss = F.cross_entropy(run(leaves, names, x).flatten(0, 1), y.flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
        cycle.step()
    for x in tensors:
        x.requires_grad_(False)


def right(leaves: Any, logits: Logits, data: Images, shared: bool) -> Tensor:
    """Return the accuracy (%) of each task [N]."""
    found = vmap(logits, in_dims=(None if shared else 0, 0, 0))(leaves, torch.eye(len(data[0]), TASKS), data[0])
    return 100 * (found.argmax(-1) == data[1]).float().mean(1)


class Way(NamedTuple):
    """A method for some tasks: the leaves to train, and a function from the leaves to the logits of a task."""

    numbers: int  # numbers trained, in total
    bytes: int  # bytes of all files
    leaves: dict[str, Tensor]
    logits: Logits
    shared: bool  # whether all tasks have the same leaves; otherwise leaves are [N, ...]
    codes: int = 0  # length of a code
    of: Callable[[Tensor, Tensor], Weights] | None = None  # weights from the leaf `genome` and a task's code
    from_file: Callable[[Tensor, int], nn.Module] | None = None  # network of a task, after saving and loading


def file_bytes(plan: gb.Plan, genome: gb.Genome) -> int:
    with tempfile.TemporaryDirectory() as folder:
        gb.save(path := Path(folder) / "genome.safetensors", plan, genome)
        return path.stat().st_size


def with_codes(numbers: int, most: int, seed: int) -> Way:
    torch.manual_seed(seed)
    plan, many = plan_many(numbers, most)
    genome = gb.init_genome(plan, many, seed)
    vector, unflatten = gb.flatten(genome)

    def of(vector: Tensor, code_k: Tensor) -> Weights:
        weights = gb.generate(plan, for_task(plan, unflatten(vector), code_k))
        return {name.removeprefix("net."): w for name, w in weights.items() if name.startswith("net.")}

    def logits(leaves: Any, name: Tensor, x: Tensor) -> Tensor:
        return functional_call(many.net, of(leaves["genome"], name @ unflatten(leaves["genome"]).direct["codes"]), (x,))

    def from_file(vector: Tensor, task: int) -> nn.Module:
        with tempfile.TemporaryDirectory() as folder:
            gb.save(path := Path(folder) / "genome.safetensors", plan, unflatten(vector))
            loaded, held = gb.load(path)
        return gb.materialize(loaded, for_task(loaded, held, held.direct["codes"][task]), many)

    size = file_bytes(plan, genome)
    return Way(plan.genome_params, size, {"genome": vector}, logits, True, numbers, of, from_file)


def plain(most: int, seed: int, n: int | None = None) -> Way:
    """Return a method with one genome for all tasks, or with `n` genomes of at most `most` numbers each."""
    net = pnet()
    plan = gb.make_plan(net, gb.periodic(), genome_params=most, encodings=CODES)
    starts = [gb.flatten(gb.init_genome(plan, net, 100 * seed + i)) for i in range(n or 1)]
    unflatten = starts[0][1]
    vectors = torch.stack([vector for vector, _ in starts])

    def logits(leaves: Any, name: Tensor, x: Tensor) -> Tensor:
        return functional_call(net, gb.generate(plan, unflatten(leaves["genome"])), (x,))

    size = len(starts) * file_bytes(plan, unflatten(vectors[0]))
    return Way(vectors.numel(), size, {"genome": vectors if n else vectors[0]}, logits, n is None)


def dense(most: int, seed: int) -> Way:
    """Return a method with a dense net that reads the pixels and the number of the task (one-hot)."""
    torch.manual_seed(seed)
    net = pnet(64 + TASKS, max(1, (most - 10) // (64 + TASKS + 11)))

    def logits(leaves: Any, name: Tensor, x: Tensor) -> Tensor:
        return functional_call(net, leaves, (torch.cat([x.flatten(1), name.expand(len(x), -1)], 1),))

    leaves = {name: x.detach().clone() for name, x in net.named_parameters()}
    numbers = sum(x.numel() for x in leaves.values())
    return Way(numbers, 4 * numbers, leaves, logits, True)


def family_rows(family: str, codes: list[int], sizes: list[int], seeds: list[int], steps: int) -> None:
    """Print two tables of a family: each method in each size, and new tasks with the largest genomes with codes."""
    task = find_task("digits", None, {})
    train, test = (tasks_of(family, (split.x, split.y)) for split in (task.train, task.test))
    print(f"\n{family}\n\n| way | numbers in all | bytes of the files | mean of tasks | worst task |")
    print("|---|---|---|---|---|")
    kept: dict[str, list[Way]] = {}
    for most in sizes:
        ways: dict[str, Callable[[int], Way]]
        ways = {f"one genome, codes of {n}": partial(with_codes, n, most) for n in codes}
        if most >= TASKS * LEAST:
            ways["ten genomes"] = partial(plain, most // TASKS, n=TASKS)
        ways |= {"one genome without codes": partial(plain, most), "a dense net that reads names": partial(dense, most)}
        for name, make in ways.items():
            made = [make(seed) for seed in seeds]
            for seed, way in zip(seeds, made, strict=True):
                learn(way.leaves, way.logits, train, steps, seed, way.shared, 1e-2 if "dense" in name else RATE)
            found = [right(way.leaves, way.logits, test, way.shared) for way in made]
            means, worst = (shown([float(f(x)) for x in found], 1) for f in (torch.mean, torch.min))
            print(f"| {name} | {made[0].numbers:,} | {made[0].bytes:,} | {means} | {worst} |", flush=True)
            if (way := made[0]).from_file is not None:
                kept[name.split(", ")[1]] = made
                net = way.from_file(way.leaves["genome"], 3)
                same = float((net(test[0][3]).argmax(-1) == test[1][3]).float().mean()) * 100
                # Both networks have the same weights. Sums in another order may change the class of one of 360 images.
                assert abs(same - float(found[0][3])) < 0.3, (same, found[0][3])
    # New tasks that no genome was trained on: other angles, or other permutations of the labels.
    new = [tasks_of(family, (split.x, split.y), 0.5, 99, 2) for split in (task.train, task.test)]
    print(f"\n| new tasks from | {' | '.join(f'{name} alone' for name in kept)} | a genome of {LEAST} numbers |")
    print("|---" * (len(kept) + 2) + "|")
    for images in (10, 50, 200, len(task.train)):
        few, cells = (new[0][0][:, :images], new[0][1][:, :images]), []
        for made in [*kept.values(), None]:
            found = []
            for i, seed in enumerate(seeds):
                way = plain(LEAST, seed, 2) if made is None else by_code(made[i])
                learn(way.leaves, way.logits, few, steps // 2, seed, False)
                found.append(float(right(way.leaves, way.logits, new[1], False).mean()))
            cells.append(shown(found, 1))
        print(f"| {images:,} images | {' | '.join(cells)} |", flush=True)


def by_code(way: Way) -> Way:
    """Return a method for two new tasks that trains only their codes, which begin at zero."""
    net, vector = pnet(), way.leaves["genome"]
    assert way.of is not None
    numbers = way.codes

    def logits(leaves: Any, name: Tensor, x: Tensor) -> Tensor:
        return functional_call(net, way.of(vector, leaves["code"]), (x,))  # pyright: ignore[reportOptionalCall]

    return Way(2 * numbers, 8 * numbers, {"code": torch.zeros(2, numbers)}, logits, False)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="+", choices=("turned", "renamed"), default=["turned", "renamed"])
    for option, default in (("codes", [4, 8, 16]), ("sizes", [500, 1_000, 1_500]), ("seeds", [0, 1, 2])):
        parser.add_argument(f"--{option}", type=int, nargs="+", default=default)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    if options.steps < 100:
        parser.error(f"--steps must be at least 100, got {options.steps}")
    torch.set_num_threads(1)
    for family in options.families:
        family_rows(family, options.codes, options.sizes, options.seeds, options.steps)
