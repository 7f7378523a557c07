"""The page in a browser: it draws, runs, refuses, fits a phone, and asks no network for anything."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.exporting.page import in_address, page
from gbfunc.tasks.images import load_mnist
from gbfunc.tasks.pnets import Interface, find_pnet
from gbfunc.tasks.pnets.base import import_factory

image = pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.process

SEEN = "[data-grown], #alert:not([hidden])"


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab without motion, whose `errors` and `requests` are counted."""
    opened = browser.new_page(viewport={"width": 1180, "height": 900}, reduced_motion="reduce")
    opened.errors, opened.requests = [], []
    opened.on("pageerror", lambda error: opened.errors.append(str(error)))
    opened.on("request", lambda request: opened.requests.append(request.url))
    yield opened
    opened.close()
    assert opened.errors == []


def opened(tab: Any, path: Path, fragment: str = "") -> Any:
    tab.goto(f"{path.as_uri()}{fragment}")
    tab.locator(SEEN).first.wait_for()
    return tab


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory, shared_data: Path) -> Path:
    folder = tmp_path_factory.mktemp("digits")
    train = ["train", "--task", "mnist", "--data-dir", str(shared_data / "mnist"), "--epochs", "2", "--dtype", "int8"]
    train += ["--genome-params", "600"]
    assert main([*train, "--pnet-config", '{"hidden": [100]}', "--seed", "0", "--out", str(folder)]) == 0
    genome = str(folder / "genome.safetensors")
    assert main(["export", "--genome", genome, "--out", str(folder / "net.html")]) == 0
    return folder


def check_runs(tab: Any, images: Any, expected: torch.Tensor) -> None:
    pixels = images.reshape(len(images), -1).tolist()
    got = tab.evaluate("images => images.map(pixels => Array.from(gbfunc.run(pixels)))", pixels)
    assert (torch.tensor(got) - expected).abs().max() <= 1e-4 * expected.abs().max()


def answers(tab: Any) -> list[float]:
    return [float(text.removesuffix(" %")) / 100 for text in tab.locator("#bars output").all_inner_texts()]


def test_a_page_is_small_and_draws_at_once(digits: Path, tab: Any) -> None:
    path = digits / "net.html"
    assert path.stat().st_size <= 150_000
    opened(tab, path)
    assert re.fullmatch(r"79,510 weights from \d{3} bytes", tab.inner_text("h1"))
    drawn = "document.querySelector('#tensors canvas').getContext('2d').getImageData(0, 0, 28, 28).data"
    assert len(set(tab.evaluate(f"Array.from({drawn})"))) > 20
    assert tab.evaluate("performance.getEntriesByName('weights drawn').length") > 0
    assert tab.requests == [path.as_uri()]
    # A phone.
    tab.set_viewport_size({"width": 375, "height": 700})
    opened(tab, path)
    assert tab.evaluate("document.documentElement.scrollWidth") == 375
    assert tab.locator("#draw").bounding_box()["y"] < 500 and not tab.locator("#progress").is_visible()


def test_images_give_what_torch_gives(digits: Path, tab: Any, shared_data: Path, tmp_path: Path) -> None:
    opened(tab, digits / "net.html")
    images = load_mnist(shared_data / "mnist")[1][0][:100, 0]
    pnet = find_pnet("mlp", Interface((1, 28, 28), 10), {"hidden": [100]}).build(0)
    said = gb.load_metadata(digits / "genome.safetensors")
    x = (torch.from_numpy(images.astype(np.float32)) - said["mean"]) / said["std"]
    with torch.no_grad():
        expected = gb.materialize(*gb.load(digits / "genome.safetensors"), pnet)(x[:, None])
    check_runs(tab, images, expected)
    for i in range(3):
        image.fromarray(images[i]).save(tmp_path / f"{i}.png")
        tab.set_input_files("#image", tmp_path / f"{i}.png")
        tab.locator("#answer", has_text=f"{int(expected[i].argmax())}, ").wait_for()
        assert torch.tensor(answers(tab)).sub(expected[i].softmax(0)).abs().max() <= 6e-4


def test_a_genome_in_the_address(digits: Path, tab: Any, tmp_path: Path) -> None:
    empty = tmp_path / "page.html"
    empty.write_text(page(), encoding="utf-8")
    data = (digits / "genome.safetensors").read_bytes()
    address = in_address(data)
    opened(tab, empty, f"#{address}")
    assert tab.inner_text("h1") == f"79,510 weights from {len(data)} bytes"
    damaged = address[:400] + ("A" if address[400] != "A" else "B") + address[401:]
    wrong = {damaged: "damaged", "no genome!": "damaged", address[:300]: "", "AAAA": "too few"}
    for fragment, message in wrong.items():
        tab.goto("about:blank")
        opened(tab, empty, f"#{fragment}")
        said = tab.inner_text("#alert")
        assert said.startswith("This genome cannot be shown: ") and "\n" not in said and message in said
        assert not tab.locator("#network").is_visible()


