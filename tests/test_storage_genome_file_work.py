"""Work in proportion to a file: what declares much and holds little is refused before anything is made."""

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gbfunc as gb
from gbfunc.formats.symbols import NARROWEST
from tests.support.forgery import Genuine
from tests.test_storage_genome_file_hostile import coded, linear, plan_json, stream


def one(rows: int, cols: int, code: Any = None, hypernet: Any = None) -> str:
    return plan_json([linear(0, rows, cols)], hypernet, code)


def direct(*shapes: list[int]) -> str:
    return plan_json([{"name": f"{i:x}", "shape": shape, "kind": "matrix"} for i, shape in enumerate(shapes)])


def means(n: int, count: int) -> str:
    buffers = [[f"{i:x}.running_{k}", [n], "float32", True] for i in range(count) for k in ("mean", "var")]
    return plan_json([], buffers=buffers)


def many(gnets: int) -> str:
    """Columns of one-hot rows, each of a g-net of its own, or all of one."""
    columns = [linear(i, 900, 1, slots=[[i % gnets, 0, 1, 1.0]]) for i in range(400)]
    plan = json.loads(plan_json(columns, encoding={"type": "one_hot"}))
    plan["hypernets"] = [{"type": "periodic", "features": 1, "frequency": 1 + i} for i in range(gnets)]
    return json.dumps(plan | {"encodings": [*plan["encodings"], {"type": "binary"}]})


def nested(depth: int) -> Any:
    if not depth:
        return {"type": "binary"}
    return {"type": "per_axis", "channels": nested(depth - 1), "positions": nested(depth - 1), "n_positions": 1}


def layers(tensors: int, count: int) -> str:
    return plan_json([linear(i) for i in range(tensors)], {"type": "gnet", "hidden": [1] * count})


