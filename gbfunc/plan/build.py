"""`make_plan`: from a p-net, a hypernetwork and a size to a static plan."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from gbfunc.encoding import PerAxis
from gbfunc.hypernets import Hypernet, periodic
from gbfunc.plan.budget import Unit, allocate
from gbfunc.plan.byte_target import TargetTooSmall, bytes_in_words, plan_for_bytes
from gbfunc.plan.select import Candidate, Codes, Rule, check_encodings, choose, default_codes, dtype_name, initial_scale
from gbfunc.plan.slots import BufferPlan, Slot, TensorPlan
from gbfunc.plan.spec import Plan
from gbfunc.pnet import buffers_of, check_pnet
from gbfunc.tiling import MaxTile, check_max_tile

_DIRECT_SHARE = 0.25
"""Direct vectors may take this part of a size target; beyond it the longest are generated."""


class _Part(NamedTuple):
    choice: Candidate
    part: int
    unit_key: tuple[Any, ...]


def make_plan(
    pnet: nn.Module,
    hypernet: Hypernet | None = None,
    *,
    genome_params: int | None = None,
    genome_bytes: int | None = None,
    compression: float | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rules: Sequence[Rule] = (),
    encodings: Mapping[str, Codes] | None = None,
    max_tile: MaxTile = None,
) -> Plan:
    """Plan how a p-net's weights grow from a genome.

    By default the weights of linear, convolution and attention layers are generated, and biases, norms and embeddings
    are direct parameters. At most one size target may be given, and none with an explicit size; with neither, every
    matrix has one tile and its type's default size (32 features, 32 hidden units, rank 4, 8 genes).

    Args:
        pnet: any `nn.Module`; it is only looked at. Its initial weights set the scale of the generated ones.
        hypernet: the type of g-net, `periodic()` by default.
        genome_params: most parameters of the whole genome, direct ones included.
        genome_bytes: most bytes of the genome's file, header and buffers included.
        compression: least ratio of the p-net's parameters to the genome's.
        include: regular expressions (`re.search`) for parameters to generate beside the default ones.
        exclude: regular expressions for parameters to keep direct, whatever else names them.
        rules: `(pattern, hypernetwork or None)`: other types for some parameters, None for direct; the first wins.
        encodings: `{parameter: (rows, columns)}`: codes of the axes of its matrix, None for the default (`binary`).
        max_tile: largest tile: None for the fewest tiles with `2 * size <= min(r, c)`, a length, or (rows, columns);
            columns coded per axis, as a convolution's are, count channels.

    Returns:
        The plan. A size target is met from below, within 2 % where the sizes' steps allow.

    Raises:
        ValueError: for a p-net that cannot be used, patterns that match nothing, contradictory sizes, or a target that
            cannot be reached (it names the smallest genome and what stands in the way).
        TypeError: for arguments of a wrong type.
    """
    check_pnet(pnet)
    check_max_tile(max_tile)
    hypernet = periodic() if hypernet is None else hypernet
    if not isinstance(hypernet, Hypernet):
        raise TypeError(f"hypernet must come from a factory such as gb.periodic(), got {hypernet!r}")
    choices = choose(pnet, hypernet, include, exclude, rules)
    buffers = tuple(
        BufferPlan(name, tuple(b.shape), dtype_name(b.dtype), saved) for name, (b, saved) in buffers_of(pnet).items()
    )
    total = sum(c.numel for c in choices)
    target = _target(total, genome_params, genome_bytes, compression, hypernet)
    asked = None if compression is None else f"a compression of {compression:,.10g}x"
    codes = check_encodings(encodings or {}, choices, promotes=target is not None)

    def build(params: int | None, words: str) -> Plan:
        def attempt(direct_share: float) -> Plan:
            fresh = [replace(c) for c in choices]
            if params is not None:
                _promote_vectors(fresh, params, hypernet, max_tile, direct_share)
            return _build(fresh, params, codes, max_tile, buffers, words, asked)

        try:
            return attempt(_DIRECT_SHARE)
        except TargetTooSmall:
            # With every vector generated that is smaller so: what fails now is below the smallest genome.
            return attempt(0.0)

    if target is None:
        return build(None, "")
    return build(*target) if genome_bytes is None else plan_for_bytes(build, genome_bytes, total)


def _target(
    total: int, params: int | None, size: int | None, compression: float | None, hypernet: Hypernet
) -> tuple[int, str] | None:
    given = {"genome_params": params, "genome_bytes": size, "compression": compression}
    named = {k: v for k, v in given.items() if v is not None}
    if not named:
        return None
    if len(named) > 1:
        raise ValueError(f"give at most one of genome_params, genome_bytes and compression, got {named}")
    (key, value), *_ = named.items()
    if hypernet.size is not None and hypernet.sizable:
        raise ValueError(f"{key}={value} and an explicit size ({hypernet}) exclude each other: drop one")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (key != "compression" and not isinstance(value, int)) or not value > (key == "compression"):
        kind = "a number > 1" if key == "compression" else "an int >= 1"
        raise ValueError(f"{key} must be {kind}, got {value!r}")
    if key == "compression":
        return int(total / value), f"{value:g}x fewer parameters, at most {int(total / value):,}"
    if key == "genome_params":
        if value >= total:
            raise ValueError(f"genome_params={value:,} is no compression: the p-net has {total:,} parameters")
        return int(value), f"at most {value:,} parameters"
    return int(value), bytes_in_words(int(value))


def _promote_vectors(
    choices: list[Candidate], target: int, hypernet: Hypernet, max_tile: MaxTile, direct_share: float
) -> None:
    """Generate the longest vectors where direct ones would take more than a share of the target."""
    movable = sorted((c for c in choices if c.movable), key=lambda c: -c.numel)
    direct = sum(c.numel for c in choices if c.hypernet is None and c.kind.name == "vector")
    for choice in movable:
        n = choice.numel
        codes = default_codes(choice.matrices[0], (None, None))
        unit = Unit(choice.matrices[0], hypernet, codes, max_tile, 1)
        if direct <= direct_share * target or unit.cost_of((1, 1), 1) >= n:
            return
        choice.hypernet = hypernet
        choice.note = "generated: direct vectors would take over a quarter of the target"
        direct -= n


def _build(
    choices: list[Candidate],
    target: int | None,
    codes: Mapping[str, Codes],
    max_tile: MaxTile,
    buffers: tuple[BufferPlan, ...],
    words: str,
    asked: str | None,
) -> Plan:
    parts: list[_Part] = []
    units: dict[tuple[Any, ...], Unit] = {}
    for choice in choices:
        if choice.hypernet is None:
            continue
        own = choice.hypernet
        if target is None and own.size is None:
            own = choice.hypernet = own.with_size(own.default_size)
        tile = max_tile if own.standardised else None
        for part, matrix in enumerate(choice.matrices):
            pair = default_codes(matrix, codes.get(choice.name, (None, None)))
            if isinstance(pair[1], PerAxis) and not matrix.kernel:
                # A flattened image, say: tiles cut its channels, as they do a convolution's.
                matrix = matrix._replace(kernel=(pair[1].n_positions,))
            key = (matrix, own, pair, _group(choice, part) if own.shares else "")
            parts.append(_Part(choice, part, key))
            if key in units:
                units[key].count += 1
            else:
                units[key] = Unit(matrix, own, pair, tile, 1)
    extras = {key: 0 for key in units}
    if target is not None:
        direct = sum(c.numel for c in choices if c.hypernet is None)
        left = target - direct
        found = allocate(list(units.values()), left, lambda least: _too_small(choices, target, direct, least, asked))
        extras = {key: extra for key, (_, extra) in zip(units, found, strict=True)}
    slots: dict[str, list[Slot]] = {}
    for choice, part, key in parts:
        unit = units[key]
        size = unit.size + 1 if extras[key] > 0 else unit.size
        extras[key] -= 1
        scale, offset = initial_scale(choice, choice.matrices[part], part)
        sized = unit.sized(size)
        if not sized.standardised:
            scale, offset = 1.0, 0.0
        group = _group(choice, part) if sized.shares else ""
        slots.setdefault(choice.name, []).append(Slot(sized, unit.grid(), *unit.codes, scale, offset, group))
    return Plan(
        tuple(
            TensorPlan(
                *(c.name, c.shape, dtype_name(c.info.tensor.dtype), c.kind.name),
                slots=tuple(slots.get(c.name, ())),
                aliases=c.info.aliases,
                note=c.note,
            )
            for c in choices
        ),
        buffers,
        words,
    )


def _group(choice: Candidate, part: int) -> str:
    """What slots have in common that share code weights: kind, name without numbers, part and shape."""
    matrix = choice.matrices[part]
    return f"{re.sub(r'[0-9]+', '*', choice.name)}:{part}:{matrix.rows}x{matrix.cols}"


def _too_small(choices: list[Candidate], target: int, direct: int, least: int, asked: str | None) -> TargetTooSmall:
    kept = sorted((c for c in choices if c.hypernet is None), key=lambda c: -c.numel)
    total = sum(c.numel for c in choices)
    smallest = direct + least
    big = [c for c in kept if len(c.shape) > 1 and c.numel > 0.05 * target]
    words = f"{asked or f'a genome of {target:,} parameters'} cannot be reached: the smallest possible genome here has "
    words += f"{smallest:,} parameters ({total / smallest:.1f}x): {direct:,} direct ones "
    words += f"and {least:,} of g-nets at their smallest size"
    if kept:
        words += "; the largest direct tensors are " + ", ".join(f"{c.name} ({c.numel:,})" for c in kept[:3])
    if big:
        words += "; generate them too: include=[" + ", ".join(repr(re.escape(c.name)) for c in big[:3]) + "]"
    error = TargetTooSmall(words)
    error.least = smallest
    return error
