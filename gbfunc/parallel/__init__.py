"""Many ranks: a mesh, collectives that carry gradients, and where the genome lives on the mesh.

The only user of `torch.distributed`.
"""

from gbfunc.parallel.checks import check_equal
from gbfunc.parallel.cost import Cost, choose_placement, make_layout, placement_cost
from gbfunc.parallel.faults import CollectiveError
from gbfunc.parallel.graph import all_gather, reduce_scatter
from gbfunc.parallel.layout import Layout, Placement, Rows, shares_of
from gbfunc.parallel.mesh import AxisName, Mesh, mesh, single_rank_mesh
from gbfunc.parallel.outputs import gather_outputs, gather_slot, no_tiles
from gbfunc.parallel.reduce import Reduced, reduce_step
from gbfunc.parallel.state import gather_state, shard_state
from gbfunc.parallel.wire import Sizes, from_rank_0, gather_exactly, sum_ranks

__all__ = [
    "AxisName",
    "CollectiveError",
    "Cost",
    "Layout",
    "Mesh",
    "Placement",
    "Reduced",
    "Rows",
    "Sizes",
    "all_gather",
    "check_equal",
    "choose_placement",
    "from_rank_0",
    "gather_exactly",
    "gather_outputs",
    "gather_slot",
    "gather_state",
    "make_layout",
    "mesh",
    "no_tiles",
    "placement_cost",
    "reduce_scatter",
    "reduce_step",
    "shard_state",
    "shares_of",
    "single_rank_mesh",
    "sum_ranks",
]
