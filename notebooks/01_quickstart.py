# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: a network generated from a genome
#
# **G-nets** generate all weights of a **p-net**, which is any `nn.Module`. A g-net is a small function that maps the
# row and the column of a weight to the weight. The **genome** consists of the parameters of the g-nets and of a few
# direct parameters, which no g-net generates. Only the genome is trained, saved and sent. This notebook trains a
# genome on scikit-learn's handwritten digits, shows the generated weights, and saves and loads the genome.

# %%
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import optree
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

import gbfunc as gb
from gbfunc.plots import WEIGHTS

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:1400], order[1400:]
len(train), len(test)

# %% [markdown]
# ## Plan
#
# `gb.make_plan` accepts any module. A plan lists the generated tensors, with the types, the tiles and the sizes of
# the g-nets. A plan contains no trained numbers. The genome of this plan has at most 2,000 parameters, with direct
# parameters counted. The columns of the first matrix are pixels of an image, so the codes of these columns are
# coordinates.

# %%
torch.manual_seed(0)
pnet = nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 100), nn.ReLU(), nn.Linear(100, 10))
plan = gb.make_plan(
    pnet,
    gb.periodic(),
    genome_params=2_000,
    encodings={"0.weight": (None, gb.grid(8, 8))},
    rules=[(r"[02]\.bias", gb.constant(0.0))],
)
print(plan.report())

# %% [markdown]
# ## Train
#
# A training step is a pure function: the step takes a state and a batch, returns a new state, and does not modify the
# p-net.


# %%
def loss_fn(net, batch):
    images, labels = batch
    scores = net(images)
    return F.cross_entropy(scores, labels), {"accuracy": (scores.argmax(1) == labels).float().mean()}


epochs, size = 40, 100
steps = epochs * (len(train) // size)
lr = gb.torch_schedule(torch.optim.lr_scheduler.OneCycleLR, lr=2e-2, steps=steps)
train_step = gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=lr))
gnet_params = train_step.init(seed=0)
before = gb.generate(plan, gnet_params)

losses = []
shuffle = torch.Generator().manual_seed(0)
for _ in range(epochs):
    for batch in train[torch.randperm(len(train), generator=shuffle)].split(size):
        gnet_params, info = train_step(gnet_params, (x[batch], y[batch]))
        losses.append(float(info.loss))

net = gb.materialize(plan, gnet_params, pnet).eval()
with torch.no_grad():
    accuracy = (net(x[test]).argmax(1) == y[test]).float().mean()
print(f"{plan.genome_params:,} parameters instead of {plan.pnet_params:,}: test accuracy {accuracy:.1%}")
assert accuracy > 0.9

# %%
fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
ax.plot(losses, color="#0072B2", lw=0.8)
ax.set(xlabel="step", ylabel="cross entropy of the batch (nats)", yscale="log", title="Training the genome")
plt.show()

# %% [markdown]
# ## Look at the weights
#
# The incoming weights of a hidden unit form an image of 8 x 8 pixels. The g-nets generate the images of all 600 units
# from coordinates.

# %%
after = gb.generate(plan, gnet_params)
fig, axes = plt.subplots(2, 8, figsize=(9, 2.8), layout="constrained")
for row, (label, weights) in zip(axes, [("before", before), ("after", after)], strict=True):
    images = weights["0.weight"].detach()[:8].reshape(8, 8, 8)
    limit = float(images.abs().max())
    for ax, image in zip(row, images, strict=True):
        shown = ax.imshow(image, cmap=WEIGHTS, vmin=-limit, vmax=limit)
        ax.set(xticks=[], yticks=[])
    row[0].set_ylabel(f"{label}\ntraining")
    fig.colorbar(shown, ax=row, label="weight", shrink=0.9)
fig.suptitle("Input weights of the first 8 hidden units (8 x 8 pixels each)")
plt.show()

# %% [markdown]
# ## Save and load
#
# One file contains the genome and the plan. `gb.materialize` returns a plain module with dense weights, which does
# not need gbfunc.

# %%
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "genome.safetensors"
    size_on_disk = gb.save(path, plan, gnet_params)
    loaded_plan, genome = gb.load(path)
again = gb.materialize(loaded_plan, genome, pnet).eval()
assert torch.equal(again(x[test]), net(x[test]))
print(f"{size_on_disk:,} bytes on disk; the dense state dict has {plan.dense_bytes:,}")

# %% [markdown]
# ## Transform
#
# `gb.generate` is a differentiable function that maps a genome to weights. The transforms of `torch.func` work on
# this function. The next cell evaluates 20 genomes at once by `vmap`, and prints how much their losses differ.

# %%
population = [gb.init_genome(plan, pnet, seed) for seed in range(20)]
stacked = optree.tree_map(lambda *leaves: torch.stack(leaves), *[g.gnets for g in population])


def untrained_loss(gnets):
    weights = gb.generate(plan, gb.Genome(gnets, population[0].direct, {}))
    return F.cross_entropy(torch.func.functional_call(pnet, weights, (x[test],)), y[test])


initial = torch.vmap(untrained_loss)(stacked)
chance = torch.tensor(10.0).log()
print(f"untrained loss over 20 genomes: {initial.mean():.2f} +- {initial.std():.2f} nats (chance: {chance:.2f})")
