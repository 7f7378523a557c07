"""The task `images`: a user's own pictures, in a folder per class or in CIFAR's files.

Suffixes: N pictures, B pictures of a batch, C channels, h rows, w columns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gbfunc.extras import import_extra
from gbfunc.plan.spec import base_rate
from gbfunc.tasks.base import Recipe, Task, linear_decay
from gbfunc.tasks.data import SPLIT_SEED, Batch, Split, data_folder, hold_out, scaling
from gbfunc.tasks.images import cifar10_recipe, load_cifar
from gbfunc.tasks.pnets import PNETS, Interface, PNet
from gbfunc.tasks.pnets.base import n_params
from gbfunc.tasks.pnets.hugging_face import CONFIG, PREPROCESSOR, hugging_face, pretrained_network
from gbfunc.untrusted import one_error, parse_json, read_picture

_SUFFIXES = (".png", ".jpg", ".jpeg", ".gif", ".bmp", ".ppm", ".pgm", ".tif", ".tiff", ".webp", ".avif", ".jp2")
_HOLDS = f"a folder of pictures ({' '.join(_SUFFIXES)}) per class, or CIFAR's (cifar-10-batches-py, cifar*_train*.npz)"
_CIFAR = ("data_batch_*", "cifar-10-batches-py", "cifar*_train*.npz")
_LEAST = 10  # a data set needs at least this number of training pictures
_MAX_BYTES = 1 << 33  # largest number of bytes of all pictures in memory
_SIZE = 32  # default size of pictures in pixels; a pretrained network has its own
_ADAPTER = 6_000  # default number of parameters of an adapter, not counting the head
_FINE_TUNING = Recipe(direct_lr=3e-3, dense_lr=3e-4, clip_norm=1.0, schedule=linear_decay)


@dataclass(frozen=True, eq=False)
class Pictures(Split):
    """Pictures as bytes [N, C, h, w], and their classes [N]. The pictures of a batch are normalised."""

    scale: tuple[list[float], list[float]] = ([], [])  # mean and standard deviation of each channel's bytes

    def __getitem__(self, index: Any) -> Batch:
        x_BChw, y_B = super().__getitem__(index)
        mean_C11, std_C11 = torch.tensor(self.scale, device=x_BChw.device)[..., None, None]
        # On a CPU, channels_last halves the time of convolutions.
        return ((x_BChw - mean_C11) / std_C11).contiguous(memory_format=torch.channels_last), y_B


def images(data_dir: Path | None = None, pretrained: str | None = None, size: int | None = None) -> Task:
    """Load pictures from one folder per class, or from CIFAR's files (`load_cifar`). Scale them to `size` x `size`.

    `pretrained` is an image classifier (see `pretrained_network`) that gets a new head. The classifier's preprocessor
    determines the default size and the normalisation. Without `pretrained`, the default size is 32, and pictures are
    normalised by the mean and standard deviation of the training pictures.

    The data folder may have folders `train` and `test`, `train` and `val`, or all three, each with a folder per class.
    Without `test`, `val` becomes the test split. A split that is then missing is a fixed, stratified tenth of `train`.
    """
    if size is not None and (type(size) is not int or size < 12):
        raise ValueError(f"size of the images task must be an int >= 12, got {size!r}")
    names, splits = find_splits(data_folder("images", data_dir, _HOLDS))
    usual, *scale = (_SIZE,) if pretrained is None else preprocessing(pretrained_network(str(pretrained)))
    size = size or usual
    interface = Interface((3, size, size), 1 + max(int(labels_N.max()) for _, labels_N in splits.values()))
    pnet, settings, params = PNETS["allconv"](interface), cifar10_recipe, 14_958
    if pretrained is not None:
        pnet = hugging_face(interface, "", pretrained=pretrained)
        net = pnet.build(0).eval()
        with torch.no_grad(), one_error(pretrained, f"network for pictures of {size} x {size}"):
            net(torch.zeros(1, *interface.inputs))
        head = sum(n_params(net.get_submodule(name)) for name in pnet.plan(0).modules_to_save)
        settings, params = partial(_recipe, head, len(splits["train"][1])), head + _ADAPTER
    if (needed := sum(len(labels_N) for _, labels_N in splits.values()) * 3 * size**2) > _MAX_BYTES:
        raise ValueError(f"at most {_MAX_BYTES:,} bytes of pictures fit, got {needed:,} at size {size}: lower size")
    pixels = {split: read_pixels(pictures, size) for split, (pictures, _) in splits.items()}
    if not scale:
        some_NhwC = pixels["train"][:: 1 + len(pixels["train"]) // 1_000].astype(np.float64)
        scale = [some_NhwC.mean((0, 1, 2)), np.maximum(some_NhwC.std((0, 1, 2)), 1)]
    mean, std = (numbers_C.tolist() for numbers_C in scale)
    train, val, test = (
        Pictures(torch.from_numpy(pixels[split]).permute(0, 3, 1, 2), torch.from_numpy(splits[split][1]), (mean, std))
        for split in ("train", "val", "test")
    )
    about = scaling(*scale) | ({"classes": names} if names else {})
    return Task("images", interface, train, val, test, pnet, settings, genome_params=params, about=about)


def _recipe(head: int, pictures: int, pnet: PNet, genome_params: float) -> Recipe:
    batch_size = min(32, pictures)
    # Train for about 450 steps, but for at least 5 and at most 20 passes over the pictures.
    epochs = min(max(5, math.ceil(450 * batch_size / pictures)), 20)
    # `base_rate` was chosen for texts. For pictures, a third of it was best (1e-2; also tried: 3e-2 and 3e-3).
    lr = base_rate(genome_params - head if genome_params > head else genome_params) / 3
    return replace(_FINE_TUNING, lr=lr, batch_size=batch_size, epochs=epochs)


def find_splits(folder: Path) -> tuple[list[str], dict[str, tuple[Any, NDArray[np.int64]]]]:
    """Return the classes' names ([] for CIFAR's files), and {split: (pictures, classes [N])} for train, val and test.

    Pictures are paths, or CIFAR's bytes [C, h, w]. Hidden files and folders, and files of other formats, are ignored.
    """
    names: list[str] = []
    splits: dict[str, tuple[Any, NDArray[np.int64]]] = {}  # {split: (paths or bytes [N, C, h, w], classes [N])}
    if any(any(folder.glob(pattern)) for pattern in _CIFAR):
        splits["train"], splits["test"] = load_cifar(folder, "cifar*", 256)
    else:
        inner = {name: folder / name for name in ("train", "val", "test") if _folders(folder / name)}
        inner = inner if "train" in inner and len(inner) > 1 else {"train": folder}
        for split, path in inner.items():
            found = _by_class(path)
            names = names or [*found]
            if unknown := [name for name in found if name not in names]:
                raise ValueError(f"{path} has a class {unknown[0]!r}, which {inner['train']} lacks: add or remove it")
            labels = [names.index(name) for name, paths in found.items() for _ in paths]
            splits[split] = sum(found.values(), []), np.array(labels)
    if "test" not in splits and "val" in splits:
        splits["test"] = splits.pop("val")
    pictures, labels_N = splits["train"]
    if labels_N.max() < 1 or len(labels_N) < _LEAST:
        got = f"{len(labels_N)} of {', '.join(map(repr, names[:5])) or 'one class'}"
        raise ValueError(f"{folder} must hold {_LEAST} pictures to learn from, of two classes or more, got {got}")
    lacking = [split for split in ("val", "test") if split not in splits]
    indices = hold_out(labels_N, (len(labels_N) // 10,) * len(lacking), SPLIT_SEED)
    for split, index_N in zip((*lacking, "train"), indices, strict=True):
        splits[split] = [pictures[i] for i in index_N], labels_N[index_N]
    return names, splits


def _folders(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("[!.]*")) if path.is_dir()]


def _by_class(folder: Path) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for inner in _folders(folder):
        files = {x.relative_to(inner).parts: x for x in inner.rglob("*") if x.suffix.lower() in _SUFFIXES}
        found[inner.name] = [files[path] for path in sorted(files) if not any(name[0] == "." for name in path)]
    if not any(found.values()):
        raise FileNotFoundError(f"{folder} holds no pictures: it must hold {_HOLDS}")
    if empty := [name for name, paths in found.items() if not paths]:
        raise ValueError(f"the class {folder / empty[0]} holds no pictures: add some, or remove the folder")
    return found


def read_pixels(pictures: Sequence[Any], size: int) -> NDArray[np.uint8]:
    """Read pictures as bytes [N, h, w, C], scaled to `size` rows and columns; raises ValueError for a damaged file."""
    image = import_extra("PIL.Image", "reading pictures", "gbfunc[qr]")
    pixels_NhwC = np.empty((len(pictures), size, size, 3), np.uint8)
    for i, source in enumerate(pictures):
        is_file = isinstance(source, Path)
        picture = read_picture(source, "RGB") if is_file else image.fromarray(source.transpose(1, 2, 0).copy())
        pixels_NhwC[i] = np.asarray(picture.resize((size, size)))
    return pixels_NhwC


def preprocessing(folder: Path) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
    """Read a pretrained network's preprocessing: rows of a picture, and mean and deviation that normalise bytes [C]."""
    path, timm = folder / PREPROCESSOR, parse_json((folder / CONFIG).read_bytes(), CONFIG).get("pretrained_cfg")
    with one_error(path, "preprocessor, which says how a network takes pictures"):
        if timm is None:
            said = parse_json(path.read_bytes(), PREPROCESSOR)
        else:
            said = {"size": timm["input_size"][-1], "image_mean": timm["mean"], "image_std": timm["std"]}
        size = said["crop_size"] if said.get("do_center_crop") else said["size"]
        size = size.get("height") or size["shortest_edge"] if isinstance(size, Mapping) else size
        mean, std = (said["image_mean"], said["image_std"]) if said.get("do_normalize", True) else (0.0, 1.0)
        each = 1 / said.get("rescale_factor", 1 / 255) if said.get("do_rescale", True) else 1.0
        mean_C, std_C = (np.broadcast_to(np.asarray(x, np.float64) * each, 3) for x in (mean, std))
        if not (np.isfinite(mean_C).all() and (std_C > 0).all()):
            raise ValueError(f"expected a mean and a deviation above 0 of three channels, got {mean} and {std}")
        return int(size), mean_C, std_C
