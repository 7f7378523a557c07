"""Many ranks: a mesh, collectives that carry gradients, where the genome lives on the mesh, and simulated schedules.

The only user of `torch.distributed`.
"""

from gbfunc.parallel.checks import check_equal, text_of
from gbfunc.parallel.collectives import all_gather, from_rank_0, gather_objects, reduce_scatter, stack_ranks, sum_ranks
from gbfunc.parallel.exchange import (
    Entries,
    Gather,
    gather_state,
    reduce_step,
    shard_state,
    taken_off,
    weighted_mean,
    zero_uncounted,
)
from gbfunc.parallel.faults import CollectiveError
from gbfunc.parallel.mesh import Mesh, mesh
from gbfunc.parallel.placement import Layout, Placement, Rows, choose_placement, make_layout, placement_cost, shares_of
from gbfunc.parallel.schedule import simulate
from gbfunc.parallel.training_schedule import ScheduleCosts, make_schedule

__all__ = ["CollectiveError", "Entries", "Gather", "Layout", "Mesh", "Placement", "Rows", "ScheduleCosts"]
__all__ += ["all_gather", "check_equal", "choose_placement", "from_rank_0", "gather_objects", "gather_state"]
__all__ += ["make_layout", "make_schedule", "mesh", "placement_cost", "reduce_scatter", "reduce_step"]
__all__ += ["shard_state", "shares_of", "simulate", "stack_ranks", "sum_ranks", "taken_off"]
__all__ += ["text_of", "weighted_mean", "zero_uncounted"]
