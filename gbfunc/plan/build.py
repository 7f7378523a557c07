"""`make_plan`: makes a static plan from a p-net, a hypernetwork and a size."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from gbfunc.base import BaseTensors, hub_name
from gbfunc.encoding import Encoding, PerAxis, binary, grid, per_axis, table
from gbfunc.formats.sizes import genome_file_bytes
from gbfunc.formats.steps import Stored, bytes_each, stored_as
from gbfunc.hypernets import Hypernet, bilinear, low_rank, new_rows, periodic
from gbfunc.layers import KINDS
from gbfunc.plan.budget import Unit, allocate, spend
from gbfunc.plan.select import Candidate, Rule, check_hypernet, check_targets, choose
from gbfunc.plan.slots import BufferPlan, Slot, TensorPlan, check_stored, old_rows
from gbfunc.plan.spec import Plan
from gbfunc.pnet.describe import buffers_of, check_pnet
from gbfunc.tiling import MaxTile, check_max_tile
from gbfunc.types import MatrixDims, dtype_name

Codes = tuple[Encoding | None, Encoding | None]
OwnCodes = Encoding | torch.Tensor | np.ndarray[Any, Any] | None
"""What a user may give as codes of the rows, or of the columns, of a parameter."""
_DIRECT_SHARE = 0.25  # If direct parameters take a larger fraction of a size target, the longest ones are generated
# If embeddings take a larger fraction of a size target, they become factors that take about this fraction.
_EMBEDDING_SHARE = 0.25
_EMBEDDING_SAVING = 2 / 3  # Factors replace an embedding only if they have at most this fraction of its parameters
_HEAD_SHARE = 0.1  # Largest fraction of an adapter's size target for the g-nets of one weight in a new module
_DELTA_SCALE = 0.1  # Scale of a delta, as a fraction of the standard deviation of the base's weights
_LADDER = (1.0, 1.1, 1.25, 1.5, 2.0, 3.0)  # Sizes relative to the smallest genome, whose file may not be the smallest


def make_plan(
    pnet: nn.Module,
    hypernet: Hypernet | None = None,
    *,
    genome_params: int | None = None,
    genome_bytes: int | None = None,
    compression: float | None = None,
    stored: Stored | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rules: Sequence[Rule] = (),
    encodings: Mapping[str, tuple[OwnCodes, OwnCodes]] | None = None,
    max_tile: MaxTile = None,
    base: Literal["own"] | None = None,
    target_modules: str | Sequence[str] | None = None,
    modules_to_save: Sequence[str] = (),
) -> Plan:
    """Plan how a p-net's weights are generated from a genome, or how a genome changes a pretrained p-net.

    By default, the weights of linear, convolution and attention layers are generated. Biases, norms and embeddings are
    direct parameters: the genome contains their values. Give at most one target size of the genome (`genome_params`,
    `genome_bytes`, `compression`), or a size of its g-nets (`periodic(features=8)`). If direct parameters would exceed
    a quarter of a target, embeddings are generated, as products of two thin matrices (`low_rank`). If the others still
    exceed a quarter, so are the longest biases and norms. A size in `rules` is not changed. If no size is given, one
    g-net generates each matrix as a single tile, with 32 features (`periodic`), 32 hidden units (`gnet`), rank 4
    (`low_rank`) or 8 genes (`xox`). If only some parameters require grad, the others (frozen) are direct and keep their
    values, unless `include` or `rules` name them.

    With `base="own"`, the p-net's present weights are the base, and the genome is an adapter: `weights = base + delta`.
    The deltas are generated and start at exactly zero. Parameters of the base that have no delta, such as biases, are
    not trained and do not count for a size target. Norms of the base with running statistics stay in evaluation mode.

    Args:
        pnet: any `nn.Module`, which is not changed. Its initial weights set the scale of the generated weights.
        hypernet: the type of g-net, by default `periodic()`, or `bilinear(share="shapes")` for deltas of a base.
        genome_params: maximum number of parameters of the whole genome, direct parameters included.
        genome_bytes: maximum size of the genome's file in bytes, header and buffers included.
        compression: minimum ratio of the p-net's parameters to the genome's.
        stored: the dtype of the genome's file, `"float16"` by default. `genome_bytes` counts bytes in this dtype, and
            `save` and `report` use this dtype by default. For integer dtypes, `genome_bytes` limits the largest
            possible file; files of trained genomes are 5 to 15 % smaller. For `"auto"`, a number counts as 5 bits.
        include: regular expressions (`re.search`) for parameters to generate in addition to the defaults.
        exclude: regular expressions for parameters to keep direct. A match overrides all other arguments.
        rules: pairs `(regular expression, hypernetwork)` that choose the type of g-net for some parameters. With None
            instead of a hypernetwork, parameters are direct. The first match applies.
        encodings: the encodings of rows and columns, `{parameter: (rows, columns)}`. None means the default (`binary`).
            An array or tensor [n, k] gives k coordinates for each of n rows or columns (`table`).
        max_tile: largest tile: one length, or (rows, columns); for convolutions, columns are input channels. None:
            without a target size, a matrix is one tile. With a target size, a matrix is cut into smaller tiles until
            the number of features per tile is at most half the length of the tile's shorter side.
        base: None, or `"own"`: the base consists of the p-net's present tensors, except tensors of `modules_to_save`.
        target_modules: modules whose weights get a delta, as in PEFT: a list of names or their last parts
            (`["query", "value"]`), a regular expression that matches whole names, or `"all-linear"`; None selects every
            linear, convolution and attention layer. `include`, `exclude` and `rules` take precedence.
        modules_to_save: names, or last parts of names, of modules that are not part of the base, such as a new head.
            The parameters of these modules are direct and keep their values. If direct parameters exceed a quarter of a
            target, g-nets generate the longest of these parameters, which then lose their values.

    Returns:
        The plan. Its genomes have at most the target size and, if sizes of g-nets allow, at least 98 % of the target. A
        warning is issued if the genome is as large as the p-net, or if every g-net has the smallest possible size.

    Raises:
        ValueError: for an unsupported p-net, patterns that match nothing, contradictory sizes, or a target that cannot
            be reached; the message has the size of the smallest possible genome.
        TypeError: for arguments of a wrong type.
    """
    check_pnet(pnet)
    check_max_tile(max_tile)
    if hypernet is None:
        hypernet = periodic() if base is None else bilinear(share="shapes")
    check_hypernet("hypernet", hypernet)
    targets = check_targets(pnet, base, target_modules, modules_to_save)
    choices, left = choose(pnet, hypernet, include, exclude, rules, targets)
    buffers = tuple(
        BufferPlan(name, tuple(b.shape), dtype_name(b.dtype), saved)
        for name, (b, saved) in buffers_of(pnet).items()
        if targets is None or targets.saved(name)
    )
    for buffer in buffers:
        check_stored(buffer.name, buffer.dtype)
    frozen = None
    if targets is not None:
        new = {c.tensor.name for c in choices if not c.base} | {b.name for b in buffers}
        changed = ((c.tensor, c.hypernet) for c in choices if c.base)
        old = {t.name: old_rows(t, h.rows) for t, h in changed if isinstance(h, new_rows)}
        frozen = BaseTensors(pnet, new, old).describe(*hub_name(pnet))
    total = sum(c.tensor.numel for c in choices if not c.base) + (frozen.params if frozen else 0)
    sizes = {"genome_params": genome_params, "genome_bytes": genome_bytes, "compression": compression}
    target, words = _target(total, hypernet, sizes)
    asked = None if compression is None else f"a compression of {compression:,.10g}x"
    codes = _check_encodings(encodings or {}, choices, promotes=target is not None)

    if stored is not None and genome_bytes is None:
        raise ValueError(f"stored= needs a target in bytes, got stored={stored!r} only: give genome_bytes too")
    name = "" if genome_bytes is None else stored_as("float16" if stored is None else stored, "stored")

    def build(params: int | None, squeezed: int = 0) -> Plan:
        # If a target is too small, `squeezed=1` generates all vectors. `squeezed=2` also gives embeddings rank 1.
        share, fresh = 0.0 if squeezed else _DIRECT_SHARE, [replace(c) for c in choices]
        if params is not None:
            if targets is None:
                _factor_embeddings(fresh, 0 if squeezed == 2 else params)
                _promote(fresh, share * params, hypernet, max_tile)
            else:
                unshared = periodic() if hypernet.shares else hypernet
                _promote(fresh, share * params, unshared, max_tile, _HEAD_SHARE * params)
        try:
            return Plan(_tensors(fresh, params, codes, max_tile, asked), buffers, words, frozen, left, name)
        except TargetTooSmall:
            # With `squeezed=2`, the genome is the smallest possible one, so the target cannot be reached.
            if squeezed == 2:
                raise
        return build(params, squeezed + 1)

    plan = build(target) if genome_bytes is None else _plan_for_bytes(build, genome_bytes, total, name)
    sizes = {(slot.hypernet.size, slot.grid.n_tiles) for tensor in plan.generated for slot in tensor.slots}
    if sizes and plan.ratio_params <= 1.05:
        words = f"the genome has {plan.genome_params:,} parameters, the p-net only {total:,}"
        warnings.warn(f"{words}: choose a smaller genome, such as a compression of 10", stacklevel=2)
    elif words and base is None and {(1, 1)} <= sizes <= {(1, 1), (0, 1)}:
        warnings.warn("every g-net has its smallest size and may learn little: choose a 4x larger genome", stacklevel=2)
    return plan


def _target(total: int, hypernet: Hypernet, targets: Mapping[str, float | None]) -> tuple[int | None, str]:
    chosen = {k: v for k, v in targets.items() if v is not None}
    if not chosen:
        return None, ""
    if len(chosen) > 1:
        raise ValueError(f"give at most one of genome_params, genome_bytes and compression, got {chosen}")
    ((key, value),) = chosen.items()
    if hypernet.size is not None and hypernet.sizable:
        raise ValueError(f"{key}={value} and an explicit size ({hypernet}) exclude each other: drop one")
    kinds, least, what = (float | int, 1, "a number > 1") if key == "compression" else (int, 0, "an int >= 1")
    if isinstance(value, bool) or not isinstance(value, kinds) or not value > least:
        raise ValueError(f"{key} must be {what}, got {value!r}")
    if key == "compression":
        params = int(total / value)
        return params, f"{value:g}x fewer parameters, at most {params:,}"
    if key == "genome_params" and value >= total:
        raise ValueError(f"genome_params must be below the p-net's {total:,} parameters, got {value:,}")
    return int(value), f"at most {value:,} {'bytes' if key == 'genome_bytes' else 'parameters'}"


class TargetTooSmall(ValueError):
    """Raised if every genome exceeds the target. `least` is the smallest genome's number of parameters."""

    def __init__(self, words: str, least: int) -> None:
        super().__init__(words)
        self.least = least


