"""A page's JavaScript, run by node: the weights that `gb.generate` makes, and the outputs of the p-net in torch."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.export import page
from gbfunc.export.page import NETWORK, script
from gbfunc.tasks.pnets import Interface, find_pnet
from gbfunc.types import Genome
from tests.support.former_files import FORMER
from tests.support.strategies import linear_end

NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")

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
    const run = job.inputs.length ? networkOf(genome.metadata, net) : null;
    for (const { shape, data } of job.inputs) {
      said.outputs.push(text(run(shape ? { shape, data: Float64Array.from(data) } : data).data));
    }
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    said.refused = error.message;
  }
  return said;
};
console.log(JSON.stringify(JSON.parse(fs.readFileSync(0, "utf8")).map(tried)));
"""


def in_node(folder: Path, *files: bytes, inputs: Sequence[Tensor] = ()) -> list[dict[str, Any]]:
    """What the page makes of genomes' files: `weights` by name, `outputs` of the inputs, or why it is `refused`."""
    assert NODE is not None
    program = folder / "page.js"
    program.write_text(f"{script(*NETWORK)}\n{DRIVER}", encoding="utf-8")
    examples = [
        {"data": x.tolist()} if x.ndim == 1 else {"shape": list(x.shape), "data": x.flatten().tolist()} for x in inputs
    ]
    jobs = json.dumps([{"genome": base64.b64encode(data).decode(), "inputs": examples} for data in files])
    done = subprocess.run([NODE, str(program)], input=jobs, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    def numbers(text: str) -> Tensor:
        return torch.from_numpy(np.frombuffer(base64.b64decode(text), np.float32).copy())

    answers = json.loads(done.stdout)
    for said in answers:
        said["weights"] = {name: numbers(text).reshape(shape) for name, (shape, text) in said["weights"].items()}
        said["outputs"] = [numbers(text) for text in said["outputs"]]
    return answers


def one_in_node(path: Path, inputs: Sequence[Tensor] = ()) -> dict[str, Any]:
    return in_node(path.parent, path.read_bytes(), inputs=inputs)[0]


def grown(net: nn.Module, **options: Any) -> tuple[gb.Plan, Genome]:
    plan = gb.make_plan(net, **options)
    return plan, gb.init_genome(plan, net, seed=0)


def check_weights(said: dict[str, Any], path: Path) -> None:
    """Within 1e-5 of the largest weight."""
    expected = gb.generate(*gb.load(path))
    assert "refused" not in said, said["refused"]
    for name, weight in expected.items():
        got = said["weights"][name]
        assert got.shape == weight.shape
        assert (got - weight).abs().max() <= 1e-5 * max(1.0, float(weight.abs().max())), name


TYPES = {
    "periodic": gb.periodic(3),
    "periodic_layers": gb.periodic(2, share="layers"),
    "periodic_shapes": gb.periodic(2, share="shapes"),
    "bilinear": gb.bilinear(2),
    "bilinear_layers": gb.bilinear(2, share="layers"),
    "gnet": gb.gnet((4,)),
    "gelu": gb.gnet((4, 3), activation="gelu"),
    "tanh": gb.gnet((4,), activation="tanh"),
    "sin": gb.gnet((3, 2, 4), activation="sin"),
    "stochastic": gb.stochastic((3, 2)),
    "low_rank": gb.low_rank(2),
    "xox": gb.xox(2),
    "constant": gb.constant(0.1),
}
DTYPES = (None, "float16", "bfloat16", *(f"int{bits}" for bits in range(2, 9)))


def randomise(norm: nn.BatchNorm2d) -> None:
    """Statistics as after some training."""
    assert norm.running_mean is not None and norm.running_var is not None
    nn.init.normal_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)


class Every(nn.Module):
    """Layers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 11), nn.Linear(12, 11)
        self.conv = nn.Conv2d(3, 6, 3)
        self.up = nn.ConvTranspose2d(4, 3, 2, groups=1)
        self.attention = nn.MultiheadAttention(8, 2)
        self.embedding = nn.Embedding(9, 7)
        self.norm = nn.BatchNorm2d(6)
        randomise(self.norm)


@needs_node
@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("dtype", [None, "int7"])
def test_weights_of_every_type(tmp_path: Path, name: str, dtype: str | None) -> None:
    torch.manual_seed(0)
    plan, genome = grown(Every(), hypernet=TYPES[name], max_tile=5, include=[r"embedding", r"first\.bias"])
    path = tmp_path / "genome.safetensors"
    gb.save(path, plan, genome, dtype=dtype)
    check_weights(one_in_node(path), path)


@needs_node
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_of_every_stored_dtype(tmp_path: Path, dtype: str | None) -> None:
    torch.manual_seed(0)
    plan, genome = grown(Every(), hypernet=gb.periodic(70))
    path = tmp_path / "genome.safetensors"
    gb.save(path, plan, genome, dtype=dtype)
    said = one_in_node(path)
    check_weights(said, path)
    ends = [end for _, _, end in said["parts"]]
    assert [start for _, start, _ in said["parts"]] == [0, *ends[:-1]] and ends[-1] == path.stat().st_size


IMAGE, TEXT = Interface((3, 20, 20), 10), Interface((12,), 30, tokens=True)
PNETS = {
    "mlp": (IMAGE, {"hidden": [20, 12]}),
    "lenet5": (IMAGE, {"width": 6}),
    "allconv": (IMAGE, {"width": 6}),
    "resnet20": (IMAGE, {"width": 4}),
    "resnet56": (IMAGE, {"width": 2}),
    "gpt": (TEXT, {"layers": 2, "width": 16, "heads": 2}),
}
VARIANTS = [
    *PNETS.items(),
    ("allconv", (IMAGE, {"width": 5, "norm": False, "dropout": 0.5})),
    ("gpt", (TEXT, {"layers": 1, "width": 12, "heads": 3, "hidden": 7, "bias": True})),
]


@needs_node
@pytest.mark.parametrize(("name", "made"), VARIANTS)
def test_outputs_of_every_network(tmp_path: Path, name: str, made: tuple[Interface, dict[str, Any]]) -> None:
    interface, config = made
    pnet = find_pnet(name, interface, config)
    net = pnet.build(0)
    for norm in (m for m in net.modules() if isinstance(m, nn.BatchNorm2d)):
        randomise(norm)
    plan, genome = grown(net, **pnet.plan(1_000)._asdict(), compression=3.0)
    path = tmp_path / "genome.safetensors"
    gb.save(path, plan, genome, dtype="int8", metadata={"pnet": name, "pnet_config": config})
    generator = torch.Generator().manual_seed(0)
    if interface.tokens:
        inputs = [torch.randint(30, (length,), generator=generator) for length in (1, 12)]
    else:
        inputs = list(torch.randn(3, *interface.inputs, generator=generator))
    said = one_in_node(path, inputs)
    check_weights(said, path)
    grown_net = gb.materialize(*gb.load(path), net).eval()
    with torch.no_grad():
        for x, got in zip(inputs, said["outputs"], strict=True):
            expected = grown_net(x[None]).flatten()
            assert (got - expected).abs().max() <= 1e-4 * max(1.0, float(expected.abs().max()))


def tables() -> dict[str, list[str]]:
    """The types and networks that the page's own tables hold."""
    assert NODE is not None
    source = f"{script(*NETWORK)}; console.log(JSON.stringify([TYPES, NETWORKS].map(Object.keys)))"
    done = subprocess.run([NODE, "-e", source], capture_output=True, text=True, check=True)
    return dict(zip(("types", "networks"), json.loads(done.stdout), strict=True))


