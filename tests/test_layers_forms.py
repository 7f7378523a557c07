"""Forms of layers: whatever form its weight has, a layer computes and learns what it does with the dense weight."""

from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor, nn

from gbfunc.costs import thin_rows
from gbfunc.layers.factored import FactoredWeight
from gbfunc.layers.forms import Weight
from gbfunc.layers.install import formable, install
from gbfunc.pnet.pure import PureNet
from gbfunc.tiling import TileGrid
from tests.support.forms import (
    KINDS,
    Formed,
    Reader,
    assert_close,
    assert_equals_dense,
    count_made,
    make_factors,
    make_form,
    on_form,
    vectors,
)

call = Formed.__call__
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def hugging_face_linear(cols: int, rows: int) -> nn.Module:
    return pytest.importorskip("transformers.pytorch_utils").Conv1D(rows, cols)


USES: dict[str, Callable[[Formed, Tensor], Tensor]] = {
    "plain": lambda net, x: net(x),
    "batched": lambda net, x: net(x.repeat(2, 3, 1, 1)),
    "vector": lambda net, x: net(x[0]),
    "empty": lambda net, x: net(x[:0]).sum(0) + x.sum(),
    "sliced": lambda net, x: net(x[::2]),
    "twice": lambda net, x: net(x) * net(x + 1),
}


@EACH_KIND
@pytest.mark.parametrize("use", USES)
@settings(max_examples=10)
@given(rows=st.integers(1, 11), cols=st.integers(1, 11), cut=st.tuples(st.integers(1, 11), st.integers(1, 11)))
@pytest.mark.parametrize("layer", [nn.Linear, partial(nn.Linear, bias=False), hugging_face_linear])
def test_linear(kind: str, layer: Any, use: str, rows: int, cols: int, cut: tuple[int, int]) -> None:
    module = layer(cols, rows).double()
    assert not assert_equals_dense(kind, module, {"weight": cut}, USES[use], vectors(5, cols), k=1 + rows % 3).reads


@EACH_KIND
@settings(max_examples=40)
@given(
    dims=st.integers(1, 3),
    cut=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    batched=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "stride": st.integers(1, 2),
            "dilation": st.integers(1, 2),
            "padding": st.sampled_from([0, 1, "same", "valid"]),
            "padding_mode": st.sampled_from(["zeros", "reflect", "circular"]),
            "bias": st.booleans(),
        }
    ),
)
def test_convolutions(kind: str, dims: int, cut: tuple[int, int], batched: bool, options: dict[str, Any]) -> None:
    if options["padding"] == "same":
        options["stride"] = 1
    conv: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    module = conv(4, 5, (3, 1, 3)[:dims], dtype=torch.float64, **options)
    x = vectors(*((2,) if batched else ()), 4, *(7, 6, 5)[:dims])
    assert not assert_equals_dense(kind, module, {"weight": cut}, call, x).reads


@EACH_KIND
@pytest.mark.parametrize("cut", [(1, 1), (2, 2), (3, 1), (5, 4)])
def test_channels_last_stays(kind: str, cut: tuple[int, int]) -> None:
    module = nn.Conv2d(4, 5, 3, dtype=torch.float64)
    x = vectors(2, 4, 6, 5).contiguous(memory_format=torch.channels_last)
    assert_equals_dense(kind, module, {"weight": cut}, call, x)


@EACH_KIND
@pytest.mark.parametrize("padding_idx", [None, 2, -1])
@settings(max_examples=20)
@given(
    cols=st.integers(1, 9),
    cut=st.tuples(st.integers(1, 11), st.integers(1, 9)),
    index=st.lists(st.integers(0, 10), max_size=4),
)
def test_embedding(kind: str, padding_idx: int | None, cols: int, cut: tuple[int, int], index: list[int]) -> None:
    module = nn.Embedding(11, cols, padding_idx=padding_idx, dtype=torch.float64)
    tokens = torch.tensor([index, index[::-1]], dtype=torch.int64)
    assert not assert_equals_dense(kind, module, {"weight": cut}, call, tokens).reads


