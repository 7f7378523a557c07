"""Codes of the user's own, as arrays: in the plan, in every file of a genome, and in what is made of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gbfunc as gb
from gbfunc.formats import file_bytes
from tests.support.trees_equal import same_bits

KINDS, PLACES = 5, 40


def codes(n: int) -> np.ndarray[Any, Any]:
    kinds = np.random.default_rng(0).normal(size=(KINDS, 3)).astype(np.float16)[np.arange(n) % KINDS]
    return np.concatenate([kinds, gb.binary().codes(n)], 1)


def planned(**options: Any) -> tuple[nn.Module, gb.Plan]:
    net = nn.Sequential(nn.Linear(12, PLACES), nn.Tanh(), nn.Linear(PLACES, 3))
    own = codes(PLACES)
    encodings = {"0.weight": (own, gb.grid(3, 4)), "2.weight": (None, torch.from_numpy(own))}
    return net, gb.make_plan(net, encodings=encodings, **options)


@pytest.mark.parametrize("dtype", [None, "float16", "int6"])
def test_files_hold_the_codes_once(dtype: str | None, tmp_path: Path) -> None:
    net, plan = planned(hypernet=gb.periodic(6))
    bare = gb.make_plan(net, gb.periodic(6), encodings={"0.weight": (None, gb.grid(3, 4))})
    genome = gb.init_genome(plan, net)
    size = gb.save(tmp_path / "g", plan, genome, dtype)
    read, again = gb.load(tmp_path / "g")
    assert read == plan and hash(read) == hash(plan)
    again_size = gb.save(tmp_path / "again", read, again, dtype)
    assert again_size == size and (tmp_path / "g").read_bytes() == (tmp_path / "again").read_bytes()
    parts = file_bytes(plan, dtype, genome)
    assert sum(parts.values()) == size
    held, raw = parts["(plan)"] - file_bytes(bare, dtype)["(plan)"], 2 * codes(PLACES).size
    assert 2 * KINDS * 3 < held < 2 * raw
    x = torch.randn(4, 12)
    outputs = [{"y": gb.materialize(p, again, net)(x).detach()} for p in (plan, read)]
    assert same_bits(*outputs)


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ((codes(39), None), "encodings['0.weight'], rows: a table of 39 codes, but the axis has 40"),
        ((None, torch.zeros(12)), "encodings['0.weight'], columns: a table of codes must be [n, k] of real numbers"),
        ((None, torch.full((12, 1), torch.nan)), "encodings['0.weight'], columns: codes must be finite numbers"),
        ((None, "binary"), "encodings['0.weight'], columns: expected an encoding, an array or None, got 'binary'"),
        (codes(40), "encodings['0.weight'] must be a pair of encodings (rows, columns)"),
    ],
    ids=["length", "shape", "nan", "text", "no pair"],
)
def test_codes_that_do_not_fit(pair: Any, words: str) -> None:
    net = nn.Sequential(nn.Linear(12, PLACES))
    with pytest.raises(ValueError, match=re.escape(words)):
        gb.make_plan(net, gb.periodic(2), encodings={"0.weight": pair})
