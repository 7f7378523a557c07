"""Loss and gradient of a genome on one batch, and the strategies for computing the gradient, one file each.

* `loss`: one graph from the loss through the p-net's weights to the g-nets, `compiled` in the file of this name;
* `accumulated`: microbatches add up gradients on the weights, which go through the g-nets once;
* `pipelined`: microbatches go through stages on several ranks, and add up gradients on the weights likewise;
* `batched`: many genomes at once, under `vmap`.

`choose` picks one, and `ranks` does the rest where each of many ranks has a share of the batch. In each of them weights
may stay factors, or be made again in backward: that is the form of a weight (`gbfunc.layers`).
"""

from gbfunc.train.gradients.choose import make_objective
from gbfunc.train.gradients.loss import LossAndGrads, LossFn, Objective, loss_and_aux, noise_of, seeded

__all__ = ["LossAndGrads", "LossFn", "Objective", "loss_and_aux", "make_objective", "noise_of", "seeded"]
