"""Slow float64 oracles: one weight at a time, in plain loops, from the definitions.

They read a plan's description (JSON forms of codes and hypernetworks, grids, scales) and a genome, and use none of the
library's arithmetic. Names: i, j row and column of a tile; y, x row and column of a matrix; t tile.
"""

import base64
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.func import functional_call

from gbfunc.encoding import Encoding
from gbfunc.hypernets import Hypernet
from gbfunc.plan import Plan, Slot
from gbfunc.types import GenomeLike, MatrixDims

Array = NDArray[Any]
Leaves = Mapping[str, Array]


def bits(index: int, n: int) -> list[float]:
    width = math.ceil(math.log2(n)) if n > 1 else 0
    return [1.0 if c == "1" else -1.0 for c in format(index, f"0{width}b")] if width else []


def code(encoding: dict[str, Any], n: int, index: int) -> list[float]:
    match encoding["type"]:
        case "binary":
            return bits(index, n)
        case "gray":
            return bits(index ^ (index // 2), n)
        case "one_hot":
            return [float(k == index) for k in range(n)]
        case "grid":
            found: list[float] = []
            for axis in reversed(encoding["dims"]):
                index, position = divmod(index, axis)
                if axis == 1:
                    continue
                if encoding["code"] == "coordinate":
                    own = [encoding["bandwidth"] * (2 * position / (axis - 1) - 1)]
                else:
                    own = code({"type": encoding["code"]}, axis, position)
                found = own + found
            return found
        case "table":
            rows, columns = encoding["shape"]
            numbers = np.frombuffer(base64.b64decode(encoding["data"]), encoding["dtype"])
            assert len(numbers) == rows * columns and rows == n
            return [float(x) for x in numbers[index * columns : (index + 1) * columns]]
        case "per_axis":
            positions = encoding["n_positions"]
            channel, position = divmod(index, positions)
            return code(encoding["channels"], n // positions, channel) + code(
                encoding["positions"], positions, position
            )
    raise NotImplementedError(encoding)


def is_local(encoding: dict[str, Any]) -> bool:
    return (
        is_local(encoding["channels"]) if encoding["type"] == "per_axis" else encoding["type"] not in ("grid", "table")
    )


def tile_code(encoding: Encoding, n: int, tile: int, block: int, i: int) -> list[float]:
    data = encoding.to_json()
    return code(data, tile, i) if is_local(data) else code(data, n, block * tile + i)


ACTIVATIONS: Mapping[str, Callable[[float], float]] = {
    "relu": lambda x: max(x, 0.0),
    "tanh": math.tanh,
    "sin": math.sin,
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
}


def dot(code_: list[float], weight: Array | None, h: int) -> float:
    """Sum of code times weight[:, h]; a code without numbers has no weight."""
    return sum(c * float(weight[k, h]) for k, c in enumerate(code_)) if weight is not None else 0.0


def _periodic(net: Any, leaves: Leaves, row: list[float], col: list[float], i: int, j: int, noise: Leaves) -> float:
    total = 0.0
    for h in range(net.features):
        angle = dot(row, leaves.get("row_weight"), h) + dot(col, leaves.get("col_weight"), h)
        if net.share != "none":
            total += float(leaves["sine"][h]) * math.sin(angle) + float(leaves["cosine"][h]) * math.cos(angle)
        else:
            total += float(leaves["amplitude"][h]) * math.sin(angle + float(leaves["phase"][h]))
    return total


def _bilinear(net: Any, leaves: Leaves, row: list[float], col: list[float], i: int, j: int, noise: Leaves) -> float:
    waves = []
    for code, name in ((row, "row_weight"), (col, "col_weight")):
        angles = [dot(code, leaves.get(name), h) for h in range(net.features)]
        waves.append([*map(math.sin, angles), *map(math.cos, angles)])
    pairs = itertools.product(range(2 * net.features), repeat=2)
    return sum(waves[0][a] * float(leaves["mix"][a, b]) * waves[1][b] for a, b in pairs)


def _gnet(net: Any, leaves: Leaves, row: list[float], col: list[float], i: int, j: int, noise: Leaves) -> float:
    f = ACTIVATIONS[net.activation]
    hidden = [
        f(dot(row, leaves.get("row_weight"), h) + dot(col, leaves.get("col_weight"), h) + float(leaves["bias"][h]))
        for h in range(net.hidden[0])
    ]
    for layer in range(1, len(net.hidden)):
        weight, bias = leaves[f"weight_{layer}"], leaves[f"bias_{layer}"]
        hidden = [f(dot(hidden, weight, h) + float(bias[h])) for h in range(net.hidden[layer])]

    def head(name: str) -> float:
        return sum(x * float(w) for x, w in zip(hidden, leaves[f"{name}_weight"], strict=True)) + float(
            leaves[f"{name}_bias"]
        )

    spread = math.exp(head("log_sigma")) * float(noise["weight"][i, j]) if "weight" in noise else 0.0
    return head("out") + spread


def _low_rank(net: Any, leaves: Leaves, row: list[float], col: list[float], i: int, j: int, noise: Leaves) -> float:
    return sum(float(leaves["left"][i, k]) * float(leaves["right"][j, k]) for k in range(net.rank))


def _xox(net: Any, leaves: Leaves, row: list[float], col: list[float], i: int, j: int, noise: Leaves) -> float:
    pairs = itertools.product(range(net.genes), repeat=2)
    out, rules, into = leaves["row_genes"], leaves["rules"], leaves["col_genes"]
    return float(leaves["scale"]) * sum(float(out[i, a]) * float(rules[a, b]) * float(into[j, b]) for a, b in pairs)


def _new_rows(net: Any, leaves: Leaves, row: list[float], col: list[float], i: int, j: int, noise: Leaves) -> float:
    place = i - int(leaves["height"]) + net.rows
    return float(leaves["rows"][place, j]) if place >= 0 else 0.0


def _module(net: Any, leaves: Leaves, row: list[float], col: list[float], i: int, j: int, noise: Leaves) -> float:
    module = net.factory(len(row) + len(col)).double()
    # Leaves without numbers are not stored; `reshape` undoes what numpy makes of a scalar.
    own = {
        k: torch.from_numpy(np.array(leaves[k])).reshape(p.shape) if k in leaves else p.detach()
        for k, p in module.named_parameters()
    }
    value = float(functional_call(module, own, (torch.tensor(row + col, dtype=torch.float64),)))
    return value * float(leaves["gain"]) + float(leaves["shift"])


WEIGHTS: Mapping[str, Callable[..., float]] = {
    "periodic": _periodic,
    "bilinear": _bilinear,
    "constant": lambda net, *rest: net.value,
    "gnet": _gnet,
    "stochastic": _gnet,
    "low_rank": _low_rank,
    "xox": _xox,
    "new_rows": _new_rows,
    "module": _module,
}
"""One weight `(hypernet, leaves of one g-net, row code, column code, i, j, noise of one g-net)` of every type."""


def tile(hypernet: Hypernet, leaves: Leaves, rows: Array, cols: Array, noise: Leaves | None = None) -> Array:
    weight, leaves = WEIGHTS[hypernet.type], {**leaves, "height": np.array(len(rows))}
    out = np.zeros((len(rows), len(cols)))
    for i, j in np.ndindex(out.shape):
        out[i, j] = weight(hypernet, leaves, list(rows[i]), list(cols[j]), i, j, noise or {})
    return out


def position(kind: str, shape: tuple[int, ...], matrix: MatrixDims, part: int, y: int, x: int) -> tuple[int, ...]:
    match kind:
        case "transposed_linear":
            return (x, y)
        case "attention_in":
            return (part * (shape[0] // 3) + y, x)
        case "vector":
            return (y,) if shape else ()
    if len(shape) == 2:
        return (y, x)
    inner = []
    for length in reversed(shape[2:]):
        x, k = divmod(x, length)
        inner.append(k)
    place = (y, x, *reversed(inner))
    return (place[1], place[0], *place[2:]) if kind == "conv_transpose" else place


def _tiles(slot: Slot) -> Iterator[tuple[int, int, int]]:
    for t in range(slot.grid.n_tiles):
        yield (t, *divmod(t, slot.grid.n_cols))


def _float64(leaves: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    return {k: v.detach().double().cpu().numpy() for k, v in leaves.items()}


def weights(
    plan: Plan, genome: GenomeLike, noise: Mapping[str, Mapping[str, torch.Tensor]] | None = None
) -> dict[str, Array]:
    """All parameters of a p-net by name: for each tensor, part, tile and entry. Meant for very small p-nets."""
    names = {(e.hypernet, e.dims): e.name for e in plan.ensembles}
    seen: dict[str, int] = {}
    groups: dict[str, dict[tuple[Any, ...], int]] = {}
    found = {}
    for tensor in plan.tensors:
        if not tensor.slots:
            found[tensor.name] = genome.direct[tensor.name].detach().double().numpy()
            continue
        out = np.full(tensor.shape, np.nan)
        for part, (slot, matrix) in enumerate(zip(tensor.slots, tensor.matrices, strict=True)):
            name, grid, net = names[slot.hypernet, slot.dims], slot.grid, slot.hypernet
            stacked = _float64(genome.gnets.get(name, {}))
            scopes = {k: leaf.scope for k, leaf in net.leaves(slot.dims).items()}
            own_noise = _float64((noise or {}).get(name, {}))
            for t, block_row, block_col in _tiles(slot):
                index = seen.get(name, 0)
                seen[name] = index + 1
                key = (slot.group, t) if net.shares else ("", index)
                numbers = groups.setdefault(name, {})
                group = numbers.setdefault(key, len(numbers))
                own = {k: v[group if scopes[k] == "group" else index] for k, v in stacked.items()}
                own["height"] = np.array(grid.tile_rows)
                drawn = {k: v[index] for k, v in own_noise.items()}
                for i, j in itertools.product(range(grid.tile_rows), range(grid.tile_cols)):
                    y, x = block_row * grid.tile_rows + i, block_col * grid.tile_cols + j
                    if y >= grid.rows or x >= grid.cols:
                        continue
                    row = tile_code(slot.row_code, grid.rows, grid.tile_rows, block_row, i)
                    col = tile_code(slot.col_code, grid.cols, grid.tile_cols, block_col, j)
                    g = WEIGHTS[net.type](net, own, row, col, i, j, drawn)
                    out[position(tensor.kind, tensor.shape, matrix, part, y, x)] = slot.offset + slot.scale * g
        found[tensor.name] = out
    return found
