"""What is measured: a read-only table of benches, each some cases that are timed round-robin, together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.hypernets import Hypernet, gnet, periodic
from gbfunc.tasks.pnets.convnets import ResNet18
from gbfunc.tasks.pnets.gpt import GPT
from gbfunc.tasks.pnets.mlp import mlp

Scale = Literal["quick", "full", "cuda"]


class Genes(NamedTuple):
    """Options of a case's plan: which g-nets, how large a tile, and which tensors beyond the default ones."""

    hypernet: Hypernet
    max_tile: int | None = None
    include: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One p-net with its batch, and the variants to measure on it. It can be sent to another process.

    Attributes:
        name: its name.
        net: makes the p-net.
        batch: makes the batch, on the CPU.
        variants: names of `VARIANTS`; ratios are to "dense" and "naive", where they are among them.
        periodic: the genome of the variants with periodic g-nets.
        relu: the genome of those with ReLU g-nets, and of the naive one.
        kind: "step" measures training steps, "generation" the weights' generation alone, forward and backward.
        counted: bytes from which a tensor's memory is counted beside the process's peak; 0 counts nothing.
    """

    name: str
    net: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    variants: tuple[str, ...]
    periodic: Genes | None = None
    relu: Genes | None = None
    kind: Literal["step", "generation"] = "step"
    counted: int = 0


class Variant(NamedTuple):
    """A way to run a case: its g-nets and options of `make_train_step`; no g-nets is the dense p-net itself."""

    gnets: Literal["periodic", "relu", ""]
    options: Mapping[str, object]


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "dense": Variant("", {}),
        "periodic materialised": Variant("periodic", {"lazy": False}),
        "periodic lazy": Variant("periodic", {"lazy": True}),
        "periodic auto": Variant("periodic", {"lazy": "auto"}),
        "periodic saved": Variant("periodic", {"lazy": "auto"}),
        "periodic compiled step": Variant("periodic", {"lazy": "auto", "compile": True}),
        "periodic remat generate": Variant("periodic", {"lazy": False, "remat": "generate"}),
        "periodic remat layer": Variant("periodic", {"lazy": False, "remat": "layer"}),
        "relu eager": Variant("relu", {"kernel": "eager"}),
        "relu compiled": Variant("relu", {"kernel": "compiled"}),
        "relu auto": Variant("relu", {}),
        "naive": Variant("relu", {}),
    }
)
"""Every variant by name. "naive" is `gbfunc.lab.bench.naive`, the others' generation is the library's; "periodic saved"
begins to write a checkpoint before every step."""


def features(shape: tuple[int, ...], classes: int) -> tuple[Tensor, Tensor]:
    """A batch of normal inputs [B, ...] with random classes [B]."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=draw), torch.randint(classes, shape[:1], generator=draw)


