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
# # Many ranks: one genome, few bytes
#
# Data-parallel training sends the gradient of every weight in every step. With a genomic bottleneck, ranks only have
# to agree on the **genome**. This notebook starts two ranks and trains on digits in all placements of the genome (the
# ways to distribute a genome over ranks). The notebook shows that two ranks find the same genome as one process, and
# counts the bytes that the ranks send.

# %%
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
from safetensors.torch import load_file

from gbfunc.plots import LINES, PALETTE

# %% [markdown]
# ## The script
#
# `torchrun` starts a script like the next one on every rank. Three changes make a script for one process a script for
# many ranks: the mesh, `mesh=` in `make_train_step`, and `mesh.shard_batch`, which selects a rank's rows of the
# *global* batch. Without `torchrun`, the script runs as one process.

# %%
SCRIPT = """
import json, sys
from pathlib import Path
import torch, torch.nn as nn, torch.nn.functional as F
from sklearn.datasets import load_digits
import gbfunc as gb

folder, patience, placements = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
torch.set_num_threads(1)
digits = load_digits()
x, y = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
loss_fn = lambda net, batch: F.cross_entropy(net(batch[0]), batch[1])

def train(mesh, placement):
    torch.manual_seed(0)                                       # the same p-net and plan on every rank
    pnet = nn.Sequential(nn.Linear(64, 800), nn.ReLU(), nn.Linear(800, 10)).double()
    plan = gb.make_plan(pnet, gb.periodic(features=4), max_tile=(200, 64), rules=[(r"0[.]bias", gb.constant(0.0))])
    optimizer = gb.torch_optimizer(torch.optim.Adam, lr=2e-2)
    train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer, mesh=mesh, placement=placement)
    gnet_params = train_step.init(seed=0)
    held = sum(leaf.numel() for leaves in gnet_params.gnets.values() for leaf in leaves.values())
    losses, shuffle = [], torch.Generator().manual_seed(0)
    for _ in range(3):
        for rows in torch.randperm(len(x), generator=shuffle).split(100):
            before = mesh.traffic.total()
            gnet_params, info = train_step(gnet_params, mesh.shard_batch((x[rows], y[rows])))
            losses.append(float(info.loss))
            sent = mesh.traffic.total() - before
    whole = train_step.gather(gnet_params)
    if mesh.rank == 0:
        gb.save(folder / f"{placement}.safetensors", plan, whole)
    found = {"losses": losses, "sent": sent, "held": held, "genome": plan.genome_params, "pnet": plan.pnet_params}
    (folder / f"{placement}-{mesh.rank}.json").write_text(json.dumps(found))

with gb.mesh(timeout=patience, init_method=f"file://{folder / 'store'}") as mesh:
    for placement in placements:
        train(mesh, placement)
"""
PATIENCE = 100.0


def run(ranks, *placements):
    """What so many processes find in each placement: rank 0's report, and the leaves of the genome by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.py").write_text(SCRIPT)
        command = [sys.executable, str(folder / "script.py"), name, str(PATIENCE), *placements]
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
        reports = [json.loads((folder / f"{p}-0.json").read_text()) for p in placements]
        return [(r, load_file(folder / f"{p}.safetensors")) for p, r in zip(placements, reports, strict=True)]


placements = ("replicated", "sharded", "factors")
(single,) = run(1, "replicated")
runs = {"one process": single}
runs |= {f"2 ranks, {p}": found for p, found in zip(placements, run(2, *placements), strict=True)}
alone, genome = runs["one process"]
print(f"p-net of {alone['pnet']:,} weights from a genome of {alone['genome']} parameters")

# %% [markdown]
# ## The same genome
#
# * *Replicated*: every rank generates every weight.
# * *Sharded*: each rank stores half of the genome and of the optimizer's state, and generates half of the tiles. Then
#   the ranks gather all tiles, inside the same autograd graph.
# * *Factors*: as sharded, but the ranks gather the thin factors of the tiles instead of the tiles.
#
# The placement does not change the result, up to rounding. Training amplifies rounding errors. Therefore the script
# computes in double precision, in which the rounding errors stay small.

# %%
for label, (found, other) in runs.items():
    apart = max(float((other[k] - leaf).abs().max()) for k, leaf in genome.items() if leaf.is_floating_point())
    assert other.keys() == genome.keys() and apart < 1e-8
    held = f"{found['held']:>4} of {alone['held']} g-net parameters on rank 0"
    print(f"{label:<20} {held}, last loss {found['losses'][-1]:.4f}, largest difference {apart:.0e}")

fig, ax = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
for i, (label, (found, _)) in enumerate(runs.items()):
    wide = {"lw": 5, "alpha": 0.4} if i == 0 else {"lw": 1.6}
    ax.plot(found["losses"], color=PALETTE[i], ls=LINES[i], label=label, **wide)
ax.set(xlabel="step", ylabel="cross entropy of the batch (nats)", title="One training, four ways")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Sent bytes
#
# Each rank counts the bytes that it sends. For comparison, `DistributedDataParallel` of the dense p-net all-reduces
# eight bytes per weight (a double). In a ring of *N* ranks, each rank sends $2 (N - 1) / N$ times these bytes.

# %%
sent = {"DDP, dense p-net\n(arithmetic)": 2 * (2 - 1) / 2 * 8 * alone["pnet"]}
sent |= {label.replace(", ", ",\n"): found["sent"] for label, (found, _) in runs.items() if label != "one process"}
ddp = next(iter(sent.values()))

fig, ax = plt.subplots(figsize=(6.5, 3.2), layout="constrained")
bars = ax.bar(list(sent), list(sent.values()), color=[PALETTE[6], *PALETTE[1:4]])
ax.bar_label(bars, [f"{n:,.0f}" + (f"\n({n / ddp:.1%} of DDP)" if n != ddp else "") for n in sent.values()])
ax.set(ylabel="bytes a rank sends in a step", yscale="log", title="Traffic of one training step on 2 ranks")
ax.set_ylim(1e3, 3e6)
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# With the replicated placement, the ranks send the genome's gradient. At a compression of 20, for example, the ranks
# therefore send 20 times fewer bytes than with DDP. With the sharded placement, the ranks send the generated weights
# and the gradients of these weights, about as many bytes as DDP. The sharded placement is for genomes that are too
# large for one rank, or too expensive to generate on one rank. `placement="auto"`, the default, estimates the bytes
# and operations of the placements, and takes the cheapest placement.
