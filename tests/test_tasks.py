"""Real data: its splits, its loaders and their errors; p-nets by sizes; teachers."""

import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_model

from gbfunc.cli import main
from gbfunc.tasks import TASKS, Split, Task, accuracy, find_task, loss_fn
from gbfunc.tasks.base import Recipe, logits_of, one_cycle
from gbfunc.tasks.data import Augment
from gbfunc.tasks.images import load_mnist, read_idx
from gbfunc.tasks.pnets import PNETS


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


def test_loss_and_accuracy_by_hand() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    y = torch.tensor([0, 1, 1])
    loss, aux = loss_fn(lambda x: x, (logits, y))
    expected = -torch.log_softmax(logits, 1)[range(3), y].mean()
    torch.testing.assert_close(loss, expected)
    assert aux["accuracy"].item() == pytest.approx(2 / 3)
    for chunk in (1, 2, 3, 100):
        assert accuracy(lambda x: x, Split(logits, y), chunk) == pytest.approx(2 / 3)


def test_logits_are_found_in_an_output() -> None:
    class Output:
        logits = torch.ones(2)

    assert torch.equal(logits_of(Output()), torch.ones(2)) and torch.equal(logits_of(Output.logits), torch.ones(2))
    with pytest.raises(TypeError, match="logits or an object with .logits, got tuple"):
        logits_of((torch.ones(2),))
    with pytest.raises(ValueError, match="got an empty one"):
        accuracy(lambda x: x, Split(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64)))


def check_task(task: Task, n_train: int, n_val: int, n_test: int) -> None:
    assert [len(s.y) for s in (task.train, task.val, task.test)] == [n_train, n_val, n_test]
    n_classes = task.interface.outputs
    for split in (task.train, task.val, task.test):
        assert split.x.dtype == torch.float32 and split.y.dtype == torch.int64
        assert isinstance(split, Split) and split.x.shape == (len(split.y), *task.interface.inputs)
        assert sorted(split.y.unique().tolist()) == list(range(n_classes))
        # Normalised by the training split, whose mean and deviation are those of the others to a few percent.
        assert abs(float(split.x.mean())) < 0.05 and abs(float(split.x.std()) - 1) < 0.05
    pnet = task.build(0)
    x, y = next(task.val.chunks(3))
    assert pnet(x).shape == (3, n_classes) and len(y) == 3
    assert task.genome_params is not None
    plan = task.plan(pnet, genome_params=task.genome_params)
    assert 0.98 * task.genome_params <= plan.genome_params <= task.genome_params
    assert task.plan(pnet, "low_rank", compression=2.0).generated[0].slots[0].hypernet.type == "low_rank"
    assert task.evaluate(pnet, task.val).keys() == {metric.name for metric in task.metrics}


def test_digits(digits: Task) -> None:
    check_task(digits, 1_197, 240, 360)
    # The demo's claim: at least 40 times smaller, on a p-net of at least 80,000 parameters.
    n_pnet = sum(p.numel() for p in digits.build(0).parameters())
    assert digits.genome_params is not None and n_pnet >= 80_000 and n_pnet >= 40 * digits.genome_params
    from sklearn.datasets import load_digits

    # All of the data set, once.
    pixels, labels = load_digits(return_X_y=True)
    ours = torch.cat([digits.train.x, digits.val.x, digits.test.x]).flatten(1)
    y = torch.cat([digits.train.y, digits.val.y, digits.test.y])
    assert np.bincount(y).tolist() == np.bincount(labels).tolist()
    back = (ours * digits.about["std"][0] + digits.about["mean"][0]).round().long().tolist()
    assert sorted(back) == sorted(pixels.astype(int).tolist())


def test_mnist(mnist: Task) -> None:
    check_task(mnist, 55_000, 5_000, 10_000)
    # Published counts of the test labels.
    counts = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert torch.bincount(mnist.test.y).tolist() == counts
    small, large = mnist.recipe(613), mnist.recipe(1_973)
    assert [spread_of(recipe.augment) for recipe in (small, large)] == pytest.approx([0.25, 0.4], rel=0.02)


def test_large_genomes_of_convolutional_nets_see_distorted_digits(shared_data: Path) -> None:
    tasks = [find_task("mnist", shared_data / "mnist", config) for config in ({}, {"distort": 0}, {"noise": 0.3})]
    plain, still, noisy = (task.with_pnet(PNETS["lenet5"](task.interface)) for task in tasks)
    assert spread_of(plain.recipe(2_000).augment) == pytest.approx(0.2, rel=0.02)
    augment, digits = plain.recipe(4_652).augment, plain.train.x[:50]
    assert augment is not None and still.recipe(4_652).augment is None
    changed = augment(digits, torch.Generator().manual_seed(0))
    # Ink moves, and hardly any is lost.
    assert float((changed - digits).abs().mean()) > 0.1
    torch.testing.assert_close(changed.mean((1, 2, 3)), digits.mean((1, 2, 3)), atol=0.15, rtol=0)
    assert spread_of(noisy.recipe(4_652).augment) == pytest.approx(0.3, rel=0.02)


def spread_of(augment: Augment | None) -> float:
    """Deviation of what is added to blank images."""
    assert augment is not None
    images = torch.zeros(50, 1, 28, 28)
    # Rows and columns that no shift of a pixel reaches.
    return float(augment(images, torch.Generator().manual_seed(0))[:, :, 1:-1, 1:-1].std())


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "much"])
def test_options_of_mnist_are_numbers_in_range(value: object) -> None:
    for name, expected in (("noise", ">= 0"), ("shift", "from 0 to 1"), ("distort", "from 0 to 1")):
        with pytest.raises(ValueError, match=f"{name} of the mnist task must be a number {expected}"):
            find_task("mnist", None, {name: value})


