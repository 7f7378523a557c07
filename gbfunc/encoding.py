"""Encodings: codes for the rows and columns of a weight matrix, which are the inputs of a g-net.

`binary`, `gray` and `one_hot` code the position *within a tile*, so all tiles of a shape have equal codes. `grid` codes
the position on an axis with a geometry (an image, a kernel), and `table` contains codes from the user: both depend on
the position on the entire axis. Integer arithmetic gives equal bits on all devices and in exported graphs.

Suffixes: n positions (rows or columns) of the axis, k numbers of a code.
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
_MAX_BANDWIDTH = 1e9  # Also the largest allowed number in a table


def bit_width(n: int) -> int:
    """Return the number of bits of a code for `n` positions: ceil(log2(n))."""
    return (n - 1).bit_length()


def _halves(i_k: Tensor, units: list[int]) -> Tensor:
    """For each unit, return +1 in the second half of every period of `2 * unit` positions, else -1: [..., units]."""
    units_k = i_k.new_tensor(units)
    return torch.where(i_k % (2 * units_k) >= units_k, 1.0, -1.0)


def _places(n: int) -> list[int]:
    return [1 << bit for bit in reversed(range(bit_width(n)))]


def _quotient(i: Tensor, m: int) -> Tensor:
    return ((i - i % m).double() / m).to(i.dtype)


def _joined(codes: list[Tensor], i: Tensor) -> Tensor:
    codes = [code for code in codes if code.shape[-1]] or [i.new_empty((*i.shape, 0)).double()]
    return codes[0] if len(codes) == 1 else torch.cat(codes, -1)


@dataclass(frozen=True)
class Encoding:
    """A static, hashable description of the codes for one axis of a matrix.

    A subclass is a frozen dataclass that defines `type`, `width` and `at`. Its fields are numbers, strings, encodings,
    or tuples of such values. The subclass overrides `check` if only some lengths can be coded, and sets `local = False`
    if a code depends on the position on the entire axis. After `gb.register`, genomes with the subclass can be saved.
    """

    type: ClassVar[str]
    local: ClassVar[bool] = True  # True if a code depends only on the position within a tile

    def width(self, n: int) -> int:
        """Return the number k of numbers in a code on an axis of length `n`."""
        raise NotImplementedError

    def at(self, i: Tensor, n: int) -> Tensor:
        """Compute unique codes of k numbers for integer positions 0 .. n-1, by torch operations: [...] -> [..., k]."""
        raise NotImplementedError

    def codes(self, n: int) -> Array:
        """Return the codes of positions 0 .. n-1 as an array [n, numbers per code]."""
        self.check(n)
        return self.at(torch.arange(n, device="cpu"), n).double().numpy()

    def check(self, n: int) -> None:
        """Raise ValueError if the encoding cannot code an axis of length `n`."""

    def tile_codes(self, n: int, tile: int, device: Device = "cpu") -> Tensor:
        """Return codes of tiles on an axis of length `n`: [number of tiles (1 if `local`), tile, numbers per code]."""
        self.check(tile if self.local else n)
        if self.local:
            return self.at(torch.arange(tile, device=device), tile)[None]
        n_tiles = -(-n // tile)
        i = torch.arange(n_tiles * tile, device=device)
        if n_tiles * tile > n:
            # Positions past the end of the axis get the last code. Weights at these positions are cropped.
            i = i.clip(max=n - 1)
        return self.at(i.reshape(n_tiles, tile), n)

    def tile_width(self, n: int, tile: int) -> int:
        return self.width(tile if self.local else n)

    def to_json(self) -> dict[str, Any]:
        """Return a description for JSON, which `encoding_from_json` reads."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"type": self.type} | {k: v.to_json() if isinstance(v, Encoding) else v for k, v in values.items()}


@dataclass(frozen=True)
class Binary(Encoding):
    """Binary code of the position within a tile: ceil(log2(n)) numbers, each +1 or -1."""

    type: ClassVar[str] = "binary"

    def width(self, n: int) -> int:
        return bit_width(n)

    def at(self, i: Tensor, n: int) -> Tensor:
        return _halves(i[..., None], _places(n))


