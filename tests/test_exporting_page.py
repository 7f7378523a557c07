"""A page's JavaScript, run by node: the weights that `gb.generate` makes, and the outputs of the p-net in torch."""

import base64
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.exporting import page
from gbfunc.exporting.page import NETWORK, layers_in_a_row, script
from gbfunc.tasks.pnets import Interface, find_pnet
from gbfunc.types import Genome
from tests.support.step_cases import stored_with
from tests.support.strategies import linear_end

NODE = shutil.which("node")


def needs_node(test: Any) -> Any:
    return pytest.mark.process(pytest.mark.skipif(NODE is None, reason="node is not installed")(test))


DRIVER = """
const fs = require("fs");
const text = (data) => Buffer.from(Float32Array.from(data).buffer).toString("base64");
const tried = (job) => {
  const said = { weights: {}, outputs: [] };
  try {
    const genome = readGenome(new Uint8Array(Buffer.from(job.genome, "base64")));
    const net = generate(genome);
    for (const [name, { shape, data }] of Object.entries(net)) said.weights[name] = [shape, text(data)];
    said.parts = genome.parts;
    const run = job.inputs.length ? networkOf(genome.metadata, net, job.networks) : null;
    for (const { shape, data } of job.inputs) {
      said.outputs.push(text(run({ shape, data: Float64Array.from(data) }).data));
    }
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    said.refused = error.message;
  }
  return said;
};
console.log(JSON.stringify(JSON.parse(fs.readFileSync(0, "utf8")).map(tried)));
"""


def in_node(
    folder: Path, *files: bytes, inputs: Sequence[Tensor] = (), networks: Mapping[str, Any] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """What the page makes of genomes' files: `weights` by name, `outputs` of the inputs, or why it is `refused`."""
    assert NODE is not None
    program = folder / "page.js"
    program.write_text(f"{script(*NETWORK)}\n{DRIVER}", encoding="utf-8")
    examples = [{"shape": list(x.shape), "data": x.flatten().tolist()} for x in inputs]
    rest = {"inputs": examples, "networks": dict(networks)}
    jobs = json.dumps([{"genome": base64.b64encode(data).decode(), **rest} for data in files])
    done = subprocess.run([NODE, str(program)], input=jobs, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def numbers(text: str) -> Tensor:
        return torch.from_numpy(np.frombuffer(base64.b64decode(text), np.float32).copy())

    answers = json.loads(done.stdout)
    for said in answers:
        said["weights"] = {name: numbers(text).reshape(shape) for name, (shape, text) in said["weights"].items()}
        said["outputs"] = [numbers(text) for text in said["outputs"]]
    return answers


def one_in_node(path: Path, inputs: Sequence[Tensor] = (), **options: Any) -> dict[str, Any]:
    return in_node(path.parent, path.read_bytes(), inputs=inputs, **options)[0]


def grown(net: nn.Module, **options: Any) -> tuple[gb.Plan, Genome]:
    plan = gb.make_plan(net, **options)
    return plan, gb.init_genome(plan, net, seed=0)


def check_weights(said: dict[str, Any], path: Path) -> None:
    expected = gb.generate(*gb.load(path))
    assert "refused" not in said, said["refused"]
    for name, weight in expected.items():
        got = said["weights"][name]
        assert got.shape == weight.shape
        assert (got - weight).abs().max() <= 1e-5 * max(1.0, float(weight.abs().max())), name


TYPES = (
    gb.periodic(3), gb.periodic(2, share="layers"), gb.periodic(2, share="shapes"), gb.bilinear(2),
    gb.bilinear(2, share="layers"), gb.gnet((4,)), gb.gnet((4, 3), activation="gelu"), gb.gnet((4,), activation="tanh"),
    gb.gnet((3, 2, 4), activation="sin"), gb.stochastic((3, 2)), gb.low_rank(2, "layers"), gb.xox(2), gb.constant(0.1),
)  # fmt: skip
DTYPES = (None, "float16", "bfloat16", *(f"int{bits}" for bits in range(2, 9)), "auto")


def randomise(net: nn.Module) -> None:
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d):
            assert norm.running_mean is not None and norm.running_var is not None
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)


def every() -> nn.Module:
    parts = {"first": nn.Linear(12, 11), "second": nn.Linear(12, 11), "conv": nn.Conv2d(3, 6, 3)}
    parts |= {"up": nn.ConvTranspose2d(4, 3, 2), "attention": nn.MultiheadAttention(8, 2)}
    net = nn.ModuleDict({**parts, "embedding": nn.Embedding(9, 7), "norm": nn.BatchNorm2d(6)})
    randomise(net)
    return net


def check_files(folder: Path, *files: tuple[gb.Plan, Genome, str | None]) -> None:
    paths = [folder / f"{i}" for i in range(len(files))]
    for path, (plan, genome, dtype) in zip(paths, files, strict=True):
        gb.save(path, plan, genome, dtype=stored_with(plan, genome, dtype))
    for path, said in zip(paths, in_node(folder, *(path.read_bytes() for path in paths)), strict=True):
        check_weights(said, path)
        ends = [end for _, _, end in said["parts"]]
        assert [start for _, start, _ in said["parts"]] == [0, *ends[:-1]] and ends[-1] == path.stat().st_size


