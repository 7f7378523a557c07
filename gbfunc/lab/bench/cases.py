"""What is measured: benches by scale and name, each some cases that are timed round-robin, together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from gbfunc.hypernets import Hypernet, gnet, periodic
from gbfunc.tasks.pnets.convnets import ResNet18
from gbfunc.tasks.pnets.gpt import GPT
from gbfunc.tasks.pnets.mlp import mlp, mlp_plan

Scale = Literal["quick", "full", "cuda"]
T = TypeVar("T")
Net = Callable[[], nn.Module]
Batch = tuple[Tensor, Tensor]
"""Inputs and targets, of equal first dimension."""


class Genes(NamedTuple):
    """A case's plan: its g-nets, and other options of `make_plan`."""

    hypernet: Hypernet
    options: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Case:
    """One p-net with its batch, and the variants to measure on it. Other processes can unpickle it."""

    name: str
    net: Net  # makes the p-net
    batch: Callable[[], Batch]  # makes the batch, on the CPU
    variants: tuple[str, ...]  # names of `VARIANTS`; ratios are to "dense" and "naive", where they are among them
    periodic: Genes | None = None  # the genome of the variants with periodic g-nets
    relu: Genes | None = None  # the genome of the variants with ReLU g-nets, and of the naive one
    generation: bool = False  # whether to measure the weights' generation alone, forward and backward


Bench = tuple[Case, ...]

_PERIODIC = ("dense", "periodic materialised", "periodic lazy", "periodic auto")
_RELU = ("relu eager", "relu compiled")
_SMALL = (784, 256, 256, 64, 10)
_RELU_TILE = 100
"""Side of tiles of 10,000 weights, the published implementations' default."""


def features(shape: tuple[int, ...], classes: int) -> Batch:
    """Draw a batch of normal inputs [B, ...] with random classes [B]."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=draw), torch.randint(classes, shape[:1], generator=draw)


def sequences(batch: int, length: int, vocabulary: int) -> Batch:
    """Draw a batch of random tokens [B, L] and the tokens after them [B, L]."""
    tokens = torch.randint(vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _case(
    name: str,
    net: Net,
    batch: Callable[[], Batch],
    variants: Sequence[str],
    *,
    h: int = 32,
    tile: int | None = None,
    include: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    """Make a case with periodic g-nets of `h` features and ReLU g-nets."""
    tiles, relu_tiles = ({"max_tile": most, "include": include} for most in (tile, _RELU_TILE))
    genes = Genes(periodic(h), tiles), Genes(gnet((32,)), relu_tiles)
    return Case(name, net, batch, tuple(variants), *genes, **options)


def mlp_case(sizes: tuple[int, ...], batch: int, variants: Sequence[str], *, name: str = "", **options: Any) -> Case:
    """Make training steps of an MLP; a periodic g-net makes a whole matrix, unless options say otherwise."""
    name = name or "mlp " + "-".join(map(str, sizes))
    return _case(name, partial(mlp, sizes, 0), partial(features, (batch, sizes[0]), sizes[-1]), variants, **options)


def generation_case(width: int, variants: Sequence[str] = ("periodic materialised", *_RELU, "naive")) -> Case:
    """Make the generation of one square matrix, forward and backward."""
    net, batch = partial(nn.Linear, width, width, bias=False), partial(features, (1, width), width)
    return _case(f"generate {width}x{width}", net, batch, variants, generation=True)


def gpt_case(
    batch: int, length: int, words: int, layers: int, heads: int, width: int, variants: Sequence[str], **options: Any
) -> Case:
    """Make training steps of a GPT with biases, as torchGB's; its tied embedding is generated too."""
    net = partial(GPT, words, length, layers, width, heads, 4 * width, bias=True)
    options = {"name": f"gpt {layers}x{width}", "include": (r"^(tokens|positions)\.weight$",)} | options
    return _case(net=net, batch=partial(sequences, batch, length, words), variants=variants, **options)


def resnet_case(batch: int, width: int, *more: str) -> Case:
    """Make training steps of a ResNet-18 on images of 32 x 32."""
    batches = partial(features, (batch, 3, 32, 32), 10)
    return _case(f"resnet18 {width}", partial(ResNet18, 3, width, 10), batches, (*_PERIODIC, *more))