@settings(max_examples=30)
@given(rows=st.integers(1, 9), cols=st.integers(1, 9), cut=st.tuples(st.integers(1, 9), st.integers(1, 9)))
def test_made_is_the_loop_over_weights(rows: int, cols: int, cut: tuple[int, int]) -> None:
    grid = TileGrid(rows, cols, -(-rows // cut[0]), -(-cols // cut[1]))
    left, right = make_factors(grid, 2, 1)
    for transposed in (False, True):
        form = FactoredWeight("w", (cols, rows) if transposed else (rows, cols), grid, 2, transposed, auto=False)
        weight = Weight(form, {"left": left, "right": right}).dense()
        r, c = grid.tile_rows, grid.tile_cols
        for i in range(rows):
            for j in range(cols):
                tile = i // r * grid.n_cols + j // c
                expected = left[tile, i % r] @ right[tile, j % c]
                assert_close(weight[j, i] if transposed else weight[i, j], expected)


NETS: dict[str, tuple[Callable[[], nn.Module], Tensor, dict[str, tuple[int, int]]]] = {
    "linear": (lambda: nn.Linear(9, 5, bias=False), vectors(4, 9), {"weight": (2, 3)}),
    "conv": (lambda: nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect"), vectors(2, 3, 6, 6), {"weight": (1, 1)}),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
        vectors(2, 5, 8),
        {"linear1.weight": (1, 2), "linear2.weight": (2, 2)},
    ),
    "Hugging Face": (lambda: hugging_face_linear(4, 9), vectors(2, 3, 4), {"weight": (2, 2)}),
}


def made_by(kind: str, module: nn.Module, cuts: dict[str, tuple[int, int]], *inputs: Tensor, auto: bool = False) -> int:
    formed = on_form(kind, module, cuts, auto=auto)
    made = [count_made(form) for form in set(formed.forms.values())]
    formed(*inputs)
    return sum(m.total() for m in made)


@EACH_KIND
@pytest.mark.parametrize("name", NETS)
def test_factors_are_never_multiplied_out(kind: str, name: str) -> None:
    build, x, cuts = NETS[name]
    assert made_by(kind, build().double(), cuts, x) == 0
    assert not assert_equals_dense(kind, build().double(), cuts, call, x, k=3, auto=True).reads


@pytest.mark.parametrize(
    ("module", "cut", "x"),
    [
        (nn.Conv1d(4, 6, 3, groups=2), {"weight": (1, 1)}, vectors(2, 4, 9)),
        (nn.Embedding(10, 6), {"weight": (3, 1)}, torch.arange(20) % 10),
    ],
    ids=["groups", "more tokens than words"],
)
def test_the_dense_weight_is_formed_where_factors_do_not_do(module: nn.Module, cut: Any, x: Tensor) -> None:
    module = module.double()
    assert made_by("factored", module, cut, x) == 1
    assert made_by("recomputed", module, cut, x) == 0
    for kind in KINDS:
        assert not assert_equals_dense(kind, module, cut, call, x).reads


def test_auto_forms_the_weight_where_that_costs_less() -> None:
    module, batches = nn.Linear(128, 128, dtype=torch.float64), [torch.ones(n, 128).double() for n in (1, 4096)]
    for cut, made in {1: [0, 0], 64: [1, 1], 16: [0, 1]}.items():
        assert [made_by("factored", module, {"weight": (cut, cut)}, x, auto=True) for x in batches] == made
    for x in batches:
        assert made_by("factored", module, {"weight": (16, 16)}, x) == 0
        assert_equals_dense("factored", module, {"weight": (16, 16)}, call, x, auto=True)


@EACH_KIND
def test_a_weight_that_is_read_is_made_once_a_call(kind: str) -> None:
    module = Reader().double()
    assert made_by(kind, module, {"fc.weight": (2, 2)}, vectors(3, 4)) == 1
    formed = assert_equals_dense(kind, module, {"fc.weight": (2, 2)}, call, vectors(3, 4))
    assert formed.reads == {"fc.weight": 4}
    formed(vectors(3, 4))
    assert formed.reads == {"fc.weight": 8}


class OwnForward(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class OwnConv(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight * 2, bias)


def patched() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.forward = lambda input: input
    return layer


FORMABLE: dict[str, tuple[Callable[[], nn.Module], str, bool]] = {
    "linear": (lambda: nn.Linear(3, 2), "weight", True),
    "bias": (lambda: nn.Linear(3, 2), "bias", False),
    "no such weight": (lambda: nn.Linear(3, 2), "wait", False),
    "subclass": (lambda: type("Renamed", (nn.Linear,), {})(3, 2), "weight", True),
    "forward of a subclass": (lambda: OwnForward(3, 2), "weight", False),
    "forward of an instance": (patched, "weight", False),
    "grouped conv": (lambda: nn.Conv1d(4, 6, 3, groups=2), "weight", True),
    "conv of a subclass": (lambda: OwnConv(3, 2, 1), "weight", False),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 4, 2), "weight", False),
    "embedding": (lambda: nn.Embedding(5, 3), "weight", True),
    "embedding with a norm": (lambda: nn.Embedding(5, 3, max_norm=0.5), "weight", False),
    "embedding scaled by frequency": (lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), "weight", False),
    "attention": (lambda: nn.MultiheadAttention(8, 2), "in_proj_weight", False),
    "output of attention": (lambda: nn.MultiheadAttention(8, 2).out_proj, "weight", False),
    "lstm": (lambda: nn.LSTM(3, 4), "weight_ih_l0", False),
    "Hugging Face": (lambda: hugging_face_linear(3, 2), "weight", True),
}


