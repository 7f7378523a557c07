"""The command that writes a genome's network as a file that other programs run: `export`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor
from tyro.conf import arg

import gbfunc as gb
from gbfunc.cli.networks import read_genome
from gbfunc.cli.options import GenomeFileOptions
from gbfunc.cli.output import make_folder
from gbfunc.export import export_module
from gbfunc.tasks import Task

_ROWS = 4
"""Examples that the program is traced with, and tried on."""


@dataclass(frozen=True, kw_only=True)
class Export(GenomeFileOptions):
    """Write the network of a genome file for other programs: ONNX, torch.export, AOTInductor, IREE, safetensors."""

    out: Annotated[Path, arg(metavar="FILE")]
    """Where to; a file that is there is replaced."""

    to: Annotated[
        Literal["onnx", "pt2", "aoti", "iree", "safetensors"] | None,
        arg(metavar="onnx|pt2|aoti|iree|safetensors", help_behavior_hint="(default: by the suffix of --out)"),
    ] = None
    """The format: suffixes .onnx, .pt2 (torch.export), .vmfb (IREE) and .safetensors tell it; aoti is AOTInductor."""

    weights: Annotated[
        Literal["genome", "dense"] | None,
        arg(metavar="genome|dense", help_behavior_hint="(default: genome; dense for safetensors)"),
    ] = None
    """genome: the file holds the genome, and generates the weights where it runs; dense: it holds the weights."""

    def run(self) -> None:
        """Write the file; tell its size and how exact it is."""
        plan, task, net = read_genome(self.genome, self)
        make_folder(self.out.parent)
        x = example(task)
        if self.weights == "dense" and plan.base is not None:
            # The network has no longer the weights of the base, which the genome would change.
            made = export_module(self.out, net, x, self.to)
        else:
            made = gb.export(self.out, plan, gb.load(self.genome)[1], net, x, self.weights, self.to)
        error = "" if made.max_error is None else f"; its outputs are those of the p-net within {made.max_error:.1e}"
        print(f"{self.out}: {made.bytes:,} bytes, the genome has {self.genome.stat().st_size:,}{error}")


def example(task: Task) -> Tensor:
    """Some inputs of a task."""
    chunks = getattr(task.test, "chunks", None)
    if chunks is None:
        return torch.randn(_ROWS, *task.interface.inputs, generator=torch.Generator().manual_seed(0))
    return next(x for x, *_ in islice(chunks(_ROWS), 1))
