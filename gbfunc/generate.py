"""From a genome to the p-net's parameters: ensembles -> tiles -> matrices -> tensors, in one autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from gbfunc.ensemble import apply_tiles, dense_tiles, init_leaves, tile_leaves
from gbfunc.layers import KINDS
from gbfunc.plan import DTYPES, Ensemble, Plan
from gbfunc.pnet import PureNet, buffers_of, check_pnet, owned_parameters, with_weights
from gbfunc.tiling import join_tiles
from gbfunc.types import Genome, GenomeLike, GNets, Kernel, Params

Noise = Mapping[str, Params]
"""`{ensemble: {name: [T, ...]}}`: standard normal noise of the stochastic ensembles."""


class Generator:
    """A plan with its constants (codes, groups) at hand: `generator(gnets, direct) -> {name: weight}`.

    Constants are built once for each dtype and device. `generate` is the one-off form.
    """

    def __init__(self, plan: Plan, *, kernel: Kernel = "auto") -> None:
        self.plan = plan
        self.kernel: Kernel = kernel
        # A process's first sine or tanh in several threads can be off by 8e-5 (pytorch issue 188792): one entry goes first.
        torch.tanh(torch.sin(torch.zeros(1)))
        self._constants: dict[tuple[torch.dtype, torch.device], list[tuple[Tensor, Tensor, Tensor | None]]] = {}

    def constants(self, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor | None]]:
        """Row codes [U, r, p], column codes [U, c, q] and groups [T] (None where nothing is shared), by ensemble."""
        key = (dtype, device)
        if key not in self._constants:
            self._constants[key] = [_constants(e, dtype, device) for e in self.plan.ensembles]
        return self._constants[key]

    def __call__(self, gnets: GNets, direct: Params, noise: Noise | None = None) -> Params:
        """All parameters of the p-net by name, direct ones as they are.

        Args:
            gnets: leaves of the ensembles.
            direct: direct parameters.
            noise: noise of the stochastic ensembles, None for the mean.
        """
        like = next((leaf for leaves in gnets.values() for leaf in leaves.values()), None)
        like = next(iter(direct.values()), None) if like is None else like
        dtype = self.plan.dtype if like is None or not like.is_floating_point() else like.dtype
        device = torch.device("cpu") if like is None else like.device
        # A caller's autocast is for the p-net.
        with torch.autocast(device.type, enabled=False):
            return self._weights(gnets, direct, noise, self.constants(dtype, device))

    def _weights(
        self, gnets: GNets, direct: Params, noise: Noise | None, constants: list[tuple[Tensor, Tensor, Tensor | None]]
    ) -> Params:
        matrices: dict[tuple[int, int], Tensor] = {}
        for ensemble, (row, col, groups) in zip(self.plan.ensembles, constants, strict=True):
            leaves = tile_leaves(gnets.get(ensemble.name, {}), ensemble.leaves, groups)
            own_noise = None if noise is None else noise.get(ensemble.name)
            tiles = apply_tiles(ensemble.hypernet, ensemble.dims, leaves, row, col, noise=own_noise, kernel=self.kernel)
            tiles = dense_tiles(tiles)
            for tensor, part, first, slot in ensemble.placements:
                own = tiles[first : first + slot.grid.n_tiles] if leaves else tiles[:1].expand(slot.grid.n_tiles, -1, -1)
                matrix = join_tiles(own, slot.grid)
                if slot.scale != 1.0:
                    matrix = matrix * slot.scale
                matrices[tensor, part] = matrix + slot.offset if slot.offset else matrix
        weights = {}
        for index, tensor in enumerate(self.plan.tensors):
            if not tensor.slots:
                weights[tensor.name] = direct[tensor.name]
                continue
            parts = [matrices[index, part] for part in range(len(tensor.slots))]
            weight = KINDS[tensor.kind].fold(parts, tensor.shape)
            own_dtype = DTYPES[tensor.dtype]
            # Generation runs in the leaves' dtype; only a narrower p-net (bf16, fp16) is cast to.
            narrow = own_dtype.itemsize < self.plan.dtype.itemsize
            weights[tensor.name] = weight.to(own_dtype) if narrow else weight
        return weights


def _constants(ensemble: Ensemble, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    row, col = (torch.from_numpy(codes.copy()).to(device, dtype) for codes in ensemble.codes)
    groups = torch.tensor(ensemble.groups, device=device) if ensemble.hypernet.shares else None
    return row, col, groups


def generate(plan: Plan, genome: GenomeLike, *, noise: Noise | None = None, kernel: Kernel = "auto") -> Params:
    """All parameters of the p-net by name, direct ones included: `{name: Tensor}`.

    Differentiable with respect to `genome.gnets` and `genome.direct`, also under `torch.func` transforms.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        noise: noise of stochastic g-nets (see `sample_noise`); None gives the mean weights.
        kernel: implementation of ReLU g-nets.

    Raises:
        ValueError: if the genome's leaves are not those of the plan.
    """
    check_genome(plan, genome)
    return Generator(plan, kernel=kernel)(genome.gnets, genome.direct, noise)


def check_genome(plan: Plan, genome: GenomeLike) -> None:
    """Compare names and shapes of a genome with its plan's.

    Raises:
        ValueError: naming what is missing, unknown or of a wrong shape.
    """
    expected = {f"gnets[{e.name!r}][{k!r}]": s for e in plan.ensembles for k, s in e.shapes.items()}
    expected |= {f"direct[{t.name!r}]": t.shape for t in plan.direct}
    found = {f"gnets[{e!r}][{k!r}]": tuple(v.shape) for e, leaves in genome.gnets.items() for k, v in leaves.items()}
    found |= {f"direct[{name!r}]": tuple(v.shape) for name, v in genome.direct.items()}
    if expected != found:
        missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
        wrong = [f"{k} is {found[k]}, expected {s}" for k, s in expected.items() if k in found and found[k] != s]
        raise ValueError(f"the genome does not fit the plan: missing {missing}, unknown {unknown}, wrong shape {wrong}")


def check_plan(plan: Plan, pnet: nn.Module) -> None:
    """Compare names and shapes of a p-net's parameters and buffers with its plan's.

    Raises:
        ValueError: if the plan was made for another p-net, naming what differs, or the p-net is wrapped.
    """
    check_pnet(pnet)
    given = {o.name: tuple(o.tensor.shape) for o in owned_parameters(pnet)}
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
    owned = {o.name: o for o in owned_parameters(pnet)}
    if device is None:
        first = next((o.tensor.device for o in owned.values()), torch.device("cpu"))
        device = torch.device("cpu") if first.type == "meta" else first
    generator = torch.Generator().manual_seed(seed)
    gnets: GNets = {}
    for e in plan.ensembles:
        if not e.leaves:
            continue
        row, col, _ = _constants(e, plan.dtype, torch.device("cpu"))
        slots = [(p.first, p.slot.grid) for p in e.placements]
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
        raise ValueError(f"buffers {empty} of the p-net are on the meta device and have no values: materialise them first")
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


def materialize(plan: Plan, genome: GenomeLike, pnet: nn.Module) -> nn.Module:
    """A plain copy of the p-net that holds the generated weights and the genome's buffers; nothing of gbfunc is left in it.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        pnet: the p-net the plan was made for; it is not changed. The copy keeps its training mode.

    Raises:
        ValueError: if genome, plan and p-net do not fit together.
    """
    check_plan(plan, pnet)
    with torch.no_grad():
        weights = generate(plan, genome)
    PureNet(pnet).check(weights, genome.buffers)
    dtypes = {t.name: DTYPES[t.dtype] for t in plan.tensors}
    return with_weights(pnet, {k: v.to(dtypes[k]) for k, v in weights.items()}, genome.buffers)


def call_with(weights: Params, buffers: Params, net: PureNet) -> Callable[..., object]:
    """The p-net closed over weights and buffers: what a loss function gets."""
    return lambda *args, **kwargs: net(weights, buffers, *args, **kwargs)
