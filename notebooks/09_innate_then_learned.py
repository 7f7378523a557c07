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
# # Innate, then learned
#
# The genome of an animal determines what the animal can do at birth; the animal learns the rest (Zador, 2019; Shuvaev
# et al., PNAS 2024). In the same way, a network generated from a genome performs a task at birth, before its weights
# are trained. Then training continues to change the weights themselves. This notebook has five experiments on
# handwritten digits: a network at birth and during learning, many brains from one genome, evolution without
# gradients, a population of genomes in one step, and a genome that is trained *for learning*.

# %%
# %matplotlib inline
import os
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from results.birth import birth_curves, in_the_size_of, lessons, teach
from torch import nn
from torch.func import functional_call, grad, vmap

import gbfunc as gb
from gbfunc.plots import LINES, MARKERS, PALETTE
from gbfunc.tasks import accuracy, endless_batches, find_task, loss_fn

torch.set_num_threads(1)
torch.manual_seed(0)
task = find_task("digits", None, {})


def batches(steps, size=64, seed=0):
    return islice(endless_batches(task.train, size, torch.Generator().manual_seed(seed)), steps)


def trained(plan, pnet, steps, lr):
    """A genome after so many steps of Adam."""
    schedule = gb.torch_schedule(torch.optim.lr_scheduler.OneCycleLR, lr, steps)
    optimizer = gb.torch_optimizer(torch.optim.Adam, lr=schedule, betas=(0.9, 0.95))
    train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer, donate=True)
    state = train_step.init(seed=0)
    for batch in batches(steps):
        state, _ = train_step(state, batch)
    return state


# %% [markdown]
# ## Learning after birth
#
# A genome of some 300 numbers generates a p-net of 82,510 weights. `teach` continues to train these weights with Adam
# at a constant rate. For comparison, a p-net with random weights learns on the same batches. For each network, the
# learning rate is the one with the best validation accuracies over the whole training. The second task is a task that
# the genome was not trained for: MNIST in 8 x 8 pixels. If the files of MNIST are missing, the second task is the
# digits of the first task, transposed.

# %%
pnet = task.build(seed=0)
plan = task.plan(pnet, genome_params=300)
state = trained(plan, pnet, steps=600, lr=4e-2)
grown = gb.materialize(plan, state, pnet).eval()

mnist = Path(os.environ.get("GBFUNC_DATA") or "../../shared/data") / "mnist"
if mnist.is_dir():
    other = in_the_size_of(find_task("mnist", mnist, {}), task.interface).with_pnet(task.pnet)
else:
    sides = {name: getattr(task, name) for name in ("train", "val", "test")}
    sides = {name: replace(split, x=split.x.transpose(2, 3)) for name, split in sides.items()}
    other = replace(task, name="digits lying on their side", **sides)

