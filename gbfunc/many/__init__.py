"""Modules that apply many genomes in one batch, and weighted sums of the weights of genomes."""

from gbfunc.many.genomes import ManyGenomes
from gbfunc.many.merge import merge_genomes
from gbfunc.many.several import ManyNets, materialize_many

__all__ = ["ManyGenomes", "ManyNets", "materialize_many", "merge_genomes"]