def test_images_in_colour(tab: Any, tmp_path: Path) -> None:
    pnet = find_pnet("allconv", Interface((3, 16, 16), 4), {"width": 4})
    plan = gb.make_plan(net := pnet.build(0), **pnet.plan(1_000)._asdict(), compression=3.0)
    genome = gb.init_genome(plan, net, seed=0)
    said = {"task": "colours", "pnet": "allconv", "pnet_config": {"width": 4}, "interface": [[3, 16, 16], 4]}
    scaling = {"mean": [120.0, 110.0, 100.0], "std": [60.0, 50.0, 40.0]}
    path = tmp_path / "genome.safetensors"
    gb.save(path, plan, genome, metadata={**said, **scaling, "classes": ["red", "green", "blue", "grey"]})
    (tmp_path / "net.html").write_text(page(path.read_bytes()), encoding="utf-8")
    opened(tab, tmp_path / "net.html")
    assert not tab.locator("#draw").is_visible()
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    image.fromarray(pixels).save(tmp_path / "image.png")
    tab.set_input_files("#image", tmp_path / "image.png")
    mean, std = (np.array(scaling[name]) for name in ("mean", "std"))
    x = torch.from_numpy(((pixels - mean) / std).astype(np.float32)).permute(2, 0, 1)
    with torch.no_grad():
        expected = gb.materialize(plan, genome, net).eval()(x[None])[0].softmax(0)
    best = ("red", "green", "blue", "grey")[int(expected.argmax())]
    tab.locator("#answer", has_text=f"{best}, ").wait_for()
    assert torch.tensor(answers(tab)).sub(expected).abs().max() <= 6e-4


