"""Methods to compute a genome's loss and gradient, a file each. `loss` has base classes, `proof` tests split p-nets."""
