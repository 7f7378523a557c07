"""Genomes from strangers in a browser: what declares much is refused at once, and Python and the page agree."""

import base64
import copy
import hashlib
import json
import os
import random
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import gbfunc as gb
from gbfunc.exporting.page import embedded, page
from gbfunc.formats.layout import DOCUMENTS, Allowed, inflate
from gbfunc.genome import unflat_genome
from tests.support.step_cases import stored_with
from tests.test_exporting_page import TYPES, every
from tests.test_storage_genome_file_hostile import stream

pytestmark = pytest.mark.process


def packed(text: str) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zdict=DOCUMENTS)
    return packer.compress(text.encode()) + packer.flush()


def compact(text: str, numbers: bytes = b"", flags: int = 9) -> bytes:
    checked = bytes([flags]) + packed(text) + numbers
    return b"GB5" + checked[:1] + zlib.crc32(checked).to_bytes(4, "little") + checked[1:]


def plain(header: dict[str, Any], text: str, body: bytes) -> bytes:
    about = header["__metadata__"] | {"plan": base64.b85encode(packed(text)).decode()}
    digest = hashlib.sha256(text.encode())
    for name in sorted(header.keys() - {"__metadata__"}):
        (n,), (start, end) = header[name]["shape"], header[name]["data_offsets"]
        digest.update(f"\n{name} torch.{name} ({n},)\n".encode() + body[start:end])
    made = json.dumps(header | {"__metadata__": about | {"sha256": digest.hexdigest()}}).encode()
    return len(made).to_bytes(8, "little") + made + body


def plan(tensor: dict[str, Any], hypernet: dict[str, Any] = {"type": "periodic", "features": 1}, **more: Any) -> str:  # noqa: B006
    tensor = {"name": "0.weight", "shape": [64, 64], "slots": [[0, 0, 0, 0.1]]} | tensor
    encodings = more.pop("encodings", [{"type": "binary"}])
    return json.dumps({"version": 2, "hypernets": [hypernet], "encodings": encodings, "tensors": [tensor], **more})


IMAGES = {"pnet": "mlp", "task": "mine", "interface": [[1, 8, 8], 10], "mean": 0.0, "std": 1.0}


def saved(folder: Path, text: str, dtype: Any = "int8", **said: Any) -> bytes:
    made = gb.Plan.from_json(text)
    flat = {name: torch.full(leaf.shape, 0.1, dtype=leaf.dtype) for name, leaf in made.leaves.items()}
    gb.save(folder / "genome", made, unflat_genome(made, flat, {}), dtype, IMAGES | said)
    return (folder / "genome").read_bytes()


