"""The experiments of `paper.py` on images. Each public function without a result prints a table and draws a figure.

Suffixes: N networks, P weights of a network, R rows and C columns of a weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.plots import LINES, MARKERS, PALETTE, weight_images
from gbfunc.tasks import Task, accuracy, find_task
from gbfunc.tasks.base import Recipe
from gbfunc.tasks.data import Split, image_splits, steps_per_epoch
from gbfunc.tasks.images import cifar10_recipe, load_cifar
from gbfunc.tasks.pnets import PNETS, Interface
from gbfunc.tasks.training import total_steps
from notebooks.results.garments import garments as drawn_garments
from notebooks.results.paper_lives import (
    as_data,
    axes_of,
    classical_mds,
    dimension,
    draw_lives,
    live,
    lives,
    read_by,
    report,
    shown,
    smoothness,
    train,
    train_weights,
)

if TYPE_CHECKING:
    from notebooks.results.paper import Setting

MNIST = {322: (1_973, 94.0), 470: (1_353, 91.0), 1_038: (613, 79.0)}
"""By compression: the largest number of a genome's parameters, and the accuracy (%) at birth in the paper."""

CIFAR = {92: 76.0, 146: 72.0, 361: 56.0}
"""By compression: the accuracy (%) at birth in the paper."""

SMALLEST, OTHER = 613, 1_000
"""Largest size of the genome for shuffling and garments; a number added to the seeds of naive networks."""

GROWN, SHUFFLED, NAIVE, CARRIED = "grown", "shuffled", "naive", "weights carried over"
SCALED = "naive in the grown deviations"
MNIST_RATES, CIFAR_RATES = (1.0, 0.3, 0.1), (0.1, 0.03)
"""Learning rates after birth to choose from, as parts of the recipe's `dense_lr`."""


def few(task: Task, images: int | None, tests: int | None = None) -> Task:
    """Return a task with only the first images."""
    train, val, test = (
        Split(x.x[:n], x.y[:n]) for x, n in ((task.train, images), (task.val, tests), (task.test, tests))
    )
    return replace(task, train=train, val=val, test=test)


def mnist_task(setting: Setting) -> Task:
    task = find_task("mnist", setting.data_dir / "mnist", {})
    return few(task, 10_000, 2_000) if setting.quick else task


def cifar_task(setting: Setting, width: int, folder: str = "cifar10") -> Task:
    task = find_task("cifar10", setting.data_dir / folder, {})
    task = few(task, setting.images or (2_560 if setting.quick else None), 1_000 if setting.quick else None)
    return task.with_pnet(PNETS["allconv"](task.interface, width=width))


def recipe_of(task: Task, size: float, epochs: int, name: str) -> Recipe:
    """Return the task's recipe with `epochs`, one validation at the end, and bfloat16 for convolutional nets."""
    recipe = replace(task.recipe(size), epochs=epochs, amp=None if name == "mlp" else torch.bfloat16)
    return replace(recipe, measure_every=total_steps(task, recipe))


def grown(setting: Setting, task: Task, seed: int, epochs: int, **size: Any) -> tuple[gb.Plan, nn.Module]:
    """Train a genome for a task. Return the plan and the network that the genome generates."""
    pnet = task.build(seed)
    plan = task.plan(pnet, **size)
    recipe = recipe_of(task, plan.genome_params, epochs, task.pnet.name)
    name = f"{task.name}-{plan.pnet_params}-{plan.genome_params}-{seed}".replace(" ", "-")
    return plan, train(setting.out / "genomes" / name, plan, pnet, task, recipe, seed)[0].eval()


def trained(setting: Setting, task: Task, seed: int, epochs: int) -> nn.Module:
    """Train the weights of a network for a task, for as many epochs as a genome."""
    net = task.build(seed)
    numbers = sum(p.numel() for p in net.parameters())
    recipe = recipe_of(task, numbers, epochs, task.pnet.name)
    name = f"{task.name}-{numbers}-{seed}".replace(" ", "-")
    return train_weights(setting.out / "weights" / name, net, task, recipe, seed)[0].eval()


def mnist(setting: Setting) -> None:
    """Measure the accuracy at birth on MNIST with the p-net 784-800-10."""
    epochs = setting.epochs or (2 if setting.quick else 30)
    task = mnist_task(setting)
    sizes = [(ratio, {"genome_params": most}, paper) for ratio, (most, paper) in MNIST.items()]
    _at_birth(setting, task, sizes, epochs)


