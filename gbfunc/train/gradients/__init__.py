"""Loss and gradient of a genome on one batch, one file per strategy.

* `loss`: one graph from the loss through the p-net's weights to the g-nets; `compiled`: the same, compiled;
* `accumulated`: microbatches add up gradients on the weights, which go through the g-nets once;
* `pipelined`: microbatches go through stages on several ranks.

`choose` picks one, and `ranks` adds up over ranks that have a share of the batch each.
"""
