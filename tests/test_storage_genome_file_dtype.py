"""Genomes in a dtype that is narrower than their own: what is read back is rounded, and nothing else differs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import gbfunc as gb
from gbfunc.formats import STORED_DTYPES, genome_file_bytes
from tests.support.forgery import Genuine, leaves_of
from tests.support.plans import PLANS
from tests.support.trees_equal import copy_tree, same_bits
from tests.support.zoo import ZOO, Animal, genome_of


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Genuine:
    return Genuine(tmp_path_factory.mktemp("genome") / "genome.safetensors")


def narrowed(leaf: torch.Tensor, name: str, dtype: torch.dtype) -> torch.Tensor:
    """A leaf as it comes back from a file of such a dtype."""
    wider = leaf.is_floating_point() and leaf.itemsize > dtype.itemsize and not name.startswith("buffers/")
    return leaf.to(dtype).to(leaf.dtype) if wider else leaf


@pytest.mark.parametrize("dtype", STORED_DTYPES.values(), ids=STORED_DTYPES)
@pytest.mark.parametrize("animal", ZOO.values(), ids=ZOO)
def test_a_narrower_dtype_is_rounded_to_and_nothing_else_is(animal: Animal, dtype: torch.dtype, tmp_path: Path) -> None:
    _, plan, genome = genome_of(animal)
    size = gb.save(tmp_path / "g", plan, genome, dtype)
    assert size == (tmp_path / "g").stat().st_size == genome_file_bytes(plan, dtype) <= genome_file_bytes(plan) + 24
    read_plan, read = gb.load(tmp_path / "g")
    expected = {name: narrowed(leaf, name, dtype) for name, leaf in leaves_of(genome).items()}
    assert read_plan == plan and same_bits(leaves_of(read), expected)
    # What is rounded already is not rounded again.
    gb.save(tmp_path / "again", plan, read, dtype)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "g").read_bytes()
    gb.save(tmp_path / "own", plan, genome)
    own = (tmp_path / "own").read_bytes()
    assert (own == (tmp_path / "g").read_bytes()) == all(leaf is expected[n] for n, leaf in leaves_of(genome).items())


@pytest.mark.parametrize("name", PLANS)
def test_the_file_of_any_plan_has_the_bytes_that_it_says(name: str, tmp_path: Path) -> None:
    net, plan = PLANS[name]
    for dtype in STORED_DTYPES.values():
        size = gb.save(tmp_path / "g", plan, gb.init_genome(plan, net), dtype)
        assert size == (tmp_path / "g").stat().st_size == genome_file_bytes(plan, dtype)


def test_names_and_dtypes_of_torch_are_the_same(genuine: Genuine, tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.int8):
        for name, given in (("a", dtype), ("b", str(dtype).removeprefix("torch."))):
            gb.save(tmp_path / name, genuine.plan, genuine.genome, given)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_number_that_is_too_large_is_not_saved(genuine: Genuine, tmp_path: Path) -> None:
    genome = copy_tree(genuine.genome)
    genome.direct["0.bias"][3] = -1e6
    with pytest.raises(ValueError, match=r"'direct/0.bias' holds 1e\+06, too large a number for torch.float16"):
        gb.save(tmp_path / "g", genuine.plan, genome, torch.float16)
    assert os.listdir(tmp_path) == []
    gb.save(tmp_path / "g", genuine.plan, genome, torch.bfloat16)
    assert gb.load(tmp_path / "g")[1].direct["0.bias"][3] == torch.tensor(-1e6).bfloat16()


def test_numbers_that_would_all_be_zero_are_not_saved(genuine: Genuine, tmp_path: Path) -> None:
    genome = copy_tree(genuine.genome)
    bias = genome.direct["0.bias"]
    bias.copy_(torch.linspace(-2e-8, 2e-8, len(bias)))
    with pytest.raises(ValueError, match=r"'direct/0.bias' holds 2e-08, too small a number for torch.float16"):
        gb.save(tmp_path / "g", genuine.plan, genome, "float16")
    gb.save(tmp_path / "g", genuine.plan, genome, "bfloat16")
    assert torch.equal(gb.load(tmp_path / "g")[1].direct["0.bias"], bias.bfloat16().float())
    # Beside a number 2^11 times as large, they are less than its rounding error.
    bias[0] = 2e-8 * 2**11
    gb.save(tmp_path / "g", genuine.plan, genome, "float16")


def test_buffers_are_stored_as_they_are(genuine: Genuine, tmp_path: Path) -> None:
    genome = copy_tree(genuine.genome)
    genome.buffers["1.running_var"][0] = 1e30
    gb.save(tmp_path / "g", genuine.plan, genome, torch.float16)
    assert same_bits(gb.load(tmp_path / "g")[1].buffers, genome.buffers)


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.float64, torch.complex64, torch.float8_e4m3fn, "int1", "int9", "torch.int8", 16, []]
)
def test_dtypes_that_no_file_has(dtype: Any, genuine: Genuine, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be None or one of float32, float16, bfloat16, int2, "):
        gb.save(tmp_path / "g", genuine.plan, genuine.genome, dtype)
    assert os.listdir(tmp_path) == []


def test_saving_does_not_depend_on_autocast(tmp_path: Path) -> None:
    pnet = torch.nn.Linear(6, 5)
    plan = gb.make_plan(pnet, gb.periodic(2))
    genome = gb.init_genome(plan, pnet)
    gb.save(tmp_path / "a", plan, genome, "float16")
    with torch.autocast("cpu", torch.bfloat16):
        gb.save(tmp_path / "b", plan, genome, "float16")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