def cifar(setting: Setting) -> None:
    """Measure the accuracy at birth on CIFAR-10 with the all-convolutional net, at three compressions."""
    epochs = setting.epochs or (1 if setting.quick else 12)
    task = cifar_task(setting, setting.width or (16 if setting.quick else 96), "cifar10_full")
    # For narrow nets, no genome is 361 times smaller, because biases, norms and the smallest g-nets take too much.
    ratios = CIFAR if not setting.quick and (setting.width or 96) >= 64 else {10: None, 15: None}
    sizes = [(ratio, {"compression": float(ratio)}, paper) for ratio, paper in ratios.items()]
    _at_birth(setting, task, sizes, epochs)


def _at_birth(setting: Setting, task: Task, sizes: Sequence[tuple[int, Any, float | None]], epochs: int) -> None:
    rows, data, (figure, (axes,)) = [], {}, axes_of()
    for ratio, size, paper in sizes:
        made = [grown(setting, task, seed, epochs, **size) for seed in setting.seeds]
        found, plan = [100 * accuracy(net, task.test) for _, net in made], made[0][0]
        theirs = "" if paper is None else f"{paper:.0f} %"
        rows.append(
            [f"{ratio:,}x", theirs, f"{plan.genome_params:,} ({plan.ratio_params:.0f}x)", f"**{shown(found)}**"]
        )
        data[ratio] = {"paper": paper, "numbers": plan.genome_params, "ratio": plan.ratio_params, "test": found}
    naive = [100 * accuracy(task.build(OTHER + seed).eval(), task.test) for seed in setting.seeds]
    rows.append(["naive", "", "", shown(naive)])
    ours = torch.tensor([of["test"] for of in data.values()], dtype=torch.float64)
    spread = ours.std(1, correction=int(len(setting.seeds) > 1))
    axes.errorbar([of["ratio"] for of in data.values()], ours.mean(1), spread, marker="o", capsize=3, label="here")
    if all(of["paper"] for of in data.values()):
        paper = [of["paper"] for of in data.values()]
        axes.plot([*data], paper, color=PALETTE[1], linestyle=":", marker="s", label="the paper")
    axes.set(xlabel="compression", ylabel="test accuracy at birth (%)", xscale="log", title=task.name)
    axes.set_xticks([*data], [f"{ratio:,}x" for ratio in data], minor=False)
    axes.xaxis.set_minor_formatter(lambda *_: "")
    axes.legend(frameon=False)
    columns = ("compression", "at birth in the paper", f"numbers here, {epochs} epochs", "at birth here")
    report(setting.out, setting.experiment, columns, rows, figure, data)


@torch.no_grad()
def scaled(net: nn.Module, like: nn.Module) -> nn.Module:
    """Scale each weight matrix of a network to the standard deviation of the matrix of another network."""
    for mine, theirs in zip(net.parameters(), like.parameters(), strict=True):
        if mine.ndim > 1:
            mine.mul_(theirs.std() / mine.std())
    return net


def shuffle(setting: Setting) -> None:
    """Train grown, shuffled, naive and scaled naive weights on MNIST. Weights are shuffled inside each matrix."""
    task, recipe, epochs = _mnist_learning(setting)
    size = {"genome_params": SMALLEST}

    def born(seed: int) -> nn.Module:
        return grown(setting, task, seed, setting.epochs or (2 if setting.quick else 30), **size)[1]

    def naive(seed: int) -> nn.Module:
        return task.build(OTHER + seed)

    starts = {
        GROWN: born,
        SHUFFLED: lambda seed: gb.shuffled(born(seed), seed),
        NAIVE: naive,
        SCALED: lambda seed: scaled(naive(seed), born(seed)),
    }
    folder, rates = setting.out / "lives" / "mnist", (1.0, 0.1) if setting.quick else MNIST_RATES
    found = lives(folder, starts, task, recipe, setting.seeds, epochs, rates)
    claim = {GROWN: "79 %", SHUFFLED: "chance; learns markedly faster than naive", NAIVE: "chance", SCALED: ""}
    a_pass, rows = steps_per_epoch(task.train, recipe.batch_size), []
    steps = (0, 1, 10, 100, a_pass, a_pass * epochs)
    for name, of in found.items():
        first = starts[name](setting.seeds[0])
        scale = ", ".join(f"{x.detach().std():.3f}" for x in first.parameters() if x.ndim > 1)
        values = [shown([life.at(step) for life in of]) for step in steps]
        rows.append([name, claim[name], *values, f"{of[0].rate:.0e}", scale])
    figure, (axes,) = axes_of()
    draw_lives(axes, found, "MNIST")
    marks = ["birth", "1 step", "10 steps", "100 steps", "an epoch", f"{epochs} epochs"]
    columns = ("start", "at birth in the paper", *marks, "rate", "deviation of weights, by layer")
    report(setting.out, "shuffle", columns, rows, figure, as_data(found))


