"""The genome itself: drawing a fresh one, checking that it fits its plan, and the noise of stochastic g-nets."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gbfunc.hypernets.ensemble import init_leaves
from gbfunc.plan import Ensemble, Plan
from gbfunc.pnet import buffers_of, check_pnet, parameter_infos
from gbfunc.types import Genome, GenomeLike, GNets, Params

Noise = Mapping[str, Params]
"""`{ensemble: {name: [T, ...]}}`: standard normal noise of the stochastic ensembles."""


def codes_of(ensemble: Ensemble, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row codes [U, r, p] and column codes [U, c, q] of an ensemble as tensors."""
    row, col = (torch.from_numpy(codes.copy()).to(device, dtype) for codes in ensemble.codes)
    return row, col


def check_genome(
    plan: Plan, genome: GenomeLike, shapes: Mapping[tuple[str, str], tuple[int, ...]] | None = None
) -> None:
    """Compare names and shapes of a genome with its plan's.

    Args:
        plan: the plan.
        genome: the genome.
        shapes: shapes by (ensemble, leaf) and ("direct", name), where they are those of one rank's part.

    Raises:
        ValueError: naming what is missing, unknown or of a wrong shape.
    """
    expected = plan.leaf_shapes if shapes is None else shapes
    found = {(e, k): tuple(leaf.shape) for e, leaves in genome.gnets.items() for k, leaf in leaves.items()}
    found |= {("direct", name): tuple(leaf.shape) for name, leaf in genome.direct.items()}
    if expected != found:
        missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        wrong = [f"{k} is {found[k]}, expected {s}" for k, s in expected.items() if k in found and found[k] != s]
        hint = ""
        if wrong and not missing and not unknown:
            both = [(found[k], s) for k, s in expected.items() if found[k] != s]
            if all(f[1:] == s[1:] and f[:1] < s[:1] for f, s in both):
                hint = "; a state with fewer tiles is one rank's part: train_step.gather(state) makes it whole"
            elif shapes is not None and found == plan.leaf_shapes:
                hint = "; a whole state becomes this rank's part by train_step.shard(state)"
        raise ValueError(
            f"the genome does not fit the plan: missing {missing}, unknown {unknown}, wrong shape {wrong}{hint}"
        )


def check_plan(plan: Plan, pnet: nn.Module) -> None:
    """Compare names and shapes of a p-net's parameters and buffers with its plan's.

    Raises:
        ValueError: if the plan was made for another p-net, naming what differs, or the p-net is wrapped.
    """
    check_pnet(pnet)
    given = {o.name: tuple(o.tensor.shape) for o in parameter_infos(pnet)}
    given |= {name: tuple(buffer.shape) for name, (buffer, _) in buffers_of(pnet).items()}
    expected = {t.name: t.shape for t in plan.tensors} | {b.name: b.shape for b in plan.buffers}
    if given != expected:
        other = {k: given.get(k) for k in sorted(given.keys() | expected.keys()) if given.get(k) != expected.get(k)}
        raise ValueError(f"the plan was made for another p-net: this one differs in {other}")


def init_genome(plan: Plan, pnet: nn.Module, seed: int = 0, *, device: torch.device | str | None = None) -> Genome:
    """A fresh genome: g-nets drawn from `seed`, direct parameters and buffers as the p-net has them now.

    Direct parameters of a meta-device p-net, which has no values, start at 0 (vectors), 1 (weights of norms) or normal
    with deviation 1 / sqrt(fan_in).

    Args:
        plan: the plan.
        pnet: the p-net that it was made for.
        seed: seed of the g-nets, 0 <= seed < 2**63.
        device: where the genome lives; None is the p-net's own device (the CPU for a meta-device p-net).

    Raises:
        ValueError: if the p-net is not the one of the plan.
    """
    check_plan(plan, pnet)
    owned = {o.name: o for o in parameter_infos(pnet)}
    if device is None:
        first = next((o.tensor.device for o in owned.values()), torch.device("cpu"))
        device = torch.device("cpu") if first.type == "meta" else first
    generator = torch.Generator().manual_seed(seed)
    gnets: GNets = {}
    for e in plan.ensembles:
        if not e.leaves:
            continue
        row, col = codes_of(e, plan.dtype, torch.device("cpu"))
        slots = [(p.first, p.slot.grid) for p in e.spans]
        leaves = init_leaves(e.hypernet, e.dims, e.groups, slots, row, col, generator)
        gnets[e.name] = {k: v.to(device) for k, v in leaves.items()}
    direct = {}
    for t in plan.direct:
        tensor = owned[t.name].tensor.detach()
        if tensor.is_meta:
            std = 0.0 if len(t.shape) < 2 else (t.numel // t.shape[0]) ** -0.5
            value = torch.randn(t.shape, generator=generator) * std
            norm = "Norm" in type(owned[t.name].module).__name__ and owned[t.name].attribute == "weight"
            tensor = (value + float(norm)).to(tensor.dtype)
        direct[t.name] = tensor.to(device, copy=True)
    buffers = {name: buffer.detach() for name, (buffer, _) in buffers_of(pnet).items()}
    if empty := [name for name, buffer in buffers.items() if buffer.is_meta]:
        raise ValueError(f"buffers {empty} of the p-net are on the meta device and have no values: give them some")
    return Genome(gnets, direct, {name: buffer.to(device, copy=True) for name, buffer in buffers.items()})


def sample_noise(plan: Plan, generator: torch.Generator, like: Tensor | None = None) -> dict[str, Params]:
    """Standard normal noise for every stochastic ensemble, from a CPU generator: the same on every device.

    Args:
        plan: the plan.
        generator: a CPU generator; its state advances.
        like: a tensor whose dtype and device the noise gets.
    """
    noise: dict[str, Params] = {}
    for e in plan.ensembles:
        shapes = e.hypernet.noise_shapes(e.dims)
        drawn = {k: torch.randn((e.n_tiles, *shape), generator=generator) for k, shape in shapes.items()}
        if drawn:
            noise[e.name] = drawn if like is None else {k: v.to(like) for k, v in drawn.items()}
    return noise
