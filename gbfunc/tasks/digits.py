"""1,797 real handwritten digits of 8 x 8 pixels, as scikit-learn ships them."""

from __future__ import annotations

import numpy as np

from gbfunc.extras import import_extra
from gbfunc.tasks.base import Recipe, Task
from gbfunc.tasks.data import image_splits, noise, scaling
from gbfunc.tasks.pnets import PNETS, Interface

IMAGE_SHAPE = (1, 8, 8)
N_TEST, N_VAL = 360, 240


def digits() -> Task:
    """Load the digits task; its data comes with scikit-learn."""
    data = import_extra("sklearn.datasets", "the digits task", "gbfunc[cli]")
    pixels, labels = data.load_digits(return_X_y=True)
    images = (pixels.reshape(-1, *IMAGE_SHAPE), labels.astype(np.int64))
    (train, test, val), *scale = image_splits(images, (N_TEST, N_VAL))
    interface = Interface(IMAGE_SHAPE, 10)
    recipe = Recipe(lr=4e-2, dense_lr=1e-2, betas=(0.9, 0.95), batch_size=64, epochs=100, augment=noise(0.4))
    pnet = PNETS["mlp"](interface, hidden=(1100,), bandwidth=3.0)
    about = {**scaling(*scale), "white": 16}
    return Task("digits", interface, train, val, test, pnet, lambda pnet, size: recipe, genome_params=450, about=about)