def _plan_for_bytes(build: Callable[[int], Plan], limit: int, total: int, stored: str) -> Plan:
    each = bytes_each(stored)
    size_of = partial(genome_file_bytes, dtype=stored)

    def nearest(params: int) -> tuple[int, Plan]:
        try:
            return params, build(params)
        except TargetTooSmall as error:
            return error.least, build(error.least)

    best, low, high, guess, push = None, 0, total, min(int(limit / each), total), 1
    for _ in range(16):
        reached, plan = nearest(max(1, guess))
        over = size_of(plan) - limit
        if over <= 0:
            low, push = reached, 1
            best = plan if best is None or plan.genome_params > best.genome_params else best
        else:
            high, push = min(high, reached), 2 * push
        if -0.02 * limit <= over <= 0 or high - low <= 1 or reached > guess >= low:
            break
        guess = reached - push * math.ceil(over / each)
        if not low < guess < high:
            guess = (low + high) // 2
    if best is not None:
        return best
    # Try several sizes: generated short vectors save parameters, but lengthen the plan, which is also in the file.
    least, _ = nearest(1)
    smallest = min((build(max(1, round(rung * least))) for rung in _LADDER), key=size_of)
    if (size := size_of(smallest)) <= limit:
        return smallest
    # The error names the smallest target. The file contains the target as text: count the bytes of this text, too.
    while (named := size_of(replace(smallest, target=f"at most {size:,} bytes"))) > size:
        size = named
    raise ValueError(
        f"at most {limit:,} bytes cannot be reached: the smallest genome's file has {size:,} bytes "
        "(header and buffers included): allow more; the report of a larger genome shows what takes the bytes"
    )


