"""`--plan-config`: codes, rules and patterns from a file, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import gbfunc as gb
from gbfunc.cli.job import make_job
from gbfunc.cli.options import GenomeOptions, PNetOptions

TOML = """
include = ["^0.bias"]
exclude = ["^2.bias"]
[rules]
"^2.weight" = { type = "low_rank", rank = 2 }
"^0.bias" = "constant"
[encodings]
"0.weight" = [{ type = "table", file = "kinds.npy" }, { type = "grid", dims = [8, 8], bandwidth = 3.0 }]
"2.weight" = ["gray", { type = "per_axis", channels = "binary", positions = { type = "grid", dims = [2, 2] },
              n_positions = 4 }]
"""


def test_a_file_says_what_options_can_and_codes_too(tmp_path: Path) -> None:
    kinds = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float16)
    np.save(tmp_path / "kinds.npy", kinds)
    path = tmp_path / "plan.toml"
    path.write_text(TOML.replace("},\n             ", "},"))
    plan = make_job(PNetOptions(sizes=(64, 48, 10)), GenomeOptions(genome_params=400, plan_config=path)).plan
    first, bias, last, end = plan.tensors
    (slot,), (other,) = first.slots, last.slots
    assert slot.row_code == gb.table(kinds) and slot.col_code == gb.grid(8, 8, bandwidth=3.0)
    assert other.hypernet == gb.low_rank(2) and other.row_code == gb.gray()
    assert other.col_code == gb.per_axis(gb.binary(), gb.grid(2, 2), 4)
    assert bias.slots[0].hypernet == gb.constant() and end.role == "direct"


def test_what_the_command_line_says_goes_first(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"rules": {"0.weight": "xox", "2.weight": "xox"}}')
    options = GenomeOptions(genome_params=400, plan_config=tmp_path / "plan.json", rule=("2.weight=low_rank",))
    plan = make_job(PNetOptions(sizes=(64, 48, 10)), options).plan
    assert [t.slots[0].hypernet.type for t in plan.generated if "weight" in t.name] == ["xox", "low_rank"]
