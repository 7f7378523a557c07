"""ReLU tile kernels and row blocks: float64 oracles, derivatives of every order and mode, transforms, memory."""

from __future__ import annotations

import shutil
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gbfunc.kernels import chunked_apply, relu_tiles
from gbfunc.kernels import compiled as compiled_module
from gbfunc.kernels.eager import eager_sums, eager_tiles
from gbfunc.kernels.relu_tile import COMPILE_WORK
from gbfunc.types import Kernel

Shape = tuple[int, int, int, int]

# Forward mode and Inductor import parts of torch that torch itself deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
NEEDS_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on the path"
)
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(1, 7), st.integers(1, 5))
SEEDS = st.integers(0, 2**32)


def draw(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Cotangent [T, r, c], A [T, r, H], B [T, c, H] and v [T, H] for a shape (T, r, c, H)."""
    tiles, rows, cols, hidden = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = ((tiles, rows, cols), (tiles, rows, hidden), (tiles, cols, hidden), (tiles, hidden))
    g, A, B, v = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return g, A, B, v


def oracle(g: Tensor, A: Tensor, B: Tensor, v: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Tiles and gradients of A, B and v in float64, term by term, and the sums of the terms' sizes."""
    g, A, B, v = (x.double() for x in (g, A, B, v))
    results = [torch.zeros_like(x) for x in (g, A, B, v)]
    sizes = [torch.zeros_like(x) for x in (g, A, B, v)]
    (tiles, rows, hidden), cols = A.shape, B.shape[1]
    for t in range(tiles):
        for i in range(rows):
            for j in range(cols):
                for h in range(hidden):
                    a, b = A[t, i, h], B[t, j, h]
                    if a + b <= 0:
                        continue
                    terms = (
                        ((t, i, j), v[t, h] * (a + b), v[t, h] * (a + b)),
                        ((t, i, h), g[t, i, j] * v[t, h], g[t, i, j] * v[t, h]),
                        ((t, j, h), g[t, i, j] * v[t, h], g[t, i, j] * v[t, h]),
                        # The backward pass sums the parts of a and of b apart, which may cancel.
                        ((t, h), g[t, i, j] * (a + b), g[t, i, j] * (a.abs() + b.abs())),
                    )
                    for (index, term, size), result, total in zip(terms, results, sizes, strict=True):
                        result[index] += term
                        total[index] += size.abs()
    return results, sizes


def check(found: list[Tensor], case: tuple[Tensor, Tensor, Tensor, Tensor], relative: float) -> None:
    results, sizes = oracle(*case)
    for x, result, size in zip(found, results, sizes, strict=True):
        assert x.dtype == case[0].dtype
        assert ((x.double() - result).abs() <= relative * size).all()


def with_gradients(case: tuple[Tensor, Tensor, Tensor, Tensor], kernel: Kernel) -> list[Tensor]:
    """Tiles and the gradients of A, B and v."""
    leaves = [x.clone().requires_grad_() for x in case[1:]]
    tiles = relu_tiles(*leaves, kernel=kernel)
    return [tiles.detach(), *torch.autograd.grad(tiles, leaves, case[0])]


# --- every form agrees with the definition -------------------------------------------------------------------------


@given(SHAPES, SEEDS, st.sampled_from(["reference", "eager", "auto"]))
def test_values_and_gradients_equal_the_oracle(shape: Shape, seed: int, kernel: Kernel) -> None:
    case = draw(shape, seed, torch.float32)
    check(with_gradients(case, kernel), case, 1e-5)


@given(SHAPES, SEEDS, st.sampled_from([torch.bfloat16, torch.float16]), st.sampled_from(["reference", "eager"]))
def test_half_precisions_round_once(shape: Shape, seed: int, dtype: torch.dtype, kernel: Kernel) -> None:
    case = draw(shape, seed, dtype)
    found = with_gradients(case, kernel)
    if kernel == "reference":  # autograd also rounds the gradient of each cast
        check(found, case, 2 * torch.finfo(dtype).eps)
    else:
        check(found, case, torch.finfo(dtype).eps)


@given(SHAPES, SEEDS, st.integers(1, 30))
def test_blocks_of_any_size_give_the_same_tiles_and_sums(shape: Shape, seed: int, block: int) -> None:
    g, A, B, v = case = draw(shape, seed, torch.float32)
    SA, SB = eager_sums(g, A, B, block)
    dv = (A * SA).sum(1) + (B * SB).sum(1)
    check([eager_tiles(A, B, v, block), SA * v.unsqueeze(1), SB * v.unsqueeze(1), dv], case, 1e-5)


@pytest.mark.parametrize("shape", [(40, 30, 35, 30), (1, 1100, 1000, 2)], ids=["tiles", "rows"])
def test_large_cases_take_several_blocks(shape: Shape) -> None:
    case = draw(shape)
    for found, expected in zip(with_gradients(case, "eager"), with_gradients(case, "reference"), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_eager_takes_non_contiguous_inputs() -> None:
    g, A, B, v = draw((3, 4, 5, 6))
    strided = (g.mT.contiguous().mT, A.mT.contiguous().mT, B.flip(0).flip(0), v.T.contiguous().T)
    for found, expected in zip(with_gradients(strided, "eager"), with_gradients((g, A, B, v), "eager"), strict=True):
        torch.testing.assert_close(found, expected)


# --- derivatives of every order and mode, and transforms -----------------------------------------------------------


def test_derivatives_equal_finite_differences() -> None:
    leaves = tuple(x.requires_grad_() for x in draw((2, 3, 4, 3))[1:])

    def tiles(*x: Tensor) -> Tensor:
        return relu_tiles(*x, kernel="eager")

    assert torch.autograd.gradcheck(tiles, leaves, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(tiles, leaves, check_fwd_over_rev=True)


def relu_objective(kernel: Kernel) -> Callable[..., Tensor]:
    return lambda A, B, v: relu_tiles(A, B, v, kernel=kernel).square().sum()


def _nested(f: Callable[..., Tensor]) -> Callable[..., Any]:
    inner = torch.vmap(grad(f, (0, 1, 2)), in_dims=(0, None, None))
    return torch.vmap(inner, in_dims=(None, 0, 0))


def _mixed_dims(f: Callable[..., Tensor]) -> Callable[..., Any]:
    return lambda A, B, v: torch.vmap(grad(f, (0, 1, 2)), (2, 1, None))(A.permute(1, 2, 0), B.transpose(0, 1), v[0])


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "vmap": torch.vmap,
    "grad": lambda f: grad(f, (0, 1, 2)),
    "vmap of grad": lambda f: torch.vmap(grad(f, (0, 1, 2))),
    "grad of vmap": lambda f: grad(lambda *x: torch.vmap(f)(*x).sum(), (0, 1, 2)),
    "nested vmap": _nested,
    "vmap over other dimensions": _mixed_dims,
    "jvp of grad": lambda f: lambda *x: jvp(grad(f, (0, 1, 2)), x, tuple(y + 1 for y in x)),
    "jvp of vmap of grad": lambda f: lambda *x: jvp(torch.vmap(grad(f, (0, 1, 2))), x, tuple(y + 1 for y in x)),
    "hessian": lambda f: hessian(f, (0, 1, 2)),
    "forward over forward": lambda f: jacfwd(jacfwd(f, (0, 2)), (0, 2)),
    "reverse over reverse": lambda f: jacrev(jacrev(f, (0, 2)), (0, 2)),
    "third order": lambda f: lambda *x: jvp(hessian(f, 2), x, tuple(y - 1 for y in x)),
}
FIRST_ORDER = ("vmap", "grad", "vmap of grad", "grad of vmap")


def assert_trees_close(found: Any, expected: Any) -> None:
    for x, y in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_agree_with_those_of_the_reference(name: str) -> None:
    transform, leaves = TRANSFORMS[name], draw((2, 3, 4, 3))[1:]
    assert_trees_close(transform(relu_objective("eager"))(*leaves), transform(relu_objective("reference"))(*leaves))


@pytest.mark.parametrize("name", FIRST_ORDER)
def test_compiled_programs_may_contain_the_kernel(name: str) -> None:
    transform, leaves = TRANSFORMS[name], draw((2, 3, 4, 3))[1:]
    program = torch.compile(transform(relu_objective("auto")), fullgraph=True, backend="aot_eager")
    assert_trees_close(program(*leaves), transform(relu_objective("reference"))(*leaves))


# --- the compiled form ---------------------------------------------------------------------------------------------


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("shape", "dtype", "relative"),
    [
        ((1, 1, 1, 1), torch.float32, 1e-5),
        ((3, 19, 17, 5), torch.float32, 1e-5),
        ((3, 18, 5, 4), torch.bfloat16, torch.finfo(torch.bfloat16).eps),
    ],
)
def test_compiled_form_equals_the_oracle(shape: Shape, dtype: torch.dtype, relative: float) -> None:
    case = draw(shape, 1, dtype)
    check(with_gradients(case, "compiled"), case, relative)


@NEEDS_COMPILER
def test_compiled_form_under_transforms() -> None:
    leaves = draw((2, 3, 4, 3))[1:]
    for name in (*FIRST_ORDER, "jvp of grad"):
        transform = TRANSFORMS[name]
        expected = transform(relu_objective("reference"))(*leaves)
        assert_trees_close(transform(relu_objective("compiled"))(*leaves), expected)


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
    _, A, B, v = draw((7, 160, 151, 100), dtype=torch.float32)
    assert A.numel() * B.shape[1] >= COMPILE_WORK
    with pytest.warns(RuntimeWarning, match="install a C\\+\\+ compiler") as caught:
        found = relu_tiles(A, B, v)
        again = relu_tiles(A[:, 1:], B, v)
    assert sum(w.category is RuntimeWarning for w in caught) == 1
    torch.testing.assert_close(found, relu_tiles(A, B, v, kernel="eager"), rtol=0, atol=0)
    torch.testing.assert_close(again, found[:, 1:], rtol=1e-5, atol=1e-4)
    with pytest.raises(Exception, match="no-such-compiler|InvalidCxxCompiler|C\\+\\+ compiler"):
        relu_tiles(A[:, 2:], B, v, kernel="compiled")


# --- row blocks of any g-net ---------------------------------------------------------------------------------------


def upper(pre: Tensor, params: dict[str, Tensor]) -> Tensor:
    x = torch.tanh(torch.relu(pre) @ params["weight"].mT + params["bias"])
    return x @ params["head"] + params["offset"]


def deep_case(rows: int, cols: int, hidden: int, seed: int = 0) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    params = {"weight": normal(4, hidden), "bias": normal(4), "head": normal(4), "offset": normal()}
    return normal(rows, hidden), normal(cols, hidden), params


def whole(A: Tensor, B: Tensor, params: dict[str, Tensor]) -> Tensor:
    return upper(A.unsqueeze(-2) + B, params)


def chunked(max_bytes: int) -> Callable[..., Tensor]:
    return lambda A, B, params: chunked_apply(upper, A, B, params, max_bytes=max_bytes)


@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5000), SEEDS)
def test_chunks_of_any_size_give_the_same_values_and_gradients(
    rows: int, cols: int, hidden: int, max_bytes: int, seed: int
) -> None:
    case = deep_case(rows, cols, hidden, seed)
    assert_trees_close(chunked(max_bytes)(*case), whole(*case))
    derivative = [grad(lambda *x, f=f: f(*x).square().sum(), (0, 1, 2))(*case) for f in (chunked(max_bytes), whole)]
    assert_trees_close(*derivative)


