"""Hypothesis strategies: matrix shapes, tile grids, encodings, hypernetworks, layers and p-nets."""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.encoding import Encoding
from gbfunc.hypernets import Hypernet


def linear_end(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 1))


def bounded_end(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 1), nn.Tanh())


class Net(nn.Module):
    """Parts and buffers by name, with a forward that is given: `use(net, *inputs)`."""

    def __init__(self, use: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.use = use
        for name, part in parts.items():
            self.register_buffer(name, part) if type(part) is Tensor else setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.use(self, *args, **kwargs)


class Conv1D(nn.Module):
    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


EXAMPLES: Mapping[str, tuple[Hypernet, ...]] = MappingProxyType(
    {
        "periodic": (
            *(gb.periodic(1), gb.periodic(5), gb.periodic(3, "layers"), gb.periodic(4, "layers", frequency=1.5)),
            *(gb.periodic(3, "shapes"), gb.periodic(2, frequency=(0.5, 2.0))),
        ),
        "bilinear": (gb.bilinear(1), gb.bilinear(3, "shapes"), gb.bilinear(2, frequency=(0.5, 2.0))),
        "constant": (gb.constant(), gb.constant(-0.25)),
        "gnet": (
            *(gb.gnet((2,)), gb.gnet((7,)), gb.gnet((4, 3))),
            *(gb.gnet((3,), "tanh"), gb.gnet((3, 4, 2), "gelu"), gb.gnet((4,), "sin")),
        ),
        "stochastic": (gb.stochastic((5,)), gb.stochastic((4, 3), "tanh")),
        "low_rank": (gb.low_rank(1), gb.low_rank(3), gb.low_rank(2, "layers")),
        "xox": (gb.xox(1), gb.xox(3)),
        "new_rows": (gb.new_rows(1),),
        "module": (gb.from_module(linear_end), gb.from_module(bounded_end)),
    }
)
"""Hypernetworks of every type; the contract tests run over all of them."""

FACTORIES = (linear_end, bounded_end)
"""What `Plan.from_json` and `load` need for the examples."""


def named(value: object) -> str:
    """A test's name of a parameter, without addresses: every process of pytest-xdist must give the same."""
    return re.sub(r" at 0x\w+", "", str(value))


ALL_EXAMPLES = [h for examples in EXAMPLES.values() for h in examples]


def matrices(most: int = 40) -> st.SearchStrategy[tuple[int, int]]:
    side = st.integers(1, most)
    return st.tuples(side, side)


def max_tiles(most: int = 45) -> st.SearchStrategy[int | tuple[int, int] | None]:
    side = st.integers(1, most)
    return st.one_of(st.none(), side, st.tuples(side, side))


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def grid_dims(draw: st.DrawFn, n: int) -> tuple[int, ...]:
    dims = []
    while n > 1 and len(dims) < 3 and draw(st.booleans()):
        dims.append(draw(st.sampled_from(divisors(n))))
        n //= dims[-1]
    return (*dims, n)


@st.composite
def encodings(draw: st.DrawFn, n: int, nested: bool = True) -> Encoding:
    simple = {"binary": gb.binary, "gray": gb.gray, "one_hot": gb.one_hot}
    kind: str = draw(st.sampled_from([*simple, "grid", "table", *(["per_axis"] if nested else [])]))
    if kind == "table":
        numbers = np.random.default_rng(n).normal(size=(n, draw(st.integers(1, 3))))
        numbers[:, 0] = np.random.default_rng(n).permutation(n) / 8  # Distinct, also in float16
        return gb.table(draw(st.sampled_from([np.arange(n)[:, None], numbers, numbers.astype(np.float16)])))
    if kind == "grid":
        code: Any = draw(st.sampled_from(["coordinate", "gray", "binary"]))
        return gb.grid(*draw(grid_dims(n)), code=code, bandwidth=draw(st.sampled_from([0.5, 2.0, 6.0])))
    if kind == "per_axis":
        positions = draw(st.sampled_from(divisors(n)))
        inner = draw(encodings(n // positions, False)), draw(encodings(positions, False))
        return gb.per_axis(*inner, positions)
    return simple[kind]()


class LayerCase(NamedTuple):
    module: nn.Module
    attribute: str
    kind: str

    @property
    def weight(self) -> Tensor:
        return getattr(self.module, self.attribute).detach()


def _convolution(transposed: bool, sizes: Sequence[int], kernel: Sequence[int], groups: int) -> nn.Module:
    plain: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    turned: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    layer = (turned if transposed else plain)[len(kernel) - 1]
    return layer(sizes[0] * groups, sizes[1] * groups, tuple(kernel), groups=groups, bias=False)


@st.composite
def layers(draw: st.DrawFn) -> LayerCase:
    torch.default_generator.manual_seed(draw(st.integers(0, 99)))
    small = st.integers(1, 6)
    kind = draw(
        st.sampled_from(
            ["linear", "transposed_linear", "conv", "conv_transpose", "attention_in", "attention", "embedding"]
            + ["vector", "matrix"]
        )
    )
    n, m = draw(small), draw(small)
    if kind in ("conv", "conv_transpose"):
        kernel = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        module = _convolution(kind == "conv_transpose", (n, m), kernel, draw(st.integers(1, 3)))
        return LayerCase(module, "weight", kind)
    if kind == "attention_in":
        return LayerCase(nn.MultiheadAttention(n * m, n), "in_proj_weight", kind)
    if kind == "attention":
        module = nn.MultiheadAttention(n * m, n, kdim=n * m + 1, vdim=draw(small))
        return LayerCase(module, draw(st.sampled_from(["q", "k", "v"])) + "_proj_weight", kind)
    if kind == "vector":
        return LayerCase(draw(st.sampled_from([nn.LayerNorm(n), nn.PReLU()])), "weight", kind)
    simple: dict[str, Callable[[], nn.Module]] = {
        "linear": lambda: nn.Linear(n, m),
        "transposed_linear": lambda: Conv1D(n, m),
        "embedding": lambda: nn.Embedding(n, m),
        "matrix": lambda: nn.Bilinear(n, m, draw(small)),
    }
    return LayerCase(simple[kind](), "weight", kind)


@st.composite
def mlps(draw: st.DrawFn, most: int = 120) -> nn.Sequential:
    torch.default_generator.manual_seed(draw(st.integers(0, 99)))
    sizes = draw(st.lists(st.integers(1, most), min_size=2, max_size=4))
    modules: list[nn.Module] = []
    for n, m in zip(sizes, sizes[1:], strict=False):
        modules += [nn.Linear(n, m, bias=draw(st.booleans())), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


@st.composite
def convnets(draw: st.DrawFn, most: int = 24) -> nn.Sequential:
    torch.default_generator.manual_seed(draw(st.integers(0, 99)))
    a, b, groups = draw(st.integers(1, most)), draw(st.integers(1, most)), draw(st.integers(1, 2))
    return nn.Sequential(
        nn.Conv2d(3, a * groups, draw(st.sampled_from([1, 3, (3, 5)]))),
        nn.BatchNorm2d(a * groups),
        nn.Conv2d(a * groups, b * groups, 3, groups=groups),
        nn.Flatten(),
        nn.Linear(b * groups * 4, 10),
    )


def pnets() -> st.SearchStrategy[nn.Module]:
    return st.one_of(mlps(), convnets())
