"""Real data: its splits, its loaders and their errors; p-nets by sizes."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gbfunc as gb
from gbfunc.tasks import (
    TASKS,
    Split,
    Task,
    accuracy,
    epoch_batches,
    hold_out,
    loss_fn,
    mlp,
    mlp_sizes,
    steps_per_epoch,
)
from gbfunc.tasks.mnist import load_mnist, read_idx

SIZES = st.lists(st.integers(1, 9), min_size=2, max_size=5).map(tuple)


@pytest.fixture(scope="module")
def digits() -> Task:
    return TASKS["digits"]()


@pytest.fixture(scope="session")
def mnist(shared_data: Path) -> Task:
    return TASKS["mnist"](data_dir=shared_data / "mnist")


def write_idx(path: Path, array: np.ndarray) -> Path:
    header = bytes((0, 0, 8, array.ndim)) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))
    return path


# Laws


@settings(deadline=None, max_examples=50)
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=3).map(tuple),
    n_classes=st.integers(1, 6),
    rest=st.integers(0, 50),
    seed=st.integers(0, 2**32 - 1),
)
def test_hold_out_covers_once_and_keeps_proportions(
    counts: tuple[int, ...], n_classes: int, rest: int, seed: int
) -> None:
    n = sum(counts) + rest
    labels = np.random.RandomState(1).randint(0, n_classes, n)
    parts = hold_out(labels, counts, seed)
    assert tuple(map(len, parts)) == (*counts, rest)
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    for part in parts:
        for label in range(n_classes):
            expected = (labels == label).sum() * len(part) / max(n, 1)
            # A stretch of the interleaved classes is off by at most one example at each end.
            assert abs((labels[part] == label).sum() - expected) <= 2 + n_classes / 2


def test_hold_out_is_the_same_everywhere() -> None:
    labels = np.arange(12) % 3
    held, rest = hold_out(labels, (3,), seed=0)
    assert held.tolist() == [4, 6, 11]
    assert sorted(labels[held]) == [0, 1, 2] and len(rest) == 9


def test_hold_out_refuses_more_than_there_is() -> None:
    with pytest.raises(ValueError, match=r"cannot hold out \(3, 4\) of 5"):
        hold_out(np.zeros(5, np.int64), (3, 4), 0)


@settings(deadline=None, max_examples=30)
@given(n=st.integers(1, 40), batch_size=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_batches_are_full_and_never_repeat_an_example(n: int, batch_size: int, seed: int) -> None:
    split = Split(torch.arange(n)[:, None].float(), torch.arange(n))
    generator = torch.Generator().manual_seed(seed)
    if batch_size > n:
        with pytest.raises(ValueError, match=f"the {n} training examples, got {batch_size}"):
            steps_per_epoch(split, batch_size)
        return
    batches = list(epoch_batches(split, batch_size, generator))
    assert len(batches) == steps_per_epoch(split, batch_size)
    assert all(x.shape == (batch_size, 1) and torch.equal(x[:, 0].long(), y) for x, y in batches)
    seen = torch.cat([y for _, y in batches]).tolist()
    assert len(set(seen)) == len(seen) == n // batch_size * batch_size
    again = list(epoch_batches(split, batch_size, torch.Generator().manual_seed(seed)))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(batches, again, strict=True))


def test_batches_change_from_epoch_to_epoch_and_leave_the_global_generator_alone() -> None:
    split = Split(torch.zeros(100, 1), torch.arange(100))
    generator, before = torch.Generator().manual_seed(0), torch.get_rng_state()
    first, second = ([y for _, y in epoch_batches(split, 50, generator)] for _ in range(2))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(before, torch.get_rng_state())


@settings(deadline=None, max_examples=30)
@given(sizes=SIZES)
def test_sizes_are_read_back_from_the_parameters(sizes: tuple[int, ...]) -> None:
    shapes = {name: tuple(p.shape) for name, p in mlp(sizes, 0).named_parameters()}
    assert mlp_sizes(shapes) == sizes


@pytest.mark.parametrize(
    "shapes",
    [
        {},
        {"weight": (3, 2)},
        {"0.weight": (3, 2)},
        {"0.weight": (3, 2), "0.bias": (4,)},
        {"0.weight": (3, 2, 1), "0.bias": (3,)},
        {"0.weight": (3, 2), "0.bias": (3,), "2.weight": (5, 4), "2.bias": (5,)},
    ],
)
def test_other_parameters_are_no_mlp(shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="expected the parameters of an MLP"):
        mlp_sizes(shapes)


def test_mlp_depends_on_its_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = mlp((4, 8, 3), seed=1)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(6)
    assert torch.equal(first.state_dict()["0.weight"], mlp((4, 8, 3), seed=1).state_dict()["0.weight"])
    assert not torch.equal(first.state_dict()["0.weight"], mlp((4, 8, 3), seed=2).state_dict()["0.weight"])
    assert isinstance(first[-1], torch.nn.Linear)


# Oracles


def test_loss_and_accuracy_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    y = torch.tensor([0, 1, 1])
    loss, aux = loss_fn(lambda x: x, (logits, y))
    expected = -torch.log_softmax(logits, 1)[range(3), y].mean()
    torch.testing.assert_close(loss, expected)
    assert aux["accuracy"].item() == pytest.approx(2 / 3)
    for chunk in (1, 2, 3, 100):
        assert accuracy(lambda x: x, Split(logits, y), chunk) == pytest.approx(2 / 3)


def test_accuracy_refuses_an_empty_split() -> None:
    with pytest.raises(ValueError, match="got an empty one"):
        accuracy(lambda x: x, Split(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)))


# Contracts


def check_task(task: Task, n_train: int, n_val: int, n_test: int) -> None:
    assert [len(s.y) for s in (task.train, task.val, task.test)] == [n_train, n_val, n_test]
    n_classes = task.sizes[-1]
    for split in (task.train, task.val, task.test):
        assert split.x.dtype == torch.float32 and split.y.dtype == torch.int64
        assert split.x.shape == (len(split.y), task.sizes[0])
        assert sorted(split.y.unique().tolist()) == list(range(n_classes))
        # Normalised by the training split, whose mean and deviation are those of the others to a few percent.
        assert abs(float(split.x.mean())) < 0.05 and abs(float(split.x.std()) - 1) < 0.05
    assert task.image_shape[0] * task.image_shape[1] == task.sizes[0]
    pnet = task.build(0)
    assert mlp_sizes({name: tuple(p.shape) for name, p in pnet.named_parameters()}) == task.sizes
    assert pnet(task.val.x[:3]).shape == (3, n_classes)
    recipe = task.recipe(task.genome_params)
    plan = gb.make_plan(pnet, genome_params=task.genome_params, rules=recipe.rules, encodings=recipe.encodings)
    assert 0.98 * task.genome_params <= plan.genome_params <= task.genome_params


def test_digits(digits: Task) -> None:
    check_task(digits, 1_197, 240, 360)
    assert digits.name == "digits"
    # The demo's claim: at least 40 times smaller, on a p-net of at least 80,000 parameters.
    n_pnet = sum(p.numel() for p in digits.build(0).parameters())
    assert n_pnet >= 80_000 and n_pnet >= 40 * digits.genome_params


def test_digits_are_all_of_the_data_set_once(digits: Task) -> None:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    ours = torch.cat([digits.train.x, digits.val.x, digits.test.x])
    y = torch.cat([digits.train.y, digits.val.y, digits.test.y])
    assert np.bincount(y).tolist() == np.bincount(labels).tolist()
    scale = pixels.std() / float(ours.std())
    back = (ours * scale + (pixels.mean() - float(ours.mean()) * scale)).round().long().tolist()
    assert sorted(back) == sorted(pixels.astype(int).tolist())


def test_digits_are_the_same_each_time(digits: Task) -> None:
    again = TASKS["digits"]()
    assert torch.equal(digits.test.x, again.test.x) and torch.equal(digits.val.y, again.val.y)


def test_mnist(mnist: Task) -> None:
    check_task(mnist, 55_000, 5_000, 10_000)
    # Published counts of the test labels.
    counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert torch.bincount(mnist.test.y).tolist() == counts
    assert sum(p.numel() for p in mnist.build(0).parameters()) == 636_010
    small, large = mnist.recipe(613), mnist.recipe(1_973)
    assert small.lr > large.lr


def test_mnist_validation_comes_from_the_training_images(mnist: Task, shared_data: Path) -> None:
    images, labels, test_images, test_labels = load_mnist(shared_data / "mnist")
    counts = torch.bincount(mnist.train.y) + torch.bincount(mnist.val.y)
    assert counts.tolist() == np.bincount(labels).tolist()
    assert images.shape == (60_000, 784) and test_images.shape == (10_000, 784)
    assert torch.equal(mnist.test.y, torch.from_numpy(test_labels))


@pytest.mark.parametrize("name", sorted(TASKS))
@pytest.mark.parametrize("sizes", [(), (64,), (3, 10), (64, 0, 10), (784, 0, 10), (784, 20), (64, 20)])
def test_sizes_that_do_not_fit_the_data_are_refused(name: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sizes must start with"):
        TASKS[name](sizes=sizes)


def test_own_sizes() -> None:
    task = TASKS["digits"](sizes=(64, 16, 12, 10))
    assert task.sizes == (64, 16, 12, 10)
    rules = [pattern for pattern, _ in task.recipe(300).rules]
    assert rules == [r"^(0|2)\.bias$"]
    assert TASKS["digits"](sizes=(64, 10)).recipe(300).rules == ()


# Damaged data


def test_mnist_without_a_folder() -> None:
    with pytest.raises(ValueError, match="--data-dir"):
        TASKS["mnist"]()


def test_mnist_missing_folder_and_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder: .*nowhere"):
        TASKS["mnist"](data_dir=tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="train-images-idx3-ubyte.gz"):
        TASKS["mnist"](data_dir=tmp_path)


def test_idx_round_trip(tmp_path: Path) -> None:
    array = np.random.RandomState(0).randint(0, 256, (5, 3, 2))
    assert np.array_equal(read_idx(write_idx(tmp_path / "a.gz", array), (5, 3, 2)), array)


def test_idx_damage_is_told_apart(tmp_path: Path) -> None:
    array = np.random.RandomState(0).randint(0, 256, (40, 7))
    path = write_idx(tmp_path / "a.gz", array)
    whole = path.read_bytes()
    cases = {
        "damaged": (whole[:60], whole[:-6], b"not gzip at all", whole[:40] + b"\0\0\0\0" + whole[44:]),
        "must unpack to 292 bytes, got 291": (gzip.compress(gzip.decompress(whole)[:-1]),),
        "must unpack to 292 bytes, got more": (gzip.compress(gzip.decompress(whole) + b"x"),),
        "its header says": (write_idx(tmp_path / "b.gz", array[:9]).read_bytes(),),
        "is not an IDX file": (gzip.compress(b""), gzip.compress(b"GIF89a" * 60)),
    }
    for message, contents in cases.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(ValueError, match=message) as caught:
                read_idx(path, (40, 7))
            assert str(path) in str(caught.value) and "\n" not in str(caught.value)
