"""Figures: functions that return a matplotlib `Figure`, ready for `savefig`; no window, no global state.

Each raises `ValueError` where there is nothing to show.

Suffixes: R rows and C columns of a weight matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogFormatter, LogLocator, NullFormatter, StrMethodFormatter
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.parallel.schedule import Kind, Span, Timeline

# M. Okabe and K. Ito, Color Universal Design (2008): distinct with every common colour vision deficiency.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*"
# Diverging and without red-green contrast.
WEIGHTS = "PuOr"
_MAX_FIELDS, _MAX_SIDE, _MAX_COLUMNS = 64, 64, 4
# Colour and hatch of each kind of event: colours for what is computed, greys for what travels.
EVENTS: Mapping[Kind, tuple[str, str]] = {
    "forward": ("#0072B2", ""),
    "backward": ("#D55E00", ""),
    "backward_input": ("#D55E00", ""),
    "backward_weight": ("#E69F00", ""),
    "loss": ("#000000", ""),
    "update": ("#009E73", ""),
    "generate": ("#56B4E9", ""),
    "generate_backward": ("#CC79A7", ""),
    "all_reduce": ("#444444", ""),
    "all_gather": ("#999999", ""),
    "reduce_scatter": ("#999999", "////"),
    "send": ("#CCCCCC", ""),
    "receive": ("#CCCCCC", "////"),
}


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, NDArray[Any]]:
    """A figure with its axes [rows, columns]."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _style(i: int) -> dict[str, Any]:
    """Colour and line of the i-th of some curves."""
    return {"color": PALETTE[i % len(PALETTE)], "linestyle": LINES[i % len(LINES)]}


def _finish(axes: Axes, which: Literal["major", "both"] = "major", axis: Literal["both", "y"] = "both") -> None:
    """A grid behind what is drawn, and two spines."""
    axes.grid(alpha=0.3, which=which, axis=axis)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def learning_curve(
    runs: Mapping[str, Sequence[Mapping[str, float]]], metric: str = "accuracy", unit: str = "%"
) -> Figure:
    """Training loss and a validation metric against training, one line per run.

    Args:
        runs: history of each run by its label: rows of `epoch`, `step`, `train_loss` (nats), `val_<metric>`.
        metric: which metric.
        unit: of the metric; `"%"` where its values are parts of one.
    """
    if not runs:
        raise ValueError("learning_curve expects at least one run, got none")
    figure, ((loss_axes, metric_axes),) = _figure(9.0, 3.6, columns=2)
    factor = 100 if unit == "%" else 1
    # Rows at whole passes count passes, others steps.
    x = "epoch" if all(row["epoch"] == int(row["epoch"]) for rows in runs.values() for row in rows) else "step"
    for i, (label, rows) in enumerate(runs.items()):
        style = {**_style(i), "marker": "o" if len(rows) < 10 else None, "label": label}
        xs = [row[x] for row in rows]
        loss_axes.plot(xs, [row["train_loss"] for row in rows], **style)
        metric_axes.plot(xs, [factor * row[f"val_{metric}"] for row in rows], **style)
    loss_axes.set(xlabel=x, ylabel="training loss (cross entropy, nats)", yscale="log")
    loss_axes.yaxis.set_major_formatter("{x:g}")
    loss_axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    metric_axes.set(xlabel=x, ylabel=f"validation {metric.replace('_', ' ')} ({unit})")
    if unit == "%":
        # The first epochs would else press all that matters into the uppermost pixels.
        worst = min(100 * rows[-1][f"val_{metric}"] for rows in runs.values())
        metric_axes.set_ylim(max(0.0, worst - 15), 100.5)
    _finish(loss_axes)
    _finish(metric_axes)
    metric_axes.legend(frameon=False, loc="lower right" if unit == "%" else "upper right")
    return figure


