"""Materialised p-nets, dense or with factors, are modules like any other: saved, copied, cast, exported, trained."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.layers import install
from tests.support.forms import assert_close, vectors
from tests.support.zoo import tied


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(6, 20, 3), nn.BatchNorm2d(20), nn.ReLU(), nn.Flatten(), nn.Linear(80, 12))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)


def hugging_face() -> nn.Module:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    return nn.Sequential(conv1d(30, 20), nn.GELU(), conv1d(9, 30))


TOKENS = torch.arange(12).reshape(3, 4) * 7 % 11
NETS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, Any]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 20)), vectors(5, 20), {}),
    "conv": (conv_net, vectors(3, 6, 4, 4), {}),
    "encoder": (encoder, vectors(2, 5, 16), {}),
    "Hugging Face": (hugging_face, vectors(4, 20), {}),
    "tied": (tied, TOKENS, {"include": [r"embedding\.weight"]}),
}
EACH_NET = pytest.mark.parametrize("name", NETS)


def nets(name: str, max_tile: int | None = None, hypernet: Any = None) -> tuple[nn.Module, nn.Module, Tensor]:
    build, x, options = NETS[name]
    torch.manual_seed(0)
    pnet = build().double()
    plan = gb.make_plan(pnet, hypernet or gb.low_rank(2), max_tile=max_tile, **options)
    genome = gb.init_genome(plan, pnet, 3)
    return gb.materialize(plan, genome, pnet), gb.materialize(plan, genome, pnet, factored=True), x


def numbers(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def factors(net: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in net.named_parameters() if name.endswith(("_left", "_right"))}


@EACH_NET
@pytest.mark.parametrize(
    ("hypernet", "max_tile"), [(gb.low_rank(2), None), (gb.low_rank(2), 12), (gb.periodic(1), None), (gb.xox(2), 12)]
)
def test_the_same_outputs_from_fewer_numbers(name: str, max_tile: int | None, hypernet: Any) -> None:
    dense, factored, x = nets(name, max_tile, hypernet)
    assert factors(factored) and numbers(factored) < numbers(dense)
    assert_close(factored(x), dense(x))
    with torch.no_grad():
        assert_close(factored.eval()(x), dense.eval()(x))


@EACH_NET
def test_every_weight_can_be_read(name: str) -> None:
    dense, factored, _ = nets(name)
    for path, weight in dense.named_parameters(remove_duplicate=False):
        assert weight.is_contiguous()
        prefix, _, attribute = path.rpartition(".")
        assert_close(getattr(factored.get_submodule(prefix), attribute), weight)


@EACH_NET
def test_a_state_dict_round_trip_and_a_copy(name: str) -> None:
    _, factored, x = nets(name)
    expected = factored.eval()(x)
    saved = {k: v.clone() for k, v in factored.state_dict().items()}
    again = copy.deepcopy(factored)
    assert again.state_dict().keys() == saved.keys()
    assert not {p.data_ptr() for p in again.parameters()} & {p.data_ptr() for p in factored.parameters()}
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
        assert not torch.allclose(again(x), expected)
    assert_close(factored(x), expected)
    again.load_state_dict(saved)
    assert_close(again(x), expected)


def through_a_file(net: nn.Module) -> nn.Module:
    torch.save(net, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@EACH_NET
@pytest.mark.parametrize("again", [lambda net: pickle.loads(pickle.dumps(net)), through_a_file], ids=["pickle", "file"])
def test_pickles_and_files_bring_the_factors(again: Callable[[nn.Module], nn.Module], name: str) -> None:
    dense, factored, x = nets(name, 12)
    loaded = again(factored.eval())
    assert factors(loaded).keys() == factors(factored).keys()
    assert [type(m) for m in loaded.modules()] == [type(m) for m in factored.modules()]
    assert_close(loaded(x), dense.eval()(x))


def test_a_pickle_is_read_where_there_are_no_factored_layers_yet() -> None:
    _, factored, x = nets("mlp")
    expected, pickled = factored(x), pickle.dumps(factored)
    install.generated_class.cache_clear()
    assert_close(pickle.loads(pickled)(x), expected)


@EACH_NET
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 0.05)])
def test_casts_reach_the_factors(name: str, dtype: torch.dtype, tolerance: float) -> None:
    dense, factored, x = nets(name)
    expected = dense.eval()(x)
    narrow = factored.eval().to(dtype)
    assert {p.dtype for p in narrow.parameters()} == {dtype}
    out = narrow(x.to(dtype) if x.is_floating_point() else x)
    assert out.dtype == dtype
    assert_close(out.double(), expected, tolerance)


@EACH_NET
def test_factors_can_be_trained(name: str) -> None:
    dense, factored, x = nets(name, 12)
    target = dense(x).detach().cos()

    def loss_of(net: nn.Module) -> Tensor:
        return (net(x) - target).square().mean()

    weights = dict(dense.named_parameters())
    wanted = torch.autograd.grad(loss_of(dense), list(weights.values()))
    gradients = dict(zip(weights, wanted, strict=True))
    loss_of(factored).backward()
    layer: Any
    for path, layer in factored.named_modules(remove_duplicate=False):
        name = f"{path}.weight".lstrip(".")
        if hasattr(layer, "weight_left") and name in gradients:
            left, right = layer.weight_left, layer.weight_right
            chain = torch.autograd.grad(layer.weight, (left, right), gradients[name])
            assert_close((left.grad, right.grad), chain, 1e-10)
    trainer, before = torch.optim.Adam(factored.parameters(), lr=0.01), float(loss_of(factored).detach())
    start = {k: v.clone() for k, v in factors(factored).items()}
    for _ in range(20):
        trainer.zero_grad()
        loss_of(factored).backward()
        trainer.step()
    assert float(loss_of(factored).detach()) < before
    assert all(not torch.equal(v, start[k]) for k, v in factors(factored).items())


@pytest.mark.parametrize("name", [name for name in NETS if name != "encoder"])
def test_factors_that_are_loaded_for_the_call_of_their_module(name: str) -> None:
    dense, net, x = nets(name)
    for module in [m for m in net.modules() if m._parameters]:
        kept = dict(module._parameters)

        def load(module: nn.Module, args: Any, kept: dict[str, Any] = kept) -> None:
            module._parameters.update(kept)

        def unload(module: nn.Module, *args: Any, kept: dict[str, Any] = kept) -> None:
            module._parameters.update({k: p if p is None else nn.Parameter(p * math.nan) for k, p in kept.items()})

        module.register_forward_pre_hook(load)
        module.register_forward_hook(unload)
        unload(module)
    assert_close(net(x), dense(x))


def test_tied_weights_are_one_pair_of_factors() -> None:
    _, factored, x = nets("tied")
    left = factored.get_parameter("embedding.weight_left")
    assert factored.get_parameter("head.weight_left") is left
    assert sorted(k for k in factors(factored) if not k.startswith("hidden")) == [
        "embedding.weight_left",
        "embedding.weight_right",
    ]
    again = copy.deepcopy(factored)
    assert again.get_parameter("head.weight_left") is again.get_parameter("embedding.weight_left")
    assert_close(again(x), factored(x))


def test_factors_as_large_as_the_weight_are_not_kept() -> None:
    pnet = NETS["mlp"][0]().double()
    plan = gb.make_plan(pnet, gb.periodic(30))
    net = gb.materialize(plan, gb.init_genome(plan, pnet), pnet, factored=True)
    assert net.state_dict().keys() == pnet.state_dict().keys()
    assert all(type(p) is nn.Parameter for p in net.parameters())


@pytest.mark.parametrize("factored", [False, True])
def test_each_noise_makes_another_network_of_one_stochastic_genome(factored: bool) -> None:
    pnet = NETS["mlp"][0]().double()
    plan = gb.make_plan(pnet, gb.stochastic((4,)), rules=[("2", gb.periodic(2))])
    genome = gb.init_genome(plan, pnet, 3)
    brains = []
    for seed in range(3):
        noise = gb.sample_noise(plan, torch.Generator().manual_seed(seed), genome.direct["0.bias"])
        net = gb.materialize(plan, genome, pnet, noise=noise, factored=factored)
        first = net.get_submodule("0").weight
        assert isinstance(first, Tensor)
        torch.testing.assert_close(first.detach(), gb.generate(plan, genome, noise=noise)["0.weight"])
        brains.append((first, net.get_submodule("2")(torch.ones(30).double())))
    assert not torch.equal(brains[0][0], brains[1][0])
    torch.testing.assert_close(brains[0][1], brains[1][1])


def test_noise_of_another_plan_is_refused() -> None:
    pnet = nn.Linear(6, 4)
    plan = gb.make_plan(pnet, gb.stochastic(hidden=(3,)))
    genome, noise = gb.init_genome(plan, pnet), gb.sample_noise(plan, torch.Generator())
    with pytest.raises(ValueError, match="the noise does not fit the plan"):
        gb.materialize(plan, genome, pnet, noise={"other": next(iter(noise.values()))})
    with pytest.raises(ValueError, match="the noise does not fit the plan"):
        gb.generate(plan, genome, noise={e: {k: v[:0] for k, v in n.items()} for e, n in noise.items()})


EXPORTS: dict[str, Callable[[nn.Module, Tensor], Callable[..., Tensor]]] = {
    "export": lambda net, x: torch.export.export(net, (x,)).module(),
    "strict": lambda net, x: torch.export.export(net, (x,), strict=True).module(),
}


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("how", EXPORTS)
def test_a_net_is_exported_before_and_after_its_first_call(how: str, called: bool, factored: bool) -> None:
    dense, net, x = nets("mlp")
    net, expected = net if factored else dense, dense(x)
    if called:
        torch.testing.assert_close(net(x), expected)
    torch.testing.assert_close(EXPORTS[how](net, x)(x), expected)
    torch.testing.assert_close(net(x), expected)


def test_a_genome_that_was_cast_gives_a_network_of_the_plans_dtypes() -> None:
    pnet = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    plan = gb.make_plan(pnet, gb.periodic(2))
    net = gb.materialize(plan, gb.GenomeModule(plan, pnet).double().to_genome(), pnet)
    assert {x.dtype for x in net.state_dict().values()} == {torch.float32, torch.int64}
    assert net(torch.randn(8, 6)).dtype is torch.float32
