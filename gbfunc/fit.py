r"""Fits a genome to weights by least squares, one ensemble of g-nets after the other.

The target $Y_t$ of tile t is cut out of the matrix $(W - offset - base) / scale$, with the slot's offset and scale. To
give all matrices equal weight, $e_t$ is the sum of squares of the entire matrix. The problem is

    minimize   sum_t |g(theta_t) - Y_t|^2 / e_t

Adam trains all leaves. A tile is linear in some leaves, such as the amplitudes. Before and after Adam, conjugate
gradients solve the linear least-squares problem for these leaves. Low-rank factors come from the SVD.

Suffixes: T tiles, r rows and c columns of a tile, k rank, K linear coefficients of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from gbfunc.generation import make_generator
from gbfunc.genome import check_genome, check_plan, check_seed, check_type, codes_of, init_leaves, stacked, unstacked
from gbfunc.hypernets.codeless import LowRank
from gbfunc.hypernets.ensemble import Constants, Evaluation, dense_tiles
from gbfunc.layers import KINDS
from gbfunc.plan import DTYPES, Ensemble, Plan
from gbfunc.tiling import split_tiles
from gbfunc.trees import flat_genome
from gbfunc.types import Genome, GenomeLike, GNets, Params, TensorMap

_SOLVES = 32
"""Number of iterations of conjugate gradients. The solution is exact for tiles of at most this many unknowns."""


class Fit(NamedTuple):
    """A genome that was fitted to weights.

    Attributes:
        genome: the genome.
        errors: for every generated tensor by name, `|W - W_hat| / |W|` (Frobenius norm), where W is the target and
            W_hat is generated. An error is 0 if both are zero. For a tensor of a base, W and W_hat are deltas.
    """

    genome: Genome
    errors: dict[str, float]


class _Tiles:
    """The tiles of an ensemble, [T, r, c], as a function of the ensemble's leaves, and the target tiles."""

    def __init__(self, plan: Plan, e: Ensemble, targets: TensorMap, dtype: torch.dtype, device: torch.device) -> None:
        self.specs, self.groups = e.leaves, torch.from_numpy(e.groups).to(device)
        self.linear = [k for k, leaf in e.leaves.items() if leaf.role == "linear"]
        self.constants = Constants.make(e.hypernet, e.dims, "auto", *codes_of(e, dtype, device))
        tiles, inside, energies = [], [], []
        for span in e.spans:
            tensor, slot = plan.tensors[span.tensor], span.slot
            matrices = KINDS[tensor.kind].unfold(targets[tensor.name])
            matrix = matrices[span.matrix].to(device, torch.float64) - slot.offset
            # With scale 0, g-nets cannot change the matrix, so the target is 0.
            matrix = matrix / slot.scale if slot.scale else torch.zeros_like(matrix)
            tiles.append(split_tiles(matrix, slot.grid))
            inside.append(split_tiles(torch.ones_like(matrix, dtype=dtype), slot.grid))
            energies += [float(matrix.square().sum()) or 1.0] * slot.grid.n_tiles
        self.target_Trc, self.inside_Trc = torch.cat(tiles).to(dtype), torch.cat(inside)
        self.weight_T = 1 / torch.tensor(energies, dtype=dtype, device=device)

    def __call__(self, leaves: Params) -> Tensor:
        mine = {k: v[self.groups] if self.specs[k].scope == "group" else v for k, v in leaves.items()}
        return dense_tiles(Evaluation(self.constants, mine).tiles()) * self.inside_Trc

    def loss(self, leaves: Params) -> Tensor:
        return ((self(leaves) - self.target_Trc).square().sum((1, 2)) * self.weight_T).sum()

    @torch.no_grad()
    def solve(self, leaves: Params) -> Params:
        """Solve for the leaves in which a tile is linear, by least squares (CGLS; Bjorck, 1996, section 7.4)."""
        if not self.linear or any(self.specs[k].scope == "group" for k in self.linear):
            return leaves
        linear = {k: leaves[k] for k in self.linear}
        x_TK = stacked(linear)

        def tiles_of(x_TK: Tensor) -> Tensor:
            return self(leaves | unstacked(x_TK, linear))

        # Compute the transpose once: the map is linear, so all x have the same transpose.
        start_Trc, transpose = torch.func.vjp(tiles_of, x_TK)[:2]
        residual = self.target_Trc - start_Trc
        slope_TK = direction_TK = transpose(residual)[0]
        square_T = slope_TK.square().sum(1)
        for _ in range(_SOLVES):
            change_Trc = tiles_of(direction_TK)
            step_T = _ratio(square_T, change_Trc.square().sum((1, 2)))
            x_TK = x_TK + step_T[:, None] * direction_TK
            residual = residual - step_T[:, None, None] * change_Trc
            slope_TK, before_T = transpose(residual)[0], square_T
            square_T = slope_TK.square().sum(1)
            direction_TK = slope_TK + _ratio(square_T, before_T)[:, None] * direction_TK
        solved = leaves | unstacked(x_TK, linear)
        return solved if bool(self.loss(solved) <= self.loss(leaves)) else leaves


def _ratio(a_T: Tensor, b_T: Tensor) -> Tensor:
    return torch.where(b_T > 0, a_T / b_T.where(b_T > 0, 1), 0)


