"""From the tiles, factors or recipes of a tensor's slots to the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from gbfunc.factored import FactoredWeight, factored_weight, remat_weight, stack_rows
from gbfunc.factored.interface import Report
from gbfunc.hypernets.ensemble import dense_tiles
from gbfunc.layers import KINDS
from gbfunc.plan import DTYPES, Plan, Slot, TensorPlan
from gbfunc.tiling import join_tiles
from gbfunc.types import Factors, Params

_FACTORED_KINDS = frozenset({"linear", "transposed_linear", "conv", "attention_in", "attention", "embedding", "matrix"})


class Recipe(NamedTuple):
    """How one slot's tiles are made, without making them.

    Attributes:
        slot: the slot.
        leaves: what its g-nets are made of.
        noise: of the stochastic ones.
        tiles: scaled tiles, or their factors, from leaves and noise.
    """

    slot: Slot
    leaves: Params
    noise: Params | None
    tiles: Callable[[Params, Params | None], Tensor | Factors]


Part = Tensor | Factors | Recipe


def can_factor(plan: Plan, tensor: TensorPlan) -> bool:
    """Whether a tensor can be left as factors: factorised g-nets, of one tiling where it has several matrices."""
    first = tensor.slots[0]
    alike = all((s.hypernet, s.grid) == (first.hypernet, first.grid) for s in tensor.slots)
    whole = len(tensor.slots) == 1 or first.grid.rows % first.grid.tile_rows == 0
    wide = DTYPES[tensor.dtype].itemsize >= plan.dtype.itemsize
    return first.hypernet.factorised and tensor.kind in _FACTORED_KINDS and alike and whole and wide


def factored_tensor(tensor: TensorPlan, parts: list[Factors], report: Report | None) -> Tensor:
    """The tensor as a lazy weight from the factors of its slots."""
    weights: list[FactoredWeight] = []
    transposed = tensor.kind == "transposed_linear"
    for slot, factors in zip(tensor.slots, parts, strict=True):
        grid = slot.grid
        shape = tensor.shape if len(parts) == 1 else (grid.rows, grid.cols)
        cut = (grid.n_rows, grid.n_cols)
        left, right = factors.left.unflatten(0, cut), factors.right.unflatten(0, cut)
        size = {"rows": grid.rows, "cols": grid.cols}
        weights.append(
            factored_weight(left, right, shape, **size, transposed=transposed, name=tensor.name, report=report)
        )
    return weights[0] if len(weights) == 1 else stack_rows(weights)


def folded_tensor(plan: Plan, tensor: TensorPlan, matrices: list[Tensor]) -> Tensor:
    """The tensor from the matrices of its slots."""
    matrices = [m + slot.offset if slot.offset else m for m, slot in zip(matrices, tensor.slots, strict=True)]
    weight = KINDS[tensor.kind].fold(matrices, tensor.shape)
    own_dtype = DTYPES[tensor.dtype]
    # Generation runs in the leaves' dtype; only a narrower p-net (bf16, fp16) is cast to.
    return weight.to(own_dtype) if own_dtype.itemsize < plan.dtype.itemsize else weight


def rematerialised_tensor(plan: Plan, tensor: TensorPlan, recipes: list[Recipe], report: Report | None) -> Tensor:
    """The tensor as a lazy weight that is made for each use, and made again in backward."""
    inputs: list[Tensor] = []
    names: list[list[tuple[str, bool]]] = []
    for recipe in recipes:
        noise = recipe.noise or {}
        names.append([(k, False) for k in recipe.leaves] + [(k, True) for k in noise])
        inputs += [*recipe.leaves.values(), *noise.values()]

    def make(*flat: Tensor) -> Tensor:
        given = iter(flat)
        matrices = []
        for recipe, own in zip(recipes, names, strict=True):
            values = [(k, drawn, next(given)) for k, drawn in own]
            leaves = {k: v for k, drawn, v in values if not drawn}
            noise = {k: v for k, drawn, v in values if drawn} or None
            matrices.append(join_tiles(dense_tiles(recipe.tiles(leaves, noise)), recipe.slot.grid))
        return folded_tensor(plan, tensor, matrices)

    first = inputs[0]
    own_dtype = DTYPES[tensor.dtype]
    dtype = own_dtype if own_dtype.itemsize < plan.dtype.itemsize else first.dtype
    return remat_weight(make, tuple(inputs), tensor.shape, dtype, first.device, name=tensor.name, report=report)
