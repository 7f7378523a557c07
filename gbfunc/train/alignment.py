"""How well a genome's update follows the gradient of the p-net's weights: a diagnostic of one step."""

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
    """Cosines between the change of the weights and their negative gradient, from -1 to 1."""

    tensors: Mapping[str, float]  # per trained parameter; nan without a change or a gradient
    overall: float  # of all parameters as one vector


def update_alignment(
    plan: Plan, pnet: nn.Module, loss_fn: LossFn, before: TrainState, after: GenomeLike, batch: Any
) -> UpdateAlignment:
    r"""Compare a genome's update of the weights with gradient descent on the weights.

    A g-net cannot move each weight by itself. With $W$ the weights that the genome $\theta$ generates and $\theta'$ the
    genome after the update, this gives the cosine between $W(\theta') - W(\theta)$ and $-\nabla_W L(W(\theta))$: 1
    where the weights went straight down their gradient, 0 where they went across it, negative where they went up. SGD
    with a small rate on the genome gives 0 or more overall, and 1 for direct parameters.

    The step from `before` on `batch` gives the gradient, with its dropout and noise, without `amp`. Weights are formed
    densely. A step that donates leaves no `before`; `after` is the state or genome after the step, or after several.
    Raises ValueError if plan, p-net and states do not fit together.
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
