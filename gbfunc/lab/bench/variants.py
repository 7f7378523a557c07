"""From a case and the name of a variant to a function that does one step of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.generation import make_generator
from gbfunc.hypernets import Hypernet
from gbfunc.hypernets.mlp import GNet
from gbfunc.lab.bench.cases import Batch, Case, Genes
from gbfunc.lab.bench.jax_steps import jax_step
from gbfunc.plan import Plan
from gbfunc.tasks.pnets.base import seeded
from gbfunc.trees import flat_genome
from gbfunc.types import Params

Step = Callable[[], Any]
"""One step, which keeps its own state."""


class Setting(NamedTuple):
    """Where to measure."""

    device: torch.device  # of the p-net and its batch
    amp: torch.dtype | None  # dtype of the p-net's autocast, for every variant alike; None is float32
    threads: int  # of the CPU
    # Too small a learning rate to learn: a net that fits its only batch has denormal gradients, which are slow.
    lr: float = 1e-8


class Setup(NamedTuple):
    """The inputs of a variant."""

    case: Case
    plan: Any  # None for the dense p-net
    pnet: nn.Module
    batch: Batch
    setting: Setting


class Built(NamedTuple):
    """A variant, ready to run."""

    step: Step
    weights: int  # of the matrices that are generated, or trained themselves in the dense p-net
    features: int  # most of their g-nets; 0 where there are none


class Variant(NamedTuple):
    """A way to run a case."""

    gnets: Literal["periodic", "relu", ""]  # the case's genome; "" is the dense p-net
    make: Callable[[Setup], Step]


def loss_fn(net: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    """Compute the mean cross entropy of classes [B] or of tokens [B, L]."""
    x, target = batch
    loss: Any = F.cross_entropy(net(x).flatten(0, -2), target.flatten())
    # The loss of logits that are split over ranks is a DTensor, whole on each.
    return loss.to_local() if hasattr(loss, "to_local") else loss


def plain_step(loss: Callable[[], Tensor], leaves: Iterable[Tensor] | list[dict[str, Any]], lr: float) -> Step:
    """Make the loop that anyone would write: a loss, its gradients, a step of AdamW."""
    optimizer = torch.optim.AdamW(leaves, lr=lr, fused=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def _plain(setup: Setup, net: nn.Module) -> Step:
    def loss() -> Tensor:
        with torch.autocast(setup.setting.device.type, setup.setting.amp, enabled=setup.setting.amp is not None):
            return loss_fn(net, setup.batch)

    return plain_step(loss, [p for p in net.parameters() if p.requires_grad], setup.setting.lr)


def genome_step(plan: Plan, pnet: nn.Module, batch: Batch, lr: float, **options: Any) -> Step:
    """Make the library's training step with these options; its state is donated unless they differ."""
    optimizer = gb.torch_optimizer(torch.optim.AdamW, lr=lr)
    train_step = gb.make_train_step(plan, pnet, loss_fn, optimizer, **{"donate": True, **options})
    state = train_step.init(seed=0)

    def step() -> Tensor:
        nonlocal state
        state, info = train_step(state, batch)
        return info.loss

    return step


def _genome(setup: Setup, **options: Any) -> Step:
    """Make a training step, or for a case of generation all weights and the leaves' gradients from ones."""
    _, plan, pnet, batch, setting = setup
    if not setup.case.generation:
        return genome_step(plan, pnet, batch, setting.lr, amp=setting.amp, **options)
    leaves = flat_genome(gb.init_genome(plan, pnet, 0)._replace(direct={}))
    trained = [x.requires_grad_() for x in leaves.values()]
    make = make_generator(plan, kernel=options.get("kernel", "auto"))
    cotangents = [torch.ones(t.shape, dtype=plan.dtype, device=setting.device) for t in plan.generated]

    def step() -> object:
        weights = make(leaves)
        return torch.autograd.grad([weights[t.name] for t in plan.generated], trained, cotangents)

    return step


@dataclass(frozen=True)
class NaiveGNet(GNet):
    """A ReLU g-net of one layer, applied to the code of every single weight; backward keeps all activations.

    This is the arithmetic of the published implementations.
    """

    def matrix(self, *args: Any) -> None:  # noqa: D102
        return None

    def tiles(self, leaves: Params, row_Urp: Tensor, col_Ucq: Tensor, *unused: Any) -> Any:  # noqa: D102
        return Hypernet.tiles(self, leaves, row_Urp, col_Ucq, None, "auto")

    def apply(self, leaves: Params, row_rp: Tensor, col_cq: Tensor, **unused: Any) -> Tensor:  # noqa: D102
        shape = len(row_rp), len(col_cq), -1
        codes_rcb = torch.cat([row_rp[:, None].expand(shape), col_cq[None].expand(shape)], -1)
        weight_bH = torch.cat([leaves["row_weight"], leaves["col_weight"]])
        return torch.relu(codes_rcb @ weight_bH + leaves["bias"]) @ leaves["out_weight"] + leaves["out_bias"]


