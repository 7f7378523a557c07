"""GPT: a decoder-only Transformer with pre-norm blocks and tied embeddings (Radford et al., 2019; sizes as in nanoGPT).

Suffixes: B examples of a batch, L positions, E width, V tokens of the vocabulary, H heads, D width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.hypernets import constant, periodic
from gbfunc.tasks.pnets.base import Interface, PlanOptions, PNet, Shapes, check_options, scaled_width

_STD = 0.02
"""Initial deviation of weights (GPT-2)."""

_PLAIN_NORMS = 30_000
"""Parameters of a genome below which norms have none."""


class Block(nn.Module):
    """Causal self-attention and an MLP, each on a normalised residual stream."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x_BLE: Tensor) -> Tensor:
        """[B, L, E] -> [B, L, E]."""
        packed = self.qkv(self.attention_norm(x_BLE)).unflatten(-1, (3, self.heads, -1))
        q_BHLD, k_BHLD, v_BHLD = packed.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, dropout_p=dropout, is_causal=True)
        x_BLE = x_BLE + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)
        hidden = self.down(F.gelu(self.up(self.mlp_norm(x_BLE))))
        return x_BLE + F.dropout(hidden, self.dropout, self.training)


class GPT(nn.Module):
    """A language model: logits of the next token at every position.

    Args:
        vocabulary: tokens.
        context: longest sequence.
        layers: blocks.
        width: width of the residual stream.
        heads: attention heads, a divisor of `width`.
        hidden: units of each block's MLP.
        dropout: part of the activations that are dropped in training.
        bias: whether the blocks' linear layers have biases.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int,
        width: int,
        heads: int,
        hidden: int,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, hidden, dropout, bias) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # Each block adds twice to the residual stream, whose variance is to stay near 1 (GPT-2).
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=_STD / math.sqrt(2 * layers) if deep else _STD)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """[B, L] -> [B, L, V]."""
        x_BLE = self.dropout(self.tokens(tokens_BL) + self.positions.weight[: tokens_BL.shape[1]])
        return self.head(self.norm(self.blocks(x_BLE)))


def gpt(
    interface: Interface,
    *,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    hidden: int | None = None,
    dropout: float = 0.0,
    bias: bool = False,
) -> PNet:
    """`GPT` for a text task, its options as there: by default nanoGPT's size for a CPU, `hidden` 4 times the width."""
    if not interface.tokens:
        raise ValueError("the p-net gpt reads text: take it for a text task")
    # What is left open goes on following the width, when a narrower one is made from this configuration.
    asked, hidden = hidden, 4 * width if hidden is None else hidden
    check_options("gpt", layers=layers, width=width, heads=heads, hidden=hidden, dropout=dropout)
    if type(bias) is not bool:
        raise ValueError(f"bias of gpt must be true or false, got {bias!r}")
    (context,), vocabulary = interface.inputs, interface.outputs

    config: Mapping[str, Any] = dict(layers=layers, width=width, heads=heads, hidden=asked, dropout=dropout, bias=bias)
    again = partial(gpt, interface, **config)

    def fitted(shapes: Shapes) -> PNet:
        try:
            widths = {"width": shapes["norm.weight"][0], "hidden": shapes["blocks.0.up.weight"][0]}
        except (KeyError, IndexError):
            raise ValueError("expected the parameters of a GPT (blocks.0.up.weight, norm.weight, ...)") from None
        depth = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
        return again(layers=depth, bias="blocks.0.up.bias" in shapes, **widths)

    return PNet(
        name="gpt",
        make=lambda: GPT(vocabulary, context, layers, width, heads, hidden, dropout, bias),
        plan=lambda genome_params: gpt_plan(interface, width, genome_params),
        scaled=lambda f: again(width=scaled_width(width, f, heads), hidden=scaled_width(hidden, f, heads)),
        fitted=fitted,
        config=config,
        label=f"gpt, {layers} layers of {width}",
    )


def gpt_plan(interface: Interface, width: int, genome_params: float) -> PlanOptions:
    """Blocks share code weights; positions are generated too, and norms direct in large genomes alone.

    In small ones they have neither scales nor shifts, which the layers after them take over: more sines for the same.
    """
    (context,) = interface.inputs
    positions = ((r"^positions\.weight$", periodic(min(context, width), frequency=2.5)),)
    plain = ((r"norm\.weight$", constant(1.0)), (r"norm\.bias$", constant(0.0)))
    return PlanOptions(
        hypernet=periodic(share="layers"),
        rules=positions + (plain if genome_params < _PLAIN_NORMS else ()),
        max_tile=128 if genome_params < 40_000 else 64,
    )
