"""Many genomes in a batch, and their weighted sum."""

from gbfunc.many.genomes import ManyGenomes
from gbfunc.many.merge import merge_genomes
from gbfunc.many.several import ManyNets, materialize_many

__all__ = ["ManyGenomes", "ManyNets", "materialize_many", "merge_genomes"]