@needs_node
@pytest.mark.parametrize("dtype", [None, "int7", "auto"])
def test_weights_of_every_type(tmp_path: Path, dtype: str | None) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_tile": 5, "include": [r"embedding", r"first\.bias"]}
    files = [(*grown(every(), hypernet=hypernet, **options), dtype) for hypernet in TYPES]
    # Codes of one's own.
    own = torch.randn(9, 3), gb.per_axis(gb.table([[1, 2], [0, -3], [5, 5]]), gb.grid(2, 2), 4)
    net = grown(nn.Linear(12, 9), hypernet=gb.periodic(3), encodings={"weight": own}, max_tile=(5, 1))
    check_files(tmp_path, *files, (*net, dtype))


@needs_node
def test_weights_of_every_stored_dtype(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = grown(every(), hypernet=gb.periodic(70))
    # More codes than a piece, and than runs, may hold.
    many = [(*grown(nn.Linear(600, rows, bias=False), rules=[(".", None)]), "int3") for rows in (20, 500)]
    check_files(tmp_path, *((*net, dtype) for dtype in DTYPES), *many)


VARIANTS = [
    ("mlp", {"hidden": [20, 12]}),
    ("convnet", {"width": 6}),
    ("lenet5", {"width": 6}),
    ("allconv", {"width": 6}),
    ("resnet20", {"width": 4}),
    ("resnet56", {"width": 2}),
    ("gpt", {"layers": 2, "width": 16, "heads": 2}),
    ("gpt", {"layers": 1, "width": 12, "heads": 3, "hidden": 7, "bias": True}),
]


def check_outputs(said: dict[str, Any], net: nn.Module, inputs: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for x, got in zip(inputs, said["outputs"], strict=True):
            expected = net.eval()(x[None]).flatten()
            assert (got - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


@needs_node
@pytest.mark.parametrize(("name", "config"), VARIANTS)
def test_outputs_of_every_network(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pnet = find_pnet(name, Interface((12,), 30, tokens=True) if name == "gpt" else Interface((3, 20, 20), 10), config)
    net = pnet.build(0)
    randomise(net)
    plan, genome = grown(net, **pnet.plan(1_000)._asdict(), compression=3.0)
    path = tmp_path / "genome.safetensors"
    gb.save(path, plan, genome, dtype="int8", metadata={"pnet": name, "pnet_config": config})
    inputs = [torch.randint(30, (n,)) for n in (1, 12)] if name == "gpt" else [*torch.randn(3, 3, 20, 20)]
    said = one_in_node(path, inputs)
    check_weights(said, path)
    check_outputs(said, gb.materialize(*gb.load(path), net), inputs)


def own_nets() -> dict[str, nn.Sequential]:
    head = nn.Sequential(
        nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 8), nn.Sigmoid(), nn.Dropout(0.5), nn.Linear(8, 10)
    )
    return {
        "plain": nn.Sequential(nn.Flatten(), nn.Linear(1200, 9), nn.Tanh(), nn.Identity(), nn.Linear(9, 10, False)),
        "nested": nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 6, (3, 5), (2, 1), padding=(1, 0)), nn.BatchNorm2d(6, eps=1e-2), nn.ReLU()),
            nn.MaxPool2d(3, 2, 1),
            nn.Sequential(nn.Conv2d(6, 12, 3, padding="same", dilation=(1, 2), groups=3), nn.GELU(), nn.Dropout2d()),
            nn.AvgPool2d((2, 3), padding=(1, 1)),
            nn.Conv2d(12, 6, 2, padding="valid", bias=False),
            nn.GELU(approximate="tanh"),
            nn.AvgPool2d(1, (1, 2)),
            head,
        ),
        "twice": nn.Sequential(
            nn.Conv2d(3, 4, 3, 3), norm := nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), norm, nn.Flatten(),
            nn.LayerNorm(64, elementwise_affine=False), nn.Linear(64, 10),
        ),
        "means": nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8, affine=False), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.BatchNorm1d(8), nn.Linear(8, 10),
        ),
    }  # fmt: skip


