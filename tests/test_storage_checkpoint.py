"""Checkpoints: exact, sealed, kept in number, and the trainings that go on from them."""

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import gbfunc as gb
from gbfunc import files
from gbfunc.train.step import TrainStep
from tests.support.trees_equal import copy_tree, same_bits
from tests.support.zoo import ZOO, loss_fn, mlp, step_of

ADAM = gb.torch_optimizer(torch.optim.AdamW, lr=lambda step: 0.02 / (step + 1))


def advance(step: TrainStep, state: Any, batch: Any, steps: int) -> Any:
    for _ in range(steps):
        state, _ = step(state, batch)
    return state


def save(folder: Path, step: TrainStep, *states: Any, extra: Any = None, keep: int = 9) -> None:
    with gb.Checkpointer(folder, step, keep=keep) as checkpointer:
        for state in states:
            checkpointer.save(state, extra)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def goes_on(step: TrainStep, batch: Any, folder: Path) -> None:
    """Two steps, a checkpoint, two steps are bit for bit four steps; the copy is taken before the step goes on."""
    straight = advance(step, step.init(seed=7), batch, 4)
    with gb.Checkpointer(folder, step) as checkpointer:
        state = advance(step, step.init(seed=7), batch, 2)
        checkpointer.save(state, {"loss": [0.1, float("inf")]})
        advance(step, state, batch, 1)
    found = gb.load_checkpoint(folder, step, step.init(seed=1))
    assert found.path == folder / "step-00000002.safetensors" and not found.skipped
    assert found.extra == {"loss": [0.1, float("inf")]}
    assert same_bits(advance(step, found.state, batch, 2), straight)


@pytest.mark.parametrize("name", [name for name in ZOO if name != "meta"])
def test_every_training_goes_on(name: str, tmp_path: Path) -> None:
    goes_on(*step_of(name, optimizer=ADAM, donate=True), tmp_path)


def test_a_state_is_copied_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, batch = step_of("conv_bn", optimizer=ADAM, donate=True)
    state, extra = advance(step, step.init(), batch, 1), {"history": [1]}
    before, go = copy_tree(state), threading.Event()

    def late(path: Path, data: bytes) -> None:
        assert go.wait(60)
        files.replace_file(path, data)

    monkeypatch.setattr("gbfunc.storage.checkpoint.replace_file", late)
    with gb.Checkpointer(tmp_path, step) as checkpointer:
        checkpointer.save(state, extra)
        # The step goes on while nothing is written yet.
        later = advance(step, state, batch, 3)
        extra["history"].append(2)
        assert names(tmp_path) == []
        go.set()
        assert checkpointer.wait() == tmp_path / "step-00000001.safetensors"
        assert checkpointer.wait() is None
    found = gb.load_checkpoint(tmp_path, step, step.init())
    assert same_bits(found.state, before) and not same_bits(found.state.gnets, later.gnets)
    assert found.extra == {"history": [1]}


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_the_newest_are_kept(keep: int, tmp_path: Path) -> None:
    step, batch = step_of("mlp")
    states = [step.init()]
    for _ in range(4):
        states.append(advance(step, states[-1], batch, 1))
    (tmp_path / "step-00000009.safetensors").write_bytes(b"of an abandoned course")
    (tmp_path / "mine.txt").write_text("mine")
    save(tmp_path, step, *states, keep=keep)
    kept = [f"step-{i:08d}.safetensors" for i in range(max(0, 5 - keep), 5)]
    assert names(tmp_path) == ["mine.txt", *kept, "step-00000009.safetensors"]
    found = gb.load_checkpoint(tmp_path, step, step.init())
    assert int(found.state.step) == 4 and len(found.skipped) == 1
    assert same_bits(gb.load_checkpoint(tmp_path / kept[0], step, step.init()).state, states[max(0, 5 - keep)])
    # The same step again takes the place of the first.
    save(tmp_path, step, states[4], extra={"again": True})
    assert gb.load_checkpoint(tmp_path, step, step.init()).extra == {"again": True}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TrainStep, Path, bytes]]:
    folder = tmp_path_factory.mktemp("pair")
    step, batch = step_of("conv_bn", optimizer=ADAM)
    one = advance(step, step.init(), batch, 1)
    save(folder, step, one, advance(step, one, batch, 1), extra={"epoch": 3, "text": '"sha256":"' + "0" * 64})
    yield step, folder, (folder / "step-00000002.safetensors").read_bytes()


def skips(pair: tuple[TrainStep, Path, bytes], data: bytes) -> None:
    step, folder, _ = pair
    newest = folder / "step-00000002.safetensors"
    newest.write_bytes(data)
    found = gb.load_checkpoint(folder, step, step.init())
    assert int(found.state.step) == 1 and found.path == folder / "step-00000001.safetensors"
    assert len(found.skipped) == 1 and found.skipped[0].startswith(f"{newest.name}: it is damaged: ")
    with pytest.raises(ValueError, match="step-00000002.safetensors cannot be resumed: it is damaged"):
        gb.load_checkpoint(newest, step, step.init())


@given(st.data())
def test_a_flipped_bit_and_a_cut_are_seen(pair: tuple[TrainStep, Path, bytes], data: st.DataObject) -> None:
    whole = pair[2]
    header = 8 + int.from_bytes(whole[:8], "little")
    # Half of them in the header, which is the smaller part.
    at = data.draw(st.integers(0, header - 1) | st.integers(header, len(whole) - 1))
    skips(pair, whole[:at])
    flipped = bytearray(whole)
    flipped[at] ^= 1 << data.draw(st.integers(0, 7))
    skips(pair, bytes(flipped))


