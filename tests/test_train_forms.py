"""A training step on forms of layers: what it draws, reads and calls, and what is refused in every mode."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from tests.support.dense_oracle import READ_GRADIENTS, assert_same, dense_answer, step_answer
from tests.support.strategies import Net
from tests.support.trees_equal import same_bits
from tests.support.versions import needs_whole_graphs
from tests.support.zoo import SGD, loss_fn, step_of

ADAM = gb.torch_optimizer(torch.optim.Adam, lr=0.01)
MODES: dict[str, dict[str, Any]] = {"dense": {"lazy": False}, "lazy": {"lazy": True, "microbatches": 2}}
MODES |= {remat: {"remat": remat} for remat in ("generate", "layer")}
EACH_MODE = pytest.mark.parametrize("mode", MODES)


def conv_net() -> nn.Module:
    layers = (nn.Conv2d(3, 7, 3, padding=1), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(7, 4, 3, stride=2))
    return nn.Sequential(*layers, nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(16, 6), nn.Dropout(0.5), nn.Linear(6, 3))


def with_weights(net: Any, x: Tensor) -> Tensor:
    both = net.attend(x, x[..., :5], x.cos(), average_attn_weights=False)
    return torch.cat([part.flatten() for part in both])[None]


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.Linear(7, 3)), (4, 6)),
    "sequence": (lambda: nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.Linear(7, 3)), (4, 5, 6)),
    "conv": (conv_net, (4, 3, 6, 6)),
    "attention": (lambda: Net(with_weights, attend=nn.MultiheadAttention(8, 2, dropout=0.4, kdim=5)), (5, 3, 8)),
}


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def planned(name: str, max_tile: Any, hypernet: Any = None) -> tuple[nn.Module, gb.Plan]:
    torch.manual_seed(0)
    pnet = NETS[name][0]().double()
    return pnet, gb.make_plan(pnet, hypernet or gb.low_rank(2), max_tile=max_tile)


@pytest.mark.parametrize("max_tile", [None, 1, 2, 5, (1, 8), (8, 1)], ids=str)
@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, layout) for name in NETS for layout in ("rows first", "transposed")] + [("conv", "channels last")],
)
def test_factors_draw_the_masks_that_dense_weights_draw(name: str, max_tile: Any, layout: str) -> None:
    pnet, plan = planned(name, max_tile)
    batch = numbers(*NETS[name][1])
    if layout == "channels last":
        batch = batch.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        batch = batch.transpose(0, 1).contiguous().transpose(0, 1)

    def answer(**options: Any) -> Any:
        return step_answer(plan, pnet, loss_fn, batch, seed=3, **options)

    expected = answer(lazy=False)
    assert_same(answer(lazy=True), expected)
    assert_same(answer(remat="layer"), expected)


# Torch's compiler still uses torch.jit.script when it is loaded.
@pytest.mark.parametrize(
    ("lazy", "backend"),
    [
        ("auto", "aot_eager"),
        pytest.param("auto", "inductor", marks=pytest.mark.slow),
        pytest.param(True, "inductor", marks=pytest.mark.slow),
    ],
)
def test_compiled_factors_take_batches_of_any_size(lazy: Any, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Graphs are the same; Inductor takes half a minute to make programs of them.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    pnet, plan = planned("conv", 5)
    pnet = pnet.eval()
    compiled = gb.make_train_step(plan, pnet, loss_fn, READ_GRADIENTS, lazy=lazy, compile=True)
    torch._dynamo.reset()
    for rows in (4, 6, 3):
        batch = numbers(rows, 3, 6, 6)
        (found, info), state = compiled(compiled.init(), batch), compiled.init()
        plain = gb.make_train_step(plan, pnet, loss_fn, READ_GRADIENTS, lazy=lazy)
        wanted, expected = plain(state, batch)
        torch.testing.assert_close(info.loss, expected.loss, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.gnets, wanted.gnets, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found.direct, wanted.direct, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("joint", [False, True])
def test_compiled_code_that_loses_a_change_of_a_buffer_is_refused(joint: bool, graphs_alone: None) -> None:
    class Counting(nn.Sequential):
        n: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.n += 1
            return super().forward(x)

    pnet = Counting(nn.Linear(6, 5), nn.Dropout(0.0), nn.Linear(5, 3)).double()

    def loss(net: Any, batch: Tensor) -> Any:
        return loss_fn(net, batch), "text" if joint else object()

    # Torch 2.13 loses what is done in place to a number in float64 where loss and gradient are two graphs.
    pnet.register_buffer("n", torch.zeros((), dtype=torch.float64))
    plan, batch = gb.make_plan(pnet, gb.periodic(2)), numbers(5, 6)
    step, plain = (gb.make_train_step(plan, pnet, loss, SGD, compile=compile) for compile in (True, False))
    state, expected = step.init(), plain.init()
    torch._dynamo.reset()
    try:
        for _ in range(3):
            state, expected = step(state, batch)[0], plain(expected, batch)[0]
    except ValueError as error:
        assert not joint and "the change of buffers by 1 of its norm, from those of eager code" in str(error)
    else:
        torch.testing.assert_close(state.buffers, expected.buffers)
        torch.testing.assert_close(state.gnets, expected.gnets, rtol=1e-9, atol=1e-9)


@EACH_MODE
def test_the_loss_function_is_called_once_a_microbatch_with_real_data(mode: str) -> None:
    pnet, plan = planned("mlp", 4)
    microbatches = MODES[mode].get("microbatches", 1)
    seen: list[Tensor] = []

    def loss(net: Callable[..., Tensor], batch: Tensor) -> Tensor:
        assert type(batch) is Tensor and not batch.is_meta
        seen.append(batch.clone())
        return net(batch).square().mean()

    step = gb.make_train_step(plan, pnet, loss, SGD, **MODES[mode])
    state, batch = step.init(), numbers(4, 6)
    for n in (1, 2):
        state, _ = step(state, batch)
        assert len(seen) == n * microbatches
    assert torch.equal(torch.cat(seen), torch.cat([batch, batch]))


def penalised() -> nn.Module:
    parts = {"a": nn.Linear(6, 7), "b": nn.Linear(7, 3)}
    return Net(lambda net, x: net.b(net.a(x).tanh()) + net.a.weight.square().mean(), **parts).double()


@EACH_MODE
def test_reads_of_weights_that_are_not_dense_are_counted(mode: str) -> None:
    pnet = penalised()
    plan = gb.make_plan(pnet, gb.low_rank(1))
    options = MODES[mode]
    step = gb.make_train_step(plan, pnet, loss_fn, SGD, **options)
    assert step.dense_reads == {}
    state, calls = step.init(), options.get("microbatches", 1)
    for n in (1, 2):
        state, _ = step(state, numbers(4, 6))
        assert step.dense_reads == ({} if mode == "dense" else {"a.weight": n * calls})


@needs_whole_graphs
def test_a_compiled_step_that_reads_a_weight_is_compiled_once(graphs_alone: None) -> None:
    pnet = penalised()
    plan = gb.make_plan(pnet, gb.low_rank(1))
    step = gb.make_train_step(plan, pnet, loss_fn, SGD, lazy=True, compile=True)
    plain = gb.make_train_step(plan, pnet, loss_fn, SGD, lazy=True)
    state, expected = step.init(), plain.init()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            state, info = step(state, numbers(4, 6))
            expected, same = plain(expected, numbers(4, 6))
            torch.testing.assert_close(info.loss, same.loss)


@EACH_MODE
def test_a_loss_of_the_pnet_itself_is_refused(mode: str) -> None:
    pnet, plan = planned("mlp", 4)
    step = gb.make_train_step(plan, pnet, lambda net, x: pnet(x).square().mean(), SGD, **MODES[mode])
    with pytest.raises(ValueError, match="the loss depends on parameters of the p-net itself"):
        step(step.init(), numbers(4, 6))


def test_what_is_no_state_is_refused() -> None:
    step, batch = step_of("mlp")
    state = step.init()
    for wrong, words in ((None, "NoneType"), (state._asdict(), "dict"), (batch, "Tensor"), (tuple(state), "tuple")):
        with pytest.raises(TypeError, match=rf"takes \(state, batch\), got a {words} first"):
            step(wrong, batch)  # pyright: ignore[reportArgumentType]


def test_states_and_steps_are_the_same_in_any_mode() -> None:
    step, batch = step_of("mlp")
    with torch.inference_mode():
        state = step.init()
    with torch.no_grad():
        assert same_bits(step(state, batch), step(step.init(), batch))
    assert same_bits(step(state, batch), step(step.init(), batch))


def test_nothing_to_train_is_an_error() -> None:
    pnet = nn.Sequential(nn.Linear(6, 3)).double().requires_grad_(False)
    step = gb.make_train_step(gb.make_plan(pnet, exclude=["."]), pnet, loss_fn, SGD)
    with pytest.raises(ValueError, match="does not depend on any trained leaf: there is none"):
        step(step.init(), numbers(4, 6))


# Torch says so of those with strides, once a process.
NESTED = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
LAYOUTS = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])


def nested(rows: Tensor, layout: torch.layout) -> Tensor:
    return torch.nested.as_nested_tensor([rows[:3], rows[3:]], layout=layout)


@NESTED
@pytest.mark.parametrize("base", [None, "own"])
@EACH_MODE
@LAYOUTS
def test_linear_layers_take_nested_inputs(layout: torch.layout, mode: str, base: Any) -> None:
    def loss(net: Any, rows: Tensor) -> Tensor:
        return torch.cat(net(nested(rows, layout)).unbind()).sin().sum()

    pnet = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).double()
    plan, rows = gb.make_plan(pnet, gb.low_rank(2), base=base, max_tile=64 if base else 5), numbers(8, 6)
    options = {**MODES[mode], "microbatches": 1}
    assert_same(step_answer(plan, pnet, loss, rows, **options), dense_answer(plan, pnet, loss, rows))
