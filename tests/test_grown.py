"""The `net` of a loss function is the p-net with all that it has, on generated weights."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import gbfunc as gb
from tests.support.coder import Coder, made, numbers
from tests.support.dense_oracle import Answer, assert_same, dense_answer, step_answer
from tests.support.hugging_face import tiny
from tests.support.zoo import SGD

MODES: dict[str, dict[str, Any]] = {"dense": {"lazy": False}, "lazy": {"lazy": True}}
MODES |= {remat: {"remat": remat} for remat in ("generate", "layer")}
MODES["microbatches"] = {"lazy": True, "microbatches": 2}
EACH_MODE = pytest.mark.parametrize("options", MODES.values(), ids=MODES)


def oracle(make: Callable[[], nn.Module], plan: gb.Plan, loss_fn: Any, batch: Tensor, **options: Any) -> Answer:
    pnet, entered = made(make)[0], []

    class Whole(type(pnet)):
        @functools.wraps(type(pnet).forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if entered:
                return super().forward(*args, **kwargs)
            entered.append(True)
            try:
                return loss_fn(self, *args)
            finally:
                entered.clear()

    pnet.__class__ = Whole
    return dense_answer(plan, pnet, lambda net, x: net(x), batch, **options)


def all_of_it(net: Any, x: Tensor) -> Tensor:
    assert isinstance(net, nn.Module) and isinstance(net, Coder) and isinstance(net.layers[0], nn.Linear)
    assert net.training and net.config["width"] == len(net.scale) == 7 and len(net.layers) == 2 and bool(net.layers)
    assert net.encoder in list(net.children()) and net.layers[1] == net.get_submodule("layers.1")
    net.eval()
    h = net.encoder(x)
    assert not net.training and not net.layers[0].training
    total = net(x).square().mean() + net.heads["b"](h).sin().mean() + net.part("b")(net.code(x)).mean()
    net.train()
    net.encoder[3].eval()
    h = net.encoder(x)
    for layer in net.layers:
        h = layer(h)
    for name, head in net.heads.items():
        total = total + head(h).square().mean() * len(name)
    for module in net.modules():
        if isinstance(module, nn.Linear):
            total = total + 0.01 * (module.weight @ module.weight.t()).sum()
    total = total + 0.1 * sum((p**2).sum() for p in net.parameters()) + net.scale.prod() + net.forward(x).mean()
    total = total + nn.Sequential(net.layers[0], nn.Tanh(), *net.layers[1:])(h).mean()
    fast = {k: p * 1.1 for k, p in net.layers[0].named_parameters()}
    total = total + functional_call(net.layers[0], fast, (h,)).mean() + torch.vmap(net.heads["a"])(h).mean()
    net.steps.add_(1)
    return total + net.state_dict()["encoder.0.weight"].sum()


@EACH_MODE
def test_all_parts_work_as_in_an_ordinary_module(options: dict[str, Any]) -> None:
    pnet, plan = made(Coder)
    expected = oracle(Coder, plan, all_of_it, numbers(8, 6), microbatches=options.get("microbatches", 1))
    for _ in range(2):
        assert_same(step_answer(plan, pnet, all_of_it, numbers(8, 6), **options), expected)
    assert expected.buffers["steps"] == options.get("microbatches", 1) and pnet.training


def test_noise_and_narrow_types_reach_parts_as_the_whole() -> None:
    def whole(net: Any, x: Tensor) -> Tensor:
        return net(x).float().square().mean()

    def parts(net: Any, x: Tensor) -> Tensor:
        return net[2](net[1](net[0](x))).float().square().mean()

    pnet = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    plan = gb.make_plan(pnet, gb.stochastic((3,)), max_tile=4)
    x = numbers(8, 6).float()
    modes: list[dict[str, Any]] = [{}, {"amp": torch.bfloat16}, {"remat": "layer", "amp": torch.bfloat16}]
    for options in modes:
        assert_same(step_answer(plan, pnet, parts, x, **options), step_answer(plan, pnet, whole, x, **options))


def test_compiled_parts_are_those_of_the_plain_step(graphs_alone: None) -> None:
    def loss(net: Any, x: Tensor) -> Tensor:
        # In this order: a later update of the statistics would reach what eval mode keeps for backward, in plain torch.
        out = net(x)
        net.eval()
        h = net[1](net[0](x))
        net.train()
        weights = [m.weight for m in net.modules() if isinstance(m, nn.Linear)]
        return h.square().mean() + out.sin().mean() + 0.1 * weights[0].square().sum()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7))

    pnet, plan = made(make)
    torch._dynamo.reset()
    step = gb.make_train_step(plan, pnet, loss, SGD, compile=True, lazy=True)
    plain = gb.make_train_step(plan, pnet, loss, SGD, lazy=True)
    state = step.init()
    for _ in range(2):
        (found, info), (state, wanted) = step(state, numbers(6, 6)), plain(state, numbers(6, 6))
        torch.testing.assert_close(info.loss, wanted.loss, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found[:3], state[:3], rtol=1e-9, atol=1e-9)
    assert pnet.training


GAIN = 1.0


def test_a_compiled_step_sees_what_changes_around_its_loss_function(
    graphs_alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = {"of the loss": 1.0}

    def loss(net: Any, x: Tensor) -> Tensor:
        return net(x).square().mean() * weight["of the loss"] * GAIN

    pnet, plan = made(lambda: nn.Linear(6, 5))
    torch._dynamo.reset()
    step = gb.make_train_step(plan, pnet, loss, SGD, compile=True)
    state, x = step.init(), numbers(4, 6)
    first = step(state, x)[1].loss
    weight["of the loss"] = 2.0
    assert step(state, x)[1].loss == 2 * first
    monkeypatch.setitem(globals(), "GAIN", 4.0)
    assert step(state, x)[1].loss == 8 * first


@pytest.mark.parametrize("lazy", [True, False])
def test_transforms_and_modes_of_autograd_may_alternate(lazy: bool) -> None:
    def loss(net: Any, x: Tensor) -> Tensor:
        def energy(x: Tensor) -> Tensor:
            return (net[0](x).tanh() @ net[0].weight).square().sum()

        with torch.inference_mode():
            value = float(energy(x))
        with torch.no_grad():
            value += float(energy(x))
        slope = torch.func.grad(energy)(x)
        hessian = torch.func.hessian(energy)(x[0])
        tangent = torch.func.jvp(energy, (x,), (x,))[1]
        per_row = torch.vmap(torch.func.grad(energy))(x)
        total = energy(x) + slope.square().sum() + hessian.square().sum() + tangent + per_row.square().sum()
        return total * value + torch.vmap(energy)(x).sum()

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 7))

    pnet, plan = made(make)
    expected = oracle(make, plan, loss, numbers(3, 6))
    assert_same(step_answer(plan, pnet, loss, numbers(3, 6), lazy=lazy), expected)


def test_modes_hold_for_one_call_and_are_restored_after_errors() -> None:
    pnet, plan = made(Coder)
    seen: list[bool] = []

    def loss(net: Any, x: Tensor) -> Tensor:
        seen.append(net.training)
        assert net.eval() is net and not net.encoder[3].training
        torch.testing.assert_close(net(x), net(x), rtol=0, atol=0)
        if len(seen) == 1:
            raise KeyError("a user's error")
        return net(x).mean()

    step = gb.make_train_step(plan, pnet, loss, SGD)
    with pytest.raises(KeyError):
        step(step.init(), numbers(8, 6))
    state = step.init()
    for _ in range(2):
        new, _ = step(state, numbers(8, 6))
        torch.testing.assert_close(new.buffers, state.buffers, rtol=0, atol=0)
    assert seen == [True] * 3 and pnet.training


def test_checkpoints_around_parts_are_right() -> None:
    def around(net: Any, x: Tensor) -> Tensor:
        def twice(h: Tensor) -> Tensor:
            return net.layers[0](h) @ net.layers[1].weight

        h = checkpoint(net.encoder, x, use_reentrant=False)
        return checkpoint(net.heads["b"], checkpoint(twice, h, use_reentrant=False), use_reentrant=False).mean()

    def plain(net: Any, x: Tensor) -> Tensor:
        return net.heads["b"](net.layers[0](net.encoder(x)) @ net.layers[1].weight).mean()

    pnet, plan = made(Coder)
    for options in (MODES["dense"], MODES["layer"], MODES["microbatches"]):
        expected = step_answer(plan, pnet, plain, numbers(8, 6), **options)
        assert_same(step_answer(plan, pnet, around, numbers(8, 6), **options), expected)


@pytest.mark.parametrize("mode", ["dense", "lazy", "microbatches"])
def test_checkpoints_inside_of_the_pnet_are_right(mode: str) -> None:
    class Inside(Coder):
        def code(self, x: Tensor) -> Tensor:
            return checkpoint(super().code, x, use_reentrant=False)  # pyright: ignore[reportReturnType]

    def loss(net: Any, x: Tensor) -> Tensor:
        return net.code(x).square().mean() + net.layers[0].weight.square().mean()

    answers = []
    for make in (Inside, Coder):
        pnet, plan = made(make)
        pnet.eval()
        answers.append(step_answer(plan, pnet, loss, numbers(8, 6), **MODES[mode]))
        module = gb.GenomeModule(plan, pnet, lazy=MODES[mode].get("lazy", "auto"))
        loss(module, numbers(8, 6)).backward()
        answers.append([x.grad for x in module.parameters()])
    assert_same(answers[0], answers[2])
    torch.testing.assert_close(answers[1], answers[3], rtol=1e-9, atol=1e-9)


def test_models_of_hugging_face_have_their_parts() -> None:
    make = partial(tiny, "GPT2LMHeadModel", n_layer=1, n_embd=8, vocab_size=9)

    def loss(net: Any, tokens: Tensor) -> Tensor:
        assert net.config.n_embd == 8 and net.device.type == "cpu" and net.num_parameters() > 0
        net.eval()
        new = net.generate(tokens[:, :3], max_new_tokens=2, do_sample=False, pad_token_id=0)
        net.train()
        h = net.transformer(inputs_embeds=net.transformer.wte(new)).last_hidden_state
        codes = net.get_output_embeddings()(h) + F.linear(h, net.get_input_embeddings().weight)
        return codes.square().mean() + net(input_ids=tokens, labels=tokens, use_cache=False).loss

    pnet, plan = made(make, include=[r"wte"])
    tokens = torch.arange(32).reshape(4, 8) % 9
    expected = oracle(make, plan, loss, tokens)
    for mode in ("lazy", "layer"):
        assert_same(step_answer(plan, pnet, loss, tokens, **MODES[mode]), expected)
