"""Plans as JSON: what is written is read again, and what is not a plan is refused by a clear error and nothing else."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from torch import nn

import gbfunc as gb
from gbfunc.plan import Plan


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"version": 99, "hypernets": [], "encodings": [], "tensors": []}', "version 99 is not the one known"),
        ('{"version": 2, "hypernets": [{"type": "x"}], "encodings": [], "tensors": []}', "not a hypernetwork"),
        ('{"version": 2, "hypernets": [], "encodings": [{"type": "x"}], "tensors": []}', "not an encoding"),
    ],
)
def test_what_is_no_plan(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Plan.from_json(text)


def _changed(**fields: Any) -> str:
    data = json.loads(gb.make_plan(nn.MultiheadAttention(4, 2), gb.periodic(1)).to_json())
    data["tensors"][0] |= fields
    return json.dumps(data)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"shape": [12, 3], "slots": [[0, 0, 0, 1.0, 0.0, "", 4, 4]] * 3}, "a tile of 4 cols does not fit"),
        ({"shape": [14, 4]}, "do not fold"),
        ({"shape": [-12, 4]}, "not a plan"),
        ({"kind": "nothing"}, "unknown kind 'nothing'"),
        ({"dtype": "float7"}, "is float7, which no genome file holds"),
        ({"name": "in_proj_bias"}, "name of its own"),
        ({"slots": [[0, 0, 0, 1.0, 0.0, "", 1 << 40, 4]] * 3}, "does not fit"),
        ({"slots": [[0, 0, 0, math.inf]] * 3}, "must be finite"),
        ({"slots": [[7, 0, 0, 1.0]] * 3}, "not a plan"),
        ({"shape": [3 << 20, 1 << 20], "slots": [[0, 0, 0, 1.0, 0.0, "", 1, 1]] * 3}, "tiles; at most"),
    ],
)
def test_a_tensor_that_does_not_fit_together(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Plan.from_json(_changed(**fields))


def test_a_tensor_larger_than_torch_has_any_is_reported() -> None:
    text = '{"version":2,"hypernets":[],"encodings":[],"tensors":[{"name":"w","shape":[1%s,4],"kind":"matrix"}]}'
    report = Plan.from_json(text % ("0" * 18)).report()
    assert "dense 4,000,000,000,000,000,000 parameters" in report and "not to be saved" in report