def population(f: Callable[..., Any]) -> Callable[..., Any]:
    """A vmap over three g-nets that share the columns."""

    def run(A: Tensor, B: Tensor, params: dict[str, Tensor]) -> Any:
        scales = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
        return torch.vmap(lambda s: f(A * s, B, {k: p + s for k, p in params.items()}))(scales)

    return run


DEEP_TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "vmap": population,
    "vmap of grad": lambda f: population(grad(lambda *x: f(*x).square().sum(), (0, 1, 2))),
    "grad of vmap": lambda f: grad(lambda *x: population(f)(*x).square().sum(), (0, 1, 2)),
    "forward mode": lambda f: jacfwd(f, (0, 1, 2)),
    "hessian": lambda f: hessian(lambda *x: f(*x).square().sum(), (0, 1, 2)),
    "reverse over reverse": lambda f: jacrev(jacrev(lambda *x: f(*x).square().sum(), (0, 2)), (0, 2)),
}


@pytest.mark.parametrize("name", DEEP_TRANSFORMS)
def test_chunks_under_transforms(name: str) -> None:
    transform, case = DEEP_TRANSFORMS[name], deep_case(5, 3, 2)
    assert_trees_close(transform(chunked(400))(*case), transform(whole)(*case))


@pytest.mark.parametrize("name", ["vmap", "vmap of grad", "grad of vmap"])
def test_compiled_programs_may_contain_chunks(name: str) -> None:
    transform, case = DEEP_TRANSFORMS[name], deep_case(5, 3, 2)
    program = torch.compile(transform(chunked(400)), fullgraph=True, backend="aot_eager")
    assert_trees_close(program(*case), transform(whole)(*case))


