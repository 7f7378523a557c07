"""A small vision transformer (Dosovitskiy et al., 2021) for small images.

Suffixes: B examples of a batch, C channels, h rows, w columns, L patches, E width, K classes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gbfunc.tasks.pnets.base import BLOCKS, Interface, PNet, Shapes, check_options, check_reads, family, rows_of


class ViT(nn.Module):
    """Patches, learned positions, pre-norm blocks of `nn.TransformerEncoder`, and the mean over the patches.

    `patch` divides rows and columns of the images, `heads` divides `width`, and `hidden` are the units of an MLP.
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
    """Describe a `ViT` for an image task, its options as there; `hidden` is twice the width by default."""
    check_reads("vit", interface, "images", 3)
    sizes: dict[str, Any] = dict(patch=patch, layers=layers, width=width, heads=heads)
    asked, hidden = hidden, 2 * width if hidden is None else hidden
    check_options("vit", **sizes, hidden=hidden, dropout=dropout)
    _, rows, cols = interface.inputs
    if rows % patch or cols % patch:
        raise ValueError(f"patch of vit must divide the images of {rows} x {cols}, got {patch}")
    pnet = PNet(
        name="vit",
        make=partial(ViT, interface.inputs, interface.outputs, **sizes, hidden=hidden, dropout=dropout),
        plan=lambda genome_params: BLOCKS._replace(include=(r"^positions$",)),
        config=sizes | dict(hidden=asked, dropout=dropout),
        label=f"vit, {layers} layers of {width}",
    )

    def read(shapes: Shapes) -> dict[str, int]:
        rows_of(shapes, "patches.weight", 4)
        depth = sum(name.endswith(".linear1.weight") for name in shapes)
        hidden = rows_of(shapes, "blocks.layers.0.linear1.weight")
        width, _, _, patch = shapes["patches.weight"]
        return {"patch": patch, "layers": depth, "width": width, "hidden": hidden}

    return family(partial(vit, interface), pnet, {"width": width, "hidden": hidden}, read, heads)
