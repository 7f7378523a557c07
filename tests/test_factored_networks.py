"""Unmodified networks on lazy weights: the same output and gradients, and no more memory than promised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn
from torch.func import functional_call

from gbfunc.factored import lazy_pays
from gbfunc.lab.bench.live import LiveBytes
from tests.support.lazy_weights import KINDS, Conv1D, assert_close, generated, vectors


class Tied(nn.Module):
    """Embedding and output layer share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.embed(index).tanh())


class Cross(nn.Module):
    """Attention with other keys than values, and its attention weights."""

    def __init__(self, causal: bool = False, **options: Any) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.3, **options)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype) if self.causal else None
        mixed, weights = self.attend(
            x, x.sin(), x.cos(), attn_mask=mask, is_causal=self.causal, average_attn_weights=False
        )
        return mixed.sum() + weights.square().sum()


class Masked(nn.Module):
    """A Transformer encoder with both masks."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length, dtype=x.dtype)
        padding = torch.zeros(x.shape[0], length, dtype=torch.bool)
        padding[0, -1] = True
        if self.mask == "causal":
            return self.encoder(x, mask=causal, is_causal=True)
        if self.mask == "both":
            return self.encoder(x, mask=causal < 0, src_key_padding_mask=padding)
        return self.encoder(x, src_key_padding_mask=padding if self.mask == "padding" else None)


# net, input, {weight: (tile rows, tile columns)}, the operations that need the dense weight
NETS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, tuple[int, int]], set[str]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 5, bias=False)),
        vectors(4, 7),
        {"0.weight": (1, 1), "2.weight": (2, 3)},
        set(),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"),
            nn.BatchNorm2d(6, track_running_stats=False),
            nn.ReLU(),
            nn.Conv2d(6, 4, 1),
        ),
        vectors(2, 3, 6, 6),
        {"0.weight": (1, 1), "3.weight": (2, 2)},
        set(),
    ),
    "grouped_conv": (
        lambda: nn.Conv1d(4, 6, 3, groups=2),
        vectors(2, 4, 9),
        {"weight": (1, 1)},
        {"conv1d"},
    ),
    "encoder": (
        lambda: Masked("none"),
        vectors(2, 5, 8),
        {
            "encoder.layers.0.self_attn.in_proj_weight": (3, 1),
            "encoder.layers.1.self_attn.in_proj_weight": (1, 1),
            "encoder.layers.0.self_attn.out_proj.weight": (1, 2),
            "encoder.layers.1.linear1.weight": (1, 1),
            "encoder.layers.1.linear2.weight": (2, 2),
        },
        set(),
    ),
    "causal": (
        lambda: Masked("causal"),
        vectors(2, 5, 8),
        {"encoder.layers.0.self_attn.in_proj_weight": (1, 1)},
        set(),
    ),
    "padding": (
        lambda: Masked("padding"),
        vectors(2, 5, 8),
        {"encoder.layers.0.self_attn.in_proj_weight": (1, 1), "encoder.layers.1.linear1.weight": (1, 1)},
        set(),
    ),
    "both_masks": (
        lambda: Masked("both"),
        vectors(2, 5, 8),
        {"encoder.layers.0.self_attn.in_proj_weight": (1, 1)},
        set(),
    ),
    "cross": (
        Cross,
        vectors(5, 2, 8),
        {"attend.in_proj_weight": (3, 2), "attend.out_proj.weight": (1, 1)},
        set(),
    ),
    "cross_causal": (lambda: Cross(causal=True), vectors(5, 2, 8), {"attend.in_proj_weight": (3, 1)}, set()),
    "cross_cut": (Cross, vectors(5, 2, 8), {"attend.in_proj_weight": (2, 2)}, {"chunk"}),
    "cross_bias_kv": (
        lambda: Cross(add_bias_kv=True),
        vectors(5, 2, 8),
        {"attend.in_proj_weight": (3, 1)},
        {"multi_head_attention_forward"},
    ),
    "embedding": (
        lambda: nn.Embedding(10, 6, padding_idx=2),
        torch.tensor([[1, 2, 3], [2, 2, 9]]),
        {"weight": (1, 2)},
        set(),
    ),
    "embedding_norm": (
        lambda: nn.Embedding(10, 6, max_norm=0.5),
        torch.tensor([[1, 2, 3], [2, 2, 9]]),
        {"weight": (1, 2)},
        {"embedding"},
    ),
    "lstm": (
        lambda: nn.LSTM(4, 5),
        vectors(3, 2, 4),
        {"weight_ih_l0": (1, 1), "weight_hh_l0": (2, 1)},
        {"lstm"},
    ),
    "conv1d_transposed": (
        lambda: nn.Sequential(Conv1D(9, 4), nn.GELU(), Conv1D(4, 9)),
        vectors(2, 3, 4),
        {"0.weight": (2, 2), "2.weight": (1, 1)},
        set(),
    ),
    "conv_transpose": (
        lambda: nn.ConvTranspose2d(3, 4, 2, stride=2),
        vectors(2, 3, 4, 4),
        {"weight": (2, 1)},
        {"conv_transpose2d"},
    ),
    "tied": (Tied, torch.tensor([[1, 2, 3], [2, 2, 9]]), {"embed.weight": (1, 2)}, set()),
}


def run_net(
    kind: str,
    case: str,
    train: bool,
    dtype: torch.dtype,
    report: Counter[tuple[str, str]] | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Output and gradients of a net with generated weights of one kind."""
    torch.manual_seed(0)
    build, x, tiles, _ = NETS[case]
    net = build().to(dtype).train(train)
    x = x.to(dtype) if x.is_floating_point() else x
    weights, leaves = generated(kind, net, tiles, report)
    torch.manual_seed(1)  # dropout
    output = functional_call(net, weights, (x,), strict=True)
    output = output[0] if isinstance(output, tuple) else output
    return output, list(torch.autograd.grad(output.sin().sum(), leaves, allow_unused=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("case", "train"),
    [(case, True) for case in NETS] + [("encoder", False), ("padding", False), ("cross", False)],
)
def test_networks(case: str, kind: str, train: bool) -> None:
    report: Counter[tuple[str, str]] = Counter()
    expected, wanted = run_net("dense", case, train, torch.float64)
    actual, gradients = run_net(kind, case, train, torch.float64, report)
    assert_close(actual, expected)
    for gradient, target in zip(gradients, wanted, strict=True):
        assert_close(gradient, target)
    densified = {operation for _, operation in report}
    # Made again from the same inputs, any rows and any groups are at hand.
    always_at_hand = {"chunk", "conv1d"} if kind == "remat" else set()
    assert densified == NETS[case][3] - always_at_hand


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", ["mlp", "conv", "encoder", "conv1d_transposed"])
def test_networks_float32(case: str, kind: str) -> None:
    expected, wanted = run_net("dense", case, True, torch.float32)
    actual, gradients = run_net(kind, case, True, torch.float32)
    assert_close(actual, expected, 1e-5)
    # Some gradients are zero but for rounding (a bias before a normalisation): compare with the largest.
    largest = max(float(target.abs().max()) for target in wanted if target is not None)
    for gradient, target in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, target, rtol=1e-5, atol=1e-5 * max(1.0, largest))


