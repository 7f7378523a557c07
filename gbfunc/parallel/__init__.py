"""Training on several ranks: a mesh, differentiable collectives, and placements of the genome.

No other package of gbfunc uses `torch.distributed`.
"""

from gbfunc.parallel.checks import check_equal, text_of
from gbfunc.parallel.collectives import all_gather, from_rank_0, gather_objects, reduce_scatter, stack_ranks, sum_ranks
from gbfunc.parallel.exchange import Entries, Gather, decrease, gather_state, reduce_step, shard_state, weighted_mean
from gbfunc.parallel.mesh import CollectiveError, Mesh, mesh
from gbfunc.parallel.placement import Layout, Placement, make_layout

__all__ = ["CollectiveError", "Entries", "Gather", "Layout", "Mesh", "Placement", "all_gather", "check_equal"]
__all__ += ["decrease", "from_rank_0", "gather_objects", "gather_state", "make_layout", "mesh", "reduce_scatter"]
__all__ += ["reduce_step", "shard_state", "stack_ranks", "sum_ranks", "text_of", "weighted_mean"]
