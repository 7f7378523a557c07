"""Convolutional networks for small images.

Suffixes: B examples of a batch, C channels, h rows, w columns, K classes.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.encoding import binary, grid, per_axis
from gbfunc.hypernets import constant, periodic
from gbfunc.tasks.pnets.base import Interface, PlanOptions, PNet, check_reads, family


class AllConv(nn.Sequential):
    """All-CNN-C (Springenberg et al., 2015, table 1): nine convolutions, strides instead of pooling.

    The paper on the genomic bottleneck uses this net for CIFAR-10 (Shuvaev et al., PNAS 2024). Here, all convolutions
    except the last have batch normalisation instead of biases. The first three convolutions have `width` channels, and
    the next five have twice as many.
    """

    def __init__(self, channels: int, width: int, classes: int) -> None:
        layers: list[nn.Module] = []
        outs = [channels] + 3 * [width] + 5 * [2 * width]
        # (kernel, stride, padding) of each convolution except the last.
        shapes = [(3, 1, 1), (3, 1, 1), (3, 2, 1), (3, 1, 1), (3, 1, 1), (3, 2, 1), (3, 1, 0), (1, 1, 0)]
        for (before, out), (kernel, stride, padding) in zip(pairwise(outs), shapes, strict=True):
            layers += [nn.Conv2d(before, out, kernel, stride, padding, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(outs[-1], classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        # Draw larger weights, because torch's initial weights are too small for nine layers.
        self.apply(_kaiming)


def _kaiming(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


class LeNet5(nn.Sequential):
    """LeNet-5 in the version of Caffe, which papers on compression use (after LeCun et al., 1998).

    Two convolutions of 5 x 5 with max pooling, and two linear layers with ReLU between them. The second convolution has
    `width` channels. On MNIST, the default has 20 and 50 channels, 500 hidden units and 431,080 parameters. The last
    layer's initial weights are a tenth of torch's. Generated weights are as smooth as images, so that their products
    add up: with torch's weights, initial logits would be about 5, and the first epochs would learn less.
    """

    def __init__(self, inputs: Sequence[int], width: int, classes: int) -> None:
        first, hidden = max(1, width * 2 // 5), 10 * width
        maps = [nn.Conv2d(inputs[0], first, 5), nn.MaxPool2d(2), nn.Conv2d(first, width, 5), nn.MaxPool2d(2)]
        wide, last = nn.Linear(width * math.prod(_maps(inputs)), hidden), nn.Linear(hidden, classes)
        super().__init__(*maps, nn.Flatten(), wide, nn.ReLU(), last)
        with torch.no_grad():
            last.weight.mul_(0.1)


class ConvNet(nn.Sequential):
    """A small net for small images: two convolutions of 5 x 5, each with max pooling and ReLU, and a linear layer.

    The convolutions have `width / 2` and `width` channels. With a width of 32, the net has 18,378 parameters on MNIST.
    """

    def __init__(self, inputs: Sequence[int], width: int, classes: int) -> None:
        first = max(1, width // 2)
        layers: list[nn.Module] = []
        for before, out in pairwise((inputs[0], first, width)):
            layers += [nn.Conv2d(before, out, 5), nn.MaxPool2d(2), nn.ReLU()]
        super().__init__(*layers, nn.Flatten(), nn.Linear(width * math.prod(_maps(inputs)), classes))


def _maps(inputs: Sequence[int]) -> tuple[int, int]:
    rows, cols = (((n - 4) // 2 - 4) // 2 for n in inputs[1:])  # after two convolutions of 5 x 5 with max pooling
    return rows, cols


class Residual(nn.Module):
    """Two convolutions and a shortcut: [B, C, h, w] -> [B, out, h / stride, w / stride].

    If input and output differ in shape, the shortcut is a 1 x 1 convolution. With `padded`, the shortcut then has no
    parameters: it takes every `stride`-th pixel, and sets the additional channels to 0.
    """

    def __init__(self, channels: int, out: int, stride: int, padded: bool) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(*_normed(channels, out, 3, stride), nn.ReLU(), *_normed(out, out, 3))
        self.stride, self.zeros = stride, (out - channels) * padded
        shortcut = nn.Identity() if padded else nn.Sequential(*_normed(channels, out, 1, stride))
        self.shortcut = nn.Identity() if stride == 1 and channels == out else shortcut

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.shortcut(x)
        if self.zeros:
            shortcut = F.pad(x[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.zeros))
        return F.relu(self.convolutions(x) + shortcut)


def _normed(channels: int, out: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(out)


class ResNet(nn.Module):
    """A residual network for small images, whose first convolution is 3 x 3 (He et al., 2015, sections 4.1 and 4.2).

    The first stage has `width` channels. Each further stage doubles the channels and halves the rows and columns. A
    stage has `blocks` blocks of two convolutions. With `padded`, shortcuts have no parameters (option A of section
    4.2), and initial weights are as in section 4.2.
    """

    def __init__(
        self, channels: int, width: int, classes: int, stages: int = 3, blocks: int = 3, padded: bool = True
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(*_normed(channels, width, 3))
        outs = [width, *(width * 2**stage for stage in range(stages) for _ in range(blocks))]
        self.blocks = nn.Sequential(*(Residual(a, b, 1 if a == b else 2, padded) for a, b in pairwise(outs)))
        self.head = nn.Linear(outs[-1], classes)
        if padded:
            self.apply(_kaiming)

    def forward(self, x_BChw: Tensor) -> Tensor:
        return self.head(self.blocks(F.relu(self.stem(x_BChw))).mean((-2, -1)))


def _normed_plan(norms: str) -> PlanOptions:
    # Fix the norms' scales at 1: the next layers' weights can scale the outputs, and the genome can have more sines.
    return PlanOptions(hypernet=periodic(share="shapes", frequency=2.5), rules=((norms, constant(1.0)),))


def all_conv(interface: Interface, *, width: int = 96) -> PNet:
    """Describe an `AllConv` for an image task."""
    check_reads("allconv", interface, "images", 3, 12)
    plan, config = _normed_plan(rf"^({'|'.join(map(str, range(1, 24, 3)))})\.weight$"), {"width": width}
    make = partial(AllConv, interface.inputs[0], width, interface.outputs)
    return family("allconv", all_conv, interface, make, plan, config, config)


def lenet5(interface: Interface, *, width: int = 50) -> PNet:
    """Describe a `LeNet5` for an image task, with `width` channels in the second convolution."""
    # Fix all biases except the last layer's at 0, so that the genome can have more sines.
    rules = ((r"^[025]\.bias$", constant(0.0)), (r"^[57]\.weight$", periodic(frequency=0.5)))
    return _of_maps("lenet5", lenet5, interface, LeNet5, width, "5.weight", rules)


def convnet(interface: Interface, *, width: int = 32) -> PNet:
    """Describe a `ConvNet` for an image task, with `width` channels in the second convolution."""
    rules = ((r"^[03]\.bias$", constant(0.0)),)
    return _of_maps("convnet", convnet, interface, ConvNet, width, "7.weight", rules)


def _of_maps(
    name: str, factory: Callable[..., PNet], interface: Interface, make: Any, width: int, weight: str, rules: Any
) -> PNet:
    """Describe a LeNet5 or a ConvNet. `weight` names the parameter whose columns are coded by channel and pixel."""
    check_reads(name, interface, "images", 3, 16)
    places = _maps(interface.inputs)
    code = per_axis(binary(), grid(*places, bandwidth=2.0), math.prod(places))
    plan = PlanOptions(encodings={weight: (binary(), code)}, rules=rules)
    net, config = partial(make, interface.inputs, width, interface.outputs), {"width": width}
    return family(name, factory, interface, net, plan, config, config)


def resnet(depth: int, interface: Interface, *, width: int | None = None) -> PNet:
    """Describe a `ResNet` for small images: ResNet-18 at depth 18, otherwise 6 n + 2 layers, three stages of n blocks.

    The first stage has `width` channels. The default is 64 at depth 18, and otherwise 16. On CIFAR-10, ResNet-20
    then has 269,722 parameters, and ResNet-56 has 853,018.
    """
    check_reads(f"resnet{depth}", interface, "images", 3, 4)
    form = {"stages": 4, "blocks": 2, "padded": False} if depth == 18 else {"blocks": (depth - 2) // 6}
    config = {"width": width or (64 if depth == 18 else 16)}
    make = partial(ResNet, interface.inputs[0], classes=interface.outputs, **form, **config)
    plan = _normed_plan(r"\.[14]\.weight$")
    return family(f"resnet{depth}", partial(resnet, depth), interface, make, plan, config, config)


resnet18, resnet20, resnet56 = (partial(resnet, depth) for depth in (18, 20, 56))
