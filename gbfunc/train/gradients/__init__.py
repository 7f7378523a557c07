"""Ways to compute the loss and the gradient of a genome. `loss` has the base classes. Every other file has one way."""