def _mnist_learning(setting: Setting) -> tuple[Task, Recipe, int]:
    task = mnist_task(setting)
    return task, task.recipe(SMALLEST), setting.learning or (1 if setting.quick else 4)


def birth(setting: Setting) -> None:
    """Compare learning curves after birth for genomes of three sizes: a head start, or faster learning?"""
    task, recipe, epochs = _mnist_learning(setting)

    def born(most: int) -> Callable[[int], nn.Module]:
        genome_epochs = setting.epochs or (2 if setting.quick else 30)
        return lambda seed: grown(setting, task, seed, genome_epochs, genome_params=most)[1]

    starts: dict[str, Callable[[int], nn.Module]] = {f"{ratio:,}x": born(most) for ratio, (most, _) in MNIST.items()}
    starts = {GROWN if name == "1,038x" else name: start for name, start in starts.items()}
    starts[NAIVE] = lambda seed: task.build(OTHER + seed)
    folder, rates = setting.out / "lives" / "mnist", (1.0, 0.1) if setting.quick else MNIST_RATES
    found = lives(folder, starts, task, recipe, setting.seeds, epochs, rates)
    names = {GROWN: "1,038x"}
    naive, goal, rows = found[NAIVE], min(97.5, min(life.at(math.inf) for of in found.values() for life in of)), []
    for name, of in found.items():
        at = [life.at(0) for life in of]
        reached = [life.epochs_until(goal) for life in of]
        ahead = [one.epochs_until(life.at(0)) for one, life in zip(naive, of, strict=True)]
        # If this difference is about 0, the shifted curves coincide.
        later = [a + b - c.epochs_until(goal) for a, b, c in zip(reached, ahead, naive, strict=True)]
        last = shown([life.at(math.inf) for life in of])
        epochs_of = [shown(values, 2, "") for values in (reached, ahead, later)]
        rows.append([names.get(name, name), shown(at), last, *epochs_of, f"{of[0].rate:.0e}"])
    figure, axes = axes_of(2)
    draw_lives(axes[0], {names.get(name, name): of for name, of in found.items()}, "MNIST")
    for i, (name, of) in enumerate(found.items()):
        shift = [one.epochs_until(life.at(0)) for one, life in zip(naive, of, strict=True)]
        if math.isfinite(sum(shift)):
            x = [row["epoch"] + sum(shift) / len(shift) for row in of[0].rows]
            mean = [100 * sum(life.rows[j]["test"] for life in of) / len(of) for j in range(len(x))]
            style = {"color": PALETTE[i], "linestyle": LINES[i], "marker": MARKERS[i], "markersize": 3.5}
            axes[1].plot(x, mean, label=names.get(name, name), **style)
    axes[1].set(xlabel="epochs, shifted to the naive net's time of equal accuracy", ylabel="test accuracy (%)")
    axes[1].set_ylim(90, 99)
    axes[1].legend(frameon=False, fontsize=8)
    until = f"epochs until {goal:.1f} %"
    shifts = ("the naive net's epochs until the accuracy at birth", "shifted curve later by (epochs)")
    columns = ("start", "birth", f"after {epochs} epochs", until, *shifts, "rate")
    report(setting.out, "birth", columns, rows, figure, as_data(found))


def garments(setting: Setting) -> None:
    """Train a network that is grown for MNIST on drawn garments."""
    source, _, epochs = _mnist_learning(setting)
    genome_epochs = setting.epochs or (2 if setting.quick else 30)
    task = replace(drawn_garments(images=2_560 if setting.quick else 20_000), pnet=source.pnet)
    recipe = replace(source.recipe(SMALLEST), augment=None)

    def born(seed: int) -> nn.Module:
        return grown(setting, source, seed, genome_epochs, genome_params=SMALLEST)[1]

    starts = {
        GROWN: born,
        SHUFFLED: lambda seed: gb.shuffled(born(seed), seed),
        CARRIED: lambda seed: trained(setting, source, seed, min(genome_epochs, 10)),
        NAIVE: lambda seed: task.build(OTHER + seed),
    }
    folder, rates = setting.out / "lives" / "garments", (1.0, 0.3) if setting.quick else MNIST_RATES
    found = lives(folder, starts, task, recipe, setting.seeds, epochs, rates)
    _transferred(setting, found, {GROWN: "slower than naive", SHUFFLED: "", CARRIED: "", NAIVE: ""}, "garments, drawn")


