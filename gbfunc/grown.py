"""`materialize` builds the generated p-net as a plain `nn.Module` for evaluation, export and inference.

`carry_over` and `shuffled` build networks for comparisons.
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
    plan: Plan, genome: GenomeLike, pnet: nn.Module | None = None, *, factored: bool = False, noise: Noise | None = None
) -> nn.Module:
    """Copy the p-net with the generated weights and the genome's buffers.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        pnet: the plan's p-net, which is not changed. The result has the p-net's mode (training or evaluation).
        factored: store a weight as factors if the factors are smaller than the weight. The layer then has two
            parameters, such as `weight_left` and `weight_right`. Factors take less memory, and thin factors take
            less time. `layer.weight` is then a property that multiplies the factors: in-place changes of the weight are
            lost. Code that changes weights (PEFT's `merge_and_unload`) or depends on the p-net's names
            (`save_pretrained` of Hugging Face) needs `factored=False`, which returns a plain module without gbfunc.
        noise: noise of stochastic g-nets, from `gb.sample_noise(plan, generator)`. Each draw of the noise gives a
            different network. Without noise, weights are mean weights.

    An adapter's delta of a quantized layer, which hides its weight, stays factored; `factored=False` then warns.
    Outputs may differ by rounding from the outputs of a `GenomeModule`: in float32, by about 1e-6 of their size.

    Raises:
        TypeError: if `pnet` is missing, or if the pair that `gb.load` returns is passed as a single argument.
        ValueError: if genome, noise, plan and p-net do not fit together.
    """
    if pnet is None:
        raise TypeError("materialize takes (plan, genome, pnet), got two: write materialize(*gb.load(path), pnet)")
    check_plan(plan, pnet)
    check_genome(plan, genome)
    check_noise(plan, noise)
    base = plan.base_tensors(pnet)
    generator = make_generator(plan, pnet=pnet, lazy=factored, base=base)
    with torch.no_grad():
        tensors = generator(flat_genome(genome), noise)
    weights, forms, inputs = to_serve(plan, generator, tensors)
    if forms and not factored:
        words = "stay factors, because their layers hide their weights: factored=True avoids this warning"
        warnings.warn(f"{', '.join(sorted(forms))} {words}", stacklevel=2)
    # `with_weights` needs a tensor for every weight. Pass expanded zeros, which take no memory and are removed below.
    factored_tensors = [t for t in plan.tensors if t.name in forms]
    weights |= {t.name: torch.zeros((), dtype=DTYPES[t.dtype]).expand(t.shape) for t in factored_tensors}
    buffers = {b.name: genome.buffers[b.name].to(DTYPES[b.dtype]) for b in plan.buffers}
    buffers |= {} if base is None else base.on(next(iter(weights.values())).device)[1]
    net = with_weights(pnet, weights, buffers, bare=forms)
    install_served(net, forms, inputs)
    return net


@torch.no_grad()
def shuffled(net: nn.Module, seed: int = 0, *, names: Iterable[str] | None = None) -> nn.Module:
    """Copy a network and permute the numbers in each weight: for a control with the same distribution of weights.

    `names` are the parameters to permute, by default all parameters with at least two dimensions.
    """
    control, generator = copy.deepcopy(net), torch.Generator().manual_seed(seed)
    for name in [k for k, x in control.named_parameters() if x.ndim >= 2] if names is None else names:
        x = control.get_parameter(name)
        x.copy_(x.flatten()[torch.randperm(x.numel(), generator=generator).to(x.device)].reshape(x.shape))
    return control


@torch.no_grad()
def carry_over(source: nn.Module, net: nn.Module, *, layers: int | None = None) -> nn.Module:
    """Copy `net`, and copy the tensors with equal names and shapes from `source` into the copy (transfer learning).

    A layer consists of a weight with at least two dimensions and the biases, norms and buffers that follow the weight.
    If shapes differ, for example in a last layer for other classes, the copy keeps the values of `net`.

    Args:
        source: a trained or generated network.
        net: the network for the new task, with initial weights, which is not changed.
        layers: number of layers to copy, from the first on; by default, all layers.

    Raises:
        ValueError: if `layers` is below 1, or no tensor has an equal name and shape.
    """
    if layers is not None and layers < 1:
        raise ValueError(f"layers must be an int >= 1 or None, got {layers!r}")
    target = copy.deepcopy(net)
    into = {name: x for name, x, _ in _by_layer(target)}
    first = {name: x for name, x, layer in _by_layer(source) if layers is None or layer <= layers}
    if not (shared := [name for name, x in first.items() if name in into and into[name].shape == x.shape]):
        got = [{k: tuple(x.shape) for k, x in named.items()} for named in (first, into)]
        raise ValueError(f"expected networks with tensors of equal names and shapes, got {got}: rename them")
    for name in shared:
        into[name].copy_(first[name])
    return target


def _by_layer(net: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    layer = 0
    for prefix, module in net.named_modules():
        for kind in (module.named_parameters, module.named_buffers):
            for name, x in kind(prefix, recurse=False):
                layer += isinstance(x, nn.Parameter) and x.ndim >= 2
                yield name, x, layer