def test_a_network_of_ones_own_runs(tab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    Path("own_net.py").write_text(
        "from torch import nn\n"
        "def net(units):\n"
        "    body = nn.Sequential(nn.Conv2d(1, 3, 3, 2), nn.BatchNorm2d(3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten())\n"
        "    return nn.Sequential(body, nn.Linear(108, units), nn.GELU(), nn.Linear(units, 4))\n"
        "def other():\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(784, 4), nn.Softplus())\n",
        encoding="utf-8",
    )
    said = {"interface": [[1, 28, 28], 4], "task": "mine", "mean": 30.0, "std": 70.0, "classes": ["a", "b", "c", "d"]}
    net = import_factory("own_net:net", "a net")(7).eval()
    plan = gb.make_plan(net, gb.periodic(3))
    genome = gb.init_genome(plan, net, seed=0)
    gb.save("genome", plan, genome, metadata={**said, "pnet": "own_net:net", "pnet_config": {"units": 7}})
    export = ["export", "--genome", "genome", "--out", "net.html"]
    words = "does not run the network: genome names code that a file may not run: if you trust it, pass --pnet own_net:"
    assert words in command(export).out
    # It grows all the same.
    opened(tab, tmp_path / "net.html")
    told = 'The network does not run here: this page does not know the network "own_net:net".'
    assert tab.inner_text("#alert") == told and not tab.locator("#network").is_visible()
    assert tab.locator("#tensors canvas").count() > 0
    tab.goto("about:blank")
    assert "does not run" not in command([*export, "--pnet", "own_net:net"]).out
    pixels = np.random.default_rng(0).integers(0, 256, (5, 28, 28))
    opened(tab, tmp_path / "net.html")
    with torch.no_grad():
        check_runs(tab, pixels, gb.materialize(plan, genome, net)((torch.tensor(pixels)[:, None].float() - 30) / 70))
    tab.locator("#draw").press("ArrowDown")
    tab.locator("#answer", has_text="%").wait_for()
    net = import_factory("own_net:other", "a net")()
    plan = gb.make_plan(net, gb.periodic(3))
    gb.save("genome", plan, gb.init_genome(plan, net, seed=0), metadata={**said, "pnet": "own_net:other"})
    assert "got '2', Softplus" in command([*export, "--pnet", "own_net:other"]).out


DROP = """([place, files]) => {
  const data = new DataTransfer();
  for (const [name, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name));
  document.querySelector(place).dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
}"""


def genome_of_images(path: Path, shape: tuple[int, ...], outputs: int, **said: Any) -> Path:
    pnet = find_pnet("mlp", Interface(shape, outputs), {"hidden": [9]})
    plan = gb.make_plan(net := pnet.build(0), gb.periodic(3))
    known = {
        "task": "mine",
        "pnet": "mlp",
        "pnet_config": {"hidden": [9]},
        "interface": [list(shape), outputs],
        "mean": 30.0,
        "std": 70.0,
    }
    gb.save(path, plan, gb.init_genome(plan, net, seed=0), metadata=known | said)
    return path


def test_of_genomes_that_are_dropped_the_last_is_shown(tab: Any, tmp_path: Path, digits: Path) -> None:
    small = genome_of_images(tmp_path / "small.genome", (1, 8, 8), 4)
    opened(tab, digits / "net.html")
    tab.evaluate(DROP, ["body", [["large", list((digits / "genome.safetensors").read_bytes())]]])
    tab.evaluate(DROP, ["#classifier", [["small", list(small.read_bytes())]]])
    tab.locator("#network-note", has_text="mlp, for mine").wait_for()
    assert tab.inner_text("h1").startswith("625 weights")
    tab.wait_for_timeout(300)
    assert tab.locator("#bars li").count() == 4 and not tab.locator("#alert").is_visible()
    tab.evaluate(DROP, ["body", [["notes.txt", [1, 2, 3]]]])
    tab.locator("#answer", has_text="notes.txt is no genome, and no image that can be read").wait_for()


def test_images_are_seen_as_by_predict(tab: Any, tmp_path: Path, command: Any) -> None:
    genome = genome_of_images(tmp_path / "genome", (1, 16, 32), 10)
    (tmp_path / "net.html").write_text(page(genome.read_bytes()), encoding="utf-8")
    opened(tab, tmp_path / "net.html")
    ink = np.zeros((16, 32, 4), np.uint8)
    ink[3:12, 20:24, 3] = 255
    image.fromarray(ink, "RGBA").save(tmp_path / "ink.png")
    told = command(["predict", "--genome", str(genome), str(tmp_path / "ink.png")]).out.split("\t")
    tab.evaluate(DROP, ["h1", [["ink.png", list((tmp_path / "ink.png").read_bytes())]]])
    tab.locator("#answer", has_text=f"{told[1]}, ").wait_for()
    assert max(answers(tab)) == pytest.approx(float(told[2]), abs=0.01)
    box = tab.locator("#draw").bounding_box()
    tab.mouse.move(box["x"] + 20, box["y"] + 20)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 20, box["y"] + 120)
    tab.mouse.up()
    tab.locator("#answer", has_text="%").wait_for()
    seen = tab.evaluate("Array.from(document.querySelector('#seen').getContext('2d').getImageData(0, 0, 32, 16).data)")
    pixels = np.array(seen, float).reshape(16, 32, 4)[..., 0]
    middle = [float((pixels.sum(1 - axis) * np.arange(pixels.shape[axis])).sum() / pixels.sum()) for axis in (0, 1)]
    assert middle == pytest.approx([8, 16], abs=0.6)


def test_a_language_model_writes_as_torch_does(tab: Any, tmp_path: Path, command: Any) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog <and back>.\n" * 200, encoding="utf-8")
    out = tmp_path / "out"
    small = ["--task-config", '{"context": 16}', "--pnet-config", '{"layers": 1, "width": 16, "heads": 2}']
    train = ["train", "--task", "text", "--data-dir", str(text), *small, "--genome-params", "1500", "--seed", "0"]
    assert main([*train, "--steps", "60", "--out", str(out)]) == 0
    genome = ["--genome", str(out / "genome.safetensors"), "--data-dir", str(text), "--task-config", '{"context": 16}']
    assert main(["export", *genome, "--out", str(out / "net.html")]) == 0
    expected = command(["sample", *genome, "--prompt", "the quick", "--tokens", "40", "--temperature", "0"]).out[:-1]
    opened(tab, out / "net.html")
    tab.fill("#prompt", "the quick")
    tab.fill("#temperature", "0")
    tab.click("#write")
    tab.locator("#text", has_text=expected).wait_for()
    tab.fill("#prompt", "THE")
    tab.click("#write")
    tab.locator("#text", has_text='The network does not know the characters "T", "H", "E".').wait_for()
    tab.fill("#prompt", "the quick")
    tab.click("#write")
    tab.set_input_files("#file", out / "genome.safetensors")
    tab.locator("[data-grown]").wait_for()
    # A sample, before anybody asks.
    tab.locator("#text", has_text=re.compile("the quick.{200}", re.DOTALL)).wait_for()
