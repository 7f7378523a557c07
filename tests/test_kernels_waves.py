"""Sides of periodic g-nets: a loop over their entries as the oracle, derivatives of every order, transforms."""

import dataclasses
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

import gbfunc as gb
from gbfunc.hypernets.ensemble import Constants, Evaluation, dense_tiles, periodic_factors, with_factors
from gbfunc.hypernets.kernels.waves import Side, period_of, waves
from gbfunc.types import Kernel, Params, TileDims
from tests.support.kernel_cases import FAST, INTERPRETED, NEEDS_COMPILER, assert_alike, assert_trees_close
from tests.support.trees_equal import same_bits

LEAVES = ("weight", "phase", "sine", "cosine")
# Triton's sides compensate the rounding of large angles, those of C++ do not.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6 if INTERPRETED else 1e-5}


def leaves_of(side: Side) -> list[Tensor]:
    return [x for x in (side.weight, side.phase, side.sine, side.cosine) if x is not None]


@dataclasses.dataclass(frozen=True)
class Case:
    tiles: int = 3
    rows: int = 5
    width: int = 2
    features: int = 3
    groups: int | None = None
    own_codes: bool = False
    there: tuple[str, ...] = ("phase", "sine", "cosine", "scale")
    cosine_first: bool = False

    def side(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> Side:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        codes = draw(self.tiles if self.own_codes else 1, self.rows, self.width)
        groups = None
        if self.groups is not None:
            groups = torch.randint(0, self.groups, (self.tiles,), generator=generator)
        weight = draw(self.tiles if groups is None else self.groups or 0, self.width, self.features)
        shape = (self.tiles, self.features)
        drawn = {"phase": draw(*shape), "sine": draw(*shape), "cosine": draw(*shape), "scale": draw(self.tiles)}
        given: dict[str, Any] = {
            k: x if k == "scale" else x.requires_grad_() for k, x in drawn.items() if k in self.there
        }
        return Side(codes, weight.requires_grad_(), groups=groups, cosine_first=self.cosine_first, **given)


FORMS = [
    Case(there=("phase", "sine", "scale")),
    Case(there=("sine", "cosine", "scale"), groups=2),
    Case(there=(), cosine_first=True, own_codes=True),
    Case(groups=2, own_codes=True),
]
CASES = st.builds(
    Case,
    *(st.integers(0, 4), st.integers(1, 9), st.integers(0, 3), st.integers(1, 20), st.sampled_from([None, 1, 3])),
    st.booleans(),
    st.sampled_from([(), ("phase",), ("sine",), ("sine", "scale"), ("sine", "cosine"), *(x.there for x in FORMS)]),
    st.booleans(),
)


def loop(side: Side) -> Tensor:
    tiles = len(side.weight if side.groups is None else side.groups)
    rows, features = side.codes.shape[1], side.weight.shape[2]
    out = torch.zeros(tiles, rows, 2 * features, dtype=torch.float64)
    numbers: dict[str, Any] = {k: None if x is None else x.detach().tolist() for k, x in _floats(side).items()}
    phases, sines, cosines, scales = (numbers[k] for k in ("phase", "sine", "cosine", "scale"))
    for t in range(tiles):
        codes = numbers["codes"][t % len(side.codes)]
        weight = numbers["weight"][t if side.groups is None else int(side.groups[t])]
        scale = 1 if scales is None else scales[t]
        for i in range(rows):
            for h in range(features):
                angle = sum(codes[i][k] * weight[k][h] for k in range(len(weight)))
                angle += 0 if phases is None else phases[t][h]
                s = 1 if sines is None else sines[t][h] * scale
                c = 0 if cosines is None else cosines[t][h] * scale
                halves = s * math.sin(angle) + c * math.cos(angle), s * math.cos(angle) - c * math.sin(angle)
                out[t, i, h], out[t, i, features + h] = halves[::-1] if side.cosine_first else halves
    return out


def with_gradients(side: Side, kernel: Kernel | None, seed: int = 0) -> list[Tensor]:
    """Values and gradients; those of a sine for each row without a kernel."""
    (out,) = [side._replace(period=0).in_parts()] if kernel is None else waves([side], kernel=kernel)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.dtype)
    # Weights of codes without columns may be no part of the graph.
    anchored = out + 0 * sum(x.sum() for x in leaves_of(side))
    return [out.detach(), *torch.autograd.grad(anchored, leaves_of(side), g)]


