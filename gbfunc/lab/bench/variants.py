"""From a case and the name of a variant to a function that does one step of it."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.generate import Generator
from gbfunc.lab.bench.cases import VARIANTS, Case
from gbfunc.lab.bench.naive import NaiveGenerator
from gbfunc.plan import Plan
from gbfunc.pnet import PureNet
from gbfunc.types import GNets, Params

Step = Callable[[], Any]
"""One step; what it changes, it keeps."""

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, of equal first dimension."""


class Setting(NamedTuple):
    """Where to measure.

    Attributes:
        device: of the p-net and its batch.
        amp: dtype of the p-net's autocast, for every variant alike; None is float32.
        threads: of the CPU.
        lr: learning rate, so small that a net stays as it was drawn: one that has learnt its only batch has denormal
            gradients, which are slow.
    """

    device: torch.device
    amp: torch.dtype | None
    threads: int
    lr: float = 1e-8


class Built(NamedTuple):
    """A variant, ready to run.

    Attributes:
        step: one step.
        weights: weights of the matrices that are generated, or trained themselves in the dense p-net.
        features: size of their g-nets; 0 where there are none.
    """

    step: Step
    weights: int
    features: int


def loss_fn(net: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Mean cross entropy of classes [B] or of tokens [B, L]."""
    x, target = batch
    scores = net(x)
    return F.cross_entropy(scores.flatten(0, -2), target.flatten())


def build(case: Case, variant: str, setting: Setting) -> Built:
    """Make a variant of a case.

    Raises:
        ValueError: if the case has no genome for it.
    """
    gnets, options = VARIANTS[variant]
    if not gnets:
        net = _net(case, setting)
        return Built(_dense(net, case, setting), sum(p.numel() for p in net.parameters() if p.ndim > 1), 0)
    genes = case.periodic if gnets == "periodic" else case.relu
    if genes is None:
        raise ValueError(f"{case.name} has no {gnets} g-nets for the variant {variant!r}")
    pnet = _net(case, setting)
    plan = gb.make_plan(pnet, genes.hypernet, max_tile=genes.max_tile, include=genes.include)
    numel = sum(t.numel for t in plan.generated)
    if case.kind == "generation":
        step = _generation(plan, variant, setting.device)
    elif variant == "naive":
        step = _naive(plan, pnet, case, setting)
    else:
        save = variant == "periodic saved"
        step = genome_step(plan, pnet, _batch(case, setting), setting.lr, save=save, amp=setting.amp, **options)
    return Built(step, numel, genes.hypernet.size or 0)


def _net(case: Case, setting: Setting) -> nn.Module:
    """The p-net, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return case.net().to(setting.device)


def _batch(case: Case, setting: Setting) -> Batch:
    x, target = case.batch()
    return x.to(setting.device), target.to(setting.device)


def _autocast(setting: Setting) -> torch.autocast:
    return torch.autocast(setting.device.type, setting.amp, enabled=setting.amp is not None)


def plain_step(loss: Callable[[], Tensor], leaves: Iterable[Tensor], lr: float) -> Step:
    """The loop that anyone would write: a loss, its gradients, a step of AdamW."""
    optimizer = torch.optim.AdamW(leaves, lr=lr, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def _dense(net: nn.Module, case: Case, setting: Setting) -> Step:
    """The p-net itself."""
    batch = _batch(case, setting)

    def loss() -> Tensor:
        with _autocast(setting):
            return loss_fn(net, batch)

    return plain_step(loss, net.parameters(), setting.lr)


def genome_step(plan: Plan, pnet: nn.Module, batch: Batch, lr: float, *, save: bool = False, **options: Any) -> Step:
    """The library's training step with such options, its state donated as the command line does.

    Args:
        plan: the plan.
        pnet: the p-net.
        batch: the one batch.
        lr: learning rate.
        save: begin to write a checkpoint before every step; it waits for the one before if that is not on disk yet.
        options: of `make_train_step`.
    """
    optimizer = gb.torch_optimizer(torch.optim.AdamW, lr=lr)
    train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer, donate=True, **options)
    state = train_step.init(seed=0)
    folder = tempfile.mkdtemp(prefix="gbfunc-bench-") if save else ""
    checkpointer = gb.Checkpointer(folder, train_step) if save else None

    def step() -> Tensor:
        nonlocal state
        if checkpointer is not None:
            checkpointer.save(state)
        state, info = train_step(state, batch)
        return info.loss

    if checkpointer is not None:
        weakref.finalize(step, _clear, checkpointer, folder)
    return step


def _clear(checkpointer: gb.Checkpointer, folder: str) -> None:
    checkpointer.close()
    shutil.rmtree(folder)


def _naive(plan: Plan, pnet: nn.Module, case: Case, setting: Setting) -> Step:
    """The same with the code of every single weight, without the library's step."""
    batch, net = _batch(case, setting), PureNet(pnet)
    generator = NaiveGenerator(plan, plan.dtype, setting.device)
    gnets, direct, buffers = gb.init_genome(plan, pnet, 0)
    leaves = [leaf.requires_grad_() for part in (*gnets.values(), direct) for leaf in part.values()]

    def loss() -> Tensor:
        weights = generator(gnets, direct)
        with _autocast(setting):
            return loss_fn(lambda x: net(weights, buffers, x), batch)

    return plain_step(loss, leaves, setting.lr)


def _generation(plan: Plan, variant: str, device: torch.device) -> Step:
    """All weights from the leaves, and the leaves' gradients from a fixed cotangent of the weights."""
    gnets = random_leaves(plan, device)
    if variant == "naive":
        make: Callable[[GNets, Params], Params] = NaiveGenerator(plan, plan.dtype, device)
    else:
        kernel: Any = VARIANTS[variant].options.get("kernel", "auto")
        make = Generator(plan, kernel=kernel)
    leaves = [leaf for leaves in gnets.values() for leaf in leaves.values()]
    cotangents = [torch.ones(t.shape, dtype=plan.dtype, device=device) for t in plan.generated]

    def step() -> object:
        weights = make(gnets, {})
        return torch.autograd.grad([weights[t.name] for t in plan.generated], leaves, cotangents)

    return step


def random_leaves(plan: Plan, device: torch.device) -> GNets:
    """Normal leaves for every ensemble, for which no weight is generated; they require grad."""
    draw = torch.Generator().manual_seed(0)
    return {
        e.name: {
            k: torch.randn(shape, dtype=plan.dtype, generator=draw).to(device).requires_grad_()
            for k, shape in e.shapes.items()
        }
        for e in plan.ensembles
    }