runs = {}
for learned, passes in ((task, 3), (other, 0.2 if mnist.is_dir() else 3)):
    recipe = replace(task.recipe(plan.genome_params), batch_size=64)
    steps = round(passes * len(learned.train) // recipe.batch_size)
    taught = teach(grown, learned, lessons(learned, replace(recipe, steps=steps)), seed=0)
    runs[learned.name] = {start: one.rows for start, one in taught.items()}
    for start, one in taught.items():
        told = "  ".join(f"{row['step']}: {row['accuracy']:.1%}" for row in one.rows)
        print(f"{learned.name}, {start:<6} rate {one.lr:.0e}   {told}")

figure = birth_curves(runs)
figure

# %% [markdown]
# At birth, the generated network classifies more than nine of ten digits correctly, and random weights are at chance.
# The generated network needs a small learning rate, because a larger rate destroys the innate ability in one step.
# Random weights learn at a larger rate. After ten steps, the accuracy of random weights is near the accuracy of the
# generated network, and after three passes, both accuracies are equal. The innate ability is an advantage only while
# the network has seen few images.
#
# On the second task, the generated network is above chance at birth, but learns no faster than random weights. The
# reason: the genome encodes the digits of the first task and not digits in general. (In the paper, networks for MNIST
# had no advantage on Fashion-MNIST either.)
#
# The script `notebooks/results/birth.py` repeats the experiment on whole data sets. The next cell prints the test
# accuracies (%) of this script, as mean and standard deviation over three seeds, from
# [`results/birth.md`](results/birth.md). The net for CIFAR-10 is narrow, with 39,066 parameters. For comparison, the
# paper's genomes for MNIST, with the same numbers of parameters, have accuracies of 94, 91 and 79 % at birth:

# %%
RESULTS = [
    ("MNIST", "1,964 parameters (324x)", [(98.2, 0.1), (98.2, 0.0), (98.2, 0.0), (98.2, 0.1), (98.3, 0.1)]),
    ("MNIST", "1,346 parameters (473x)", [(97.8, 0.2), (97.8, 0.2), (97.8, 0.2), (97.8, 0.2), (97.9, 0.1)]),
    ("MNIST", "612 parameters (1,039x)", [(96.7, 0.1), (96.7, 0.1), (96.7, 0.1), (96.9, 0.3), (97.2, 0.2)]),
    ("MNIST", "none: random weights", [(10.5, 1.4), (44.9, 9.5), (85.4, 1.1), (93.7, 0.1), (95.9, 0.1)]),
    ("CIFAR-10", "1,950 parameters (20x)", [(54.6, 1.0), (54.6, 1.0), (54.5, 1.1), (55.2, 1.2), (55.4, 0.8)]),
    ("CIFAR-10", "none: random weights", [(10.0, 0.0), (10.3, 0.8), (20.2, 3.0), (36.1, 0.7), (43.2, 2.6)]),
]
print(f"{'':<36}{'birth':>14}{'1 step':>14}{'10 steps':>14}{'100 steps':>14}{'an epoch':>14}")
for name, genome, values in RESULTS:
    print(f"{name + ': ' + genome:<36}", *(f"{value:>8.1f} +- {deviation:.1f}" for value, deviation in values))

# %% [markdown]
# ## Many brains of one genome
#
# A *stochastic* g-net gives each weight a mean and a standard deviation, so that one genome can generate any number
# of networks. `sample_noise` draws the noise of one network, and `materialize(noise=...)` generates the network.
# Training makes the standard deviations small. To show larger differences between networks, the next cell also
# multiplies the noise by factors of up to 300.

# %%
small = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
stochastic = gb.make_plan(small, gb.stochastic((16,)), max_tile=16)
genome = trained(stochastic, small, steps=400, lr=3e-2)
mean = gb.materialize(stochastic, genome, small)
print(f"{stochastic.genome_params} parameters; the mean weights: {accuracy(mean, task.test):.1%}")
print("noise   accuracy of brains (lowest, mean, highest)   their vote")
for factor in (1, 30, 100, 300):
    logits = []
    for seed in range(12):
        noise = gb.sample_noise(stochastic, torch.Generator().manual_seed(seed))
        louder = {ensemble: {k: factor * x for k, x in of.items()} for ensemble, of in noise.items()}
        brain = gb.materialize(stochastic, genome, small, noise=louder)
        with torch.no_grad():
            logits.append(brain(task.test.x))
    right = (torch.stack(logits).argmax(-1) == task.test.y).float().mean(1)
    vote = torch.stack(logits).softmax(-1).mean(0).argmax(-1)
    voted = float((vote == task.test.y).float().mean())
    print(f"{factor:>4} x   {right.min():.1%}  {right.mean():.1%}  {right.max():.1%} {'':>21} {voted:.1%}")

# %% [markdown]
# ## Evolution
#
# `gb.flatten` returns a genome as one vector, and a function that maps vectors to genomes. Evolution strategies
# search for such a vector. The next cell uses natural evolution strategies (Salimans et al., 2017). Each generation
# has 64 mutants: 32 random changes, each added to the vector and subtracted from the vector. One `vmap` generates and
# evaluates all mutants. The search only uses the losses of the mutants; no gradient reaches the genome. The next
# section draws the curve of the losses.

# %%
tiny = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
codes = {"1.weight": (None, gb.grid(8, 8, bandwidth=3.0))}
tiny_plan = gb.make_plan(tiny, gb.periodic(), genome_params=200, encodings=codes)
vector, unflatten = gb.flatten(gb.init_genome(tiny_plan, tiny, seed=0))


def loss_of(vector, x, y):
    return F.cross_entropy(functional_call(tiny, gb.generate(tiny_plan, unflatten(vector)), (x,)), y)


MUTANTS, SIGMA = 32, 0.1
draws = torch.Generator().manual_seed(0)
best = vector.clone().requires_grad_()
adam = torch.optim.Adam([best], lr=0.1)
generations, scores = [], []
for generation, (x, y) in enumerate(batches(400, size=256)):
    noise = torch.randn(MUTANTS, len(vector), generator=draws)
    mutants = torch.cat([best.detach() + SIGMA * noise, best.detach() - SIGMA * noise])
    losses = vmap(loss_of, (0, None, None))(mutants, x, y)
    best.grad = (losses[:MUTANTS] - losses[MUTANTS:]) @ noise / (2 * MUTANTS * SIGMA)
    adam.param_groups[0]["lr"] = 0.1 * (1 - generation / 400)
    adam.step()
    if generation % 20 == 19:
        net = gb.materialize(tiny_plan, unflatten(best.detach()), tiny)
        generations.append(generation + 1)
        scores.append(100 * accuracy(net, task.test))
print(f"{len(vector)} numbers, {generations[-1]} generations of {2 * MUTANTS}: {scores[-1]:.1f} % of the test images")

# %% [markdown]
# ## A population in one step
#
# `gb.population` trains many genomes in one step, by `vmap`. The genomes may differ in seed, learning rate or batch.
# Each genome is trained as if it were trained alone. The next cell trains genomes at 16 learning rates at once:

# %%
middle = task.with_pnet(task.pnet.scaled(64 / 1100))
mlp = middle.build(seed=0)
mlp_plan = middle.plan(mlp, genome_params=300)
factors = torch.logspace(-2, 1, 16)
train_step = gb.make_train_step(mlp_plan, mlp, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=3e-2))
many = gb.population(train_step, 16, lr_factors=factors)
states = many.init(seeds=[0] * 16)
for batch in batches(200):
    states, info = many(states, batch)
