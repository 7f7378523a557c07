"""The same weight as a dense tensor, as factors, and made again in backward."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from gbfunc.factored import factored_weight, remat_weight

KINDS = ("factored", "remat")


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def make_factors(
    rows: int, cols: int, nr: int, nc: int, k: int, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Leaf factors of unit-variance columns: [nr, nc, r, k], [nr, nc, c, k]."""
    draw = torch.Generator().manual_seed(seed)
    left = torch.randn(nr, nc, -(-rows // nr), k, generator=draw, dtype=dtype) / k**0.5
    right = torch.randn(nr, nc, -(-cols // nc), k, generator=draw, dtype=dtype) / cols**0.5
    return left.requires_grad_(), right.requires_grad_()


def as_kind(kind: str, left: Tensor, right: Tensor, shape: tuple[int, ...], **options: Any) -> Tensor:
    """The same weight as "dense", "factored" or "remat"."""
    report = options.pop("report", None)
    if kind == "factored":
        return factored_weight(left, right, shape, **options, report=report)

    def make(left: Tensor, right: Tensor) -> Tensor:
        return factored_weight(left, right, shape, **options).dense()

    if kind == "dense":
        return make(left, right)
    name = options.get("name", "")
    return remat_weight(make, (left, right), shape, left.dtype, left.device, name=name, report=report)


def vectors(*shape: int) -> Tensor:
    """A fixed float64 tensor without a pattern; no random numbers, so that vmap takes it."""
    count = torch.Size(shape).numel()
    return (torch.arange(1, count + 1, dtype=torch.float64).square() * 0.7).sin().reshape(shape)


class Conv1D(nn.Module):
    """A linear layer that stores its weight transposed, as Hugging Face's GPT-2 does."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf) / nx**0.5)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return flat.view(*x.size()[:-1], self.weight.shape[1])


def generated(
    kind: str,
    net: nn.Module,
    tiles: dict[str, tuple[int, int]],
    report: Counter[tuple[str, str]] | None = None,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The net's parameters with the named ones generated, and the leaves: factors and other parameters."""
    modules, weights, leaves = dict(net.named_modules()), {}, []
    for seed, (name, parameter) in enumerate(net.named_parameters()):
        if name not in tiles:
            weights[name] = parameter
            leaves.append(parameter)
            continue
        owner = modules[name.rpartition(".")[0]]
        transposed = isinstance(owner, Conv1D | nn.ConvTranspose2d)
        rows = parameter.shape[1] if transposed else parameter.shape[0]
        cols = parameter.numel() // rows
        left, right = make_factors(rows, cols, *tiles[name], 3, seed, parameter.dtype)
        leaves += [left, right]
        options = {"rows": rows, "cols": cols, "transposed": transposed, "name": name, "report": report}
        weights[name] = as_kind(kind, left, right, tuple(parameter.shape), **options)
    return weights, leaves
