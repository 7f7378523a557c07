"""`gbfunc predict`: the classes of files of inputs, by a genome's file alone.

Suffixes: N inputs, C channels, h rows and w columns of an image, K classes, L tokens.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.cli.about import said_by
from gbfunc.cli.commands import Predict
from gbfunc.cli.job import load_task, read_json
from gbfunc.cli.networks import read_genome
from gbfunc.cli.options import DataOptions
from gbfunc.export.qr import opaque, read_qr
from gbfunc.tasks import Task, logits_of
from gbfunc.tasks.pnets import Interface, find_pnet
from gbfunc.tasks.texts import pretrained_tokens
from gbfunc.types import JSON

if TYPE_CHECKING:
    from PIL import Image

_TEXTS = (".txt", ".text", ".md")

Inputs = Iterator[tuple[str, Tensor]]
"""Each with a name: images as [C, h, w], texts as tokens [L]."""


def run(options: Predict) -> None:
    """Print name, class and probability of every input."""
    if not options.inputs or options.top < 1:
        raise ValueError(f"predict needs files, and --top of at least 1, got {len(options.inputs)} and {options.top}")
    said = said_by(options.genome)
    # A tokenizer that was learned is in the task's data alone.
    load = load_task if options.data_dir is not None else lambda data: task_of(data, said)
    _, task, net = read_genome(options.genome, options, load=load)
    names = said.get("classes") or [str(i) for i in range(task.interface.outputs)]
    if not isinstance(names, list) or len(names) != task.interface.outputs:
        raise ValueError(f"{options.genome} names classes {names!r}, its network has {task.interface.outputs}")
    for name, x in chain.from_iterable(read_inputs(path, task, said) for path in options.inputs):
        with torch.no_grad():
            probabilities_K = logits_of(net(x[None]))[0].softmax(0)
        best = probabilities_K.topk(min(options.top, len(names)))
        ranked = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        print("\t".join([name, *(f"{names[k]}\t{value:.4f}" for k, value in ranked)]), flush=True)


def task_of(options: DataOptions, said: Mapping[str, Any]) -> Task:
    """What a genome's file says of its task, without its data."""
    try:
        inputs, *rest = said["interface"]
        interface = Interface(tuple(inputs), *rest)
        if not all(type(n) is int and n >= 1 for n in (*interface.inputs, interface.outputs)):
            raise TypeError(f"expected positive numbers, got {said['interface']!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the genome's file does not say what its inputs are ({error!r}): pass --data-dir") from error
    if options.task != (held := said.get("task", options.task)):
        raise ValueError(f"the genome's file is of the task {held}, got --task {options.task}: pass --data-dir too")
    config: JSON = read_json("--pnet-config", options.pnet_config)
    encode = None
    if interface.vocabulary:
        if options.pretrained is None:
            raise ValueError("the genome's tokens were learned from its texts: pass --data-dir, the folder with them")
        config["pretrained"] = options.pretrained
        encode = pretrained_tokens(options.pretrained, interface.inputs[0]).encode
    pnet = find_pnet(options.pnet or "mlp", interface, config)
    return Task(options.task, interface, None, None, None, pnet, encode=encode)


def read_inputs(path: Path, task: Task, said: Mapping[str, Any]) -> Inputs:
    """The inputs of a file, as the task's network takes them."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file of inputs: {path}")
    if task.interface.tokens or task.interface.actions:
        raise ValueError(f"predict classifies; the task {task.name} has no classes (for a language model: sample)")
    if task.interface.vocabulary:
        assert task.encode is not None
        yield from _texts(path, task.encode)
        return
    if path.suffix.lower() in _TEXTS:
        raise ValueError(f"{path} is a text, and the task {task.name} has images of shape {task.interface.inputs}")
    if not {"mean", "std"} <= said.keys():
        raise ValueError(f"the genome's file does not say how the pixels of {task.name} are scaled (mean, std)")
    mean, std = (np.asarray(said[name], np.float32).reshape(-1, 1, 1) for name in ("mean", "std"))
    if not (std > 0).all():
        raise ValueError(
            f"the genome's file says that the pixels of {task.name} have the deviation {said['std']}, not > 0"
        )
    for name, pixels_Chw in _images(path, task.interface.inputs, float(said.get("white", 255))):
        yield name, torch.from_numpy(((pixels_Chw - mean) / std).astype(np.float32))


def _texts(path: Path, encode: Callable[[str], Tensor]) -> Inputs:
    """The lines of a text that are not empty."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be a text in UTF-8, a line each: {error}") from error
    for i, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"{path}:{i}", encode(line.strip())


def _images(path: Path, shape: tuple[int, ...], white: float) -> Iterator[tuple[str, NDArray[Any]]]:
    """Images [C, h, w] of a file, their pixels in the units of the task's data."""
    if path.suffix.lower() not in (".npy", ".npz"):
        yield str(path), _picture(path, shape) * (white / 255)
        return
    for name, array in _arrays(path).items():
        images = _shaped(array, shape)
        numbers = array.dtype.kind in "uif"
        if images is None or not len(images) or not numbers or not np.isfinite(array).all():
            what = "" if images is None else ", with some that are not finite" if numbers else ", which are no numbers"
            got = f"{array.dtype} {array.shape} in {name}{what}"
            raise ValueError(f"{path} must hold images of shape {shape}, got {got}")
        for i, image in enumerate(images):
            yield f"{path}[{i}]" if name == "array" else f"{path}[{name}, {i}]", image


def _picture(path: Path, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """An image's file as [C, h, w], 0 to 255, in the task's size."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    channels, rows, cols = shape
    try:
        with Image.open(path) as image:
            ImageOps.exif_transpose(image, in_place=True)  # As the camera was held.
            shown = _in_8_bits(image).convert("L" if channels == 1 else "RGB")
            pixels = np.asarray(shown.resize((cols, rows)), np.float32)
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path} is no image that can be read: {error}") from error
    if _is_code(path):
        raise ValueError(f"{path} is a genome's QR code, not an image to classify: as a .png, --genome takes it")
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _in_8_bits(image: Image.Image) -> Image.Image:
    """An image of 0 to 255: 16 bits are scaled, as the format's whites are, and what is transparent shows white."""
    from PIL import Image

    sixteen = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    if image.mode in ("I", "F") and not sixteen:
        raise ValueError(f"its pixels must have 8 or 16 bits, got mode {image.mode}, which has no white: save it so")
    if sixteen:
        return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8))
    return opaque(image)


def _is_code(path: Path) -> bool:
    """Whether an image is a genome's QR code; False without the package that reads them."""
    try:
        read_qr(path)
    except (ImportError, ValueError):
        return False
    return True


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file, that of a `.npy` as `array`."""
    try:
        with path.open("rb") as file:
            held = np.load(file, allow_pickle=False)
            return {"array": held} if isinstance(held, np.ndarray) else {name: held[name] for name in held.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} holds no arrays that can be read: {error}") from error


def _shaped(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
    """Images [N, C, h, w] of an array of one or many, with channels first or last, or none; None for another."""
    channels, rows, cols = shape
    last = (rows, cols, channels)
    for kind in (shape, *([(rows, cols)] if channels == 1 else ()), last):
        if array.shape[-len(kind) :] == kind and array.ndim - len(kind) in (0, 1):
            images = array.reshape(-1, *kind)
            return images.transpose(0, 3, 1, 2) if kind == last != shape else images.reshape(-1, *shape)
    return None
