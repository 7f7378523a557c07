"""The task `images`: folders of pictures and CIFAR's files, and adapters of tiny pretrained networks."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gbfunc as gb
from gbfunc.tasks import find_task
from gbfunc.tasks.pictures import preprocessing
from tests.test_tasks_cifar10 import small, write_packed

VIT = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
CLASSES = ("\x1b[2Jcats", "dogs", "owls")
KINDS = {
    "ConvNext": ({"num_stages": 2, "depths": [1, 1], "hidden_sizes": [16, 32]}, "classifier"),
    "ResNet": ({"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}, "classifier.1"),
    "ViT": (VIT | {"patch_size": 8, "image_size": 32}, "classifier"),
}
"""Options of small networks, and the names of their heads."""
MEAN, STD = (127.5, 102.0, 76.5), (51.0, 51.0, 25.5)
SAID = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.2, 0.1], "size": {"height": 32, "width": 32}}


def save_pictures(folder: Path, classes: tuple[str, ...] = CLASSES, n: int = 12) -> Path:
    """Save pictures of several sizes and formats, whose colours tell the class."""
    random = np.random.RandomState(0)
    for k, name in enumerate(classes):
        (folder / name / "deep").mkdir(parents=True)
        (folder / name / "notes.txt").write_text("no picture")
        for i in range(n):
            pixels = random.randint(0, 90, (20 + i, 30, 3)).astype(np.uint8)
            pixels[..., k % 3] += 150
            Image.fromarray(pixels).save(folder / name / ("deep" if i % 2 else "") / f"{i}.{('png', 'JPG')[i % 2]}")
    return folder


def save_base(folder: Path, kind: str = "ConvNext", seed: int = 7) -> Path:
    transformers = pytest.importorskip("transformers", reason="pretrained networks need transformers")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(transformers, f"{kind}Config")(**KINDS[kind][0], num_labels=7)
        net = getattr(transformers, f"{kind}ForImageClassification")(config).train()
        # Gives norms their statistics.
        net(torch.randn(64, 3, 32, 32))
        net.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(SAID))
    return folder


def normalised(path: Path, size: int, mean: Any, std: Any) -> torch.Tensor:
    pixels_Chw = torch.from_numpy(np.asarray(Image.open(path).resize((size, size)), np.float64).transpose(2, 0, 1))
    mean, std = (torch.as_tensor(x).view(3, 1, 1) for x in (mean, std))
    return (pixels_Chw - mean) / std


def test_pictures_are_split_and_normalised(tmp_path: Path) -> None:
    task = find_task("images", save_pictures(tmp_path / "data"), {"size": 16})
    assert task.about["classes"] == [*CLASSES] and task.interface[:2] == ((3, 16, 16), 3)
    assert task.test.y.tolist() == task.val.y.tolist() == [0, 1, 2] and task.train.y.bincount().tolist() == [10] * 3
    own = normalised(tmp_path / "data" / "dogs" / "0.png", 16, task.about["mean"], task.about["std"])
    x_NChw = torch.cat([part[:][0] for part in (task.train, task.val, task.test)])
    assert x_NChw.dtype == torch.float32 and float((x_NChw - own).abs().amax((1, 2, 3)).min()) < 1e-5
    deviation, mean = torch.std_mean(task.train[:][0], (0, 2, 3))
    assert float(mean.abs().max()) < 1e-4 and float((deviation - 1).abs().max()) < 1e-2


@pytest.mark.parametrize("second", ["test", "val"])
def test_parts_of_a_folder(second: str, tmp_path: Path) -> None:
    save_pictures(tmp_path / "train")
    save_pictures(tmp_path / second, n=4)
    task = find_task("images", tmp_path, {})
    assert [len(part) for part in (task.train, task.val, task.test)] == [33, 3, 12]
    save_pictures(tmp_path / ("val" if second == "test" else "test"), CLASSES[:2], 2)
    task = find_task("images", tmp_path, {})
    assert len(task.train) == 36 and len(getattr(task, second)) == 12
    save_pictures(tmp_path / "test" / "bats", ("more",), 1)
    with pytest.raises(ValueError, match=r"test has a class 'bats', which .*train lacks"):
        find_task("images", tmp_path, {})


def test_files_of_cifar(tmp_path: Path) -> None:
    images, labels = small(200)[0], np.arange(200) % 20
    write_packed(tmp_path / "cifar100_train20k.npz", images, labels)
    write_packed(tmp_path / "cifar100_test5k.npz", images[:20], labels[:20])
    task = find_task("images", tmp_path, {})
    assert (len(task.train), len(task.val), task.interface.outputs) == (180, 20, 20) and "classes" not in task.about
    assert torch.equal(task.test.x, torch.from_numpy(images[:20]))


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_learns_predicts_and_knows_its_base(kind: str, tmp_path: Path, command: Any) -> None:
    data, base, out = save_pictures(tmp_path / "data"), save_base(tmp_path / "base", kind), tmp_path / "out"
    words = ["--task", "images", "--data-dir", data, "--pretrained", base, "--lr", "0.03", "--epochs", "20"]
    command(["train", *words, "--batch-size", "10", "--dtype", "float16", "--out", out])
    genome, picture = out / "genome.safetensors", data / CLASSES[0] / "0.png"
    plan, held = gb.load(genome)
    kinds = {t.name: (t.role, t.base) for t in plan.tensors}
    assert kinds[f"{KINDS[kind][1]}.weight"] == ("direct", False) and sum(base for _, base in kinds.values()) > 5
    assert json.loads((out / "metrics.json").read_text())["test_accuracy"] == 1.0
    assert "100.00%" in command(["eval", "--data-dir", data, "--genome", genome]).out
    task = find_task("images", data, {"pretrained": str(base)})
    assert (task.recipe(0).batch_size, task.recipe(0).epochs) == (30, 20)
    assert [tuple(task.about[k].flatten().tolist()) for k in ("mean", "std")] == [MEAN, STD]
    net: Any = gb.materialize(plan, held, task.build(3)).eval()
    chance = net(normalised(picture, 32, MEAN, STD)[None].float()).logits.softmax(1)[0, 0].item()
    line = command(["predict", "--genome", genome, picture]).out.strip().split("\t")
    assert line[1] == r"\x1b[2Jcats" and float(line[2]) == pytest.approx(chance, abs=1e-3)
    other = save_base(tmp_path / "other", kind, 8)
    told = command(["predict", "--genome", genome, "--pretrained", other, picture], 2).err
    assert told.count("\n") == 1 and "the base that --pretrained must name" in told
    # A head that takes more than the genome is generated.
    assert task.pnet.plan(20).exclude == () != task.pnet.plan(100).exclude


SPOILT = [
    ("data/xs/none.txt", b"", "the class {}/data/xs holds no pictures: add some, or remove the folder"),
    ("data/dogs/0.png", b"\x89PNG", "{}/data/dogs/0.png is not a valid picture"),
    (
        "base/preprocessor_config.json",
        None,
        "no such preprocessor, which says how a network takes pictures: {}/base/preprocessor_config.json",
    ),
    (
        "base/preprocessor_config.json",
        b"{}",
        "is not a valid preprocessor, which says how a network takes pictures: 'size'",
    ),
    ("base/config.json", b'{"model_type": "bert"}', "of the kind image classifier, got hf:bert: choose another"),
    # An empty file of weights.
    ("base/model.safetensors", b"\2\0\0\0\0\0\0\0{}", "the weights in {}/base cannot be read: expected weights"),
]


@pytest.mark.parametrize(("name", "content", "message"), SPOILT)
def test_damaged_files_are_refused(
    name: str, content: bytes | None, message: str, tmp_path: Path, command: Any
) -> None:
    data, base, path = save_pictures(tmp_path / "data"), save_base(tmp_path / "base"), tmp_path / name
    path.parent.mkdir(exist_ok=True)
    _ = path.unlink() if content is None else path.write_bytes(content)
    told = command(["plan", "--task", "images", "--data-dir", data, "--pretrained", base], 2).err
    assert told.count("\n") == 1 and message.format(tmp_path) in told


def test_timm_says_in_its_configuration_how_it_takes_pictures(tmp_path: Path) -> None:
    known = {"input_size": [3, 24, 24], "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.1]}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "resnet10t", "pretrained_cfg": known}))
    size, mean_C, std_C = preprocessing(tmp_path)
    assert (size, *mean_C, *std_C) == pytest.approx((24, *MEAN, *STD))


def test_folders_and_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no pictures: it must hold a folder of pictures \(.png .jpg "):
        find_task("images", tmp_path, {})
    with pytest.raises(ValueError, match="10 pictures to learn from, of two classes or more, got 12 of 'one'"):
        find_task("images", save_pictures(tmp_path, ("one",)), {})
    with pytest.raises(ValueError, match="size of the images task must be an int >= 12, got 9"):
        find_task("images", tmp_path, {"size": 9})
