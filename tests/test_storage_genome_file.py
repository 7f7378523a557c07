"""The genome's file: exact but for its dtype, whole or absent, and nothing but a ValueError for whatever is not one."""

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import gbfunc as gb
from gbfunc.formats import BITS, STORED_DTYPES, genome_file_bytes
from gbfunc.formats.rounding import rounded
from gbfunc.storage.genome_file import load_dtype
from tests.support.forgery import Genuine, joined, leaves_of, refused
from tests.support.plans import PLANS
from tests.support.strategies import FACTORIES
from tests.support.trees_equal import copy_tree, same_bits
from tests.support.zoo import BUFFERS_ONLY, ZOO, genome_of, mlp
from tests.test_storage_checkpoint_faults import largest_file

CASES: dict[str, Callable[[], Any]]
CASES = {name: partial(genome_of, animal) for name, animal in {**ZOO, "buffers_only": BUFFERS_ONLY}.items()}
for key, pair in PLANS.items():
    CASES[f"plan {key}"] = lambda pair=pair: (*pair, gb.init_genome(pair[1], pair[0]))


def expected_of(genome: gb.Genome, dtype: str | None) -> dict[str, torch.Tensor]:
    if dtype in BITS:
        return rounded(leaves_of(genome), dtype)
    narrow = torch.float64 if dtype is None else STORED_DTYPES[dtype]

    def stored(name: str, leaf: torch.Tensor) -> torch.Tensor:
        wider = leaf.is_floating_point() and leaf.itemsize > narrow.itemsize and not name.startswith("buffers/")
        return leaf.to(narrow).to(leaf.dtype) if wider else leaf

    return {name: stored(name, leaf) for name, leaf in leaves_of(genome).items()}


@pytest.mark.parametrize("dtype", [None, *STORED_DTYPES, "int8", "int4", "int2"])
@pytest.mark.parametrize("name", CASES)
def test_what_is_saved_is_what_is_loaded(name: str, dtype: str | None, tmp_path: Path) -> None:
    pnet, plan, genome = CASES[name]()
    size = gb.save(tmp_path / "g", plan, genome, dtype)
    assert size == (tmp_path / "g").stat().st_size <= genome_file_bytes(plan, dtype) <= genome_file_bytes(plan) + 24
    assert size == genome_file_bytes(plan, dtype) or dtype in BITS
    read_plan, read = gb.load(tmp_path / "g", factories=FACTORIES)
    assert read_plan == plan and hash(read_plan) == hash(plan)
    assert plan.stored or read_plan.report() == plan.report()
    assert (read_plan.target, read_plan.digest()) == (plan.target, plan.digest())
    assert same_bits(leaves_of(read), expected_of(genome, dtype)) and load_dtype(tmp_path / "g") in (dtype, None)
    # No leaf holds the memory of others.
    storages = [leaf.untyped_storage() for leaf in leaves_of(read).values()]
    assert [s.nbytes() for s in storages] == [leaf.nbytes for leaf in leaves_of(read).values()]
    # What is rounded already is not rounded again.
    gb.save(tmp_path / "again", plan, read, dtype)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "g").read_bytes()
    if dtype is None:
        assert same_bits(load_file(tmp_path / "g"), joined(leaves_of(genome)))
        nets = [gb.materialize(p, g, pnet).state_dict() for p, g in ((read_plan, read), (plan, genome))]
        assert same_bits(*nets)


def test_a_loaded_genome_does_not_depend_on_the_file_any_more(genuine: Genuine, tmp_path: Path) -> None:
    path = genuine.copy_to(tmp_path)
    _, genome = gb.load(path)
    with open(path, "r+b") as file:
        file.write(bytes(len(genuine.data)))
    assert same_bits(genome, genuine.genome)