rated = [accuracy(gb.materialize(mlp_plan, many.member(states, i), mlp), task.test) for i in range(16)]

batch = next(batches(1))
members = [many.member(states, i) for i in range(16)]


def timed(call, times=10):
    """Milliseconds of the fastest of some calls."""
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return 1e3 * min(spent)


together = timed(lambda: many(states, batch))
apart = timed(lambda: [train_step(member, batch) for member in members])
print(f"16 genomes of {mlp_plan.genome_params} parameters: {apart:.0f} ms one by one, {together:.0f} ms together")

alone = gb.make_train_step(mlp_plan, mlp, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=3e-2 * float(factors[8])))
single, pair = alone.init(seed=0), many.init(seeds=[0] * 16)
for batch in batches(10):
    (single, _), (pair, _) = alone(single, batch), many(pair, batch)
difference = gb.flatten(many.member(pair, 8))[0] - gb.flatten(single)[0]
print(f"member 8 and the same genome alone differ by at most {float(difference.abs().max()):.0e} after 10 steps")

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.3), layout="constrained")
axes[0].plot(generations, scores, color=PALETTE[0], marker="o", markersize=3)
axes[0].set(xlabel="generation", ylabel="test accuracy (%)", title="evolution of one genome, without gradients")
axes[1].plot(3e-2 * factors, [100 * x for x in rated], color=PALETTE[1], marker="s", markersize=4)
axes[1].set(
    xlabel="learning rate", ylabel="test accuracy (%)", xscale="log", title="16 genomes in one step, after 200 steps"
)
for ax in axes:
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Born to learn
#
# A genome can also be trained so that its network *learns* well (model-agnostic meta-learning, Finn et al., 2017).
# Each task shows five digits once, with labels from 0 to 4 that are drawn at random for each task. No genome can know
# these labels, so the network has to learn the labels. Only the differences between digits can be innate. Learning
# takes two steps of gradient descent on all generated weights. All functions are pure, so the gradient with respect
# to the genome goes through the two steps:
#
# genome -> `generate` -> weights -> two steps on five images -> loss on other images.

# %%
learner = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5))
meta_plan = gb.make_plan(learner, gb.periodic(), genome_params=600, encodings=codes)
NAMES, SHOWN, ASKED, RATE, STEPS = 5, 1, 8, 0.5, 400
shown_as, asked_as = (torch.arange(NAMES).repeat_interleave(n) for n in (SHOWN, ASKED))