@pytest.mark.parametrize("name", FORMABLE)
def test_what_can_have_a_form(name: str) -> None:
    build, attribute, expected = FORMABLE[name]
    module = build()
    assert formable(module, attribute) is expected
    if not expected:
        form = make_form("factored", attribute, (2, 3), TileGrid(2, 3, 2, 3))
        with pytest.raises(ValueError, match=f"'{attribute}' of a .* cannot have another form than dense"):
            install(module, {attribute: form})


def test_errors_name_what_came() -> None:
    linear = on_form("factored", nn.Linear(4, 6).double(), {"weight": (2, 2)})
    with pytest.raises(ValueError, match=r"4 features, got shape \(3, 2\)"):
        linear(vectors(3, 2))
    conv = on_form("factored", nn.Conv1d(4, 6, 3).double(), {"weight": (2, 2)})
    with pytest.raises(ValueError, match=r"4 channels, got shape \(2, 3, 9\)"):
        conv(vectors(2, 3, 9))
    for index in (11, -1):
        with pytest.raises(IndexError):
            on_form("factored", nn.Embedding(11, 4).double(), {"weight": (3, 2)})(torch.tensor([index]))
    form = make_form("factored", "weight", (6, 4), TileGrid(6, 4, 3, 2))
    net = PureNet(nn.Linear(4, 6), {"weight": form})
    with pytest.raises(ValueError, match=r"missing \['weight_form.left', 'weight_form.right'\], unknown \['weight'\]"):
        net({"weight": torch.ones(6, 4), "bias": torch.ones(6)}, {}, torch.ones(2, 4))


@given(rows=st.integers(1, 5000), cols=st.integers(1, 5000), k=st.integers(1, 200))
def test_factors_pay_for_fewer_rows_with_more_rank(rows: int, cols: int, k: int) -> None:
    # The product itself costs more, too: 6 R C (k + 40) over k, which falls with k.
    assert thin_rows(rows, cols, k + 1, (1, 1)) <= thin_rows(rows, cols, k, (1, 1))


def test_factors_pay_where_it_was_measured() -> None:
    assert thin_rows(4096, 4096, 64, (1, 1)) > 256 < thin_rows(2048, 2048, 64, (1, 1))
    # Tile 128 with H = 32: as many FLOPs as dense, and the thin product on top.
    assert thin_rows(1024, 1024, 64, (8, 8)) < 100_000
    # Convolutions of 3 x 3: 16 channels at 32 x 32, 192 at 16 x 16, 96 at 32 x 32 in four tiles.
    assert thin_rows(16, 144, 8, (1, 1), conv=True) < 2**17 < thin_rows(16, 144, 8, (1, 1))
    assert thin_rows(192, 1728, 64, (1, 1), conv=True) > 2**15
    assert thin_rows(96, 864, 36, (2, 2), conv=True) < 2**17
    # One image against a large layer: forming the weight costs more than both applications.
    assert thin_rows(1024, 1024, 64, (8, 8)) > 1
