"""Layer kinds: weight tensors as matrices whose rows are output channels, and back."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn.utils import parametrizations as new

from gbfunc.layers import KINDS, layer_kind
from gbfunc.pnet.describe import parameter_infos
from tests.support import oracles
from tests.support.strategies import Conv1D, LayerCase, layers


@given(layers())
def test_each_kind_claims_its_own(case: LayerCase) -> None:
    assert layer_kind(case.module, case.attribute, tuple(case.weight.shape)).name == case.kind


@given(layers())
def test_fold_undoes_unfold(case: LayerCase) -> None:
    kind, weight = KINDS[case.kind], case.weight
    matrices = kind.unfold(weight)
    assert [tuple(m.shape) for m in matrices] == [(d.rows, d.cols) for d in kind.matrices(tuple(weight.shape))]
    assert torch.equal(kind.fold([m.clone() for m in matrices], tuple(weight.shape)), weight)


@given(layers())
def test_fold_equals_a_loop_over_entries(case: LayerCase) -> None:
    kind, shape = KINDS[case.kind], tuple(case.weight.shape)
    dims = kind.matrices(shape)
    matrices = [torch.randn(d.rows, d.cols) for d in dims]
    expected = np.full(shape, np.nan)
    for part, (matrix, d) in enumerate(zip(matrices, dims, strict=True)):
        for y in range(d.rows):
            for x in range(d.cols):
                expected[oracles.position(case.kind, shape, d, part, y, x)] = float(matrix[y, x])
    np.testing.assert_array_equal(kind.fold(matrices, shape).numpy(), expected)


@pytest.mark.parametrize(
    ("module", "inputs", "groups"),
    [
        (nn.Linear(5, 4, bias=False), (2, 5), 1),
        (Conv1D(4, 5), (2, 5), 1),
        (nn.Conv1d(3, 4, 2), (2, 3, 7), 1),
        (nn.Conv2d(4, 6, (2, 3), groups=2), (2, 4, 7, 6), 1),
        (nn.Conv3d(3, 3, 2, groups=3), (1, 3, 4, 5, 4), 1),
        (nn.ConvTranspose1d(3, 4, 2), (2, 3, 5), 1),
        (nn.ConvTranspose2d(4, 6, (3, 2), groups=2), (2, 4, 4, 3), 2),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else None,
)
def test_a_row_is_an_output_channel(module: nn.Module, inputs: tuple[int, ...], groups: int) -> None:
    """Changing row y changes output channel y alone (of every group, for transposed convolutions)."""
    weight: Tensor = module.get_parameter("weight").detach()
    kind = layer_kind(module, "weight", tuple(weight.shape))
    (matrix,) = kind.unfold(weight)
    channel = -1 if weight.ndim == 2 else 1
    x = torch.randn(inputs)

    def output(matrix_RC: Tensor) -> Tensor:
        folded = kind.fold([matrix_RC], tuple(weight.shape))
        return torch.func.functional_call(module, {"weight": folded}, (x,))

    before = output(matrix)
    for row in range(len(matrix)):
        changed = matrix.clone()
        changed[row] += 1.0
        moved = (output(changed) - before).abs().movedim(channel, 0).flatten(1).amax(1)
        assert torch.nonzero(moved > 1e-6).flatten().tolist() == [row + g * len(matrix) for g in range(groups)]


def test_in_proj_is_queries_keys_and_values() -> None:
    packed, apart = nn.MultiheadAttention(6, 2), nn.MultiheadAttention(6, 2)
    matrices = KINDS["attention_in"].unfold(packed.in_proj_weight.detach())
    assert [tuple(m.shape) for m in matrices] == [(6, 6)] * 3
    x, y, z = torch.randn(3, 4, 1, 6).unbind()
    q, k, v = (torch.nn.functional.linear(a, m) for a, m in zip((x, y, z), matrices, strict=True))
    with torch.no_grad():
        apart.load_state_dict(packed.state_dict())
        apart.in_proj_weight.copy_(torch.eye(6).repeat(3, 1))
        torch.testing.assert_close(packed(x, y, z)[0], apart(q, k, v)[0])


def kinds_of(pnet: nn.Module) -> dict[str, str]:
    return {o.name: layer_kind(o.module, o.attribute, tuple(o.tensor.shape)).name for o in parameter_infos(pnet)}


def selected(pnet: nn.Module) -> set[str]:
    return {name for name, kind in kinds_of(pnet).items() if KINDS[kind].selected}


def _legacy(norm: Callable[[nn.Module], nn.Module], layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return norm(layer)


NEW_V, NEW = {"parametrizations.weight.original1"}, {"parametrizations.weight.original"}


@pytest.mark.parametrize(
    ("pnet", "names"),
    [
        (nn.Linear(3, 4), {"weight"}),
        (Conv1D(3, 4), {"weight"}),
        (nn.Conv2d(3, 4, 3), {"weight"}),
        (nn.ConvTranspose2d(3, 4, 3), {"weight"}),
        (nn.Embedding(5, 3), set()),
        (nn.LayerNorm(3), set()),
        (nn.PReLU(), set()),
        (nn.Bilinear(3, 4, 5), set()),
        (nn.LSTM(3, 4), set()),
        (nn.MultiheadAttention(4, 2, add_bias_kv=True), {"in_proj_weight", "out_proj.weight"}),
        (
            nn.MultiheadAttention(4, 2, kdim=3, vdim=5),
            {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"},
        ),
        (
            nn.TransformerDecoderLayer(4, 2, 8),
            {f"{a}.{w}" for a in ("self_attn", "multihead_attn") for w in ("in_proj_weight", "out_proj.weight")}
            | {"linear1.weight", "linear2.weight"},
        ),
        # The direction is generated, the magnitudes are direct: they are one number an output channel.
        (new.weight_norm(nn.Linear(3, 4)), NEW_V),
        (new.weight_norm(nn.ConvTranspose2d(3, 4, 3)), NEW_V),
        (
            new.weight_norm(nn.MultiheadAttention(4, 2), "in_proj_weight"),
            {"parametrizations.in_proj_weight.original1", "out_proj.weight"},
        ),
        (new.spectral_norm(nn.Linear(3, 4)), NEW),
        (new.orthogonal(nn.Linear(4, 4)), NEW),
        (_legacy(nn.utils.weight_norm, nn.Linear(3, 4)), {"weight_v"}),
        (_legacy(nn.utils.spectral_norm, nn.Linear(3, 4)), {"weight_orig"}),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else None,
)
def test_the_default_selection(pnet: nn.Module, names: set[str]) -> None:
    assert selected(pnet) == names
    assert selected(nn.ModuleDict({"inner": pnet})) == {f"inner.{n}" for n in names}


def test_kinds_of_what_is_not_selected() -> None:
    assert kinds_of(nn.Embedding(5, 3)) == {"weight": "embedding"}
    assert kinds_of(nn.LSTM(3, 4))["weight_ih_l0"] == "matrix"
    assert kinds_of(nn.LSTM(3, 4))["bias_ih_l0"] == "vector"
    assert kinds_of(nn.LayerNorm([3, 4])) == {"weight": "matrix", "bias": "matrix"}
    assert kinds_of(nn.PReLU(1)) == {"weight": "vector"}


def test_subclasses_are_claimed_and_other_matrices_are_not() -> None:
    layer, lookalike = type("Wide", (nn.Linear,), {})(3, 4), nn.Module()
    for module, name in ((layer, "adapter"), (lookalike, "weight")):
        module.register_parameter(name, nn.Parameter(torch.zeros(4, 3)))
    assert kinds_of(layer) == {"weight": "linear", "bias": "vector", "adapter": "matrix"}
    assert kinds_of(lookalike) == {"weight": "matrix"}
