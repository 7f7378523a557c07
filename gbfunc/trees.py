"""Trees of tensors, flattened to `{name: tensor}` and rebuilt by name, never by position.

A tree nests mappings, tuples and lists. The name of a tensor is the path to it: `gnets/<ensemble>/<leaf>`,
`direct/<parameter>`, `buffers/<buffer>`, `opt/leaves/<parameter>/<entry>`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from gbfunc.types import GenomeLike, Params

GNET, DIRECT, BUFFERS = "gnets/", "direct/", "buffers/"


class TensorSpec(NamedTuple):
    """Expected properties of a tensor; None is any."""

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None


def differentiable(dtype: torch.dtype) -> bool:
    """Whether numbers are real or complex."""
    return dtype.is_floating_point or dtype.is_complex


def spec_of(x: Tensor) -> TensorSpec:
    """The spec of a tensor."""
    return TensorSpec(tuple(x.shape), x.dtype, x.device)


def flatten_tree(tree: Any, prefix: str = "") -> Params:
    """Every tensor of a tree by its name after `prefix`, in the order of the tree.

    Raises:
        TypeError: for a leaf that is no tensor, or two tensors of one name.

    >>> list(flatten_tree({"direct": {"0.bias": torch.ones(1)}, "opt": (torch.ones(2), None)}))
    ['direct/0.bias', 'opt/0']
    """
    flat: Params = {}
    for key, child in _children(tree, prefix):
        name = f"{prefix}{key}"
        for k, x in ((name, child),) if isinstance(child, Tensor) else flatten_tree(child, f"{name}/").items():
            if k in flat:
                raise TypeError(f"two tensors of the state have the name {k!r}")
            flat[k] = x
    return flat


def _children(tree: Any, prefix: str) -> Iterable[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return tree.items()
    if isinstance(tree, tuple | list):
        return zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True)
    if tree is None:
        return ()
    raise TypeError(f"a state must hold tensors alone, got {type(tree).__name__} at {prefix[:-1]!r}")


def unflatten_tree(flat: Mapping[str, Any], like: Any, prefix: str = "") -> Any:
    """Undo `flatten_tree`: the values of `flat` in the structure of `like`, whose tensors are not read."""
    if like is None:
        return None
    values = {
        key: flat[f"{prefix}{key}"] if isinstance(x, Tensor) else unflatten_tree(flat, x, f"{prefix}{key}/")
        for key, x in _children(like, prefix)
    }
    if isinstance(like, tuple | list):
        make: Any = type(like)
        return make(*values.values()) if hasattr(like, "_fields") else make(values.values())
    return _mapping_like(like, values)


def flat_genome(genome: GenomeLike) -> Params:
    """All trained leaves by name: `gnets/<ensemble>/<leaf>` and `direct/<parameter>`."""
    return flatten_tree({"gnets": genome.gnets, "direct": genome.direct})


def stored_tensors(genome: GenomeLike) -> Params:
    """All tensors of a genome by name, buffers too, on the CPU and without a graph."""
    tensors = flat_genome(genome) | flatten_tree(genome.buffers, BUFFERS)
    return {k: x.detach().cpu() for k, x in tensors.items()}


def like_genome(flat: Params, genome: GenomeLike) -> Any:
    """Undo `flat_genome`: a `Genome` or `TrainState` with the values of `flat` in place of its leaves."""
    gnets, direct = unflatten_tree(flat, genome.gnets, GNET), unflatten_tree(flat, genome.direct, DIRECT)
    return genome._replace(gnets=gnets, direct=direct)


def compare_trees(expected: Mapping[str, Tensor | TensorSpec], got: Mapping[str, Tensor], what: str) -> None:
    """Raise ValueError, with the words `what`, for missing, unknown and wrong tensors of a flat tree.

    A tensor in `expected` stands for its shape and dtype.
    """
    parts = []
    if expected.keys() != got.keys():
        missing, unknown = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
        parts = [f"missing {_some(missing)}, unknown {_some(unknown)}"]
    wrong: dict[str, list[str]] = {}
    for name, want in expected.items():
        shape, dtype, device = want if isinstance(want, TensorSpec) else (want.shape, want.dtype, None)
        x = got.get(name)
        # A short test for tensors that fit, as all leaves do at every step.
        if x is None or (shape in (None, x.shape) and dtype in (None, x.dtype) and device in (None, x.device)):
            continue
        pairs = zip(TensorSpec._fields, (shape and tuple(shape), dtype, device), spec_of(x), strict=True)
        field, a, b = next((field, a, b) for field, a, b in pairs if a is not None and a != b)
        wrong.setdefault(field, []).append(f"{name} is {b}, expected {a}")
    parts += [f"wrong {k} {_some(sorted(wrong[k]))}" for k in TensorSpec._fields if k in wrong]
    if parts:
        raise ValueError(f"{what}: {', '.join(parts)}")


def _some(items: list[str], most: int = 8) -> str:
    return f"{items[:most]}" + (f" and {len(items) - most} more" if len(items) > most else "")


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`optree.tree_map`, also into any mapping (Hugging Face's `BatchEncoding`, `ModelOutput`); None has no leaves."""
    import optree  # here, as the import takes a while

    def at(x: Any, *others: Any) -> Any:
        if not isinstance(x, Mapping):
            return fn(x, *others)
        return _mapping_like(x, {k: tree_map(fn, x[k], *(other[k] for other in others)) for k in x})

    return optree.tree_map(at, tree, *rest)


