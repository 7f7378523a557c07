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
# # Many ranks without sending weights
#
# A p-net that is too large for one rank is divided among several ranks. Each rank runs a *piece* of every layer
# (tensor parallelism) or some of the *blocks* (pipeline parallelism). In other libraries, ranks store the weights of
# the pieces, gather the weights, and reduce their gradients. With a genome, weights are never sent: every rank
# generates the weights of the pieces that the rank runs. The ranks send activations, and the gradient of a genome of
# kilobytes.

# %%
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from IPython.display import display
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter
from results.schedules import make_schedule, simulate
from torch import nn

import gbfunc as gb
from gbfunc.generation import generate_piece
from gbfunc.parallel.planner import DeviceSpec
from gbfunc.plots import PALETTE

# %% [markdown]
# ## A layer in two pieces
#
# The layer is `y = relu(x A^T) B^T`. A rank has some hidden units: the rows of `A` (*column parallel*; the name
# refers to the columns of `A^T`) and the columns of `B` (*row parallel*) that belong to these units. The hidden units
# are never gathered, and the output is a sum over ranks. To generate the rows and columns of a rank, only the tiles
# that overlap these rows and columns are needed:

# %%
torch.manual_seed(0)
pnet = nn.Sequential(nn.Linear(96, 128), nn.ReLU(), nn.Linear(128, 96))
plan = gb.make_plan(pnet, gb.periodic(features=4))
genome = gb.init_genome(plan, pnet)
x = torch.randn(64, 96)

halves = [slice(0, 64), slice(64, 128)]
outputs = []
for half in halves:
    A = generate_piece(plan, genome, "0.weight", rows=half)
    B = generate_piece(plan, genome, "2.weight", cols=half)
    outputs.append(torch.relu(x @ A.T + genome.direct["0.bias"][half]) @ B.T)
together = outputs[0] + outputs[1] + genome.direct["2.bias"]
whole = gb.materialize(plan, genome, pnet)(x)
print(f"largest difference between two pieces and the whole: {float((together - whole).abs().max().detach()):.0e}")

# %% [markdown]
# ## Sending the thin product
#
# In this example, the output of the layer has 96 numbers for each row of the batch. With dense weights, the ranks
# send all 96 numbers to sum the output over ranks. A generated matrix is `B = L R^T` with thin factors, so that
# `sum_p x_p B_p^T = (sum_p x_p R_p) L^T`. The ranks sum the *thin* product `x_p R_p`, and each rank multiplies the
# sum by `L^T` afterwards. The ranks then send only eight numbers per row for the output, and eight numbers per row
# for the gradient.
#
# The next script trains the model of torch's example on tensor parallelism, in float64 and on three ranks. The ranks
# get 11, 11 and 10 of the 32 hidden units, and each rank gets a third of the rows (sequence parallel). With
# `torchrun`, the script would start on every rank:

# %%
SCRIPT = """
import json, sys
from pathlib import Path
import torch, torch.nn as nn, torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
import gbfunc as gb

folder, patience = Path(sys.argv[1]), float(sys.argv[2])
torch.set_num_threads(1)

class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.relu, self.out_proj = nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5)
    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))

def train(mesh, lazy):
    torch.manual_seed(0)
    pnet = Toy().double()
    plan = gb.make_plan(pnet, gb.periodic(features=1))
    styles = {"in_proj": ColwiseParallel(input_layouts=Shard(0)), "out_proj": RowwiseParallel(output_layouts=Shard(0))}
    loss_fn = lambda net, batch: F.mse_loss(net(batch[0]), batch[1])
    adam = gb.torch_optimizer(torch.optim.AdamW, lr=0.25)
    step = gb.make_train_step(plan, pnet, loss_fn, adam, mesh=mesh, parallel=styles, lazy=lazy)
    state, axis, losses = step.init(3), mesh.axis("tensor"), []
    for i in range(10):
        draw = torch.Generator().manual_seed(i)
        batch = [torch.randn(60, n, generator=draw, dtype=torch.float64) for n in (10, 5)]
        before = mesh.traffic["tensor"]
        state, info = step(state, tuple(t.chunk(axis.size)[axis.rank] for t in batch))
        losses.append(float(info.loss))
    return {"losses": losses, "activations": mesh.traffic["tensor"] - before, "genome": plan.genome_params}

with gb.mesh(tensor=int(sys.argv[3]), timeout=patience, init_method=f"file://{folder / 'store'}") as mesh:
    found = {str(lazy): train(mesh, lazy) for lazy in (True, False)}
    (folder / f"{mesh.rank}.json").write_text(json.dumps(found))
"""
PATIENCE = 100.0


