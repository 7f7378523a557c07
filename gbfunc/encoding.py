"""Codes of the rows and columns of a weight matrix: the inputs of a g-net.

`binary`, `gray` and `one_hot` number the rows *of a tile*, so all tiles of a shape share the codes. `grid` codes a
position on an axis with a geometry (an image, a kernel), and `table` holds a user's codes: both are global and sliced
per tile. Bits come from integer arithmetic, the same on every device and in exported graphs.

Suffixes: n rows or columns of the axis, k width of a code, u blocks (distinct tiles along the axis), t rows of a tile.
"""

import base64
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
Device = torch.device | str

_MAX_AXIS = 1 << 31
_MAX_BANDWIDTH = 1e9  # Of any number of a table, too


def bit_width(n: int) -> int:
    """Bits of a code for `n` things: ceil(log2(n))."""
    return (n - 1).bit_length()


def _halves(i_k: Tensor, units: list[int]) -> Tensor:
    """For each of k units, +1 for positions [..., k] in the second half of a period of `2 unit`, otherwise -1."""
    units_k = i_k.new_tensor(units)
    return torch.where(i_k % (2 * units_k) >= units_k, 1.0, -1.0)


def _places(n: int) -> list[int]:
    return [1 << bit for bit in reversed(range(bit_width(n)))]


def _quotient(i: Tensor, m: int) -> Tensor:
    """`i // m`, in fewer operations of an exported graph."""
    return ((i - i % m).double() / m).to(i.dtype)


def _joined(codes: list[Tensor], i: Tensor) -> Tensor:
    codes = [code for code in codes if code.shape[-1]] or [i.new_empty((*i.shape, 0)).double()]
    return codes[0] if len(codes) == 1 else torch.cat(codes, -1)