def _mapping_like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """The items in a mapping of the same type, or in a dict if the constructor does not take them."""
    if type(mapping) is dict:
        return items
    try:
        made: Any = type(mapping)(items)  # pyright: ignore[reportCallIssue]
        same = made.keys() == items.keys() and all(made[k] is x for k, x in items.items())
    except Exception:  # A constructor may raise anything.
        return items
    return made if same else items


def tree_leaves(tree: Any, path: str = "tree", *, packed: bool = False) -> list[tuple[str, Any]]:
    """Every leaf with its expression, such as `("batch['x'][0]", tensor)`, also in any mapping.

    `path` is the expression of the tree itself; with `packed` a `PackedSequence` is a leaf.
    """
    import optree  # as in `tree_map`

    is_leaf = (lambda x: isinstance(x, PackedSequence)) if packed else None
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, is_leaf)
    named = []
    for accessor, leaf in zip(accessors, leaves, strict=True):
        here = accessor.codify(path)
        if isinstance(leaf, Mapping):
            named += [pair for k, v in leaf.items() for pair in tree_leaves(v, f"{here}[{k!r}]", packed=packed)]
        else:
            named.append((here, leaf))
    return named


def holds_tensors(x: Any) -> bool:
    """Whether a leaf is an object with tensors as attributes."""
    return not isinstance(x, Tensor) and any(isinstance(v, Tensor) for v in getattr(x, "__dict__", {}).values())


def refuse_packed(batch: Any) -> None:
    """Raise ValueError for a `PackedSequence`, in which a row belongs to several examples."""
    if any(isinstance(x, PackedSequence) for _, x in tree_leaves(batch, packed=True)):
        raise ValueError(
            "a batch with a PackedSequence has no rows to split, and no vmap: pass padded sequences and their lengths "
            "(with microbatches, pack them in the loss function)"
        )


def split_batch(batch: Any, n: int) -> list[Any]:
    """A batch as `n` equal microbatches, split along the first dimension: [b, ...] -> [b / n, ...].

    Each microbatch has all bools. ValueError for other leaves that are not tensors, packed sequences, and tensors with
    different first dimensions or one that `n` does not divide.
    """
    refuse_packed(batch)
    for path, x in tree_leaves(batch, "batch"):
        if not isinstance(x, bool) and (not isinstance(x, Tensor) or x.ndim == 0 or len(x) % n):
            expected = f"microbatches={n} must divide the first dimension of every tensor of the batch"
            shape = f" of {tuple(x.shape)}, {x.dtype}" if isinstance(x, Tensor) else ""
            what = "a tensor" if shape else f"an object of type {type(x).__name__}"
            raise ValueError(f"{expected}, got {what}{shape}: {path}")
    n_rows(batch)
    return split_rows(batch, n)


def split_rows(batch: Any, n: int) -> list[Any]:
    """A batch in `n` shares, longer ones first, some maybe empty; each share has all scalars and other leaves.

    ValueError for a packed sequence, a sparse or nested tensor, an array, or an object with tensors as attributes.
    """
    refuse_packed(batch)
    leaves = tree_leaves(batch, "batch")
    for path, x in leaves:
        if holds_tensors(x) or (not isinstance(x, Tensor) and getattr(x, "ndim", 0)):
            raise ValueError(f"{path} is a {type(x).__name__}, whose rows are not known: give tensors, as a dict say")
        if isinstance(x, Tensor) and (x.layout != torch.strided or x.is_nested):
            what = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
            raise ValueError(f"{path} is {what}, whose rows torch cannot split: give dense tensors, or their parts")
    pieces = [x.tensor_split(n) if isinstance(x, Tensor) and x.ndim else (x,) * n for _, x in leaves]
    shares = []
    for i in range(n):
        rest = iter([parts[i] for parts in pieces])
        shares.append(tree_map(lambda x, rest=rest: next(rest), batch))
    return shares


def n_rows(batch: Any) -> int | None:
    """First dimension of the tensors of a batch, or None without such tensors; ValueError if dimensions differ."""
    paths = {len(x): path for path, x in tree_leaves(batch, "batch") if isinstance(x, Tensor) and x.ndim}
    if len(paths) > 1:
        got = ", ".join(f"{n} of {path}" for n, path in sorted(paths.items()))
        raise ValueError(f"tensors of a batch must have the same first dimension, got {got}")
    return next(iter(paths), None)


def mean_tree(trees: Sequence[Any], weights: Sequence[float]) -> Any:
    """The mean of every number over trees of one structure, in floating point, by `weights` of sum 1.

    Other leaves are taken from the last tree. ValueError for trees of different structures or shapes.
    """

    def mean(*values: Any) -> Any:
        if not all(isinstance(x, Tensor | Number) for x in values):
            return values[-1]
        numbers = [torch.as_tensor(x) for x in values]
        if len(shapes := {tuple(x.shape) for x in numbers}) > 1:
            raise ValueError(f"aux must have tensors of the same shapes for all microbatches, got {sorted(shapes)}")
        stacked = torch.stack(numbers)
        stacked = stacked if differentiable(stacked.dtype) else stacked.float()
        return sum(w * x for w, x in zip(weights, stacked, strict=True))

    paths, *others = ([path for path, _ in tree_leaves(tree, "aux")] for tree in trees)
    for other in others:
        if other != paths:
            raise ValueError(f"aux must have the same entries for all microbatches, got {paths} and {other}")
    return tree_map(mean, *trees)