def _population(setup: Setup, *, together: bool) -> Step:
    """Make a step of 16 genomes, in one call or one after the other."""
    optimizer = gb.torch_optimizer(torch.optim.AdamW, lr=setup.setting.lr)
    train_step = gb.make_train_step(setup.plan, setup.pnet, loss_fn, optimizer, donate=True, amp=setup.setting.amp)
    many = gb.population(train_step, 16)
    all_states, states = many.init(), [train_step.init(seed=i) for i in range(16)]

    def at_once() -> Tensor:
        nonlocal all_states
        all_states, info = many(all_states, setup.batch)
        return info.loss.mean()

    def one_by_one() -> Tensor:
        losses = []
        for i, state in enumerate(states):
            states[i], info = train_step(state, setup.batch)
            losses.append(info.loss)
        return torch.stack(losses).mean()

    return at_once if together else one_by_one


def _periodic(**options: Any) -> Variant:
    return Variant("periodic", partial(_genome, **options))


VARIANTS: Mapping[str, Variant] = {
    "dense": Variant("", lambda setup: _plain(setup, setup.pnet)),
    "periodic materialised": _periodic(lazy=False),
    "periodic lazy": _periodic(lazy=True),
    "periodic auto": _periodic(lazy="auto"),
    "periodic without donate": _periodic(lazy="auto", donate=False),
    "periodic module": Variant("periodic", lambda setup: _plain(setup, gb.GenomeModule(setup.plan, setup.pnet))),
    "periodic compiled step": _periodic(lazy="auto", compile=True),
    "periodic remat generate": _periodic(lazy=False, remat="generate"),
    "periodic remat layer": _periodic(lazy=False, remat="layer"),
    "relu eager": Variant("relu", partial(_genome, kernel="eager")),
    "relu compiled": Variant("relu", partial(_genome, kernel="compiled")),
    "naive": Variant("relu", partial(_genome, kernel="eager", lazy=False)),
    "16 genomes together": Variant("periodic", partial(_population, together=True)),
    "16 genomes one by one": Variant("periodic", partial(_population, together=False)),
    "jax dense": Variant("periodic", partial(jax_step, thin=False)),
    "jax thin": Variant("periodic", partial(jax_step, thin=True)),
    "jax thin transposed": Variant("periodic", partial(jax_step, thin=True, transposed=True)),
}
"""Every variant by name. "naive" has the g-nets of `NaiveGNet`; "periodic module" is a `gb.GenomeModule` with torch's
AdamW."""


def first_net(case: Case) -> nn.Module:
    """Make the p-net, the same each time."""
    with seeded(0):
        return case.net()


def plan_of(pnet: nn.Module, genes: Genes, **options: Any) -> Plan:
    """Plan a case's genome, with more options of `make_plan`."""
    return gb.make_plan(pnet, genes.hypernet, **genes.options, **options)


def why_not(case: Case, setting: Setting) -> str:
    """Say why a case cannot be measured here; "" where it can."""
    if not any(variant.startswith("jax") for variant in case.variants):
        return ""
    if find_spec("optax") is None:
        return f"{case.name}: not measured, pip install optax"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cores != setting.threads:
        run = "taskset -c 0 gbfunc bench --threads 1"
        return f"{case.name}: not measured, JAX would use {cores} cores and torch {setting.threads} threads: {run}"
    return ""


def build(case: Case, variant: str, setting: Setting) -> Built:
    """Make a variant of a case."""
    gnets, make = VARIANTS[variant]
    pnet, (x, target) = first_net(case).to(setting.device), case.batch()
    batch = x.to(setting.device), target.to(setting.device)
    if not gnets:
        weights = sum(p.numel() for p in pnet.parameters() if p.ndim > 1)
        return Built(make(Setup(case, None, pnet, batch, setting)), weights, 0)
    genes: Genes | None = getattr(case, gnets)
    if genes is None:
        raise ValueError(f"{case.name} has no {gnets} g-nets for the variant {variant!r}")
    if variant == "naive" and isinstance(genes.hypernet, GNet):
        genes = genes._replace(hypernet=NaiveGNet(genes.hypernet.hidden))
    plan = plan_of(pnet, genes)
    size = max(slot.hypernet.size or 0 for t in plan.generated for slot in t.slots)
    return Built(make(Setup(case, plan, pnet, batch, setting)), sum(t.numel for t in plan.generated), size)
