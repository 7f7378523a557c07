"""A training state between its two forms: full, as on one rank, and as this rank holds it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from gbfunc.genome import check_genome
from gbfunc.parallel.layout import Layout
from gbfunc.parallel.wire import gather_exactly
from gbfunc.trees import GNET
from gbfunc.types import GNets


def shard_state(layout: Layout, state: Any) -> Any:
    """This rank's rows of a full state: of the leaves that are split, and of the optimizer's state for them.

    Raises:
        ValueError: if the state is not a full one of the plan.
    """
    check_genome(layout.plan, state)
    if not layout.sharded:
        return state

    def rows(name: str, x: Tensor) -> Tensor:
        first, count, _ = layout.ownership[name]
        # A copy: a view would keep the whole alive.
        return x[first : first + count].clone()

    gnets: GNets = {}
    for e, leaves in state.gnets.items():
        names = {k: f"{GNET}{e}/{k}" for k in leaves}
        gnets[e] = {k: rows(names[k], x) if names[k] in layout.split else x for k, x in leaves.items()}
    opt = {
        name: {k: rows(name, x) if x.ndim and name in layout.split else x for k, x in entries.items()}
        for name, entries in state.opt.leaves.items()
    }
    return state._replace(gnets=gnets, opt=state.opt._replace(leaves=opt))


def gather_state(layout: Layout, state: Any) -> Any:
    """Undo `shard_state`: the full state, on every rank; all ranks must call.

    Raises:
        ValueError: if the state is not this rank's part of a state of the plan.
        CollectiveError: if a rank is missing.
    """
    check_genome(layout.plan, state, layout.shapes)
    if not layout.sharded:
        return state
    ranks = layout.mesh.gnets
    sent: dict[tuple[str, str], Tensor] = {}
    for e, leaves in state.gnets.items():
        sent |= {(f"{GNET}{e}/{k}", ""): x for k, x in leaves.items() if f"{GNET}{e}/{k}" in layout.split}
    for name, entries in state.opt.leaves.items():
        sent |= {(name, k): x for k, x in entries.items() if name in layout.split}
    # All ranks must send in one order, whatever that of their dicts.
    keys = sorted(sent)
    tiles = {key: layout.sizes[key[0].removeprefix(GNET).rpartition("/")[0]] for key in keys}
    pieces = [sent[key] if sent[key].ndim else sent[key].reshape(1) for key in keys]
    sizes = [tiles[key] if sent[key].ndim else (1,) * ranks for key in keys]
    whole = dict(zip(keys, gather_exactly(layout.mesh, pieces, sizes, "gnets"), strict=True))
    for key in keys:
        if not sent[key].ndim:
            # A number for all rows (the step of Adam): from a rank that has rows.
            whole[key] = whole[key][next(r for r, n in enumerate(tiles[key]) if n)]
    gnets: dict[str, Any] = {
        e: {k: whole.get((f"{GNET}{e}/{k}", ""), x) for k, x in leaves.items()} for e, leaves in state.gnets.items()
    }
    opt = {name: {k: whole.get((name, k), x) for k, x in entries.items()} for name, entries in state.opt.leaves.items()}
    return state._replace(gnets=gnets, opt=state.opt._replace(leaves=opt))
