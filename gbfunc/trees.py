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
    """Properties that a tensor must have; None allows any value."""

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    device: torch.device | None = None


def differentiable(dtype: torch.dtype) -> bool:
    """Return True for real and complex floating-point dtypes."""
    return dtype.is_floating_point or dtype.is_complex


def spec_of(x: Tensor) -> TensorSpec:
    """Return the shape, dtype and device of a tensor."""
    return TensorSpec(tuple(x.shape), x.dtype, x.device)


def flatten_tree(tree: Any, prefix: str = "") -> Params:
    """Return all tensors of a tree by name, in the order of the tree. Every name begins with `prefix`.

    Raises:
        TypeError: if a leaf is not a tensor, or if two tensors have the same name.

    >>> list(flatten_tree({"direct": {"0.bias": torch.ones(1)}, "opt": (torch.ones(2), None)}))
    ['direct/0.bias', 'opt/0']
    """
    flat: Params = {}
    for key, child in _children(tree, prefix):
        name = f"{prefix}{key}"
        for k, x in ((name, child),) if isinstance(child, Tensor) else flatten_tree(child, f"{name}/").items():
            if k in flat:
                raise TypeError(f"tensors of a state must have different names, got {k!r} twice: rename one")
            flat[k] = x
    return flat


def _children(tree: Any, prefix: str) -> Iterable[tuple[Any, Any]]:
    if isinstance(tree, Mapping):
        return tree.items()
    if isinstance(tree, tuple | list):
        return zip(getattr(tree, "_fields", range(len(tree))), tree, strict=True)
    if tree is None:
        return ()
    raise TypeError(f"a state must contain only tensors, got {type(tree).__name__} at {prefix[:-1]!r}")


def unflatten_tree(flat: Mapping[str, Any], like: Any, prefix: str = "") -> Any:
    """Undo `flatten_tree`: return the values of the dict `flat`, {path: value}, in the structure of the tree `like`."""
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
    """Return all trained leaves by name: `gnets/<ensemble>/<leaf>` and `direct/<parameter>`."""
    return flatten_tree({"gnets": genome.gnets, "direct": genome.direct})


def stored_tensors(genome: GenomeLike) -> Params:
    """Return all tensors of a genome by name, including buffers. The tensors are detached and on the CPU."""
    tensors = flat_genome(genome) | flatten_tree(genome.buffers, BUFFERS)
    return {k: x.detach().cpu() for k, x in tensors.items()}


def like_genome(flat: Params, genome: GenomeLike) -> Any:
    """Undo `flat_genome`: return a copy of `genome` (a `Genome` or `TrainState`) with the leaves in the dict `flat`."""
    gnets, direct = unflatten_tree(flat, genome.gnets, GNET), unflatten_tree(flat, genome.direct, DIRECT)
    return genome._replace(gnets=gnets, direct=direct)


def compare_trees(expected: Mapping[str, Tensor | TensorSpec], got: Mapping[str, Any], what: str) -> None:
    """Raise ValueError if names, shapes, dtypes or devices of tensors differ from `expected`.

    The message begins with `what`. If an entry of `expected` is a tensor, not a `TensorSpec`, devices may differ.
    """
    found = []
    if expected.keys() != got.keys():
        missing, unknown = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
        found = [f"missing {_some(missing)}, unknown {_some(unknown)}"]
    wrong: dict[str, list[str]] = {}
    for name, want in expected.items():
        shape, dtype, device = want if isinstance(want, TensorSpec) else (want.shape, want.dtype, None)
        x = got.get(name)
        # Do not build a `TensorSpec` first, which would be slow: every training step checks all leaves.
        if x is None or (shape in (None, x.shape) and dtype in (None, x.dtype) and device in (None, x.device)):
            continue
        pairs = zip(TensorSpec._fields, (shape and tuple(shape), dtype, device), spec_of(x), strict=True)
        field, a, b = next((field, a, b) for field, a, b in pairs if a is not None and a != b)
        wrong.setdefault(field, []).append(f"{name} is {b}, expected {a}")
    found += [f"wrong {k} {_some(sorted(wrong[k]))}" for k in TensorSpec._fields if k in wrong]
    if found:
        raise ValueError(f"{what}: {', '.join(found)}")


