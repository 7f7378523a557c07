"""A module with some weights made of two factors: dense, applied as factors, and made again in backward.

The dense kind is the oracle: it multiplies the factors out by `product`, which shares nothing with the forms.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.layers.factored import FactoredWeight
from gbfunc.layers.forms import WeightForm
from gbfunc.layers.recomputed import RecomputedWeight
from gbfunc.pnet.describe import parameter_infos
from gbfunc.pnet.pure import PureNet
from gbfunc.tiling import TileGrid

KINDS = ("factored", "recomputed")


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def vectors(*shape: int) -> Tensor:
    """A fixed float64 tensor without a pattern; no random numbers, so that vmap takes it."""
    count = torch.Size(shape).numel()
    return (torch.arange(1, count + 1, dtype=torch.float64).square() * 0.7).sin().reshape(shape)


def product(left: Tensor, right: Tensor, shape: tuple[int, ...], grid: TileGrid, transposed: bool = False) -> Tensor:
    """The dense weight: tile (i, j) is `left[i nc + j] @ right[i nc + j].T`."""
    left, right = (x.unflatten(0, (grid.n_rows, grid.n_cols)) for x in (left, right))
    tiles = torch.einsum("ijrk,ijck->irjc", left, right)
    matrix = tiles.flatten(2).flatten(0, 1)[: grid.rows, : grid.cols]
    return (matrix.t() if transposed else matrix).reshape(shape)


def make_factors(grid: TileGrid, k: int, seed: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    left = torch.randn(grid.n_tiles, grid.tile_rows, k, generator=draw, dtype=torch.float64) / k**0.5
    right = torch.randn(grid.n_tiles, grid.tile_cols, k, generator=draw, dtype=torch.float64) / grid.cols**0.5
    return left.to(dtype).requires_grad_(), right.to(dtype).requires_grad_()


def make_form(
    kind: str, name: str, shape: tuple[int, ...], grid: TileGrid, transposed: bool = False, rank: int | None = None
) -> WeightForm:
    if kind == "factored":
        return FactoredWeight(name, shape, grid, rank or 1, transposed, auto=rank is not None)

    def maker(left: Tensor, right: Tensor) -> Tensor:
        return product(left, right, shape, grid, transposed)

    return RecomputedWeight(name, ("left", "right"), maker, transposed)


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.fc.weight
        assert weight is self.fc.weight and isinstance(self.fc, nn.Linear)
        assert next(iter(self.fc.parameters())) is weight
        return self.fc(x) + weight.square().sum(1) + dict(self.named_parameters())["fc.weight"].sin().sum(1)


def count_made(form: WeightForm) -> Counter[str]:
    made: Counter[str] = Counter()
    make = form.make

    def counted(inputs: Any) -> Tensor:
        made[form.name] += 1
        return make(inputs)

    form.make = counted
    return made


class Formed(NamedTuple):
    net: PureNet
    leaves: dict[str, Tensor]  # what gradients are taken of: `NAME.left`, `NAME.right`, other parameters by name
    tensors: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]  # from the leaves to what `net` takes
    forms: dict[str, WeightForm]  # by name of parameter, names of tied ones included
    buffers: dict[str, Tensor]

    def __call__(self, *args: Any, leaves: Mapping[str, Tensor] | None = None, **kwargs: Any) -> Any:
        tensors = self.tensors(self.leaves if leaves is None else leaves)
        return self.net(tensors, {k: v.clone() for k, v in self.buffers.items()}, *args, **kwargs)

    @property
    def reads(self) -> dict[str, int]:
        return self.net.dense_reads


Cuts = Mapping[str, tuple[int, int]]
"""Tile rows and tile columns at most, by name of parameter; columns of a convolution are channels."""


def on_form(kind: str, module: nn.Module, cuts: Cuts, *, k: int = 2, auto: bool = False) -> Formed:
    forms: dict[str, WeightForm] = {}
    leaves: dict[str, Tensor] = {}
    made: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    for seed, info in enumerate(parameter_infos(module)):
        name, shape = info.name, tuple(info.tensor.shape)
        if name not in cuts:
            leaves[name] = info.tensor.detach().clone().requires_grad_()
            continue
        transposed = type(info.module).__name__ == "Conv1D"
        rows, cols = (shape[1], shape[0]) if transposed else (shape[0], math.prod(shape[1:]))
        kernel = math.prod(shape[2:])
        nr, nc = cuts[name]
        grid = TileGrid(rows, cols, -(-rows // nr), -(-(cols // kernel) // nc) * kernel)
        leaves[f"{name}.left"], leaves[f"{name}.right"] = make_factors(grid, k, seed, info.tensor.dtype)
        if kind == "dense":
            made[name] = lambda left, right, s=shape, g=grid, t=transposed: product(left, right, s, g, t)
        else:
            forms |= dict.fromkeys(
                (name, *info.aliases), make_form(kind, name, shape, grid, transposed, k if auto else None)
            )

    def tensors(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = {k: v for k, v in leaves.items() if k.rpartition(".")[0] not in cuts}
        with torch.autocast("cpu", enabled=False):
            given |= {name: make(leaves[f"{name}.left"], leaves[f"{name}.right"]) for name, make in made.items()}
        for name in cuts if kind != "dense" else ():
            given |= {f"{name}_form.{side}": leaves[f"{name}.{side}"] for side in ("left", "right")}
        return given

    buffers = {k: v.clone() for k, v in module.named_buffers()}
    return Formed(PureNet(module, forms), leaves, tensors, forms, buffers)


def outputs_and_gradients(formed: Formed, use: Callable[..., Any], *inputs: Tensor) -> tuple[list[Tensor], list[Any]]:
    inputs = tuple(x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)  # dropout
        out = use(formed, *inputs)
    outputs = [x for x in (out if isinstance(out, tuple) else (out,)) if x is not None]
    seeds = [torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape) for x in outputs]
    wanted = [*formed.leaves.values(), *(x for x in inputs if x.requires_grad)]
    return outputs, list(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True))


def assert_equals_dense(
    kind: str, module: nn.Module, cuts: Cuts, use: Callable[..., Any], *inputs: Tensor, k: int = 2, auto: bool = False
) -> Formed:
    expected, targets = outputs_and_gradients(on_form("dense", module, cuts, k=k), use, *inputs)
    formed = on_form(kind, module, cuts, k=k, auto=auto)
    actual, gradients = outputs_and_gradients(formed, use, *inputs)
    assert_close(actual, expected)
    # Dropout draws its mask in the order of memory.
    assert [x.stride() for x in actual if x.numel()] == [x.stride() for x in expected if x.numel()]
    for gradient, target in zip(gradients, targets, strict=True):
        assert_close(gradient, target)
    return formed
