"""A small vision transformer (Dosovitskiy et al., 2021) for small images.

Suffixes: B examples of a batch, C channels, h rows, w columns, L patches, E width, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gbfunc.tasks.pnets.base import BLOCKS, Interface, PNet, Shapes, check_options, scaled_width


class ViT(nn.Module):
    """Patches, learned positions, pre-norm blocks of `nn.TransformerEncoder`, and the mean over the patches.

    Args:
        inputs: channels, rows and columns of an image.
        classes: of the output.
        patch: side of a patch, a divisor of rows and columns.
        layers: blocks.
        width: of the residual stream.
        heads: of the attention, a divisor of `width`.
        hidden: units of each block's MLP.
        dropout: part of the activations that are dropped in training.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        classes: int,
        patch: int,
        layers: int,
        width: int,
        heads: int,
        hidden: int,
        dropout: float,
    ) -> None:
        super().__init__()
        channels, rows, cols = inputs
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.positions = nn.Parameter(torch.randn(rows * cols // patch**2, width) * 0.02)
        block = nn.TransformerEncoderLayer(width, heads, hidden, dropout, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)
        for parameter in self.blocks.parameters():
            if parameter.ndim > 1:  # The layers of `TransformerEncoder` start as copies of one.
                nn.init.xavier_uniform_(parameter)

    def forward(self, x_BChw: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, K]."""
        x_BLE = self.patches(x_BChw).flatten(2).mT + self.positions
        return self.head(self.blocks(x_BLE).mean(1))


def vit(
    interface: Interface,
    *,
    patch: int = 4,
    layers: int = 6,
    width: int = 64,
    heads: int = 4,
    hidden: int | None = None,
    dropout: float = 0.0,
) -> PNet:
    """`ViT` for an image task, its options as there; `hidden` is twice the width by default."""
    if interface.tokens or len(interface.inputs) != 3:
        raise ValueError("the p-net vit reads images: take it for an image task")
    asked, hidden = hidden, 2 * width if hidden is None else hidden
    sizes = dict(patch=patch, layers=layers, width=width, heads=heads)
    check_options("vit", **sizes, hidden=hidden, dropout=dropout)
    _, rows, cols = interface.inputs
    if rows % patch or cols % patch:
        raise ValueError(f"patch of vit must divide the images of {rows} x {cols}, got {patch}")
    config: Mapping[str, Any] = sizes | dict(hidden=asked, dropout=dropout)
    again = partial(vit, interface, **config)

    def fitted(shapes: Shapes) -> PNet:
        try:
            (hidden, width), patch = shapes["blocks.layers.0.linear1.weight"], shapes["patches.weight"][-1]
        except (KeyError, IndexError, ValueError):
            raise ValueError(
                "expected the parameters of a ViT (patches.weight, blocks.layers.0.linear1.weight, ...)"
            ) from None
        depth = len({name.split(".")[2] for name in shapes if name.startswith("blocks.layers.")})
        return again(patch=patch, layers=depth, width=width, hidden=hidden)

    return PNet(
        name="vit",
        make=lambda: ViT(interface.inputs, interface.outputs, **sizes, hidden=hidden, dropout=dropout),
        plan=lambda genome_params: BLOCKS._replace(include=(r"^positions$",)),
        scaled=lambda f: again(width=scaled_width(width, f, heads), hidden=scaled_width(hidden, f, heads)),
        fitted=fitted,
        config=config,
        label=f"vit, {layers} layers of {width}",
    )