@needs_node
@pytest.mark.parametrize("name", ["plain", "nested", "twice", "means"])
def test_outputs_of_networks_of_ones_own(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    net = own_nets()[name].eval()
    randomise(net)
    path = tmp_path / "genome"
    gb.save(path, *grown(net, hypernet=gb.periodic(3)), dtype="int8", metadata={"pnet": "my_work:net"})
    inputs = [*torch.randn(3, 3, 20, 20)]
    said = one_in_node(path, inputs, networks={"my_work:net": page.network(layers_in_a_row(net), {})})
    check_weights(said, path)
    check_outputs(said, gb.materialize(*gb.load(path), net), inputs)


@needs_node
def test_a_description_of_another_network_is_refused(tmp_path: Path) -> None:
    net, path = nn.Sequential(nn.Linear(6, 5), nn.ReLU()), tmp_path / "genome"
    said = {"pnet": "mine", "pnet_config": {"act": "ReLU", "sizes": [1.0, {"b": 2, "a": None}]}}

    def tried(layers: list[Any], config: Any = said["pnet_config"]) -> str | None:
        gb.save(path, *grown(net, hypernet=gb.periodic(2)), metadata=said | {"pnet_config": config})
        return one_in_node(path, [torch.zeros(1, 6)], networks={"mine": page.network(layers, said)}).get("refused")

    assert tried(layers_in_a_row(net)) is None
    assert 'the network "mine" with other options' in str(tried(layers_in_a_row(net), {"act": "Tanh"}))
    words = "this genome's network has no layer \"2\", which the page's has"
    assert tried([["linear", "0"], ["relu"], ["linear", "2"]]) == words
    assert 'not in the browser yet: layers "cubed"; load' in str(tried([["linear", "0"], ["cubed"]]))


def test_what_no_page_grows_is_refused_before_it_is_written() -> None:
    for net, words in (
        (nn.Linear(4, 3).bfloat16(), "weights of bfloat16"),
        (nn.Linear(9_000, 8_000, device="meta"), "a browser grows up to 64,000,000 weights"),
    ):
        with pytest.raises(ValueError, match=words):
            page.check(gb.make_plan(net, gb.periodic(1)))


class Doubled(nn.Sequential):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def hooked() -> nn.Module:
    net = nn.Sequential(nn.Linear(3, 3))
    net[0].register_forward_hook(lambda module, args, output: None)
    return net


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Linear(3, 3), "a p-net of type Linear"),
        (Doubled(nn.Linear(3, 3)), "a p-net of type Doubled"),
        (nn.Sequential(nn.Sequential(nn.Softplus())), "'0.0', Softplus"),
        (hooked(), "with a hook"),
        (nn.Sequential(nn.Conv2d(1, 1, 2, padding="same")), "'0', Conv2d"),
        (nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular")), "only usual options of layers"),
        (nn.Sequential(nn.MaxPool2d(2, ceil_mode=True)), "ceil_mode=True"),
        (nn.Sequential(nn.AvgPool2d(2, padding=1, count_include_pad=False)), "'0', AvgPool2d"),
        (nn.Sequential(nn.AdaptiveAvgPool2d(2)), "'0', AdaptiveAvgPool2d"),
        (nn.Sequential(nn.Flatten(2)), "'0', Flatten"),
        (nn.Sequential(nn.LayerNorm([2, 3])), "'0', LayerNorm"),
        (nn.Sequential(nn.BatchNorm2d(2, track_running_stats=False)), "'0', BatchNorm2d"),
    ],
)
def test_other_networks_are_refused_by_the_name_of_what_has_no_description(net: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers_in_a_row(net)


@needs_node
def test_python_knows_what_the_page_knows() -> None:
    source = f"{script(*NETWORK)}; console.log(JSON.stringify([TYPES, NETWORKS].map(Object.keys)))"
    done = subprocess.run([str(NODE), "-e", source], capture_output=True, text=True, check=True)
    assert [sorted(names) for names in json.loads(done.stdout)] == [sorted(page.TYPES), sorted(page.PNETS)]


@needs_node
def test_what_the_page_does_not_know_is_named(tmp_path: Path) -> None:
    path, net = tmp_path / "genome.safetensors", nn.Linear(6, 5)
    for options, message in (
        ({"hypernet": gb.from_module(linear_end)}, 'not in the browser yet: g-nets of type "module"'),
        (
            {"hypernet": gb.low_rank(1), "base": "own"},
            "not in the browser yet: a genome that changes a pretrained network",
        ),
    ):
        plan, genome = grown(net, **options)
        gb.save(path, plan, genome)
        assert one_in_node(path)["refused"] == f"{message}; load the genome in Python (gb.load)"
        with pytest.raises(ValueError, match=f"{message.split(chr(34))[0]}.*; export to .onnx"):
            page.check(plan)
    gb.save(path, *grown(nn.Linear(6, 5).half(), hypernet=gb.periodic(2)))
    assert one_in_node(path)["refused"].startswith("not in the browser yet: weights of float16;")
    for metadata, message in (({"pnet": "a:b"}, 'does not know the network "a:b"'), ({}, "does not say which network")):
        gb.save(path, *grown(net, hypernet=gb.periodic(2)), metadata=metadata)
        assert message in one_in_node(path, [torch.zeros(1, 6)])["refused"]


@needs_node
@pytest.mark.parametrize("dtype", [None, "int5", "auto"])
def test_damaged_files_are_refused(tmp_path: Path, dtype: str | None) -> None:
    plan, genome = grown(nn.Linear(20, 30), hypernet=gb.periodic(4))
    gb.save(tmp_path / "whole", plan, genome, dtype=stored_with(plan, genome, dtype))
    data = (tmp_path / "whole").read_bytes()
    flips = [data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :] for i in range(0, len(data), 41)]
    damaged = [*flips, data[:-1], data[:50], data[:9], b"", b"\x89PNG" * 30]
    for said in in_node(tmp_path, *damaged):
        if "refused" not in said:  # a space in the header, perhaps
            check_weights(said, tmp_path / "whole")
        else:
            assert "\n" not in said["refused"]
