# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The paper
#
# *Encoding innate ability through a genomic bottleneck* (Shuvaev, Lachi, Koulakov, Zador, PNAS 2024) asks three
# questions about a network that is generated from a genome. What can the network do at birth? What can the network do
# after its weights are shuffled? Does the network learn a second task faster than a network with random weights? This
# notebook runs a small version of each experiment on 8 x 8 digits. The experiments on MNIST and CIFAR are one command
# each, `python notebooks/results/paper.py EXPERIMENT`. [The results page](results/paper.md) compares the results of
# these commands with the results of the paper.

# %%
# %matplotlib inline
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from results.paper_lives import (
    axes_of,
    classical_mds,
    dimension,
    draw_lives,
    live,
    lives,
    read_by,
    shown,
    smoothness,
    train,
)

import gbfunc as gb
from gbfunc.plots import LINES, PALETTE, weight_images
from gbfunc.tasks import accuracy, find_task

torch.set_num_threads(1)
SEEDS = (0, 1, 2)
out = Path(tempfile.mkdtemp())
task = find_task("digits", None, {})
task = task.with_pnet(task.pnet.scaled(0.1))
recipe = replace(task.recipe(450), epochs=40, measure_every=40 * 18)
print(task.build(0))

# %% [markdown]
# ## Birth
#
# A genome is trained end to end. The network generated from the genome is measured before its weights are trained.
# The same p-net with random weights, a *naive* net, is at chance.

# %%
SIZES = (150, 300, 600)
plans, born = {}, {}
for size in SIZES:
    for seed in SEEDS:
        pnet = task.build(seed)
        plans[size] = task.plan(pnet, genome_params=size)
        born[size, seed], _ = train(out / f"genome-{size}-{seed}", plans[size], pnet, task, recipe, seed)
    at_birth = [100 * accuracy(born[size, seed], task.test) for seed in SEEDS]
    print(f"{plans[size].genome_params} numbers ({plans[size].ratio_params:.0f}x): {shown(at_birth)} at birth")


def naive(seed):
    return task.build(1000 + seed)


print(f"naive: {shown(100 * accuracy(naive(seed), task.test) for seed in SEEDS)}")

# %% [markdown]
# ## Shuffled weights
#
# `gb.shuffled` permutes the numbers inside each weight matrix. The distribution of the numbers stays the same, and
# their places are lost. In the paper, a shuffled network is at chance at birth and then learns markedly faster than a
# naive network. In this experiment, the learning rate of each of the three networks is the best of three rates, by
# the validation accuracies of seed 0.

# %%
starts = {
    "grown": lambda seed: born[300, seed],
    "shuffled": lambda seed: gb.shuffled(born[300, seed], seed),
    "naive": naive,
}
learning = replace(recipe, dense_lr=1e-2)
found = lives(out / "shuffle", starts, task, learning, SEEDS, 4, (1.0, 0.3, 0.03))
for name, of in found.items():
    at = {"birth": 0, "10 steps": 10, "an epoch": 18, "4 epochs": 72}
    values = "   ".join(f"{when}: {shown([life.at(step) for life in of])}" for when, step in at.items())
    print(f"{name:<9} rate {of[0].rate:.0e}   {values}")
figure, (axes,) = axes_of()
draw_lives(axes, found, "digits")
figure

# %% [markdown]
# The shuffled network is at chance at birth, as in the paper. In contrast to the paper, the shuffled network does not
# learn faster than a naive net. The innate ability is in the places of the weights, not in their distribution. After
# some epochs, all three networks reach the same accuracy.
#
# ## Another task
#
# The second task is the same digits, transposed (rows and columns exchanged). `gb.carry_over` copies the weights of a
# network into another network, either all layers or the first `layers` layers. In the paper, networks for MNIST learn
# Fashion-MNIST more slowly than naive networks, and networks for CIFAR-10 learn SVHN fast.

# %%
sides = {name: getattr(task, name) for name in ("train", "val", "test")}
sides = {name: replace(split, x=split.x.transpose(2, 3)) for name, split in sides.items()}
turned = replace(task, name="digits on their side", **sides)
starts = {
    "naive": naive,
    "grown": lambda seed: gb.carry_over(born[300, seed], naive(seed)),
    "its first layer": lambda seed: gb.carry_over(born[300, seed], naive(seed), layers=1),
}
carried = lives(out / "turned", starts, turned, learning, SEEDS, 4, (1.0, 0.3, 0.03))
goal = 90.0
for name, of in carried.items():
    until = shown([life.epochs_until(goal) for life in of], 2, " epochs")
    print(f"{name:<16} rate {of[0].rate:.0e}   birth {shown([life.at(0) for life in of])}   {goal:.0f} % after {until}")
figure, (axes,) = axes_of()
draw_lives(axes, carried, turned.name)
figure

# %% [markdown]
# The generated network has no advantage on the transposed digits. At birth, the network is at chance, and then learns
# more slowly than a naive net, as in the paper's experiment with Fashion-MNIST. A network with only the generated
# first layer learns nearly as fast as a naive net.

# %% [markdown]
# ## What a genome says of weights
#
# The figures compare the first layers of generated and naive networks during learning: a map by multidimensional
# scaling, the spectrum of singular values, and the weights as images. On the map, two layers are near each other if
# they respond to similar patterns of pixels. The map does not depend on the order and the scale of the hidden units.

