"""Functions that return a matplotlib `Figure` for `savefig`, without a window or global state.

Each function raises `ValueError` if there is nothing to draw.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogFormatter, LogLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray
from torch import Tensor

Runs = Mapping[str, Sequence[Mapping[str, float]]]
"""Training histories by label."""

# Colours that people with common colour vision deficiencies can distinguish (Okabe and Ito, 2008)
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES, MARKERS = ("-", "--", "-.", ":"), "osD^vPX*"
WEIGHTS = "PuOr"  # A diverging colour map without red-green contrast
_MAX_SIDE, _MAX_COLUMNS = 8, 4  # At most 8 images along a side of a mosaic, and 4 tensors per network


def _figure(
    width: float, height: float, *, rows: int = 1, columns: int = 1, which: Literal["major", "both"] = "major"
) -> tuple[Figure, NDArray[Any]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_prop_cycle(color=PALETTE * 8, linestyle=LINES * 14, marker=list(MARKERS) * 7)
        axes.grid(alpha=0.3, which=which)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def learning_curve(
    runs: Runs, metric: str = "accuracy", unit: str = "%", threshold: float | None = None, title: str = ""
) -> Figure:
    """Draw the training loss and a validation metric during training, with one line per run.

    `runs` maps labels to histories, which are lists of dicts with `step`, `epoch` or `env_steps`, and with `train_loss`
    and `val_<metric>`. With the unit `"%"`, values between 0 and 1 are drawn as percentages. If the metric is a mean
    (`mean_return`), a band shows one standard deviation (`val_std_return`). A thin line marks `threshold`, the value at
    which the task counts as solved.
    """
    if not runs:
        raise ValueError("a figure needs at least one run, got none: pass a history by label")
    figure, ((loss_axes, metric_axes),) = _figure(9.0, 3.6, columns=2)
    rows = [row for rows in runs.values() for row in rows]
    # Show epochs on the x axis if every entry of the histories is at the end of an epoch, otherwise steps.
    x = "env_steps" if "env_steps" in rows[0] else "step" if any(row["epoch"] % 1 for row in rows) else "epoch"
    factor, deviation = 100 if unit == "%" else 1, f"val_{metric}".replace("mean", "std")
    for run, history in runs.items():
        style = {"label": run, "marker": "o" if len(history) < 10 else ""}
        steps, loss, mean, std = (
            np.array([row.get(name, 0.0) for row in history]) for name in (x, "train_loss", f"val_{metric}", deviation)
        )
        loss_axes.plot(steps, loss, **style)
        (line,) = metric_axes.plot(steps, factor * mean, **style)
        if metric.startswith("mean"):
            metric_axes.fill_between(steps, mean - std, mean + std, color=line.get_color(), alpha=0.15, linewidth=0)
    if threshold is not None:
        metric_axes.axhline(threshold, color="black", linewidth=0.8, label=f"solved: {threshold:g}")
    loss_axes.set(xlabel=x.replace("env_", "environment "), ylabel="training loss", title=title)
    if all(row["train_loss"] > 0 for row in rows):
        loss_axes.set_yscale("log")
        loss_axes.yaxis.set_major_formatter("{x:g}")
        loss_axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    label = f"validation {metric.replace('_', ' ')}" + (f" ({unit})" if unit else "")
    metric_axes.set(xlabel=loss_axes.get_xlabel(), ylabel=label, title=title)
    if unit == "%":
        # Limit the y axis: with the low values of the first epochs, differences of final values would be invisible.
        worst = min(100 * history[-1][f"val_{metric}"] for history in runs.values())
        metric_axes.set_ylim(max(0.0, worst - 15), 100.5)
    metric_axes.legend(frameon=False, loc="best")
    return figure


def tradeoff_curves(
    curves: Mapping[str, Sequence[tuple[float, Sequence[float]]]], ylabel: str, *, yscale: str = "linear"
) -> Figure:
    """Draw a metric against bytes (logarithmic): one line per method (mean of seeds), bars from worst to best seed.

    `curves` maps the label of a method to points `(bytes, [metric of every seed])`. With `yscale="log"`, small errors
    such as 1 % and 2 % are easier to distinguish.
    """
    if not curves or not all(points and all(seeds for _, seeds in points) for points in curves.values()):
        raise ValueError("a figure needs at least one method, and points with values for each, got none")
    figure, ((axes,),) = _figure(7.6, 4.6, which="both")
    measured = []
    for i, (label, points) in enumerate(curves.items()):
        sizes, means, low, high = zip(
            *sorted((size, sum(seeds) / len(seeds), min(seeds), max(seeds)) for size, seeds in points), strict=True
        )
        bars = np.stack([np.subtract(means, low), np.subtract(high, means)])
        style = {"capsize": 3, "markersize": 5, "linewidth": 1.4 if i else 2.4}
        measured.append(axes.errorbar(sizes, means, yerr=bars, label=label, **style))
    axes.set(xlabel="everything needed to run (bytes, logarithmic)", ylabel=ylabel, xscale="log")
    if yscale == "log":
        # Zero has no place on a logarithmic axis: clip bars that reach zero at the edge.
        axes.set_yscale(yscale, nonpositive="clip")
    # If an axis spans less than a decade, matplotlib would label all minor ticks, and the labels would overlap.
    for axis, formatter in ((axes.xaxis, EngFormatter(unit="B")), (axes.yaxis, StrMethodFormatter("{x:g}"))):
        if axis.get_scale() == "log":
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(formatter)
            axis.set_minor_formatter(NullFormatter())
    axes.legend(handles=measured, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def weight_images(nets: Mapping[str, Mapping[str, Tensor]], image_shape: tuple[int, int] | None = None) -> Figure:
    """Draw the weights of several networks with equal shapes as images, with one row of images per network.

    A matrix is one image. Convolution kernels [out, in, height, width] are a mosaic, with output channels from top to
    bottom and input channels from left to right. If `image_shape` is given, the first rows of the first matrix are also
    drawn as images, which show the inputs to which hidden units respond. At most four tensors are drawn. Tensors that
    are empty, are not real, or have neither two nor four dimensions are left out.
    """
    weights = {
        label: {
            name: weight.detach().float().cpu().numpy()
            for name, weight in tensors.items()
            if weight.ndim in (2, 4) and weight.numel() > 0 and weight.is_floating_point()
        }
        for label, tensors in nets.items()
    }
    if broken := {k for by_name in weights.values() for k, m in by_name.items() if not np.isfinite(m).all()}:
        raise ValueError(f"weight_images expects finite weights, got NaN or infinite numbers in {sorted(broken)}")
    shapes = [{name: m.shape for name, m in by_name.items()} for by_name in weights.values()]
    if not shapes or not shapes[0] or any(s != shapes[0] for s in shapes):
        raise ValueError(f"weight_images expects nets with the same weight matrices or kernels, got {shapes}")
    names = list(shapes[0])
    read = [name for name in names if len(shapes[0][name]) == 2 and image_shape is not None][:1]
    shown = [names[round(i)] for i in np.linspace(0, len(names) - 1, min(len(names), _MAX_COLUMNS))]
    columns = [(name, image_shape) for name in read] + [(name, None) for name in shown]
    figure, grid = _figure(3.4 * len(columns), 3.1 * len(weights), rows=len(weights), columns=len(columns))
    for axes_row, (label, by_name) in zip(grid, weights.items(), strict=True):
        for axes, (name, image) in zip(axes_row, columns, strict=True):
            weight = by_name[name]
            if image is not None:
                if weight.shape[1] != math.prod(image):
                    raise ValueError(f"expected rows of {math.prod(image)} weights for {image}, got {weight.shape[1]}")
                side = min(_MAX_SIDE, math.isqrt(len(weight)))
                fields = weight[: side * side].reshape(side, side, *image)
                _show(axes, _mosaic(fields), f"{label}: rows of {name}", "pixel column", "pixel row")
            elif weight.ndim == 4:
                mosaic = _mosaic(weight[:_MAX_SIDE, :_MAX_SIDE])
                _show(axes, mosaic, f"{label}: kernels of {name}", "input channel", "output channel")
            else:
                _show(axes, weight, f"{label}: {name}", "input unit", "output unit", aspect="auto")
    return figure


def _mosaic(images: NDArray[np.float32]) -> NDArray[np.float32]:
    padded = np.pad(images, ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=np.nan)
    return np.block([list(row) for row in padded])[:-1, :-1]


def _show(
    axes: Axes, image: NDArray[Any], title: str, xlabel: str, ylabel: str, aspect: Literal["equal", "auto"] = "equal"
) -> None:
    limit = float(np.nanquantile(np.abs(image), 0.995)) or 1.0
    shown = axes.imshow(image, cmap=WEIGHTS, vmin=-limit, vmax=limit, interpolation="nearest", aspect=aspect)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.set(xticks=[], yticks=[])
    axes.figure.colorbar(shown, ax=axes, shrink=0.8, label="weight")