def _factor_embeddings(choices: list[Candidate], target: int) -> None:
    kept = [c for c in choices if c.hypernet is None and c.movable and c.tensor.kind == "embedding"]
    direct = sum(c.tensor.numel for c in kept)
    most = target * max(_EMBEDDING_SHARE, direct / sum(c.tensor.numel for c in choices))
    if direct <= most:
        return
    rank = max(1, int(most / sum(sum(c.tensor.shape) for c in kept)))
    for choice in kept:
        if rank * sum(choice.tensor.shape) <= _EMBEDDING_SAVING * choice.tensor.numel:
            reason = "generated: as a direct embedding it would take too much of the target"
            tensor = replace(choice.tensor, note=reason)
            choice.hypernet, choice.tensor, choice.single_tile = low_rank(rank), tensor, True


def _promote(
    choices: list[Candidate], most: float, hypernet: Hypernet, max_tile: MaxTile, share: float | None = None
) -> None:
    movable = [c for c in choices if c.movable and c.tensor.kind != "embedding"]
    vectors = [c for c in choices if c.tensor.kind == "vector" and not c.movable]
    direct = sum(c.tensor.numel for c in movable + vectors if c.hypernet is None)
    for choice in sorted(movable, key=lambda c: -c.tensor.numel):
        units = [Unit(m, hypernet, _default_codes(m, (None, None)), max_tile, count=1) for m in choice.tensor.matrices]
        if direct <= most or sum(unit.cost_of((1, 1), 1) for unit in units) >= choice.tensor.numel:
            return
        choice.hypernet = hypernet
        if share is not None and choice.tensor.kind != "vector" and hypernet.size is None:
            size = min(unit.largest((1, 1), share / len(units)) for unit in units)
            choice.hypernet = hypernet.with_size(size)
        what = "vectors" if choice.tensor.kind == "vector" else "parameters"
        reason = f"generated: direct {what} would take over a quarter of the target"
        choice.tensor = replace(choice.tensor, note=reason)
        direct -= choice.tensor.numel


