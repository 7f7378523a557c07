"""`make_plan`: from a p-net, a hypernetwork and a size to a static plan.

The user's patterns choose which parameters are generated, by what, and under which codes (`_choose`); slots of equal
shape are sized together (`budget`); and every slot gets the scale of the p-net's initial weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from gbfunc.encoding import Encoding, PerAxis, binary, grid, per_axis
from gbfunc.hypernets import Hypernet, periodic
from gbfunc.layers import LayerKind, layer_kind
from gbfunc.plan.budget import Unit, allocate
from gbfunc.plan.byte_target import TargetTooSmall, bytes_in_words, plan_for_bytes
from gbfunc.plan.slots import BufferPlan, Slot, TensorPlan, dtype_name
from gbfunc.plan.spec import Plan
from gbfunc.pnet import ParameterInfo, buffers_of, check_pnet, parameter_infos
from gbfunc.tiling import MaxTile, check_max_tile
from gbfunc.types import MatrixDims

Rule = tuple[str, Hypernet | None]
Codes = tuple[Encoding | None, Encoding | None]
_KERNEL_BANDWIDTH = 2.0
_DIRECT_SHARE = 0.25
"""Direct vectors may take this part of a size target; beyond it the longest are generated."""


@dataclass
class Candidate:
    """One parameter and what is to become of it.

    Attributes:
        info: the parameter.
        kind: its layer kind.
        hypernet: what generates it, or None where it is direct.
        movable: whether a size target may turn it from direct into generated.
        note: why.
        scales: `_initial_scale` of its matrices, as far as known.
    """

    info: ParameterInfo
    kind: LayerKind
    hypernet: Hypernet | None
    movable: bool = False
    note: str = ""
    scales: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Its entries."""
        return self.info.tensor.numel()

    @property
    def name(self) -> str:
        """Its name."""
        return self.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.info.tensor.shape)

    @property
    def matrices(self) -> tuple[MatrixDims, ...]:
        """The matrices it folds from."""
        return self.kind.matrices(self.shape)


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
    choices = _choose(pnet, hypernet, include, exclude, rules)
    buffers = tuple(
        BufferPlan(name, tuple(b.shape), dtype_name(b.dtype), saved) for name, (b, saved) in buffers_of(pnet).items()
    )
    total = sum(c.numel for c in choices)
    target = _target(total, genome_params, genome_bytes, compression, hypernet)
    asked = None if compression is None else f"a compression of {compression:,.10g}x"
    codes = _check_encodings(encodings or {}, choices, promotes=target is not None)

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
        codes = _default_codes(choice.matrices[0], (None, None))
        unit = Unit(choice.matrices[0], hypernet, codes, max_tile, count=1)
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
    parts: list[tuple[Candidate, int, tuple[Any, ...]]] = []
    units: dict[tuple[Any, ...], Unit] = {}
    for choice in choices:
        if choice.hypernet is None:
            continue
        hypernet = choice.hypernet
        if target is None and hypernet.size is None:
            hypernet = choice.hypernet = hypernet.with_size(hypernet.default_size)
        tile = max_tile if hypernet.standardised else None
        for part, matrix in enumerate(choice.matrices):
            pair = _default_codes(matrix, codes.get(choice.name, (None, None)))
            if isinstance(pair[1], PerAxis) and not matrix.kernel:
                # A flattened image, say: tiles cut its channels, as they do a convolution's.
                matrix = matrix._replace(kernel=(pair[1].n_positions,))
            key = (matrix, hypernet, pair, _group(choice, part) if hypernet.shares else "")
            parts.append((choice, part, key))
            units.setdefault(key, Unit(matrix, hypernet, pair, tile)).count += 1
    extras = dict.fromkeys(units, 0)
    if target is not None:
        direct = sum(c.numel for c in choices if c.hypernet is None)
        left = target - direct
        more = allocate(list(units.values()), left, lambda least: _too_small(choices, target, direct, least, asked))
        extras = dict(zip(units, more, strict=True))
    slots: dict[str, list[Slot]] = {}
    for choice, part, key in parts:
        unit = units[key]
        size = unit.size + 1 if extras[key] > 0 else unit.size
        extras[key] -= 1
        scale, offset = _initial_scale(choice, choice.matrices[part], part)
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


def _patterns(what: str, patterns: Sequence[str], names: list[str]) -> list[re.Pattern[str]]:
    if isinstance(patterns, str):
        raise TypeError(f"{what} must be a list of regular expressions, got the string {patterns!r}")
    compiled = []
    for pattern in patterns:
        try:
            regex = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"{what} pattern {pattern!r} is not a regular expression: {error}") from error
        if not any(regex.search(name) for name in names):
            raise ValueError(f"{what} pattern {pattern!r} matches no parameter; the p-net has {names}")
        compiled.append(regex)
    return compiled