# %%
met = []
for name, start, rate in (("grown", starts["grown"], 0.03), ("naive", naive, 1.0)):
    for seed in SEEDS:
        net = start(seed)
        met.append((name, seed, 0, net.get_parameter("0.weight").detach().clone()))

        def keep(state, history, name=name, seed=seed):
            met.append((name, seed, history[-1]["step"], state.direct["0.weight"].detach().clone()))

        live(out / f"weights-{name}-{seed}", net, task, learning, seed, 4, (rate,), on_validation=keep)
places, shares = classical_mds(torch.stack([read_by(weight) for *_, weight in met]))
figure, axes = axes_of(2)
ends = {}
for i, name in enumerate(("grown", "naive")):
    for seed in SEEDS:
        path = torch.stack([place for row, place in zip(met, places, strict=True) if row[:2] == (name, seed)])
        axes[0].plot(
            path[:, 0], path[:, 1], color=PALETTE[i], marker="o", markersize=3, label=name if seed == 0 else None
        )
        axes[0].plot(*path[0, :2], color=PALETTE[i], marker="*", markersize=12)
    of_seed = [row for row in met if row[:2] == (name, 0)]
    for when, (*_, weight) in (("at birth", of_seed[0]), ("learned", of_seed[-1])):
        ends[f"{name}, {when}"] = {"0.weight": weight}
        spectrum = torch.linalg.svdvals(weight)
        axes[1].plot(
            range(1, 65), spectrum, color=PALETTE[i], linestyle=LINES[when != "at birth"], label=f"{name}, {when}"
        )
        width, smooth = dimension(weight), smoothness(weight)
        print(f"{name}, {when:<8}  dimension {width:5.1f} of 64   correlation of neighbours {smooth:5.2f}")
axes[0].set(
    xlabel=f"axis 1 ({shares[0]:.0%})", ylabel=f"axis 2 ({shares[1]:.0%})", title="what first layers read; stars: birth"
)
axes[1].set(
    xlabel="index", ylabel="singular value", yscale="log", title="spectrum of the first layer", ylim=(1e-2, None)
)
for ax in axes:
    ax.legend(frameon=False, fontsize=8)
figure

# %%
filters = {name: weight for name, weight in ends.items() if name.endswith("at birth")}
weight_images(filters, (8, 8))

# %% [markdown]
# Generated weights are smooth and lie in few dimensions. On the map, the networks of the genome do not move during
# learning. The naive nets of three seeds move far and along one path. The weights of the naive nets become smoother
# and lie in fewer dimensions than before, but generated and naive networks stay apart. Equal accuracy does not mean
# equal weights.

# %% [markdown]
# ## A model of fitness
#
# A network from a larger genome has a higher accuracy at birth. Why are genomes small? The model of this section is
# simpler than the paper's model. An animal lives $T$ steps. The fitness of the animal is the mean accuracy over its
# life, minus a cost for each number of its genome. Every number costs, because each generation copies and repairs the
# genome, and protects the genome against mutations:
#
# $$F(n, T) = \frac{1}{T} \int_0^T \mathrm{accuracy}_n(t)\,\mathrm{d}t - c\,n$$
#
# The curves come from the networks above, which learn from birth on. A naive net has $n = 0$.

# %%
ages = {f"{plans[n].genome_params} numbers": (lambda seed, n=n: born[n, seed]) for n in SIZES} | {"none (naive)": naive}
curves = lives(out / "ages", ages, task, learning, SEEDS, 4, (1.0, 0.3, 0.03))
numbers = [*(plans[n].genome_params for n in SIZES), 0]
spans = torch.logspace(0, math.log10(72), 60)


def mean_until(of, span):
    """Mean accuracy (0 to 1) from birth to an age in steps, over seeds: straight lines between measurements."""
    steps = torch.tensor([row["step"] for row in of[0].rows], dtype=torch.float)
    values = torch.tensor([[row["test"] for row in life.rows] for life in of]).mean(0)
    fine = torch.linspace(0, float(span), 400)
    right = torch.searchsorted(steps, fine).clamp(1, len(steps) - 1)
    part = (fine - steps[right - 1]) / (steps[right] - steps[right - 1])
    return float((values[right - 1] + part * (values[right] - values[right - 1])).mean())


fig, panels = plt.subplots(1, 2, figsize=(9.4, 3.6), layout="constrained")
for ax, cost in zip(panels, (1e-4, 2e-3), strict=True):
    fitness = torch.tensor(
        [[mean_until(of, span) - cost * n for span in spans] for of, n in zip(curves.values(), numbers, strict=True)]
    )
    for i, name in enumerate(curves):
        ax.plot(spans, fitness[i], color=PALETTE[i], linestyle=LINES[i], label=name)
    best = fitness.argmax(0)
    for span in (1, 10, 72):
        winner = [*curves][int(best[(spans - span).abs().argmin()])]
        print(f"cost {cost:.0e} a number, a life of {span:>2} steps: fittest with {winner}")
    ax.set(
        xscale="log", xlabel="length of a life (steps of learning)", ylabel="fitness", title=f"cost {cost:.0e} a number"
    )
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
panels[0].legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# If a number of the genome is cheap, a genome of middle size has the highest fitness for any length of life. If
# numbers are expensive, the smallest genome has the highest fitness in a short life. In a longer life, learning
# replaces the innate ability, and a naive net without a genome has the highest fitness. The costs and the lengths of
# a life are chosen to show both cases. The accuracies are the accuracies that the cells above measured.
