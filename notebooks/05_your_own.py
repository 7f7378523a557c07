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
# # Your own hypernetwork and layer
#
# Your own types of g-net work like the built-in types. This notebook defines a **layer** that the library does not
# know, and two **hypernetworks** (types of g-net): one from an ordinary `nn.Module`, and one as a class that returns
# factors. The notebook trains genomes of both types on digits, and compares them with genomes of nearly equal size of
# the default type, `gb.periodic()`. The last network has hidden **units of several kinds**, like a retina.

# %%
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F

import gbfunc as gb
from gbfunc.formats import file_bytes
from gbfunc.hypernets import Factors, Leaf, Sized
from gbfunc.plots import MARKERS, PALETTE
from gbfunc.tasks.images import digits

task = digits()
train, val, test = task.train, task.val, task.test
print(len(train), "digits to train on,", len(val), "to choose settings by,", len(test), "for the end")

# %% [markdown]
# ## A layer
#
# Any module with any parameters can be a p-net. The module of this example has separate filters for each quadrant of
# the image, in one tensor of three dimensions. By default, g-nets generate the weights of linear layers, convolutions
# and attention. To generate any other tensor, name the tensor in `include`. The g-nets then generate a matrix whose
# rows are the tensor's first dimension, and whose columns are all other dimensions. `encodings` gives the codes of
# the columns. In this example, each of the 64 columns belongs to a pixel of a quadrant.


# %%
class Quadrants(nn.Module):
    """Each unit looks at the four 4 x 4 quadrants of an image: [n, 1, 8, 8] -> [n, units]."""

    def __init__(self, units):
        super().__init__()
        self.filters = nn.Parameter(torch.randn(units, 4, 16) / 8)

    def forward(self, images):
        quadrants = images.unfold(2, 4, 4).unfold(3, 4, 4).reshape(len(images), 4, 16)
        return torch.einsum("nqp,uqp->nu", quadrants, self.filters)


torch.manual_seed(0)
pnet = nn.Sequential(Quadrants(128), nn.ReLU(), nn.Linear(128, 10))


def plan_with(hypernet, **size):
    return gb.make_plan(
        pnet,
        hypernet,
        include=[r"filters"],
        encodings={"0.filters": (gb.binary(), gb.grid(2, 2, 4, 4, bandwidth=3.0))},
        **size,
    )


print(plan_with(gb.periodic(), genome_params=500).report())

# %% [markdown]
# ## A hypernetwork from a module
#
# `gb.from_module` takes any module that maps the concatenated codes of a weight to the weight. This module is a
# network of sines on sines (Sitzmann et al., 2020).