def test_chunks_ignore_autocast() -> None:
    A, B, params = deep_case(5, 3, 2)
    leaves = [A.float().requires_grad_(), B.float().requires_grad_()]
    rest = {name: p.float() for name, p in params.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tile = chunked(400)(*leaves, rest)
    assert tile.dtype == torch.float32
    expected = whole(*leaves, rest)
    torch.testing.assert_close(tile, expected)
    torch.testing.assert_close(
        torch.autograd.grad(tile.sum(), leaves), torch.autograd.grad(expected.sum(), leaves), rtol=1e-5, atol=1e-5
    )


# --- memory --------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the memory of the tensors that operations make, and its peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: dict[int, int] = {}

    def _freed(self, pointer: int) -> None:
        self.live -= self.seen.pop(pointer)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.seen:
                storage = x.untyped_storage()
                self.seen[storage.data_ptr()] = storage.nbytes()
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, storage.data_ptr())
        return out


def peak_of(run: Callable[[], Any]) -> int:
    with LiveBytes() as counter:
        run()
    return counter.peak


def test_memory_of_the_relu_tile_is_that_of_its_weights() -> None:
    case = draw((40, 100, 100, 32), dtype=torch.float32)
    block, weights = 2**20 * 4, case[0].nbytes
    assert peak_of(lambda: with_gradients(case, "eager")) <= 4 * weights + 2 * block
    assert peak_of(lambda: with_gradients(case, "reference")) > 30 * weights