def _remat(layers: int, width: int, batch: int) -> Case:
    variants = ("periodic materialised", "periodic remat generate", "periodic remat layer", "periodic lazy")
    return mlp_case((width,) * (layers + 1), batch, variants, name=f"remat {layers}x{width}")


def _demo() -> Case:
    """Make training steps of the net and the genome of `gbfunc demo`: 64-1100-10, 450 parameters."""
    sizes, variants = (64, 1100, 10), ("periodic without donate", "periodic auto", "periodic compiled step")
    options = mlp_plan(sizes, (1, 8, 8), 3.0)._asdict()
    genes = Genes(options.pop("hypernet"), options | {"genome_params": 450})
    return replace(mlp_case(sizes, 48, ("dense", *variants, "periodic module"), name="demo"), periodic=genes)


def _jax(sizes: tuple[int, ...], h: int = 32) -> Case:
    variants = ("dense", "periodic auto", "periodic compiled step", "jax dense", "jax thin", "jax thin transposed")
    return mlp_case(sizes, 256, variants, name="jax, mlp " + "-".join(map(str, sizes)), h=h)


def _small(*more: str) -> Bench:
    return (mlp_case(_SMALL, 256, (*_PERIODIC, *more), h=16),)


def _population(batch: int) -> Case:
    variants = ("dense", "16 genomes together", "16 genomes one by one")
    return mlp_case(_SMALL, batch, variants, name=f"population, batch {batch}", h=16)


def _square(width: int, batch: int, *more: str) -> Bench:
    return (mlp_case((width, width, width, 10), batch, (*_PERIODIC, *more)),)


BENCHES: Mapping[Scale, Mapping[str, Bench]] = {
    "full": {
        "demo": (_demo(),),
        "small_mlp": _small("periodic compiled step", *_RELU, "naive"),
        "population": (_population(256), _population(64)),
        "mlp_2048": _square(2048, 256, *_RELU, "naive"),
        "mlp_4096": _square(4096, 256),
        "jax": (_jax(_SMALL, 16), _jax((2048, 2048, 2048, 10)), _jax((4096, 4096, 4096, 10))),
        "generation": (generation_case(2048),),
        "gpt": (gpt_case(4, 512, 30_000, 4, 8, 512, (*_PERIODIC, "relu compiled")),),
        "resnet18": (resnet_case(16, 64, "relu compiled"),),
        "remat": (_remat(24, 2048, 256),),
    },
    "quick": {
        "demo": (_demo(),),
        "small_mlp": _small("relu eager", "naive"),
        "population": (_population(32),),
        "mlp_1024": _square(1024, 256, "relu eager"),
        "generation": (generation_case(512),),
        "gpt": (gpt_case(2, 64, 2_000, 2, 2, 128, (*_PERIODIC, "relu eager")),),
        "resnet18": (resnet_case(4, 16),),
        "remat": (_remat(12, 512, 64),),
    },
    "cuda": {
        "small_mlp": _small("periodic compiled step", "relu compiled", "naive"),
        "population": (_population(256),),
        "mlp_8192": _square(8192, 1024, *_RELU),
        "mlp_16384": _square(16384, 1024),
        "generation": (generation_case(4096),),
        "gpt": (gpt_case(32, 512, 30_000, 4, 8, 512, (*_PERIODIC, "relu compiled")),),
        "resnet18": (resnet_case(512, 64, "relu compiled"),),
        "remat": (_remat(24, 8192, 1024),),
    },
}
"""Every bench by scale and name."""


def choose(table: Mapping[str, T], names: Sequence[str] | None, option: str = "--cases") -> dict[str, T]:
    """Return all entries of a table, or those that are named.

    Raises:
        ValueError: for a name that is not in the table.
    """
    if unknown := [name for name in names or () if name not in table]:
        raise ValueError(f"{option} {' '.join(unknown)}: unknown; expected some of {' '.join(table)}")
    return {name: entry for name, entry in table.items() if not names or name in names}
