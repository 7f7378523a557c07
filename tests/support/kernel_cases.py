"""Cases, oracles and measures that the tests of the kernels share."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gbfunc.hypernets.kernels import native, relu_tiles
from gbfunc.types import Kernel

NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler on the path"
)
FAST = ["eager", pytest.param("compiled", marks=NEEDS_COMPILER)]
"""The forms that are used, each to be held against the reference."""

Shape = tuple[int, int, int, int]
Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def draw(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float64) -> Case:
    """Cotangent [T, r, c], A [T, r, H], B [T, c, H], v [T, H] and b [T] for a shape (T, r, c, H)."""
    tiles, rows, cols, hidden = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = ((tiles, rows, cols), (tiles, rows, hidden), (tiles, cols, hidden), (tiles, hidden), (tiles,))
    g, A, B, v, b = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return g, A, B, v, b


def oracle(g: Tensor, A: Tensor, B: Tensor, v: Tensor, b: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Tiles and gradients of A, B, v and b in float64, term by term, and the sums of the terms' sizes."""
    g, A, B, v, b = (x.double() for x in (g, A, B, v, b))
    outputs = (b[:, None, None].expand(g.shape), A, B, v, g.sum((1, 2)))
    terms_of = (outputs[0].abs(), A, B, v, g.abs().sum((1, 2)))
    results = [x.clone() if i in (0, 4) else torch.zeros_like(x) for i, x in enumerate(outputs)]
    sizes = [x.clone() if i in (0, 4) else torch.zeros_like(x) for i, x in enumerate(terms_of)]
    (tiles, rows, hidden), cols = A.shape, B.shape[1]
    for t in range(tiles):
        for i in range(rows):
            for j in range(cols):
                for h in range(hidden):
                    a, c = A[t, i, h], B[t, j, h]
                    if a + c <= 0:
                        continue
                    terms = (
                        ((t, i, j), v[t, h] * (a + c), v[t, h] * (a + c)),
                        ((t, i, h), g[t, i, j] * v[t, h], g[t, i, j] * v[t, h]),
                        ((t, j, h), g[t, i, j] * v[t, h], g[t, i, j] * v[t, h]),
                        # The backward pass sums the parts of a and of c apart, which may cancel.
                        ((t, h), g[t, i, j] * (a + c), g[t, i, j] * (a.abs() + c.abs())),
                    )
                    for (index, term, size), result, total in zip(terms, results[:4], sizes[:4], strict=True):
                        result[index] += term
                        total[index] += size.abs()
    return results, sizes


def check(found: list[Tensor], case: Case, relative: float) -> None:
    results, sizes = oracle(*case)
    limits = torch.finfo(case[0].dtype)
    subnormal = limits.smallest_normal * limits.eps  # spacing of numbers that cannot be rounded relatively
    for x, result, size in zip(found, results, sizes, strict=True):
        assert x.dtype == case[0].dtype
        assert ((x.double() - result).abs() <= relative * size + subnormal).all()


def with_gradients(case: Case, kernel: Kernel) -> list[Tensor]:
    """Tiles and the gradients of A, B, v and b."""
    leaves = [x.clone().requires_grad_() for x in case[1:]]
    tiles = relu_tiles(*leaves, kernel=kernel)
    return [tiles.detach(), *torch.autograd.grad(tiles, leaves, case[0])]


def compile_kernels(init_method: str) -> bool:
    """What each process does of those that compile at once: nothing that the others know of."""
    return native.is_available()


def relu_objective(kernel: Kernel) -> Callable[..., Tensor]:
    return lambda A, B, v, b: relu_tiles(A, B, v, b, kernel=kernel).square().sum()


def _nested(f: Callable[..., Tensor]) -> Callable[..., Any]:
    inner = torch.vmap(grad(f, (0, 1, 2, 3)), in_dims=(0, None, None, 0))
    return torch.vmap(inner, in_dims=(None, 0, 0, None))


def _mixed_dims(f: Callable[..., Tensor]) -> Callable[..., Any]:
    inner = torch.vmap(grad(f, (0, 1, 2, 3)), (2, 1, None, 0))
    return lambda A, B, v, b: inner(A.permute(1, 2, 0), B.transpose(0, 1), v[0], b)


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "vmap": torch.vmap,
    "grad": lambda f: grad(f, (0, 1, 2, 3)),
    "vmap of grad": lambda f: torch.vmap(grad(f, (0, 1, 2, 3))),
    "grad of vmap": lambda f: grad(lambda *x: torch.vmap(f)(*x).sum(), (0, 1, 2)),
    "nested vmap": _nested,
    "vmap over other dimensions": _mixed_dims,
    "jvp of grad": lambda f: lambda *x: jvp(grad(f, (0, 1, 2, 3)), x, tuple(y + 1 for y in x)),
    "jvp of vmap of grad": lambda f: lambda *x: jvp(torch.vmap(grad(f, (0, 1, 2, 3))), x, tuple(y + 1 for y in x)),
    "hessian": lambda f: hessian(f, (0, 1, 2, 3)),
    "forward over forward": lambda f: jacfwd(jacfwd(f, (0, 2)), (0, 2)),
    "reverse over reverse": lambda f: jacrev(jacrev(f, (0, 2)), (0, 2)),
    "third order": lambda f: lambda *x: jvp(hessian(f, 2), x, tuple(y - 1 for y in x)),
}
FIRST_ORDER = ("vmap", "grad", "vmap of grad", "grad of vmap")


def assert_trees_close(found: Any, expected: Any) -> None:
    for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


class LiveBytes(TorchDispatchMode):
    """Counts the memory of the tensors that operations make, and its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: dict[int, int] = {}

    def _freed(self, pointer: int) -> None:
        self.live -= self.seen.pop(pointer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.seen:
                storage = x.untyped_storage()
                self.seen[storage.data_ptr()] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, storage.data_ptr())
        return out


def peak_of(run: Callable[[], Any]) -> int:
    with LiveBytes() as counter:
        run()
    return counter.peak
