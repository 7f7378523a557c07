"""Deltas beside layers that hide their weight: dequantise-then-add, to the base's precision."""

import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from tests.support.dense_oracle import moved_deltas
from tests.support.forms import assert_close, vectors
from tests.support.zoo import SGD

X = vectors(5, 16)


class FourBits(nn.Module):
    """A linear layer of two weights per byte, with a scale per row."""

    packed: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        scales = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        codes = (linear.weight.detach() / scales).round() + 8
        self.register_buffer("packed", (16 * codes[:, ::2] + codes[:, 1::2]).to(torch.uint8))
        self.register_buffer("scales", scales)

    def dequantised(self) -> Tensor:
        codes = torch.stack([self.packed // 16, self.packed % 16], -1).flatten(1)
        return (codes.to(self.scales.dtype) - 8) * self.scales

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantised(), self.bias)


class EightBits(nn.Linear):
    """Anybody's subclass of `nn.Linear`, whose weight is int8 and whose kernel has no gradient."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            return F.linear(input, self.weight.to(input.dtype) / 64, self.bias)


def eight_bits(linear: nn.Linear) -> nn.Module:
    layer = EightBits(linear.in_features, linear.out_features).double()
    layer.weight = nn.Parameter((64 * linear.weight).round().to(torch.int8), requires_grad=False)
    return layer


def network(quantise: Callable[[Any], nn.Module], seed: int) -> Any:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    net[0], net[2] = quantise(net[0]), quantise(net[2])
    return net


def of_torch(seed: int) -> Any:
    net = network(lambda layer: layer, seed).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)


BASES: dict[str, tuple[Callable[[int], Any], Callable[[Any], Tensor], float]] = {
    "four bits": (partial(network, FourBits), lambda layer: layer.dequantised(), 1e-12),
    "eight bits": (partial(network, eight_bits), lambda layer: layer.weight.double() / 64, 1e-12),
    "int8 of torch": (of_torch, lambda layer: layer.weight().dequantize(), 0.05),
}


def oracle(pnet: Any, dequantised: Callable[[Any], Tensor], weights: dict[str, Tensor], x: Tensor) -> Tensor:
    for i in (0, 2, 4):
        bias, delta = pnet[i].bias() if callable(pnet[i].bias) else pnet[i].bias, weights.get(f"{i}.delta")
        x = F.linear(x, weights[f"{i}.weight"] if delta is None else dequantised(pnet[i]) + delta, bias)
        x = x.tanh() if i < 4 else x
    return x


@pytest.mark.parametrize("hypernet", [gb.bilinear(2, share="shapes"), gb.low_rank(1)], ids=str)
@pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning")
@pytest.mark.parametrize("name", BASES)
def test_a_delta_beside_a_layer_is_added_to_its_dequantised_weight(name: str, hypernet: Any, tmp_path: Path) -> None:
    make, dequantised, tolerance = BASES[name]
    pnet = make(0)
    plan, x = gb.make_plan(pnet, hypernet, base="own"), X.to(torch.float32 if "torch" in name else torch.float64)
    assert {"0.delta", "2.delta"} <= {t.name for t in plan.tensors} and not plan.left_out
    assert plan.pnet_params >= 16 * 12 + 12 * 8 + 8 * 4
    fresh = gb.init_genome(plan, pnet)
    assert torch.equal(gb.materialize(plan, fresh, pnet, factored=True)(x), pnet(x))
    genome = fresh._replace(gnets=moved_deltas(plan, fresh.gnets))
    leaves = {e: {k: leaf.clone().requires_grad_() for k, leaf in own.items()} for e, own in genome.gnets.items()}
    expected = oracle(pnet, dequantised, gb.generate(plan, genome._replace(gnets=leaves), base=pnet), x)
    expected.square().mean().backward()
    module = gb.GenomeModule(plan, pnet, genome)
    module(x).square().mean().backward()
    for e, own in leaves.items():
        for k, leaf in own.items():
            assert leaf.grad is not None and float(leaf.grad.abs().max()) > 1e-9
            found, largest = module.get_parameter(f"gnets:{e}:{k}").grad, leaf.grad.abs().max()
            assert found is not None
            assert_close(found / largest, leaf.grad / largest, tolerance)
    with pytest.warns(UserWarning, match="0.delta, 2.delta.* stay factors, because"):
        nets = [module, gb.materialize(plan, genome, pnet), gb.materialize(plan, genome, pnet, factored=True)]
    gb.save(tmp_path / "g.safetensors", plan, genome)
    loaded, again = gb.load(tmp_path / "g.safetensors")
    nets += [pickle.loads(pickle.dumps(nets[-1])), gb.GenomeModule(loaded, pnet, again)]
    for net in nets:
        assert_close(net(x), expected, tolerance)
    for options in ({"lazy": False}, {"lazy": True}, {"remat": "layer"}, {"remat": "generate", "microbatches": 1}):
        step = gb.make_train_step(plan, pnet, lambda net, x: net(x).square().mean(), SGD, **options)
        state, info = step(step.init(0)._replace(gnets=genome.gnets), x)
        assert_close(info.loss, expected.square().mean(), tolerance)
        assert any(not torch.equal(v, genome.gnets[e][k]) for e, own in state.gnets.items() for k, v in own.items())
    with pytest.raises(ValueError, match="'0.delta' is added to a layer .*, and needs a type with factors"):
        gb.make_plan(pnet, gb.gnet((3,)), base="own")
    with pytest.raises(ValueError, match="that hide their weights, 0.delta, 2.delta"):
        gb.merge_genomes(plan, [genome], pnet)
    with pytest.raises(ValueError, match="digest"):
        gb.materialize(plan, genome, make(1))
