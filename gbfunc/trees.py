"""Trees of named tensors: flatten, rebuild and measure them by name, never by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from gbfunc.types import GNets, Params

GNET, DIRECT = "gnets/", "direct/"


def flat_genome(gnets: GNets, direct: Params) -> Params:
    """All trained leaves in one flat dict: `gnets/<ensemble>/<leaf>` and `direct/<parameter>`."""
    flat = {f"{GNET}{e}/{k}": leaf for e, leaves in gnets.items() for k, leaf in leaves.items()}
    return flat | {f"{DIRECT}{name}": leaf for name, leaf in direct.items()}


def like_genome(flat: Params, gnets: GNets, direct: Params) -> tuple[GNets, Params]:
    """Undo `flat_genome`: the values of `flat` in the structure of `gnets` and `direct`."""
    return (
        {e: {k: flat[f"{GNET}{e}/{k}"] for k in leaves} for e, leaves in gnets.items()},
        {name: flat[f"{DIRECT}{name}"] for name in direct},
    )


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`optree.tree_map` over dicts, tuples and NamedTuples of tensors; None is a subtree without leaves."""
    return optree.tree_map(fn, tree, *rest)


def numel(tree: Any) -> int:
    """Numbers in all tensors of a tree."""
    return sum(leaf.numel() for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor))


class _Pieces:
    """A leaf that holds the pieces of a leaf (a tuple would be a subtree)."""

    def __init__(self, items: tuple[Any, ...]) -> None:
        self.items = items


def split_batch(batch: Any, n: int) -> list[Any]:
    """A batch as `n` equal microbatches, split along the first dimension: [b, ...] -> [b / n, ...].

    Raises:
        ValueError: for a leaf that is no tensor, or one whose first dimension `n` does not divide.
    """

    def cut(x: Any) -> _Pieces:
        if not isinstance(x, Tensor) or x.ndim == 0 or len(x) % n:
            what = f"a tensor of {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
            expected = f"microbatches={n} must divide the first dimension of every tensor of the batch"
            raise ValueError(f"{expected}, got {what}")
        return _Pieces(x.tensor_split(n))

    pieces = tree_map(cut, batch)
    return [tree_map(lambda p, i=i: p.items[i], pieces) for i in range(n)]


def split_rows(batch: Any, n: int) -> list[Any]:
    """A batch in `n` shares as even as can be, some of them empty, the longer ones first: [b, ...] -> [b_i, ...].

    Scalars and what is no tensor are in every share.
    """

    def cut(x: Any) -> _Pieces:
        return _Pieces(x.tensor_split(n) if isinstance(x, Tensor) and x.ndim else (x,) * n)

    pieces = tree_map(cut, batch)
    return [tree_map(lambda p, i=i: p.items[i], pieces) for i in range(n)]


def n_rows(batch: Any) -> int | None:
    """First dimension of the tensors of a batch, None if it has no tensor with one.

    Raises:
        ValueError: if they differ.
    """
    lengths = {len(x) for x in optree.tree_leaves(batch) if isinstance(x, Tensor) and x.ndim}
    if len(lengths) > 1:
        raise ValueError(f"tensors of a batch must have the same first dimension, got {sorted(lengths)}")
    return lengths.pop() if lengths else None


def mean_tree(trees: Sequence[Any], weights: Sequence[float] | None = None) -> Any:
    """The weighted mean of every leaf over trees of the same structure, as a floating-point tensor.

    Args:
        trees: the trees.
        weights: as many numbers, whose sum is 1; None weighs all alike.
    """

    def mean(*values: Any) -> Tensor:
        stacked = torch.stack([torch.as_tensor(x) for x in values])
        stacked = stacked if stacked.is_floating_point() else stacked.float()
        if weights is None or len(set(weights)) == 1:
            return stacked.mean(0)
        return (stacked * stacked.new_tensor(weights).reshape(-1, *(1,) * (stacked.ndim - 1))).sum(0)

    return tree_map(mean, *trees)


def shapes_of(tree: Any) -> tuple[Any, ...]:
    """A hashable summary of a tree: its structure, and shape and dtype of every tensor."""
    leaves, structure = optree.tree_flatten(tree)
    return structure, tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves)