def draw(split, n, draws):
    """So many tasks: images to learn from [n, 5, 1, 8, 8], and others to be asked about [n, 40, 1, 8, 8]."""
    images = []
    for _ in range(n):
        digits = [split.x[split.y == digit] for digit in torch.randperm(10, generator=draws)[:NAMES]]
        images.append(torch.stack([x[torch.randperm(len(x), generator=draws)[: SHOWN + ASKED]] for x in digits]))
    both = torch.stack(images)
    return both[:, :, :SHOWN].flatten(1, 2), both[:, :, SHOWN:].flatten(1, 2)


def loss(weights, x, y):
    return F.cross_entropy(functional_call(learner, weights, (x,)), y)


def learn(weights, x, rate, steps):
    """Gradient descent on the grown weights: again a pure function."""
    for _ in range(steps):
        slopes = grad(loss)(weights, x, shown_as)
        weights = {name: w - rate * slopes[name] for name, w in weights.items()}
    return weights


vector, unflatten = gb.flatten(gb.init_genome(meta_plan, learner, seed=0))
vector.requires_grad_()
adam = torch.optim.Adam([vector], lr=2e-2)
decay = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1.0, 2 * (1 - step / STEPS)))
draws = torch.Generator().manual_seed(0)
for _ in range(STEPS):
    weights = gb.generate(meta_plan, unflatten(vector))
    after = vmap(lambda shown, asked, weights=weights: loss(learn(weights, shown, RATE, 2), asked, asked_as))
    adam.zero_grad()
    after(*draw(task.train, 8, draws)).mean().backward()
    adam.step()
    decay.step()

# %%
tests = draw(task.test, 200, torch.Generator().manual_seed(1))
LESSONS = (0, 1, 2, 3, 5, 10, 20)


def learning_curve(weights, rate):
    """Accuracy (%) on images of the test split after so many steps on five images, over 200 tasks."""

    def right(shown, asked, steps):
        learned = learn(weights, shown, rate, steps)
        return (functional_call(learner, learned, (asked,)).argmax(-1) == asked_as).float().mean()

    return [100 * float(vmap(right, (0, 0, None))(*tests, steps).mean()) for steps in LESSONS]


born = {name: w.detach() for name, w in gb.generate(meta_plan, unflatten(vector.detach())).items()}
random = {name: w.detach() for name, w in learner.named_parameters()}
curves = {f"grown from {meta_plan.genome_params} numbers, rate {RATE}": learning_curve(born, RATE)}
curves |= {f"random weights, rate {rate}": learning_curve(random, rate) for rate in (0.1, 0.2, 0.5)}

fig, ax = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
for i, (label, values) in enumerate(curves.items()):
    ax.plot(LESSONS, values, color=PALETTE[i], linestyle=LINES[i], marker=MARKERS[i], markersize=4, label=label)
    print(f"{label:<36}", *(f"{steps}: {value:.1f} %" for steps, value in zip(LESSONS, values, strict=True)), sep="  ")
ax.axhline(100 / NAMES, color="grey", linewidth=0.8)
ax.set(xlabel="steps of learning from five images, one of each name", ylabel="accuracy on others (%)")
ax.set_xscale("symlog", linthresh=1)
ax.set(xticks=LESSONS, xticklabels=LESSONS, xlim=(-0.9, 22), ylim=(0, 119))
ax.grid(alpha=0.3)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, loc="upper left", fontsize=8)
plt.show()

# %% [markdown]
# Both networks are at chance at birth, because the labels are random. After one step, the network of the genome knows
# the five labels. With random weights, at the best of three learning rates, the accuracy stays far lower after any
# number of steps. Five images do not show how digits differ, but the genome encodes these differences.
#
# The gradient through the steps of learning equals finite differences (in float64, up to rounding):

# %%
double = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2)).double()
double_plan = gb.make_plan(double, gb.periodic(features=2))
start, back = gb.flatten(gb.init_genome(double_plan, double, seed=1))
x, y = torch.randn(6, 3, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1, 0])


def after_learning(vector):
    def small_loss(weights):
        return F.cross_entropy(functional_call(double, weights, (x,)), y)

    weights = gb.generate(double_plan, back(vector))
    for _ in range(3):
        slopes = grad(small_loss)(weights)
        weights = {name: w - 0.5 * slopes[name] for name, w in weights.items()}
    return small_loss(weights)


print("gradcheck:", torch.autograd.gradcheck(after_learning, start.requires_grad_()))