@needs_node
def test_python_knows_what_the_page_knows() -> None:
    assert {key: sorted(names) for key, names in tables().items()} == {
        "types": sorted(page.TYPES),
        "networks": sorted(page.PNETS),
    }


@needs_node
def test_what_the_page_does_not_know_is_named(tmp_path: Path) -> None:
    path = tmp_path / "genome.safetensors"
    net = nn.Linear(6, 5)
    for options, message in (
        ({"hypernet": gb.from_module(linear_end)}, 'not in the browser yet: g-nets of type "module"'),
        (
            {"hypernet": gb.low_rank(1), "base": "own"},
            "not in the browser yet: a genome that changes a pretrained network",
        ),
    ):
        plan, genome = grown(net, **options)
        gb.save(path, plan, genome)
        assert one_in_node(path)["refused"] == message
        with pytest.raises(ValueError, match=message.split('"')[0]):
            page.check(plan)
    plan, genome = grown(net.half(), hypernet=gb.periodic(2))
    gb.save(path, plan, genome)
    assert one_in_node(path)["refused"] == "not in the browser yet: weights of float16"
    plan, genome = grown(net.float(), hypernet=gb.periodic(2))
    gb.save(path, plan, genome, metadata={"pnet": "mine:net"})
    assert one_in_node(path, [torch.zeros(1, 6)])["refused"] == 'not in the browser yet: running the network "mine:net"'
    gb.save(path, plan, genome)
    assert "does not say which network" in one_in_node(path, [torch.zeros(1, 6)])["refused"]


@needs_node
@pytest.mark.parametrize("dtype", [None, "int5"])
def test_damaged_files_are_refused(tmp_path: Path, dtype: str | None) -> None:
    plan, genome = grown(nn.Linear(20, 30), hypernet=gb.periodic(4))
    gb.save(tmp_path / "whole", plan, genome, dtype=dtype)
    data = (tmp_path / "whole").read_bytes()
    flips = [data[:i] + bytes([data[i] ^ 4]) + data[i + 1 :] for i in range(0, len(data), 41)]
    damaged = [*flips, data[:-1], data[:50], data[:9], b"", b"\x89PNG" * 30]
    for said in in_node(tmp_path, *damaged):
        if "refused" not in said:  # a space in the header, perhaps
            check_weights(said, tmp_path / "whole")
        else:
            assert "\n" not in said["refused"]


@needs_node
@pytest.mark.parametrize("dtype", [None, "int7"])
def test_codes_of_ones_own(tmp_path: Path, dtype: str | None) -> None:
    net, path = nn.Linear(12, 9), tmp_path / "genome.safetensors"
    own = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    encodings = {"weight": (own, gb.per_axis(gb.table([[1, 2], [0, -3], [5, 5]]), gb.grid(2, 2), 4))}
    plan, genome = grown(net, hypernet=gb.periodic(3), encodings=encodings, max_tile=(5, 1))
    gb.save(path, plan, genome, dtype=dtype)
    check_weights(one_in_node(path), path)


@needs_node
@pytest.mark.parametrize("name", [name for name in FORMER if "tied" not in name])
def test_files_of_former_versions(tmp_path: Path, name: str) -> None:
    path = tmp_path / "former"
    path.write_bytes(base64.b85decode(FORMER[name][2]))
    check_weights(one_in_node(path), path)


@needs_node
def test_more_codes_than_a_piece_and_than_runs_may_hold(tmp_path: Path) -> None:
    for rows in (20, 500):
        net = nn.Linear(600, rows, bias=False)
        plan, genome = grown(net, rules=[(".", None)])
        path = tmp_path / f"{rows}"
        gb.save(path, plan, genome, dtype="int3")
        check_weights(one_in_node(path), path)
