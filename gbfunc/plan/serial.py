"""Converts plans to JSON and back. Reading checks every field, because a file may come from an untrusted source."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from gbfunc import encoding, hypernets
from gbfunc.base import Base
from gbfunc.encoding import Encoding, encoding_from_json
from gbfunc.formats.layout import LIMITS, check_limits, check_most, read_document
from gbfunc.hypernets import Hypernet, from_module, hypernet_from_json
from gbfunc.layers import KINDS
from gbfunc.plan.slots import BufferPlan, Slot, TensorPlan, check_stored
from gbfunc.tiling import TileGrid
from gbfunc.types import JSON

VERSION = 2
_USUAL_KINDS = {1: "vector", 2: "linear", 4: "conv"}  # Kinds of layers that the JSON omits, by dimensions of the tensor
V = TypeVar("V")
C = TypeVar("C", bound=type[Hypernet] | type[Encoding])


def register(cls: C) -> C:
    """Register a custom type of g-net or encoding for `gb.save` and `gb.load`, and return the class.

    Call `register` in every program that saves or loads genomes with the type, or use `register` as a class decorator
    above `@dataclass(frozen=True)`. Files contain the class's `type` and fields; loading runs no code from the file.

    Args:
        cls: a subclass of `gbfunc.hypernets.Hypernet` or `gbfunc.encoding.Encoding` that defines `type`. A class of the
            same name, for example from a notebook cell that runs again, replaces the former class.

    Raises:
        TypeError: if `cls` is not a subclass of either class.
        ValueError: if another class has the same `type`.
    """
    bases = {Hypernet: hypernets.TYPES, Encoding: encoding.TYPES}
    table = next((bases[base] for base in bases if isinstance(cls, type) and issubclass(cls, base)), None)
    if table is None or not isinstance(cls.__dict__.get("type"), str):
        cure = "subclass one, and define type = 'a name'"
        raise TypeError(f"expected a subclass of Hypernet or Encoding, got {cls!r}: {cure}")
    other = table.setdefault(cls.type, cls)
    if (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"the type {cls.type!r} belongs to {other.__module__}.{other.__qualname__}: choose another")
    table[cls.type] = cls
    return cls


def check_readable(tensors: Sequence[TensorPlan]) -> None:
    """Raise `ValueError` if a g-net or an encoding cannot be written as JSON and read again unchanged."""
    slots = [slot for tensor in tensors for slot in tensor.slots]
    factories = {h.to_json()["factory"]: h.factory for s in slots if isinstance(h := s.hypernet, from_module)}
    for part in {part for s in slots for part in (s.hypernet, s.row_code, s.col_code)}:
        try:
            data = json.loads(json.dumps(part.to_json()))
            again = encoding_from_json(data) if isinstance(part, Encoding) else hypernet_from_json(data, factories)
        except (TypeError, ValueError) as error:
            raise ValueError(f"gb.load could not read {part!r}: {error}") from error
        if again != part:
            raise ValueError(f"gb.load would read {part!r} as {again!r}: define a different `type` in its class")


def plan_to_json(
    tensors: Sequence[TensorPlan], buffers: Sequence[BufferPlan], target: str, base: Base | None = None
) -> str:
    hypernets: dict[Hypernet, int] = {}
    encodings: dict[Encoding, int] = {}
    entries = []
    for tensor in tensors:
        dtype = "" if tensor.dtype == "float32" else tensor.dtype
        slots = []
        for slot in tensor.slots:
            h, grid = hypernets.setdefault(slot.hypernet, len(hypernets)), slot.grid
            codes = (encodings.setdefault(code, len(encodings)) for code in (slot.row_code, slot.col_code))
            values = [h, *codes, slot.scale, slot.offset, slot.group, grid.tile_rows, grid.tile_cols]
            usual = [0.0, "", grid.rows, grid.cols]
            while usual and values[-1] == usual.pop():
                values.pop()
            slots.append(values)
        optional = {
            "kind": tensor.kind if tensor.kind != _USUAL_KINDS.get(len(tensor.shape)) else "",
            "dtype": dtype,
            "aliases": list(tensor.aliases),
            "note": tensor.note,
            "slots": slots,
            "base": tensor.base,
        }
        entry: JSON = {"name": tensor.name, "shape": list(tensor.shape)}
        entries.append(entry | {k: v for k, v in optional.items() if v})
    data: JSON = {"version": VERSION, "hypernets": [h.to_json() for h in hypernets]}
    data |= {"encodings": [e.to_json() for e in encodings], "tensors": entries}
    optional = {"buffers": [list(b) for b in buffers], "target": target, "base": list(base or ())}
    return json.dumps(data | {k: v for k, v in optional.items() if v}, separators=(",", ":"))


def plan_from_json(
    text: str, factories: Sequence[Callable[..., Any]] = ()
) -> tuple[tuple[TensorPlan, ...], tuple[BufferPlan, ...], str, Base | None]:
    """Return tensors, buffers, target and base from the text of `plan_to_json`. Arguments: see `Plan.from_json`."""
    by_path = {f"{f.__module__}:{f.__qualname__}": f for f in factories}
    try:
        data = read_document(text)
        if data["version"] != VERSION:
            raise ValueError(f"expected a plan of version {VERSION}, got version {data['version']!r}: update gbfunc")
        check_limits(data)
        hypernets = [hypernet_from_json(h, by_path) for h in _typed(data["hypernets"], list)]
        encodings = [encoding_from_json(e) for e in _typed(data["encodings"], list)]
        tensors = tuple(_tensor(entry, hypernets, encodings) for entry in _typed(data["tensors"], list))
        buffers = tuple(_buffer(*_typed(entry, list)) for entry in _typed(data.get("buffers", []), list))
        target = _typed(data.get("target", ""), str)
        base = _base(*_typed(data["base"], list)) if "base" in data else None
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"expected the JSON of a plan, got wrong fields ({type(error).__name__}: {error})") from error
    check_most("the plan", sum(s.grid.n_tiles for t in tensors for s in t.slots), "tiles", "mostTiles")
    return tensors, buffers, target, base


def _typed(value: Any, kind: type[V]) -> V:
    if type(value) is not kind:
        raise TypeError(f"expected {kind.__name__}, got {value!r}")
    return value


def _shape(value: Any) -> tuple[int, ...]:
    if any(type(n) is not int or not 0 <= n <= LIMITS["mostSide"] for n in _typed(value, list)):
        raise TypeError(f"expected a shape, got {value!r}")
    return tuple(value)


def _buffer(name: Any, shape: Any, dtype: Any, persistent: Any) -> BufferPlan:
    check_stored(name, dtype)
    return BufferPlan(_typed(name, str), _shape(shape), dtype, _typed(persistent, bool))


def _base(digest: Any, params: Any, size: Any, name: Any, revision: Any) -> Base:
    if not all(type(n) is int and 0 <= n < 1 << 63 for n in (params, size)):
        raise TypeError(f"expected the parameters and bytes of a base, got {params!r} and {size!r}")
    return Base(_typed(digest, str), params, size, _typed(name, str), _typed(revision, str))


def _tensor(entry: JSON, hypernets: list[Hypernet], encodings: list[Encoding]) -> TensorPlan:
    aliases = tuple(_typed(x, str) for x in _typed(entry.get("aliases", []), list))
    name, shape, dtype = _typed(entry["name"], str), _shape(entry["shape"]), entry.get("dtype", "float32")
    kind, base = entry.get("kind", _USUAL_KINDS.get(len(shape))), _typed(entry.get("base", False), bool)
    if kind not in KINDS:
        raise ValueError(f"{name}: unknown kind {kind!r}, known are {', '.join(KINDS)}")
    matrices = KINDS[kind].matrices(shape) if "slots" in entry else ()
    slots = []
    for values, matrix in zip(_typed(entry.get("slots", []), list), matrices, strict=True):
        usual: list[Any] = [0.0, "", matrix.rows, matrix.cols]
        values = _typed(values, list) + usual[len(values) - 4 :]
        h, row_code, col_code, scale, offset, group, tile_rows, tile_cols = values
        if any(type(i) is not int or i < 0 for i in values[:3]) or not {type(scale), type(offset)} <= {int, float}:
            raise TypeError(f"expected a slot [g-net, code, code, scale, offset, ...] of numbers, got {values!r}")
        grid = TileGrid(matrix.rows, matrix.cols, tile_rows, tile_cols)
        codes = encodings[row_code], encodings[col_code]
        slots.append(Slot(hypernets[h], grid, *codes, float(scale), float(offset), _typed(group, str)))
    return TensorPlan(name, shape, dtype, kind, tuple(slots), aliases, _typed(entry.get("note", ""), str), base)
