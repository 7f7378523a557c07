"""Many genomes of one plan: a batch in which every row has its genome, and their weighted sum as one module."""

from gbfunc.many.merge import merge_genomes
from gbfunc.many.module import ManyGenomes, materialize_many

__all__ = ["ManyGenomes", "materialize_many", "merge_genomes"]
