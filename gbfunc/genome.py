"""The genome itself: drawing a fresh one, checking that it fits its plan, and the noise of stochastic g-nets."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from gbfunc.hypernets.base import normal
from gbfunc.hypernets.ensemble import init_leaves
from gbfunc.plan import Ensemble, Plan
from gbfunc.pnet import ParameterInfo, buffers_of, check_pnet, parameter_infos
from gbfunc.types import Genome, GenomeLike, GNets, Params

Noise = Mapping[str, Params]
"""`{ensemble: {name: [T, ...]}}`: standard normal noise of the stochastic ensembles."""


def codes_of(ensemble: Ensemble, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row codes [U, r, p] and column codes [U, c, q] of an ensemble as tensors."""
    row, col = (torch.from_numpy(codes.copy()).to(device, dtype) for codes in ensemble.codes)
    return row, col


def check_genome(
    plan: Plan,
    genome: GenomeLike,
    shapes: Mapping[tuple[str, str], tuple[int, ...]] | None = None,
    *,
    buffers: bool = True,
) -> None:
    """Compare names and shapes of a genome with its plan's.

    Args:
        plan: the plan.
        genome: the genome.
        shapes: shapes by (ensemble, leaf) and ("direct", name), where they are those of one rank's part.
        buffers: whether they count; generating weights needs none.

    Raises:
        TypeError: if it is no genome.
        ValueError: naming what is missing, unknown or of a wrong shape.
    """
    if not all(isinstance(getattr(genome, part, None), Mapping) for part in Genome._fields):
        raise TypeError(f"expected a Genome or a TrainState (gnets, direct, buffers), got {type(genome).__name__}")
    expected = dict(plan.leaf_shapes if shapes is None else shapes)
    found = {(e, k): tuple(leaf.shape) for e, leaves in genome.gnets.items() for k, leaf in leaves.items()}
    found |= {("direct", name): tuple(leaf.shape) for name, leaf in genome.direct.items()}
    leaves = dict(found)
    if buffers:
        expected |= {("buffers", b.name): b.shape for b in plan.buffers}
        found |= {("buffers", name): tuple(buffer.shape) for name, buffer in genome.buffers.items()}
    if expected != found:
        missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        wrong = [f"{k} is {found[k]}, expected {s}" for k, s in expected.items() if k in found and found[k] != s]
        hint = ""
        if wrong and not missing and not unknown:
            both = [(found[k], s) for k, s in expected.items() if found[k] != s]
            if all(f[1:] == s[1:] and f[:1] < s[:1] for f, s in both):
                hint = "; a state with fewer tiles is one rank's part: train_step.gather(state) makes it whole"
            elif shapes is not None and leaves == plan.leaf_shapes:
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


def init_genome(
    plan: Plan,
    pnet: nn.Module,
    seed: int = 0,
    *,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Genome:
    """A fresh genome: g-nets drawn from `seed`, direct parameters and buffers as the p-net has them now.

    Direct parameters of a meta-device p-net, which has no values, start at 0 (vectors), 1 (weights of norms) or normal
    with deviation 1 / sqrt(fan_in).

    Args:
        plan: the plan.
        pnet: the p-net that it was made for.
        seed: seed of the g-nets, 0 <= seed < 2**63.
        device: where the genome lives; None is the p-net's own device (the CPU for a meta-device p-net).
        progress: called with the generated weights that have their g-nets, and all of them, time and again.

    Raises:
        ValueError: if the p-net is not the one of the plan, or has a buffer without values.
    """
    check_plan(plan, pnet)
    buffers = {name: buffer.detach() for name, (buffer, _) in buffers_of(pnet).items()}
    if empty := [name for name, buffer in buffers.items() if buffer.is_meta]:
        raise ValueError(f"buffers {empty} of the p-net are on the meta device and have no values: give them some")
    infos = {info.name: info for info in parameter_infos(pnet)}
    if device is None:
        first = next((info.tensor.device for info in infos.values()), torch.device("cpu"))
        device = torch.device("cpu") if first.type == "meta" else first
    generator = torch.Generator("cpu").manual_seed(seed)
    done, total = 0, sum(t.numel for t in plan.generated)

    def count(weights: int) -> None:
        nonlocal done
        done += weights
        if progress is not None:
            progress(done, total)

    gnets: GNets = {}
    for e in plan.ensembles:
        if not e.leaves:
            continue
        codes = codes_of(e, plan.dtype, torch.device("cpu"))
        slots = [(span.first, span.slot.grid) for span in e.spans]
        leaves = init_leaves(e.hypernet, e.dims, torch.from_numpy(e.groups), slots, *codes, generator, count)
        gnets[e.name] = {k: v.to(device) for k, v in leaves.items()}
    direct = {t.name: _direct(infos[t.name], generator).to(device, copy=True) for t in plan.direct}
    return Genome(gnets, direct, {name: buffer.to(device, copy=True) for name, buffer in buffers.items()})


def _direct(info: ParameterInfo, generator: torch.Generator) -> Tensor:
    """A direct parameter's value: the p-net's, or a usual one where that is on the meta device."""
    tensor = info.tensor.detach()
    if not tensor.is_meta:
        return tensor
    std = 0.0 if tensor.ndim < 2 else (tensor.numel() // len(tensor)) ** -0.5
    norm = "Norm" in type(info.module).__name__ and info.attribute == "weight"
    return (normal(tensor.shape, generator) * std + float(norm)).to(tensor.dtype)


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
        drawn = {k: normal((e.n_tiles, *shape), generator) for k, shape in shapes.items()}
        if drawn:
            noise[e.name] = drawn if like is None else {k: v.to(like) for k, v in drawn.items()}
    return noise