def _choose(
    pnet: nn.Module, hypernet: Hypernet, include: Sequence[str], exclude: Sequence[str], rules: Sequence[Rule]
) -> list[Candidate]:
    """Every parameter with its kind and hypernetwork: exclude beats rules, which beat include and the default."""
    parameters = parameter_infos(pnet)
    names = [n for p in parameters for n in (p.name, *p.aliases)]
    included, excluded = _patterns("include", include, names), _patterns("exclude", exclude, names)
    for rule in rules:
        pair = isinstance(rule, tuple | list) and len(rule) == 2
        if not pair or not (rule[1] is None or isinstance(rule[1], Hypernet)):
            raise TypeError(f"a rule must be (pattern, hypernetwork or None), got {rule!r}")
    ruled = list(zip(_patterns("rules", [r[0] for r in rules], names), [r[1] for r in rules], strict=True))
    choices = []
    for info in parameters:

        def hit(regex: re.Pattern[str], names: tuple[str, ...] = (info.name, *info.aliases)) -> bool:
            return any(regex.search(name) for name in names)

        tensor = info.tensor
        kind = layer_kind(info.module, info.attribute, tuple(tensor.shape))
        choice = Candidate(info, kind, None)
        rule = next((r for r in ruled if hit(r[0])), None)
        if any(map(hit, excluded)):
            choice.note = "excluded"
        elif rule is not None:
            choice.hypernet, choice.note = rule[1], "by rule"
        elif any(map(hit, included)):
            choice.hypernet, choice.note = hypernet, "included"
        elif kind.selected:
            choice.hypernet = hypernet
        else:
            choice.movable = kind.name == "vector"
        if not (tensor.numel() and tensor.dtype.is_floating_point):
            if choice.hypernet is not None and choice.note:
                what = f"{choice.name!r} ({tensor.dtype}, {tensor.numel()} entries)"
                raise ValueError(f"{what} cannot be generated: exclude it")
            choice.hypernet, choice.movable = None, False
        choices.append(choice)
    return choices


def _check_encodings(encodings: Mapping[str, Codes], choices: list[Candidate], promotes: bool) -> dict[str, Codes]:
    """The user's codes by parameter name; `promotes`: a size target may turn direct vectors into generated ones."""
    by_name = {n: c for c in choices for n in (c.name, *c.info.aliases)}
    checked: dict[str, Codes] = {}
    for name, pair in encodings.items():
        if name not in by_name:
            raise ValueError(f"encodings names {name!r}, which is no parameter; the p-net has {list(by_name)}")
        good = isinstance(pair, tuple | list) and len(pair) == 2
        if not good or not all(e is None or isinstance(e, Encoding) for e in pair):
            raise ValueError(f"encodings[{name!r}] must be a pair of encodings (rows, columns), got {pair!r}")
        choice = by_name[name]
        if choice.hypernet is None and not (promotes and choice.movable):
            raise ValueError(f"encodings names {name!r}, which is direct: add it to include or rules")
        for matrix in choice.matrices:
            for axis, encoding, n in (("rows", pair[0], matrix.rows), ("columns", pair[1], matrix.cols)):
                try:
                    if encoding is not None:
                        encoding.check(n)
                except ValueError as error:
                    raise ValueError(f"encodings[{name!r}], {axis}: {error}") from error
        checked[choice.name] = (pair[0], pair[1])
    return checked


def _default_codes(matrix: MatrixDims, given: Codes) -> tuple[Encoding, Encoding]:
    """Binary codes of rows and columns; a convolution's columns by channel and place in the kernel."""
    columns = binary()
    if (n := math.prod(matrix.kernel)) > 1:
        columns = per_axis(columns, grid(*matrix.kernel, bandwidth=_KERNEL_BANDWIDTH), n)
    return given[0] or binary(), given[1] or columns


def _initial_scale(choice: Candidate, matrix: MatrixDims, part: int) -> tuple[float, float]:
    """Standard deviation and offset of a slot: the p-net's own initial ones.

    A vector keeps its mean as the offset. Where the deviation is zero or undefined (one entry, a meta-device p-net) it
    is 1 / sqrt(fan_in), fan_in being the columns of a matrix and the length of a vector.
    """
    # Kept: a target in bytes is met by many plans, and all of them have the same.
    if part in choice.scales:
        return choice.scales[part]
    tensor = choice.info.tensor.detach()
    vector = choice.kind.name == "vector"
    fallback = 1 / math.sqrt(matrix.rows if vector else matrix.cols)
    if tensor.is_meta:
        norm = "Norm" in type(choice.info.module).__name__ and choice.info.attribute == "weight"
        return fallback, float(vector and norm)
    values = choice.kind.unfold(tensor)[part]
    least, most = (float(x) for x in values.aminmax())
    if not (math.isfinite(least) and math.isfinite(most)):
        raise ValueError(f"parameter {choice.name!r} of the p-net holds values that are not finite")
    values = values.double()
    std, mean = float(values.std(correction=0)), float(values.mean()) if vector else 0.0
    tiny = std <= 1e-8 * max(1.0, abs(least), abs(most))
    choice.scales[part] = (fallback if tiny else std), mean
    return choice.scales[part]