@pytest.mark.parametrize("kernel", FAST)
@given(CASES, st.integers(0, 99))
def test_sides_and_gradients_equal_the_loop_and_the_parts(kernel: Kernel, case: Case, seed: int) -> None:
    side = case.side(seed=seed)
    found = with_gradients(side, kernel)
    torch.testing.assert_close(found[0], loop(side), rtol=1e-12, atol=1e-12)
    assert_alike(found, with_gradients(side, None), 1e-12)
    single = case.side(torch.float32, seed)
    assert_exact(with_gradients(single, kernel), single, least=1.0)


def assert_exact(found: list[Tensor], side: Side, least: float = 1e-24) -> None:
    """Compare with float64, relative to the largest entry of each output and gradient, or to `least`."""
    wide = side._replace(**{k: None if x is None else x.detach().double() for k, x in _floats(side).items()})
    for leaf in leaves_of(wide):
        leaf.requires_grad_()
    for x, y in zip(found, with_gradients(wide, None), strict=True):
        largest = max(float(y.abs().max()) if y.numel() else 0.0, least)
        torch.testing.assert_close(x.double(), y, rtol=0, atol=TOLERANCES[side.codes.dtype] * largest)


def _floats(side: Side) -> dict[str, Tensor | None]:
    return {k: getattr(side, k) for k in ("codes", "scale", *LEAVES)}


ENCODINGS = [gb.binary(), gb.gray(), gb.one_hot(), gb.grid(5, 8), gb.grid(3, 4, 5), gb.grid(6, 7, code="binary")]


