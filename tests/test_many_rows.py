"""Row b of many genomes is that of its row alone, on p-nets that do something else with rows than to keep them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.plan import Plan
from tests import test_many
from tests.support.forms import assert_close, vectors
from tests.support.hugging_face import tiny
from tests.support.strategies import Net
from tests.test_many import INDEX, TOKENS, checked, one_by_one, tensors

X = vectors(5, 8)
PADDED = torch.arange(6) >= torch.tensor([[6], [4], [6], [2], [1]])


class Sorting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.second(self.first(x)[order].tanh())[order.argsort()]


WINDOWS = {"image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 2}
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_position_embeddings": 16}
GPT2 = partial(tiny, "GPT2LMHeadModel", vocab_size=19, n_layer=1)
MAMBA = partial(tiny, "MambaModel", vocab_size=19)


def windows() -> nn.Module:
    parts = {"table": vectors(8, 2), "bias": nn.Linear(2, 1), "out": nn.Linear(8, 4)}
    return Net(lambda net, x: net.out(x + net.bias(net.table[None]).view(-1)[:8]), **parts)


class Normed(Sorting):
    def forward(self, x: Tensor) -> Any:
        h = self.first(x)
        return {"y": self.second(h - h.mean(0)), "more": (h, [h.max(1).values, None], 3)}


ODD: dict[str, tuple[Callable[[], nn.Module], Tensor, list[str]]] = {
    "sorting": (Sorting, X, []),
    "mean": (Normed, X, []),
    "windows": (windows, X, ["bias"]),
    "swin": (partial(tiny, "Swinv2Model", **WINDOWS), vectors(5, 3, 8, 8), ["continuous_position_bias_mlp.0"]),
    "deberta": (partial(tiny, "DebertaV2Model", vocab_size=19, **RELATIVE), TOKENS, ["query_proj"]),
    "mamba": (partial(MAMBA, use_cache=False), TOKENS, ["x_proj", "out_proj"]),
}


def planned(build: Callable[[], nn.Module], targets: list[str]) -> tuple[nn.Module, Plan, list[gb.Genome]]:
    adapter: dict[str, Any] = {"base": "own", "target_modules": targets} if targets else {}
    return test_many.planned(build, gb.periodic(1), **adapter)


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_rows_are_those_of_rows_alone(name: str) -> None:
    build, x, targets = ODD[name]
    pnet, plan, genomes = planned(build, targets)
    net = gb.materialize_many(plan, genomes, pnet)
    # The first batch is sorted, and of one genome.
    ordered = X[:, 0].argsort()[:2]
    for rows, index in [(ordered, INDEX[[0, 0]]), (torch.arange(5), INDEX), (torch.tensor([4]), INDEX[:1])]:
        assert_close(tensors(net(index, x[rows])), one_by_one(plan, genomes, pnet, index, x[rows]), 1e-10)
    assert net.row_wise


def encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)


CAUSAL = torch.ones(6, 6).triu(1).bool()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masks", [{"mask": CAUSAL}, {"src_key_padding_mask": PADDED}, {"mask": CAUSAL.double()}, {}])
@pytest.mark.parametrize("targets", [[], ["linear1"], ["self_attn"]], ids=str)
def test_encoders_with_masks(masks: dict[str, Tensor], norm_first: bool, targets: list[str]) -> None:
    pnet, plan, genomes = planned(partial(encoder, norm_first), targets)
    x = vectors(5, 6, 8)
    out = gb.materialize_many(plan, genomes, pnet)(INDEX, x, **masks)
    for b, i in enumerate(INDEX.tolist()):
        each = {k: m[b : b + 1] if m is PADDED else m for k, m in masks.items()}
        # With gradients torch takes the layers' own forward, at padded positions too.
        assert_close(out[b : b + 1], gb.materialize(plan, genomes[i], pnet)(x[b : b + 1], **each), 1e-10)


def test_a_pnet_that_vmap_cannot_run_goes_row_by_row_with_a_warning() -> None:
    class Looking(Sorting):
        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            return self.second(h if float(x[0, 0]) > 0 else -h)

    pnet, plan, genomes = planned(Looking, [])
    net, x = gb.materialize_many(plan, genomes, pnet), X.abs() * torch.tensor([[-1], [1], [1], [-1], [1]])
    with pytest.warns(UserWarning, match="rows run one by one"):
        out = net(INDEX, x)
    assert_close(out, one_by_one(plan, genomes, pnet, INDEX, x)[0], 1e-10)
    assert not net.row_wise
    assert_close(net(INDEX, x), out)


def test_a_loss_is_refused_and_row_losses_are_not() -> None:
    pnet, plan, genomes = planned(partial(GPT2, use_cache=False), [])
    net = gb.materialize_many(plan, genomes, pnet)
    for index in (INDEX, INDEX[[0] * 5], INDEX[:1]):
        x = TOKENS[: len(index)]
        with pytest.raises(ValueError, match=r"first dimension 1, the batch, got output\['loss'\] of shape \(\)"):
            net(index, x, labels=x)

    class Losses(nn.Linear):
        def forward(self, input: Tensor, labels: Tensor) -> Any:
            return {"losses": F.cross_entropy(super().forward(input), labels, reduction="none"), "mode": "none"}

    linear, plan, genomes = planned(partial(Losses, 8, 4), [])
    labels = torch.arange(5) % 4
    out = gb.materialize_many(plan, genomes, linear)(INDEX, X, labels=labels)
    nets = [gb.materialize(plan, g, linear) for g in genomes]
    rows = [nets[i](X[b : b + 1], labels[b : b + 1])["losses"] for b, i in enumerate(INDEX.tolist())]
    assert_close(out["losses"], torch.cat(rows))
    assert out["mode"] == "none"


def test_caches() -> None:
    pnet, plan, genomes = planned(GPT2, [])
    net, nets = gb.materialize_many(plan, genomes, pnet), [gb.materialize(plan, g, pnet) for g in genomes]
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.partition(".")[0]) < 5:
        # Layers are given positions, which have no rows, so that the cache is made inside of what runs row by row.
        with pytest.raises(TypeError, match="values as outputs, got a DynamicCache as .*: switch it off"):
            net(INDEX, TOKENS)
        return
    out = net(INDEX, TOKENS)
    rows = [nets[i](TOKENS[b : b + 1]) for b, i in enumerate(INDEX.tolist())]
    assert_close(out.logits, torch.cat([row.logits for row in rows]), 1e-10)
    keys = [row.past_key_values.layers[0].keys for row in rows]
    assert_close(out.past_key_values.layers[0].keys, torch.cat(keys), 1e-10)
    with pytest.raises(TypeError, match=r"values, got a DynamicCache as inputs\[1\]\['past_key_values'\]: pass"):
        net(INDEX, TOKENS, past_key_values=out.past_key_values)
    pnet, plan, genomes = planned(MAMBA, [])
    with pytest.raises(TypeError, match="values as outputs, got a DynamicCache as .*: switch it off"):
        gb.materialize_many(plan, genomes, pnet)(INDEX, TOKENS)


def test_what_a_row_alone_refuses_is_raised() -> None:
    pnet, plan, genomes = planned(Sorting, [])
    with pytest.raises((ValueError, RuntimeError), match="expected an input with 8|shapes cannot be multiplied"):
        gb.materialize_many(plan, genomes, pnet)(INDEX, X[:, :7])


def test_random_rows_run_one_by_one() -> None:
    class Random(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.dropout(super().forward(input), 0.5)

    pnet, plan, genomes = planned(partial(Random, 8, 4), [])
    net = gb.materialize_many(plan, genomes, pnet)
    with pytest.warns(UserWarning, match="rows run one by one, as vmap cannot run the p-net: a batch gives other"):
        net(INDEX, X)
    assert not net.row_wise


@pytest.mark.parametrize("path", ["", "0"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_hooks_of_modules_are_called_once_for_each_row(path: str) -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
        net.get_submodule(path).register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
        net.get_submodule(path).register_forward_hook(lambda layer, args, out: out.mul(2))
        return nn.utils.weight_norm(net[1]) and net

    with pytest.warns(FutureWarning, match="weight_norm"):
        pnet, plan, genomes = planned(make, [])
    net = checked(pnet, plan, genomes, X)
    assert net.row_wise == ["0", "1"]
