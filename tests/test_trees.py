"""Trees of tensors by name: flattening and its inverse, splitting a batch, averaging."""

import re
from collections import ChainMap, OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gbfunc.trees import (
    TensorSpec,
    compare_trees,
    flat_genome,
    flatten_tree,
    like_genome,
    mean_tree,
    n_rows,
    split_batch,
    split_rows,
    tree_map,
    unflatten_tree,
)
from gbfunc.types import Genome
from tests.support.trees_equal import copy_tree, same_bits

NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="._"), min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def params(draw: st.DrawFn) -> dict[str, Tensor]:
    return {name: torch.randn(draw(SHAPES)) for name in draw(st.lists(NAMES, unique=True, max_size=4))}


@st.composite
def genomes(draw: st.DrawFn) -> Genome:
    return Genome(draw(st.dictionaries(NAMES, params(), max_size=3)), draw(params()), {})


class Batch(NamedTuple):
    x: Tensor
    y: dict[str, Any]


@given(genomes())
def test_a_flat_genome_has_every_leaf_once_and_goes_back(genome: Genome) -> None:
    flat = flat_genome(genome)
    assert len(flat) == sum(map(len, genome.gnets.values())) + len(genome.direct)
    assert same_bits(like_genome(flat, genome), genome)
    # By name, whatever the order.
    turned = dict(reversed(flat.items()))
    assert same_bits(like_genome(turned, genome), genome)


@given(st.integers(1, 5), st.integers(0, 3), SHAPES)
def test_microbatches_are_equal_and_make_up_the_batch(n: int, each: int, shape: list[int]) -> None:
    batch = Batch(
        torch.randn(n * each, *shape), {"a": torch.arange(n * each), "none": None, "pair": (torch.ones(n * each),)}
    )
    before = copy_tree(batch)
    parts = split_batch(batch, n)
    assert len(parts) == n and all(isinstance(part, Batch) for part in parts)
    assert all(len(part.x) == len(part.y["a"]) == each and part.y["none"] is None for part in parts)
    whole = tree_map(lambda *pieces: torch.cat(pieces), *parts)
    assert same_bits(whole, batch) and same_bits(batch, before)


class Picky(UserDict):
    def __init__(self, size: int) -> None:
        super().__init__(x=torch.arange(size))


class Output(OrderedDict):
    def __getattr__(self, name: str) -> Any:
        return self[name]


MAPPINGS: list[tuple[Any, type]] = [
    (UserDict(x=torch.arange(6)), UserDict),
    (Output(x=torch.arange(6)), Output),
    (ChainMap({"x": torch.arange(6)}), ChainMap),
    (MappingProxyType({"x": torch.arange(6)}), MappingProxyType),
    (defaultdict(list, x=torch.arange(6)), defaultdict),
    (Picky(6), dict),
]


@pytest.mark.parametrize("nest", [lambda m: m, lambda m: {"a": (m,)}, lambda m: UserDict(a=m)], ids=["", "in", "both"])
@pytest.mark.parametrize(("mapping", "kind"), MAPPINGS, ids=[type(m).__name__ for m, _ in MAPPINGS])
def test_any_mapping_is_split(mapping: Any, kind: type, nest: Callable[[Any], Any]) -> None:
    batch = nest(mapping)
    assert n_rows(batch) == 6
    for split in (split_batch, split_rows):
        parts = split(batch, 3)
        for i, part in enumerate(parts):
            inner = part if batch is mapping else part["a"] if isinstance(batch, UserDict) else part["a"][0]
            assert type(inner) is kind and torch.equal(inner["x"], torch.arange(2 * i, 2 * i + 2))
    assert [n_rows(part) for part in split_rows(batch, 4)] == [2, 2, 1, 1]


class State(NamedTuple):
    gnets: dict[str, dict[str, Tensor]]
    opt: Any


def test_a_name_is_the_path_to_a_tensor() -> None:
    state = State({"b": {"z": torch.ones(1)}, "a": {"m": torch.ones(2)}}, (torch.ones(3), None, [torch.ones(4)]))
    flat = flatten_tree(state)
    assert list(flat) == ["gnets/b/z", "gnets/a/m", "opt/0", "opt/2/0"]
    assert list(flatten_tree(state.opt, "opt/")) == ["opt/0", "opt/2/0"]
    back = unflatten_tree(dict(reversed(flat.items())), state)
    assert isinstance(back, State) and list(back.gnets) == ["b", "a"] and same_bits(back, state)
    with pytest.raises(TypeError, match="only tensors, got int at 'opt'"):
        flatten_tree({"opt": 1})
    with pytest.raises(TypeError, match="tensors of a state must have different names, got 'opt/a/b'"):
        flatten_tree({"opt": {"a": {"b": torch.ones(1)}, "a/b": torch.ones(1)}})