GRID = {"type": "grid", "dims": [2000, 2000]}
AXES = {"type": "grid", "dims": [1] * 100_000, "code": "gray", "bandwidth": 6.0}
KERNEL = {"type": "per_axis", "channels": {"type": "binary"}, "positions": GRID, "n_positions": 4_000_000}
TRIPLE = {"shape": [3, 1], "kind": "attention_in", "slots": [[0, 0, 0, 1.0]] * 3}
TILES = plan_json([linear(0, 4000, 4000, slots=[[0, 0, 0, 1.0, 0.0, "g", 1, 1]])], {"type": "xox", "genes": 1})
WIDE = {"type": "periodic", "features": 20_000_000}
WORK: dict[str, Callable[[], bytes]] = {
    "codes of 4 million rows": lambda: coded(9, one(4_000_000, 16)),
    "codes of 16 million rows": lambda: coded(9, one(16_777_216, 16)),
    "one-hot codes": lambda: coded(9, one(20_000, 16, {"type": "one_hot"}), bytes(9000)),
    "a grid": lambda: coded(9, one(4_000_000, 4_000_000, GRID)),
    "a kernel": lambda: coded(9, one(4_000_000, 4_000_000, KERNEL)),
    "parts without bits": lambda: coded(9, direct([1000, 490_000]), stream(1)),
    "as many as are allowed": lambda: coded(9, direct([1000, 1040]), stream(1)),
    "features without bits": lambda: coded(9, one(9, 9, hypernet=WIDE), stream(4)),
    "statistics without bits": lambda: coded(9 + 64, means(10**8, 1), stream(2)),
    "many statistics": lambda: coded(9 + 64, means(1, 8000), stream(16_000)),
    "cheap symbols": lambda: coded(9, direct([2000, 1000]), stream(1, NARROWEST + 1, 2_000_000)),
    "as many symbols as are allowed": lambda: coded(9, direct([260, 1000]), stream(1, NARROWEST + 1, 260_000)),
    "as many symbols as are allowed for their bytes": lambda: coded(9, direct([1000, 780]), stream(1, 4, 780_000, 2)),
    "many parts": lambda: coded(9, plan_json([{"name": f"{i:x}", **TRIPLE} for i in range(5000)]), stream(30_000)),
    "many direct tensors": lambda: coded(9, direct(*[[1, 1]] * 16_000), stream(16_000)),
    "as many parts as are allowed": lambda: coded(9, direct(*[[1, 1]] * 2_100), stream(2_100)),
    "groups of tiles": lambda: coded(9, TILES, bytes(9999)),
    "one code of many g-nets": lambda: coded(9, many(400), stream(2400)),
    "many codes of one g-net": lambda: coded(9, many(1), stream(2400)),
    # The first of each kind took from 30 s to minutes.
    "layers": lambda: coded(9, layers(1000, 100_000)),
    "allowed layers in many tensors": lambda: coded(9, layers(3000, 256)),
    "dimensions": lambda: coded(9, plan_json([linear(1, shape=[1] * 190_000)])),
    "a tree of encodings": lambda: coded(9, plan_json([linear(1)], encoding=nested(11))),
    "axes of a grid": lambda: coded(9, plan_json([linear(1, 1, 1)], encoding=AXES)),
    "tensors": lambda: coded(9, plan_json([linear(i) for i in range(25_000)])),
    "empty lists": lambda: coded(9, "[" + "[]," * 1_390_000 + "0]"),
    "leaves": lambda: coded(9, plan_json([linear(i, 2 + i // 100, 2 + i % 100) for i in range(9000)]), stream(36_000)),
    "lines": lambda: coded(2, plan_json([{"name": "a", "shape": [1], "dtype": "a\nb"}])),
    "lists": lambda: coded(2, plan_json([], metadata=[{"a": [1]}] * 65_000)),
    "numbers": lambda: coded(2, plan_json([], metadata=[1.5] * 500_000)),
    "texts": lambda: coded(2, plan_json([], metadata=["ab"] * 800_000)),
    "depth": lambda: coded(2, '{"metadata":' + "[" * 8000),
    "a table": lambda: coded(
        2, plan_json([], encoding={"type": "table", "shape": [3_000_000, 1], "dtype": "int8", "data": "A" * 4_000_000})
    ),
}


def cost(path: Path) -> tuple[float, float, str]:
    """Seconds of CPU, MB of memory, and the answer of a reader in a process of its own."""
    ends = os.pipe()
    if not (child := os.fork()):
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
            before = resource.getrusage(resource.RUSAGE_SELF)
            try:
                gb.load(path)
                said = ""
            except ValueError as error:
                said = str(error)
            after = resource.getrusage(resource.RUSAGE_SELF)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            os.write(ends[1], json.dumps([seconds, (after.ru_maxrss - before.ru_maxrss) / 1024, said[:1000]]).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(ends[1])
    with os.fdopen(ends[0], "rb") as answer:
        return tuple(json.loads(answer.read() or "[30, 1e9, 'killed']"))


@pytest.mark.process
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a process that is measured alone")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("name", WORK)
def test_a_file_takes_what_its_size_allows(name: str, genuine: Genuine, tmp_path: Path) -> None:
    gb.load(genuine.copy_to(tmp_path))
    data = WORK[name]()
    (tmp_path / "g").write_bytes(data)
    seconds, memory, said = cost(tmp_path / "g")
    # Twice the time, as tests share their machine.
    assert seconds <= 2 * (0.3 + 1e-6 * len(data)) and memory <= 50 + 1e-3 * len(data), (seconds, memory, said)
    assert "\n" not in said and bool(said) != name.startswith(("as many", "numbers", "a table")) or "end where" in said


def test_a_caller_can_allow_more(tmp_path: Path) -> None:
    (tmp_path / "g").write_bytes(coded(9, direct([1000, 2000]), stream(1)))
    with pytest.raises(ValueError, match="declares 2,000,000 numbers, and a file of its size .*max_params="):
        gb.load(tmp_path / "g")
    assert gb.load(tmp_path / "g", max_params=2_000_000)[0].genome_params == 2_000_000
