"""The picture of the idea, `idea.png`: `python notebooks/figures/idea.py`. The weights in it are generated ones."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

import gbfunc as gb
from gbfunc.plots import PALETTE, WEIGHTS

COLORS = PALETTE[:4]
HEIGHTS = (33.4, 27.5, 21.6, 15.7)
"""Of the four g-nets."""


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str, **style: Any) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=color, lw=1.6, **style))


def genes(ax: Axes, x: float, y: float, color: str) -> None:
    """The parameters of a g-net: cells in its colour, of several strengths."""
    strengths = np.random.default_rng(int(y)).uniform(0.25, 1.0, 8)
    for i, alpha in enumerate(strengths):
        ax.add_patch(Rectangle((x + 1.45 * i, y - 1.3), 1.45, 2.6, fc=color, alpha=alpha, ec="white", lw=0.8))


def network(ax: Axes, layers: list[tuple[float, list[float]]], color: str, radius: float, line: float) -> None:
    """Units in layers at (x, [y, ...]), each joined to all of the next."""
    for (x, ys), (x_next, ys_next) in pairwise(layers):
        for y in ys:
            for y_next in ys_next:
                ax.plot([x, x_next], [y, y_next], color=color, lw=line, alpha=0.55, zorder=1)
    for x, ys in layers:
        for y in ys:
            ax.add_patch(Circle((x, y), radius, fc="white", ec=color, lw=1.5, zorder=2))


def weights() -> np.ndarray:
    """A matrix [16, 16] of four tiles [4, 16], generated; each on one scale."""
    pnet = torch.nn.Linear(16, 16)
    plan = gb.make_plan(pnet, gb.periodic(features=2), max_tile=(4, 16))
    tiles = gb.generate(plan, gb.init_genome(plan, pnet, seed=5))["weight"].numpy().reshape(4, 4, 16)
    return (tiles / np.abs(tiles).max((1, 2), keepdims=True)).reshape(16, 16)


figure = Figure(figsize=(10.0, 4.4))
ax = figure.add_axes((0, 0, 1, 1), xlim=(0, 100), ylim=(0, 44))
ax.set_axis_off()
for x, title, text in (
    (9.3, "genome", "trained, saved, sent:\nkilobytes"),
    (34.5, "g-nets", "tiny networks: the place of\na weight in, its value out"),
    (62.5, "weights", "generated tile by tile,\none g-net for each tile"),
    (88.5, "p-net", "any network of yours:\nmegabytes"),
):
    ax.text(x, 40.8, title, ha="center", va="center", fontsize=18, weight="bold")
    ax.text(x, 9.3, text, ha="center", va="center", fontsize=12, linespacing=1.25)

left, bottom, width, step = 52.5, 12.75, 20.0, 5.9
for color, y in zip(COLORS, HEIGHTS, strict=True):
    genes(ax, 3.5, y, color)
    arrow(ax, (15.8, y), (24.6, y), color)
    network(ax, [(27, [y - 1.1, y + 1.1]), (34, [y - 1.9, y, y + 1.9]), (41, [y])], color, 0.62, 1.0)
    arrow(ax, (42.4, y), (left - 0.4, y), color)
    ax.add_patch(
        Rectangle((left + 0.2, y - step / 2 + 0.2), width - 0.4, step - 0.4, fc="none", ec=color, lw=3, zorder=3)
    )
ax.imshow(weights(), cmap=WEIGHTS, extent=(left, left + width, bottom, bottom + 4 * step), aspect="auto", zorder=0)

arrow(ax, (left + width + 0.8, 24.5), (79.6, 24.5), "black")
network(
    ax,
    [
        (82, [17.5 + 3.5 * i for i in range(5)]),
        (88.5, [14.9 + 3.2 * i for i in range(7)]),
        (95, [21.0, 24.5, 28.0]),
    ],
    "#333333",
    0.95,
    0.6,
)
arrow(ax, (88.5, 3.2), (9.3, 3.2), "#444444", linestyle=(0, (4, 2)))
words = "the loss's gradient: one graph back through weights and g-nets to the genome"
ax.text(49, 3.2, words, ha="center", va="center", fontsize=13, bbox={"fc": "white", "ec": "none", "pad": 4})
ax.set(xlim=(0, 100), ylim=(0, 44))
figure.savefig(Path(__file__).with_suffix(".png"), dpi=160)