def _transferred(setting: Setting, found: Any, claims: dict[str, str], title: str) -> None:
    """Print the epochs until the naive network's final accuracy, and until half of the way from chance to it."""
    naive, rows = found[NAIVE], []
    final = [100 * life.rows[-1]["test"] for life in naive]
    half = sum(life.at(0) + final[0] for life in naive) / len(naive) / 2
    for name, of in found.items():
        until = shown([life.epochs_until(goal) for life, goal in zip(of, final, strict=True)], 2, "")
        early = shown([life.epochs_until(half) for life in of], 2, "")
        values = [shown([life.at(at) for life in of]) for at in (0, math.inf)]
        rows.append([name, claims.get(name, ""), values[0], early, until, values[1], f"{of[0].rate:.0e}"])
    figure, axes = axes_of(2)
    draw_lives(axes[0], found, title)
    draw_lives(axes[1], found, log=False)
    goals = (f"epochs until {half:.0f} %", "epochs until the naive start's last accuracy")
    columns = ("start", "in the paper", "at birth", *goals, "at the end", "rate")
    report(setting.out, setting.experiment, columns, rows, figure, as_data(found))


def cifar100_task(setting: Setting, width: int) -> Task:
    """Return a part of CIFAR-100: 18,000 training images, 2,000 validation images and 5,000 test images."""
    learned, tested = load_cifar(setting.data_dir / "cifar100", "cifar100", 100)
    interface = Interface((3, 32, 32), 100)
    (learn, val, test), *_ = image_splits(learned, (2_000,), tested, by_channel=True)
    task = Task("cifar100", interface, learn, val, test, PNETS["allconv"](interface, width=width), cifar10_recipe)
    return few(task, setting.images or (2_560 if setting.quick else None), 1_000 if setting.quick else None)


def transfer(setting: Setting) -> None:
    """Train on CIFAR-100 from naive weights, weights of CIFAR-10, and all or the first k layers of a grown network."""
    width = setting.width or (8 if setting.quick else 16)
    source, target = cifar_task(setting, width), cifar100_task(setting, width)
    depths = (1, 4)
    claims = {
        NAIVE: "some 20 epochs",
        CARRIED: "1 epoch",
        "genome": "as good as weights",
        "genome, layer 1": "50 % after 3.2 epochs, naive 4.8",
        "genome, layers 1-8": "worse than naive (layers 8 and 9)",
    }
    _carried(setting, source, target, depths, claims, f"CIFAR-10 to CIFAR-100, {width} channels")


def _carried(
    setting: Setting, source: Task, target: Task, depths: Sequence[int], claims: dict[str, str], title: str
) -> None:
    epochs, learning = (1, 1) if setting.quick else (12, 6)
    epochs, learning = setting.epochs or epochs, setting.learning or learning
    recipe = replace(target.recipe(2_000), amp=torch.bfloat16)

    def naive(seed: int) -> nn.Module:
        return target.build(OTHER + seed)

    def carried(seed: int) -> nn.Module:
        return gb.carry_over(trained(setting, source, seed, epochs), naive(seed))

    def of_genome(layers: int | None) -> Callable[[int], nn.Module]:
        def start(seed: int) -> nn.Module:
            return gb.carry_over(grown(setting, source, seed, epochs, compression=20.0)[1], naive(seed), layers=layers)

        return start

    starts: dict[str, Callable[[int], nn.Module]] = {NAIVE: naive, CARRIED: carried, "genome": of_genome(None)}
    folder = setting.out / "lives" / f"{source.name}-{target.name}".replace(" ", "-")
    rates = CIFAR_RATES[: 1 if setting.quick else None]
    found = lives(folder, starts, target, recipe, setting.seeds, learning, rates, first=())
    # Its first layers take the rate of the whole.
    rate = found["genome"][0].rate / recipe.dense_lr
    parts = {f"genome, layer{'s 1-' + str(k) if k > 1 else ' 1'}": of_genome(k) for k in depths}
    found |= lives(folder, parts, target, recipe, setting.seeds, learning, (rate,), first=())
    _transferred(setting, found, claims, title)


