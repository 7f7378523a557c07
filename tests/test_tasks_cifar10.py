"""CIFAR-10 in both forms, and files that are damaged or mean harm."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from gbfunc.tasks import find_task
from gbfunc.tasks.images import load_cifar, read_batch, read_packed

Images = tuple[np.ndarray, np.ndarray]


def small(n: int, seed: int = 0) -> Images:
    random = np.random.RandomState(seed)
    return random.randint(0, 256, (n, 3, 32, 32)).astype(np.uint8), np.arange(n) % 10


def write_batch(path: Path, images: np.ndarray, labels: list, dtype: bytes = b"u1", order: bytes = b"\x89") -> Path:
    """Write a batch with the opcodes of the data set, which Python 2 wrote: strings of 8 bits for the bytes."""
    data, n = images.tobytes(), len(images).to_bytes(2, "little")
    row = (images.size // len(images)).to_bytes(2, "little")
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01(M" + n + b"M" + row + b"t"
        b"cnumpy\ndtype\n(U\x02" + dtype + b"K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        + order + b"T" + len(data).to_bytes(4, "little") + data + b"tb"
    )  # fmt: skip
    path.write_bytes(b"\x80\x02}(U\x04data" + array + b"U\x06labels" + pickle.dumps(labels, 2)[2:-1] + b"u.")
    return path


def write_packed(path: Path, images: np.ndarray, labels: np.ndarray, **more: np.ndarray) -> Path:
    delta = images.copy()
    delta[:, 0] -= images[:, 1]
    delta[:, 2] -= images[:, 1]
    for axis in (3, 2):
        delta = np.diff(delta, axis=axis, prepend=np.uint8(0)).astype(np.uint8)
    np.savez_compressed(path, delta=delta, labels=labels.astype(np.uint8), **more)  # pyright: ignore[reportArgumentType]
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "data" / "cifar-10-batches-py"
    inner.mkdir(parents=True)
    for i in range(1, 6):
        images, labels = small(40, i)
        write_batch(inner / f"data_batch_{i}", images, labels.tolist())
    images, labels = small(20, 6)
    write_batch(inner / "test_batch", images, labels.tolist())
    return tmp_path / "data"


def test_a_batch_as_python_2_wrote_it(tmp_path: Path) -> None:
    images, labels = small(12)
    found, own = read_batch(write_batch(tmp_path / "b", images, labels.tolist()))
    assert np.array_equal(found, images) and np.array_equal(own, labels) and own.dtype == np.int64


class Call:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_batch_runs_nothing(tmp_path: Path, protocol: int) -> None:
    (tmp_path / "b").write_bytes(pickle.dumps({"data": Call(str(tmp_path / "harm")), "labels": []}, protocol))
    with pytest.raises(ValueError, match="expected only arrays in the pickle, got (posix|nt).mkdir"):
        read_batch(tmp_path / "b")
    assert not (tmp_path / "harm").exists()


def test_a_damaged_batch_is_one_line(tmp_path: Path) -> None:
    images, labels = small(3)
    path = write_batch(tmp_path / "b", images, labels.tolist())
    whole = path.read_bytes()
    random = np.random.RandomState(0)
    damaged = [whole[:n] for n in (0, 1, 10, 200, len(whole) - 1)]
    damaged += [b"GIF89a" * 9, pickle.dumps([1]), pickle.dumps({})]
    for _ in range(200):
        broken = bytearray(whole)
        broken[random.choice([random.randint(150), random.randint(len(whole))])] = random.randint(256)
        damaged.append(bytes(broken))
    for i, content in enumerate(damaged):
        path.write_bytes(content)
        try:
            read_batch(path)
            assert i >= 8
        except ValueError as error:
            assert str(path) in str(error)
    for data, own, options, message in (
        (images, labels.tolist(), {"dtype": b"i8"}, "data must be 3 x 3072 unsigned bytes"),
        (images, labels.tolist(), {"order": b"\x88"}, "data must be 3 x 3072 unsigned bytes, row by row"),
        (images[:, :2], labels.tolist(), {}, r"data must be 3 x 3072 unsigned bytes, row by row, got \(3, 2048\)"),
        (images, [0, 1], {}, r"data must be 2 x 3072 .* got \(3, 3072\)"),
        (images, [0, 1, "2"], {}, "labels must be integers from 0 to 9"),
        (images, [0, 1, 10], {}, r"labels must be integers from 0 to 9, got \[0, 1, 10\]"),
    ):
        with pytest.raises(ValueError, match=message):
            read_batch(write_batch(path, data, own, **options))


def test_the_standard_folder(folder: Path) -> None:
    task = find_task("cifar10", folder, {})
    assert [len(s) for s in (task.train, task.val, task.test)] == [180, 20, 20]
    for size in (14_958, 9_378, 3_798):
        assert 0.98 * size <= task.plan(task.build(0), genome_params=size).genome_params <= size
    assert torch.bincount(task.val.y).tolist() == [2] * 10
    again = find_task("cifar10", folder / "cifar-10-batches-py", {})
    assert torch.equal(task.train.x, again.train.x)
    mean, std = task.train.x.mean((0, 2, 3)), task.train.x.std((0, 2, 3))
    assert float(mean.abs().max()) < 1e-4 and float((std - 1).abs().max()) < 1e-3


def test_both_forms_are_the_same_and_images_that_are_not_exact_are_left_out(folder: Path, tmp_path: Path) -> None:
    train, test = load_cifar(folder)
    other = tmp_path / "packed"
    other.mkdir()
    write_packed(other / "cifar10_train.npz", *train)
    write_packed(other / "cifar10_test.npz", *test)
    for a, b in zip((*train, *test), sum(load_cifar(other), ()), strict=True):
        assert np.array_equal(a, b)
    images, labels = small(5)
    exact = np.array([1, 0, 1, 1, 0], bool)
    found, own = read_packed(write_packed(tmp_path / "a.npz", images, labels, exact=exact))
    assert np.array_equal(found, images[exact]) and own.tolist() == [0, 2, 3]


def test_damaged_npz(tmp_path: Path) -> None:
    images, labels = small(4)
    path = write_packed(tmp_path / "a.npz", images, labels)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match="a.npz is not a valid file of arrays"):
        read_packed(path)
    for own, more, message in (
        (labels + 9, {}, "labels must be integers from 0 to 9, got .* 9, 10, 11, 12"),
        (labels[:3], {}, "delta must be 3 x 3 x 32 x 32 bytes, got uint8"),
        (np.array(7), {}, "labels must be integers"),
        (labels, {"exact": np.ones(3, bool)}, "exact must be 4 booleans, some True"),
    ):
        with pytest.raises(ValueError, match=message):
            read_packed(write_packed(path, images, own, **more))


def test_missing_files(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must hold CIFAR-10's python batches or cifar10_train"):
        find_task("cifar10", tmp_path, {})
    (folder / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError, match="no such CIFAR-10 batch: .*data_batch_3"):
        find_task("cifar10", folder, {})
    write_packed(folder / "cifar10_train.npz", *small(3))
    with pytest.raises(FileNotFoundError, match="one cifar10_test.*npz, got 1 and 0"):
        find_task("cifar10", folder, {})


def test_real_images_are_read(shared_data: Path) -> None:
    images, labels = read_packed(shared_data / "cifar10" / "cifar10_test10k.npz")
    assert len(images) == 9_977 and labels[:5].tolist() == [3, 8, 8, 0, 6]
