"""Many ranks: a mesh, collectives that carry gradients, and placements of the genome.

The only user of `torch.distributed`.
"""

from gbfunc.parallel.checks import check_equal, text_of
from gbfunc.parallel.collectives import all_gather, from_rank_0, gather_objects, reduce_scatter, stack_ranks, sum_ranks
from gbfunc.parallel.exchange import Entries, Gather, gather_state, reduce_step, shard_state, taken_off, weighted_mean
from gbfunc.parallel.mesh import CollectiveError, Mesh, mesh
from gbfunc.parallel.placement import Layout, Placement, make_layout

__all__ = ["CollectiveError", "Entries", "Gather", "Layout", "Mesh", "Placement", "all_gather", "check_equal"]
__all__ += ["from_rank_0", "gather_objects", "gather_state", "make_layout", "mesh", "reduce_scatter", "reduce_step"]
__all__ += ["shard_state", "stack_ranks", "sum_ranks", "taken_off", "text_of", "weighted_mean"]
