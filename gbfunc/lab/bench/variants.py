"""From a case and the name of a variant to a function that does one step of it."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.generate import make_generator
from gbfunc.lab.bench.adapters import ADAPTERS, Batch, Step, plain_step
from gbfunc.lab.bench.cases import VARIANTS, Case, Genes
from gbfunc.lab.bench.jax_steps import jax_step
from gbfunc.lab.bench.naive import NaiveGenerator
from gbfunc.plan import Plan
from gbfunc.pnet import PureNet
from gbfunc.tasks.pnets.base import seeded
from gbfunc.trees import flat_genome


class Setting(NamedTuple):
    """Where to measure."""

    device: torch.device  # of the p-net and its batch
    amp: torch.dtype | None  # dtype of the p-net's autocast, for every variant alike; None is float32
    threads: int  # of the CPU
    # Learning rate, so small that a net stays as it was drawn: one that has learnt its only batch has denormal
    # gradients, which are slow.
    lr: float = 1e-8


class Built(NamedTuple):
    """A variant, ready to run."""

    step: Step
    weights: int  # of the matrices that are generated, or trained themselves in the dense p-net
    features: int  # most of their g-nets; 0 where there are none


def loss_fn(net: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Mean cross entropy of classes [B] or of tokens [B, L]."""
    x, target = batch
    loss: Any = F.cross_entropy(net(x).flatten(0, -2), target.flatten())
    # Of logits that are split over ranks it is a DTensor, whole on each.
    return loss.to_local() if hasattr(loss, "to_local") else loss


def first_net(case: Case) -> nn.Module:
    """The p-net, the same each time."""
    with seeded(0):
        return case.net()


def plan_of(pnet: nn.Module, genes: Genes, **options: Any) -> Plan:
    """The plan of a case's genome, with more options of `make_plan`."""
    return gb.make_plan(pnet, genes.hypernet, **genes.options, **options)


def why_not(case: Case, setting: Setting) -> str:
    """Why a case cannot be measured here; "" where it can."""
    needs = {VARIANTS[variant].needs for variant in case.variants} - {""}
    if missing := sorted(name for name in needs if find_spec(name) is None):
        return f"{case.name}: not measured, pip install {' '.join(missing)}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if "jax" in needs and cores != setting.threads:
        run = "taskset -c 0 gbfunc bench --threads 1"
        return f"{case.name}: not measured, JAX would use {cores} cores and torch {setting.threads} threads: {run}"
    return ""


def build(case: Case, variant: str, setting: Setting) -> Built:
    """Make a variant of a case."""
    gnets, options, _ = VARIANTS[variant]
    pnet, (x, target) = first_net(case).to(setting.device), case.batch()
    batch = x.to(setting.device), target.to(setting.device)

    def loss(net: Callable[[Tensor], Tensor]) -> Tensor:
        with torch.autocast(setting.device.type, setting.amp, enabled=setting.amp is not None):
            return loss_fn(net, batch)

    if not gnets:
        step = plain_step(lambda: loss(pnet), pnet.parameters(), setting.lr)
        return Built(step, sum(p.numel() for p in pnet.parameters() if p.ndim > 1), 0)
    genes: Genes | None = getattr(case, gnets)
    if genes is None:
        raise ValueError(f"{case.name} has no {gnets} g-nets for the variant {variant!r}")
    plan = plan_of(pnet, genes, base="own") if gnets == "adapter" else plan_of(pnet, genes)
    if variant in ADAPTERS:
        return Built(ADAPTERS[variant](plan, pnet, loss, batch, setting.lr), sum(t.numel for t in plan.generated), 0)
    if case.kind == "generation":
        step = _generation(plan, pnet, variant, setting.device)
    elif "genomes" in variant:
        step = _population(plan, pnet, batch, setting, together="together" in variant)
    elif variant.startswith("jax"):
        step = jax_step(plan, pnet, batch, setting.lr, **options)
    elif variant == "periodic module":
        module = gb.GenomeModule(plan, pnet)
        step = plain_step(lambda: loss(module), module.parameters(), setting.lr)
    elif variant == "naive":
        step = _naive(plan, pnet, loss, setting)
    else:
        save = variant == "periodic saved"
        step = genome_step(plan, pnet, batch, setting.lr, save=save, amp=setting.amp, **options)
    size = max(slot.hypernet.size or 0 for t in plan.generated for slot in t.slots)
    return Built(step, sum(t.numel for t in plan.generated), size)


def genome_step(plan: Plan, pnet: nn.Module, batch: Batch, lr: float, *, save: bool = False, **options: Any) -> Step:
    """The library's training step with such options; its state is donated, as by the command line, unless they differ.

    With `save` it begins to write a checkpoint before every step, and waits for the one before if that is not on disk.
    """
    optimizer = gb.torch_optimizer(torch.optim.AdamW, lr=lr)
    train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer, **{"donate": True, **options})
    state, stack = train_step.init(seed=0), ExitStack()
    checkpointer = None
    if save:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gbfunc-bench-"))
        checkpointer = stack.enter_context(gb.Checkpointer(folder, train_step))

    def step() -> Tensor:
        nonlocal state
        if checkpointer is not None:
            checkpointer.save(state)
        state, info = train_step(state, batch)
        return info.loss

    weakref.finalize(step, stack.close)
    return step


def _population(plan: Plan, pnet: nn.Module, batch: Batch, setting: Setting, *, together: bool) -> Step:
    """A step of 16 genomes, in one call or one after the other."""
    optimizer = gb.torch_optimizer(torch.optim.AdamW, lr=setting.lr)
    train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer, donate=True, amp=setting.amp)
    many = gb.population(train_step, 16)
    all_states = many.init()
    states = [train_step.init(seed=i) for i in range(16)]

    def at_once() -> Tensor:
        nonlocal all_states
        all_states, info = many(all_states, batch)
        return info.loss.mean()

    def one_by_one() -> Tensor:
        losses = []
        for i, state in enumerate(states):
            states[i], info = train_step(state, batch)
            losses.append(info.loss)
        return torch.stack(losses).mean()

    return at_once if together else one_by_one


def _naive(plan: Plan, pnet: nn.Module, loss: Callable[..., Tensor], setting: Setting) -> Step:
    """A step that evaluates the g-nets on the codes of every weight, one by one, written without the library's."""
    net, generator = PureNet(pnet), NaiveGenerator(plan, plan.dtype, setting.device)
    genome = gb.init_genome(plan, pnet, 0)
    leaves = {k: x.requires_grad_() for k, x in flat_genome(genome).items()}

    def naive_loss() -> Tensor:
        weights = generator(leaves)
        return loss(lambda x: net(weights, genome.buffers, x))

    return plain_step(naive_loss, [*leaves.values()], setting.lr)


def _generation(plan: Plan, pnet: nn.Module, variant: str, device: torch.device) -> Step:
    """All weights from the leaves, and the leaves' gradients from a fixed cotangent of the weights."""
    leaves = flat_genome(gb.init_genome(plan, pnet, 0)._replace(direct={}))
    trained = [x.requires_grad_() for x in leaves.values()]
    naive, kernel = variant == "naive", VARIANTS[variant].options.get("kernel", "auto")
    make = NaiveGenerator(plan, plan.dtype, device) if naive else make_generator(plan, kernel=kernel)
    cotangents = [torch.ones(t.shape, dtype=plan.dtype, device=device) for t in plan.generated]

    def step() -> object:
        weights = make(leaves)
        return torch.autograd.grad([weights[t.name] for t in plan.generated], trained, cotangents)

    return step
