"""Computes the loss and the gradient of a genome: base classes (`loss`), a file per method, and checks (`proof`)."""
