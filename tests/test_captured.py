"""Captured steps: on a CPU a stand-in for the graph replays the step's function; with a GPU, real graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.train import captured
from gbfunc.train import options as step_options
from gbfunc.train.gradients import loss as losses
from gbfunc.train.step import TrainStep
from gbfunc.trees import tree_leaves, tree_map
from tests.support.zoo import DEVICE

CUDA = DEVICE.type == "cuda"


class Replayed:
    """As `CudaGraph`: a capture changes no memory, and a replay writes to the memory of the capture."""

    def __init__(self, like: Tensor) -> None:
        self._capturing = False
        self._watch = pytest.MonkeyPatch()

    def capture(self, function: Callable[[], Any]) -> Any:
        self._function = function
        graphs = next(
            cell.cell_contents for cell in function.__closure__ or () if isinstance(cell.cell_contents, captured.Graphs)
        )
        self._rates, before = graphs._rates, {k: x.clone() for k, x in captured._device_tensors(graphs._state).items()}
        with torch.random.fork_rng(devices=[]), self._watch.context() as patch:
            patch.setattr(losses, "capturing", lambda device: True)
            self._out = function()
        for k, x in captured._device_tensors(graphs._state).items():
            x.copy_(before[k])
        return self._out

    def replay(self) -> None:
        self._rates.captured = True
        with self._watch.context() as patch:
            patch.setattr(losses, "capturing", lambda device: True)
            new = self._function()
        self._rates.captured = False
        for (_, x), (_, y) in zip(tree_leaves(self._out), tree_leaves(new), strict=True):
            if isinstance(x, Tensor):
                x.copy_(y)


@pytest.fixture(autouse=True)
def graph(monkeypatch: pytest.MonkeyPatch) -> None:
    if not CUDA:
        monkeypatch.setattr(captured, "CudaGraph", Replayed)
        monkeypatch.setattr(step_options, "is_available", lambda: True)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Dropout(0.3), nn.Linear(30, 5)).to(DEVICE)


def loss_fn(net: Any, batch: Any) -> Any:
    logits = net(batch["x"])
    return F.cross_entropy(logits, batch["y"]), {"right": (logits.argmax(-1) == batch["y"]).sum()}


def batch_of(n: int, i: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(i)
    x, y = torch.randn(n, 12, generator=generator), torch.randint(0, 5, (n,), generator=generator)
    return {"x": x.to(DEVICE), "y": y.to(DEVICE)}


def adam(steps: int = 60) -> Any:
    lr = gb.torch_schedule(torch.optim.lr_scheduler.OneCycleLR, lr=4e-2, steps=steps)
    return gb.torch_optimizer(torch.optim.Adam, lr=lr, direct={"lr": lambda step: 1e-3 / (step + 1)})


def make(pnet: nn.Module, loss: Any = loss_fn, optimizer: Any = None, **options: Any) -> Any:
    plan = gb.make_plan(pnet, gb.periodic(features=4))
    return gb.make_train_step(plan, pnet, loss, optimizer or adam(), **{"donate": True, **options})


def trained(step: Any, rows: int, n: int = captured.EAGER_STEPS + 1) -> tuple[Any, Any]:
    state, info = step.init(0), None
    for _ in range(n):
        state, info = step(state, batch_of(rows, 0))
    return state, info


@pytest.mark.parametrize(
    "options", [{}, {"microbatches": 2, "clip_norm": 0.1}, {"lazy": False, "remat": "generate"}], ids=str
)
def test_a_captured_training_equals_an_eager_one(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pnet = net()
    eager, graphs = make(pnet, **options), make(pnet, cuda_graph=True, **options)
    a, b = eager.init(0), graphs.init(0)
    for i in range(24):
        # Two shapes of batch, in turns.
        batch = batch_of(16 if i % 3 else 8, i)
        a, info = eager(a, batch)
        b, found = graphs(b, batch)
        torch.testing.assert_close(found.loss, info.loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.grad_norm, info.grad_norm, rtol=1e-5, atol=1e-6)
        assert int(found.aux["right"]) == int(info.aux["right"])
        assert int(b.step) == int(b.opt.step) == i + 1
    assert len(graphs._graphs._graphs) == 2
    for name, x in captured._device_tensors(a).items():
        torch.testing.assert_close(captured._device_tensors(b)[name], x, rtol=1e-3, atol=1e-4)


def test_another_state_is_copied_in_and_earlier_infos_stay() -> None:
    step, batch = make(net(), cuda_graph=True), batch_of(8, 0)
    state, info = trained(step, 8, captured.EAGER_STEPS + 2)
    kept, value = tree_map(torch.clone, state), info.loss.clone()
    _, first = step(state, batch)
    assert info.loss.equal(value)
    # As after a resumed checkpoint.
    assert step(kept, batch)[1].loss.equal(first.loss)


def test_a_population_is_captured() -> None:
    pnet = net()
    eager, graphs = (gb.population(make(pnet, **o), 3, lr_factors=[0.3, 1.0, 2.0]) for o in ({}, {"cuda_graph": True}))
    a, b = eager.init(), graphs.init()
    for i in range(9):
        a, info = eager(a, batch_of(8, i))
        b, found = graphs(b, batch_of(8, i))
        torch.testing.assert_close(found.loss, info.loss, rtol=1e-5, atol=1e-6)


def test_a_fifth_shape_of_batch_is_refused_with_the_others_named() -> None:
    step = make(net(), cuda_graph=True)
    words = r"4 shapes of batch, got another: .*\(24, 12\).* after .*\(4, 12\).*drop_last"
    with pytest.raises(ValueError, match=words):
        for n in (4, 8, 12, 16, 24):
            trained(step, n)


AUTO = {"rounding": "auto", "genome_bytes": 900, "total_steps": 9}
NEEDS = [({"donate": False}, "donate=True"), ({"on_nonfinite": "raise"}, "on_nonfinite='skip'")]
NEEDS += [({"local_steps": 4}, "local_steps=None"), (AUTO, "rounding='auto' left out")]


@pytest.mark.parametrize(("options", "words"), NEEDS, ids=str)
def test_options_that_read_numbers_are_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"cuda_graph=True needs .*{words}"):
        make(net(), cuda_graph=True, **options)
    make(net(), cuda_graph="auto", **options)


def test_noise_and_a_missing_gpu_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pnet = net()
    with pytest.raises(ValueError, match="stochastic g-nets draw noise on the CPU"):
        gb.make_train_step(gb.make_plan(pnet, gb.stochastic()), pnet, loss_fn, adam(), donate=True, cuda_graph=True)
    monkeypatch.setattr(step_options, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a CUDA device, got none: take cuda_graph='auto' or False"):
        make(pnet, cuda_graph=True)
    assert type(make(pnet, cuda_graph="auto")) is TrainStep


@pytest.mark.skipif(not CUDA, reason="needs a GPU: GBFUNC_DEVICE=cuda")
def test_a_loss_that_reads_a_number_is_refused_at_capture() -> None:
    def reads(net: Any, batch: Any) -> Tensor:
        loss = loss_fn(net, batch)[0]
        return loss * 2 if loss.item() > 0 else loss

    with pytest.raises(ValueError, match="reads a number of the GPU"):
        trained(make(net(), reads, cuda_graph=True), 8)
    with pytest.warns(UserWarning, match="steps are not captured"):
        trained(make(net(), reads, cuda_graph="auto"), 8)
