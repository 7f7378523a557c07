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
# # Evolution
#
# Evolution copies genomes with random changes and keeps the genomes with the best results, without gradients. The
# cost of evolution strategies grows with the number of searched parameters. A genome has only a few hundred numbers,
# also for a large network, so evolution strategies can search for a genome. The algorithms come from
# [EvoTorch](https://docs.evotorch.ai) (`pip install 'gbfunc[evolve]'`). `GenomeProblem` makes an EvoTorch problem
# from a plan, a p-net and a loss function. [`results/evolution.md`](results/evolution.md) has complete tables.

# %%
# %matplotlib inline
import logging
import os
import time

import matplotlib.pyplot as plt
import torch
from evotorch.algorithms import CMAES, PGPE, SNES
from results.subspace import Projection
from torch import nn

import gbfunc as gb
from gbfunc.evolution import ControlProblem, GenomeProblem
from gbfunc.plots import LINES, MARKERS, PALETTE
from gbfunc.tasks import accuracy, endless_batches, find_task, loss_fn

torch.set_num_threads(1)
logging.getLogger("evotorch").setLevel(logging.WARNING)
task = find_task("digits", None, {})


def batches(seed=0):
    """Images with noise, without end: a generation is judged by one batch, the same for all its members."""
    draws = torch.Generator().manual_seed(seed)
    for x, y in endless_batches(task.train, 128, draws):
        yield x + 0.4 * torch.randn(x.shape, generator=draws), y


# %% [markdown]
# ## A genome is a solution
#
# EvoTorch searches for a vector `z`, which stands for the genome `start + steps * z`. `steps` sets how much code
# weights, linear coefficients and direct parameters change when `z` changes by 1, as fractions of their initial
# standard deviations. Therefore the initial standard deviation of `z` can be 1 in every algorithm.
#

# %%
small = task.with_pnet(task.pnet.scaled(64 / 1100))
pnet = small.build(seed=0)
plan = small.plan(pnet, genome_params=450)
steps = {"code": 0.15, "linear": 0.15, "direct": 0.15}
problem = GenomeProblem(plan, pnet, loss_fn, batches(), steps=steps)
searcher = PGPE(
    problem, popsize=96, center_learning_rate=0.3, stdev_learning_rate=0.1, stdev_init=1.0, optimizer="adam"
)
searcher.run(3)
net = problem.net(searcher.status["center"])
print(f"{problem.solution_length} numbers for {sum(p.numel() for p in net.parameters()):,} weights")
print(f"after {problem.evaluations} evaluations: {accuracy(net, task.test):.1%} of the test images")

# %% [markdown]
# One `vmap` generates and evaluates a population. The next cell compares the losses with the losses of a loop, which
# calls `generate`, the p-net and the loss function for each member.

# %%
z = torch.randn(256, problem.solution_length, generator=torch.Generator().manual_seed(0))
batch = next(batches())


def one(z):
    weights = gb.generate(plan, problem.genome(z))
    with torch.no_grad():
        return loss_fn(lambda x: torch.func.functional_call(pnet, weights, (x,)), batch)[0]


def milliseconds(call):
    spent = []
    for _ in range(3):
        start = time.process_time()
        call()
        spent.append(time.process_time() - start)
    return 1e3 * min(spent)


together, apart = problem.losses(z, batch), torch.stack([one(row) for row in z])
print(f"largest difference of a loss: {float((together - apart).abs().max()):.0e}")
vmapped, looped = milliseconds(lambda: problem.losses(z, batch)), milliseconds(lambda: [one(row) for row in z])
print(f"256 members: {looped:.0f} ms one by one, {vmapped:.0f} ms together: {looped / vmapped:.1f} times faster")

# %% [markdown]
# ## At equal evaluations
#
# One algorithm, with equal populations and batches, searches for four kinds of solutions:
#
# * the genome;
# * the p-net's weights (a plan in which every tensor is direct);
# * the weights of a small net with as many numbers as the genome;
# * a random subspace of the p-net's weights with as many numbers as the genome.
#
# Each search uses the step size, 0.05 or 0.15, with the best final accuracy on validation images.

# %%
MEMBERS, GENERATIONS = 96, 40 if "CI" in os.environ else 160  # fewer where it is run to see that it runs


def own_weights(net):
    return gb.make_plan(net, rules=[(".*", None)])


