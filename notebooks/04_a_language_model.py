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
# # A language model generated from a genome
#
# A small GPT learns to predict the next character in the English text of Python's own help. The file of the GPT
# stores a genome of 81 kB, which generates the GPT's matrices. For comparison, two dense nets learn on the same
# batches: the same GPT, and a narrower GPT whose *file* is as large as the genome's file.

# %%
# %matplotlib inline
import math
import os
import tempfile
from itertools import islice
from pathlib import Path

import torch

import gbfunc as gb
from gbfunc.plots import learning_curve, weight_images
from gbfunc.tasks import TASKS, continue_text, endless_batches, token_loss
from gbfunc.tasks.pnets import PNETS, narrowed

task = TASKS["text"]()
gpt = PNETS["gpt"](task.interface, layers=2, width=96)
print(f"{len(task.train.tokens):,} characters to learn from, {len(task.val.tokens):,} to judge by,")
print(f"{task.interface.outputs} different ones; the model sees {task.interface.inputs[0]} at a time")
print(task.decode(task.val.tokens[300:520].tolist()))

# %% [markdown]
# ## The plan
#
# The blocks of a Transformer have the same structure. With `gb.periodic(share="layers")`, matrices with the same role
# in different blocks share *code weights*, the frequencies of the sines. Each tile only has its own linear
# coefficients, two per sine. G-nets also generate the embedding of positions. The embedding of characters is direct
# and takes half of this genome, because neighbouring characters of the alphabet do not have similar embeddings.
#
# With fewer than 30,000 parameters, a genome of `gbfunc train` stores the embedding as a product of two thin
# matrices, and keeps the parameters of norms constant. These defaults give a lower loss after 2,000 steps, but a
# higher loss after the 600 steps of this notebook. The plan of this notebook is therefore made as for a genome of
# 31,000 parameters.

# %%
net = gpt.build(seed=0)
plan = gb.make_plan(net, genome_params=20_000, **gpt.plan(31_000)._replace(exclude=("tokens",))._asdict())
print(plan.report())

# %% [markdown]
# ## Train
#
# The same training step also trains the dense nets, with a plan that generates no tensors. For each of the three
# networks, the learning rate is the rate with the lowest validation loss among the rates tried.

# %%
STEPS = 200 if "CI" in os.environ else 600  # fewer where it is run to see that it runs
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)


def train(pnet, plan, lr, direct_lr=None):
    """Train; give the file, the history and what it writes before and after."""

    def one_cycle(peak):
        schedule = torch.optim.lr_scheduler.OneCycleLR
        return gb.torch_schedule(schedule, peak, STEPS, total_steps=STEPS, pct_start=0.1, cycle_momentum=False)

    net = pnet.build(seed=0)
    direct = dict(lr=one_cycle(direct_lr or lr))
    adam = gb.torch_optimizer(torch.optim.Adam, lr=one_cycle(lr), betas=(0.9, 0.99), direct=direct)
    train_step = gb.make_train_step(plan, net, token_loss, adam, donate=True, clip_norm=1.0)
    state, history, losses = train_step.init(seed=0), [], []
    before = gb.materialize(plan, state, net).eval()
    batches = endless_batches(task.train, 12, torch.Generator().manual_seed(0))
    for step, batch in enumerate(islice(batches, STEPS), 1):
        state, info = train_step(state, batch)
        losses.append(info.loss)
        if step % 100 == 0:
            grown = gb.materialize(plan, state, net).eval()
            val_loss = task.evaluate(grown, task.val)["loss"]
            train_loss = float(torch.stack(losses[-100:]).mean())
            history.append(dict(epoch=0.5, step=step, train_loss=train_loss, val_loss=val_loss))
    path = folder / f"{len(list(folder.iterdir()))}.safetensors"
    gb.save(path, plan, state)
    return path, history, before


def dense(pnet):
    return gb.make_plan(pnet.build(seed=0), rules=[(".", None)])


small = narrowed(gpt, plan.genome_params)
runs = {
    "genome": (gpt, *train(gpt, plan, lr=2e-2, direct_lr=8e-3)),
    "dense, as many bytes": (small, *train(small, dense(small), lr=4e-3)),
    "dense, the same GPT": (gpt, *train(gpt, dense(gpt), lr=8e-3)),
}
print(f"{'':<24}{'bytes on disk':>14}{'validation loss':>18}{'bits a character':>18}")
for label, (_, path, history, _) in runs.items():
    loss = history[-1]["val_loss"]
    print(f"{label:<24}{path.stat().st_size:>14,}{loss:>13.3f} nats{loss / math.log(2):>18.3f}")

# %%
learning_curve({label: history for label, (_, _, history, _) in runs.items()}, "loss", "nats")

# %% [markdown]
# ## Write
#
# Each network writes text twice: before the training, and after the training from its file. To write text from a
# file, only the code of the network and the alphabet are needed in addition to the file.

# %%
prompt = "An object "
before = runs["genome"][3]
print("--- genome, untrained:", prompt + continue_text(before, task, prompt, 120), sep="\n")
for label, (pnet, path, _, _) in runs.items():
    grown = gb.materialize(*gb.load(path), pnet.build(seed=1)).eval()
    text = continue_text(grown, task, prompt, 300, temperature=0.7, seed=0)
    print(f"\n--- {label}, {path.stat().st_size:,} bytes:", prompt + text, sep="\n")

# %% [markdown]
# ## The generated weights
#
# The figure shows the matrices of queries, keys and values (96 rows each) of the generated GPT and of the dense GPT.
# In both networks, the matrix of values has the smallest weights.

# %%
names = ["blocks.0.qkv.weight", "blocks.1.qkv.weight"]
shown = {}
for name, label in (("generated", "genome"), ("dense", "dense, the same GPT")):
    weights = gb.generate(*gb.load(runs[label][1]))
    shown[name] = {matrix: weights[matrix] for matrix in names}
weight_images(shown)

# %% [markdown]
# `gbfunc train --task text` trains a GPT with four layers of width 128. The page [language](results/language.md) has
# the results of this GPT on tiny shakespeare, and the settings that were tried and rejected.
