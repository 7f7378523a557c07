"""The command that writes a genome's network as a file that other programs run: `export`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor
from tyro.conf import arg

import gbfunc as gb
from gbfunc.cli.job import load_task
from gbfunc.cli.networks import read_genome
from gbfunc.cli.options import ConfigOption, GenomeFileOptions
from gbfunc.cli.output import make_folder
from gbfunc.cli.predict import task_of
from gbfunc.export import export_module
from gbfunc.tasks.pnets import Interface

_ROWS = 4
"""Examples that the program is traced with, and tried on."""


@dataclass(frozen=True, kw_only=True)
class Export(ConfigOption, GenomeFileOptions):
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
        arg(metavar="genome|dense", help_behavior_hint="(default: genome; dense for safetensors, and adapters)"),
    ] = None
    """genome: the file holds the genome, and generates the weights where it runs; dense: it holds the weights."""

    def run(self) -> None:
        """Write the file; tell its size and how exact it is."""
        if self.out.exists() and self.genome.exists() and self.out.samefile(self.genome):
            raise ValueError(f"--out {self.out} is the genome's own file, which would be lost: choose another name")
        said = gb.load_metadata(self.genome) if self.genome.is_file() else None
        said = said if isinstance(said, Mapping) and self.data_dir is None else {}
        load = (lambda options: task_of(options, said)) if "interface" in said else load_task
        plan, task, net = read_genome(self.genome, self, load=load)
        make_folder(self.out.parent)
        x = example(task.interface)
        if plan.base is not None and self.weights != "genome":
            # The network has no longer the weights of the base, which the genome would change.
            made = export_module(self.out, net, x, self.to)
        else:
            made = gb.export(self.out, plan, gb.load(self.genome)[1], net, x, self.weights, self.to)
        error = "" if made.max_error is None else f"; its outputs are those of the p-net within {made.max_error:.1e}"
        print(f"{self.out}: {made.bytes:,} bytes, the genome has {self.genome.stat().st_size:,}{error}")


def example(interface: Interface) -> Tensor:
    """Some inputs of a kind, drawn."""
    shape, generator = (_ROWS, *interface.inputs), torch.Generator().manual_seed(0)
    if vocabulary := interface.vocabulary or interface.tokens * interface.outputs:
        return torch.randint(vocabulary, shape, generator=generator)
    return torch.randn(shape, generator=generator)
