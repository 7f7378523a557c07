"""Algorithms for a genome's loss and gradient, one per file. `loss` has base classes; `proof` checks split p-nets."""
