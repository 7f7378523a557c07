"""1,797 real handwritten digits of 8 x 8 pixels, as scikit-learn ships them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from gbfunc.tasks.base import Recipe, Split, Task, hold_out
from gbfunc.tasks.mlp import check_sizes, mlp, mlp_plan_options

SIZES = (64, 1100, 10)
IMAGE_SHAPE = (8, 8)
N_TEST, N_VAL = 360, 240
SPLIT_SEED = 0


def digits(data_dir: Path | None = None, sizes: tuple[int, ...] | None = None) -> Task:
    """The digits task; its data comes with scikit-learn.

    Args:
        data_dir: not used.
        sizes: layer sizes of the p-net, by default 64-1100-10 (82,510 parameters).

    Raises:
        ImportError: if scikit-learn is missing.
        ValueError: if the sizes do not fit the data.
    """
    del data_dir
    sizes = check_sizes(SIZES if sizes is None else sizes, 64, 10)
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits task needs scikit-learn: pip install 'gbfunc[cli]'") from error
    pixels, labels = load_digits(return_X_y=True)
    test, val, train = hold_out(labels, (N_TEST, N_VAL), SPLIT_SEED)
    mean, std = pixels[train].mean(), pixels[train].std()
    x = torch.from_numpy(((pixels - mean) / std).astype(np.float32))
    y = torch.from_numpy(labels.astype(np.int64))

    def recipe(genome_params: float) -> Recipe:
        encodings, rules = mlp_plan_options(sizes, IMAGE_SHAPE, bandwidth=3.0)
        return Recipe(
            encodings,
            rules,
            lr=4e-2,
            dense_lr=1e-2,
            betas=(0.9, 0.95),
            batch_size=64,
            epochs=100,
            noise=0.4,
        )

    return Task(
        name="digits",
        sizes=sizes,
        image_shape=IMAGE_SHAPE,
        train=Split(x[train], y[train]),
        val=Split(x[val], y[val]),
        test=Split(x[test], y[test]),
        build=lambda seed: mlp(sizes, seed),
        recipe=recipe,
        genome_params=450,
    )
