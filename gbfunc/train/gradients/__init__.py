"""Loss and gradient of a genome on one batch, and the strategies for computing the gradient, one file each.

* `one_graph`: one graph from the loss through the p-net's weights to the g-nets, eager or compiled;
* `accumulated`: microbatches add up gradients on the weights, which go through the g-nets once;
* `pipelined`: microbatches go through stages on several ranks, and add up gradients on the weights likewise;
* `batched`: many genomes at once, under `vmap`.

In each of them weights may stay factors, or be made again in backward: that is the form of a weight (`gbfunc.layers`).
"""

from gbfunc.train.gradients.loss import LossFn, loss_and_aux, noise_of, seeded
from gbfunc.train.gradients.objective import LossAndGrads, Objective

__all__ = ["LossAndGrads", "LossFn", "Objective", "loss_and_aux", "noise_of", "seeded"]