@dataclass(frozen=True)
class Gray(Binary):
    """Gray code of the position within a tile: ceil(log2(n)) numbers, +1 or -1. Neighbours differ in one number."""

    type: ClassVar[str] = "gray"

    def at(self, i: Tensor, n: int) -> Tensor:
        # Bit b of the Gray code `i ^ (i >> 1)` is bit b + 1 of `i + 2^b`, which `_halves` returns.
        places = _places(n)
        return _halves(i[..., None] + i.new_tensor(places), [2 * p for p in places])


@dataclass(frozen=True)
class OneHot(Encoding):
    """One-hot code of the position within a tile: n numbers, 1 at the position and 0 elsewhere."""

    type: ClassVar[str] = "one_hot"

    def width(self, n: int) -> int:
        return n

    def at(self, i: Tensor, n: int) -> Tensor:
        return torch.where(i[..., None] == torch.arange(n, device=i.device), 1.0, 0.0)


@dataclass(frozen=True)
class Grid(Encoding):
    """Code of a position on a row-major grid: one code per axis of the grid. Grid axes of length 1 have no code."""

    dims: tuple[int, ...]
    code: Literal["coordinate", "gray", "binary"] = "coordinate"
    bandwidth: float = 6.0
    type: ClassVar[str] = "grid"
    local: ClassVar[bool] = False

    def __post_init__(self) -> None:
        dims, code, bandwidth = self.dims, self.code, self.bandwidth
        if not 1 <= len(dims) <= 16 or any(type(d) is not int or not 1 <= d <= _MAX_AXIS for d in dims):
            raise ValueError(f"grid expects ints, 1 to 16 axis lengths >= 1, got {len(dims)}: {reprlib.repr(dims)}")
        if code not in ("coordinate", "gray", "binary"):
            raise ValueError(f"code must be 'coordinate', 'gray' or 'binary', got {code!r}")
        if isinstance(bandwidth, bool) or not (isinstance(bandwidth, int | float) and 0 < bandwidth <= _MAX_BANDWIDTH):
            raise ValueError(f"bandwidth must be a positive number, at most {_MAX_BANDWIDTH:g}, got {bandwidth!r}")
        object.__setattr__(self, "bandwidth", float(bandwidth))

    def check(self, n: int) -> None:
        if math.prod(self.dims) != n:
            size = "x".join(map(str, self.dims))
            raise ValueError(f"grid({size}) codes {math.prod(self.dims)} positions, but the axis has {n}: use its dims")

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
                # Coordinates run from -bandwidth to bandwidth, exactly symmetric about 0.
                codes.append(((2 * j - (d - 1)).double() / (d - 1) * self.bandwidth)[..., None])
        return _joined(codes, i)