HIDDEN = {"type": "gnet", "hidden": [4]}
IMAGE = plan({"shape": [10, 64]})
BINARY = {"type": "binary"}
TABLE = {"type": "table", "shape": [3, 100_000], "dtype": "int8", "data": "A" * 400_000}
GRID = {"type": "grid", "dims": [2_000_000]}
STEPS = {"shape": [2_000_000, 1], "slots": [[0, 0, 1, 0.1]]}
HOSTILE: dict[str, Any] = {
    "a tile of 10^9 rows": compact(plan({"slots": [[0, 0, 0, 0.1, 0.0, "", 10**9, 64]]})),
    "tiles of -1": compact(plan({"slots": [[0, 0, 0, 0.1, 0.0, "", -1, 64]]})),
    "60 million one-hot codes": compact(plan({"shape": [60_000_000, 1]}, encodings=[{"type": "one_hot"}])),
    "10^8 features": compact(plan({}, {"type": "periodic", "features": 10**8})),
    "wide codes of a table": compact(plan(STEPS | {"shape": [3, 1]}, encodings=[TABLE, BINARY]), stream(1)),
    "a shape of text": compact(plan({"shape": "64"})),
    "a shape below zero": compact(plan({"shape": [-64, 64]})),
    "many weights": compact(plan({"shape": [60_000, 60_000]}, {"type": "constant", "value": 0.0}), flags=8),
    "many names": compact(plan({"aliases": [str(i) for i in range(20_000)]}, {"type": "constant"}), flags=8),
    "an integer of 1 MB": compact(plan({}), (1).to_bytes(2, "little") + b"\xff" * 1_000_000),
    "deep": compact(plan({}, metadata=json.loads("[" * 500 + "]" * 500))),
    "a list": compact("[" * 100 + "]" * 100),
    "a tile of 5,000 x 5,000": lambda folder: saved(folder, plan({"shape": [5_000, 5_000]}, HIDDEN)),
    "60 million weights": lambda folder: saved(folder, plan({"shape": [6_000, 10_000]})),
    "a g-net for a second": lambda folder: saved(folder, plan({"shape": [2_000, 2_000]}, HIDDEN)),
    "10^9 outputs": lambda folder: saved(folder, IMAGE, interface=[[1, 8, 8], 10**9]),
    "an image of 16,384 x 16,384": lambda folder: saved(folder, IMAGE, interface=[[1, 16_384, 16_384], 10]),
    "50,000 classes": lambda folder: saved(folder, IMAGE, interface=[[1, 8, 8], 50_000], classes=["a"] * 50_000),
    "another interface": lambda folder: saved(folder, IMAGE, interface=[[1, 8, 9], 10]),
    "an interface of text": lambda folder: saved(folder, IMAGE, interface="images"),
    "means in a dict": lambda folder: saved(folder, IMAGE, mean={"a": 1}),
    "a deviation of 0": lambda folder: saved(folder, IMAGE, std=[0]),
    "constructor": lambda folder: saved(folder, IMAGE, pnet="constructor"),
    "toString": lambda folder: saved(folder, IMAGE, alphabet="toString", interface=[[8], 10, True]),
}


LONGEST = """new PerformanceObserver((list) => {
  for (const { duration } of list.getEntries()) globalThis.longest = Math.max(globalThis.longest ?? 0, duration);
}).observe({ type: "longtask" })"""
SHOW = """data => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const begun = performance.now();
  show(bytes);
  return performance.now() - begun;
}"""


def renderers() -> list[Path]:
    """The processes of this test's pages, in /proc."""
    ours, found = {os.getpid()}, []
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with suppress(OSError):
            if int(re.findall(r"PPid:\s+(\d+)", (path / "status").read_text())[0]) in ours:
                ours.add(int(path.name))
                if b"--type=renderer" in (path / "cmdline").read_bytes():
                    found.append(path)
    return found


def peak_mb() -> float:
    """The most memory of a page's process since `clear_peak`."""
    found = [re.search(r"VmHWM:\s+(\d+)", (path / "status").read_text()) for path in renderers()]
    return max(int(match[1]) for match in found if match) / 1024


def clear_peak() -> None:
    for path in renderers():
        (path / "clear_refs").write_text("5")


PAGES = ("[1]", "null", "3", "[" * 2_000, '{"genome": 5}', '{"genome": "AAAA"}', '{"genome": "AAAA", "alphabets": []}')


@pytest.mark.parametrize("held", PAGES)
def test_pages_of_something_else_are_refused_in_one_line(held: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        embedded(f'<script type="application/json" id="embedded">{held}</script>')


@pytest.mark.parametrize("name", HOSTILE)
def test_what_declares_much_gets_one_line_at_once(browser: Any, tmp_path: Path, name: str) -> None:
    data = HOSTILE[name](tmp_path) if callable(HOSTILE[name]) else HOSTILE[name]
    (tmp_path / "page.html").write_text(page(), encoding="utf-8")
    tab = browser.new_page(reduced_motion="reduce")
    tab.add_init_script(LONGEST)
    tab.goto((tmp_path / "page.html").as_uri())
    before = peak_mb()
    clear_peak()
    took = tab.evaluate(SHOW, base64.b64encode(data).decode())
    tab.locator("[data-grown]" if "second" in name else "#alert").wait_for()
    said, longest = tab.inner_text("#alert"), tab.evaluate("globalThis.longest ?? 0")
    more = peak_mb() - before
    print(f"{name}: {len(data)} bytes, {took:.0f} ms, pause {longest:.0f} ms, {more:.0f} MB, {said}")
    tab.close()
    assert said and "\n" not in said and "undefined" not in said
    assert took < 500 and longest < 1000 and more < 200


VALUES = (
    None, True, -1, 0, 1, 2, 3.0, 0.5, 1e13, 1 << 31, "", "0.weight", "constructor", [], {}, [1, 2], {"type": "gray"},
)  # fmt: skip


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(tree[key])


def mutated(rng: random.Random, tree: Any) -> Any:
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 2))):
        holder, key = rng.choice(list(places(tree)))
        kind, value = rng.randrange(6), copy.deepcopy(rng.choice(VALUES))
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[rng.choice(("constructor", "kind", "base", "slots", "dtype", "share", "x"))] = value
        elif kind == 2 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif kind == 3 and type(holder[key]) in (int, float):
            holder[key] = holder[key] + rng.choice((-1, 1, 0.5))
        else:
            holder[key] = value
    return tree