def test_buffers_are_stored_as_they_are(genuine: Genuine, tmp_path: Path) -> None:
    pnet = mlp()
    pnet.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    plan = gb.make_plan(pnet)
    genome = gb.init_genome(plan, pnet)
    gb.save(tmp_path / "g", plan, genome)
    assert same_bits(gb.load(tmp_path / "g")[1], genome)
    genome = copy_tree(genuine.genome)
    genome.buffers["1.running_var"][0] = 1e30
    gb.save(tmp_path / "g", genuine.plan, genome, torch.float16)
    assert same_bits(gb.load(tmp_path / "g")[1].buffers, genome.buffers)


def test_names_and_dtypes_of_torch_are_the_same_also_under_autocast(genuine: Genuine, tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.int8):
        gb.save(tmp_path / "a", genuine.plan, genuine.genome, dtype)
        with torch.autocast("cpu", torch.bfloat16):
            gb.save(tmp_path / "b", genuine.plan, genuine.genome, str(dtype).removeprefix("torch."))
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_numbers_beyond_a_dtype_are_not_saved(genuine: Genuine, tmp_path: Path) -> None:
    genome, path = copy_tree(genuine.genome), tmp_path / "g"
    bias, leaf = genome.direct["0.bias"], next(iter(next(iter(genome.gnets.values())).values()))
    bias.copy_(torch.linspace(-2e-8, 2e-8, len(bias)))
    with pytest.warns(UserWarning, match="every number in 'direct/0.bias' is too small a number for torch.float16"):
        gb.save(path, genuine.plan, genome, "float16")
    assert not gb.load(path)[1].direct["0.bias"].any()
    for values, x, words in ((1e6, bias, r"1e\+06, too large a number"), (2e-8, leaf, "2e-08, too small a number")):
        x.fill_(values)
        with pytest.raises(ValueError, match=f"holds {words} for torch.float16"):
            gb.save(tmp_path / "h", genuine.plan, genome, "float16")
        bias.zero_()
    bias[:2] = torch.tensor([1e-7, 2e-8])
    gb.save(path, genuine.plan, genuine.genome._replace(direct=genome.direct), "float16")
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize("dtype", [torch.int16, torch.float64, torch.float8_e4m3fn, "int1", "int9", "torch.int8", 16])
def test_dtypes_that_no_file_has(dtype: Any, genuine: Genuine, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype must be None or one of float32, float16, bfloat16, int2, "):
        gb.save(tmp_path / "g", genuine.plan, genuine.genome, dtype)
    assert os.listdir(tmp_path) == []


def test_a_failed_write_leaves_the_old_file(genuine: Genuine, tmp_path: Path) -> None:
    path = genuine.copy_to(tmp_path)
    _, plan, genome = genome_of(ZOO["transformer"])
    for most in (0, 100, genome_file_bytes(plan) - 1):
        with largest_file(most), pytest.raises(OSError):
            gb.save(path, plan, genome)
        assert os.listdir(tmp_path) == [path.name] and path.read_bytes() == genuine.data
    gb.save(path, plan, genome)
    assert same_bits(gb.load(path)[1], genome)


def test_paths_that_cannot_be_written_leave_nothing(genuine: Genuine, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for path, words in (("folder", "directory"), ("missing/g", "^no such folder"), ("pipe", "must be a regular file")):
        with pytest.raises(OSError, match=words):
            gb.save(tmp_path / path, genuine.plan, genuine.genome)
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"] and os.listdir(tmp_path / "folder") == []
    assert (tmp_path / "pipe").is_fifo()


def test_what_a_link_names_is_replaced_and_keeps_its_permissions(genuine: Genuine, tmp_path: Path) -> None:
    path, link = genuine.copy_to(tmp_path), tmp_path / "link"
    os.umask(mask := os.umask(0))
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    link.symlink_to(path.name)
    path.chmod(0o640)
    gb.save(link, *genome_of(ZOO["mlp"])[1:])
    assert link.is_symlink() and not path.is_symlink() and path.read_bytes() != genuine.data
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


SPOILT: dict[str, tuple[Callable[[gb.Genome], gb.Genome], str]] = {
    "nan": (lambda g: g._replace(direct={k: v * torch.nan for k, v in g.direct.items()}), "not finite in 'direct/"),
    "nan buffer": (
        lambda g: g._replace(buffers={**g.buffers, "1.running_mean": torch.full((5,), torch.nan)}),
        "NaN in 'buffers/1",
    ),
    "dtype": (
        lambda g: g._replace(direct={k: v.double() for k, v in g.direct.items()}),
        r"wrong dtype \['direct/.* is torch.float64, expected torch.float32'",
    ),
    "no direct": (lambda g: g._replace(direct={}), "does not fit the plan: missing"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_an_invalid_genome_is_not_saved(name: str, genuine: Genuine, tmp_path: Path) -> None:
    spoil, words = SPOILT[name]
    with pytest.raises(ValueError, match=words):
        gb.save(tmp_path / "g", genuine.plan, spoil(copy_tree(genuine.genome)))
    assert os.listdir(tmp_path) == []


def test_plans_that_no_file_may_hold_are_not_saved(tmp_path: Path) -> None:
    long = nn.ModuleDict({"x" * (5 << 20): nn.Linear(3, 2)})
    nameless = gb.from_module(lambda width: nn.Linear(width, 1))
    for pnet, hypernet, words in (
        (long, None, "the plan has 10,485,9.. bytes or more as JSON"),
        (nn.Linear(5, 4), nameless, "from_module's factory must be importable by name to be saved"),
    ):
        plan = gb.make_plan(pnet, hypernet)
        with pytest.raises(ValueError, match=words):
            gb.save(tmp_path / "g", plan, gb.init_genome(plan, pnet))
        assert os.listdir(tmp_path) == [] and f"cannot be saved: {words[:11]}" in plan.report()


def test_a_file_cut_anywhere_is_refused(genuine: Genuine, tmp_path: Path) -> None:
    header = 8 + int.from_bytes(genuine.data[:8], "little")
    ends = {0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, header + 4, len(genuine.data) - 1}
    for end in sorted(ends | set(range(0, len(genuine.data), 97))):
        refused(genuine.data[:end], tmp_path)


@given(st.binary(min_size=1, max_size=200))
def test_noise_and_a_file_with_something_around_it_are_refused(genuine: Genuine, more: bytes) -> None:
    refused(genuine.data + more, genuine.folder)
    refused(more + genuine.data, genuine.folder)
    refused(more, genuine.folder)
    refused(len(more).to_bytes(8, "little") + more, genuine.folder)


@settings(max_examples=300)
@given(st.data())
def test_flipped_bits_never_give_another_genome(genuine: Genuine, data: st.DataObject) -> None:
    damaged = bytearray(genuine.data)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    path = genuine.folder / "damaged"
    path.write_bytes(bytes(damaged))
    try:
        plan, genome = gb.load(path)
    except ValueError as error:
        assert "is not a valid genome" in str(error)
    else:
        assert plan == genuine.plan and same_bits(genome, genuine.genome)


def test_what_is_no_genome_is_refused(tmp_path: Path) -> None:
    for read in (gb.load, gb.load_metadata):
        with pytest.raises(FileNotFoundError, match="no genome file at"):
            read(tmp_path / "missing")
    save_file({"weight": torch.ones(3)}, tmp_path / "plain", {"format": "pt"})
    torch.save({"weight": torch.ones(3)}, tmp_path / "pickle")
    for name, words in ((".", "expected a file"), ("plain", r".*no gbfunc plan in its header\)"), ("pickle", "")):
        with pytest.raises(ValueError, match=f"is not a valid genome: {words}"):
            gb.load(tmp_path / name)


def test_the_limit_on_the_pnet_is_the_users_choice(genuine: Genuine, tmp_path: Path) -> None:
    path = genuine.copy_to(tmp_path)
    size: Any = sum(v.numel() * v.element_size() for v in ZOO["conv_bn"].pnet().state_dict().values())
    assert gb.load(path, max_pnet_bytes=size)[0] == genuine.plan
    with pytest.raises(ValueError, match=f"declares a p-net of {size} bytes, over the limit of {size - 1}"):
        gb.load(path, max_pnet_bytes=size - 1)
