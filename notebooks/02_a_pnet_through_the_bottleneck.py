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
# # A p-net through the bottleneck: the training step by hand
#
# A training step generates the weights, runs the p-net with these weights, computes the gradient with respect to the
# *genome*, and updates the genome with an optimizer. This notebook writes these four operations in plain PyTorch, and
# shows that `gb.make_train_step` computes the same genome. Then the notebook compares the gradient with a finite
# difference, and shows the weights before and after training.

# %%
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.func import functional_call

import gbfunc as gb
from gbfunc.plots import PALETTE, weight_images

digits = load_digits()
# In double precision throughout, so that rounding hides no mistake.
x, y = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:1400], order[1400:]

torch.manual_seed(0)
pnet = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).double()
plan = gb.make_plan(
    pnet,
    gb.periodic(),
    genome_params=600,
    encodings={"0.weight": (None, gb.grid(8, 8, bandwidth=3.0))},
    rules=[(r"0\.bias", gb.constant(0.0))],
)
print(plan.report())

# %% [markdown]
# ## The step, by hand
#
# `gb.generate` is a differentiable function of the genome. The loss is therefore a differentiable function of the
# genome as well. One call of `torch.autograd.grad` differentiates through the p-net, the weights, the tiles and the
# sines.


# %%
def loss_of(gnets, direct, images, labels):
    weights = gb.generate(plan, gb.Genome(gnets, direct, {}))
    return F.cross_entropy(functional_call(pnet, weights, (images,)), labels)


def flat(gnets, direct):
    leaves = {f"{name}/{leaf}": tensor for name, own in gnets.items() for leaf, tensor in own.items()}
    return leaves | {f"direct/{name}": tensor for name, tensor in direct.items()}


genome = gb.init_genome(plan, pnet, seed=0)
leaves = flat(genome.gnets, genome.direct)
for leaf in leaves.values():
    leaf.requires_grad_()
batches = [(x[i], y[i]) for i in train.split(100)]

loss = loss_of(genome.gnets, genome.direct, *batches[0])
gradients = dict(zip(leaves, torch.autograd.grad(loss, leaves.values()), strict=True))
functional = torch.func.grad(loss_of, argnums=(0, 1))(genome.gnets, genome.direct, *batches[0])
for name, gradient in flat(*functional).items():
    torch.testing.assert_close(gradient, gradients[name])
print("torch.autograd.grad and torch.func.grad agree on", ", ".join(leaves))

# %% [markdown]
# The next cell trains for fourteen steps, one pass over the digits, with an ordinary `torch.optim.Adam` on the
# genome's leaves. Then the step of `gb.make_train_step` trains on the same batches, from the same initial genome.

# %%
adam = torch.optim.Adam(leaves.values(), lr=2e-2)
losses_by_hand = []
for images, labels in batches:
    loss = loss_of(genome.gnets, genome.direct, images, labels)
    for leaf, gradient in zip(leaves.values(), torch.autograd.grad(loss, leaves.values()), strict=True):
        leaf.grad = gradient
    adam.step()
    losses_by_hand.append(loss.item())


def loss_fn(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


train_step = gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=2e-2))
start = gnet_params = train_step.init(seed=0)
losses = []
for batch in batches:
    gnet_params, info = train_step(gnet_params, batch)
    losses.append(float(info.loss))

for name, leaf in flat(gnet_params.gnets, gnet_params.direct).items():
    torch.testing.assert_close(leaf, leaves[name].detach(), rtol=1e-8, atol=1e-10)

fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
ax.plot(range(1, 15), losses, color=PALETTE[0], lw=5, alpha=0.4, label="gb.make_train_step")
ax.plot(range(1, 15), losses_by_hand, color=PALETTE[1], marker="o", ms=4, lw=1, label="by hand")
ax.set(xlabel="step", ylabel="cross entropy of the batch (nats)", title="The same training, twice")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## The gradient, end to end
#
# This check changes one number of the genome, a code weight of the first layer's g-net, by a small amount in both
# directions. The change of the loss, divided by the change of the number, must equal the gradient.

# %%
state = train_step.init(seed=0)
name = next(k for k in leaves if k.endswith("col_weight"))
row, feature = divmod(int(gradients[name][0].abs().argmax()), gradients[name].shape[2])


def moved(delta):
    ensemble, leaf = name.split("/")
    changed = state.gnets[ensemble][leaf].clone()
    changed[0, row, feature] += delta
    gnets = state.gnets | {ensemble: state.gnets[ensemble] | {leaf: changed}}
    with torch.no_grad():
        return float(loss_of(gnets, state.direct, *batches[0]))


analytic = float(gradients[name][0, row, feature])
h = 1e-6
numeric = (moved(h) - moved(-h)) / (2 * h)
print(f"d loss / d {name}[0, {row}, {feature}]: gradient {analytic:.8f}, finite difference {numeric:.8f}")
assert abs(numeric - analytic) < 1e-6 * max(1.0, abs(analytic))

deltas = torch.linspace(-0.2, 0.2, 41).tolist()
fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
ax.plot(deltas, [moved(d) for d in deltas], color=PALETTE[0], label="loss")
slope = [moved(0.0) + analytic * d for d in deltas]
ax.plot(deltas, slope, color=PALETTE[1], ls="--", label="slope by the gradient")
ax.set(xlabel="change of one code weight", ylabel="cross entropy of the batch (nats)", title="One number of the genome")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Train and look at the weights
#
# The step of `gb.make_train_step` trains for forty passes over the digits.

# %%
epochs = 40
lr = gb.torch_schedule(torch.optim.lr_scheduler.OneCycleLR, lr=4e-2, steps=epochs * len(batches))
train_step = gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=lr))
gnet_params = train_step.init(seed=0)
shuffle = torch.Generator().manual_seed(0)
for _ in range(epochs):
    for rows in train[torch.randperm(len(train), generator=shuffle)].split(100):
        gnet_params, info = train_step(gnet_params, (x[rows], y[rows]))

net = gb.materialize(plan, gnet_params, pnet).eval()
with torch.no_grad():
    accuracy = (net(x[test]).argmax(1) == y[test]).double().mean()
print(f"{plan.genome_params} parameters instead of {plan.pnet_params:,}: test accuracy {accuracy:.1%}")
assert accuracy > 0.9

# %% [markdown]
# The left column shows the incoming weights of 64 hidden units, each as an image of 8 x 8 pixels. The other columns
# show whole matrices.

# %%
weights = {"before": gb.generate(plan, start), "after": gb.generate(plan, gnet_params)}
weight_images(weights, image_shape=(8, 8))