def birth_curves(
    runs: Mapping[str, Mapping[str, Sequence[Mapping[str, float]]]], metric: str = "accuracy", unit: str = "%"
) -> Figure:
    """A metric from birth on, against training steps on a logarithmic scale: one plot for each task.

    Args:
        runs: rows of `step` and the metric, the first at step 0, by task and by how the network starts.
        metric: which metric.
        unit: of the metric; `"%"` where its values are parts of one.
    """
    if not runs or not all(runs.values()):
        raise ValueError("birth_curves expects at least one task, and runs of each")
    figure, (row,) = _figure(0.6 + 4.0 * len(runs), 3.4, columns=len(runs))
    for axes, (task, starts) in zip(row, runs.items(), strict=True):
        for i, (start, rows) in enumerate(starts.items()):
            values = [(100 if unit == "%" else 1) * row[metric] for row in rows]
            axes.plot([row["step"] for row in rows], values, **_style(i), marker=MARKERS[i], markersize=4, label=start)
        axes.set_xscale("symlog", linthresh=1)
        axes.xaxis.set_major_formatter(lambda step, _: f"{step:,.0f}" if step else "birth")
        axes.set(title=task, xlabel="training steps after birth", ylabel=f"{metric.replace('_', ' ')} ({unit})")
        _finish(axes)
    row[0].legend(frameon=False, loc="lower right")
    return figure


def return_curve(
    runs: Mapping[str, Sequence[Mapping[str, float]]], title: str, threshold: float | None = None
) -> Figure:
    """Mean return against environment steps, one line per run, with a band of one standard deviation over episodes.

    Args:
        runs: history of each run by its label: rows of `env_steps`, `val_mean_return` and `val_std_return`.
        title: names the environment.
        threshold: mean return at which it counts as solved, drawn as a thin line.
    """
    if not runs:
        raise ValueError("return_curve expects at least one run, got none")
    figure, ((axes,),) = _figure(5.6, 3.6)
    for i, (label, rows) in enumerate(runs.items()):
        steps, mean, std = (
            np.array([row[k] for row in rows]) for k in ("env_steps", "val_mean_return", "val_std_return")
        )
        axes.plot(steps, mean, **_style(i), marker="o", markersize=3, label=label)
        axes.fill_between(steps, mean - std, mean + std, color=_style(i)["color"], alpha=0.15, linewidth=0)
    if threshold is not None:
        axes.axhline(threshold, color="black", linewidth=0.8, label=f"solved: {threshold:g}")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(title=title, xlabel="environment steps", ylabel="return (mean, deviation over episodes)")
    _finish(axes)
    axes.legend(frameon=False)
    return figure


def cost_curves(curves: Mapping[str, Sequence[tuple[float, float]]], xlabel: str) -> Figure:
    """Time per step against a size, both logarithmic, one line per variant with its exponent in the legend.

    Args:
        curves: points (size, milliseconds) of each variant by its label.
        xlabel: what the size is.
    """
    if not curves or not all(curves.values()):
        raise ValueError("cost_curves expects at least one variant, and points for each")
    figure, ((axes,),) = _figure(5.6, 4.0)
    for i, (label, points) in enumerate(curves.items()):
        xs, ys = zip(*sorted(points), strict=True)
        if len(set(xs)) > 1:
            slope = np.polyfit(np.log(xs), np.log(ys), 1)[0]
            label = f"{label} (exponent {slope:.2f})"
        axes.plot(xs, ys, **_style(i), marker="o", label=label)
    axes.set(xlabel=xlabel, ylabel="time of a step (ms)", xscale="log", yscale="log")
    _finish(axes, "both")
    axes.legend(frameon=False)
    return figure