def _some(items: list[str], most: int = 3) -> str:
    return f"{items[:most]}" + (f" and {len(items) - most} more" if len(items) > most else "")


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `fn` to leaves as `optree.tree_map` does, also inside mappings of any type (`ModelOutput`)."""
    import optree  # Imported here, because the import is slow

    def at(x: Any, *others: Any) -> Any:
        if not isinstance(x, Mapping):
            return fn(x, *others)
        return _mapping_like(x, {k: tree_map(fn, x[k], *(other[k] for other in others)) for k in x})

    return optree.tree_map(at, tree, *rest)


def _mapping_like(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    if type(mapping) is dict:
        return items
    try:
        built: Any = type(mapping)(items)  # pyright: ignore[reportCallIssue]
        same = built.keys() == items.keys() and all(built[k] is x for k, x in items.items())
    except Exception:  # A constructor may raise any exception
        return items
    return built if same else items


def tree_leaves(tree: Any, path: str = "tree", *, packed: bool = False) -> list[tuple[str, Any]]:
    """Return pairs of a Python expression and a leaf, such as `("batch['x'][0]", tensor)`, for all leaves of a tree.

    `path` is the expression for the tree itself. The tree may have mappings of any type. With `packed`, a
    `PackedSequence` is one leaf.
    """
    import optree  # Imported here, as in `tree_map`

    is_leaf = (lambda x: isinstance(x, PackedSequence)) if packed else None
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, is_leaf)
    named = []
    for accessor, leaf in zip(accessors, leaves, strict=True):
        expression = accessor.codify(path)
        if isinstance(leaf, Mapping):
            named += [pair for k, v in leaf.items() for pair in tree_leaves(v, f"{expression}[{k!r}]", packed=packed)]
        else:
            named.append((expression, leaf))
    return named


def holds_tensors(x: Any) -> bool:
    """Return True if an object is not a tensor, but has attributes that are tensors."""
    return not isinstance(x, Tensor) and any(isinstance(v, Tensor) for v in getattr(x, "__dict__", {}).values())


def refuse_packed(batch: Any) -> None:
    """Raise ValueError if a batch has a `PackedSequence`, which cannot be split because its rows are not examples."""
    if any(isinstance(x, PackedSequence) for _, x in tree_leaves(batch, packed=True)):
        raise ValueError(
            "a batch must have rows to split or vmap, got a PackedSequence: pass padded sequences and their lengths "
            "(with microbatches, pack them in the loss function)"
        )


def split_batch(batch: Any, n: int) -> list[Any]:
    """Split a batch into `n` equal microbatches along the first dimension of its tensors.

    Bools, such as flags, are copied to every microbatch. All other leaves must be tensors. Raises ValueError for any
    other type, for a packed sequence, or if the tensors' first dimensions differ or are not multiples of `n`.
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
    """Split the rows of a batch (the first dimension) into `n` batches, whose sizes differ by at most one row.

    Batches may be empty. Scalars and values that are not tensors are copied to every batch. Raises ValueError for a
    packed sequence, a sparse or nested tensor, an array, or an object with tensors as attributes.
    """
    refuse_packed(batch)
    leaves = tree_leaves(batch, "batch")
    for path, x in leaves:
        if holds_tensors(x) or (not isinstance(x, Tensor) and getattr(x, "ndim", 0)):
            raise ValueError(f"{path} must have tensors, to split its rows, got a {type(x).__name__}: pass a dict")
        if isinstance(x, Tensor) and (x.layout != torch.strided or x.is_nested):
            what = "a nested tensor" if x.is_nested else f"a tensor of layout {x.layout}"
            raise ValueError(f"{path} must be a dense tensor to split its rows, got {what}: pass its dense parts")
    pieces = [x.tensor_split(n) if isinstance(x, Tensor) and x.ndim else (x,) * n for _, x in leaves]
    shares = []
    for i in range(n):
        rest = iter([piece[i] for piece in pieces])
        shares.append(tree_map(lambda x, rest=rest: next(rest), batch))
    return shares


def n_rows(batch: Any) -> int | None:
    """Return the first dimension of a batch's tensors, None without tensors; ValueError if first dimensions differ."""
    paths = {len(x): path for path, x in tree_leaves(batch, "batch") if isinstance(x, Tensor) and x.ndim}
    if len(paths) > 1:
        got = ", ".join(f"{n} of {path}" for n, path in sorted(paths.items()))
        raise ValueError(f"tensors of a batch must have the same first dimension, got {got}")
    return next(iter(paths), None)


def mean_tree(trees: Sequence[Any], weights: Sequence[float]) -> Any:
    """Average numbers and tensors over trees of equal structure, with `weights` whose sum is 1.

    All other leaves are taken from the last tree. Raises ValueError if the trees' structures or shapes differ.
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