def halves(setting: Setting) -> None:
    """Train on five classes of CIFAR-10 with weights for the other five classes, and the reverse."""
    width = setting.width or (8 if setting.quick else 16)
    whole = cifar_task(setting, width)
    interface = Interface(whole.interface.inputs, 5)
    tasks = []
    for half, name in enumerate(("classes 0-4", "classes 5-9")):
        parts = {k: getattr(whole, k) for k in ("train", "val", "test")}
        chosen = {k: x.y // 5 == half for k, x in parts.items()}
        parts = {k: Split(x.x[chosen[k]], x.y[chosen[k]] - 5 * half) for k, x in parts.items()}
        pnet = PNETS["allconv"](interface, width=width)
        tasks.append(replace(whole, name=name, interface=interface, pnet=pnet, about={}, **parts))
    for source, target in (tasks, tasks[::-1]):
        print(f"\nFrom {source.name} to {target.name}:\n")
        suffix = f"halves-to-{target.name[-3:]}"
        one = setting._replace(experiment=suffix)
        _carried(one, source, target, (), {}, f"{source.name} to {target.name}, {width} channels")


def weights(setting: Setting) -> None:
    """Compare first layers of grown and naive networks during training: a map, singular values and filters."""
    task, recipe, epochs = _mnist_learning(setting)
    genome_epochs = setting.epochs or (2 if setting.quick else 30)
    starts = {
        GROWN: (0.1, lambda seed: grown(setting, task, seed, genome_epochs, genome_params=SMALLEST)[1]),
        NAIVE: (1.0, lambda seed: task.build(OTHER + seed)),
    }
    met: list[tuple[str, int, int, Tensor]] = []  # start, seed, step, weight [R, C]
    for name, (rate, start) in starts.items():
        for seed in setting.seeds:
            folder = setting.out / "snapshots" / f"{name}-{seed}"
            net = start(seed)
            met.append((name, seed, 0, net.get_parameter("0.weight").detach().clone()))
            folder.mkdir(parents=True, exist_ok=True)

            def keep(state: Any, history: Any, folder: Path = folder) -> None:
                weight = state.direct["0.weight"].detach().clone()
                save_file({"weight": weight}, folder / f"{history[-1]['step']:08d}.safetensors")

            live(folder, net, task, recipe, seed, epochs, (rate,), on_validation=keep)
            for path in sorted(folder.glob("*.safetensors")):
                met.append((name, seed, int(path.stem), load_file(path)["weight"]))
    _describe_weights(setting, met)


def _describe_weights(setting: Setting, met: list[tuple[str, int, int, Tensor]]) -> None:
    places, shares = classical_mds(torch.stack([read_by(weight) for *_, weight in met]))
    figure, axes = axes_of(2)
    rows, last, ends = [], max(step for _, _, step, _ in met), {}
    data: dict[str, Any] = {"shares": shares[:10].tolist()}
    for i, name in enumerate((GROWN, NAIVE)):
        for seed in setting.seeds:
            path = torch.stack(
                [place for (start, s, *_), place in zip(met, places, strict=True) if (start, s) == (name, seed)]
            )
            label = name if seed == setting.seeds[0] else None
            axes[0].plot(path[:, 0], path[:, 1], color=PALETTE[i], marker="o", markersize=3, label=label)
            axes[0].plot(*path[0, :2], color=PALETTE[i], marker="*", markersize=12)
        for step, when in ((0, "at birth"), (last, "learned")):
            of = [weight for start, _, s, weight in met if start == name and s == step]
            first = [weight for start, _, s, weight in met if start == name and s == 0]
            moved = [float((a - b).norm() / b.norm()) for a, b in zip(of, first, strict=True)]
            found = [shown(map(f, of), 2, "") for f in (dimension, smoothness)]
            rows.append([f"{name}, {when}", *found, shown(moved, 3, "")])
            data[f"{name}, {when}"] = {
                "dimension": [*map(dimension, of)],
                "smoothness": [*map(smoothness, of)],
                "moved": moved,
            }
            spectrum = torch.linalg.svdvals(of[0])
            line: Any = {"linestyle": LINES[step > 0], "color": PALETTE[i]}
            axes[1].plot(range(1, len(spectrum) + 1), spectrum, label=f"{name}, {when}", **line)
            ends[f"{name}, {when}"] = {"0.weight": of[0]}
    axes[0].set(xlabel=f"axis 1 ({shares[0]:.0%} of the squared distances)", ylabel=f"axis 2 ({shares[1]:.0%})")
    axes[0].set_title("what first layers read while they learn; stars: birth")
    axes[1].set(
        xlabel="index", ylabel="singular value", xscale="log", yscale="log", title="spectrum of the first layer"
    )
    axes[1].set_ylim(bottom=1e-3)
    for ax in axes:
        ax.legend(frameon=False, fontsize=8)
    filters: Figure = weight_images(ends, (28, 28))
    setting.out.mkdir(parents=True, exist_ok=True)
    filters.savefig(setting.out / "filters.png", dpi=80)
    columns = ("first layer", "dimension (of 784)", "correlation of neighbours", "way from birth / norm")
    report(setting.out, "weights", columns, rows, figure, data)
    print(setting.out / "filters.png")
