"""Operations of the stock layers of torch, with the options that change what is done with a weight."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.operation_layers import INCLUDE, call, layer
from tests.support.operations import Forward, Operation


def first_output(net: Any, x: Tensor) -> Any:
    return net.a(x)[0]


def self_attention(net: Any, x: Tensor, **options: Any) -> Any:
    return tuple(out for out in net.a(x, x, x, **options) if out is not None)


class Modulated(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        n, c, h, w = input.shape
        weight = self.weight * input.mean((2, 3))[:, None, :, None, None]
        out = F.conv2d(input.reshape(1, n * c, h, w), weight.flatten(0, 1), padding=1, groups=n)
        return out.reshape(n, -1, h, w)


def attention(use: Forward = self_attention, embed: int = 4, **options: Any) -> Operation:
    return layer(lambda: nn.MultiheadAttention(embed, 2, **{"batch_first": True, **options}), 3, embed, use=use)


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(4, 2, 6, **{"dropout": 0.0, "batch_first": True, **options})


def embedding(use: Forward = call, **options: Any) -> Operation:
    return layer(lambda: nn.Embedding(7, 5, **options), 3, use=use, tokens=7, options=INCLUDE)


def bag(use: Forward = call, **options: Any) -> Operation:
    return layer(lambda: nn.EmbeddingBag(7, 5, **options), 3, use=use, tokens=7, options=INCLUDE)


def causal(net: Any, x: Tensor) -> Any:
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=x.dtype)
    return self_attention(net, x, attn_mask=mask, is_causal=True, need_weights=False)


def padded(net: Any, x: Tensor) -> Any:
    hidden = torch.tensor([False, False, True]).expand(len(x), 3)
    return self_attention(net, x, key_padding_mask=hidden, average_attn_weights=False)


def cross(net: Any, x: Tensor) -> Any:
    return net.a(x, x.sin()[:, :2], x.cos()[:, :2])


def _decoder(net: Any, x: Tensor) -> Tensor:
    return net.a(x, x.sin())


class _ToComplex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x.sin(), x.cos())


def _hook_first(module: Any) -> nn.Module:
    module.linear1.register_forward_hook(lambda m, args, out: out * 2)
    return module


CONV = [
    ("conv1d", lambda: nn.Conv1d(3, 5, 3), (3, 7)),
    ("conv1d_circular", lambda: nn.Conv1d(3, 5, 3, padding=1, padding_mode="circular"), (3, 7)),
    ("conv2d", lambda: nn.Conv2d(3, 5, 3, stride=2, padding=1), (3, 5, 5)),
    ("conv2d_grouped", lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 4, 4)),
    ("conv2d_depthwise", lambda: nn.Conv2d(4, 8, 3, groups=4, padding="valid"), (4, 4, 4)),
    ("conv2d_reflect", lambda: nn.Conv2d(2, 5, (3, 2), padding=1, padding_mode="reflect"), (2, 4, 4)),
    ("conv2d_modulated", lambda: Modulated(3, 5, 3), (3, 4, 4)),
    ("conv3d_replicate", lambda: nn.Conv3d(2, 4, 2, padding=1, padding_mode="replicate", groups=2), (2, 3, 3, 3)),
    ("conv_transpose2d", lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), (3, 3, 3)),
    ("conv_transpose2d_grouped", lambda: nn.ConvTranspose2d(4, 4, 2, groups=2), (4, 3, 3)),
]

STOCK: Mapping[str, Operation] = {
    **{name: layer(make, *shape) for name, make, shape in CONV},
    "conv_weight_read": layer(
        lambda: nn.Conv2d(3, 5, 3), 3, 4, 4, use=lambda net, x: (net.a(x), F.conv2d(x, net.a.weight.flip(2, 3)))
    ),
    "conv_tied_decoder": layer(
        lambda: nn.Conv2d(3, 5, 3), 3, 4, 4, use=lambda net, x: F.conv_transpose2d(net.a(x).tanh(), net.a.weight)
    ),
    "linear_without_bias": layer(lambda: nn.Linear(6, 5, bias=False)),
    "linear_vector": layer(lambda: nn.Linear(6, 5), use=lambda net, x: torch.stack([net.a(row) for row in x])),
    "bilinear": layer(lambda: nn.Bilinear(6, 6, 5), use=lambda net, x: net.a(x, x.sin()), options=INCLUDE),
    "embedding": embedding(),
    "embedding_padding": embedding(padding_idx=2),
    "embedding_max_norm": embedding(max_norm=0.5),
    "embedding_indexed": embedding(lambda net, x: net.a(x) + net.a.weight[x]),
    "embedding_tied_head": embedding(lambda net, x: F.linear(net.a(x).tanh(), net.a.weight)),
    "embedding_bag_max": bag(mode="max", padding_idx=2),
    "embedding_bag_weighted": bag(lambda net, x: net.a(x, per_sample_weights=x.double() / 3), mode="sum"),
    "lstm": layer(lambda: nn.LSTM(3, 4, batch_first=True), 3, 3, use=first_output, options=INCLUDE),
    "gru_bidirectional": layer(
        lambda: nn.GRU(3, 4, batch_first=True, bidirectional=True), 3, 3, use=first_output, options=INCLUDE
    ),
    "rnn_weight_read": layer(
        lambda: nn.RNN(3, 4, batch_first=True),
        3,
        3,
        use=lambda net, x: (net.a(x)[0], net.a.weight_hh_l0.sin()),
        options=INCLUDE,
    ),
    "lstm_cell": layer(lambda: nn.LSTMCell(6, 4), use=lambda net, x: net.a(x, net.a(x)), options=INCLUDE),
    "attention": attention(),
    "attention_sequence_first": attention(batch_first=False, use=lambda net, x: self_attention(net, x.transpose(0, 1))),
    "attention_causal": attention(causal),
    "attention_padded": attention(padded),
    "attention_cross": attention(cross),
    "attention_kdim_vdim": attention(lambda net, x: net.a(x, x[..., :3], x[..., :2]), kdim=3, vdim=2),
    "attention_bias_kv": attention(add_bias_kv=True),
    "attention_reads_in_proj": attention(lambda net, x: (net.a(x, x, x)[0], x @ net.a.in_proj_weight[:4].t())),
    "encoder_layer": layer(encoder_layer, 3, 4),
    "encoder_layer_eval": layer(encoder_layer, 3, 4, train=False),
    "encoder_layer_hooked": layer(lambda: _hook_first(encoder_layer()), 3, 4, train=False),
    "decoder_layer": layer(lambda: nn.TransformerDecoderLayer(4, 2, 6, 0.0, batch_first=True), 3, 4, use=_decoder),
    "transformer": layer(lambda: nn.Transformer(4, 2, 1, 1, 6, 0.0, batch_first=True), 3, 4, use=_decoder, slow=True),
    "batch_norm": layer(lambda: nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5)), 2, 4, 4),
    "batch_norm_generated": layer(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)), options={"include": ["."]}
    ),
    "norms_generated": layer(
        lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4), nn.PReLU(4)),
        options={"include": ["."]},
    ),
    "dropout": layer(lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5), nn.Linear(5, 3)), random=True),
    "attention_dropout": attention(dropout=0.5)._replace(random=True),
    "lstm_dropout": layer(
        lambda: nn.LSTM(3, 4, 2, dropout=0.5, batch_first=True), 3, 3, use=first_output, options=INCLUDE, random=True
    ),
    "complex_direct": layer(
        lambda: nn.Sequential(nn.Linear(6, 5), _ToComplex(), nn.Linear(5, 3, dtype=torch.complex64)),
        dtype=torch.float32,
        tolerance=1e-5,
    ),
    "complex_conv": layer(
        lambda: nn.Sequential(nn.Conv1d(2, 3, 2), _ToComplex(), nn.Conv1d(3, 2, 2, dtype=torch.complex64)),
        2,
        5,
        dtype=torch.float32,
        tolerance=1e-5,
    ),
    "bfloat16": layer(
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), dtype=torch.bfloat16, tolerance=0.03
    ),
    "float16": layer(lambda: nn.Linear(6, 5), dtype=torch.float16, tolerance=0.005),
}
