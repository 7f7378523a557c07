"""Measure how the time of a step grows with the size of p-nets and g-nets: `notebooks/results/growth.py [--quick]`.

The rows are for p-nets with two square layers of growing width, and for one width with a growing number of features. A
row has the exponent of the growth. The figures are `growth_weights.png` and `growth_features.png`.
"""

import json
import math
import statistics
import sys

import matplotlib.pyplot as plt
import torch

from gbfunc.lab.bench.cases import Setting, mlp_case
from gbfunc.lab.bench.report import run_bench

VARIANTS = ("dense", "periodic materialised", "periodic lazy")


def log_slope(points: list[tuple[float, float]]) -> float:
    """Fit the power law y = c x^p to points (x, y) by least squares of the logarithms. Return p."""
    return statistics.linear_regression(*zip(*((math.log(x), math.log(y)) for x, y in points), strict=True)).slope


if __name__ == "__main__":
    quick = "--quick" in sys.argv
    widths, width, features = ((352, 1408), 704, (8, 128)) if quick else ((704, 1440, 2880, 5664), 2048, (8, 32, 128))
    benches = {
        "weights": tuple(mlp_case((w,) * 3, 256, VARIANTS) for w in widths),
        "features": tuple(mlp_case((width,) * 3, 256, VARIANTS, name=f"mlp {width} H={h}", h=h) for h in features),
    }
    setting = Setting(torch.device("cpu"), torch.get_num_threads())
    for by, bench in benches.items():
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in run_bench(bench, setting, rounds=7, visit=0.1, memory=False):
            if row[by]:
                curves.setdefault(row["variant"], []).append((row[by], row["step_ms"]))
        figure, axes = plt.subplots(figsize=(5.6, 4.0), layout="constrained")
        for variant, points in curves.items():
            print(json.dumps({"variant": variant, "by": by, "exponent": log_slope(points), "points": points}))
            axes.plot(*zip(*points, strict=True), marker="o", label=f"{variant} (exponent {log_slope(points):.2f})")
        axes.set(xlabel=by, ylabel="time of a step (ms)", xscale="log", yscale="log")
        axes.legend(frameon=False)
        figure.savefig(f"growth_{by}.png")