@pytest.mark.parametrize("kind", KINDS)
def test_no_grad_keeps_no_graph(kind: str) -> None:
    net = NETS["encoder"][0]().double().eval()
    x, tiles = NETS["encoder"][1], NETS["encoder"][2]
    with torch.no_grad():
        expected = functional_call(net, generated("dense", net, tiles)[0], (x,), strict=True)
        actual = functional_call(net, generated(kind, net, tiles)[0], (x,), strict=True)
    assert_close(actual, expected)
    assert not actual.requires_grad


# Memory and cost.


def peak_live_weights(kind: str, layers: int, width: int) -> int:
    """Most weight-sized storages alive at once in a forward and backward pass of a deep MLP."""
    net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    x = torch.randn(4, width)
    with LiveBytes(4 * width * width) as live:
        weights, leaves = generated(kind, net, {f"{i}.weight": (1, 1) for i in range(layers)})
        loss = functional_call(net, weights, (x,), strict=True).square().sum()
        factors = [leaf for leaf in leaves if leaf.ndim == 4]
        torch.autograd.grad(loss, factors)
    return live.peak_tensors


def test_remat_keeps_one_layer_of_weights() -> None:
    materialised = peak_live_weights("dense", layers=24, width=48)
    assert materialised >= 24
    assert peak_live_weights("remat", layers=24, width=48) <= materialised / 8
    assert peak_live_weights("factored", layers=24, width=48) == 0


@settings(deadline=None)
@given(
    rows=st.integers(1, 5000),
    cols=st.integers(1, 5000),
    k=st.integers(1, 200),
    batch_rows=st.integers(1, 100_000),
)
def test_lazy_pays_less_with_more_rank(rows: int, cols: int, k: int, batch_rows: int) -> None:
    if lazy_pays(rows, cols, k + 1, (1, 1), batch_rows):
        assert lazy_pays(rows, cols, k, (1, 1), batch_rows)


def test_lazy_pays_where_it_was_measured() -> None:
    assert lazy_pays(4096, 4096, 64, (1, 1), 256)
    assert lazy_pays(2048, 2048, 64, (1, 1), 256)
    # Tile 128 with H = 32: as many FLOPs as dense, and the thin product on top.
    assert not lazy_pays(1024, 1024, 64, (8, 8), 100_000)
    # One image against a large layer: forming the weight costs more than both applications.
    assert lazy_pays(1024, 1024, 64, (8, 8), 1)
