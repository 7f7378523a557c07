"""`export` writes a network to a file for other programs, and first compares the program's outputs with the p-net's."""

import os
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save as to_safetensors
from torch import nn

from gbfunc.exporting.formats import FORMATS, Format
from gbfunc.exporting.program import AUTO, BATCH, Inputs, is_text, trace
from gbfunc.files import replace_file
from gbfunc.genome import check_genome, check_plan
from gbfunc.grown import materialize
from gbfunc.plan import Plan
from gbfunc.types import GenomeLike

SAFETENSORS = "safetensors"
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""{dtype of the outputs: largest allowed error, as a fraction of the largest output (of 1 if this is smaller)}"""


class Exported(NamedTuple):
    """Size of an exported file in bytes, and largest absolute error of the outputs, or None if no program was run."""

    bytes: int
    max_error: float | None


def export(
    path: str | os.PathLike[str],
    plan: Plan,
    genome: GenomeLike,
    pnet: nn.Module,
    example: Any = None,
    weights: Literal["genome", "dense"] | None = None,
    to: str | None = None,
    *,
    dynamic_shapes: Any = AUTO,
    check: bool = True,
) -> Exported:
    """Write the network that a genome generates to a file that other programs run without gbfunc.

    The network is in evaluation mode. Stochastic g-nets generate mean weights. If the format's runtime is installed,
    the file is written only if the program reproduces the p-net's outputs. The file is written atomically.

    Args:
        path: the file; an existing file is replaced.
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        pnet: the p-net. If the plan has no base, the values of the p-net's tensors do not matter.
        example: inputs of a call: a tensor, a tuple of inputs, or a dict of inputs by name; None for `"safetensors"`.
        weights: `"genome"` writes the genome (kilobytes) and the operations that generate the weights; `"dense"` writes
            the weights, and is the default for safetensors and for a genome with a base.
        to: the format; if None, the path's suffix selects the format. `"onnx"` (`.onnx`); `"pt2"` (`.pt2`, read by
            `torch.export.load(path).module()`); `"aoti"` (machine code, compiled in a minute, for C++ and
            `torch._inductor.aoti_load_package(path)`); `"iree"` (`.vmfb`, for IREE's runtime on CPUs);
            `"safetensors"`, the state dict of dense weights.
        dynamic_shapes: the dimensions that may differ from the example. `"batch"` is the first dimension of every
            tensor. `"auto"` adds the length of texts (integers [batch, length]) if network and format support other
            lengths. None: only the example's shapes. All other values are passed to `torch.export.export`.
        check: run the exported program with the example, if the format's runtime is installed. If the batch size or
            the length of texts may differ, also run the program with one more row, or with texts one token shorter.

    Raises:
        ImportError: if a package is missing; the message names the extra that installs the package.
        ValueError: for an unknown format, a p-net that cannot be traced, or a program whose outputs are wrong.
    """
    check_plan(plan, pnet)
    check_genome(plan, genome)
    kind = _kind(Path(path), to)
    dense = kind == SAFETENSORS or plan.base is not None
    stored = weights or ("dense" if dense else "genome")
    if stored not in ("genome", "dense"):
        raise ValueError(f"weights must be 'genome' or 'dense', got {weights!r}")
    if dense and stored == "genome":
        words = "safetensors holds no program" if kind == SAFETENSORS else "the file would lack the weights of the base"
        raise ValueError(f"{words}: pass weights='dense', or use gb.save for the genome")
    like = net = ready(materialize(plan, genome, pnet))
    if stored == "genome":
        from gbfunc.module import GenomeModule

        net = ready(GenomeModule(plan, pnet, genome, lazy=False))
    return _write(Path(path), kind, net, like, example, dynamic_shapes, check)


def export_module(
    path: str | os.PathLike[str], net: nn.Module, example: Any = None, to: str | None = None, **options: Any
) -> Exported:
    """Write a network with dense weights to a file, in evaluation mode; options and errors are those of `export`."""
    return _write(Path(path), _kind(Path(path), to), ready(net), net, example, **options)


def _kind(path: Path, to: str | None) -> str:
    suffixes = {f.suffix: name for name, f in FORMATS.items() if f.suffix} | {f".{SAFETENSORS}": SAFETENSORS}
    kind = suffixes.get(path.suffix.lower()) if to is None else to
    if kind not in (*FORMATS, SAFETENSORS):
        known = ", ".join([*(f"{name} ({suffix})" for suffix, name in suffixes.items()), "aoti"])
        got = f"to={to!r}" if to is not None else f"the suffix {path.suffix!r}"
        more = "gbfunc export also writes pages (.html) and QR codes (.png, .svg)"
        raise ValueError(f"the format must be one of {known}, got {got}; {more}")
    return kind


def ready(net: nn.Module) -> nn.Module:
    """Put a network into evaluation mode on the CPU, without gradients and without caches of keys and values."""
    for module in net.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return net.cpu().eval().requires_grad_(False)


def _write(
    path: Path, kind: str, net: nn.Module, like: nn.Module, example: Any, dynamic_shapes: Any = AUTO, check: bool = True
) -> Exported:
    if kind == SAFETENSORS:
        # A tied weight is written once per name, as in `state_dict()`.
        weights = {k: x.detach().cpu().clone().contiguous() for k, x in net.state_dict().items()}
        data, error = to_safetensors(weights), None
    else:
        data, error = _program(FORMATS[kind], net, like, Inputs.of(example, like), dynamic_shapes, check)
    replace_file(path, data)
    return Exported(len(data), error)


def _program(
    kind: Format, net: nn.Module, like: nn.Module, inputs: Inputs, dynamic_shapes: Any, check: bool
) -> tuple[bytes, float | None]:
    tried = [inputs, inputs.longer()] if dynamic_shapes in (AUTO, BATCH) else [inputs]
    if texts := dynamic_shapes == AUTO and any(map(is_text, inputs.tensors)):
        tried.append(inputs.shorter())
    try:
        data = kind.write(trace(net, inputs, dynamic_shapes))
        return data, _error(kind, data, like, tried) if check else None
    except ValueError:
        if not texts:
            raise
        # Some networks and formats support only one length of texts: export again for the example's length.
        return _program(kind, net, like, inputs, BATCH, check)


def _error(kind: Format, data: bytes, like: nn.Module, tried: list[Inputs]) -> float | None:
    with tempfile.TemporaryDirectory(prefix="gbfunc-") as folder:
        try:
            run = kind.read(data, Path(folder))
            got = [run(inputs) for inputs in tried]
        except ImportError:
            return None
        except Exception as error:  # Runtimes raise errors of their own types
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"the runtime cannot run the file ({reason}): check=False writes it anyway") from error
        with torch.no_grad():
            expected = [inputs.outputs_of(like) for inputs in tried]
    largest = 0.0
    for outputs, others in zip(got, expected, strict=True):
        shapes = [[list(x.shape) for x in xs] for xs in (outputs, others)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"expected outputs of shapes {shapes[1]}, got {shapes[0]} from the exported program")
        for x, y in zip((z.double() for z in outputs if z.numel()), (z for z in others if z.numel()), strict=True):
            wide = y.double()
            same = (x == wide) | (x.isnan() & wide.isnan())
            error = float(torch.where(same, 0.0, (x - wide).abs()).max())
            size = float(torch.where(wide.isfinite(), wide.abs(), 0.0).max())
            if not error <= _TOLERANCE.get(y.dtype, 0.0) * max(1.0, size):
                far = f"up to {error:g}; the largest output is {size:g}"
                raise ValueError(f"the exported program's outputs differ from the p-net's by {far}")
            largest = max(largest, error)
    return largest
