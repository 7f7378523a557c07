"""`export`: a file of a chosen kind, run and compared before it is there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from gbfunc.export.formats import FORMATS, Format
from gbfunc.export.program import AUTO, BATCH, Inputs, Weights, module_of, ready, trace
from gbfunc.files import replace_file
from gbfunc.genome import check_genome, check_plan
from gbfunc.plan import Plan
from gbfunc.types import GenomeLike

SAFETENSORS = "safetensors"
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Largest difference of outputs over the largest output, by their dtype; ONNX has Python's numbers in float32."""


class Exported(NamedTuple):
    """What `export` wrote.

    Attributes:
        bytes: size of the file.
        max_error: largest difference of its outputs from those of the p-net in torch; None where it was not run.
    """

    bytes: int
    max_error: float | None


def export(
    path: str | os.PathLike[str],
    plan: Plan,
    genome: GenomeLike,
    pnet: nn.Module,
    example: Any = None,
    weights: Weights | None = None,
    to: str | None = None,
    *,
    dynamic_shapes: Any = AUTO,
    check: bool = True,
) -> Exported:
    """Write the network that a genome makes as a file that other programs run without gbfunc.

    With `weights="genome"` the file holds the genome, and generates the weights by standard operations where it is
    loaded or run: it has kilobytes. With `"dense"` it holds the weights. The network is in evaluation mode; stochastic
    g-nets give their mean. The file appears whole or not at all, after its program gave the p-net's outputs.

    | format | suffix | runs in |
    |---|---|---|
    | `"onnx"` | `.onnx` | onnxruntime, and whatever reads ONNX |
    | `"pt2"` | `.pt2` | `torch.export.load(path).module()` |
    | `"aoti"` | none | `torch._inductor.aoti_load_package(path)`, C++: machine code, compiled in a minute |
    | `"iree"` | `.vmfb` | IREE's runtime on CPUs |
    | `"safetensors"` | `.safetensors` | the state dict of dense weights, for `pnet.load_state_dict` |

    Args:
        path: where to; a file that is there is replaced.
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        pnet: the p-net, of which a genome needs the architecture alone.
        example: what it is called with: a tensor, a tuple of inputs, or a dict of inputs by name. `"safetensors"`
            needs none.
        weights: `"genome"` or `"dense"`; None is the genome, but for safetensors and for a genome that changes a base.
        to: the format; None takes it from the path's suffix.
        dynamic_shapes: which dimensions may have other sizes than in the example: `"batch"`, the first one of every
            tensor; `"auto"`, and where the network and the format allow it the length of texts (integers [B, L]) too;
            None, none; or what `torch.export.export` takes.
        check: run the program where its runtime is installed, on the example, on one row more, and on texts that are
            shorter by a token.

    Returns:
        The file's size, and the largest difference of its outputs.

    Raises:
        ImportError: if a package is missing, naming the extra that installs it.
        ValueError: for an unknown format, a p-net that cannot be traced, or a program whose outputs differ.
        OSError: if the file cannot be written.
    """
    check_plan(plan, pnet)
    check_genome(plan, genome)
    kind = _kind(Path(path), to)
    chosen = weights or ("dense" if kind == SAFETENSORS or plan.base is not None else "genome")
    if chosen not in ("genome", "dense"):
        raise ValueError(f"weights must be 'genome' or 'dense', got {weights!r}")
    if kind == SAFETENSORS and chosen == "genome":
        raise ValueError("safetensors holds tensors and no program: weights='dense', or gb.save for the genome")
    inputs = None if kind == SAFETENSORS else Inputs.of(example, pnet)
    net = module_of(plan, genome, pnet, chosen)
    like = net if chosen == "dense" else module_of(plan, genome, pnet, "dense")
    return _write(Path(path), kind, net, like, inputs, dynamic_shapes, check)


def export_module(
    path: str | os.PathLike[str], net: nn.Module, example: Any = None, to: str | None = None, **options: Any
) -> Exported:
    """Write a network with its dense weights to a file, in evaluation mode; options and errors as of `export`."""
    kind = _kind(Path(path), to)
    inputs = None if kind == SAFETENSORS else Inputs.of(example, net)
    return _write(Path(path), kind, ready(net), net, inputs, **{"dynamic_shapes": AUTO, "check": True, **options})