def searched(what, step, algorithm="PGPE"):
    """A problem of this kind, and its search: evaluations so far and accuracy (%) on test images."""
    fitting = small if what != "small net" else task.with_pnet(task.pnet.scaled(5 / 1100))
    net, subspace = fitting.build(seed=0), None
    plan = fitting.plan(net, genome_params=450) if what == "genome" else own_weights(net)
    if what == "random subspace":
        drawn = Projection(450, plan.genome_params, seed=0)
        subspace = 450, lambda z: drawn(z) * (drawn.D / drawn.d) ** 0.5
    one_step = dict.fromkeys(steps, step)
    problem = GenomeProblem(plan, net, loss_fn, batches(), steps=one_step, subspace=subspace)
    if algorithm == "PGPE":
        rates = {"center_learning_rate": 0.3, "stdev_learning_rate": 0.1, "optimizer": "adam"}
        searcher = PGPE(problem, popsize=MEMBERS, stdev_init=1.0, **rates)
    else:
        searcher = {"SNES": SNES, "CMA-ES": CMAES}[algorithm](problem, popsize=MEMBERS, stdev_init=1.0)
    evaluations, scores = [], []
    for generation in range(1, GENERATIONS + 1):
        searcher.step()
        if generation % 20 == 0:
            evaluations.append(problem.evaluations)
            scores.append(100 * accuracy(problem.net(searcher.status["center"]), task.test))
    return accuracy(problem.net(searcher.status["center"]), task.val), problem, evaluations, scores


WHAT = ("genome", "dense weights", "small net", "random subspace")
runs = {(w, "PGPE"): max((searched(w, step) for step in (0.05, 0.15)), key=lambda run: run[0]) for w in WHAT}
runs |= {("genome", algorithm): searched("genome", 0.15, algorithm) for algorithm in ("SNES", "CMA-ES")}

fig, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharey=True)
for i, ((what, algorithm), (_, problem, evaluations, scores)) in enumerate(runs.items()):
    panels = [axes[0]] * (algorithm == "PGPE") + [axes[1]] * (what == "genome")
    for ax in panels:
        label = f"{what}: {problem.solution_length:,} numbers" if ax is axes[0] else algorithm
        style = {"color": PALETTE[i], "linestyle": LINES[i % 4], "marker": MARKERS[i], "markersize": 3}
        ax.plot([n / 1000 for n in evaluations], scores, label=label, **style)
    print(f"{what:<16} {algorithm:<7} {problem.solution_length:>6,} numbers: {scores[-1]:.1f} %")
axes[0].set(ylabel="test accuracy (%)", title="what is searched (PGPE)")
axes[1].set(title="by which algorithm (genome)")
for ax in axes:
    ax.set(xlabel="thousands of evaluations")
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# After few evaluations, the p-net's 4,810 weights have the highest accuracy, then the random subspace of the weights,
# then the genome. The small net with as many numbers as the genome has the lowest accuracy. A mutation of dense
# weights changes all weights slightly, and many such changes improve the net. A mutation of a genome changes
# frequencies and phases, so similar genomes may have very different losses. The advantage of the genome is its size:
# the result is stored in 448 numbers. After 128,000 evaluations, the accuracies of the genome and of the dense
# weights differ by less than one percentage point (see the tables).
#
# ## Acting
#
# `ControlProblem` maximizes the return of episodes instead of minimizing a loss. All members act at the same time, in
# one vectorized environment of gymnasium.

# %%
torch.manual_seed(0)
layers = [
    nn.Linear(4, 32, bias=False),
    nn.Tanh(),
    nn.Linear(32, 32, bias=False),
    nn.Tanh(),
    nn.Linear(32, 2, bias=False),
]
actor = nn.Sequential(*layers)
actor_plan = gb.make_plan(actor, gb.periodic(), genome_params=120)
acting = ControlProblem(actor_plan, actor, "CartPole-v1", episodes=1, steps=dict.fromkeys(steps, 0.3))
searcher = PGPE(acting, popsize=32, center_learning_rate=0.3, stdev_learning_rate=0.1, stdev_init=1.0, optimizer="adam")
for generation in range(1, 21):
    searcher.step()
    if generation % 4 == 0:
        center = searcher.status["center"].clone().as_subclass(torch.Tensor)
        returns = acting.returns(center[None], episodes=20, seed=1)
        print(f"generation {generation:>2}: mean return {returns.mean():.0f} over 20 fresh episodes")
print(f"{acting.solution_length} numbers, {acting.env_steps:,} steps of environments; 500 is the most there is")
