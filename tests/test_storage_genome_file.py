"""The genome's file: exact, whole or absent, and nothing but a ValueError for whatever is not one."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import gbfunc as gb
from gbfunc.formats import genome_file_bytes
from gbfunc.hypernets import Hypernet
from tests.support.forgery import Genuine, joined, leaves_of, refused
from tests.support.strategies import ALL_EXAMPLES, FACTORIES, linear_end, named
from tests.support.trees_equal import copy_tree, same_bits
from tests.support.zoo import BUFFERS_ONLY, ZOO, Animal, dtype_of, genome_of, loss_fn, mlp, small

ALL = {**ZOO, "buffers_only": BUFFERS_ONLY}


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Genuine:
    """A valid file with g-nets, direct parameters, and buffers of two dtypes."""
    return Genuine(tmp_path_factory.mktemp("genome") / "genome.safetensors")


# --- round trip ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("animal", ALL.values(), ids=ALL)
def test_what_is_saved_is_what_is_loaded(animal: Animal, tmp_path: Path) -> None:
    pnet, plan, genome = genome_of(animal)
    path = tmp_path / "genome.safetensors"
    size = gb.save(path, plan, genome)
    assert size == path.stat().st_size == genome_file_bytes(plan)
    read_plan, read = gb.load(path)
    assert read_plan == plan and hash(read_plan) == hash(plan) and read_plan.report() == plan.report()
    assert same_bits(read, genome)
    assert same_bits(gb.generate(read_plan, read), gb.generate(plan, genome))
    net = gb.materialize(read_plan, read, pnet)
    assert same_bits(net.state_dict(), gb.materialize(plan, genome, pnet).state_dict())
    assert os.listdir(tmp_path) == ["genome.safetensors"]


@pytest.mark.parametrize("animal", ALL.values(), ids=ALL)
def test_leaves_of_a_dtype_are_one_tensor_in_the_order_of_their_names(animal: Animal, tmp_path: Path) -> None:
    _, plan, genome = genome_of(animal)
    gb.save(tmp_path / "g", plan, genome)
    expected = joined(leaves_of(genome))
    assert same_bits(load_file(tmp_path / "g"), expected)
    header = genome_file_bytes(plan) - sum(t.nbytes for t in expected.values())
    assert header < len(plan.to_json()) + 300


@pytest.mark.parametrize("hypernet", ALL_EXAMPLES, ids=named)
def test_every_hypernetwork_is_read_back(hypernet: Hypernet, tmp_path: Path) -> None:
    _, plan, genome = small(hypernet)
    gb.save(tmp_path / "g", plan, genome)
    read_plan, read = gb.load(tmp_path / "g", factories=FACTORIES)
    assert read_plan == plan and same_bits(read, genome)


def test_a_training_state_is_saved_as_its_genome(tmp_path: Path) -> None:
    pnet = ZOO["conv_bn"].pnet()
    plan = ZOO["conv_bn"].plan(pnet)
    step = gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=0.01))
    state, _ = step(step.init(), ZOO["conv_bn"].batch(dtype_of(pnet)))
    gb.save(tmp_path / "state", plan, state)
    gb.save(tmp_path / "genome", plan, gb.Genome(state.gnets, state.direct, state.buffers))
    assert (tmp_path / "state").read_bytes() == (tmp_path / "genome").read_bytes()
    assert same_bits(gb.load(tmp_path / "state")[1], gb.Genome(state.gnets, state.direct, state.buffers))


def test_a_loaded_genome_does_not_depend_on_the_file_any_more(genuine: Genuine, tmp_path: Path) -> None:
    path = genuine.copy_to(tmp_path)
    _, genome = gb.load(path)
    with open(path, "r+b") as file:
        file.write(bytes(len(genuine.data)))
    assert same_bits(genome, genuine.genome)


def test_loaded_leaves_share_no_memory(genuine: Genuine, tmp_path: Path) -> None:
    _, genome = gb.load(genuine.copy_to(tmp_path))
    storages = [leaf.untyped_storage() for leaf in leaves_of(genome).values()]
    assert len({s.data_ptr() for s in storages}) == len(storages)
    assert [s.nbytes() for s in storages] == [leaf.nbytes for leaf in leaves_of(genome).values()]


def test_buffers_may_hold_infinities(tmp_path: Path) -> None:
    pnet = mlp()
    pnet.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
    plan = gb.make_plan(pnet)
    genome = gb.init_genome(plan, pnet)
    gb.save(tmp_path / "g", plan, genome)
    assert same_bits(gb.load(tmp_path / "g")[1], genome)


# --- writing -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(most: int) -> Iterator[None]:
    """No file may grow beyond `most` bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_failed_write_leaves_the_old_file(genuine: Genuine, tmp_path: Path) -> None:
    path = genuine.copy_to(tmp_path)
    _, plan, genome = genome_of(ZOO["transformer"])
    for most in (0, 100, genome_file_bytes(plan) - 1):
        with full_disk(most), pytest.raises(OSError):
            gb.save(path, plan, genome)
        assert os.listdir(tmp_path) == [path.name] and path.read_bytes() == genuine.data
    gb.save(path, plan, genome)
    assert same_bits(gb.load(path)[1], genome)


