"""Figures are made without a window or global state, and say what they show."""

from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes

from gbfunc.plots import PALETTE, learning_curve, tradeoff_curves, weight_images

ROWS = [{"epoch": i, "step": 10 * i, "train_loss": 2.0 / i, "val_accuracy": 1 - 0.5 / i} for i in (1, 2, 3)]


def labels(legend: Any) -> list[str]:
    return [text.get_text() for text in legend.get_texts()]


def titles(figure: Any) -> list[str]:
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def shown(axes: Axes) -> torch.Tensor:
    image = axes.images[0].get_array()
    assert image is not None
    return torch.as_tensor(np.ma.getdata(image))


@pytest.mark.parametrize("n_rows", [1, 3])
def test_learning_curve_draws_every_run_with_units(n_rows: int) -> None:
    figure = learning_curve({"genome": ROWS[:n_rows], "dense": ROWS[:n_rows]})
    loss, acc = figure.axes
    assert loss.get_ylabel() == "training loss" and loss.get_xlabel() == "epoch"
    assert acc.get_ylabel() == "validation accuracy (%)"
    for line, color in zip(acc.lines, PALETTE, strict=False):
        assert line.get_color() == color
        assert np.asarray(line.get_ydata()).tolist() == [50.0, 75.0, pytest.approx(100 - 50 / 3)][:n_rows]
    assert labels(acc.get_legend()) == ["genome", "dense"]


def test_mean_returns_are_drawn_in_bands_against_environment_steps() -> None:
    rows = [
        {"env_steps": 100.0 * i, "train_loss": -0.1, "val_mean_return": 10.0 * i, "val_std_return": 2.0} for i in (1, 2)
    ]
    loss, axes = learning_curve({"genome": rows, "dense": rows}, "mean_return", "", 475.0, "CartPole-v1").axes
    assert axes.get_xlabel() == "environment steps" and axes.get_title() == "CartPole-v1"
    assert loss.get_yscale() == "linear"
    assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[100.0, 10.0], [200.0, 20.0]]
    assert np.asarray(axes.lines[2].get_ydata()).tolist() == [475.0, 475.0]
    heights = np.asarray(axes.collections[0].get_paths()[0].vertices)[:, 1]
    assert (heights.min(), heights.max()) == (8.0, 22.0)


def test_tradeoff_curves_show_mean_and_spread_against_bytes() -> None:
    figure = tradeoff_curves(
        {"genome": [(4_000, [80.0, 90.0]), (1_000, [50.0])], "dense": [(1_000, [40.0])]}, "test x (%)"
    )
    (axes,) = figure.axes
    assert axes.get_xscale() == "log" and "bytes" in axes.get_xlabel() and axes.get_ylabel() == "test x (%)"
    line, caps, (bars,) = axes.containers[0]
    assert line.get_xydata().tolist() == [[1_000, 50.0], [4_000, pytest.approx(85.0)]]
    assert np.asarray(bars.get_segments()[1])[:, 1].tolist() == pytest.approx([80.0, 90.0]) and len(caps) == 2
    assert labels(axes.get_legend()) == ["genome", "dense"]


def test_weight_images_show_the_matrices_beside_each_other() -> None:
    nets = {
        label: {"0.weight": torch.randn(20, 12), "0.bias": torch.randn(20), "2.weight": torch.zeros(3, 20)}
        for label in ("generated", "dense")
    }
    figure = weight_images(nets, (3, 4))
    assert titles(figure) == [f"{n}: {t}" for n in nets for t in ("rows of 0.weight", "0.weight", "2.weight")]
    fields, matrix = (shown(a) for a in figure.axes[:2])
    assert torch.equal(matrix, nets["generated"]["0.weight"])
    # 16 of the 20 rows, as 3 x 4 images with a seam between them.
    assert fields.shape == (4 * 4 - 1, 4 * 5 - 1)
    assert torch.equal(fields[4:7, 5:9], nets["generated"]["0.weight"][5].reshape(3, 4))
    assert len(titles(weight_images(nets))) == 4


def test_kernels_of_convolutions_are_a_mosaic_and_deep_nets_show_four_tensors() -> None:
    kernels = torch.randn(16, 3, 3, 3)
    others = {"bias": torch.randn(16), "empty": torch.zeros(0, 3), "complex": torch.ones(2, 2, dtype=torch.complex64)}
    figure = weight_images({"net": {"conv": kernels, **others}})
    image = shown(figure.axes[0])
    assert image.shape == (8 * 4 - 1, 3 * 4 - 1) and titles(figure) == ["net: kernels of conv"]
    assert torch.equal(image[4:7, 8:11], kernels[1, 2])
    deep = weight_images({"net": {f"{i}.weight": torch.randn(4, 4) for i in range(9)}})
    assert titles(deep) == ["net: 0.weight", "net: 3.weight", "net: 5.weight", "net: 8.weight"]


def test_nothing_to_draw_is_an_error() -> None:
    for curves in ({}, {"a": []}, {"a": [(1, [])]}):
        with pytest.raises(ValueError, match="at least one method"):
            tradeoff_curves(curves, "x")
    with pytest.raises(ValueError, match="at least one run"):
        learning_curve({})
    unequal = {"a": {"w": torch.zeros(3, 2)}, "b": {"w": torch.zeros(2, 3)}}
    for nets in ({}, {"a": {"bias": torch.zeros(3)}}, unequal):
        with pytest.raises(ValueError, match="same weight matrices"):
            weight_images(nets)
    with pytest.raises(ValueError, match=r"finite weights, got .* in \['w'\]"):
        weight_images({"a": {"w": torch.full((3, 2), torch.nan)}})
    with pytest.raises(ValueError, match="expected rows of .* weights for .*, got 2"):
        weight_images({"a": {"w": torch.zeros(3, 2)}}, (3, 3))
