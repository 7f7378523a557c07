"""The only user of `torch.distributed`: ranks as a mesh, and collectives that carry gradients."""

from gbfunc.collective.checks import check_equal
from gbfunc.collective.faults import CollectiveError
from gbfunc.collective.graph import all_gather, reduce_scatter
from gbfunc.collective.mesh import AxisName, Mesh, alone, mesh
from gbfunc.collective.wire import Sizes, from_rank_0, gather_exactly, sum_ranks

__all__ = [
    "AxisName",
    "CollectiveError",
    "Mesh",
    "Sizes",
    "all_gather",
    "alone",
    "check_equal",
    "from_rank_0",
    "gather_exactly",
    "mesh",
    "reduce_scatter",
    "sum_ranks",
]