@pytest.mark.parametrize("encoding", ENCODINGS, ids=repr)
@given(st.data())
def test_the_period_of_codes_splits_them_into_blocks_and_places(encoding: Any, data: st.DataObject) -> None:
    n = math.prod(getattr(encoding, "dims", ())) or data.draw(st.integers(1, 300))
    codes = torch.from_numpy(encoding.codes(n).copy()).double()[None]
    m, i = period_of(codes), torch.arange(n)
    assert 1 <= m <= n
    torch.testing.assert_close(codes[:, i // m * m] + codes[:, i % m] - codes[:, :1], codes)
    drawn = data.draw(st.sampled_from(FORMS))
    case = dataclasses.replace(drawn, rows=n, width=codes.shape[2], own_codes=False)
    side = case.side()._replace(codes=codes)
    expected = with_gradients(side, None)
    for kernel in ("auto", "eager"):
        assert_alike(with_gradients(side._replace(period=m), kernel), expected, 1e-12)


MANY_BLOCKS = Case(2, 300, 3, 20, groups=1), Case(40, 3, 1, 2, groups=3, own_codes=True), Case(1, 70, 18, 33)
LARGE = [
    *(Case(40, 150, 6, 33, groups) for groups in (None, 1, 7, 40)),
    *(Case(1, 700, 11, 70), Case(300, 70, 3, 2, own_codes=True)),
]


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("threads", [1] if INTERPRETED else [1, 3])
@pytest.mark.parametrize("case", MANY_BLOCKS if INTERPRETED else LARGE, ids=str)
def test_large_sides_by_any_number_of_threads(case: Case, threads: int, dtype: torch.dtype) -> None:
    side, before = case.side(dtype), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found, again = (with_gradients(side, "compiled") for _ in range(2))
    finally:
        torch.set_num_threads(before)
    assert same_bits(found, again)
    assert_exact(found, side)


@NEEDS_COMPILER
@pytest.mark.parametrize(("dtype", "far", "error"), [(torch.float32, 8000.0, 1.2e-7), (torch.float64, 9e5, 4e-16)])
def test_sines_are_exact_to_rounding(dtype: torch.dtype, far: float, error: float) -> None:
    near = torch.linspace(-7, 7, 40_001, dtype=torch.float64)
    quarters = torch.arange(-2000, 2000, dtype=torch.float64) * (math.pi / 2)
    angles = torch.cat([near, quarters, torch.linspace(-far, far, 40_001, dtype=torch.float64)]).to(dtype)
    one = torch.ones(1, 1, 1, dtype=dtype)
    (found,) = waves([Side(angles[None, :, None], one)], kernel="compiled")
    exact = torch.stack([angles.double().sin(), angles.double().cos()], 1)
    assert float((found[0].double() - exact).abs().max()) <= error


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_angles_and_what_is_no_number(dtype: torch.dtype) -> None:
    angles = torch.tensor([1.0, 1e5, -3e7, 1e30, math.inf, -math.inf, math.nan, 0.0, -0.0, 1e-30], dtype=dtype)
    one = torch.ones(1, 1, 1, dtype=dtype)
    (found,) = waves([Side(angles[None, :, None], one)], kernel="compiled")
    exact = torch.stack([angles.double().sin(), angles.double().cos()], 1).to(dtype)
    torch.testing.assert_close(found[0], exact, rtol=2e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("case", FORMS, ids=str)
def test_arguments_of_any_strides(kernel: Kernel, case: Case) -> None:
    side = case.side()

    def strided(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        other = torch.stack([x.detach(), x.detach() + 1], -1)[..., 0]
        return other.requires_grad_(x.requires_grad)

    other = side._replace(**{k: strided(x) for k, x in _floats(side).items()}, groups=strided(side.groups))
    assert not any(x.is_contiguous() for x in leaves_of(other))
    assert_alike(with_gradients(other, kernel), with_gradients(side, None), 1e-12)


# torch 2.5 uses there what it deprecates itself.
@pytest.mark.filterwarnings("ignore:.*torch._vmap_internals:FutureWarning")
@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("case", FORMS, ids=str)
def test_derivatives_equal_finite_differences(case: Case, kernel: Kernel) -> None:
    side = case.side()

    def made(*leaves: Tensor) -> Tensor:
        return waves([_with(side, leaves)], kernel=kernel)[0]

    assert torch.autograd.gradcheck(made, leaves_of(side), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(made, leaves_of(side), check_fwd_over_rev=True)


def _with(side: Side, leaves: tuple[Tensor, ...]) -> Side:
    # Not `_replace`, which Dynamo of torch 2.5 does not trace.
    given = iter(leaves)
    weight, phase, sine, cosine = (x if x is None else next(given) for x in side[1:5])
    assert weight is not None
    return Side(side.codes, weight, phase, sine, cosine, side.scale, side.groups, side.cosine_first, side.period)


ALL = (0, 1, 2)
TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda f: grad(f, ALL),
    "vmap": lambda f: lambda *x: vmap(f)(*(torch.stack([y, y + 1]) for y in x)),
    "vmap of grad": lambda f: lambda *x: vmap(grad(f, ALL))(*(torch.stack([y, y + 1]) for y in x)),
    "jvp of grad": lambda f: lambda *x: jvp(grad(f, ALL), x, tuple(y + 1 for y in x)),
    "hessian": lambda f: hessian(f, ALL),
    "compiled": lambda f: lambda *x: torch.compile(grad(f, ALL), fullgraph=True, backend="aot_eager")(*x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_agree_with_those_of_the_parts(name: str) -> None:
    side = Case(there=("phase", "sine", "scale"), groups=2).side()
    leaves = tuple(x.detach() for x in leaves_of(side))

    def objective(kernel: Kernel) -> Callable[..., Tensor]:
        return lambda *x: waves([_with(side, x)], kernel=kernel)[0].square().sum().sin()

    expected = TRANSFORMS["grad" if name == "compiled" else name](objective("eager"))(*leaves)
    assert_trees_close(TRANSFORMS[name](objective("auto"))(*leaves), expected)


@NEEDS_COMPILER
def test_leaves_that_change_before_backward_are_an_error() -> None:
    side = Case().side()
    (out,) = waves([side], kernel="compiled")
    with torch.no_grad():
        side.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@NEEDS_COMPILER
def test_outputs_are_freed_without_a_collection_of_cycles() -> None:
    (out,) = waves([Case().side()], kernel="compiled")
    freed = weakref.ref(out)
    del out
    assert freed() is None


@NEEDS_COMPILER
def test_what_is_frozen_or_not_used_has_no_gradient() -> None:
    sides = [Case().side(), Case(2, 3).side()]
    sides[0].weight.requires_grad_(False)
    assert sides[1].sine is not None
    sides[1].sine.requires_grad_(False)
    made = waves(sides, kernel="compiled")
    assert {type(x.grad_fn) for x in made} == {type(made[0].grad_fn)}
    made[1].sum().backward()
    parts = waves(sides, kernel="eager")[1]
    leaves = [x for x in leaves_of(sides[1]) if x.requires_grad]
    for x, y in zip(leaves, torch.autograd.grad(parts.sum(), leaves), strict=True):
        torch.testing.assert_close(x.grad, y)
    assert sides[0].weight.grad is None
    assert sides[1].sine.grad is None


DIMS = TileDims(4, 5, 2, 3)
TYPES = [h(2, share=s) for h in (gb.periodic, gb.bilinear) for s in ("none", "layers")]


def evaluation_of(hypernet: Any, kernel: Kernel, n_tiles: int, dims: TileDims = DIMS) -> tuple[Evaluation, Params]:
    generator = torch.Generator().manual_seed(n_tiles)
    row, col, scale = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in ((1, dims.rows, dims.row_width), (n_tiles, dims.cols, dims.col_width), (n_tiles,))
    )
    groups = torch.arange(n_tiles) % 2 if hypernet.shares else None
    drawn = hypernet.init(dims, n_tiles, 2, generator)
    leaves = {k: v.double().requires_grad_() for k, v in drawn.items() if v.numel() or not n_tiles}
    return Evaluation(Constants.make(hypernet, dims, kernel, row, col, scale, groups), leaves), leaves


@pytest.mark.parametrize("kernel", FAST)
@settings(max_examples=10)
@given(st.lists(st.tuples(st.sampled_from(TYPES), st.integers(0, 4)), max_size=4))
def test_factors_of_many_runs_are_those_of_each_tile(kernel: Kernel, kinds: list[tuple[Any, int]]) -> None:
    many = [evaluation_of(hypernet, kernel, n) for hypernet, n in kinds]
    for (one, leaves), factors in zip(many, periodic_factors([one for one, _ in many]), strict=True):
        tiles, c = dense_tiles(factors), one.constants
        specs = c.hypernet.leaves(c.dims)
        assert c.scale is not None and len(tiles) == one.n_tiles
        for t in range(one.n_tiles):
            group = t if c.groups is None else t % 2
            own = {k: v[group if specs[k].scope == "group" else t, None] for k, v in leaves.items()}
            single = Evaluation(Constants.make(c.hypernet, c.dims, "eager", c.row, c.col[t, None]), own)
            made = dense_tiles(single.tiles())[0]
            torch.testing.assert_close(tiles[t], made * c.scale[t], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("hypernet", TYPES, ids=repr)
@pytest.mark.parametrize("dims", [DIMS, TileDims(4, 1, 2, 0)], ids=str)
def test_parts_of_runs_that_share_code_weights(hypernet: Any, dims: TileDims) -> None:
    one, leaves = evaluation_of(hypernet, "auto", 5, dims)
    tiles = dense_tiles(one.tiles())
    g = torch.randn(tiles.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad(tiles, list(leaves.values()), g)
    for parts in (one.split([2, 0, 3]), with_factors([one])[0].split([2, 0, 3])):
        made = torch.cat([dense_tiles(part.tiles()) for part in parts])
        torch.testing.assert_close(made, tiles, rtol=1e-12, atol=1e-12)
        assert_alike(list(torch.autograd.grad(made, list(leaves.values()), g)), list(expected), 1e-12)
