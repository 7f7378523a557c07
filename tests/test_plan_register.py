"""Types of g-net and encodings of the user's: registered, saved and loaded, or refused with the cure."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc import encoding, hypernets
from gbfunc.encoding import Encoding
from gbfunc.hypernets import Leaf, Sized, TileDims
from gbfunc.types import Params
from tests.support.trees_equal import same_bits


@dataclass(frozen=True)
class Outer(Sized):
    rank: int | None = None
    powers: tuple[float, ...] = (1.0, 2.0)
    type: ClassVar[str] = "outer"
    size_field: ClassVar[str] = "rank"

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        n = self.known_size
        return {"row": Leaf((dims.row_width, n), "code"), "col": Leaf((dims.col_width, n), "linear")}

    def apply(self, leaves: Params, row_rp: Tensor, col_cq: Tensor, **unused: Any) -> Tensor:
        return torch.tanh(row_rp @ leaves["row"]) @ (col_cq @ leaves["col"]).T


@dataclass(frozen=True)
class Ramp(Encoding):
    powers: tuple[int, ...]
    inner: Encoding
    type: ClassVar[str] = "ramp"

    def width(self, n: int) -> int:
        return len(self.powers) + self.inner.width(n)

    def at(self, i: Tensor, n: int) -> Tensor:
        codes = [((i + 1) / n) ** p for p in self.powers]
        return torch.cat([torch.stack(codes, -1), self.inner.at(i, n)], -1)


@dataclass(frozen=True)
class Nameless(Outer):
    """A class without a type of its own."""


@dataclass(frozen=True)
class Bent(Outer):
    type: ClassVar[str] = "bent"

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        return {k: leaf._replace(role="code") for k, leaf in super().leaves(dims).items()}


@dataclass(frozen=True)
class Raw(Bent):
    type: ClassVar[str] = "raw"
    standardised: ClassVar[bool] = False


@dataclass(frozen=True)
class Divides(Outer):
    type: ClassVar[str] = "divides"

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        return {"row": Leaf((dims.row_width, 1), "code"), "gain": Leaf((1,), "linear")}

    def apply(self, leaves: Params, row_rp: Tensor, col_cq: Tensor, **unused: Any) -> Tensor:
        return torch.tanh(row_rp @ leaves["row"]) * leaves["gain"] @ col_cq.mean(-1, keepdim=True).T


def test_weights_that_are_not_finite_are_refused_by_type() -> None:
    pnet = nn.Linear(30, 20)
    gb.init_genome(gb.make_plan(pnet, Divides(1)), pnet)
    plan = gb.make_plan(pnet, Divides(1), include=["bias"])
    with pytest.raises(ValueError, match="'divides' generate weights that are not finite, .* 5 and 0"):
        gb.init_genome(plan, pnet)


@pytest.mark.parametrize(
    ("has", "words"),
    [
        ({"type": None}, "Own has no name for files: define type"),
        ({"size_field": "n"}, r"Own needs @dataclass.*size_field.*; its fields are \['rank'\], its size_field 'n'"),
        ({"apply": lambda self, leaves, row, col: row}, "Own must define apply.*, which also takes noise="),
        ({"apply": lambda *x, **_: Outer.apply(*x).detach()}, "type 'own' fails: .* without detach, numpy or item"),
        ({"apply": lambda *x, **_: Outer.apply(*x) ** 3}, "doubling its leaves of role 'linear' must double the tile"),
        ({"apply": lambda *x, **_: Outer.apply(*x).T}, r"shape \(9, 12\), got \(12, 9\): rows come first"),
    ],
)
def test_types_without_their_parts_are_refused(has: dict[str, Any], words: str) -> None:
    names = {"type": "own", "size_field": "rank", "leaves": Outer.leaves, **has}
    own: Any = make_dataclass("Own", [("rank", Any, 2)], bases=(Sized,), namespace=names, frozen=True)
    pnet = nn.Linear(12, 9)
    with pytest.raises((TypeError, ValueError), match=words):
        gb.init_genome(gb.make_plan(pnet, own()), pnet)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    tables: list[dict[str, Any]] = [hypernets.TYPES, encoding.TYPES]
    before = [dict(table) for table in tables]
    yield
    for table, entries in zip(tables, before, strict=True):
        table.clear()
        table.update(entries)


def made() -> tuple[gb.Plan, gb.Genome]:
    pnet = nn.Linear(12, 9)
    code = Ramp((1, 3), gb.binary())
    plan = gb.make_plan(pnet, Outer(3, powers=(1.0, 0.5)), encodings={"weight": (code, None)})
    return plan, gb.init_genome(plan, pnet)


@pytest.mark.parametrize("dtype", [None, "int8"])
def test_registered_classes_are_saved_and_loaded(dtype: str | None, tmp_path: Path) -> None:
    assert gb.register(Outer) is Outer and gb.register(Ramp) is Ramp
    plan, genome = made()
    gb.save(tmp_path / "g", plan, genome, dtype)
    again, read = gb.load(tmp_path / "g")
    assert again == plan
    if dtype is None:
        assert same_bits(gb.generate(again, read), gb.generate(plan, genome))


@pytest.mark.parametrize(("known", "words"), [(Outer, "'type': 'ramp'"), (Ramp, "'type': 'outer'")])
def test_what_load_could_not_read_is_refused_by_save_and_by_load(known: Any, words: str, tmp_path: Path) -> None:
    plan, genome = made()
    gb.register(known)
    cure = rf"gb\.load could not read .*{words}.* by gb\.register"
    with pytest.raises(ValueError, match=cure):
        gb.save(tmp_path / "g", plan, genome)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match=rf"{words}.* by gb\.register"):
        gb.Plan.from_json(plan.to_json())


def test_a_class_that_would_come_back_as_another_is_refused(tmp_path: Path) -> None:
    gb.register(Outer)
    pnet = nn.Linear(12, 9)
    plan = gb.make_plan(pnet, Nameless(2))
    with pytest.raises(ValueError, match=r"Nameless\(.* as Outer\(.*define a different `type` in its class"):
        gb.save(tmp_path / "g", plan, gb.init_genome(plan, pnet))


def test_what_cannot_be_registered_is_refused() -> None:
    for wrong in (Nameless, nn.Linear, Outer(2), "outer"):
        with pytest.raises(TypeError, match="expected a subclass of Hypernet or Encoding, got .* define type"):
            gb.register(wrong)  # pyright: ignore[reportArgumentType, reportCallIssue]
    thief: Any = dataclass(frozen=True)(type("Thief", (Outer,), {"type": "periodic"}))
    with pytest.raises(ValueError, match="the type 'periodic' belongs to gbfunc.hypernets.periodic.Periodic"):
        gb.register(thief)
    assert gb.periodic(3) == hypernets.hypernet_from_json(json.loads('{"type": "periodic", "features": 3}'), {})


def test_a_class_made_again_takes_the_place_of_the_former() -> None:
    again: Any = dataclass(frozen=True)(type("Outer", (Outer,), {"type": "outer", "__module__": __name__}))
    assert gb.register(Outer) is Outer and gb.register(again) is again
    assert hypernets.HYPERNETS["outer"] is again


def test_g_nets_that_are_linear_in_no_leaf_are_refused_where_a_leaf_must_scale_them() -> None:
    pnet = nn.Linear(12, 9)
    with pytest.raises(ValueError, match="type 'bent' has no leaf of role 'linear'.*standardised = False"):
        gb.init_genome(gb.make_plan(pnet, Bent(2)), pnet)
    with pytest.raises(ValueError, match="type 'raw' has no leaf of role 'linear'.* a delta starts at zero"):
        gb.init_genome(gb.make_plan(pnet, Raw(2), base="own"), pnet)
    odd = type("Odd", (Outer,), {"type": "odd", "leaves": lambda self, dims: {"row": hypernets.Leaf((2,), "weights")}})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="roles of leaves are .*, got 'row' of role 'weights' in 'odd'"):
        gb.init_genome(gb.make_plan(pnet, odd(2)), pnet)  # pyright: ignore[reportCallIssue]
    plan = gb.make_plan(pnet, Raw(2))
    assert gb.generate(plan, gb.init_genome(plan, pnet))["weight"].std() > 0
