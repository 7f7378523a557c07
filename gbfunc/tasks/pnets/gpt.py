"""Transformers: GPT (Radford et al., 2019; sizes as in nanoGPT), and ViT for small images (Dosovitskiy et al., 2021).

Suffixes: B examples of a batch, L positions, E width, V tokens of the vocabulary, H heads, D width of a head; C
channels, h rows and w columns of an image, K classes.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.hypernets import constant, periodic
from gbfunc.tasks.pnets import base
from gbfunc.tasks.pnets.base import BLOCKS, Interface, PlanOptions, PNet

_STD = 0.02  # initial standard deviation of weights (GPT-2)
_PLAIN_NORMS = 30_000  # with fewer genome parameters, the weights of norms are fixed at 1, and the biases at 0


class Block(nn.Module):
    """A block of a GPT: causal self-attention, then an MLP, both with a layer norm in front and a residual path."""

    def __init__(self, width: int, heads: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)

    def forward(self, x_BLE: Tensor) -> Tensor:
        packed = self.qkv(self.attention_norm(x_BLE)).unflatten(-1, (3, self.heads, -1))
        q_BHLD, k_BHLD, v_BHLD = packed.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q_BHLD, k_BHLD, v_BHLD, is_causal=True)
        x_BLE = x_BLE + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BLE + self.down(F.gelu(self.up(self.mlp_norm(x_BLE))))


class GPT(nn.Module):
    """A decoder-only language model with pre-norm blocks and tied embeddings: [B, L] -> logits [B, L, V].

    `context` is the longest sequence, `heads` divides `width`, and `hidden` is the width inside the MLPs.
    """

    def __init__(
        self, vocabulary: int, context: int, layers: int, width: int, heads: int, hidden: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, hidden, bias) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                # Blocks add 2 * layers outputs to the residual stream. Smaller weights limit its variance (GPT-2).
                deep = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=_STD / math.sqrt(2 * layers) if deep else _STD)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLE = self.tokens(tokens_BL) + self.positions.weight[: tokens_BL.shape[1]]
        return self.head(self.norm(self.blocks(x_BLE)))


def gpt(
    interface: Interface,
    *,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    hidden: int | None = None,
    bias: bool = False,
) -> PNet:
    """Describe a `GPT` for a text task. The defaults are nanoGPT's for a CPU; `hidden` is 4 x `width` by default."""
    base.check_reads("gpt", interface, "text", 1)
    # Keep None as `hidden` in the configuration, so that `hidden` changes with `width`.
    config = dict(layers=layers, width=width, heads=heads, hidden=hidden, bias=bias)
    hidden = 4 * width if hidden is None else hidden
    base.check_heads("gpt", width, heads)
    make = partial(GPT, interface.outputs, *interface.inputs, layers, width, heads, hidden, bias)
    plan, widths = partial(gpt_plan, interface, width), {"width": width, "hidden": hidden}
    return base.family("gpt", gpt, interface, make, plan, config, widths, heads)


def gpt_plan(interface: Interface, width: int, genome_params: float) -> PlanOptions:
    """Return plan options for a `GPT`. All blocks share code weights. Position embeddings are generated, not direct."""
    # In small genomes, fix the norms: the next layers' weights can scale the outputs, which leaves room for more sines.
    positions = (r"^positions\.weight$", periodic(min(*interface.inputs, width), frequency=2.5))
    plain = ((r"norm\.weight$", constant(1.0)), (r"norm\.bias$", constant(0.0)))
    rules = (positions, *(plain if genome_params < _PLAIN_NORMS else ()))
    return BLOCKS._replace(rules=rules, max_tile=128 if genome_params < 40_000 else 64)


class ViT(nn.Module):
    """Patches with learned positions, pre-norm blocks, and the mean over patches: images [B, C, h, w] -> [B, K].

    `patch` divides rows and columns of the images, `heads` divides `width`, and `hidden` is the width inside the MLPs.
    """

    def __init__(self, interface: Interface, patch: int, layers: int, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        channels, rows, cols = interface.inputs
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(rows * cols // patch**2, width) * 0.02)
        block = nn.TransformerEncoderLayer(width, heads, hidden, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, interface.outputs)
        for parameter in self.blocks.parameters():
            if parameter.ndim > 1:  # Draw again, because `TransformerEncoder` copies one layer.
                nn.init.xavier_uniform_(parameter)

    def forward(self, x_BChw: Tensor) -> Tensor:
        x_BLE = self.patches(x_BChw).flatten(2).mT + self.positions
        return self.head(self.blocks(x_BLE).mean(1))


def vit(
    interface: Interface, *, patch: int = 4, layers: int = 6, width: int = 64, heads: int = 4, hidden: int | None = None
) -> PNet:
    """Describe a `ViT` for an image task; `hidden` is twice the width by default."""
    base.check_reads("vit", interface, "images", 3)
    config = dict(patch=patch, layers=layers, width=width, heads=heads, hidden=hidden)
    hidden = 2 * width if hidden is None else hidden
    base.check_heads("vit", width, heads)
    _, rows, cols = interface.inputs
    if rows % patch or cols % patch:
        raise ValueError(f"patch of vit must divide the images of {rows} x {cols}, got {patch}")
    plan, widths = BLOCKS._replace(include=(r"^positions$",)), {"width": width, "hidden": hidden}
    make = partial(ViT, interface, patch, layers, width, heads, hidden)
    return base.family("vit", vit, interface, make, plan, config, widths, heads)
