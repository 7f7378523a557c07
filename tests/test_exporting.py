"""Exported files: they hold the genome, run without gbfunc, and give what the p-net gives in torch."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.cli.genomes import read_genome
from gbfunc.cli.options import DataOptions
from gbfunc.exporting import FORMATS, Exported, base
from gbfunc.tasks import accuracy
from gbfunc.tasks.pnets.gpt import GPT
from gbfunc.types import Genome
from tests.support.hugging_face import tiny
from tests.support.strategies import bounded_end, linear_end
from tests.support.versions import needs_whole_graphs

onnx, ort = (pytest.importorskip(name) for name in ("onnx", "onnxruntime"))
pytestmark = needs_whole_graphs

TYPES = (
    gb.periodic(3), gb.periodic(2, share="layers"), gb.periodic(2, share="shapes"), gb.bilinear(2), gb.gnet((4,)),
    gb.gnet((4, 3), activation="gelu"), gb.gnet((4,), activation="tanh"), gb.gnet((3,), activation="sin"),
    gb.stochastic((3,)), gb.low_rank(2), gb.xox(2), gb.constant(0.1), gb.from_module(linear_end),
    gb.from_module(bounded_end),
)  # fmt: skip


class Every(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 11, bias=False) for _ in range(len(TYPES) + 3))
        for weight in self.layers[len(TYPES) :].parameters():
            weight.data.mul_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers], 1)


def convnet() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 2, stride=2), nn.Flatten(), nn.Linear(384, 5),
    )  # fmt: skip
    nn.init.normal_(net.get_buffer("1.running_mean"))
    nn.init.uniform_(net.get_buffer("1.running_var"), 0.5, 2.0)
    return net


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 12)
        self.memory = nn.GRU(12, 12, batch_first=True)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(12, 12))
        self.out = nn.Linear(12, 40, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.normed(self.memory(self.table(tokens))[0])
        return self.out(hidden), hidden.mean(1) * scale


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)


def grown(pnet: nn.Module, hypernet: Any = None, **options: Any) -> tuple[gb.Plan, Genome, nn.Module]:
    plan = gb.make_plan(pnet, hypernet or gb.periodic(2), **options)
    return plan, gb.init_genome(plan, pnet, 1), pnet


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def ort_run(path: Path, *inputs: Tensor) -> list[Tensor]:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    return [torch.from_numpy(y) for y in session.run(None, {k: x.numpy() for k, x in zip(names, inputs, strict=True)})]


def test_onnx_holds_the_genome_and_no_tables(tmp_path: Path) -> None:
    """636,010 weights, 2.5 MB, of at most 612 parameters."""
    pnet = nn.Sequential(nn.Flatten(), nn.Linear(784, 800), nn.ReLU(), nn.Linear(800, 10))
    codes = {"1.weight": (gb.binary(), gb.grid(28, 28))}
    plan, genome, _ = grown(pnet, gb.periodic(), genome_params=612, encodings=codes)
    path = tmp_path / "net.onnx"
    made = gb.export(path, plan, genome, pnet, torch.randn(2, 1, 28, 28))
    assert made.bytes == path.stat().st_size <= 12_000
    assert made.max_error is not None and made.max_error <= 1e-5
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {node.domain for node in model.graph.node} == {""} and not model.functions
    assert sum(len(x.raw_data) for x in model.graph.initializer) <= 4 * plan.genome_params + 700
    x = torch.randn(5, 1, 28, 28)
    with torch.no_grad():
        torch.testing.assert_close(ort_run(path, x)[0], gb.materialize(plan, genome, pnet)(x), rtol=0, atol=1e-5)
    assert [(v.name, v.type.tensor_type.shape.dim[0].dim_param) for v in model.graph.input] == [("input", "batch")]
    assert [v.name for v in model.graph.output] == ["output"]


def exact(made: Exported, bound: float = 2e-6) -> bool:
    return made.max_error is not None and made.max_error <= bound


def test_every_type_of_gnet(tmp_path: Path) -> None:
    rules = [(rf"layers\.({i}|{i + len(TYPES)})\.", hypernet) for i, hypernet in enumerate(TYPES)]
    net = grown(Every(), rules=rules, max_tile=5)
    assert exact(gb.export(tmp_path / "net.onnx", *net, torch.randn(2, 12)))


def test_convolutions_buffers_and_a_loop_whose_result_is_a_value_from_outside(tmp_path: Path) -> None:
    codes = {"0.weight": (gb.gray(), gb.per_axis(gb.one_hot(), gb.grid(3, 3), 9)), "5.weight": (None, gb.grid(6, 8, 8))}
    net = grown(convnet(), max_tile=(5, 2), encodings=codes, include=["bias"])
    assert exact(gb.export(tmp_path / "net.onnx", *net, torch.randn(2, 3, 4, 4)))
    net = grown(nn.Sequential(nn.EmbeddingBag(10, 4), nn.Linear(4, 3)))
    assert exact(gb.export(tmp_path / "bag.onnx", *net, torch.randint(10, (2, 4))), 1e-5)


def test_buffers_that_a_forward_changes_begin_with_those_of_the_genome(tmp_path: Path) -> None:
    class Multiplied(nn.Linear):
        calls: Tensor

        def forward(self, input: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(input) * self.calls

    pnet, path, x = Multiplied(6, 3), tmp_path / "net.pt2", torch.ones(2, 6)
    pnet.register_buffer("calls", torch.zeros(()))
    plan = gb.make_plan(pnet, gb.periodic(1))
    genome = gb.init_genome(plan, pnet)
    gb.export(path, plan, genome, pnet, x, "dense")
    net, program = gb.materialize(plan, genome, pnet), torch.export.load(path).module()
    for _ in range(2):
        torch.testing.assert_close(program(x), net(x))


def test_ties_several_inputs_and_outputs(tmp_path: Path) -> None:
    plan, genome, pnet = grown(Tagger(), max_tile=10, include=["table"])
    path = tmp_path / "net.pt2"
    assert exact(gb.export(path, plan, genome, pnet, (torch.randint(40, (2, 7)), torch.rand(2, 1))))
    inputs = torch.randint(40, (5, 7)), torch.rand(5, 1)
    found = torch.export.load(path).module()(*inputs)
    net = gb.materialize(plan, genome, pnet).eval()
    torch.testing.assert_close(found, net(*inputs))
    made = gb.export(tmp_path / "net.safetensors", plan, genome, pnet)
    assert made.max_error is None and made.bytes >= plan.dense_bytes
    fresh = Tagger()
    fresh.load_state_dict(load_file(tmp_path / "net.safetensors"))
    torch.testing.assert_close(fresh.state_dict(), net.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    net, x = grown(mlp(dtype)), torch.randn(2, 12, dtype=dtype)
    assert exact(gb.export(tmp_path / "net.pt2", *net, x), 1e-15)
    if dtype == torch.bfloat16:
        with pytest.raises(ValueError, match="runtime cannot run the file .*: check=False") as told:
            gb.export(tmp_path / "net.onnx", *net, x)
        assert "\n" not in str(told.value) and not (tmp_path / "net.onnx").exists()


@pytest.mark.process
def test_a_hugging_face_model_called_by_names(tmp_path: Path) -> None:
    gpt2 = tiny("GPT2LMHeadModel", n_layer=1, vocab_size=40)
    plan, genome, pnet = grown(gpt2, gb.periodic(2, share="layers"), include=["wte"])
    path, tokens, mask = tmp_path / "gpt2.onnx", torch.randint(40, (3, 11)), torch.ones(3, 11, dtype=torch.int64)
    mask[1, 4:] = 0
    # In another order than the network has them.
    example = {"attention_mask": mask[:2, :6], "input_ids": tokens[:2, :6]}
    gb.export(path, plan, genome, pnet, example)
    assert vars(pnet)["config"].use_cache
    graph = onnx.load(path).graph
    assert [v.name for v in (*graph.input, *graph.output)] == ["input_ids", "attention_mask", "logits"]
    with torch.no_grad():
        expected = gb.materialize(plan, genome, pnet).eval()(tokens, attention_mask=mask).logits
    torch.testing.assert_close(ort_run(path, tokens, mask)[0], expected, rtol=0, atol=1e-5)


@pytest.mark.process
@pytest.mark.parametrize("kind", ["onnx", "pt2"])
def test_texts_of_other_lengths(kind: str, tmp_path: Path) -> None:
    path, tokens = tmp_path / f"net.{kind}", torch.randint(40, (3, 8))
    plan, genome, pnet = grown(GPT(vocabulary=40, context=8, layers=1, width=16, heads=2, hidden=24))
    net = gb.materialize(plan, genome, pnet).eval()

    def run(x: Tensor) -> Tensor:
        return ort_run(path, x)[0] if kind == "onnx" else torch.export.load(path).module()(x)

    gb.export(path, plan, genome, pnet, tokens)
    for x in (tokens, tokens[:1], tokens[:, :3]):
        torch.testing.assert_close(run(x), net(x), rtol=0, atol=1e-5)
    plan, genome, pnet = grown(nn.Sequential(nn.Embedding(40, 6), nn.Linear(6, 3)))
    gb.export(path, plan, genome, pnet, tokens, dynamic_shapes="batch")
    torch.testing.assert_close(run(tokens[:1]), gb.materialize(plan, genome, pnet)(tokens[:1]), rtol=0, atol=1e-5)
    with pytest.raises(Exception, match="(?i)expected|guard"):
        run(tokens[:, :3])


def test_dense_weights_and_those_of_a_base(tmp_path: Path) -> None:
    x = torch.randn(2, 12)
    assert gb.export(tmp_path / "net.pt2", *grown(mlp()), x, "dense").max_error == 0.0
    net = grown(mlp(), base="own")
    with pytest.raises(ValueError, match="weights='dense'"):
        gb.export(tmp_path / "net.pt2", *net, x, "genome")
    assert gb.export(tmp_path / "net.pt2", *net, x).max_error == 0.0


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("net.tflite", {}, "got the suffix '.tflite'"),
        ("net.html", {}, r"iree \(.vmfb\), .* got the suffix '.html'; gbfunc export also writes pages \(.html\)"),
        ("net.onnx", {"to": "onxx"}, "got to='onxx'"),
        ("net.pt2", {"weights": "Genome"}, "weights must be 'genome' or 'dense', got 'Genome'"),
        ("net.safetensors", {"weights": "genome"}, "gb.save for the genome"),
        ("net.pt2", {"example": None}, "example must be a tensor"),
        ("net.pt2", {"example": torch.zeros(2, 5)}, r"cannot read the example, of shapes \[\[2, 5\]\]: mat1 .*\)$"),
    ],
)
def test_errors_say_what_was_expected(name: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, RuntimeError), match=words):
        gb.export(tmp_path / name, *grown(mlp()), **{"example": torch.randn(2, 12), **options})
    assert not list(tmp_path.iterdir())


class OneSize(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum() * torch.ones(x.shape[0]) if x.shape[0] < 3 else super().forward(x)


def test_a_batch_that_cannot_be_dynamic(tmp_path: Path) -> None:
    net = grown(nn.Sequential(OneSize(12, 4)))
    with pytest.raises(ValueError, match="torch.export cannot trace the p-net: .*dynamic_shapes=None"):
        gb.export(tmp_path / "net.pt2", *net, torch.randn(2, 12))
    assert exact(gb.export(tmp_path / "net.pt2", *net, torch.randn(2, 12), dynamic_shapes=None))


def test_a_file_with_other_outputs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, x = tmp_path / "net.pt2", torch.randn(2, 12)
    path.write_bytes(b"before")
    kind = FORMATS["pt2"]

    def wrong(data: bytes, folder: Path) -> Any:
        run = kind.read(data, folder)
        return lambda inputs: [y + 0.01 for y in run(inputs)]

    monkeypatch.setattr(base, "FORMATS", {**FORMATS, "pt2": kind._replace(read=wrong)})
    with pytest.raises(ValueError, match="differ from the p-net's by up to 0.01"):
        gb.export(path, *grown(mlp()), x)
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("net.pt2", b"before")]
    assert gb.export(path, *grown(mlp()), x, check=False).max_error is None


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = grown(mlp()), torch.randn(2, 12)
    for package, name, extra in (("onnx_ir", "net.onnx", "onnx"), ("iree.compiler.tools", "net.vmfb", "iree")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ImportError, match=rf"pip install 'gbfunc\[{extra}\]'"):
                gb.export(tmp_path / name, *net, x)
    # Without its runtime a file is written, but not tried.
    kind = FORMATS["onnx"]._replace(write=lambda traced: b"model")
    monkeypatch.setattr(base, "FORMATS", {**FORMATS, "onnx": kind})
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert gb.export(tmp_path / "net.onnx", *net, x) == (5, None)


def test_the_same_genome_gives_the_same_bytes_without_tables(tmp_path: Path) -> None:
    plan, genome, pnet = grown(mlp(), max_tile=4)
    for name in ("a.pt2", "b.pt2"):
        gb.export(tmp_path / name, plan, genome, pnet, torch.randn(2, 12))
    assert (tmp_path / "a.pt2").read_bytes() == (tmp_path / "b.pt2").read_bytes()
    program = torch.export.load(tmp_path / "a.pt2")
    assert program.example_inputs is None
    assert all(x.numel() <= 8 for x in program.constants.values() if isinstance(x, Tensor))


@pytest.mark.process
def test_iree_runs_it(tmp_path: Path) -> None:
    pytest.importorskip("iree.compiler")
    pytest.importorskip("iree.runtime")
    net = grown(nn.Sequential(nn.Linear(12, 5), nn.ReLU()), include=["bias"])
    assert exact(gb.export(tmp_path / "net.vmfb", *net, torch.randn(2, 12)), 1e-5)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_aot_inductor_runs_it(tmp_path: Path) -> None:
    net = grown(mlp(), include=["bias"])
    assert exact(gb.export(tmp_path / "net.pt2", *net, torch.randn(2, 12), to="aoti"), 1e-5)


@pytest.mark.process
def test_digits_from_the_command_line(tmp_path: Path, command: Any) -> None:
    small = ["--sizes", "64", "48", "10", "--genome-params", "300", "--epochs", "1", "--batch-size", "400"]
    genome, out = tmp_path / "run" / "genome.safetensors", tmp_path / "shipped" / "digits.pt2"
    assert main(["train", *small, "--out", str(tmp_path / "run")]) == 0
    told = command(["export", "--genome", genome, "--out", out]).out
    assert f"{out}: {out.stat().st_size:,} bytes" in told
    _, task, net = read_genome(genome, DataOptions())
    assert accuracy(torch.export.load(out).module(), task.test) == accuracy(net, task.test)
    told = command(["export", "--genome", genome, "--out", tmp_path / "digits.tflite"], 2).err
    assert "the suffix '.tflite'" in told