def tradeoff_curves(
    curves: Mapping[str, Sequence[tuple[float, Sequence[float]]]],
    ylabel: str,
    *,
    yscale: str = "linear",
    hollow: Mapping[str, Sequence[tuple[float, float]]] = MappingProxyType({}),
) -> Figure:
    """A metric against bytes (logarithmic): a line per method through the means, a bar from least to largest seed.

    Args:
        curves: points (bytes, metric of each seed) of each method by its label.
        ylabel: what the metric is, with its unit.
        yscale: `"linear"`, or `"log"` for errors: it separates 1 % from 2 % beside one of 70 %.
        hollow: other points (bytes, metric) by their label, such as published ones: in grey, without a line.
    """
    if not curves or not all(points and all(seeds for _, seeds in points) for points in curves.values()):
        raise ValueError("tradeoff_curves expects at least one method, and points with values for each")
    figure, ((axes,),) = _figure(7.6, 4.6)
    for i, (label, points) in enumerate(curves.items()):
        sizes, means, low, high = zip(
            *sorted((size, sum(seeds) / len(seeds), min(seeds), max(seeds)) for size, seeds in points), strict=True
        )
        bars = np.stack([np.subtract(means, low), np.subtract(high, means)])
        marker = {"marker": MARKERS[i % len(MARKERS)], "markersize": 5, "linewidth": 1.4 if i else 2.4}
        axes.errorbar(sizes, means, yerr=bars, capsize=3, label=label, **_style(i), **marker)
    for i, (label, of) in enumerate(hollow.items()):
        marker = {"marker": MARKERS[i % len(MARKERS)], "markersize": 6, "markerfacecolor": "none", "color": "0.45"}
        axes.plot(*zip(*of, strict=True), linestyle="none", label=label, **marker)
    axes.set(xlabel="everything needed to run (bytes, logarithmic)", ylabel=ylabel, xscale="log")
    if yscale == "log":
        # Clipped: where a seed makes no error, its bar ends at the edge.
        axes.set_yscale(yscale, nonpositive="clip")
    # Less than a decade may be shown, of which the default labels every minor tick, one over the other.
    for axis, formatter in ((axes.xaxis, EngFormatter(unit="B")), (axes.yaxis, StrMethodFormatter("{x:g}"))):
        if axis.get_scale() == "log":
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(formatter)
            axis.set_minor_formatter(NullFormatter())
    _finish(axes, "both")
    handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    measured = [handles[label] for label in curves]
    axes.legend(measured, list(curves), frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    if hollow:
        # Their labels say sources, and are long.
        figure.set_size_inches(7.6, 4.7 + 0.18 * len(hollow))
        others = [handles[label] for label in hollow]
        figure.legend(others, list(hollow), frameon=False, loc="outside lower left", fontsize="x-small")
    return figure


def weight_images(nets: Mapping[str, Mapping[str, Tensor]], image_shape: tuple[int, int] | None = None) -> Figure:
    """Weights of several nets of the same shapes side by side, as images: a row of images for each net.

    Matrices are sorted by similarity, rows and columns, so that structure shows as areas; of long sides evenly spread
    rows and columns are shown, each of whose weights is then large enough to be seen. Kernels of 2-d convolutions are
    shown as a mosaic: output channels down, input channels across. Of many tensors four are shown.

    Args:
        nets: the weights of each net by label, then by parameter name: [R, C], or [out, in, height, width]; others,
            empty ones and those that are not real are left out.
        image_shape: rows and columns of the image that the first matrix reads; its first rows are then shown
            as such images too (what each hidden unit responds to), and its columns are not sorted.
    """
    weights = {
        label: {k: w.detach().float().cpu().numpy() for k, w in tensors.items() if _is_shown(w)}
        for label, tensors in nets.items()
    }
    if broken := {k for by_name in weights.values() for k, m in by_name.items() if not np.isfinite(m).all()}:
        raise ValueError(f"weight_images expects finite weights, and {sorted(broken)} are not")
    shapes = [{name: m.shape for name, m in by_name.items()} for by_name in weights.values()]
    if not shapes or not shapes[0] or any(s != shapes[0] for s in shapes):
        raise ValueError(f"weight_images expects nets with the same weight matrices or kernels, got {shapes}")
    names = list(shapes[0])
    read = next((name for name in names if len(shapes[0][name]) == 2), "") if image_shape is not None else ""
    chosen = dict.fromkeys(names[i] for i in np.linspace(0, len(names) - 1, _MAX_COLUMNS).round().astype(int))
    columns = [(read, True)] * bool(read) + [(name, False) for name in chosen]
    figure, grid = _figure(3.4 * len(columns), 3.1 * len(weights), len(weights), len(columns))
    for axes_row, (label, by_name) in zip(grid, weights.items(), strict=True):
        for axes, (name, as_images) in zip(axes_row, columns, strict=True):
            weight = by_name[name]
            if as_images and image_shape is not None:
                title = f"{label}: rows of {name}"
                _show(axes, _fields(weight, image_shape), title, "pixel column", "pixel row", square=True)
            elif weight.ndim == 4:
                side = math.isqrt(_MAX_FIELDS)
                kernels = _mosaic(weight[:side, :side])
                _show(axes, kernels, f"{label}: kernels of {name}", "input channel", "output channel", square=True)
            else:
                _show_sorted(axes, weight, f"{label}: {name}", sort_columns=name != read)
    return figure


def _fields(weight_RC: NDArray[np.float32], image_shape: tuple[int, int]) -> NDArray[np.float32]:
    """The first rows of a matrix as images, in a square mosaic."""
    if weight_RC.shape[1] != math.prod(image_shape):
        raise ValueError(f"rows of {weight_RC.shape[1]} weights are no images of {image_shape}")
    side = math.isqrt(min(_MAX_FIELDS, len(weight_RC)))
    return _mosaic(weight_RC[: side * side].reshape(side, side, *image_shape))


def _mosaic(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Images [down, across, height, width] beside each other, with empty seams."""
    down, across, h, w = images.shape
    mosaic = np.full((down, h + 1, across, w + 1), np.nan, np.float32)
    mosaic[:, :h, :, :w] = images.transpose(0, 2, 1, 3)
    return mosaic.reshape(down * (h + 1), across * (w + 1))[:-1, :-1]


def _is_shown(weight: Tensor) -> bool:
    return weight.ndim in (2, 4) and weight.numel() > 0 and weight.is_floating_point()


def _show_sorted(axes: Axes, weight_RC: NDArray[np.float32], title: str, *, sort_columns: bool) -> None:
    """A matrix, similar rows and columns next to each other, thinned out evenly where it is large."""
    (n_rows, n_columns), (rows, columns) = weight_RC.shape, map(_spread, weight_RC.shape)
    part = weight_RC[np.ix_(rows, columns)]
    left, _, right = np.linalg.svd(part, full_matrices=False)
    order_R, order_C = _by_angle(left[:, :2]), _by_angle(right[:2].T) if sort_columns else np.arange(len(columns))
    labels = [_unit("output", len(rows), n_rows, True), _unit("input", len(columns), n_columns, sort_columns)]
    _show(axes, part[np.ix_(order_R, order_C)], title, labels[1], labels[0])


def _spread(n: int) -> NDArray[np.int64]:
    """Numbers of at most `_MAX_SIDE` of n rows, evenly spread."""
    return np.linspace(0, n - 1, min(n, _MAX_SIDE)).round().astype(np.int64)


def _by_angle(plane: NDArray[np.float32]) -> NDArray[np.int64]:
    """Points [n, 2] in the order of their angle: with singular vectors, similar rows come together."""
    x, y = plane[:, 0], plane[:, -1]
    return np.argsort(np.arctan2(y, x) if plane.shape[1] > 1 else x, kind="stable")


def _unit(what: str, shown: int, n: int, is_sorted: bool) -> str:
    """An axis label that says which units are shown, and in which order."""
    some = f"{n:,} {what} units" if shown == n else f"{shown} of {n:,} {what} units"
    return f"{some}, {'sorted by similarity' if is_sorted else 'in order'}"


def _show(
    axes: Axes, image: NDArray[np.float32], title: str, xlabel: str, ylabel: str, *, square: bool = False
) -> None:
    """An image with a colour scale symmetric about zero, whose ends are the 99.5th percentile."""
    limit = float(np.nanquantile(np.abs(image), 0.995)) or 1.0
    shown = axes.imshow(image, cmap=WEIGHTS, vmin=-limit, vmax=limit, interpolation="nearest")
    axes.set_aspect("equal" if square else "auto")
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(xlabel, fontsize=8)
    axes.set_ylabel(ylabel, fontsize=8)
    axes.set(xticks=[], yticks=[])
    bar = axes.figure.colorbar(shown, ax=axes, shrink=0.8)
    bar.set_label("weight")


def plot_schedule(timeline: Timeline, unit: str = "", memory_unit: str = "") -> Figure:
    """What each rank of a simulated schedule does over time, and below it what it stores.

    Computation is marked with its microbatch, or with its layer where there is one microbatch.

    Args:
        timeline: of the schedule.
        unit: of time, such as `"s"`.
        memory_unit: such as `"B"`.
    """
    if not timeline.duration:
        raise ValueError("plot_schedule expects a timeline with events that take time, got none")
    n_ranks = len(timeline.ranks)
    figure, grid = _figure(9.6, 1.6 + (0.8 if n_ranks <= 8 else 0.6) * n_ranks, rows=2)
    events_axes, memory_axes = grid[:, 0]
    _draw_events(events_axes, timeline)
    _draw_memory(memory_axes, timeline, memory_unit)
    for axes in (events_axes, memory_axes):
        axes.set(yticks=range(n_ranks), ylim=(n_ranks - 0.5, -0.5), xlim=(0.0, timeline.duration), ylabel="rank")
        axes.spines[["top", "right"]].set_visible(False)
    events_axes.set_title(f"duration {timeline.duration:.4g}{f' {unit}' * bool(unit)}, bubble {timeline.bubble:.1%}")
    memory_axes.set_xlabel(f"time ({unit})" if unit else "time")
    return figure


def _draw_events(axes: Axes, timeline: Timeline) -> None:
    """A bar for each event that takes time, one row per rank, with a legend of their kinds."""
    spans = [span for rank in timeline.ranks for span in rank if span.end > span.start]
    for kind, (color, hatch) in EVENTS.items():
        if same := [span for span in spans if span.event.kind == kind]:
            starts, widths = [span.start for span in same], [span.end - span.start for span in same]
            style = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
            axes.barh([span.rank for span in same], widths, 0.8, starts, label=kind.replace("_", " "), **style)
    _mark(axes, spans, timeline.duration)
    axes.figure.legend(*axes.get_legend_handles_labels(), frameon=False, loc="outside upper center", ncols=7)


def _mark(axes: Axes, spans: Sequence[Span], duration: float) -> None:
    """Write the microbatch or layer into bars that are wide enough."""
    by_layer = len({span.event.microbatch for span in spans if span.event.microbatch is not None}) < 2
    for span in spans:
        mark = span.event.layer if by_layer else span.event.microbatch
        travels = span.event.peer is not None or span.event.ranks
        if mark is None or travels or (span.end - span.start) / duration < 0.007 * len(str(mark)):
            continue
        middle = (span.start + span.end) / 2
        axes.text(middle, span.rank, str(mark), color="white", fontsize=7, ha="center", va="center", clip_on=True)


def _draw_memory(axes: Axes, timeline: Timeline, unit: str) -> None:
    """What each rank stores, on one scale, in a row per rank with its peak beside it."""
    scale = 0.85 / (timeline.peak_memory or 1.0)
    formatter = EngFormatter(unit=unit, places=2)
    for rank, (spans, peak) in enumerate(zip(timeline.ranks, timeline.peaks, strict=True)):
        base = rank + 0.45
        memory = [span.memory for span in spans] or [0.0]
        # From the beginning, where the first event may start later, to the end of the whole schedule.
        times = [0.0, *(span.start for span in spans), timeline.duration]
        heights = [memory[0], *[span.memory for span in spans], memory[-1]]
        tops = [base - scale * height for height in heights]
        axes.fill_between(times, base, tops, step="post", color=PALETTE[0], alpha=0.35, linewidth=0)
        axes.step(times, tops, where="post", color=PALETTE[0], linewidth=0.9)
        label = f"peak {formatter(peak)}"
        axes.text(1.01, rank, label, transform=axes.get_yaxis_transform(), fontsize=7, va="center")
    axes.set_title("memory stored when events start", fontsize=9)
