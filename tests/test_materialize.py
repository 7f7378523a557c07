"""Materialised p-nets: dense ones are plain modules, factored ones compute the same from fewer numbers."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import gbfunc as gb
from gbfunc.hypernets import Hypernet


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 20), nn.ReLU(), nn.Linear(20, 3)).double()


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(256, 24),
        nn.Linear(24, 3),
    ).double()


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 48, batch_first=True).double()


CASES = {
    "mlp": (mlp, (5, 40)),
    "conv": (conv, (5, 8, 4, 4)),
    "encoder": (encoder, (2, 6, 32)),
}


@pytest.mark.parametrize("hypernet", [gb.periodic(2), gb.low_rank(2), gb.xox(2)], ids=lambda h: h.type)
@pytest.mark.parametrize("max_tile", [None, 25])
@pytest.mark.parametrize("case", CASES)
def test_factored_equals_dense_with_fewer_numbers(case: str, max_tile: int | None, hypernet: Hypernet) -> None:
    build, shape = CASES[case]
    torch.manual_seed(0)
    pnet = build().eval()
    plan = gb.make_plan(pnet, hypernet, max_tile=max_tile)
    genome = gb.init_genome(plan, pnet, 3)
    dense, factored = (gb.materialize(plan, genome, pnet, factored=f) for f in (False, True))
    x = torch.randn(shape, dtype=torch.float64)

    def numbers(net: nn.Module) -> int:
        return sum(p.numel() for p in net.parameters())

    assert dense.state_dict().keys() == pnet.state_dict().keys()
    assert numbers(factored) < numbers(dense) == plan.pnet_params
    assert all(p.is_contiguous() for p in factored.parameters())
    with torch.no_grad():
        torch.testing.assert_close(factored(x), dense(x), rtol=1e-11, atol=1e-12)
        again = copy.deepcopy(factored)
        again.load_state_dict(factored.state_dict())
        torch.testing.assert_close(again(x), dense(x), rtol=1e-11, atol=1e-12)
        single: Tensor = factored.float()(x.float())
        assert single.dtype == torch.float32


def test_factors_as_large_as_the_weight_are_not_kept() -> None:
    pnet = mlp()
    plan = gb.make_plan(pnet, gb.periodic(30))
    net = gb.materialize(plan, gb.init_genome(plan, pnet), pnet, factored=True)
    assert net.state_dict().keys() == pnet.state_dict().keys()
    assert all(type(p) is nn.Parameter for p in net.parameters())


@pytest.mark.parametrize("factored", [False, True])
def test_each_noise_makes_another_network_of_one_stochastic_genome(factored: bool) -> None:
    pnet = mlp()
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


class Own(nn.Module):
    """Code other than torch's, whose first call is watched."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def traced(net: nn.Module, x: Tensor) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        # Torch's scripts and traces are deprecated, and a trace fixes the size for which thin factors pay.
        warnings.simplefilter("ignore")
        return torch.jit.trace(net, x)  # pyright: ignore[reportReturnType]


EXPORTS: dict[str, Callable[[nn.Module, Tensor], Callable[..., Tensor]]] = {
    "export": lambda net, x: torch.export.export(net, (x,)).module(),
    "strict": lambda net, x: torch.export.export(net, (x,), strict=True).module(),
    "trace": traced,
}


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("how", EXPORTS)
def test_a_net_is_exported_before_and_after_its_first_call(how: str, called: bool, factored: bool) -> None:
    torch.manual_seed(0)
    pnet, x = Own().double(), torch.randn(3, 6).double()
    plan = gb.make_plan(pnet, gb.periodic(1))
    genome = gb.init_genome(plan, pnet, 3)
    net = gb.materialize(plan, genome, pnet, factored=factored)
    expected = functional_call(pnet, gb.generate(plan, genome), x)
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
