"""Convolutional networks for small images.

Suffixes: B examples of a batch, C channels, h rows, w columns, K classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.encoding import Encoding, binary, grid, per_axis
from gbfunc.hypernets import constant, periodic
from gbfunc.tasks.pnets.base import Interface, PlanOptions, PNet, check_options, rows_of, scaled_width


def _plan(make: Callable[[], nn.Module]) -> PlanOptions:
    """Convolutions of equal shape share their code weights, and batch norms only shift: more sines for the same size.

    What follows a norm takes its scales over.
    """
    # Modules have shapes alone on that device.
    with torch.device("meta"):
        norms = [name for name, module in make().named_modules() if isinstance(module, nn.BatchNorm2d)]
    scales = "|".join(rf"{re.escape(name)}\.weight" for name in norms)
    rules = ((f"^({scales})$", constant(1.0)),) if norms else ()
    return PlanOptions(hypernet=periodic(share="shapes", frequency=2.5), rules=rules)


class AllConv(nn.Sequential):
    """All-CNN-C (Springenberg et al., 2015, table 1): nine convolutions, strides instead of pooling.

    The net of the genomic bottleneck's CIFAR-10 experiment (Shuvaev et al., PNAS 2024; 1,369,738 parameters). The first
    three convolutions have `width` channels, the next five twice as many. Dropout comes after each stride; batch
    normalisation after every convolution but the last, which are then without bias.
    """

    def __init__(self, channels: int, width: int, classes: int, dropout: float, norm: bool) -> None:
        layers: list[nn.Module] = []
        outs = [channels] + 3 * [width] + 5 * [2 * width]
        # (kernel, stride, padding) of each convolution but the last.
        shapes = [(3, 1, 1), (3, 1, 1), (3, 2, 1), (3, 1, 1), (3, 1, 1), (3, 2, 1), (3, 1, 0), (1, 1, 0)]
        for (before, out), (kernel, stride, padding) in zip(pairwise(outs), shapes, strict=True):
            layers.append(nn.Conv2d(before, out, kernel, stride, padding, bias=not norm))
            layers += [nn.BatchNorm2d(out)] if norm else []
            layers.append(nn.ReLU())
            layers += [nn.Dropout(dropout)] if stride == 2 and dropout else []
        super().__init__(*layers, nn.Conv2d(outs[-1], classes, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        for layer in self:
            if isinstance(layer, nn.Conv2d):
                # Torch's initial weights are too small for nine layers without normalisation.
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)


class LeNet5(nn.Sequential):
    """LeNet-5 in the form that is usual in work on compression (Caffe's, after LeCun et al., 1998).

    Two convolutions of 5 x 5 with max pooling, the second of `width` channels, and two linear layers with ReLU between
    them: 20 and 50 channels, 500 units and 431,080 parameters on MNIST by default. The last layer's weights begin at a
    tenth of torch's: a genome's first weights are smooth, as images are, so that what they make of these adds up: with
    logits of 5 at first the first epochs teach less.
    """

    def __init__(self, inputs: Sequence[int], width: int, classes: int) -> None:
        first, hidden = max(1, width * 2 // 5), 10 * width
        super().__init__(
            nn.Conv2d(inputs[0], first, 5),
            nn.MaxPool2d(2),
            nn.Conv2d(first, width, 5),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(width * math.prod(_lenet5_map(inputs)), hidden),
            nn.ReLU(),
            nn.Linear(hidden, classes),
        )
        with torch.no_grad():
            self[-1].weight.mul_(0.1)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


class ConvNet(nn.Sequential):
    """A small net for small images: two convolutions of 5 x 5, each with max pooling and ReLU, and a linear layer.

    Half of `width` and `width` channels; with 32 it has 18,378 parameters on MNIST.
    """

    def __init__(self, inputs: Sequence[int], width: int, classes: int) -> None:
        first = max(1, width // 2)
        super().__init__(
            nn.Conv2d(inputs[0], first, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(first, width, 5),
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(width * math.prod(_lenet5_map(inputs)), classes),
        )


def _lenet5_map(inputs: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of what the convolutions make of an image."""
    rows, cols = (((n - 4) // 2 - 4) // 2 for n in inputs[1:])
    return rows, cols


class Residual(nn.Module):
    """Two convolutions beside a shortcut, which is a 1 x 1 convolution where the shapes differ."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
        )
        same = stride == 1 and channels == out
        shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Identity() if same else shortcut

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, out, h / stride, w / stride]."""
        return F.relu(self.convolutions(x) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 with a stem of 3 x 3 for images of 32 x 32 (He et al., 2015, sections 4.1 and 4.2).

    Stages of `width` channels, twice, four and eight times as many.
    """

    def __init__(self, channels: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        blocks: list[nn.Module] = [Residual(width, width, 1), Residual(width, width, 1)]
        for out in (2 * width, 4 * width, 8 * width):
            blocks += [Residual(out // 2, out, 2), Residual(out, out, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(8 * width, classes)

    def forward(self, x_BChw: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, K]."""
        return self.head(self.blocks(F.relu(self.stem(x_BChw))).mean((-2, -1)))


class Plain(nn.Module):
    """Two convolutions of 3 x 3 beside a shortcut without parameters: strided, with zeros in the new channels."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.stride, self.more = (1 if channels == out else 2), out - channels
        self.first = nn.Conv2d(channels, out, 3, self.stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)

    def forward(self, x_BChw: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, out, h / stride, w / stride]."""
        y = self.second_norm(self.second(F.relu(self.first_norm(self.first(x_BChw)))))
        shortcut = F.pad(x_BChw[..., :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(y + shortcut)


class ResNetCifar(nn.Module):
    """The residual networks for CIFAR-10 (He et al., 2015, section 4.2): 6 n + 2 layers in three stages.

    Stages of `width` channels, twice and four times as many; with 16, depth 20 has 269,722 parameters and depth 56
    853,018 (their option A: shortcuts without parameters).
    """

    def __init__(self, channels: int, width: int, classes: int, depth: int) -> None:
        super().__init__()
        outs = [width * 2**stage for stage in range(3) for _ in range((depth - 2) // 6)]
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(Plain(before, out) for before, out in pairwise([width, *outs])))
        self.head = nn.Linear(outs[-1], classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x_BChw: Tensor) -> Tensor:
        """[B, C, h, w] -> [B, K]."""
        return self.head(self.blocks(F.relu(self.stem_norm(self.stem(x_BChw)))).mean((-2, -1)))


def _check(name: str, interface: Interface, smallest: int, width: Any) -> int:
    """Channels of an image that a convolutional network of some width can take."""
    if interface.tokens or len(interface.inputs) != 3:
        raise ValueError(f"the p-net {name} reads images: take it for an image task")
    channels, rows, cols = interface.inputs
    if min(rows, cols) < smallest:
        raise ValueError(f"the p-net {name} needs images of {smallest} x {smallest} or more, got {rows} x {cols}")
    check_options(name, width=width)
    return channels


def all_conv(interface: Interface, *, width: int = 96, dropout: float = 0.0, norm: bool = True) -> PNet:
    """`AllConv` for an image task, its options as there."""
    channels = _check("allconv", interface, 12, width)
    check_options("allconv", dropout=dropout)
    if type(norm) is not bool:
        raise ValueError(f"norm of allconv must be true or false, got {norm!r}")
    config: Mapping[str, Any] = dict(width=width, dropout=dropout, norm=norm)
    again = partial(all_conv, interface, dropout=dropout, norm=norm)
    return _pnet("allconv", partial(AllConv, channels, classes=interface.outputs, **config), again, config, "0.weight")


def _of_maps(inputs: Sequence[int]) -> Encoding:
    """Code of columns that read the maps of `LeNet5`'s second convolution: channel by place."""
    places = _lenet5_map(inputs)
    return per_axis(binary(), grid(*places, bandwidth=2.0), math.prod(places))


def lenet5(interface: Interface, *, width: int = 50) -> PNet:
    """`LeNet5` for an image task, its second convolution of `width` channels."""
    _check("lenet5", interface, 16, width)
    # What biases of the convolutions add, those of the hidden layer could; and these do more as sines.
    options = PlanOptions(
        encodings={"5.weight": (binary(), _of_maps(interface.inputs))},
        rules=((r"^[025]\.bias$", constant(0.0)), (r"^[57]\.weight$", periodic(frequency=0.5))),
    )
    make = partial(LeNet5, interface.inputs, width, interface.outputs)
    return _pnet("lenet5", make, partial(lenet5, interface), {"width": width}, "2.weight", options)


def convnet(interface: Interface, *, width: int = 32) -> PNet:
    """`ConvNet` for an image task, its second convolution of `width` channels."""
    _check("convnet", interface, 16, width)
    options = PlanOptions(
        encodings={"7.weight": (binary(), _of_maps(interface.inputs))},
        rules=((r"^[03]\.bias$", constant(0.0)),),
    )
    make = partial(ConvNet, interface.inputs, width, interface.outputs)
    return _pnet("convnet", make, partial(convnet, interface), {"width": width}, "3.weight", options)


def resnet18(interface: Interface, *, width: int = 64) -> PNet:
    """ResNet-18 for an image task, its first stage of `width` channels."""
    make = partial(ResNet18, _check("resnet18", interface, 4, width), width, interface.outputs)
    return _pnet("resnet18", make, partial(resnet18, interface), {"width": width}, "stem.0.weight")


def resnet20(interface: Interface, *, width: int = 16) -> PNet:
    """`ResNetCifar` of 20 layers for an image task, its first stage of `width` channels."""
    return _resnet(20, interface, width=width)


def resnet56(interface: Interface, *, width: int = 16) -> PNet:
    """`ResNetCifar` of 56 layers, as `resnet20`."""
    return _resnet(56, interface, width=width)


def _resnet(depth: int, interface: Interface, *, width: int) -> PNet:
    name = f"resnet{depth}"
    make = partial(ResNetCifar, _check(name, interface, 4, width), width, interface.outputs, depth)
    return _pnet(name, make, partial(_resnet, depth, interface), {"width": width}, "stem.weight")


def _pnet(
    name: str,
    make: Callable[[], nn.Module],
    again: Callable[..., PNet],
    config: Mapping[str, Any],
    first: str,
    options: PlanOptions | None = None,
) -> PNet:
    """A convolutional family: `again(width=...)` is another of it, whose `first` weight has so many channels."""
    width = config["width"]
    return PNet(
        name=name,
        make=make,
        plan=lambda genome_params: options or _plan(make),
        scaled=lambda factor: again(width=scaled_width(width, factor)),
        fitted=lambda shapes: again(width=rows_of(shapes, first, "a convolutional net", 4)),
        config=config,
        label=f"{name}, {width} channels",
    )
