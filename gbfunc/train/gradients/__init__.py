"""Methods to compute a genome's loss and gradient, one per file. `loss` has base classes; `proof` checks split nets."""