def test_a_path_that_cannot_be_written_leaves_nothing(genuine: Genuine, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "missing" / "g"):
        with pytest.raises(OSError):
            gb.save(path, genuine.plan, genuine.genome)
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == []


def test_a_file_has_the_permissions_of_any_other(genuine: Genuine, tmp_path: Path) -> None:
    gb.save(tmp_path / "g", genuine.plan, genuine.genome)
    (tmp_path / "other").touch()
    assert stat.S_IMODE((tmp_path / "g").stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)


def test_what_a_link_names_is_replaced_and_keeps_its_permissions(genuine: Genuine, tmp_path: Path) -> None:
    path, link = genuine.copy_to(tmp_path), tmp_path / "link"
    link.symlink_to(path.name)
    path.chmod(0o640)
    gb.save(link, *genome_of(ZOO["mlp"])[1:])
    assert link.is_symlink() and not path.is_symlink() and path.read_bytes() != genuine.data
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the child does next to nothing
def test_what_a_killed_save_left_is_removed_by_the_next(genuine: Genuine, tmp_path: Path) -> None:
    path, other = tmp_path / "g", tmp_path / ".h.0123456789abcdef"
    child = os.fork()
    if not child:
        os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)
        gb.save(path, genuine.plan, genuine.genome)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 1
    other.touch()  # Of another file, which another program may be writing.
    gb.save(path, genuine.plan, genuine.genome)
    assert sorted(os.listdir(tmp_path)) == [other.name, "g"]


