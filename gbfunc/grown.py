"""A grown p-net as a plain module, for everything that takes an `nn.Module`: evaluation, export, serving.

`carry_over` and `shuffled` make networks to compare it with.
"""

import copy
import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

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

    Deltas of layers that hide their weight, such as quantised layers, stay beside these layers in either case, as
    parameters of the layers: with `factored=False` a warning names them.

    Raises:
        ValueError: if genome, noise, plan and p-net do not fit together.
    """
    check_plan(plan, pnet)
    check_genome(plan, genome)
    check_noise(plan, noise)
    base = plan.base_tensors(pnet)
    generator = make_generator(plan, pnet=pnet, lazy=factored, base=base)
    with torch.no_grad():
        tensors = generator(flat_genome(genome), noise)
    weights, forms, inputs = to_serve(plan, generator, tensors)
    if forms and not factored:
        words = "stay beside their layers, which hide their weights: factored=True asks for no merged weights"
        warnings.warn(f"{', '.join(sorted(forms))} {words}", stacklevel=2)
    # A layer with factors has no use for the memory of its weight: one entry stands there until it is removed.
    kept = [t for t in plan.tensors if t.name in forms]
    weights |= {t.name: torch.zeros((), dtype=DTYPES[t.dtype]).expand(t.shape) for t in kept}
    buffers = {b.name: genome.buffers[b.name].to(DTYPES[b.dtype]) for b in plan.buffers}
    buffers |= {} if base is None else base.on(next(iter(weights.values())).device)[1]
    net = with_weights(pnet, weights, buffers, bare=forms)
    install_served(net, forms, inputs)
    return net


@torch.no_grad()
def shuffled(net: nn.Module, seed: int = 0, *, names: Iterable[str] | None = None) -> nn.Module:
    """A copy of a network with the numbers inside each weight permuted: the control that keeps their distribution.

    `names` are the parameters to permute; None permutes all of at least two dimensions.
    """
    made, generator = copy.deepcopy(net), torch.Generator().manual_seed(seed)
    for name in [k for k, x in made.named_parameters() if x.ndim >= 2] if names is None else names:
        x = made.get_parameter(name)
        x.copy_(x.flatten()[torch.randperm(x.numel(), generator=generator).to(x.device)].reshape(x.shape))
    return made


@torch.no_grad()
def carry_over(source: nn.Module, net: nn.Module, *, layers: int | None = None) -> nn.Module:
    """A copy of a network with the parameters and buffers of another where names and shapes agree: transfer.

    A layer begins with a weight of at least two dimensions, and its biases, norms and buffers follow. Where shapes
    differ, as in the last layer for other classes, the copy keeps the values of `net`.

    Args:
        source: a trained or grown network.
        net: the network for the new task, with its own first weights; it is not changed.
        layers: number of layers to carry over, from the first on; None for all.

    Raises:
        ValueError: if `layers` is below 1, or nothing agrees.
    """
    if layers is not None and layers < 1:
        raise ValueError(f"layers must be an int >= 1 or None, got {layers!r}")
    made = copy.deepcopy(net)
    into = {name: x for name, x, _ in _by_layer(made)}
    first = {name: x for name, x, layer in _by_layer(source) if layers is None or layer <= layers}
    if not (shared := [name for name, x in first.items() if name in into and into[name].shape == x.shape]):
        raise ValueError(f"expected tensors of equal names and shapes, got {[*first]} and {[*into]}")
    for name in shared:
        into[name].copy_(first[name])
    return made


def _by_layer(net: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """Parameters and buffers by name, module after module, with their layer: 1, 2, ..."""
    layer = 0
    for prefix, module in net.named_modules():
        for kind in (module.named_parameters, module.named_buffers):
            for name, x in kind(prefix, recurse=False):
                layer += isinstance(x, nn.Parameter) and x.ndim >= 2
                yield name, x, layer
