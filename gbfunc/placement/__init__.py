"""Where the genome lives on a mesh: who owns which tiles, what is gathered, and what is summed."""

from gbfunc.placement.cost import Cost, choose_placement, make_layout, placement_cost
from gbfunc.placement.layout import Layout, Placement, Rows, shares_of
from gbfunc.placement.outputs import gather_outputs, gather_slot, no_tiles
from gbfunc.placement.reduce import Reduced, reduce_step
from gbfunc.placement.state import gather_state, shard_state

__all__ = [
    "Cost",
    "Layout",
    "Placement",
    "Reduced",
    "Rows",
    "choose_placement",
    "gather_outputs",
    "gather_slot",
    "gather_state",
    "make_layout",
    "no_tiles",
    "placement_cost",
    "reduce_step",
    "shard_state",
    "shares_of",
]