def sequences(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """A batch of random tokens [B, L] and the tokens after them [B, L]."""
    tokens = torch.randint(vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


_PERIODIC = ("dense", "periodic materialised", "periodic lazy", "periodic auto")
_RELU = ("relu eager", "relu compiled")
# Tiles of 10,000 weights, the published implementations' default.
_TILE = 100


def mlp_case(
    sizes: tuple[int, ...],
    batch: int,
    variants: tuple[str, ...],
    *,
    features_: int = 32,
    name: str | None = None,
    counted: int = 0,
) -> Case:
    """Training steps of an MLP, periodic g-nets of whole matrices and ReLU g-nets of tiles."""
    return Case(
        name or "mlp " + "-".join(map(str, sizes)),
        partial(mlp, sizes, 0),
        partial(features, (batch, sizes[0]), sizes[-1]),
        variants,
        Genes(periodic(features_)),
        Genes(gnet((32,)), _TILE),
        counted=counted,
    )


def generation_case(width: int, variants: tuple[str, ...]) -> Case:
    """Generation alone of one square matrix, forward and backward."""
    return Case(
        f"generate {width}x{width}",
        partial(nn.Linear, width, width, bias=False),
        partial(features, (1, width), width),
        variants,
        Genes(periodic(32)),
        Genes(gnet((32,)), _TILE),
        "generation",
    )


def gpt_case(batch: int, length: int, vocabulary: int, layers: int, width: int, hidden: int, *more: str) -> Case:
    """Training steps of a GPT with biases, as torchGB's, its tied embedding generated too."""
    include = (r"^(tokens|positions)\.weight$",)
    return Case(
        f"gpt {layers}x{width}",
        partial(GPT, vocabulary, length, layers, width, width // 64, hidden, bias=True),
        partial(sequences, batch, length, vocabulary),
        (*_PERIODIC, *more),
        Genes(periodic(32), include=include),
        Genes(gnet((32,)), _TILE, include),
    )


def resnet_case(batch: int, width: int, *more: str) -> Case:
    """Training steps of a ResNet-18 on images of 32 x 32."""
    return Case(
        f"resnet18 {width}",
        partial(ResNet18, 3, width, 10),
        partial(features, (batch, 3, 32, 32), 10),
        (*_PERIODIC, *more),
        Genes(periodic(32)),
        Genes(gnet((32,)), _TILE),
    )


def remat_case(layers: int, width: int, batch: int) -> Case:
    """Training steps of a deep MLP, the memory of its weights counted."""
    variants = ("periodic materialised", "periodic remat generate", "periodic remat layer", "periodic lazy")
    sizes = (width,) * (layers + 1)
    return mlp_case(sizes, batch, variants, name=f"remat {layers}x{width}", counted=4 * width * width)


def checkpoint_case(sizes: tuple[int, ...], batch: int, features_: int, max_tile: int) -> Case:
    """Training steps of an MLP while their state is written, and while it is not."""
    return Case(
        f"checkpoint {'-'.join(map(str, sizes))} tiles {max_tile}",
        partial(mlp, sizes, 0),
        partial(features, (batch, sizes[0]), sizes[-1]),
        ("periodic auto", "periodic saved"),
        Genes(periodic(features_), max_tile),
    )


def growth_weights(widths: tuple[int, ...], batch: int) -> tuple[Case, ...]:
    """Two square layers of growing width."""
    variants = ("dense", "periodic materialised", "periodic lazy")
    return tuple(mlp_case((w, w, w), batch, variants) for w in widths)


def growth_features(width: int, features_: tuple[int, ...], batch: int) -> tuple[Case, ...]:
    """Two square layers, generated by a growing number of features."""
    variants = ("dense", "periodic materialised", "periodic lazy")
    sizes = (width,) * 3
    return tuple(mlp_case(sizes, batch, variants, features_=h, name=f"mlp {width} H={h}") for h in features_)


_WIDE = (2048, 2048, 2048, 10)
_SMALL = (784, 256, 256, 64, 10)


def _small_mlp(*more: str) -> Case:
    return mlp_case(_SMALL, 256, (*_PERIODIC, *more), features_=16)


def _square(width: int, batch: int, *more: str) -> Case:
    return mlp_case((width, width, width, 10), batch, (*_PERIODIC, *more))


Bench = tuple[Case, ...]

BENCHES: Mapping[Scale, Mapping[str, Bench]] = MappingProxyType(
    {
        "full": MappingProxyType(
            {
                "small_mlp": (_small_mlp("periodic compiled step", *_RELU, "naive"),),
                "mlp_2048": (_square(2048, 256, *_RELU, "naive"),),
                "mlp_4096": (_square(4096, 256),),
                "generation": (generation_case(2048, ("periodic materialised", *_RELU, "naive")),),
                "gpt": (gpt_case(4, 512, 30_000, 4, 512, 2048, "relu compiled"),),
                "resnet18": (resnet_case(16, 64, "relu compiled"),),
                "remat": (remat_case(24, 2048, 256),),
                # 81,418 parameters (103x), and 1,041,610.
                "checkpoint": tuple(checkpoint_case(_WIDE, 256, h, t) for h, t in ((32, 256), (36, 64))),
                "growth_weights": growth_weights((704, 1440, 2880, 5664), 256),
                "growth_features": growth_features(2048, (8, 16, 32, 64, 128, 256), 256),
            }
        ),
        "quick": MappingProxyType(
            {
                "small_mlp": (_small_mlp("relu eager", "naive"),),
                "mlp_1024": (_square(1024, 256, "relu eager"),),
                "generation": (generation_case(512, ("periodic materialised", *_RELU, "naive")),),
                "gpt": (gpt_case(2, 64, 2_000, 2, 128, 512, "relu eager"),),
                "resnet18": (resnet_case(4, 16),),
                "remat": (remat_case(12, 512, 64),),
                "growth_weights": growth_weights((352, 1408), 256),
                "growth_features": growth_features(704, (8, 128), 64),
            }
        ),
        "cuda": MappingProxyType(
            {
                "small_mlp": (_small_mlp("periodic compiled step", "relu compiled", "naive"),),
                "mlp_8192": (_square(8192, 1024, *_RELU),),
                "mlp_16384": (_square(16384, 1024),),
                "generation": (generation_case(4096, ("periodic materialised", *_RELU, "naive")),),
                "gpt": (gpt_case(32, 512, 30_000, 4, 512, 2048, "relu compiled"),),
                "resnet18": (resnet_case(512, 64, "relu compiled"),),
                "remat": (remat_case(24, 8192, 1024),),
                "growth_weights": growth_weights((704, 1440, 2880, 5664, 11328), 1024),
                "growth_features": growth_features(8192, (8, 16, 32, 64, 128, 256), 1024),
            }
        ),
    }
)
"""Every bench by scale and name."""


def choose_benches(scale: Scale, names: tuple[str, ...] | None) -> Mapping[str, Bench]:
    """The benches of a scale, or those of them that are named.

    Raises:
        ValueError: for a name that the scale does not have.
    """
    benches = BENCHES[scale]
    unknown = [name for name in names or () if name not in benches]
    if unknown:
        raise ValueError(f"--cases {' '.join(unknown)}: unknown; expected some of {' '.join(benches)}")
    return {name: bench for name, bench in benches.items() if not names or name in names}
