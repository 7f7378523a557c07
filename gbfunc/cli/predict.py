"""`gbfunc predict`: the classes of files of inputs, by a genome's file alone.

Suffixes: N inputs, C channels, h rows and w columns of an image, K classes, L tokens.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.cli.commands import Predict
from gbfunc.cli.genomes import read_genome, said_by
from gbfunc.cli.output import printable
from gbfunc.exporting.qr import opaque, read_qr
from gbfunc.tasks import Task, logits_of

_TEXTS = (".txt", ".text", ".md")


@torch.no_grad()
def run_predict(options: Predict) -> None:
    if not options.inputs:
        raise ValueError("predict needs files to classify")
    said = said_by(options.genome)
    # A tokenizer that was learned is in the task's data alone.
    _, task, net = read_genome(options.genome, options, alone=True)
    if task.interface.tokens or task.interface.actions:
        raise ValueError(f"predict classifies; the task {task.name} has no classes (for a language model: sample)")
    names = said.get("classes") or [str(i) for i in range(task.interface.outputs)]
    if not isinstance(names, list) or len(names) != task.interface.outputs:
        raise ValueError(f"{options.genome} names classes {names!r}, its network has {task.interface.outputs}")
    for path in options.inputs:
        if not path.is_file():
            raise FileNotFoundError(f"no such file of inputs: {path}")
        for name, x in _texts(path, task) if task.interface.vocabulary else _images(path, task, said):
            probabilities_K = logits_of(net(x[None]))[0].softmax(0)
            best = probabilities_K.topk(min(options.top, len(names)))
            ranked = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            print("\t".join([name, *(f"{printable(str(names[k]))}\t{value:.4f}" for k, value in ranked)]), flush=True)


def _texts(path: Path, task: Task) -> Iterator[tuple[str, Tensor]]:
    assert task.encode is not None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8, a line each: {error}") from error
    for i, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"{path}:{i}", task.encode(line.strip())


def _images(path: Path, task: Task, said: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    shape = task.interface.inputs
    if path.suffix.lower() in _TEXTS:
        raise ValueError(f"{path} is a text, and the task {task.name} has images of shape {shape}")
    if not {"mean", "std"} <= said.keys():
        raise ValueError(f"the genome's file does not say how the pixels of {task.name} are scaled (mean, std)")
    mean, std = (np.asarray(said[name], np.float32).reshape(-1, 1, 1) for name in ("mean", "std"))
    if not (std > 0).all():
        deviation = f"the deviation {said['std']}, expected numbers above 0"
        raise ValueError(f"the genome's file says that the pixels of {task.name} have {deviation}")
    if path.suffix.lower() in (".npy", ".npz"):
        found = _arrays(path, shape)
    else:
        found = iter([(str(path), _picture(path, shape) * (float(said.get("white", 255)) / 255))])
    for name, pixels_Chw in found:
        yield name, torch.from_numpy(((pixels_Chw - mean) / std).astype(np.float32))


def _picture(path: Path, shape: tuple[int, ...]) -> NDArray[np.float32]:
    from PIL import Image, ImageOps, UnidentifiedImageError

    channels, rows, cols = shape
    try:
        with Image.open(path) as image:
            ImageOps.exif_transpose(image, in_place=True)  # As the camera was held.
            sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
            if image.mode in ("I", "F") and not sixteen:
                got = f"got mode {image.mode}, which has no white"
                raise ValueError(f"its pixels must have 8 or 16 bits, {got}: save it so")
            # The format's whites are scaled to 255, and what is transparent shows white.
            scaled = (np.asarray(image) / 257).round().astype(np.uint8) if sixteen else None
            shown = opaque(image) if scaled is None else Image.fromarray(scaled)
            shown = shown.convert("L" if channels == 1 else "RGB")
            pixels = np.asarray(shown.resize((cols, rows)), np.float32)
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is no image that can be read: {error}") from error
    try:
        read_qr(path)
    except (ImportError, ValueError):
        # It is no code, or the package that reads codes is missing.
        return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
    raise ValueError(f"{path} is a genome's QR code, not an image to classify: as a .png, --genome takes it")


def _arrays(path: Path, shape: tuple[int, ...]) -> Iterator[tuple[str, NDArray[Any]]]:
    try:
        with path.open("rb") as file:
            held = np.load(file, allow_pickle=False)
            arrays = {"": held} if isinstance(held, np.ndarray) else {f"{name}, ": held[name] for name in held.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} holds no arrays that can be read: {error}") from error
    for name, array in arrays.items():
        images = _shaped(array, shape)
        numbers = array.dtype.kind in "uif"
        if images is None or not len(images) or not numbers or not np.isfinite(array).all():
            what = "" if images is None else ", with some that are not finite" if numbers else ", which are no numbers"
            got = f"{array.dtype} {array.shape} in {name.removesuffix(', ') or 'array'}{what}"
            raise ValueError(f"{path} must hold images of shape {shape}, got {got}")
        for i, image in enumerate(images):
            yield f"{path}[{name}{i}]", image


def _shaped(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
    """Find images [N, C, h, w] in an array of one or many, with channels first or last, or none; None for another."""
    channels, rows, cols = shape
    last = (rows, cols, channels)
    for kind in (shape, *([(rows, cols)] if channels == 1 else ()), last):
        if array.shape[-len(kind) :] == kind and array.ndim - len(kind) in (0, 1):
            images = array.reshape(-1, *kind)
            return images.transpose(0, 3, 1, 2) if kind == last != shape else images.reshape(-1, *shape)
    return None
