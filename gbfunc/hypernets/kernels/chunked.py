"""Generates tiles in row blocks that backward recomputes, with bounded memory and derivatives of any order.

A `RowMap` is a function of one g-net whose inputs are cut along the rows of its tile or shared by all rows, and whose
outputs are cut along the rows or summed over them. Its reverse derivative is a row map too, so one `autograd.Function`
evaluates all higher derivatives. Forward mode and compiled graphs use the plain expression.

Suffixes: T tiles; r, c rows and columns of a tile; H hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gbfunc.tiling import unbatched
from gbfunc.types import Params

Tensors: TypeAlias = tuple[Tensor, ...]

DEFAULT_MAX_BYTES = 64 * 2**20  # Large against the cost of dispatch, small against p-nets that need blocks


class RowMap(NamedTuple):
    """A function of one g-net that can be evaluated some rows at a time.

    `fn(row inputs [r, ...], shared inputs) -> (row outputs [r, ...], outputs to sum over the rows)`; `inputs` and
    `outputs` count both kinds; `row_bytes` estimates the memory of one row of one tile, `max_bytes` bounds a block.
    """

    fn: Callable[[Tensors, Tensors], tuple[Tensors, Tensors]]
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    row_bytes: int
    max_bytes: int = DEFAULT_MAX_BYTES

    def vjp(self) -> RowMap:
        """Reverse derivative: `(row inputs + row cotangents, shared inputs + sum cotangents) -> gradients`."""

        def fn(rows: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
            (rows, row_cotangents), (shared, sum_cotangents) = map(_split_at, (rows, shared), self.inputs)
            return torch.func.vjp(self.fn, rows, shared)[1]((row_cotangents, sum_cotangents))

        n, k = (i + o for i, o in zip(self.inputs, self.outputs, strict=True))
        return self._replace(fn=fn, inputs=(n, k), outputs=self.inputs, row_bytes=2 * self.row_bytes)

    def apply(self, rows: Tensors, shared: Tensors) -> Tensors:
        """Evaluate for a stack of g-nets: row inputs [T, r, ...], shared inputs [T, ...] -> outputs [T, ...]."""
        return _RowMapFunction.apply(self, *rows, *shared)


def _split_at(x: Tensors, n: int) -> tuple[Tensors, Tensors]:
    return x[:n], x[n:]


def pieces(length: int, longest: int) -> Iterator[slice]:
    """Cut `length` into the fewest pieces of at most `longest`, as equal as possible."""
    step = -(-length // -(-length // longest))
    return (slice(start, min(length, start + step)) for start in range(0, length, step))


def _evaluate(m: RowMap, rows: Tensors, shared: Tensors) -> Tensors:
    """Evaluate in blocks of tiles and rows: row inputs [T, r, ...], shared inputs [T, ...] -> all outputs, [T, ...]."""
    tiles, length = rows[0].shape[:2]
    at_once = max(1, m.max_bytes // m.row_bytes)
    outputs: list[Tensor] = []
    # Forward may run under autocast but the recomputation does not; both need the same precision.
    device = rows[0].device.type
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        for t in pieces(tiles, max(1, at_once // length)):
            for i in pieces(length, min(length, at_once)):
                block = torch.vmap(m.fn)(tuple(x[t, i] for x in rows), tuple(x[t] for x in shared))
                if not outputs:
                    outputs += [x.new_empty(tiles, length, *x.shape[2:]) for x in block[0]]
                    outputs += [x.new_zeros(tiles, *x.shape[1:]) for x in block[1]]
                for out, part in zip(outputs, block[0], strict=False):
                    out[t, i] = part
                for out, part in zip(outputs[m.outputs[0] :], block[1], strict=True):
                    out[t] += part
    return tuple(outputs)


class InputsOnly(torch.autograd.Function):
    """A function of tensors that saves only its inputs; its first argument is a description, not a tensor."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.what = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])


class _RowMapFunction(InputsOnly):
    @staticmethod
    def forward(m: RowMap, *inputs: Tensor) -> Tensors:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _evaluate(m, *_split_at(inputs, m.inputs[0]))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:
        rows, shared = _split_at(ctx.saved_tensors, ctx.what.inputs[0])
        row_cotangents, sum_cotangents = _split_at(cotangents, ctx.what.outputs[0])
        return (None, *ctx.what.vjp().apply(rows + row_cotangents, shared + sum_cotangents))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], m: RowMap, *inputs: Tensor) -> tuple[Tensors, tuple[int, ...]]:
        folded = tuple(x.flatten(0, 1) for x in unbatched(info.batch_size, in_dims[1:], inputs))
        outputs = m.apply(*_split_at(folded, m.inputs[0]))
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in outputs), (0,) * len(outputs)


def chunked_apply(
    fn: Callable[[Tensor, Params], Tensor], A: Tensor, B: Tensor, params: Params, *, max_bytes: int = DEFAULT_MAX_BYTES
) -> Tensor:
    """Generate tiles [T, r, c] from separable pre-activations, in row blocks that backward recomputes.

    `fn(pre-activations [rows, c, H], params) -> weights [rows, c]` is one g-net after its first layer; `fn` treats rows
    independently and draws no random numbers. `A` [T, r, H] with the bias and `B` [T, c, H] are pre-activations of rows
    and columns, and `params` [T, ...] belong to all g-nets. `max_bytes` bounds the estimated memory of a block, but a
    row is never divided. `A`, `B` and `params` are differentiable in every order and mode; the closure of `fn` is not.
    """
    names, leaves = tuple(params), tuple(params.values())

    def row_fn(rows: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        (A_rH,), (B_cH, *leaves) = rows, shared
        return (fn(A_rH[:, None] + B_cH, dict(zip(names, leaves, strict=True))),), ()

    # Dynamo has no batching rule for the gradient of a Function.
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return torch.vmap(row_fn)((A,), (B, *leaves))[0][0]
    # Weight and bias count each activation about twice, as forward keeps activations before and after nonlinearities.
    floats = 2 * A.shape[-1] + sum(max(p.shape[1:], default=1) for p in leaves)
    m = RowMap(row_fn, (1, 1 + len(leaves)), (1, 0), B.shape[-2] * floats * A.element_size(), max_bytes)
    return m.apply((A,), (B, *leaves))[0]
