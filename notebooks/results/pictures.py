"""Draw the first picture of each page of results from `points.json`: `python notebooks/results/pictures.py`.

The pictures have no background and use colours of middle lightness, so that they are readable on light and dark pages.
"""

import json
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

HERE = Path(__file__).parent
INK, OWN, OTHERS = "#7d8790", ("#009688", "#2f8fd0", "#7a6fd0"), ("#d9702b", "#c2557f", "#b08b1e", "#8a6d5c", "#8f8f8f")
MARKERS = "so^Dv<>"


def size(x: float, _: int) -> str:
    """Format a number of bytes: `1500` becomes `1.5 kB`."""
    power = 0 if x < 1000 else 1 if x < 1e6 else 2
    return f"{x / 1000**power:g} {('B', 'kB', 'MB')[power]}"


def draw(axes: Axes, about: dict[str, Any]) -> None:
    """Draw all series of a picture. The lines of gbfunc's genomes are thicker than the other lines."""
    counts = {True: 0, False: 0}
    for series in about["series"]:
        own = series.get("own", False)
        i = counts[own]
        counts[own] += 1
        xs, ys, spreads = zip(*([*point, 0.0][:3] for point in series["points"]), strict=True)
        if about.get("error"):
            ys = [100 - y for y in ys]
        axes.errorbar(
            xs,
            ys,
            spreads,
            label=series["name"],
            color=(OWN if own else OTHERS)[i % (3 if own else 5)],
            marker="o" if own else MARKERS[i % len(MARKERS)],
            markersize=7 if own else 5.5,
            linewidth=2.2 if own else 1.1,
            linestyle="-" if own else ":",
            capsize=2,
            zorder=3 if own else 2,
        )
    axes.set_xscale("log", base=2 if about.get("log_y") else 10)
    plain = about.get("log_y") or about.get("numbers")
    axes.xaxis.set_major_formatter(FuncFormatter((lambda x, _: f"{x:,g}") if plain else size))
    axes.xaxis.set_minor_locator(NullLocator())
    ticks = about["ticks"]
    if about.get("error") or about.get("log_y"):
        axes.set_yscale("log")
        axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks([100 - y for y in ticks] if about.get("error") else ticks, [f"{y:g}" for y in ticks])
    if about.get("error"):
        axes.invert_yaxis()
    axes.set_xlabel(about["x"], color=INK)
    axes.set_ylabel(about["y"], color=INK)
    axes.tick_params(colors=INK)
    axes.grid(color=INK, alpha=0.25, linewidth=0.6)
    for name, spine in axes.spines.items():
        spine.set(visible=name in ("left", "bottom"), color=INK)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9, loc="upper left", bbox_to_anchor=(1, 1))


def main() -> None:
    """Write `../figures/results_NAME.png` for each picture."""
    for name, about in json.loads((HERE / "points.json").read_text(encoding="utf-8")).items():
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        draw(figure.add_subplot(), about)
        figure.savefig(HERE.parent / "figures" / f"results_{name}.png", dpi=110, transparent=True)


if __name__ == "__main__":
    main()
