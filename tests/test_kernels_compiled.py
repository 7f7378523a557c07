"""The compiled form of the ReLU tile, and what happens where there is no compiler."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_cases import FIRST_ORDER, TRANSFORMS, Shape, check, draw, relu_objective, with_gradients
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves

from gbfunc.kernels import compiled as compiled_module
from gbfunc.kernels import relu_tiles
from gbfunc.kernels.relu_tile import COMPILE_WORK

# Forward mode and Inductor import parts of torch that torch itself deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on the path"
)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("shape", "dtype", "relative"),
    [
        ((1, 1, 1, 1), torch.float32, 1e-5),
        ((3, 19, 17, 5), torch.float32, 1e-5),
        ((2, 9, 6, 32), torch.float32, 1e-5),
        ((3, 18, 5, 4), torch.bfloat16, torch.finfo(torch.bfloat16).eps),
    ],
)
def test_compiled_form_equals_the_oracle(shape: Shape, dtype: torch.dtype, relative: float) -> None:
    case = draw(shape, 1, dtype)
    check(with_gradients(case, "compiled"), case, relative)


@NEEDS_COMPILER
def test_compiled_form_under_transforms() -> None:
    leaves = draw((3, 19, 17, 5), dtype=torch.float32)[1:]
    for name in (*FIRST_ORDER, "jvp of grad"):
        transform = TRANSFORMS[name]
        expected = transform(relu_objective("reference"))(*(x.double() for x in leaves))
        for x, y in zip(
            tree_leaves(transform(relu_objective("compiled"))(*leaves)), tree_leaves(expected), strict=True
        ):
            assert (x - y).abs().max() <= 1e-5 * y.abs().max()


@pytest.mark.parametrize("without_memory", [FakeTensorMode(), torch.device("meta")], ids=["fake", "meta"])
def test_tensors_without_memory_stay_out_of_compiled_programs(without_memory: Any) -> None:
    with without_memory:
        shapes = ((2, 3, 5), (2, 4, 5), (2, 5), (2,))
        leaves = tuple(torch.ones(s, requires_grad=True) for s in shapes)
        tiles = relu_tiles(*leaves, kernel="compiled")
        gradients = torch.autograd.grad(tiles.sum(), leaves)
    assert tiles.shape == (2, 3, 4)
    assert [x.shape for x in gradients] == [x.shape for x in leaves]


@pytest.fixture
def no_compiler() -> Iterator[None]:
    """A process in which `torch.compile` finds no C++ compiler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import torch._inductor.compile_fx  # noqa: F401
    from torch._inductor import config

    caches = (compiled_module.working_forms, compiled_module._has_compiler)
    for cached in caches:
        cached.cache_clear()
    with config.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}):
        yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_auto_falls_back_with_one_warning() -> None:
    _, A, B, v, b = draw((7, 160, 151, 100), dtype=torch.float32)
    assert A.numel() * B.shape[1] >= COMPILE_WORK
    with pytest.warns(RuntimeWarning, match="install a C\\+\\+ compiler") as caught:
        found = relu_tiles(A, B, v, b)
        again = relu_tiles(A[:, 1:], B, v, b)
    assert sum(w.category is RuntimeWarning for w in caught) == 1
    torch.testing.assert_close(found, relu_tiles(A, B, v, b, kernel="eager"), rtol=0, atol=0)
    torch.testing.assert_close(again, found[:, 1:], rtol=1e-5, atol=1e-4)
    with pytest.raises(Exception, match="no-such-compiler|InvalidCxxCompiler|C\\+\\+ compiler"):
        relu_tiles(A[:, 2:], B, v, b, kernel="compiled")