@given(st.binary(max_size=300))
@example(b"\xff" * 64)
@example((24).to_bytes(8, "little") + b'{"__metadata__": {"a":1}}')
@example((10**5).to_bytes(8, "little") + b"[" * 10**5)
def test_any_bytes_are_seen(pair: tuple[TrainStep, Path, bytes], noise: bytes) -> None:
    skips(pair, noise)
    skips(pair, pair[2] + noise + b"\0")


def test_nothing_valid_begins_again(tmp_path: Path) -> None:
    step, batch = step_of("mlp")
    state = advance(step, step.init(), batch, 1)
    save(tmp_path, step, state)
    (tmp_path / "step-00000001.safetensors").write_bytes(b"")
    (tmp_path / "step-00000002.safetensors").mkdir()
    like = step.init()
    assert gb.load_checkpoint(tmp_path / "none", step, like) == (like, {}, None, ())
    with pytest.raises(FileNotFoundError):
        gb.load_checkpoint(tmp_path / "step-00000007.safetensors", step, like)
    found = gb.load_checkpoint(tmp_path, step, like)
    assert found.state is like and found.path is None
    assert [line.split(":")[0] for line in found.skipped] == [f"step-0000000{i}.safetensors" for i in (2, 1)]


def test_another_training_is_refused(tmp_path: Path) -> None:
    step, batch = step_of("mlp", optimizer=ADAM)
    save(tmp_path, step, advance(step, step.init(), batch, 1))
    pnet = mlp()
    for hypernet, words in ((gb.periodic(3), "ensembles"), (gb.periodic(2, frequency=2.0), "of the same size")):
        other = gb.make_train_step(gb.make_plan(pnet, hypernet, max_tile=4), pnet, loss_fn, ADAM)
        with pytest.raises(ValueError, match=rf"step-00000001.safetensors .* another plan \(.*{words}"):
            gb.load_checkpoint(tmp_path, other, other.init())
    with pytest.raises(ValueError, match=r"another optimizer or p-net: missing \[\], unknown \['opt/"):
        gb.load_checkpoint(tmp_path, step, step_of("mlp")[0].init())
    like = step.init()
    wide = like._replace(direct={k: v.double() for k, v in like.direct.items()})
    with pytest.raises(ValueError, match=r"wrong dtype \['direct/0.bias is torch.float32, expected torch.float64"):
        gb.load_checkpoint(tmp_path, step, wide)


def test_what_cannot_be_saved_is_refused_at_once(tmp_path: Path) -> None:
    step, _ = step_of("mlp")
    state = step.init()
    with gb.Checkpointer(tmp_path, step) as checkpointer:
        with pytest.raises(TypeError, match="only tensors, got int at 'opt'"):
            checkpointer.save(state._replace(opt=3))
        with pytest.raises(TypeError, match="not JSON serializable"):
            checkpointer.save(state, {"net": mlp()})
        for x in (torch.ones(2, dtype=torch.complex128), torch.ones(2, device="meta"), torch.eye(2).to_sparse()):
            with pytest.raises(TypeError, match="extra must hold dense tensors with values, of int64"):
                checkpointer.save(state, {"x": x})
        with pytest.raises(TypeError, match="tensors of a state must have different names, got 'opt/a/b'"):
            checkpointer.save(state._replace(opt={"a/b": torch.ones(1), "a": {"b": torch.ones(1)}}))
    assert names(tmp_path) == []
    for keep in (0, 1.5, True):
        with pytest.raises(ValueError, match="keep must be an int >= 1"):
            gb.Checkpointer(tmp_path, step, keep=keep)  # pyright: ignore


def test_leftovers_go_and_nothing_else(tmp_path: Path) -> None:
    step, _ = step_of("mlp")
    mine = [".step-1.safetensors.bak", "step-3.txt", ".step-00000001.safetensors.0123"]
    for name in [*mine, ".step-00000001.safetensors.0123456789abcdef"]:
        (tmp_path / name).write_bytes(b"half")
    save(tmp_path, step, step.init())
    assert names(tmp_path) == sorted([*mine, "step-00000000.safetensors"])


def held_for_others(folder: Path, step: TrainStep) -> bool:
    child = os.fork()
    if not child:
        try:
            gb.Checkpointer(folder, step)
        except OSError:
            os._exit(17)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_folder_is_held_by_one_training_of_a_process(tmp_path: Path) -> None:
    step, _ = step_of("mlp")
    first = gb.Checkpointer(tmp_path, step)
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in (tmp_path, tmp_path / "link", tmp_path / "link" / ".." / tmp_path.name):
        with pytest.raises(OSError, match="another training is keeping checkpoints there"):
            gb.Checkpointer(folder, step)
    # Neither the refusals nor a copy of all files let go of the lock of the first.
    assert (tmp_path / ".lock").read_bytes() == b"" and held_for_others(tmp_path, step)
    first.save(step.init())
    first.close()
    second = gb.Checkpointer(tmp_path, step)
    first.close()
    assert held_for_others(tmp_path, step)
    # One that is forgotten is closed.
    del second
    gc.collect()
    gb.Checkpointer(tmp_path, step).close()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_neither_takes_nor_keeps_the_folder(tmp_path: Path) -> None:
    step, _ = step_of("mlp")
    with gb.Checkpointer(tmp_path, step) as checkpointer:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(writer)
            os.read(reader, 1)  # It lives until it is told to go on.
            checkpointer.close()
            os._exit(0)
        other = os.fork()
        if not other:
            checkpointer.close()
            os._exit(0)
        assert os.waitpid(other, 0)[1] == 0
        assert held_for_others(tmp_path, step)
    # A child that outlives its parent's training does not hold the folder.
    gb.Checkpointer(tmp_path, step).close()
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    os.close(reader)
