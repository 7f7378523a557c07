"""The command that writes a genome's network as a file that other programs run: `export`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

import gbfunc as gb
from gbfunc.cli.commands import Export
from gbfunc.cli.job import load_task
from gbfunc.cli.networks import read_genome
from gbfunc.cli.output import make_folder
from gbfunc.cli.predict import task_of
from gbfunc.export import export_module
from gbfunc.tasks.pnets import Interface

_ROWS = 4
"""Examples that the program is traced with, and tried on."""


def run(options: Export) -> None:
    """Write the file; tell its size and how exact it is."""
    if options.out.exists() and options.genome.exists() and options.out.samefile(options.genome):
        raise ValueError(f"--out {options.out} is the genome's own file, which would be lost: choose another name")
    said = gb.load_metadata(options.genome) if options.genome.is_file() else None
    said = said if isinstance(said, Mapping) and options.data_dir is None else {}
    load = (lambda data: task_of(data, said)) if "interface" in said else load_task
    plan, task, net = read_genome(options.genome, options, load=load)
    make_folder(options.out.parent)
    x = example(task.interface)
    if plan.base is not None and options.weights != "genome":
        # The network has no longer the weights of the base, which the genome would change.
        made = export_module(options.out, net, x, options.to)
    else:
        made = gb.export(options.out, plan, gb.load(options.genome)[1], net, x, options.weights, options.to)
    error = "" if made.max_error is None else f"; its outputs are those of the p-net within {made.max_error:.1e}"
    print(f"{options.out}: {made.bytes:,} bytes, the genome has {options.genome.stat().st_size:,}{error}")


def example(interface: Interface) -> Tensor:
    """Some inputs of a kind, drawn."""
    shape, generator = (_ROWS, *interface.inputs), torch.Generator().manual_seed(0)
    if vocabulary := interface.vocabulary or interface.tokens * interface.outputs:
        return torch.randint(vocabulary, shape, generator=generator)
    return torch.randn(shape, generator=generator)