def run(ranks):
    """What rank 0 of so many finds, with thin products and with whole ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        command = [sys.executable, str(folder / "script.py"), name, str(PATIENCE), str(ranks)]
        one = os.environ | {"OMP_NUM_THREADS": "1"}
        many = one | {"WORLD_SIZE": str(ranks)} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
        envs = [one] if ranks == 1 else [many | {"RANK": str(rank)} for rank in range(ranks)]
        processes = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for env in envs]
        try:
            words = [process.communicate(timeout=PATIENCE)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert not any(process.returncode for process in processes), "\n".join(words)
        return json.loads((folder / "0.json").read_text())


single, triple = run(1), run(3)
for lazy, words in (("True", "thin products"), ("False", "whole ones")):
    apart = max(abs(a - b) for a, b in zip(single[lazy]["losses"], triple[lazy]["losses"], strict=True))
    assert apart < 1e-12
    sent = f"{triple[lazy]['activations']:>6,} bytes of activations per step"
    print(f"{words:<14} {sent}, losses of 10 steps differ from one process by {apart:.0e}")

# %% [markdown]
# ## Numbers sent by each scheme
#
# The table shows how many numbers a rank sends per step, for a layer of width `d`. Thin factors have `k` columns, a
# rank has `T` tokens per step, and there are `N` ranks and a genome of `G` numbers. Ranks sum the layer's output in
# the forward pass, and the gradient of the layer's input in the backward pass. All collectives use rings.
#
# | scheme | activations | weights and their gradients | genome |
# |---|---|---|---|
# | data parallel, dense | | `2 (N-1)/N d^2` | |
# | fully sharded (FSDP) | | `3 (N-1)/N d^2` | |
# | tensor parallel, dense | `4 (N-1)/N T d` | | |
# | tensor parallel, generated | `4 (N-1)/N T k` | **0** | `2 (N-1)/N G` |
# | pipeline, generated | `2 T d` | **0** | `2 (N-1)/N G` |

# %%
d, k, N, G = 4096, 64, 8, 20_000
ring = 2 * (N - 1) / N
tokens = [2**i for i in range(6, 16)]
curves = {
    "FSDP, dense": [1.5 * ring * d * d] * len(tokens),
    "tensor parallel, dense": [2 * ring * t * d for t in tokens],
    "pipeline, generated": [2 * t * d + ring * G for t in tokens],
    "tensor parallel, generated": [2 * ring * t * k + ring * G for t in tokens],
}
fig, ax = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
for i, (label, numbers) in enumerate(curves.items()):
    ax.loglog(tokens, [4 * n / 1e6 for n in numbers], color=PALETTE[i], label=label)
ax.set(xlabel="tokens per rank and step", ylabel="MB sent per layer and step", title=f"{N} ranks, width {d}, {k} thin")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Schedules
#
# The ranks of a pipeline wait while the pipeline fills and drains. This waiting time is the *bubble*.
# `results/schedules.py` simulates a schedule: the script computes when each rank starts and ends each forward and
# backward pass, from given times of these passes. The next cell simulates three schedules:
#
# * **GPipe**: the forward passes of all microbatches, then all backward passes.
# * **1F1B**: one forward pass and one backward pass in turn, which stores fewer activations.
# * **Zero bubble**: the backward pass in two parts, the gradients of activations and the gradients of weights. Ranks
#   that would wait compute the gradients of weights.

# %%
EVENTS = {
    "forward": ("#0072B2", ""),
    "backward": ("#D55E00", ""),
    "backward_input": ("#D55E00", ""),
    "backward_weight": ("#E69F00", ""),
    "loss": ("#000000", ""),
    "update": ("#009E73", ""),
    "generate": ("#56B4E9", ""),
    "generate_backward": ("#CC79A7", ""),
    "all_reduce": ("#444444", ""),
    "all_gather": ("#999999", ""),
    "reduce_scatter": ("#999999", "////"),
    "send": ("#CCCCCC", ""),
    "receive": ("#CCCCCC", "////"),
}


def plot_schedule(timeline, title):
    """Draw what each rank does over time, and below it the memory that each rank holds."""
    n_ranks = len(timeline.ranks)
    figure = Figure(figsize=(9.6, 1.6 + 0.8 * n_ranks), layout="constrained")
    events, memory = figure.subplots(2)
    for axes in (events, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(yticks=range(n_ranks), ylim=(n_ranks - 0.5, -0.5), xlim=(0.0, timeline.duration), ylabel="rank")
    for kind, (color, hatch) in EVENTS.items():
        if same := [s for rank in timeline.ranks for s in rank if s.end > s.start and s.event.kind == kind]:
            starts, widths = [s.start for s in same], [s.end - s.start for s in same]
            style = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
            bars = events.barh([s.rank for s in same], widths, 0.8, starts, label=kind.replace("_", " "), **style)
            # Computation is marked with its microbatch, where there is room.
            marks = [s.event.microbatch if s.end - s.start > 0.007 * timeline.duration else None for s in same]
            marks = ["" if mark is None or kind in ("send", "receive") else str(mark) for mark in marks]
            events.bar_label(bars, marks, label_type="center", color="white", fontsize=7)
    scale = 0.85 / timeline.peak_memory
    for rank, (spans, peak) in enumerate(zip(timeline.ranks, timeline.peaks, strict=True)):
        times = [0.0, *(s.start for s in spans), timeline.duration]
        held = [spans[0].memory, *(s.memory for s in spans), spans[-1].memory]
        tops = [rank + 0.45 - scale * height for height in held]
        memory.fill_between(times, rank + 0.45, tops, step="post", color=PALETTE[0], alpha=0.35, linewidth=0)
        memory.step(times, tops, where="post", color=PALETTE[0], linewidth=0.9)
        words = f"peak {EngFormatter(places=2)(peak)}"
        memory.text(1.01, rank, words, transform=memory.get_yaxis_transform(), fontsize=7, va="center")
    events.set_title(f"{title}: duration {timeline.duration:.4g}, bubble {timeline.bubble:.1%}")
    memory.set_title("memory stored when events start", fontsize=9)
    memory.set_xlabel("time")
    figure.legend(*events.get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=7)
    return figure


for kind in ("gpipe", "1f1b", "zbv"):
    timeline = simulate(make_schedule(kind, layers=8, ranks=4, microbatches=8, weights="generated"))
    display(plot_schedule(timeline, kind))

# %% [markdown]
# The LLM training puzzles (S. Rush, 2023) are exercises on schedules. The next table shows the memory that the
# schedules of these exercises need in three cases: with stored weights, with generated weights that stay in memory,
# and with generated weights that the backward pass generates again:

# %%
print(f"{'schedule':<14} {'stored':>10} {'generated':>10} {'again':>10}   (M numbers, the fullest rank)")
for kind, sizes in {
    "basic": dict(layers=4, microbatches=4),
    "ddp": dict(layers=4, ranks=4),
    "gpipe": dict(layers=8, ranks=4, microbatches=8),
    "1f1b": dict(layers=8, ranks=4, microbatches=8),
}.items():
    peaks = [simulate(make_schedule(kind, weights=w, **sizes)).peak_memory for w in ("stored", "generated", "remat")]
    print(f"{kind:<14} " + " ".join(f"{p / 1e6:>10.2f}" for p in peaks))

# %% [markdown]
# ## The planner
#
# The planner estimates the time, the memory and the traffic of a training step for each way to divide a p-net among
# ranks. The example is a Llama of 7 billion parameters with a genome of 316,160 numbers, on eight accelerators (200
# Tflop/s, 80 GB, links of 100 Gbit/s), with batches of 64 sequences of 2,048 tokens. The planner does not run the
# training: it runs the code of the layers on the meta device, to count operations and sizes. Weights that stay
# factors take few bytes, so most of a rank's memory holds activations.

# %%
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Of the progress bars that it has no use for here.
    from transformers import LlamaConfig, LlamaForCausalLM

with torch.device("meta"):
    llama = LlamaForCausalLM(LlamaConfig()).train()
embeddings = ["embed_tokens", "lm_head"]
plan = gb.make_plan(llama, gb.periodic(32, share="layers"), max_tile=4096, include=embeddings)
batch = torch.zeros(64, 2048, dtype=torch.int64, device="meta")
device = DeviceSpec(flops=200e12, bandwidth=2e12, link=12.5e9, memory=80e9)
layouts = gb.plan_parallel(plan, llama, batch, ranks=8, device=device)

print(f"{'seconds':>8} {'memory':>9} {'sent':>9}   layout")
for found in layouts.fits[:8]:
    sent = sum(found.sent.values())
    print(f"{found.seconds:>8.2f} {found.peak / 1e9:>6.1f} GB {sent / 1e6:>6.0f} MB   {found.layout}")
print(
    f"\ndense FSDP: {sum(layouts.dense.values()) / 1e9:.1f} GB a rank, {layouts.dense_sent / 1e9:.0f} GB sent per step"
)