@dataclass(frozen=True)
class PerAxis(Encoding):
    """Code of a convolution's columns: `channels` codes the input channel, `positions` the position in the kernel.

    `positions`, such as `grid(3, 3)`, codes `n_positions` kernel positions (9 for 3 x 3). Tiles are cut between
    channels, so all tiles have equal codes of kernel positions. Raises ValueError if `positions` cannot code
    `n_positions`, or if encodings are nested too deep.
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
            raise ValueError(f"an axis must have a multiple of {self.n_positions} kernel positions, got {n}")
        self.channels.check(n // self.n_positions)
        self.positions.check(self.n_positions)

    def width(self, n: int) -> int:
        return self.channels.width(n // self.n_positions) + self.positions.width(self.n_positions)

    def at(self, i: Tensor, n: int) -> Tensor:
        m = self.n_positions
        return _joined([self.channels.at(_quotient(i, m), n // m), self.positions.at(i % m, m)], i)


@dataclass(frozen=True, repr=False)
class Table(Encoding):
    """Codes from `table`: `shape` is [positions, numbers per code], `data` the little-endian numbers in base64."""

    shape: tuple[int, int]
    dtype: str
    data: str
    type: ClassVar[str] = "table"
    local: ClassVar[bool] = False

    def __post_init__(self) -> None:
        sizes = len(self.shape) == 2 and all(type(n) is int and 1 <= n <= _MAX_AXIS for n in self.shape)
        if not sizes or self.dtype not in _TABLE_DTYPES:
            raise ValueError(f"a table is [n, k] of {', '.join(_TABLE_DTYPES)}, got {self.shape!r} of {self.dtype!r}")
        # Check before the cast to float64, which may take eight times the memory. In float16, the bound 1e9 is inf.
        numbers = self._numbers
        with np.errstate(over="ignore"):
            if not (np.isfinite(numbers).all() and (np.abs(numbers) <= _MAX_BANDWIDTH).all()):
                raise ValueError(f"codes must be at most {_MAX_BANDWIDTH:g} in size, got {np.abs(numbers).max()}")

    def __repr__(self) -> str:
        return f"table({self.shape[0]}x{self.shape[1]}, {self.dtype})"

    @property
    def _numbers(self) -> NDArray[Any]:
        data = base64.b64decode(self.data, validate=True)
        return np.frombuffer(data, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)

    @cached_property
    def rows(self) -> Array:
        return self._numbers.astype(np.float64)

    def check(self, n: int) -> None:
        if n != self.shape[0]:
            raise ValueError(f"a table for this axis must have {n} codes, got {self.shape[0]}")

    def width(self, n: int) -> int:
        return self.shape[1]

    def at(self, i: Tensor, n: int) -> Tensor:
        return torch.tensor(self.rows, device=i.device)[i]


_TABLE_DTYPES = ("int8", "float16", "float32", "float64")


def table(codes: Any) -> Encoding:
    """Code an axis by a table, for example by types of neurons, positions of neurons, or rows of a connectome.

    Positions with equal codes get equal weights. To distinguish positions, append the columns of
    `gb.binary().codes(n)`. A genome's file contains the table, in the narrowest of int8, float16, float32 and float64
    that represents all numbers exactly. To compute codes by a formula, subclass `Encoding`, and call `gb.register`.

    Args:
        codes: array or tensor of real numbers, [positions of the axis, numbers per code].

    Raises:
        ValueError: if `codes` is not a matrix, or if a number is not real, not finite, or above 1e9 in magnitude.

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
    """Code an axis with a geometry, such as a flattened image `grid(28, 28)` or a sequence `grid(1024)`.

    Args:
        dims: lengths of the grid's axes (at most 16), in row-major order. The product is the length of the coded axis.
        code: for each axis, `"coordinate"` is a number in [-bandwidth, bandwidth], `"gray"` and `"binary"` are bits.
        bandwidth: the largest coordinate. With a larger bandwidth, weights vary faster along the axis.

    Raises:
        ValueError: for no axis or more than 16 axes, an axis shorter than 1, an unknown code, or a bandwidth <= 0.
    """
    return Grid(dims, code, bandwidth)


TYPES: dict[str, type[Encoding]] = {t.type: t for t in (Binary, Gray, OneHot, Grid, PerAxis, Table)}
ENCODINGS: Mapping[str, type[Encoding]] = MappingProxyType(TYPES)
"""Read-only view of all types of encoding by name. `gb.register` adds types."""

UNKNOWN = "register other classes by gb.register; commands: pass --pnet module:function of the file that does"


def encoding_from_json(data: dict[str, Any]) -> Encoding:
    """Read a description from `Encoding.to_json`. Raise ValueError for an unknown type or wrong fields."""
    try:
        return ENCODINGS[data["type"]](**{k: _from_json(v) for k, v in data.items() if k != "type"})
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"expected an encoding of a type in {sorted(ENCODINGS)}, got {reprlib.repr(data)}: {UNKNOWN}"
        ) from error


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_from_json, value))
    return encoding_from_json(value) if isinstance(value, dict) else value
