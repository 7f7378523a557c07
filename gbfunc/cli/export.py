"""`gbfunc export`: a genome's network as a file that other programs run, as a page, or as a QR code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import gbfunc as gb
from gbfunc.cli.commands import Export
from gbfunc.cli.genomes import read_genome, said_by
from gbfunc.cli.options import flags
from gbfunc.cli.output import open_folder
from gbfunc.export import export_module, page
from gbfunc.export.page import layers_in_a_row
from gbfunc.export.qr import write_qr
from gbfunc.files import replace_file
from gbfunc.tasks.pnets import Interface
from gbfunc.types import JSON

_ROWS = 4
"""Examples that the program is traced with, and tried on."""


def run_export(options: Export) -> None:
    """Write the file; tell its size and how exact it is."""
    out = options.out
    if out.exists() and options.genome.exists() and out.samefile(options.genome):
        raise ValueError(f"--out {out} is the genome's own file, which would be lost: choose another name")
    if out.is_dir():
        raise IsADirectoryError(f"--out {out} is a folder, expected a file")
    if options.qr is not None or out.suffix.lower() == ".html":
        return _to_browser(options)
    if out.suffix.lower() in (".png", ".svg"):
        raise ValueError(f"{out} would be a QR code, which opens a page: say its address as --qr PAGE")
    plan, task, net = read_genome(options.genome, options, alone=True)
    x = example(task.interface)
    with open_folder(out.parent):
        if plan.base is not None and options.weights != "genome":
            # The network has no longer the weights of the base, which the genome would change.
            made = export_module(out, net, x, options.to)
        else:
            made = gb.export(out, plan, gb.load(options.genome)[1], net, x, options.weights, options.to)
    error = "" if made.max_error is None else f"; its outputs are those of the p-net within {made.max_error:.1e}"
    print(f"{out}: {made.bytes:,} bytes, the genome has {options.genome.stat().st_size:,}{error}")


def _to_browser(options: Export) -> None:
    """Write a page, or a QR code of one."""
    if (options.weights or options.to) is not None:
        raise ValueError("--weights and --to are for programs: a page and a QR code hold the genome")
    said, data = said_by(options.genome), options.genome.read_bytes()
    for name in ("task", "pnet"):
        if (given := getattr(options, name) or said.get(name)) != (held := said.get(name)):
            raise ValueError(f"a page has the {name} of the genome's file, {held}: drop {flags([name])} {given}")
    page.check(gb.load(options.genome)[0])
    with open_folder(options.out.parent):
        if options.qr is not None:
            write_qr(options.out, data, options.qr)
            print(f"{options.out}: the code of {options.qr} with the {len(data):,} bytes of the genome")
            return
        networks, unknown = {}, ""
        if said.get("pnet") not in page.PNETS:
            try:
                networks = _described(options, said)
            except (ValueError, ImportError) as error:
                unknown = f"; it shows how the weights grow, and does not run the network: {error}"
        alphabets = {str(said["alphabet"]): _alphabet(options)} if not unknown and "alphabet" in said else {}
        text = page.page(data, alphabets, networks).encode()
        replace_file(options.out, text)
    print(f"{options.out}: {len(text):,} bytes, the genome has {len(data):,}{unknown}")


def _described(options: Export, said: Mapping[str, Any]) -> dict[str, JSON]:
    """Describe a p-net of the user's for a page, by its name in the file; raises `ValueError` if no page runs it."""
    interface, name = said.get("interface"), said.get("pnet")
    if not (isinstance(interface, list) and isinstance(interface[0], list) and {"mean", "std"} <= said.keys()):
        raise ValueError("it has images for those alone whose file says what they are like (interface, mean, std)")
    if name is None:
        raise ValueError("the genome's file does not name it (pnet)")
    shape, outputs = interface[0], interface[1]
    _, _, net = read_genome(options.genome, options, alone=True)
    network = page.network(layers_in_a_row(net), said)
    made = net(torch.zeros(1, *shape))
    if made.shape != (1, outputs):
        raise ValueError(f"it makes {list(made.shape)} of one example, expected [1, {outputs}]")
    return {str(name): network}


def _alphabet(options: Export) -> str:
    """Find the characters of a text task, in the order of its tokens."""
    _, task, _ = read_genome(options.genome, options)
    assert task.decode is not None
    characters = task.decode(list(range(task.interface.outputs)))
    if len(characters) != task.interface.outputs:
        raise ValueError("not in the browser yet: byte-pair tokens; a page writes characters")
    return characters


def example(interface: Interface) -> Tensor:
    """Draw inputs of a kind."""
    shape, generator = (_ROWS, *interface.inputs), torch.Generator().manual_seed(0)
    if vocabulary := interface.vocabulary or interface.tokens * interface.outputs:
        return torch.randint(vocabulary, shape, generator=generator)
    return torch.randn(shape, generator=generator)
