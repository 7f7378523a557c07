"""Trees of tensors by name: flattening and its inverse, splitting a batch, averaging."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gbfunc.trees import flat_genome, like_genome, mean_tree, numel, shapes_of, split_batch, tree_map
from tests.support.trees_equal import copy_tree, same_bits

NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="._"), min_size=1, max_size=8)
SHAPES = st.lists(st.integers(0, 3), max_size=3)


@st.composite
def params(draw: st.DrawFn) -> dict[str, Tensor]:
    return {name: torch.randn(draw(SHAPES)) for name in draw(st.lists(NAMES, unique=True, max_size=4))}


@st.composite
def genomes(draw: st.DrawFn) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    return draw(st.dictionaries(NAMES, params(), max_size=3)), draw(params())


class Batch(NamedTuple):
    x: Tensor
    y: dict[str, Any]


@given(genomes())
def test_a_flat_genome_has_every_leaf_once_and_goes_back(genome: Any) -> None:
    gnets, direct = genome
    flat = flat_genome(gnets, direct)
    assert len(flat) == sum(map(len, gnets.values())) + len(direct)
    assert numel(flat) == numel(gnets) + numel(direct) == sum(leaf.numel() for leaf in flat.values())
    back = like_genome(flat, gnets, direct)
    assert same_bits(back, (gnets, direct))
    # By name, whatever the order.
    turned = dict(reversed(flat.items()))
    assert same_bits(like_genome(turned, gnets, direct), (gnets, direct))


def test_a_genome_keeps_the_order_of_its_names() -> None:
    gnets = {"b": {"z": torch.ones(1), "a": torch.ones(2)}, "a": {"m": torch.ones(3)}}
    direct = {"y": torch.ones(4), "x": torch.ones(5)}
    assert list(flat_genome(gnets, direct)) == ["gnets/b/z", "gnets/b/a", "gnets/a/m", "direct/y", "direct/x"]
    back, own = like_genome(tree_map(lambda t: 2 * t, flat_genome(gnets, direct)), gnets, direct)
    assert list(back) == ["b", "a"] and list(back["b"]) == ["z", "a"] and list(own) == ["y", "x"]
    assert torch.equal(back["b"]["a"], torch.full((2,), 2.0))


@given(st.integers(1, 5), st.integers(0, 3), SHAPES)
def test_microbatches_are_equal_and_make_up_the_batch(n: int, each: int, shape: list[int]) -> None:
    batch = Batch(torch.randn(n * each, *shape), {"a": torch.arange(n * each), "none": None, "pair": (torch.ones(n),)})
    before = copy_tree(batch)
    parts = split_batch(batch, n)
    assert len(parts) == n and all(isinstance(part, Batch) for part in parts)
    assert all(len(part.x) == len(part.y["a"]) == each and part.y["none"] is None for part in parts)
    whole = tree_map(lambda *pieces: torch.cat(pieces), *parts)
    assert same_bits(whole, batch) and same_bits(batch, before)


@pytest.mark.parametrize("leaf", [torch.ones(3), torch.tensor(1.0), 2, "text"], ids=repr)
def test_what_cannot_be_split_is_refused(leaf: Any) -> None:
    with pytest.raises(ValueError, match="microbatches=2 must divide the first dimension of every tensor of the batch"):
        split_batch({"x": torch.ones(4), "y": leaf}, 2)


@given(st.lists(st.integers(-9, 9), min_size=1, max_size=6))
def test_the_mean_of_trees_is_the_mean_of_every_leaf(values: list[int]) -> None:
    trees = [
        {"f": torch.tensor([v, 2.0 * v], dtype=torch.float64), "i": torch.tensor(v), "n": (v, None)} for v in values
    ]
    mean = mean_tree(trees)
    expected = sum(values) / len(values)
    assert mean["f"].dtype == torch.float64 and mean["n"][1] is None
    torch.testing.assert_close(mean["f"], torch.tensor([expected, 2 * expected], dtype=torch.float64))
    for leaf in (mean["i"], mean["n"][0]):
        torch.testing.assert_close(leaf, torch.tensor(expected))


def test_numbers_beside_tensors_do_not_count() -> None:
    assert numel({"a": torch.zeros(2, 3), "b": (torch.zeros(()), None, 5, "x"), "c": []}) == 7


def test_the_shapes_of_a_tree_are_a_key() -> None:
    tree = {"x": torch.ones(2, 3), "y": (torch.ones(4, dtype=torch.int64), "text")}
    key = shapes_of(tree)
    assert {key: 1}[shapes_of({"y": (torch.zeros(4, dtype=torch.int64), "other"), "x": torch.zeros(2, 3)})] == 1
    for other in (
        {**tree, "x": torch.ones(3, 2)},
        {**tree, "x": torch.ones(2, 3, dtype=torch.float64)},
        {**tree, "y": [torch.ones(4, dtype=torch.int64), "text"]},
        {**tree, "y": (torch.ones(4, dtype=torch.int64), 1)},
    ):
        assert shapes_of(other) != key