def fit_genome(
    plan: Plan,
    trained: nn.Module | TensorMap,
    *,
    pnet: nn.Module | None = None,
    start: GenomeLike | None = None,
    seed: int = 0,
    steps: int = 500,
    lr: float = 0.05,
) -> Fit:
    """Find the genome whose weights are nearest to trained weights, by least squares, tile by tile.

    Direct parameters and buffers are copied from `trained`. Weights that were trained without a genome are usually far
    from all weights that a small genome generates. Errors near 1 do not mean that the fit failed. Train after the fit:

        genome, errors = gb.fit_genome(plan, trained)
        state = train_step.init(genome=genome)

    Alternatively, alternate between training the dense weights and fitting (Shuvaev et al., 2024): train
    `gb.materialize(plan, genome, pnet)` for some steps, then call `gb.fit_genome(plan, trained, start=genome)`.

    Args:
        plan: the plan.
        trained: a module with the p-net's architecture, or its parameters and buffers by name.
        pnet: the base, if the plan has a base. The deltas are fitted to `trained` minus the base.
        start: the genome from which the fit starts; by default, a random genome drawn with `seed`.
        seed: seed of the drawn genome.
        steps: number of Adam steps. With 0, only leaves in which tiles are linear are fitted.
        lr: initial learning rate of Adam, which decays to 0 along a cosine.

    Raises:
        ValueError: if plan, weights, base and start do not match, if the plan generates nothing, or for inf and NaN.

    >>> import gbfunc as gb
    >>> trained = nn.Linear(30, 20)
    >>> plan = gb.make_plan(trained, gb.low_rank(2))
    >>> fit = gb.fit_genome(plan, trained)
    >>> 0 < fit.errors["weight"] < 1
    True
    """
    check_type(plan)
    if not any(e.leaves for e in plan.ensembles):
        raise ValueError("fit_genome expects a plan with g-nets that have parameters, got none: generate some weights")
    if steps < 0 or not lr > 0:
        raise ValueError(f"steps must be >= 0 and lr > 0, got {steps} and {lr}")
    if (plan.base is None) != (pnet is None):
        raise ValueError(f"the plan has {'a base: pass it as pnet=' if pnet is None else 'no base: leave out pnet='}")
    weights, base = _tensors_of(plan, trained), None if pnet is None else plan.base_tensors(pnet)
    device = next(iter(weights.values())).device
    targets = {t.name: weights[t.name].double() for t in plan.generated}
    if base is not None:
        targets |= {t.name: targets[t.name] - base.tensor(t.name, device) for t in plan.generated if t.base}
    if start is not None:
        check_genome(plan, start)
    generator = torch.Generator("cpu").manual_seed(check_seed(seed))
    gnets: GNets = {}
    with torch.autocast(device.type, enabled=False):
        for e in (e for e in plan.ensembles if e.leaves):
            drawn = init_leaves(e, plan.dtype, generator) if start is None else start.gnets[e.name]
            leaves = {k: x.to(device) for k, x in drawn.items()} if start is None else drawn
            like = next(iter(leaves.values()))
            gnets[e.name] = _fitted(_Tiles(plan, e, targets, like.dtype, like.device), leaves, steps, lr)
        copied = plan.direct, plan.buffers
        genome = Genome(gnets, *({x.name: weights[x.name].to(DTYPES[x.dtype], copy=True) for x in xs} for xs in copied))
        with torch.no_grad():
            generated = make_generator(plan, base=base)(flat_genome(genome))
    errors: dict[str, float] = {}
    for name, target in targets.items():
        error, size = float((generated[name].to(target) - weights[name].to(target)).norm()), float(target.norm())
        errors[name] = error / size if size else float(error > 0)
    return Fit(genome, errors)


def _fitted(tiles: _Tiles, leaves: Params, steps: int, lr: float) -> Params:
    if isinstance(tiles.constants.hypernet, LowRank) and not tiles.constants.hypernet.shares:
        # Compute the best rank-k factors of tiles, of equal norms (Eckart and Young, 1936).
        u, s, vh = torch.linalg.svd(tiles.target_Trc, full_matrices=False)
        rank, pairs = tiles.constants.hypernet.known_size, (("left", u), ("right", vh.mT))
        more = max(0, rank - s.shape[-1])
        return {k: nn.functional.pad((x * s.sqrt()[:, None])[..., :rank], (0, more)).contiguous() for k, x in pairs}
    leaves = tiles.solve({k: v.detach().clone() for k, v in leaves.items()})
    first = float(tiles.loss(leaves))
    trained = {k: v.clone().requires_grad_() for k, v in leaves.items()}
    adam = torch.optim.Adam([*trained.values()], lr=lr)
    schedule = CosineAnnealingLR(adam, max(1, steps))
    for _ in range(steps):
        adam.zero_grad()
        with torch.enable_grad():
            tiles.loss(trained).backward()
        adam.step()
        schedule.step()
    fitted = tiles.solve({k: v.detach() for k, v in trained.items()})
    # Keep the solution from before Adam if its error is smaller: near an optimum, Adam's first steps harm.
    return fitted if float(tiles.loss(fitted)) < first else leaves


def _tensors_of(plan: Plan, trained: nn.Module | TensorMap) -> Params:
    if isinstance(trained, nn.Module):
        check_plan(plan, trained)
        trained = dict(trained.named_parameters()) | dict(trained.named_buffers())
    elif not isinstance(trained, Mapping):
        raise TypeError(f"trained must be a module or tensors by name, got {type(trained).__name__}")
    shapes = {x.name: x.shape for x in (*plan.tensors, *plan.buffers)}
    got = {name: tuple(trained[name].shape) if name in trained else None for name in shapes}
    if wrong := [name for name in shapes if got[name] != shapes[name]]:
        expected, found = ({name: sizes[name] for name in wrong} for sizes in (shapes, got))
        raise ValueError(f"the weights do not fit the plan: expected {expected}, got {found}")
    tensors = {name: trained[name].detach() for name in shapes}
    if bad := [t.name for t in plan.generated if not tensors[t.name].isfinite().all()]:
        raise ValueError(f"the weights must be finite, got NaN or infinite numbers in {bad}")
    return tensors
