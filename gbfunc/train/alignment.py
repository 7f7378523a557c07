"""Measures how well a training step of the genome follows the gradient of the p-net's weights."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.grown import materialize
from gbfunc.plan import Plan
from gbfunc.pnet.describe import keep_statistics
from gbfunc.train.gradients.loss import LossFn, loss_and_aux, noise_of, seeded
from gbfunc.train.step import TrainState, step_seed
from gbfunc.trees import flat_genome
from gbfunc.types import GenomeLike


class UpdateAlignment(NamedTuple):
    """Cosines, from -1 to 1, between an update's change of the weights and the negative gradient of the loss."""

    tensors: Mapping[str, float]  # cosine of each parameter, by name; nan if the change or the gradient is zero
    overall: float  # cosine for the vector of all parameters


def update_alignment(
    plan: Plan, pnet: nn.Module, loss_fn: LossFn, before: TrainState, after: GenomeLike, batch: Any
) -> UpdateAlignment:
    r"""Compare a genome's update of the weights with gradient descent on the weights.

    A g-net cannot change each weight independently. Let $W(\theta)$ be the weights that the genome $\theta$ generates,
    $\theta'$ the genome after the update, and $L$ the loss. The result has the cosine of $W(\theta') - W(\theta)$ and
    $-\nabla_W\,L(W(\theta))$ for each parameter, and for the vector of all parameters. The cosine is 1 for
    steepest descent, 0 for an orthogonal change, and negative for ascent. After a step of SGD with a small learning
    rate, the cosine is at least 0 for the vector of all parameters, and 1 for a direct parameter.

    The gradient is computed at `before` on `batch`, with the training step's dropout and noise (of stochastic g-nets),
    but without `amp`. `after` is the state or genome after one or more training steps. Do not use `donate=True` there,
    because it would overwrite `before`. Raises ValueError if plan, p-net and states do not fit together.
    """
    base, seed = plan.base_tensors(pnet), step_seed(int(before.seed), int(before.step))
    leaf = next(iter(flat_genome(before).values()))
    net, later = (materialize(plan, genome, pnet, noise=noise_of(plan, seed, leaf)) for genome in (before, after))
    keep_statistics(net, () if base is None else base.buffers)
    present = [(t, net.get_parameter(t.name)) for t in plan.tensors]
    weights = {t.name: x.requires_grad_() for t, x in present if t.slots or x.requires_grad}
    with seeded(seed, leaf.device), torch.enable_grad():
        loss, _ = loss_and_aux(loss_fn(net, batch))
        gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True, materialize_grads=True)
    down = {k: -g.double().flatten() for k, g in zip(weights, gradients, strict=True)}
    moved = {k: (later.get_parameter(k) - w).detach().double().flatten() for k, w in weights.items()}
    overall = _cosine(torch.cat([*moved.values()]), torch.cat([*down.values()]))
    return UpdateAlignment({k: _cosine(moved[k], down[k]) for k in weights}, overall)


def _cosine(x: Tensor, y: Tensor) -> float:
    return float(x @ y / (x.norm() * y.norm()))
