"""Local steps: ranks train alone between exchanges, as by hand with functional calls and optimizers of torch."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.parallel import Mesh, make_layout
from gbfunc.train.local import nesterov
from gbfunc.train.options import StepOptions
from gbfunc.trees import flatten_tree
from tests.support.local_cases import CASES, SGD, by_hand, data, make, named, trained
from tests.support.rank_commands import Ended
from tests.support.ranks import run_ranks
from tests.test_cli_ranks import TRAIN


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("local")


@pytest.fixture(scope="module")
def on_two(folder: Path) -> list[Any]:
    return run_ranks(2, "local_cases:run_local", arguments={"folder": folder}, timeout=60)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, rtol=tolerance, atol=tolerance, msg=name)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [k for k, x in expected.items() if not torch.equal(found[k], x)] == []


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_do_what_is_done_by_hand(name: str, on_two: list[Any]) -> None:
    length, until, outer = CASES[name]
    settings = (outer or nesterov()).settings
    expected = by_hand(2, length, until, settings["lr"], settings["options"]["momentum"])
    del expected["buffers/2.num_batches_tracked"]  # each rank's own
    moved = max(float((expected[k] - x).abs().max()) for k, x in named(make(None).init(3)).items() if k in expected)
    assert moved > 1e-2
    for found in on_two:
        assert_close(found[name], expected)


@pytest.mark.process
def test_a_local_step_of_plain_sgd_is_a_step_of_all(on_two: list[Any]) -> None:
    for found in on_two:
        assert_close(found["every"], found["ordinary"])


@pytest.mark.parametrize("length", [1, 3])
def test_one_rank_does_what_is_done_by_hand(length: int) -> None:
    step = make(None, local_steps=length, donate=True)
    expected = by_hand(1, length, 6, 1.0, 0.5)
    del expected["buffers/2.num_batches_tracked"]
    assert_close(named(step.gather(trained(step, 6))), expected)


@pytest.mark.process
def test_a_rank_that_is_not_finite_counts_for_nothing(on_two: list[Any]) -> None:
    assert [found["nan"]["finite"] for found in on_two] == [[False] * 4, [True, True, False, False]]
    start, first = named(make(None).init(3)), on_two[0]["nan"]["first"]
    assert all(x.isfinite().all() for x in first.values())
    assert any(not torch.equal(x, start[k]) for k, x in first.items())
    alone = make(None, local_steps=2)
    state = alone.init(3)
    for batch in data()[:2]:
        state, _ = alone(state, tuple(x.tensor_split(2)[1] for x in batch))
    leaves = [k for k in first if not k.endswith("tracked")]
    assert_close({k: first[k] for k in leaves}, {k: named(state)[k] for k in leaves})
    assert_same(on_two[1]["nan"]["second"], on_two[1]["nan"]["first"])


@pytest.mark.process
def test_a_training_goes_on_where_it_was_saved(on_two: list[Any], folder: Path) -> None:
    for found in on_two:
        assert_same(*found["own"])
        assert_same(found["resumed"], found["straight"])
    assert not torch.equal(*(found["own"][0]["direct/0.bias"] for found in on_two))
    one = make(None, local_steps=3)
    state = gb.load_checkpoint(folder / "two", one, one.init(3)).state
    assert_same(named(state), on_two[0]["own"][0])


@pytest.mark.process
def test_checkpoints_without_local_steps_are_told_apart(folder: Path, on_two: list[Any]) -> None:
    plain, local = make(None), make(None, local_steps=3)
    with pytest.raises(ValueError, match="it is from a training with local steps"):
        gb.load_checkpoint(folder / "two", plain, plain.init(3))
    with gb.Checkpointer(folder / "plain", plain) as checkpointer:
        checkpointer.save(trained(plain, 2), {})
    with pytest.raises(ValueError, match="it is from a training without local steps"):
        gb.load_checkpoint(folder / "plain", local, local.init(3))
    other = make(None, local_steps=2, outer=nesterov(0.5))
    with pytest.raises(ValueError, match=r'local_steps 3.0, now 2.0, outer .*"lr": 1\.0.*, now .*"lr": 0\.5'):
        gb.load_checkpoint(folder / "two", other, other.init(3))
    begun = local.shard(trained(plain, 2))
    assert_same(named(begun), named(trained(plain, 2)))
    assert int(trained(local, 7, begun).step) == 7


@pytest.mark.process
def test_bytes_are_those_of_a_step_in_six(on_two: list[Any]) -> None:
    """The loss, the norm and the rows are sent with a gradient, the rows alone with a change."""
    sent = [(found["replicated"], found["local"]) for found in on_two]
    numbers = sum(x.numel() for k, x in named(make(None).init(3)).items() if not k.endswith("tracked"))
    assert sent == [(6 * 8 * (numbers + 3), 8 * (numbers + 1))] * 2


@pytest.mark.process
def test_what_ranks_must_have_alike(on_two: list[Any]) -> None:
    words = tuple(
        rf'the same options.*"{k}": {a}.* not .*"{k}": {b}' for k, a, b in (("local_steps", 3, 2), ("lr", 1.5, 0.5))
    )
    words += ("whole genome on each rank: take placement='replicated', got 'sharded'", "ranks must hold the same state")
    words += ("has no row of the batch", "got another state: call train_step.shard")
    for found in on_two:
        for text, expected in zip(found["refusals"], words, strict=True):
            assert re.search(expected, text), text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local_steps": 0}, "local_steps must be an int >= 1, got 0"),
        ({"local_steps": True}, "local_steps must be an int >= 1"),
        ({"outer": nesterov()}, "one for local_steps=, got Optimizer, local_steps=None"),
        ({"local_steps": 2, "outer": torch.optim.SGD}, "outer must be an optimizer from gb.torch_optimizer"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StepOptions(**options)
    layout = make_layout(make(None).plan, Mesh({"tensor": 2}), "replicated")
    with pytest.raises(ValueError, match="a mesh with only a data axis, got .*tensor=2"):
        StepOptions(local_steps=2).check_layout(layout)


def test_inputs_stay_as_they_are() -> None:
    step = make(None, SGD, local_steps=2)
    state = trained(step, 1)
    before = {k: x.clone() for k, x in flatten_tree(state).items()}
    first, _ = step(state, data()[1])
    second, _ = step(state, data()[1])
    assert_same(flatten_tree(state), before)
    assert_same(flatten_tree(first), flatten_tree(second))
    torch.save((first, step.gather(first)), file := io.BytesIO())
    kept, _ = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert_same(flatten_tree(kept), flatten_tree(first))


@pytest.mark.process
def test_the_command_trains_on_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it sends is divided by the steps; another length of rounds is another training."""
    command = [*TRAIN, "--out", str(tmp_path), "--mesh", "data=2", "--local-steps", "4"]
    for ended in run_ranks(2, "rank_commands:run", arguments={"argv": command}):
        assert Ended(*ended).code == 0, ended
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    steps, params = metrics["steps"], metrics["genome_params"]
    assert metrics["bytes_sent_per_step"] < 1.2 * 4 * params * (steps // 4) / steps < 1.5 * params
    assert metrics["config"]["local_steps"] == 4
    assert main([*TRAIN, "--out", str(tmp_path), "--local-steps", "5", "--resume", "auto"]) == 2
    assert "local_steps 4.0, now 5.0" in capsys.readouterr().err