def test_writers_do_not_mix(tmp_path: Path) -> None:
    _, plan, _ = genome_of(ZOO["mlp"])
    genomes = [genome_of(ZOO["mlp"], seed)[2] for seed in range(4)]
    path = tmp_path / "g"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda genome: gb.save(path, plan, genome), genomes * 4))
    read = gb.load(path)[1]
    assert any(same_bits(read, genome) for genome in genomes) and os.listdir(tmp_path) == ["g"]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda g: g._replace(direct={k: v * torch.nan for k, v in g.direct.items()}), "not finite in 'direct/"),
        (lambda g: g._replace(gnets={e: {k: v / 0 for k, v in n.items()} for e, n in g.gnets.items()}), "not finite"),
        (
            lambda g: g._replace(buffers={**g.buffers, "1.running_mean": torch.full((5,), torch.nan)}),
            "NaN in 'buffers/1",
        ),
        (
            lambda g: g._replace(direct={k: v.double() for k, v in g.direct.items()}),
            r"wrong dtype \['direct/.* is torch.float64, expected torch.float32'",
        ),
        (lambda g: g._replace(direct={}), "does not fit the plan: missing"),
        (lambda g: g._replace(buffers={}), r"missing \[.*1\.num_batches_tracked'"),
        (lambda g: g._replace(buffers={**g.buffers, "more": torch.zeros(1)}), r"unknown \['buffers/more'\]"),
        (
            lambda g: g._replace(buffers={**g.buffers, "1.running_var": torch.ones(1)}),
            r"1\.running_var.* is \(1,\), expected \(5,\)",
        ),
    ],
    ids=["nan", "infinite", "nan buffer", "dtype", "no direct", "no buffers", "more buffers", "buffer's shape"],
)
def test_an_invalid_genome_is_not_saved(
    spoil: Callable[[gb.Genome], gb.Genome], words: str, genuine: Genuine, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        gb.save(tmp_path / "g", genuine.plan, spoil(copy_tree(genuine.genome)))
    assert os.listdir(tmp_path) == []


def test_a_g_net_without_a_name_is_not_saved(tmp_path: Path) -> None:
    _, plan, genome = small(gb.from_module(lambda width: nn.Linear(width, 1)))
    with pytest.raises(ValueError, match="must be importable by name to be saved"):
        gb.save(tmp_path / "g", plan, genome)
    assert os.listdir(tmp_path) == []


def test_a_plan_that_no_file_may_hold_is_not_saved(tmp_path: Path) -> None:
    pnet = nn.ModuleDict({"x" * (5 << 20): nn.Linear(3, 2)})
    plan = gb.make_plan(pnet)
    with pytest.raises(ValueError, match="the plan is longer than 4,194,304 bytes as JSON"):
        gb.save(tmp_path / "g", plan, gb.init_genome(plan, pnet))
    assert os.listdir(tmp_path) == [] and "not to be saved: the plan is" in plan.report()


# --- damage --------------------------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_refused(genuine: Genuine, tmp_path: Path) -> None:
    header = 8 + int.from_bytes(genuine.data[:8], "little")
    ends = {0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, header + 4, len(genuine.data) - 1}
    for end in sorted(ends | set(range(0, len(genuine.data), 97))):
        refused(genuine.data[:end], tmp_path)


@given(st.binary(min_size=1, max_size=40))
def test_a_file_with_something_after_it_is_refused(genuine: Genuine, more: bytes) -> None:
    refused(genuine.data + more, genuine.folder)
    refused(more + genuine.data, genuine.folder)


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


@given(st.binary(max_size=200))
def test_noise_is_refused(genuine: Genuine, noise: bytes) -> None:
    refused(noise, genuine.folder)
    refused(len(noise).to_bytes(8, "little") + noise, genuine.folder)


def test_what_is_no_genome_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no genome file at"):
        gb.load(tmp_path / "missing")
    with pytest.raises(ValueError, match="is not a valid genome: it is not a file"):
        gb.load(tmp_path)
    save_file({"weight": torch.ones(3)}, tmp_path / "plain", {"format": "pt"})
    with pytest.raises(ValueError, match=r"not a genome \(no gbfunc plan in its header\)"):
        gb.load(tmp_path / "plain")
    torch.save({"weight": torch.ones(3)}, tmp_path / "pickle")
    with pytest.raises(ValueError, match="is not a valid genome"):
        gb.load(tmp_path / "pickle")
    refused(b"", tmp_path)


def test_a_plan_needs_the_factories_it_was_made_with(tmp_path: Path) -> None:
    _, plan, genome = small(gb.from_module(linear_end))
    gb.save(tmp_path / "g", plan, genome)
    with pytest.raises(
        ValueError, match=r"needs the g-net factory 'tests.support.strategies:linear_end': pass it as load"
    ):
        gb.load(tmp_path / "g")


def test_the_limit_on_the_pnet_is_the_users_choice(genuine: Genuine, tmp_path: Path) -> None:
    path = genuine.copy_to(tmp_path)
    size: Any = sum(v.numel() * v.element_size() for v in ZOO["conv_bn"].pnet().state_dict().values())
    assert gb.load(path, max_pnet_bytes=size)[0] == genuine.plan
    with pytest.raises(ValueError, match=f"declares a p-net of {size} bytes, over the limit of {size - 1}"):
        gb.load(path, max_pnet_bytes=size - 1)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    pnet = nn.Linear(6, 5)
    plan = gb.make_plan(pnet, gb.periodic(2))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is no regular file"):
        gb.save(tmp_path / "pipe", plan, gb.init_genome(plan, pnet))
    assert (tmp_path / "pipe").is_fifo()