def _tensors(
    choices: list[Candidate], target: int | None, codes: Mapping[str, Codes], max_tile: MaxTile, asked: str | None
) -> tuple[TensorPlan, ...]:
    matrices: list[tuple[str, tuple[float, float], Unit]] = []
    units: dict[tuple[Any, ...], Unit] = {}
    for choice in choices:
        if choice.hypernet is None:
            continue
        name, hypernet = choice.tensor.name, choice.hypernet
        if target is None and hypernet.size is None:
            hypernet = hypernet.with_size(hypernet.default_size)
        tile = max_tile if hypernet.standardised and not choice.single_tile else None
        for number, matrix in enumerate(choice.tensor.matrices):
            scale = _initial_scale(choice, matrix, number)
            pair = _default_codes(matrix, codes.get(name, (None, None)))
            if isinstance(pair[1], PerAxis) and not matrix.kernel:
                # The columns are channels x positions, such as a flattened image: cut tiles only between channels.
                matrix = matrix._replace(kernel=(pair[1].n_positions,))
            # Many small tiles give a matrix a high rank. A delta needs no high rank, because the base has one.
            group, spreads = hypernet.group(name, number, matrix[:2]), hypernet.spreads and not choice.base
            key = matrix, hypernet, pair, tile, group, spreads
            unit = units.setdefault(key, Unit(*key))
            unit.count += 1
            if not hypernet.standardised:
                # Trained rows of `new_rows` start at given values. A scale that is a power of two causes no rounding.
                scale = (2.0 ** round(math.log2(scale[0])) if isinstance(hypernet, new_rows) else 1.0), 0.0
            matrices.append((name, scale, unit))
    if target is not None:
        kept = sum(c.tensor.numel for c in choices if c.hypernet is None)
        least = spend(list(units.values()), 0)
        if kept + least > target:
            raise _too_small(choices, target, kept, least, asked)
        allocate(list(units.values()), target - kept)
    slots: dict[str, list[Slot]] = {}
    for name, scale, unit in matrices:
        size = unit.size + 1 if unit.larger > 0 else unit.size
        unit.larger -= 1
        sized = unit.hypernet if unit.fixed else unit.hypernet.with_size(size)
        slots.setdefault(name, []).append(Slot(sized, unit.tiling(unit.cut)[0], *unit.codes, *scale, unit.group))
    return tuple(replace(c.tensor, slots=tuple(slots.get(c.tensor.name, ())), base=c.base) for c in choices)


