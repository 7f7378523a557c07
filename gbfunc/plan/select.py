"""Which parameters are generated, by what, and under which codes: the user's patterns applied to the p-net."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from gbfunc.encoding import Encoding, binary, grid, per_axis
from gbfunc.hypernets import Hypernet
from gbfunc.layers import LayerKind, layer_kind
from gbfunc.pnet import ParameterInfo, parameter_infos
from gbfunc.types import MatrixDims

Rule = tuple[str, Hypernet | None]
Codes = tuple[Encoding | None, Encoding | None]
_KERNEL_BANDWIDTH = 2.0


@dataclass
class Candidate:
    """One parameter and what is to become of it.

    Attributes:
        info: the parameter.
        kind: its layer kind.
        hypernet: what generates it, or None where it is direct.
        movable: whether a size target may turn it from direct into generated.
        note: why.
    """

    info: ParameterInfo
    kind: LayerKind
    hypernet: Hypernet | None
    movable: bool = False
    note: str = ""
    _scales: dict[int, tuple[float, float]] = field(default_factory=dict)

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


def choose(
    pnet: nn.Module,
    hypernet: Hypernet,
    include: Sequence[str],
    exclude: Sequence[str],
    rules: Sequence[Rule],
) -> list[Candidate]:
    """Every parameter with its kind and hypernetwork: exclude beats rules, which beat include and the default.

    Raises:
        ValueError: for a pattern that matches nothing or no regular expression.
        TypeError: for rules that are no pairs of a pattern and a hypernetwork or None.
    """
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
        own = (info.name, *info.aliases)

        def hit(regex: re.Pattern[str], own: tuple[str, ...] = own) -> bool:
            return any(regex.search(n) for n in own)

        tensor = info.tensor
        kind = layer_kind(info.module, info.attribute, tuple(tensor.shape))
        choice = Candidate(info, kind, None)
        rule = next((r for r in ruled if hit(r[0])), None)
        if any(hit(r) for r in excluded):
            choice.note = "excluded"
        elif rule is not None:
            choice.hypernet, choice.note = rule[1], "by rule"
        elif any(hit(r) for r in included):
            choice.hypernet, choice.note = hypernet, "included"
        elif kind.selected:
            choice.hypernet = hypernet
        else:
            choice.movable = kind.name == "vector"
        _check_dtype(choice)
        choices.append(choice)
    return choices


def _check_dtype(choice: Candidate) -> None:
    tensor = choice.info.tensor
    if tensor.numel() and tensor.dtype.is_floating_point:
        return
    if choice.hypernet is not None and choice.note:
        raise ValueError(f"{choice.name!r} ({tensor.dtype}, {tensor.numel()} entries) cannot be generated: exclude it")
    choice.hypernet, choice.movable = None, False


def check_encodings(encodings: Mapping[str, Codes], choices: list[Candidate], promotes: bool) -> dict[str, Codes]:
    """The user's codes by parameter name.

    Args:
        encodings: what the user gave.
        choices: every parameter.
        promotes: whether a size target may turn direct vectors into generated ones.

    Raises:
        ValueError: for an unknown or direct parameter, or anything but a pair of encodings.
    """
    by_name = {n: c for c in choices for n in (c.name, *c.info.aliases)}
    found: dict[str, Codes] = {}
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
        found[choice.name] = (pair[0], pair[1])
    return found


def default_codes(matrix: MatrixDims, given: Codes) -> tuple[Encoding, Encoding]:
    """Binary codes of rows and columns; a convolution's columns by channel and place in the kernel."""
    columns = binary()
    if (n := math.prod(matrix.kernel)) > 1:
        columns = per_axis(columns, grid(*matrix.kernel, bandwidth=_KERNEL_BANDWIDTH), n)
    return given[0] or binary(), given[1] or columns


def initial_scale(choice: Candidate, matrix: MatrixDims, part: int) -> tuple[float, float]:
    """Standard deviation and offset of a slot: the p-net's own initial ones.

    A vector keeps its mean as the offset. Where the deviation is zero or undefined (one entry, a meta-device p-net) it
    is 1 / sqrt(fan_in), fan_in being the columns of a matrix and the length of a vector.
    """
    # Kept: a target in bytes is met by many plans, and all of them have the same.
    if part not in choice._scales:
        choice._scales[part] = _initial_scale(choice, matrix, part)
    return choice._scales[part]


def _initial_scale(choice: Candidate, matrix: MatrixDims, part: int) -> tuple[float, float]:
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
    return (fallback if tiny else std), mean


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `"float32"`."""
    return str(dtype).removeprefix("torch.")
