"""The report: its bytes are those of the file, and its lines fit a terminal."""

from pathlib import Path

import pytest
import torch
from torch import nn

import gbfunc as gb
from gbfunc.formats import STORED_DTYPES, file_bytes
from gbfunc.plan import Plan
from tests.support.plans import PLANS
from tests.support.zoo import BUFFERS_ONLY, ZOO, Animal, genome_of

DTYPES = [None, *STORED_DTYPES, "int8", "int7", "int4", "int2"]
METADATA = {"task": "digits", "mean": 3.5}


def bytes_of_rows(text: str) -> dict[str, int]:
    head, rule, *rows = text.split("\n\n")[0].splitlines()
    ends = [i for i, c in enumerate(rule + " ") if c == " " and rule[i - 1] == "-"]
    column = head.split().index("bytes")
    start = ends[column - 1] if column else 0
    return {row.split()[0]: int(row[start : ends[column]].replace(",", "")) for row in rows if row[0] != "["}


@pytest.mark.parametrize("animal", {**ZOO, "buffers_only": BUFFERS_ONLY}.values(), ids={**ZOO, "buffers_only": 0})
def test_the_parts_are_the_file(animal: Animal, tmp_path: Path) -> None:
    _, plan, genome = genome_of(animal)
    for dtype in DTYPES:
        for metadata in (None, METADATA):
            size = gb.save(tmp_path / "g", plan, genome, dtype, metadata)
            parts = file_bytes(plan, dtype, genome, metadata)
            assert size == (tmp_path / "g").stat().st_size == sum(parts.values()) and min(parts.values()) >= 0
            assert parts["(metadata)"] > 0 if metadata else parts.get("(metadata)", 0) == 0
        most, own = file_bytes(plan, dtype), file_bytes(plan, dtype, genome)
        assert most == own if dtype in (None, *STORED_DTYPES) else sum(most.values()) >= sum(own.values())


@pytest.mark.parametrize("dtype", [None, "float16", "int7"])
@pytest.mark.parametrize("name", [name for name in PLANS if name not in ("names", "empty")])
def test_rows_are_the_parts(name: str, dtype: str | None) -> None:
    net, plan = PLANS[name]
    genome = gb.init_genome(plan, net)
    text = plan.report(dtype, genome, METADATA)
    parts = file_bytes(plan, dtype, genome, METADATA)
    rows = bytes_of_rows(text)
    assert {k: n for k, n in rows.items() if n} == {k: n for k, n in parts.items() if n}
    assert f" {sum(rows.values()):,} bytes on disk" in text


def test_without_a_genome_codes_are_the_most_that_they_can_be() -> None:
    plan = gb.make_plan(nn.Linear(80, 70), gb.periodic(9))
    assert " at most " in plan.report("int6") and " at most " not in plan.report("float16")
    wide = gb.make_plan(nn.Sequential(nn.Linear(80, 70), nn.BatchNorm1d(400)), genome_bytes=5_500)
    assert "warning      buffers take 3,208 of 5," in wide.report() and "buffers take" not in plan.report()
    zeros = gb.Genome(
        {e.name: {k: torch.zeros(s) for k, s in e.shapes.items()} for e in plan.ensembles},
        {"bias": torch.zeros(70)},
        {},
    )
    full, flat = file_bytes(plan, "int6"), file_bytes(plan, "int6", zeros)
    assert full["weight"] >= plan.genome_params * 6 // 8 - 70 > 2 * flat["weight"]
    assert full["bias"] == flat["bias"] == 140 and full["(plan)"] == flat["(plan)"]


def test_a_genome_of_another_plan_is_refused() -> None:
    net = nn.Linear(8, 7)
    genome = gb.init_genome(gb.make_plan(net, gb.periodic(2)), net)
    with pytest.raises(ValueError, match="the genome does not fit the plan"):
        gb.make_plan(net, gb.periodic(3)).report("int4", genome)


def test_long_notes_stand_below_the_table() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 640)
    net = nn.ModuleDict({"encoder": nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)})
    plan = gb.make_plan(net, gb.periodic(share="layers"), genome_params=6_000)
    table = plan.report("int7").split("\n\n")[0].splitlines()
    assert max(map(len, table)) <= 120
    assert table[-1].startswith("[1] generated: direct vectors") and "[1]" in "".join(table[:-1])
    assert "[1]" not in gb.make_plan(nn.Linear(4, 3), gb.periodic(1)).report()


def test_a_tensor_larger_than_torch_has_any_is_reported() -> None:
    tensor = '{"name":"w","shape":[2147483648,2147483648],"kind":"matrix"}'
    text = '{"version":2,"hypernets":[],"encodings":[],"tensors":[' + tensor + "]}"
    report = Plan.from_json(text).report()
    assert "dense 4,611,686,018,427,387,904 parameters" in report and "cannot be saved" in report
