"""Compute the loss and the gradient of a genome on one batch: base classes in `loss`, one strategy per other file."""