# %%
class Siren(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(width, 12), nn.Linear(12, 6), nn.Linear(6, 1)
        nn.init.normal_(self.first.weight)
        nn.init.normal_(self.second.weight)

    def forward(self, codes):
        return self.last(torch.sin(self.second(torch.sin(self.first(codes)))))


# %% [markdown]
# ## A hypernetwork as a class
#
# A type of g-net defines the parameters of a g-net, the initial values of these parameters, and the tile. This type
# multiplies a bump over the rows by a wave over the columns, $w_{ij} = \sum_h v_h\, e^{-A_{ih}^2} \sin(B_{jh})$. The
# tile is a product of two thin matrices, so the class returns these two `Factors`. Layers then apply the factors
# instead of the weight if this is faster. The class names the field that holds the number of features (`size_field`),
# so that the plan can choose this number.


# %%
@dataclass(frozen=True)
class BumpWave(Sized):
    features: int | None = None
    type: ClassVar[str] = "bump_wave"
    size_field: ClassVar[str] = "features"
    factorised: ClassVar[bool] = True

    def leaves(self, dims):
        h = self.features
        return {
            "row_weight": Leaf((dims.row_width, h), "code", std=dims.row_width**-0.5),
            "col_weight": Leaf((dims.col_width, h), "code"),
            "row_shift": Leaf((h,), "code"),
            "col_shift": Leaf((h,), "code", std=2.0),
            "amplitude": Leaf((h,), "linear"),
        }

    def apply(self, leaves, row_codes, col_codes, *, noise=None, kernel="auto"):
        bumps = torch.exp(-((row_codes @ leaves["row_weight"] + leaves["row_shift"]) ** 2))
        waves = torch.sin(col_codes @ leaves["col_weight"] + leaves["col_shift"])
        return Factors(bumps * leaves["amplitude"], waves)


size = 500
plans = {
    "periodic": plan_with(gb.periodic(), genome_params=size),
    "siren (a module)": plan_with(gb.from_module(Siren)),
    "bump x wave (a class)": plan_with(BumpWave(), genome_params=size),
}
for label, plan in plans.items():
    print(f"{label:<22} {plan.genome_params} parameters, {plan.ratio_params:.1f}x")

# %% [markdown]
# ## A fair comparison
#
# Every type is trained at the same two learning rates. The rate with the higher accuracy on the *validation* digits
# is then used for trainings with three seeds. Only the networks of these trainings are measured on the test digits.


# %%
def loss_fn(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def trained(plan, lr, seed, pnet=pnet, epochs=12, batch_size=100):
    steps = epochs * -(-len(train) // batch_size)
    schedule = gb.torch_schedule(torch.optim.lr_scheduler.OneCycleLR, lr=lr, steps=steps)
    optimizer = gb.torch_optimizer(torch.optim.Adam, lr=schedule, betas=(0.9, 0.95))
    train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer, donate=True)
    gnet_params = train_step.init(seed=seed)
    shuffle = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for rows in torch.randperm(len(train), generator=shuffle).split(batch_size):
            gnet_params, info = train_step(gnet_params, (train.x[rows], train.y[rows]))
    return gb.materialize(plan, gnet_params, pnet).eval()


def accuracy(net, split):
    with torch.no_grad():
        return 100 * float((net(split.x).argmax(1) == split.y).double().mean())


rates = (2e-2, 4e-2)
results = {}
for label, plan in plans.items():
    on_val = {lr: accuracy(trained(plan, lr, seed=100), val) for lr in rates}
    best = max(on_val, key=on_val.get)
    found = torch.tensor([accuracy(trained(plan, best, seed), test) for seed in range(3)])
    results[label] = found
    print(f"{label:<22} lr {best:g}: test accuracy {found.mean():.1f} +- {found.std():.1f} % over 3 seeds")

fig, ax = plt.subplots(figsize=(6.5, 2.4), layout="constrained")
for i, found in enumerate(results.values()):
    ax.plot(found, [i] * 3, MARKERS[i], color=PALETTE[i], ms=8, alpha=0.7)
    ax.plot([float(found.mean())] * 2, [i - 0.25, i + 0.25], color="black", lw=1.5)
names = [f"{label}\n{plan.genome_params} parameters" for label, plan in plans.items()]
ax.set(yticks=range(3), yticklabels=names, ylim=(2.5, -0.5), xlabel="test accuracy (%) of three seeds, line: mean")
ax.grid(alpha=0.3, axis="x")
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Genomes of the module (sines on sines) have the same accuracy as genomes of the default type: the accuracies of
# their seeds overlap. The module needs more arithmetic, because it computes each weight alone. Bumps times waves have
# a lower accuracy. One of the 360 test digits is 0.3 percentage points, so differences below one percentage point
# mean nothing.

# %% [markdown]
# ## Units of several kinds
#
# A retina has several kinds of cells, and the cells of each kind cover the image. The kind and the position of a cell
# determine the cell's inputs. The network of this section has 128 hidden units: 8 kinds at 4 x 4 places. The code of
# a unit consists of three bits for the kind and two coordinates for the place. `gb.table` takes any numbers as codes,
# for example measured kinds of neurons, depths of neurons, or rows of a connectome. For comparison, a genome of equal
# size uses the default codes, the bits of the unit's index.

# %%
kinds, side = torch.as_tensor(gb.binary().codes(8)), torch.tensor([-3.0, -1.0, 1.0, 3.0])
places = torch.cartesian_prod(side, side)
cells = torch.cat([kinds.repeat_interleave(16, 0), places.repeat(8, 1)], 1)

torch.manual_seed(0)
retina = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def plan_of(units):
    codes = {"1.weight": (units, gb.grid(8, 8, bandwidth=3.0)), "3.weight": (None, units)}
    return gb.make_plan(retina, gb.periodic(), genome_params=300, encodings=codes)


for label, plan in {"kinds at places": plan_of(gb.table(cells)), "bits of an index": plan_of(None)}.items():
    on_val = {lr: accuracy(trained(plan, lr, 100, retina), val) for lr in rates}
    best = max(on_val, key=on_val.get)
    found = torch.tensor([accuracy(trained(plan, best, seed, retina), test) for seed in range(3)])
    print(f"{label:<17} {plan.genome_params} parameters, test accuracy {found.mean():.1f} +- {found.std():.1f} %")

# %% [markdown]
# The genome's file stores a table once, even if the rows or columns of several matrices use the table. In the report,
# the bytes of the table belong to the row `(plan)`. If a formula computes the same codes, the file stores only the
# formula's name, which takes few bytes:

# %%
formula = gb.per_axis(gb.binary(), gb.grid(4, 4, bandwidth=3.0), 16)
assert torch.equal(torch.as_tensor(formula.codes(128)), cells)
print(plan_of(gb.table(cells)).report("int7"), "\n")
for label, units in {"table": gb.table(cells), "formula": formula, "bits": None}.items():
    print(f"plan with {label:<8}", file_bytes(plan_of(units), "int7")["(plan)"], "bytes")

# %% [markdown]
# In this experiment, networks with codes of kinds and places have the same accuracy as networks with codes of bits:
# the accuracies of the three seeds overlap. The codes of kinds and places make a network easier to interpret: each
# weight is a function of the kinds and the places of two units.
#
# ## Files
#
# Loading a file never runs code from the file. If the g-nets come from a factory (`gb.from_module`), pass this
# factory to load the file. If the g-nets come from a class of yours, register the class with `gb.register` before you
# save or load the file. `gb.register` is also a class decorator.
#
# By default, g-nets do not generate the weights of a new kind of layer. To change this default, or the way in which
# the layer's tensors become matrices, add an entry to the table of kinds in `gbfunc/layers/kinds.py`.

# %%
plan = plans["siren (a module)"]
genome = gb.init_genome(plan, pnet, seed=0)
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "genome.safetensors"
    gb.save(path, plan, genome)
    _, again = gb.load(path, factories=[Siren])
    try:
        gb.load(path)
    except ValueError as error:
        print(str(error).replace(str(path), path.name))
    gb.register(BumpWave)
    gb.save(path, plans["bump x wave (a class)"], gb.init_genome(plans["bump x wave (a class)"], pnet))
    print(gb.load(path)[0].tensors[0].slots[0].hypernet)
assert torch.equal(gb.generate(plan, again)["0.filters"], gb.generate(plan, genome)["0.filters"])