def test_mnist_validation_comes_from_the_training_images(mnist: Task, shared_data: Path) -> None:
    (images, labels), (test_images, test_labels) = load_mnist(shared_data / "mnist")
    counts = torch.bincount(mnist.train.y) + torch.bincount(mnist.val.y)
    assert counts.tolist() == np.bincount(labels).tolist()
    assert images.shape == (60_000, 1, 28, 28) and test_images.shape == (10_000, 1, 28, 28)
    assert torch.equal(mnist.test.y, torch.from_numpy(test_labels))
    # The same files under another name: the loader is one.
    fashion = find_task("fashion-mnist", shared_data / "mnist", {})
    assert fashion.name == "fashion-mnist" and torch.equal(fashion.train.x, mnist.train.x)


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10"])
def test_tasks_with_data_ask_for_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"the {name} task needs --data-dir"):
        find_task(name, None, {})
    with pytest.raises(FileNotFoundError, match="no such folder: .*nowhere"):
        find_task(name, tmp_path / "nowhere", {})
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte.gz|cifar10_train"):
        find_task(name, tmp_path, {})


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("nope", {}, "no task 'nope': choose one of digits, mnist.*, control, or package"),
        ("control", {"nope": 1}, "the task control has no option nope: its options are env, env_steps"),
        ("digits", {"colour": 1}, "the task digits has no option colour: its options are none"),
        ("trec", {"name": "x"}, "has no option name: its options are pretrained, max_tokens, vocabulary"),
        ("gbfunc.tasks.text:continue_text", {"seed": 1}, "missing a required argument: 'net', got the options .*seed"),
        ("gbfunc.tasks:nope", {}, "module 'gbfunc.tasks' has no attribute 'nope'"),
        ("gbfunc.tasks:TASKS", {}, "must be a function that returns a Task, got mappingproxy"),
        ("gbfunc.tasks.data:noise", {"deviation": 1.0}, "must return a gbfunc.tasks.Task, got function"),
    ],
)
def test_wrong_tasks_are_refused(name: str, config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_task(name, None, config)


def test_idx_damage_is_told_apart(tmp_path: Path) -> None:
    array = np.random.RandomState(0).randint(0, 256, (40, 7))
    path = write_idx(tmp_path / "a.gz", array)
    assert np.array_equal(read_idx(path, (40, 7)), array)
    whole = path.read_bytes()
    cases = {
        "is not a valid IDX file": (whole[:60], whole[:-6], b"not gzip at all", whole[:40] + b"\0\0\0\0" + whole[44:]),
        "expected 292 bytes that start with 000008020000002800000007 ": (
            gzip.compress(gzip.decompress(whole)[:-1]),
            gzip.compress(gzip.decompress(whole) + b"x"),
            write_idx(tmp_path / "b.gz", array[:9]).read_bytes(),
            gzip.compress(b""),
            gzip.compress(b"GIF89a" * 60),
        ),
    }
    for message, contents in cases.items():
        for content in contents:
            path.write_bytes(content)
            with pytest.raises(ValueError, match=message) as caught:
                read_idx(path, (40, 7))
            assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_schedule_of_any_length() -> None:
    for warmup in (0.0, 0.1, 0.2, 0.5):
        for steps in range(1, 30):
            rate = one_cycle(Recipe(warmup=warmup), 1e-2, steps)
            assert all(0 <= rate(i) <= 1.0001e-2 for i in range(steps))


MODEL = ["--sizes", "64", "24", "10", "--batch-size", "300"]


def test_a_dense_file_teaches_and_is_told(tmp_path: Path) -> None:
    dense, out = tmp_path / "dense", tmp_path / "out"
    assert main(["train", "--dense", *MODEL, "--epochs", "8", "--out", str(dense)]) == 0
    genome = ["train", *MODEL, "--genome-params", "500", "--epochs", "1", "--overwrite", "--out"]
    for path in (dense, dense / "genome.safetensors"):
        assert main([*genome, str(out), "--teacher", str(path), "--teacher-weight", "1"]) == 0
        config = json.loads((out / "metrics.json").read_text())["config"]
        assert config["teacher"] == str(path) and (config["teacher_weight"], config["temperature"]) == (1.0, 2.0)
    # Labels are not asked for: four times the divergence is the loss.
    values = next(csv.DictReader((out / "history.csv").read_text().splitlines()))
    assert float(values["train_loss"]) == pytest.approx(4 * float(values["train_teacher_kl"]), rel=1e-4)
    # A genome teaches as well, of other widths than its pupil's.
    assert main(["train", "--sizes", "64", "32", "10", *genome[5:-2], "--teacher", str(out)]) == 0


def test_a_training_goes_on_with_the_same_teacher_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate(("a", "b")):
        task = TASKS["digits"]().with_pnet(PNETS["mlp"](TASKS["digits"]().interface, hidden=(24,)))
        save_model(task.build(seed), str(tmp_path / f"{name}.safetensors"))
    genome = ["train", *MODEL, "--genome-params", "500", "--epochs", "1", "--out", str(tmp_path / "out")]
    assert main([*genome, "--teacher", str(tmp_path / "a.safetensors"), "--checkpoint-every", "2"]) == 0
    resumed = [*genome, "--resume", "auto"]
    assert main([*resumed, "--teacher", str(tmp_path / "a.safetensors")]) == 0
    capsys.readouterr()
    # As after any change of settings, such a checkpoint does not count.
    last = sorted((tmp_path / "out" / "checkpoints").glob("step-*"))[-1]
    assert main([*genome, "--resume", str(last), "--teacher", str(tmp_path / "b.safetensors")]) == 2
    assert "trained with other settings: teacher" in capsys.readouterr().err