@dataclass(frozen=True)
class Encoding:
    """The code of one axis of a matrix: a static, hashable description.

    A subclass is a frozen dataclass with fields that are numbers, texts, tuples of them, and encodings. It defines
    `type`, `width` and `at`; `check` if only some lengths can be coded; and `local = False` if a code depends on the
    position on the whole axis. `gb.register` lets genomes of a subclass be saved and loaded.
    """

    type: ClassVar[str]
    local: ClassVar[bool] = True  # whether codes number positions within a tile, so that all tiles share codes

    def width(self, n: int) -> int:
        """Numbers per code on an axis of `n`."""
        raise NotImplementedError

    def at(self, i: Tensor, n: int) -> Tensor:
        """Codes of integer positions i of 0 .. n-1, by operations of torch: [...] -> [..., k], all distinct."""
        raise NotImplementedError

    def codes(self, n: int) -> Array:
        """Codes of positions 0 .. n-1: [n, k]."""
        self.check(n)
        return self.at(torch.arange(n, device="cpu"), n).double().numpy()

    def check(self, n: int) -> None:
        """Raise ValueError if the encoding cannot code an axis of `n`."""

    def tile_codes(self, n: int, tile: int, device: Device = "cpu") -> Tensor:
        """Codes of the pieces of `tile` of an axis of `n`: [u, t, k], with u = 1 for shared codes."""
        self.check(tile if self.local else n)
        if self.local:
            return self.at(torch.arange(tile, device=device), tile)[None]
        n_tiles = -(-n // tile)
        i = torch.arange(n_tiles * tile, device=device)
        if n_tiles * tile > n:
            # Positions past the end repeat the last position; their weights are cropped.
            i = i.clip(max=n - 1)
        return self.at(i.reshape(n_tiles, tile), n)

    def tile_width(self, n: int, tile: int) -> int:
        return self.width(tile if self.local else n)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able description; `encoding_from_json` reads it back."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"type": self.type} | {k: v.to_json() if isinstance(v, Encoding) else v for k, v in values.items()}


@dataclass(frozen=True)
class Binary(Encoding):
    """Plain binary code of the position within a tile: ceil(log2(n)) numbers of +-1."""

    type: ClassVar[str] = "binary"

    def width(self, n: int) -> int:
        return bit_width(n)

    def at(self, i: Tensor, n: int) -> Tensor:
        return _halves(i[..., None], _places(n))


@dataclass(frozen=True)
class Gray(Binary):
    """Gray code of the position within a tile: ceil(log2(n)) numbers of +-1; neighbours differ in one."""

    type: ClassVar[str] = "gray"

    def at(self, i: Tensor, n: int) -> Tensor:
        # Bit b of `i ^ (i >> 1)` is bit b + 1 of `i + 2^b`.
        places = _places(n)
        return _halves(i[..., None] + i.new_tensor(places), [2 * p for p in places])


@dataclass(frozen=True)
class OneHot(Encoding):
    """One indicator (0 or 1) per position within a tile: n numbers."""

    type: ClassVar[str] = "one_hot"

    def width(self, n: int) -> int:
        return n

    def at(self, i: Tensor, n: int) -> Tensor:
        return torch.where(i[..., None] == torch.arange(n, device=i.device), 1.0, 0.0)


@dataclass(frozen=True)
class Grid(Encoding):
    """Positions on a row-major grid, coded axis by axis; axes of length 1 need no code."""

    dims: tuple[int, ...]
    code: Literal["coordinate", "gray", "binary"] = "coordinate"
    bandwidth: float = 6.0
    type: ClassVar[str] = "grid"
    local: ClassVar[bool] = False

    def __post_init__(self) -> None:
        dims, code, bandwidth = self.dims, self.code, self.bandwidth
        if not 1 <= len(dims) <= 16 or any(type(d) is not int or not 1 <= d <= _MAX_AXIS for d in dims):
            raise ValueError(f"grid expects 1 to 16 axis lengths >= 1, got {len(dims)}: {reprlib.repr(dims)}")
        if code not in ("coordinate", "gray", "binary"):
            raise ValueError(f"code must be 'coordinate', 'gray' or 'binary', got {code!r}")
        if isinstance(bandwidth, bool) or not (isinstance(bandwidth, int | float) and 0 < bandwidth <= _MAX_BANDWIDTH):
            raise ValueError(f"bandwidth must be a positive number, at most {_MAX_BANDWIDTH:g}, got {bandwidth!r}")
        object.__setattr__(self, "bandwidth", float(bandwidth))

    def check(self, n: int) -> None:
        if math.prod(self.dims) != n:
            size = "x".join(map(str, self.dims))
            raise ValueError(f"grid({size}) codes {math.prod(self.dims)} positions, but the axis has {n}")

    def width(self, n: int) -> int:
        return sum(1 if self.code == "coordinate" else bit_width(d) for d in self.dims if d > 1)

    def at(self, i: Tensor, n: int) -> Tensor:
        codes, unit = [], n
        for d in self.dims:
            unit //= d
            j = _quotient(i, unit) if unit > 1 else i
            j = j % d if d * unit < n else j
            if self.code != "coordinate":
                codes.append((Gray() if self.code == "gray" else Binary()).at(j, d))
            elif d > 1:
                # Symmetric about 0, and exact at both ends.
                codes.append(((2 * j - (d - 1)).double() / (d - 1) * self.bandwidth)[..., None])
        return _joined(codes, i)


@dataclass(frozen=True)
class PerAxis(Encoding):
    """Code of a convolution's columns: `channels` for the input channel, `positions` for the place in the kernel.

    `positions`, such as `grid(3, 3)`, codes `n_positions` (9 for 3 x 3), and all tiles share it, as tiles cut channels.
    Raises ValueError if it codes another number of positions, or if either code is nested too deep.
    """

    channels: Encoding
    positions: Encoding
    n_positions: int
    type: ClassVar[str] = "per_axis"

    def __post_init__(self) -> None:
        if type(self.n_positions) is not int or self.n_positions < 1:
            raise ValueError(f"n_positions must be an int >= 1, got {self.n_positions!r}")
        if odd := [code for code in (self.channels, self.positions) if not isinstance(code, Encoding)]:
            raise ValueError(f"channels and positions must be encodings, got {odd[0]!r}")
        self.positions.check(self.n_positions)
        if self.depth > 3:
            raise ValueError(f"per_axis can be nested 3 deep, got {self.depth}")

    @property
    def depth(self) -> int:
        return 1 + max(getattr(code, "depth", 0) for code in (self.channels, self.positions))

    @property
    def local(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.channels.local

    def check(self, n: int) -> None:
        if n % self.n_positions:
            raise ValueError(f"an axis of {n} does not hold whole kernels of {self.n_positions} positions")
        self.channels.check(n // self.n_positions)
        self.positions.check(self.n_positions)

    def width(self, n: int) -> int:
        return self.channels.width(n // self.n_positions) + self.positions.width(self.n_positions)

    def at(self, i: Tensor, n: int) -> Tensor:
        m = self.n_positions
        return _joined([self.channels.at(_quotient(i, m), n // m), self.positions.at(i % m, m)], i)


@dataclass(frozen=True, repr=False)
class Table(Encoding):
    """Codes `[n, k]` of a user, made by `table`; `data` holds rows of little-endian numbers of `dtype` in base64."""

    shape: tuple[int, int]
    dtype: str
    data: str
    type: ClassVar[str] = "table"
    local: ClassVar[bool] = False

    def __post_init__(self) -> None:
        sizes = len(self.shape) == 2 and all(type(n) is int and 1 <= n <= _MAX_AXIS for n in self.shape)
        if not sizes or self.dtype not in _TABLE_DTYPES:
            raise ValueError(f"a table is [n, k] of {', '.join(_TABLE_DTYPES)}, got {self.shape!r} of {self.dtype!r}")
        # In their own dtype, as float64 would take eight times the file's memory. Infinities are within 1e9 in float16.
        numbers = self._numbers
        with np.errstate(over="ignore"):
            if not (np.isfinite(numbers).all() and (np.abs(numbers) <= _MAX_BANDWIDTH).all()):
                raise ValueError(f"codes must be finite numbers, at most {_MAX_BANDWIDTH:g}")

    def __repr__(self) -> str:
        return f"table({self.shape[0]}x{self.shape[1]}, {self.dtype})"

    @property
    def _numbers(self) -> NDArray[Any]:
        data = base64.b64decode(self.data, validate=True)
        return np.frombuffer(data, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)

    @cached_property
    def rows(self) -> Array:
        """The codes: [n, k]."""
        return self._numbers.astype(np.float64)

    def check(self, n: int) -> None:
        if n != self.shape[0]:
            raise ValueError(f"a table of {self.shape[0]} codes, but the axis has {n}")

    def width(self, n: int) -> int:
        return self.shape[1]

    def at(self, i: Tensor, n: int) -> Tensor:
        return torch.tensor(self.rows, device=i.device)[i]


_TABLE_DTYPES = ("int8", "float16", "float32", "float64")


def table(codes: Any) -> Encoding:
    """Codes of an axis from a table: kinds of units, places of neurons, rows of a connectome.

    Positions with the same code get the same weights; `gb.binary().codes(n)` beside the common columns distinguishes
    them. A genome's file holds the codes, in the narrowest of int8, float16, float32 and float64 that holds them
    exactly. For codes by a formula, subclass `Encoding`, and `gb.register` the class.

    Args:
        codes: array or tensor [n, k] of real numbers, a row for each position of the axis.

    Raises:
        ValueError: for another shape, or numbers that are not real, not finite, or above 1e9.

    >>> table([[0.0, 1.0], [0.5, -1.0], [2.0, 1.0]])
    table(3x2, float16)
    """
    if isinstance(codes, Tensor):
        codes = (codes.float() if codes.dtype == torch.bfloat16 else codes).detach().cpu()
    array = np.asarray(codes)
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "biuf":
        raise ValueError(f"a table of codes must be [n, k] of real numbers, got {array.shape} of {array.dtype}")
    wide = array.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = (name for name in _TABLE_DTYPES if (wide.astype(name).astype(np.float64) == wide).all())
        dtype = next(exact, _TABLE_DTYPES[-1])
    data = base64.b64encode(wide.astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()
    return Table((array.shape[0], array.shape[1]), dtype, data)


binary, gray, one_hot, per_axis = Binary, Gray, OneHot, PerAxis


def grid(*dims: int, code: Literal["coordinate", "gray", "binary"] = "coordinate", bandwidth: float = 6.0) -> Encoding:
    """Code of an axis with a geometry: a flattened image `grid(28, 28)`, a sequence `grid(1024)`.

    Args:
        dims: lengths of the axes, row-major, 16 at most; their product is the length of the coded axis.
        code: `"coordinate"`: each axis as one number in [-bandwidth, bandwidth]; `"gray"` or `"binary"`: bits.
        bandwidth: largest coordinate; more makes weights vary faster along the axis.

    Raises:
        ValueError: for no axis or too many, one shorter than 1, an unknown code, or a bandwidth that is not positive.
    """
    return Grid(dims, code, bandwidth)


TYPES: dict[str, type[Encoding]] = {t.type: t for t in (Binary, Gray, OneHot, Grid, PerAxis, Table)}
ENCODINGS: Mapping[str, type[Encoding]] = MappingProxyType(TYPES)
"""Every encoding by its type; `gb.register` adds to `TYPES`."""

UNKNOWN = "a class of your own is known after gb.register(its class)"


def encoding_from_json(data: dict[str, Any]) -> Encoding:
    """Read a description by `Encoding.to_json`; ValueError for an unknown type or fields that do not fit the type."""
    try:
        return ENCODINGS[data["type"]](**{k: _from_json(v) for k, v in data.items() if k != "type"})
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"not an encoding: {reprlib.repr(data)}; known types are {sorted(ENCODINGS)}; {UNKNOWN}"
        ) from error


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_from_json, value))
    return encoding_from_json(value) if isinstance(value, dict) else value
