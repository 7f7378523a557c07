"""A grown p-net as a plain module, for everything that takes an `nn.Module`: evaluation, export, serving."""

import torch
from torch import nn

from gbfunc.generation import make_generator, to_serve
from gbfunc.genome import Noise, check_genome, check_noise, check_plan
from gbfunc.layers.install import install_served
from gbfunc.plan import DTYPES, Plan
from gbfunc.pnet.describe import with_weights
from gbfunc.trees import flat_genome
from gbfunc.types import GenomeLike


def materialize(
    plan: Plan, genome: GenomeLike, pnet: nn.Module, *, factored: bool = False, noise: Noise | None = None
) -> nn.Module:
    """A copy of the p-net with the generated weights and the genome's buffers.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        pnet: the p-net the plan was made for; it is not changed. The copy keeps its training mode.
        factored: keep the factors of weights whose factors are smaller, as parameters `NAME_left` and `NAME_right` of
            layers that apply them, instead of forming the weights: less memory, and less time where the factors are
            thin. `layer.weight` then is a property that multiplies the factors out at each read: a change of the
            tensor in place is lost. Code that changes weights (PEFT's `merge_and_unload`) or knows them by the p-net's
            names (`save_pretrained` of Hugging Face) needs `factored=False`, a plain module with nothing of gbfunc.
        noise: of stochastic g-nets, from `gb.sample_noise(plan, generator)`: each draw makes another network of the
            one genome. None gives the mean weights.

    Raises:
        ValueError: if genome, noise, plan and p-net do not fit together.
    """
    check_plan(plan, pnet)
    check_genome(plan, genome)
    check_noise(plan, noise)
    base = plan.base_tensors(pnet)
    generator = make_generator(plan, pnet=pnet if factored else None, lazy=factored, base=base)
    with torch.no_grad():
        tensors = generator(flat_genome(genome), noise)
    weights, forms, inputs = to_serve(plan, generator, tensors)
    # A layer with factors has no use for the memory of its weight: one entry stands there until it is removed.
    kept = [t for t in plan.tensors if t.name in forms]
    weights |= {t.name: torch.zeros((), dtype=DTYPES[t.dtype]).expand(t.shape) for t in kept}
    buffers = {b.name: genome.buffers[b.name].to(DTYPES[b.dtype]) for b in plan.buffers}
    buffers |= {} if base is None else base.on(next(iter(weights.values())).device)[1]
    net = with_weights(pnet, weights, buffers, bare=forms)
    install_served(net, forms, inputs)
    return net