def seeds(folder: Path) -> Iterator[bytes]:
    """Files of every type of g-net, stored in every way."""
    for i, hypernet in enumerate(TYPES):
        net = every()
        made = gb.make_plan(net, hypernet, max_tile=5, include=[r"embedding"], rules=[("first", gb.periodic(2))])
        genome = gb.init_genome(made, net, seed=0)
        gb.save(folder / "seed", made, genome, stored_with(made, genome, (None, "float16", "int7", "auto")[i % 4]))
        yield (folder / "seed").read_bytes()


def changed(rng: random.Random, data: bytes) -> bytes:
    """A file with another plan, or other numbers, and the sum that fits."""
    if data.startswith(b"GB5"):
        text, n = inflate(data[8:], Allowed.by(len(data)))
        numbers = data[len(data) - n :]
    else:
        size = 8 + int.from_bytes(data[:8], "little")
        header, numbers = json.loads(data[8:size]), data[size:]
        text = inflate(base64.b85decode(header["__metadata__"]["plan"]), Allowed.by(len(data)))[0]
    if rng.random() < 0.15:
        cut, at = rng.choice((0, 1, 8, 40)), rng.randrange(len(numbers) + 1)
        numbers = rng.choice(
            (numbers[: len(numbers) - cut], numbers + bytes(cut), numbers[:at] + b"\xff\xff" + numbers[at + 2 :])
        )
    else:
        text = json.dumps(mutated(rng, json.loads(text)))
    return compact(text, numbers, data[3]) if data.startswith(b"GB5") else plain(header, text, numbers)


VERDICTS = """files => files.map((data) => {
  try {
    const { leaves } = readGenome(Uint8Array.from(atob(data), (c) => c.charCodeAt(0)));
    return Object.keys(leaves).length;
  } catch (error) {
    return error instanceof Refusal ? error.message : `${error}`;
  }
})"""


@pytest.mark.parametrize("count", [300, pytest.param(1_000, marks=pytest.mark.slow)])
def test_python_and_the_page_agree(browser: Any, tmp_path: Path, count: int) -> None:
    rng, whole = random.Random(count), list(seeds(tmp_path))
    whole.append(compact(plan(STEPS, encodings=[GRID, BINARY]), stream(3)))
    files = whole + [changed(rng, rng.choice(whole)) for _ in range(count)]
    (tmp_path / "page.html").write_text(page(), encoding="utf-8")
    tab = browser.new_page()
    tab.goto((tmp_path / "page.html").as_uri())
    said = tab.evaluate(VERDICTS, [base64.b64encode(data).decode() for data in files])
    tab.close()
    wrong = []
    for data, verdict in zip(files, said, strict=True):
        (tmp_path / "file").write_bytes(data)
        try:
            gb.load(tmp_path / "file")
            refused = ""
        except ValueError as error:
            refused = str(error)
        # The page reads a part of what Python reads, and says so.
        if "browser" not in str(verdict) and bool(refused) != isinstance(verdict, str):
            wrong.append((verdict, refused))
    assert not wrong
    assert 20 < sum(isinstance(verdict, int) for verdict in said) < count
