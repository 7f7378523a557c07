"""`gbfunc predict`: classes of inputs in files, from a genome's file without data.

Suffixes: N inputs, C channels, h rows and w columns of an image, K classes, L tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gbfunc.cli import printable
from gbfunc.cli.commands import Predict
from gbfunc.cli.genomes import read_genome, said_by
from gbfunc.exporting.qr import read_qr
from gbfunc.tasks import Task, logits_of
from gbfunc.untrusted import read_arrays, read_picture


@torch.no_grad()
def run_predict(options: Predict) -> None:
    if not options.inputs:
        raise ValueError("predict needs files to classify")
    said = said_by(options.genome)
    # A learned tokenizer needs the task's data.
    _, task, net = read_genome(options.genome, options, bare=True)
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
    if path.suffix.lower() in (".txt", ".text", ".md"):
        raise ValueError(f"{path} is a text, and the task {task.name} has images of shape {shape}")
    if not {"mean", "std"} <= said.keys():
        raise ValueError(f"the genome's file does not say how the pixels of {task.name} are scaled (mean, std)")
    mean, std, white = (_numbers(said, name, shape[0]) for name in ("mean", "std", "white"))
    if not (std > 0).all():
        deviation = f"the deviation {said['std']}, expected numbers above 0"
        raise ValueError(f"the genome's file says that the pixels of {task.name} have {deviation}")
    is_array = path.suffix.lower() in (".npy", ".npz")
    found = _arrays(path, shape) if is_array else [(str(path), _picture(path, shape) * (white / 255))]
    for name, pixels_Chw in found:
        yield name, torch.from_numpy(((pixels_Chw - mean) / std).astype(np.float32))


def _numbers(said: Mapping[str, Any], name: str, channels: int) -> NDArray[np.float32]:
    """Read a number, or one for each channel, from a file's metadata: [1 or C, 1, 1]."""
    value = said.get(name, 255)
    numbers = np.asarray(value, object).ravel().tolist()
    known = all(type(x) in (int, float) and abs(x) < 1e30 for x in numbers)
    if not known or len(numbers) not in ({1} if name == "white" else {1, channels}):
        raise ValueError(f"the genome's file says {name} {value!r:.80}, expected a number, or one for each channel")
    return np.array(numbers, np.float32).reshape(-1, 1, 1)


def _picture(path: Path, shape: tuple[int, ...]) -> NDArray[np.float32]:
    channels, rows, cols = shape
    picture = read_picture(path, "L" if channels == 1 else "RGB")
    try:
        read_qr(path)
    except (ImportError, ValueError):
        # It is no code, or the package that reads codes is missing.
        pixels = np.asarray(picture.resize((cols, rows)), np.float32)
        return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
    raise ValueError(f"{path} is a genome's QR code, not an image to classify: as a .png, --genome takes it")


def _arrays(path: Path, shape: tuple[int, ...]) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, array in read_arrays(path).items():
        images = _shaped(array, shape)
        if images is None or not len(images) or array.dtype.kind == "b" or not np.isfinite(array).all():
            finite = "" if images is None else ", expected finite numbers"
            got = f"{array.dtype} {array.shape} in {name or 'array'}{finite}"
            raise ValueError(f"{path} must hold images of shape {shape}, got {got}")
        for i, image in enumerate(images):
            yield f"{path}[{name}, {i}]" if name else f"{path}[{i}]", image


def _shaped(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
    """Find images [N, C, h, w] in an array of one or many, with channels first or last, or none; None for another."""
    channels, rows, cols = shape
    last = (rows, cols, channels)
    for kind in (shape, *([(rows, cols)] if channels == 1 else ()), last):
        if array.shape[-len(kind) :] == kind and array.ndim - len(kind) in (0, 1):
            images = array.reshape(-1, *kind)
            return images.transpose(0, 3, 1, 2) if kind == last != shape else images.reshape(-1, *shape)
    return None