@pytest.mark.parametrize("n_gnets", [1, 6])
def test_memory_of_chunks_is_bounded(n_gnets: int) -> None:
    A, B, params = deep_case(120, 100, 8)
    stacked = (A.expand(n_gnets, -1, -1), B, {k: p.expand(n_gnets, *p.shape) for k, p in params.items()})
    max_bytes = 2**18
    weights = n_gnets * 120 * 100 * 8

    def run(f: Callable[..., Tensor]) -> Any:
        leaves = tuple(x.detach().clone().requires_grad_() for x in tree_leaves(stacked))
        tiles = torch.vmap(f, (0, None, 0))(leaves[0], leaves[1], dict(zip(params, leaves[2:], strict=True)))
        return torch.autograd.grad(tiles, leaves, torch.ones_like(tiles))

    assert peak_of(lambda: run(chunked(max_bytes))) <= 3 * weights + 2 * max_bytes
    assert peak_of(lambda: run(whole)) > 20 * weights


# --- what is refused -----------------------------------------------------------------------------------------------


def test_relu_tiles_say_what_they_expect() -> None:
    _, A, B, v = draw((2, 3, 4, 5))
    with pytest.raises(ValueError, match="kernel must be one of .* got 'fast'"):
        relu_tiles(A, B, v, kernel="fast")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"got \[2, 3, 5\], \[2, 4, 4\] and \[2, 5\]"):
        relu_tiles(A, B[..., 1:], v)
    with pytest.raises(ValueError, match="equal leading dimensions"):
        relu_tiles(A, B[:1], v)
    with pytest.raises(ValueError, match="v \\[..., H\\]"):
        relu_tiles(A, B, v[:, 1:])
    with pytest.raises(TypeError, match="torch.float64, torch.float32 and torch.float64"):
        relu_tiles(A, B.float(), v)
    with pytest.raises(TypeError, match="floating-point"):
        relu_tiles(A.long(), B.long(), v.long())


def test_chunked_apply_says_what_it_expects() -> None:
    A, B, params = deep_case(3, 4, 2)
    with pytest.raises(ValueError, match=r"got \[3, 1\] and \[4, 2\]"):
        chunked_apply(upper, A[:, 1:], B, params)
    with pytest.raises(ValueError, match="max_bytes must be positive, got 0"):
        chunked_apply(upper, A, B, params, max_bytes=0)
    with pytest.raises(ValueError, match=r"fn must return weights \[3, 4\], got \[3, 4, 2\]"):
        chunked_apply(lambda pre, _: pre, A, B, params)
