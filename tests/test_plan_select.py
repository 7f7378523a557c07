"""Which parameters are generated, by what and under which codes: patterns, rules, encodings, dtypes, initial scales."""

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import gbfunc as gb
from gbfunc.encoding import Grid, PerAxis
from gbfunc.plan import Plan, TensorPlan
from gbfunc.plan.slots import Slot
from tests.support.strategies import Conv1D
from tests.support.zoo import SGD

api: Any = gb


def net() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(12, 6), nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5))


def constant_conv1d() -> nn.Module:
    layer = Conv1D(9, 4)
    nn.init.constant_(layer.weight, 0.7)
    return layer


def by_name(plan: Plan) -> dict[str, TensorPlan]:
    return {t.name: t for t in plan.tensors}


def generated(plan: Plan) -> set[str]:
    return {t.name for t in plan.generated}


def slot(plan: Plan, name: str) -> Slot:
    return by_name(plan)[name].slots[0]


def test_weights_are_generated_and_the_rest_is_direct() -> None:
    plan = gb.make_plan(net())
    assert {t.name: t.role for t in plan.tensors} == {
        **dict.fromkeys(["0.weight", "1.bias", "2.weight", "2.bias", "3.bias"], "direct"),
        **dict.fromkeys(["1.weight", "3.weight"], "generated"),
    }
    assert slot(plan, "1.weight").hypernet == gb.periodic(32)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"include": [r"^0"]}, {"0.weight", "1.weight", "3.weight"}),
        ({"include": [r"^0\.", r"^2\.w"]}, {"0.weight", "2.weight", "1.weight", "3.weight"}),
        ({"exclude": [r"1"], "include": [r"1\.bias"]}, {"3.weight"}),
        ({"rules": [(r"^3", None)]}, {"1.weight"}),
        ({"rules": [(r"0\.weight", gb.low_rank(2))]}, {"0.weight", "1.weight", "3.weight"}),
        ({"rules": [(r"0\.weight", gb.low_rank(2))], "exclude": [r"^0"]}, {"1.weight", "3.weight"}),
        ({"rules": [(r"bias", None)], "include": [r"1\.bias"]}, {"1.weight", "3.weight"}),
    ],
)
def test_patterns_extend_cut_and_rule(options: dict[str, Any], names: set[str]) -> None:
    assert generated(gb.make_plan(net(), **options)) == names


