"""Draws initial genomes and the noise of stochastic g-nets, and checks genomes against a plan."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from gbfunc.hypernets.base import normal
from gbfunc.hypernets.ensemble import Constants, Evaluation, dense_tiles, is_exporting, joined
from gbfunc.layers.beside import hidden_layers
from gbfunc.layers.kinds import DELTA, KINDS
from gbfunc.plan import Ensemble, Plan
from gbfunc.pnet.describe import ParameterInfo, check_pnet, named_tensors, order_of_arguments, parameter_infos
from gbfunc.tiling import TileGrid
from gbfunc.trees import BUFFERS, DIRECT, GNET, TensorSpec, compare_trees, flat_genome, flatten_tree, like_genome
from gbfunc.types import Factors, Genome, GenomeLike, GNets, Params, dtype_name

Noise = Mapping[str, Params]
"""{name of a stochastic ensemble: {name: standard normal noise [T, ...] for the ensemble's T tiles}}"""

_DRAWS = 8  # Maximum number of draws of a slot's leaves; leaves of a constant matrix are drawn again
_NEWTON_STEPS = 8
_FLAT = 1e-3  # A matrix counts as constant if removing its mean reduces the standard deviation to this fraction
_LARGE, _MANY = 1 << 20, 64  # `moments` computes matrices of up to _LARGE weights, or of under _MANY factor columns
_SAMPLED = 64  # Statistics of a tile use a sample of at most this many rows and columns
_RIDGE = 0.01  # e in `_interacting`, relative to the diagonal of A; a smaller e removes more of the means


def codes_of(ensemble: Ensemble, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return codes of rows and of columns, [tiles, tile length, code width]; [1, ...] if tiles have equal codes."""
    if is_exporting():
        row, col = ensemble.codes_on(device)
    else:
        # Copy, because torch warns about arrays that are not writable, such as broadcast ones.
        row, col = (torch.from_numpy(codes.copy()) for codes in ensemble.codes)
    return row.to(device, dtype), col.to(device, dtype)


def check_genome(
    plan: Plan, genome: GenomeLike, shapes: Mapping[str, tuple[int, ...]] | None = None, *, buffers: bool = True
) -> None:
    """Raise an error unless a genome has the plan's names and shapes (or `shapes`, for a rank's rows of a genome)."""
    check_type(plan)
    _check_fields(genome)
    expected = dict(plan.leaf_shapes if shapes is None else shapes)
    flat = flat_genome(genome)
    if buffers:
        expected |= {f"{BUFFERS}{b.name}": b.shape for b in plan.buffers}
        flat |= flatten_tree(genome.buffers, BUFFERS)
    try:
        compare_trees({k: TensorSpec(s) for k, s in expected.items()}, flat, "the genome does not fit the plan")
    except ValueError as error:
        found, cure = {k: tuple(x.shape) for k, x in flat.items()}, "; pass the genome with its own plan"
        wrong = {k: (found[k], shape) for k, shape in expected.items() if found.get(k, shape) != shape}
        same = found.keys() == expected.keys()
        if same and all(got[1:] == shape[1:] and got[:1] < shape[:1] for got, shape in wrong.values()):
            cure = "; a state with fewer tiles is one rank's part: train_step.gather(state) returns the full state"
        elif same and all(k.startswith(BUFFERS) for k in wrong):
            cure = "; if a forward changes a buffer's shape, run it once, on the longest input, before gb.make_plan"
        elif same and shapes is not None and plan.leaf_shapes.items() <= found.items():
            cure = "; a full state becomes this rank's part by train_step.shard(state)"
        raise ValueError(f"{error}{cure}") from None


def check_type(plan: Plan) -> None:
    """Raise `TypeError` unless `plan` is a `Plan`."""
    if not isinstance(plan, Plan):
        raise _wrong_type("a plan of gb.make_plan", plan)


def _check_fields(genome: GenomeLike) -> None:
    if not all(isinstance(getattr(genome, field, None), Mapping) for field in Genome._fields):
        raise _wrong_type("a Genome or a TrainState (gnets, direct, buffers)", genome)


def _wrong_type(expected: str, got: Any) -> TypeError:
    cure = order_of_arguments()
    if hasattr(got, "to_genome"):
        cure = "pass module.plan and module.to_genome()"
    elif isinstance(got, Mapping):
        cure = "a state dict of a dense network is no genome; pass module.to_genome() of a gb.GenomeModule"
    elif isinstance(got, str | os.PathLike | tuple) and not hasattr(got, "gnets"):
        cure = f"write plan, genome = gb.load(path); {cure}"
    return TypeError(f"expected {expected}, got a {type(got).__name__}: {cure}")


def check_plan(plan: Plan, pnet: nn.Module) -> None:
    """Raise ValueError if the plan was made for another p-net, or if the p-net is wrapped (DDP, FSDP, compiled)."""
    check_type(plan)
    check_pnet(pnet)
    found = {name: TensorSpec(tuple(x.shape)) for name, x in named_tensors(pnet)}
    expected = {x.name: TensorSpec(x.shape) for x in (*plan.tensors, *plan.buffers)}
    if plan.base is not None:
        for k, m in hidden_layers(pnet):
            found[f"{k}.{DELTA}".lstrip(".")] = TensorSpec((getattr(m, "out_features", 0), m.in_features))
        found = {k: spec for k, spec in found.items() if k in expected}
    compare_trees(expected, found, "the plan was made for another p-net: pass that p-net, or make a new plan")
    cast = {k: dtype_name(p.dtype) for k, p in pnet.named_parameters()} if plan.base is None else {}
    if other := [t for t in plan.generated if cast.get(t.name, t.dtype) != t.dtype]:
        name, dtype = other[0].name, other[0].dtype
        words = f"expected {name!r} in {dtype}, got {cast[name]}"
        raise ValueError(f"the p-net was cast after its plan was made: {words}; make a new plan")


@torch.autocast("cpu", enabled=False)
@torch.inference_mode(False)
def init_genome(plan: Plan, pnet: nn.Module, seed: int = 0, *, device: torch.device | str | None = None) -> Genome:
    """Draw a genome: random g-nets, and the p-net's direct parameters and buffers.

    Deltas of a base start at zero. If the p-net is on the meta device, direct parameters are drawn: weights of norms
    are 1, other vectors are 0, and other tensors are normal with standard deviation 1 / sqrt(fan_in).

    Args:
        plan: the plan.
        pnet: the plan's p-net.
        seed: seed of the random g-nets, 0 <= seed < 2**63.
        device: device of the genome; by default the p-net's device, or the CPU for a p-net on the meta device.

    Raises:
        ValueError: for a plan of another p-net, buffers on the meta device, or g-nets without linear coefficients.
    """
    check_plan(plan, pnet)
    buffers = {b.name: pnet.get_buffer(b.name).detach() for b in plan.buffers}
    if empty := [name for name, buffer in buffers.items() if buffer.is_meta]:
        raise ValueError(f"buffers {empty} of the p-net are on the meta device and have no values: give them values")
    infos = {info.name: info for info in parameter_infos(pnet)}
    if device is None:
        device = next((info.tensor.device for info in infos.values() if not info.tensor.is_meta), "cpu")
    generator = torch.Generator("cpu").manual_seed(check_seed(seed))
    gnets: GNets = {}
    for e in (e for e in plan.ensembles if e.leaves):
        _check_linear(plan, e)
        try:
            leaves = {k: v.clone() for k, v in init_leaves(e, plan.dtype, generator).items()}
        except (RuntimeError, LookupError, AttributeError) as error:
            words = "its method apply must compute a tile from leaves and codes, without detach, numpy or item"
            raise ValueError(f"a g-net of type {e.hypernet.type!r} fails: {words}: {error}") from error
        for span in (p for p in e.spans if plan.tensors[p.tensor].base):
            for k in (k for k, leaf in e.leaves.items() if leaf.role == "linear"):
                leaves[k][span.first : span.first + span.slot.grid.n_tiles] = 0
            if new := (tensor := plan.tensors[span.tensor]).new_rows:
                values = infos[tensor.name].tensor.detach()
                leaves["rows"][span.first] = KINDS[tensor.kind].unfold(values)[span.matrix][-new:] / span.slot.scale
        gnets[e.name] = {k: v.to(device) for k, v in leaves.items()}
    direct = {t.name: _direct(infos[t.name], generator).to(device, copy=True) for t in plan.direct}
    return Genome(gnets, direct, {name: buffer.to(device, copy=True) for name, buffer in buffers.items()})


def check_seed(seed: int) -> int:
    """Convert a seed to a Python integer. Raise ValueError unless 0 <= seed < 2**63."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__") or not 0 <= operator.index(seed) < 1 << 63:
        got = "a genome: write genome=genome" if hasattr(seed, "gnets") else f"{seed!r:.40}"
        raise ValueError(f"seed must be an integer with 0 <= seed < 2**63, got {got}")
    return operator.index(seed)


def _check_linear(plan: Plan, e: Ensemble) -> None:
    if odd := [f"{k!r} of role {leaf.role!r}" for k, leaf in e.leaves.items() if leaf.role not in ("code", "linear")]:
        raise ValueError(f"roles of leaves are 'code' and 'linear', got {', '.join(odd)} in {e.hypernet.type!r}")
    delta = any(plan.tensors[p.tensor].base for p in e.spans)
    linear = any(leaf.role == "linear" and leaf.scope == "tile" for leaf in e.leaves.values())
    if not linear and (delta or e.hypernet.standardised):
        words = f"a g-net of type {e.hypernet.type!r} has no leaf of role 'linear' and scope 'tile', by which"
        use = "a delta starts at zero" if delta else "weights get their initial scale (or set standardised = False)"
        where = f"for {plan.tensors[e.spans[0].tensor].name} with codes of widths {e.dims[2]} and {e.dims[3]}"
        raise ValueError(f"{words} {use}, {where}: add a leaf, such as a gain (gbfunc.hypernets.Leaf((), 'linear'))")


def _direct(info: ParameterInfo, generator: torch.Generator) -> Tensor:
    tensor = info.tensor.detach()
    if not tensor.is_meta:
        return tensor
    std = 0.0 if tensor.ndim < 2 else (tensor.numel() // len(tensor)) ** -0.5
    norm = "Norm" in type(info.module).__name__ and info.attribute == "weight"
    return (normal(tensor.shape, generator) * std + float(norm)).to(tensor.dtype)


def sample_noise(plan: Plan, generator: torch.Generator, like: Tensor | None = None) -> dict[str, Params]:
    """Draw standard normal noise for all stochastic ensembles, from a CPU generator. `like` gives dtype and device."""
    noise: dict[str, Params] = {}
    for e in plan.ensembles:
        if shapes := e.hypernet.noise_shapes(e.dims):
            drawn = {k: normal((e.n_tiles, *shape), generator) for k, shape in shapes.items()}
            noise[e.name] = drawn if like is None else {k: v.to(like) for k, v in drawn.items()}
    return noise


def check_noise(plan: Plan, noise: Noise | None) -> None:
    """Raise ValueError unless the noise has the names and shapes that `sample_noise` returns for this plan."""
    if noise:
        shapes = {e.name: (e.n_tiles, e.hypernet.noise_shapes(e.dims)) for e in plan.ensembles}
        specs = {f"{name}/{k}": TensorSpec((n, *x)) for name, (n, named) in shapes.items() for k, x in named.items()}
        compare_trees(specs, flatten_tree(noise), "the noise does not fit the plan (draw it by gb.sample_noise)")


def unflat_genome(plan: Plan, leaves: Params, buffers: Params) -> Genome:
    """Undo `flat_genome`: build a genome from leaves by name, such as `direct/0.bias`, and the p-net's buffers."""
    gnets = {e.name: {k: leaves[f"{GNET}{e.name}/{k}"] for k in e.leaves} for e in plan.ensembles if e.leaves}
    return Genome(gnets, {t.name: leaves[f"{DIRECT}{t.name}"] for t in plan.direct}, buffers)


def flatten(genome: GenomeLike) -> tuple[Tensor, Callable[[Tensor], Genome]]:
    """Return a genome as one vector of P numbers, [P], and a function that converts a vector to a genome.

    The vector is for evolution strategies and for optimizers of other packages. Leaves are concatenated in the order of
    their names, in the widest of their dtypes. The vector has no buffers and no integer parameters, which the function
    takes from `genome`. The function is differentiable, and works under `vmap`.

    >>> import gbfunc as gb
    >>> pnet = nn.Linear(6, 3)
    >>> plan = gb.make_plan(pnet, gb.periodic(features=1))
    >>> vector, unflatten = gb.flatten(gb.init_genome(plan, pnet))
    >>> len(vector) == plan.genome_params, gb.generate(plan, unflatten(0 * vector))["weight"].abs().max()
    (True, tensor(0.))
    """
    _check_fields(genome)
    named = flat_genome(genome)
    leaves = {k: named[k] for k in sorted(named) if named[k].is_floating_point()}
    dtype = reduce(torch.promote_types, (x.dtype for x in leaves.values()), torch.float16)
    sizes = [x.numel() for x in leaves.values()]

    def unflatten(vector: Tensor) -> Genome:
        if vector.shape != (sum(sizes),):
            raise ValueError(f"expected a vector of {sum(sizes)} numbers, got shape {tuple(vector.shape)}")
        pairs = zip(leaves.items(), vector.split(sizes), strict=True)
        changed = {k: numbers.reshape(x.shape).to(x.dtype) for (k, x), numbers in pairs}
        return like_genome(named | changed, Genome(genome.gnets, genome.direct, dict(genome.buffers)))

    return torch.cat([x.detach().reshape(-1).to(dtype) for x in leaves.values()]), unflatten


class _Slot(NamedTuple):
    constants: Constants
    grid: TileGrid

    def matrix(self, leaves: Params) -> Tensor:
        return joined(Evaluation(self.constants, leaves).tiles(), self.grid)

    def moments(self, leaves: Params, linear: Sequence[str] = ()) -> tuple[float, float, Params]:
        """Return a matrix's mean and standard deviation, and the mean's gradient with respect to `linear` leaves.

        A large matrix with factors L and R is not formed. The sum over a tile's weights is `sum_i L_i . sum_j R_j`, and
        the sum over the squared weights is the sum over the entries of `(L.T @ L) * (R.T @ R)`.
        """
        hypernet, g, x = self.constants.hypernet, self.grid, {k: leaves[k].detach().requires_grad_() for k in linear}
        with torch.enable_grad():
            if not hypernet.factorised or g.numel <= _LARGE or g.n_tiles * hypernet.factor_width < _MANY:
                weights = self.matrix(leaves | x)
                mean, deviation = weights.mean(), float(weights.detach().std(correction=0))
            else:
                left, right = cast(Factors, Evaluation(self.constants, leaves | x).tiles())
                # In the last tiles, set the rows of factors to zero that lie outside of the matrix.
                tile_T = torch.arange(g.n_tiles, device="cpu")
                left = left * _inside(g.rows - tile_T // g.n_cols * g.tile_rows, g.tile_rows)
                right = right * _inside(g.cols - tile_T % g.n_cols * g.tile_cols, g.tile_cols)
                mean = (left.sum(-2) * right.sum(-2)).sum() / g.numel
                left, right = left.detach().double(), right.detach().double()
                square = float((left.mT @ left * (right.mT @ right)).sum()) / g.numel
                deviation = math.sqrt(max(0.0, square - float(mean.detach()) ** 2))
        return float(mean.detach()), deviation, _slopes(mean, x) if x else {}


def _inside(lengths_T: Tensor, longest: int) -> Tensor:
    return (torch.arange(longest, device="cpu") < lengths_T[:, None])[..., None]


def init_leaves(e: Ensemble, dtype: torch.dtype, generator: torch.Generator) -> Params:
    """Draw an ensemble's leaves from one CPU generator, tile by tile, so that the genome is equal on all devices.

    Then change the leaves so that the weights of every matrix have zero mean and unit standard deviation. The mean is
    linear in the linear leaves v (such as amplitudes), with gradient m. Subtracting `m * mean / |m|^2` from v is the
    smallest change that removes the mean. If this change would leave a constant matrix, for example because v is a
    single number, the mean is removed by Newton steps on all leaves of the matrix's tiles.
    """
    hypernet, specs = e.hypernet, e.leaves
    drawn = hypernet.init(e.dims, e.n_tiles, e.n_groups, generator)
    leaves = {k: drawn[k].to(dtype) for k in specs}
    if not hypernet.standardised or not leaves:
        return leaves
    tile_scope = [k for k in leaves if specs[k].scope == "tile"]
    linear = [k for k in tile_scope if specs[k].role == "linear"]
    groups_T = torch.from_numpy(e.groups)
    bare = Constants.make(hypernet, e.dims, "eager", *codes_of(e, dtype, torch.device("cpu")))
    few, first = _sampled(bare.of(slice(0, 1))), {k: v[:1] for k, v in leaves.items()}
    once, twice = (
        float(dense_tiles(Evaluation(few, first | {k: n * first[k] for k in linear}).tiles()).std(correction=0))
        for n in (1, 2)
    )
    if once > 0 and not 0.9 < twice / once / 2 < 1.1:
        words = f"deviation {twice:.3g} after {once:.3g}: doubling its leaves of role 'linear' must double the tile"
        raise ValueError(f"a g-net of type {hypernet.type!r} has weights of {words}")
    for p in e.spans:
        grid = p.slot.grid
        span = slice(p.first, p.first + grid.n_tiles)
        mine = {k: v[groups_T[span]] if specs[k].scope == "group" else v[span] for k, v in leaves.items()}
        slot = _Slot(bare.of(span), grid)
        if hypernet.spreads and not hypernet.factorised and e.dims.rows * e.dims.cols > 1:
            mine |= _interacting(slot, mine, linear)
        for _ in range(_DRAWS if grid.numel > 1 else 0):
            if changed := _standardised(slot, mine, tile_scope, linear):
                mine |= changed
                break
            # The weights are equal, for example because all ReLUs are off, and could not be trained: draw again.
            fresh = hypernet.init(e.dims, grid.n_tiles, 1, generator)
            mine |= {k: fresh[k].to(leaves[k].dtype) for k in tile_scope}
        for k in tile_scope:
            leaves[k][span] = mine[k]
    return leaves


def _sampled(constants: Constants) -> Constants:
    generator = torch.Generator("cpu").manual_seed(0)
    rows = torch.randperm(constants.row.shape[1], generator=generator, device="cpu")[:_SAMPLED]
    cols = torch.randperm(constants.col.shape[1], generator=generator, device="cpu")[:_SAMPLED]
    return constants._replace(row=constants.row[:, rows], col=constants.col[:, cols])


def _interacting(slot: _Slot, mine: Params, linear: list[str]) -> Params:
    """Return linear leaves that reduce the means of a tile's rows and columns, and give the tile standard deviation 1.

    A tile is a sum of features with coefficients v. If each feature is a function of one weighted sum of the codes, as
    in a ReLU g-net, most of the variance is in the means of rows and columns. These means are a matrix of rank 2 with a
    large singular value, so activations would grow from layer to layer. Let A be the Gram matrix of the features' row
    and column means, and e a small number. With `(A / e + 1)^-1 v`, the means are smaller (Tikhonov regularization).
    """
    constants = _sampled(slot.constants)
    tiles = slot.grid.n_tiles
    shaped = {k: mine[k] for k in linear}
    v_TK = stacked(shaped)

    def tiles_of(v_TK: Tensor) -> Tensor:
        return dense_tiles(Evaluation(constants, mine | unstacked(v_TK, shaped)).tiles())

    means: list[Tensor] = []
    for basis_K in torch.eye(v_TK.shape[1], dtype=v_TK.dtype, device="cpu"):
        tile_Trc = tiles_of(basis_K.expand(tiles, -1))
        ends = tile_Trc.mean(2) / math.sqrt(tile_Trc.shape[1]), tile_Trc.mean(1) / math.sqrt(tile_Trc.shape[2])
        means.append(torch.cat(ends, 1).double())
    means_TKn = torch.stack(means, 1)
    gram_TKK = means_TKn @ means_TKn.mT
    size_T = gram_TKK.diagonal(dim1=1, dim2=2).mean(1)[:, None, None].clamp_min(1e-12)
    left_TKK = gram_TKK / (_RIDGE * size_T) + torch.eye(v_TK.shape[1], dtype=torch.float64, device="cpu")
    v_TK = torch.linalg.solve(left_TKK, v_TK.double()[..., None])[..., 0].to(v_TK.dtype)
    std_T = tiles_of(v_TK).std((1, 2), correction=0)
    return unstacked(v_TK / torch.where(std_T > _FLAT * std_T.median(), std_T, 1)[:, None], shaped)


def stacked(leaves: Params) -> Tensor:
    """Concatenate every tile's leaves to K numbers, for T tiles: [T, ...], ... -> [T, K]."""
    return torch.cat([x.reshape(len(x), -1) for x in leaves.values()], 1)


def unstacked(rows_TK: Tensor, like: Params) -> Params:
    """Undo `stacked`, with the names and shapes of `like`."""
    columns = rows_TK.split([x[0].numel() for x in like.values()], 1)
    return {k: column.reshape(x.shape) for (k, x), column in zip(like.items(), columns, strict=True)}


def _standardised(slot: _Slot, mine: Params, tile_scope: list[str], linear: list[str]) -> Params:
    """Return leaves that give a slot's matrix zero mean and unit standard deviation; {} if the matrix is constant."""
    mean, deviation, slopes = slot.moments(mine, linear)
    if not math.isfinite(mean + deviation):
        hypernet, (p, q) = slot.constants.hypernet, (x.shape[-1] for x in (slot.constants.row, slot.constants.col))
        words = f"codes of widths {p} and {q} (an axis of length 1 has codes of width 0)"
        raise ValueError(f"g-nets of the type {hypernet.type!r} generate weights that are not finite, from {words}")
    if not deviation > 0:
        return {}
    centred = _zeroed(mean, mine, slopes)
    if (left := slot.moments(mine | centred)[1]) <= _FLAT * deviation:
        centred = {k: mine[k] for k in tile_scope}
        for _ in range(_NEWTON_STEPS):
            v = {k: leaf.detach().requires_grad_() for k, leaf in centred.items()}
            with torch.enable_grad():
                weights = slot.matrix(mine | v)
                value = weights.mean() / weights.std(correction=0)
            centred = _zeroed(float(value.detach()), v, _slopes(value, v))
        left = slot.moments(mine | centred)[1]
    if left <= _FLAT * deviation:
        centred, left = {k: mine[k] for k in linear}, deviation
    return centred | {k: centred[k] / left for k in linear}


def _slopes(value: Tensor, leaves: Params) -> Params:
    return dict(zip(leaves, torch.autograd.grad(value, [*leaves.values()], materialize_grads=True), strict=True))


def _zeroed(value: float, leaves: Params, slopes: Params) -> Params:
    """Change leaves as little as possible so that `value`, with gradient `slopes`, becomes 0 to first order."""
    square = sum(float(m.square().sum()) for m in slopes.values())
    change = value / square if 0 < square < math.inf else 0.0
    return {k: leaves[k].detach() - change * slope for k, slope in slopes.items()}
