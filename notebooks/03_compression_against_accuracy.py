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
# # Compression against accuracy
#
# A genome is not the only way to make a small file. Alternatives are a smaller network, a random subspace, or fewer
# bits per weight. This notebook compares these methods at **equal bytes**: the bytes of a file that contains
# everything needed to run the network. All methods train on the same digits for the same number of steps. Settings
# (learning rates, widths, depths) are chosen on validation digits. Each network is then loaded from its file and
# measured once on the test digits.
#
# `gbfunc compare --task digits` runs the full comparison. This notebook uses the same code with a small p-net and a
# short training.

# %%
# %matplotlib inline
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from results.rivals import RIVALS

from gbfunc.lab.compare import METHODS
from gbfunc.lab.compare.base import Problem
from gbfunc.lab.compare.genome import reference_bytes
from gbfunc.lab.compare.rows import Results, run_missing
from gbfunc.plots import tradeoff_curves
from gbfunc.tasks.images import digits
from gbfunc.tasks.pnets import PNETS

task = digits()
task = replace(task, pnet=PNETS["mlp"](task.interface, hidden=(256,), bandwidth=3.0))
recipe = replace(task.recipe(450), steps=150)
methods = {
    "periodic_auto": "gbfunc, trained for its file",
    "periodic": "gbfunc, periodic",
    "low_rank_genome": "gbfunc, low rank",
    "smaller_dense": "smaller dense net",
    "random_subspace": "random subspace",
    "int8": "int8 of a smaller net",
}
# Fewer where it is run to see that it runs.
sizes, seeds = ((200, 2_000), 1) if "CI" in os.environ else ((200, 500, 2_000), 3)
problems = [Problem(task, n, reference_bytes(task, n), torch.float32, recipe) for n in sizes]
print("p-net 64-256-10,", f"{sum(p.numel() for p in task.build(0).parameters()):,} parameters")
print("budgets:", ", ".join(f"{p.budget:,} bytes" for p in problems))

# %% [markdown]
# ## Measure
#
# The next cell trains each method with three seeds at each size. If a method does not fit into a size, the cell
# prints a message.

# %%
with tempfile.TemporaryDirectory() as folder:
    chosen = {name: {**METHODS, **RIVALS}[name] for name in methods}
    *_, results = run_missing(chosen, problems, seeds=seeds, results=Results(), folder=Path(folder))

print(f"{'test accuracy (%)':<24}" + "".join(f"{p.budget:>16,} B" for p in problems))
for name, label in methods.items():
    cells = []
    for problem in problems:
        rows = [row for row in results.rows if row.method == name and row.size == problem.size]
        found = 100 * torch.tensor([row.test for row in rows])
        cells.append(f"{found.mean():.1f} +- {found.std():.1f}" if rows else "does not fit")
    print(f"{label:<24}" + "".join(f"{cell:>18}" for cell in cells))

# %%
curves = {}
for name, label in methods.items():
    points = [[row for row in results.rows if row.method == name and row.size == size] for size in sizes]
    found = [(sum(r.bytes for r in rows) / len(rows), [100 - 100 * r.test for r in rows]) for rows in points if rows]
    if found:
        curves[label] = found
figure = tradeoff_curves(curves, "test error (%, logarithmic), 3 seeds", yscale="log")
figure.axes[0].set_title("Digits, every method at the same bytes")
figure

# %% [markdown]
# At equal bytes, the results are:
#
# * **A periodic genome in float32** has a higher accuracy than the smaller dense net at all three sizes. The
#   difference is largest at the smallest size. At the two smaller sizes, the accuracies of the genome and of the
#   random subspace differ less than the accuracies of different seeds.
# * **int8 weights of a smaller net**, trained with rounding, have a much higher accuracy than these three methods at
#   the two smaller sizes.
# * **A genome trained for its file** has the accuracy of the int8 net at all three sizes: the two methods differ less
#   than different seeds do.
# * **Low rank** does not fit into the smallest size, and learns in so few steps only at the largest size.
#
# `gbfunc compare` draws the same figure for any task, with longer trainings.
#
# The pages of results list the rejected settings for MNIST and CIFAR-10: [MNIST](results/mnist.md#what-was-tried),
# [CIFAR-10](results/cifar10.md#what-was-tried).