def test_the_first_rule_that_matches_counts() -> None:
    rules = [(r"3\.weight", gb.gnet((4,))), (r"weight", gb.xox(2)), (r"bias", gb.constant(0.5))]
    plan = gb.make_plan(net(), gb.periodic(3), rules=rules)
    assert slot(plan, "3.weight").hypernet == gb.gnet((4,))
    assert slot(plan, "0.weight").hypernet == slot(plan, "1.weight").hypernet == gb.xox(2)
    assert slot(plan, "1.bias").hypernet == gb.constant(0.5)
    assert [by_name(plan)[n].note for n in ("3.weight", "1.bias")] == ["by rule", "by rule"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"rules": [("hed", None)]}, ValueError, "rules pattern 'hed' matches no parameter"),
        ({"include": ["hed"]}, ValueError, r"include pattern 'hed' matches no parameter; the p-net has \['0.weight'"),
        ({"include": "weight"}, TypeError, "include must be a list of regular expressions, got the string 'weight'"),
        ({"exclude": ["("]}, ValueError, r"exclude pattern '\(' is not a regular expression"),
        ({"include": [3]}, ValueError, "include pattern 3 is not a regular expression"),
        ({"rules": ["weight"]}, TypeError, r"a rule must be \(pattern, hypernetwork or None\), got 'weight'"),
        ({"hypernet": gb.periodic}, TypeError, r"such as gb.periodic\(\), got the class Periodic: call it"),
        ({"rules": [("weight", gb.gnet)]}, TypeError, "the g-net of the rule 'weight' .* got the class"),
        ({"max_tile": 0}, ValueError, "max_tile must be None, an int >= 1 or"),
        ({"encodings": {"hed": (None, None)}}, ValueError, r"encodings names 'hed', .* the p-net has \['0.weight'"),
        ({"encodings": {"0.weight": (None, None)}}, ValueError, "'0.weight', which is direct: add it to include"),
        ({"encodings": {"1.weight": gb.binary()}}, ValueError, "must be a pair of encodings"),
        ({"encodings": {"1.weight": (None, gb.grid(7))}}, ValueError, r"\['1.weight'\], columns: grid.7. codes 7"),
        ({"encodings": {"1.weight": (torch.ones(7, 2), None)}}, ValueError, "rows: .* must have 8 codes, got 7"),
        ({"encodings": {"1.weight": (None, "gray")}}, ValueError, "expected an encoding, an array or None, got 'gray'"),
    ],
)
def test_errors_say_what_was_expected(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        api.make_plan(net(), **options)


def test_a_tied_tensor_is_planned_once_under_any_of_its_names() -> None:
    pnet = nn.ModuleDict({"emb": nn.Embedding(12, 6), "head": nn.Linear(6, 12)})
    pnet["head"].weight = pnet["emb"].weight
    plan = gb.make_plan(pnet, include=["head"])
    assert generated(plan) == {"emb.weight", "head.bias"}
    assert by_name(plan)["emb.weight"].aliases == ("head.weight",)
    assert plan.pnet_params == 12 * 6 + 12
    codes = gb.make_plan(pnet, include=["emb"], encodings={"head.weight": (gb.gray(), None)})
    assert slot(codes, "emb.weight").row_code == gb.gray()


def test_codes_are_binary_and_kernels_have_coordinates() -> None:
    plan = gb.make_plan(nn.Sequential(nn.Conv2d(4, 6, (3, 5)), nn.Conv1d(4, 6, 1), nn.Linear(6, 4)))
    code = slot(plan, "0.weight").col_code
    assert isinstance(code, PerAxis) and isinstance(code.positions, Grid)
    assert (code.channels, code.positions.dims, code.n_positions) == (gb.binary(), (3, 5), 15)
    assert slot(plan, "1.weight").col_code == slot(plan, "2.weight").col_code == gb.binary()
    assert {slot(plan, f"{i}.weight").row_code for i in range(3)} == {gb.binary()}


def test_a_flattened_image_is_cut_between_channels() -> None:
    """Columns of a linear layer after a convolution: channels x positions, as in the convolution's own columns."""
    code = gb.per_axis(gb.binary(), gb.grid(3, 3), 9)
    plan = gb.make_plan(nn.Linear(8 * 9, 10), gb.periodic(2), max_tile=(5, 2), encodings={"weight": (None, code)})
    grid = slot(plan, "weight").grid
    assert (grid.tile_rows, grid.tile_cols, grid.n_tiles) == (5, 18, 8)
    sized = gb.make_plan(nn.Linear(50 * 9, 100), compression=3.0, encodings={"weight": (None, code)})
    assert slot(sized, "weight").grid.tile_cols % 9 == 0
    with pytest.raises(ValueError, match="a multiple of 9 kernel positions"):
        gb.make_plan(nn.Linear(10, 8 * 9), gb.periodic(2), max_tile=4, encodings={"weight": (code, None)})


@pytest.mark.parametrize(
    ("value", "dtype"), [(torch.zeros(3, 4, dtype=torch.int64), "int64"), (torch.zeros(0, 4), "float32")]
)
def test_what_has_no_real_numbers_stays_direct(value: torch.Tensor, dtype: str) -> None:
    pnet = nn.Linear(4, 3)
    pnet.table = nn.Parameter(value, requires_grad=False)
    plan = gb.make_plan(pnet, compression=1.2)
    assert (by_name(plan)["table"].role, by_name(plan)["table"].dtype) == ("direct", dtype)
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(ValueError, match=rf"'table' \(torch.{dtype}, {value.numel()} entries\) cannot be generated"):
        gb.make_plan(pnet, include=["table"])
    assert generated(gb.make_plan(pnet, include=["t"], exclude=["table"])) == {"weight"}


def test_what_is_frozen_stays_unless_it_is_named() -> None:
    pnet = net()
    names = ["1.weight", "3.weight"]
    pnet.get_parameter(names[0]).requires_grad_(False)
    plan = gb.make_plan(pnet)
    assert names[0] not in generated(plan) and names[1] in generated(plan)
    assert by_name(plan)[names[0]].note == "frozen"
    step = gb.make_train_step(plan, pnet, lambda net, x: sum(w.square().sum() for w in net.parameters()), SGD)
    state, _ = step(step.init(), torch.ones(1))
    assert torch.equal(state.direct[names[0]], pnet.get_parameter(names[0]))
    assert names[0] in generated(gb.make_plan(pnet, include=[rf"^{re.escape(names[0])}$"]))
    # The p-net is a shape alone.
    assert set(names) <= generated(gb.make_plan(pnet.requires_grad_(False)))


def test_scales_are_the_deviations_of_the_pnet() -> None:
    pnet = net()
    plan = gb.make_plan(pnet, include=["."])
    for tensor in plan.generated:
        values = pnet.get_parameter(tensor.name).detach().double()
        std, own = float(values.std(correction=0)), tensor.slots[0]
        if std > 0:
            assert own.scale == pytest.approx(std, rel=5e-3)
        vector = values.ndim < 2
        assert own.offset == pytest.approx(float(values.mean()) if vector else 0.0, rel=5e-3)
    delta = slot(gb.make_plan(nn.LayerNorm(9), gb.low_rank(1), base="own", include=["weight"]), "weight")
    assert (delta.scale, delta.offset) == (0.1, 0.0)


def test_each_part_of_an_in_projection_has_its_own_scale() -> None:
    pnet = nn.MultiheadAttention(6, 2)
    with torch.no_grad():
        pnet.in_proj_weight[6:12] *= 3
    scales = [s.scale for s in gb.make_plan(pnet).tensors[0].slots]
    parts = pnet.in_proj_weight.detach().double().chunk(3)
    assert scales == pytest.approx([float(p.std(correction=0)) for p in parts], rel=5e-3)


@pytest.mark.parametrize(
    ("pnet", "name", "scale", "offset"),
    [
        (nn.LayerNorm(9), "weight", 1 / 3, 1.0),
        (nn.PReLU(1, 0.25), "weight", 1.0, 0.25),
        (nn.Linear(9, 4, device="meta"), "weight", 1 / 3, 0.0),
        (nn.LayerNorm(9, device="meta"), "weight", 1 / 3, 1.0),
        (constant_conv1d(), "weight", 1 / 2, 0.0),
    ],
)
def test_a_zero_or_unknown_deviation_is_that_of_the_fan_in(
    pnet: nn.Module, name: str, scale: float, offset: float
) -> None:
    own = slot(gb.make_plan(pnet, include=["."]), name)
    assert (own.scale, own.offset) == (pytest.approx(scale, rel=5e-3), pytest.approx(offset))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_pnet_that_holds_nonsense_is_refused(value: float) -> None:
    pnet = nn.Linear(4, 3)
    nn.init.constant_(pnet.weight, value)
    with pytest.raises(ValueError, match="parameter 'weight' of the p-net must be finite"):
        gb.make_plan(pnet)