@given(genomes(), genomes())
def test_two_trees_differ_unless_names_and_shapes_are_equal(one: Genome, other: Genome) -> None:
    a, b = flat_genome(one), flat_genome(other)
    same = {k: (x.shape, x.dtype) for k, x in a.items()} == {k: (x.shape, x.dtype) for k, x in b.items()}
    with nullcontext() if same else pytest.raises(ValueError, match="missing|wrong"):
        compare_trees(a, b, "they differ")
    compare_trees(a, a, "they differ")
    compare_trees({k: TensorSpec(tuple(x.shape)) for k, x in a.items()}, a, "they differ")


def test_a_difference_is_put_into_words() -> None:
    expected: Mapping[str, Any] = {"a": torch.ones(2), "b": TensorSpec((1,)), "c": torch.ones(1), "d": torch.ones(1)}
    got = {"a": torch.ones(3, 1), "b": torch.ones(1).double(), "c": torch.ones(1).double(), "e": torch.ones(0)}
    words = (
        r"missing ['d'], unknown ['e'], wrong shape ['a is (3, 1), expected (2,)'], "
        r"wrong dtype ['c is torch.float64, expected torch.float32']"
    )
    with pytest.raises(ValueError, match=f"^the state does not fit: {re.escape(words)}$"):
        compare_trees(expected, got, "the state does not fit")
    many = {f"{i:02}": torch.ones(1) for i in range(20)}
    with pytest.raises(ValueError, match=r"'02'\] and 17 more, unknown \[\]$"):
        compare_trees(many, {}, "the state does not fit")


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=6))
def test_the_mean_of_trees_is_the_mean_of_every_leaf(values: list[int]) -> None:
    trees = [
        {"f": torch.tensor([v, 2.0 * v], dtype=torch.float64), "i": torch.tensor(v), "n": (v, None)} for v in values
    ]
    mean = mean_tree(trees, [1 / len(trees)] * len(trees))
    expected = sum(values) / len(values)
    assert mean["f"].dtype == torch.float64 and mean["n"][1] is None
    torch.testing.assert_close(mean["f"], torch.tensor([expected, 2 * expected], dtype=torch.float64))
    for leaf in (mean["i"], mean["n"][0]):
        torch.testing.assert_close(leaf, torch.tensor(expected))
    named = [{"loss": torch.tensor(1.0), "phase": "warm"}, {"loss": torch.tensor(4.0), "phase": "hot"}]
    mean = mean_tree(named, (0.5, 0.5))
    assert mean == {"loss": torch.tensor(2.5), "phase": "hot"}


PACKED = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(1)])
EQUAL, FIRST = (
    "microbatches=2 must divide the first dimension of every tensor of the batch, got ",
    "same first dimension, got",
)
NOT_SPLIT: dict[str, tuple[Callable[[], Any], str]] = {
    "odd": (lambda: split_batch(UserDict(a=[torch.full((3,), 12.5)]), 2), r"a tensor of \(3,\), .*batch\['a'\]\[0\]"),
    "scalar": (lambda: split_batch({"x": torch.ones(4), "y": torch.tensor(12.5)}, 2), rf"{EQUAL}a tensor of \(\)"),
    "text": (lambda: split_batch(Batch(torch.ones(4), {"a": "12.5"}), 2), r"an object of type str: batch.y\['a'\]"),
    "set": (lambda: split_batch({"a": {12.5}}, 2), rf"{EQUAL}an object of type set: batch\['a'\]"),
    "lengths": (lambda: split_batch((torch.ones(4, 3), torch.ones(2)), 2), rf"{FIRST} 2 of .*\[1\], 4 of .*\[0\]"),
    "rows": (
        lambda: n_rows({"x": torch.ones(2), "y": torch.ones(3)}),
        rf"{FIRST} 2 of batch\['x'\], 3 of batch\['y'\]",
    ),
    "packed": (lambda: split_batch({"x": [PACKED]}, 2), "must have rows to split or vmap, got a PackedSequence"),
    "packed rows": (lambda: split_rows({"x": [PACKED]}, 2), "must have rows to split or vmap, got a PackedSequence"),
    "array": (lambda: split_rows({"y": np.ones(4)}, 2), r"batch\['y'\] must have tensors, .*got a ndarray"),
    "sparse": (lambda: split_rows({"y": torch.eye(4).to_sparse()}, 2), "got a tensor of layout torch.sparse_coo: pass"),
    "entries": (lambda: mean_tree([{"a": 1.0}, {"b": 1.0}], (0.5, 0.5)), "aux must have the same entries for all"),
    "shapes": (lambda: mean_tree([torch.ones(2), torch.ones(1)], (1, 0)), r"the same shapes.* got \[\(1,\), \(2,\)\]"),
}


@pytest.mark.parametrize("name", NOT_SPLIT)
def test_an_error_names_the_place_and_never_the_values(name: str) -> None:
    call, words = NOT_SPLIT[name]
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert "12.5" not in str(caught.value)


def test_flags_and_numbers_are_in_each_share() -> None:
    first, second = split_batch({"x": torch.arange(4), "return_loss": True}, 2)
    assert first["return_loss"] is second["return_loss"] is True
    assert torch.equal(torch.cat([first["x"], second["x"]]), torch.arange(4))
    assert [share["n"] for share in split_rows({"x": torch.ones(4), "n": np.float64(3)}, 2)] == [3.0, 3.0]