def _kind(path: Path, to: str | None) -> str:
    suffixes = {f.suffix: name for name, f in FORMATS.items() if f.suffix} | {f".{SAFETENSORS}": SAFETENSORS}
    if to is None and path.suffix.lower() in suffixes:
        return suffixes[path.suffix.lower()]
    if to not in (*FORMATS, SAFETENSORS):
        known = ", ".join([*(f"{name} ({suffix})" for suffix, name in suffixes.items()), "aoti"])
        got = f"to={to!r}" if to is not None else f"the suffix {path.suffix!r}"
        more = "gbfunc export writes pages (.html) and QR codes (.png, .svg), too"
        raise ValueError(f"the format must be one of {known}, got {got}; {more}")
    return to


def _write(
    path: Path, kind: str, net: nn.Module, like: nn.Module, inputs: Inputs | None, dynamic_shapes: Any, check: bool
) -> Exported:
    """Write the program of `net`, whose outputs must be those of `like`; without inputs its weights."""
    if inputs is None:
        # Tied weights are under each of their names.
        weights = {k: x.detach().cpu().clone().contiguous() for k, x in net.state_dict().items()}
        data, error = to_safetensors(weights), None
    else:
        data, error = _program(FORMATS[kind], net, like, inputs, dynamic_shapes, check)
    replace_file(path, data)
    return Exported(len(data), error)


def _program(
    kind: Format, net: nn.Module, like: nn.Module, inputs: Inputs, dynamic_shapes: Any, check: bool
) -> tuple[bytes, float | None]:
    """A file's bytes, and the largest difference of its outputs."""
    try:
        traced = trace(net, inputs, dynamic_shapes)
        data = kind.write(traced)
        tried = [inputs, inputs.longer()] if dynamic_shapes in (AUTO, BATCH) else [inputs]
        tried += [inputs.shorter()] if traced.lengths else []
        return data, _error(kind, data, like, tried) if check else None
    except ValueError:
        if dynamic_shapes != AUTO or not inputs.has_texts:
            raise
        # Of texts of any length not every network can be traced, nor compiled by every format.
        return _program(kind, net, like, inputs, BATCH, check)


def _error(kind: Format, data: bytes, like: nn.Module, tried: list[Inputs]) -> float | None:
    """Largest difference of a file's outputs from a network's; None where its runtime is not installed."""
    with tempfile.TemporaryDirectory(prefix="gbfunc-") as folder:
        try:
            run = kind.read(data, Path(folder))
            got = [run(inputs) for inputs in tried]
        except ImportError:
            return None
        except Exception as error:  # of several private types
            said = " ".join(str(error).split())[:300]
            raise ValueError(
                f"the file's runtime cannot run it ({said}); check=False writes it all the same"
            ) from error
        return max(_compared(outputs, like, inputs) for outputs, inputs in zip(got, tried, strict=True))


def _compared(got: list[Tensor], like: nn.Module, inputs: Inputs) -> float:
    """Largest difference of outputs; ValueError for more than rounding."""
    with torch.no_grad():
        expected = inputs.outputs_of(like)
    shapes = [[list(x.shape) for x in xs] for xs in (got, expected)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the exported program gives outputs of shapes {shapes[0]}, the p-net {shapes[1]}")
    largest = 0.0
    for x, y in zip(got, expected, strict=True):
        if not y.numel():
            continue
        wide_x, wide_y = x.double(), y.double()
        same = (wide_x == wide_y) | (wide_x.isnan() & wide_y.isnan())
        error = float(torch.where(same, 0.0, (wide_x - wide_y).abs()).max())
        size = float(torch.where(wide_y.isfinite(), wide_y.abs(), 0.0).max())
        if not error <= _TOLERANCE.get(y.dtype, 0.0) * max(1.0, size):
            raise ValueError(
                f"the exported program's outputs differ from the p-net's by {error:g} where they reach {size:g}"
            )
        largest = max(largest, error)
    return largest