def _too_small(choices: list[Candidate], target: int, direct: int, least: int, asked: str | None) -> TargetTooSmall:
    kept = sorted((c.tensor for c in choices if c.hypernet is None), key=lambda t: -t.numel)
    big = [t for t in kept if len(t.shape) > 1 and t.numel > 0.05 * target and not t.note]
    smallest, total = direct + least, sum(c.tensor.numel for c in choices)
    words = f"{asked or f'a genome of {target:,} parameters'} cannot be reached: the smallest possible genome here has "
    words += f"{smallest:,} parameters ({total / smallest:.1f}x): {direct:,} direct ones "
    words += f"and {least:,} of g-nets at their smallest size: allow {smallest:,} or more"
    if kept:
        words += "; the largest direct tensors are " + ", ".join(
            f"{t.name} ({t.numel:,}{t.note and ', ' + t.note})" for t in kept[:3]
        )
    if big:
        words += "; generate them too: include=[" + ", ".join(repr(re.escape(t.name)) for t in big[:3]) + "]"
    return TargetTooSmall(words, smallest)


def _check_encodings(
    encodings: Mapping[str, tuple[OwnCodes, OwnCodes]], choices: list[Candidate], promotes: bool
) -> dict[str, Codes]:
    by_name = {n: c for c in choices for n in (c.tensor.name, *c.tensor.aliases)}
    checked: dict[str, Codes] = {}
    for name, pair in encodings.items():
        if name not in by_name:
            raise ValueError(f"encodings names {name!r}, which is no parameter; the p-net has {list(by_name)}")
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ValueError(f"encodings[{name!r}] must be a pair of encodings (rows, columns), got {pair!r}")
        choice = by_name[name]
        may_be = promotes and choice.movable and choice.tensor.kind != "embedding"
        if choice.hypernet is None and not may_be:
            raise ValueError(f"encodings names {name!r}, which is direct: add it to include or rules")
        codes = list[Encoding | None]()
        for axis, own in zip(("rows", "columns"), pair, strict=True):
            try:
                code = table(own) if isinstance(own, torch.Tensor | np.ndarray) else own
                if not (code is None or isinstance(code, Encoding)):
                    raise ValueError(f"expected an encoding, an array or None, got {code!r}")
                for matrix in choice.tensor.matrices:
                    if code is not None:
                        code.check(matrix.rows if axis == "rows" else matrix.cols)
                codes.append(code)
            except ValueError as error:
                raise ValueError(f"encodings[{name!r}], {axis}: {error}") from error
        checked[choice.tensor.name] = codes[0], codes[1]
    return checked


def _default_codes(matrix: MatrixDims, own: Codes) -> tuple[Encoding, Encoding]:
    columns = binary()
    if (n := math.prod(matrix.kernel)) > 1:
        columns = per_axis(columns, grid(*matrix.kernel, bandwidth=2.0), n)
    return own[0] or binary(), own[1] or columns


def _initial_scale(choice: Candidate, matrix: MatrixDims, number: int) -> tuple[float, float]:
    """Return the scale and offset of matrix `number` of a tensor (0 to 2 for packed q, k, v), rounded to three digits.

    The scale is the standard deviation of the p-net's weights. A deviation that is zero or unknown is replaced by
    1 / sqrt(n), for a matrix with n columns or a vector of length n. For a delta, the scale is a tenth of this. The
    offset is the mean of the weights for vectors, and 0 for matrices and deltas.
    """
    # Cache results, because the search for a target in bytes builds many plans.
    if number in choice.scales:
        return choice.scales[number]
    weights = choice.info.tensor.detach()
    vector = choice.tensor.kind == "vector"
    fallback = 1 / math.sqrt(matrix.rows if vector else matrix.cols)
    if weights.is_meta:
        norm = "Norm" in type(choice.info.module).__name__ and choice.info.attribute == "weight"
        return fallback, float(vector and norm)
    values = KINDS[choice.tensor.kind].unfold(weights)[number].double()
    delta = choice.base and not isinstance(choice.hypernet, new_rows)
    # A norm's weights are nearly equal, so their deviation is too small a scale for a delta: take the root mean square.
    std = float(values.square().mean().sqrt() if delta and vector else values.std(correction=0))
    largest = float(torch.linalg.vector_norm(values, math.inf))
    if not math.isfinite(largest):
        raise ValueError(f"parameter {choice.tensor.name!r} of the p-net must be finite, got NaN or infinite values")
    tiny = std <= 1e-8 * max(1.0, largest)
    scale, offset = (fallback if tiny else std), float(values.mean()) if vector else 0.0
    scale, offset = (_DELTA_SCALE * scale, 0.0) if delta else (scale, offset)
    choice.scales[number] = float(f"{scale:.3g}"), float(f"{offset:.3g}")
    return choice.scales[number]
