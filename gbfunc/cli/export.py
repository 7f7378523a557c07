"""The command that writes a genome's network as a file that other programs run: `export`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import gbfunc as gb
from gbfunc.cli.about import said_by
from gbfunc.cli.commands import Export
from gbfunc.cli.job import load_task
from gbfunc.cli.networks import read_genome
from gbfunc.cli.output import open_folder
from gbfunc.cli.predict import task_of
from gbfunc.export import export_module, page
from gbfunc.export.page.layers import layers_in_a_row
from gbfunc.export.qr import write_qr
from gbfunc.files import replace_file
from gbfunc.tasks.pnets import Interface
from gbfunc.types import JSON

_ROWS = 4
"""Examples that the program is traced with, and tried on."""


def run(options: Export) -> None:
    """Write the file; tell its size and how exact it is."""
    if options.out.exists() and options.genome.exists() and options.out.samefile(options.genome):
        raise ValueError(f"--out {options.out} is the genome's own file, which would be lost: choose another name")
    if options.out.is_dir():
        raise IsADirectoryError(f"--out {options.out} is a folder, expected a file")
    if options.qr is not None or options.out.suffix.lower() == ".html":
        return _to_browser(options)
    if options.out.suffix.lower() in (".png", ".svg"):
        raise ValueError(f"{options.out} would be a QR code, which opens a page: say its address as --qr PAGE")
    said = said_by(options.genome) if options.data_dir is None else {}
    load = (lambda data: task_of(data, said)) if "interface" in said else load_task
    plan, task, net = read_genome(options.genome, options, load=load)
    x = example(task.interface)
    with open_folder(options.out.parent):
        if plan.base is not None and options.weights != "genome":
            # The network has no longer the weights of the base, which the genome would change.
            made = export_module(options.out, net, x, options.to)
        else:
            made = gb.export(options.out, plan, gb.load(options.genome)[1], net, x, options.weights, options.to)
    error = "" if made.max_error is None else f"; its outputs are those of the p-net within {made.max_error:.1e}"
    print(f"{options.out}: {made.bytes:,} bytes, the genome has {options.genome.stat().st_size:,}{error}")


def _to_browser(options: Export) -> None:
    """Write a page, or a QR code of one."""
    if (options.weights or options.to) is not None:
        raise ValueError("--weights and --to are for programs: a page and a QR code hold the genome")
    said = said_by(options.genome)
    for name in ("task", "pnet"):
        if (given := getattr(options, name) or said.get(name)) != (held := said.get(name)):
            raise ValueError(f"a page has the {name} of the genome's file, {held}: drop --{name} {given}")
    page.check(gb.load(options.genome)[0])
    data = options.genome.read_bytes()
    if options.qr is not None:
        with open_folder(options.out.parent):
            write_qr(options.out, data, options.qr)
        print(f"{options.out}: the code of {options.qr} with the {len(data):,} bytes of the genome")
        return
    networks: dict[str, JSON] = {}
    unknown = ""
    if said.get("pnet") not in page.PNETS:
        try:
            networks = _described(options, said)
        except (ValueError, ImportError) as error:
            unknown = f"; it shows how the weights grow, and does not run the network: {error}"
    alphabets = {str(said["alphabet"]): _alphabet(options)} if not unknown and "alphabet" in said else {}
    text = page.page(data, alphabets, networks).encode()
    with open_folder(options.out.parent):
        replace_file(options.out, text)
    print(f"{options.out}: {len(text):,} bytes, the genome has {len(data):,}{unknown}")


def _described(options: Export, said: Mapping[str, Any]) -> dict[str, JSON]:
    """The p-net of one's own for a page, by its name in the genome's file; `ValueError` for one that no page runs."""
    interface, name = said.get("interface"), said.get("pnet")
    if not (isinstance(interface, list) and isinstance(interface[0], list) and {"mean", "std"} <= said.keys()):
        raise ValueError("it has images for those alone whose file says what they are like (interface, mean, std)")
    if name is None:
        raise ValueError("the genome's file does not name it (pnet)")
    shape, outputs = interface[0], interface[1]
    _, _, net = read_genome(options.genome, options, load=lambda data: task_of(data, said))
    network = page.network(layers_in_a_row(net), said)
    made = net(torch.zeros(1, *shape))
    if made.shape != (1, outputs):
        raise ValueError(f"it makes {list(made.shape)} of one example, expected [1, {outputs}]")
    return {str(name): network}


def _alphabet(options: Export) -> str:
    """The characters of a text task, in the order of its tokens."""
    _, task, _ = read_genome(options.genome, options)
    assert task.decode is not None
    characters = task.decode(list(range(task.interface.outputs)))
    if len(characters) != task.interface.outputs:
        raise ValueError("not in the browser yet: byte-pair tokens; a page writes characters")
    return characters


def example(interface: Interface) -> Tensor:
    """Some inputs of a kind, drawn."""
    shape, generator = (_ROWS, *interface.inputs), torch.Generator().manual_seed(0)
    if vocabulary := interface.vocabulary or interface.tokens * interface.outputs:
        return torch.randint(vocabulary, shape, generator=generator)
    return torch.randn(shape, generator=generator)
