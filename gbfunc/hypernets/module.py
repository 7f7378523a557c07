"""A g-net from any `nn.Module`: stacked by `torch.func.stack_module_state`, called by `torch.func.functional_call`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from threading import get_ident
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from gbfunc.hypernets.base import Hypernet, Leaf
from gbfunc.hypernets.kernels import chunked_apply
from gbfunc.types import Params, TileDims

Factory = Callable[[int], nn.Module]

_GAIN, _SHIFT = "gain", "shift"


def _build(factory: Factory, width: int, seed: int, device: str = "cpu") -> nn.Module:
    """A module drawn from a seed, in float32; torch's generator and defaults do not change."""
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.device(device):
        # A tile of one weight has codes of width 0.
        warnings.filterwarnings("ignore", "Initializing zero-element tensors is a no-op", UserWarning)
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        try:
            return factory(width)
        finally:
            torch.set_default_dtype(default)


@lru_cache(maxsize=64)
def _skeleton(factory: Factory, width: int, thread: int) -> nn.Module:
    """The module without its weights, one per thread, as `functional_call` swaps weights in and out."""
    return _build(factory, width, 0, "meta")


@lru_cache(maxsize=64)
def _linear_leaves(factory: Factory, width: int) -> frozenset[str]:
    """Parameters of the `nn.Linear` of one output that ends the module; empty if an operation follows the layer."""
    module = _build(factory, width, 0)
    weights = {name: p.detach().double() for name, p in module.named_parameters()}
    random = partial(torch.randn, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float64, device="cpu")
    x = random(8, width)
    heads = [n for n, m in module.named_modules() if isinstance(m, nn.Linear) and m.out_features == 1]
    names = [n for n in weights if heads and n.rpartition(".")[0] == heads[-1]]
    u, v = ({n: random(weights[n].shape) for n in names} for _ in range(2))

    def end(values: Params) -> Tensor:
        return functional_call(module, weights | values, (x,))

    # Only the forward pass shows whether something follows the layer.
    with torch.no_grad():
        got, expected = end({n: v[n] - 2 * u[n] for n in names}), end(v) - 2 * end(u)
    return frozenset(names) if torch.allclose(got, expected, rtol=1e-9, atol=1e-9) else frozenset()


@dataclass(frozen=True)
class FromModule(Hypernet):
    """A g-net from any module: `factory(width)` builds an `nn.Module` that maps [..., width] -> [..., 1].

    The input is the row code followed by the column code of a weight. `init` rescales an `nn.Linear` of one output that
    ends the module; other g-nets get a learned gain and shift (two parameters per tile, counted).

    Args:
        factory: builds the module. To save a genome, the factory must be importable by name; `load` takes the factory
            again.

    Raises:
        TypeError: if the factory is not callable.
        ValueError: if the factory does not build a module of one output, or the module has buffers, draws random
            numbers in its forward, has a frozen parameter, or a parameter named gain or shift.
    """

    factory: Factory
    type: ClassVar[str] = "module"
    sizable: ClassVar[bool] = False
    rate: ClassVar[float] = 3e-3
    spreads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.factory):
            raise TypeError(f"from_module expects a callable (width -> nn.Module), got {type(self.factory).__name__}")
        module = _skeleton(self.factory, 2, get_ident())
        if not isinstance(module, nn.Module):
            raise ValueError(f"the factory must return an nn.Module, got {type(module).__name__}")
        if any(True for _ in module.buffers()):
            raise ValueError("a g-net module must have no buffers (batch norm is out of place there)")
        if {_GAIN, _SHIFT} & module.state_dict().keys():
            raise ValueError(f"a g-net module must not have parameters called {_GAIN!r} or {_SHIFT!r}")
        if frozen := [name for name, p in module.state_dict(keep_vars=True).items() if not p.requires_grad]:
            raise ValueError(f"all parameters of a g-net are trained; the module's {frozen} are frozen")
        try:
            out = vmap(module)(torch.empty(1, 3, 2, device="meta"))[0]
        except RuntimeError as error:
            if "random" not in str(error):
                raise
            raise ValueError("a g-net module must draw no random numbers (dropout is out of place there)") from error
        if tuple(out.shape) != (3, 1):
            raise ValueError(f"the factory's module must map [..., width] to [..., 1]; [3, 2] gave {list(out.shape)}")

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        """The module's parameters; also a gain and a shift, unless the module's end is linear."""
        width = dims.row_width + dims.col_width
        linear = _linear_leaves(self.factory, width)
        parameters = _skeleton(self.factory, width, get_ident()).named_parameters()
        leaves = {k: Leaf(tuple(p.shape), "linear" if k in linear else "code") for k, p in parameters}
        return leaves if linear else leaves | {_GAIN: Leaf((), "linear"), _SHIFT: Leaf((), "linear")}

    def init(self, dims: TileDims, n_tiles: int, n_groups: int, generator: torch.Generator) -> Params:
        width = dims.row_width + dims.col_width
        seeds = torch.randint(0, 2**62, (n_tiles,), generator=generator, dtype=torch.int64, device="cpu").tolist()
        drawn, _ = stack_module_state([_build(self.factory, width, seed) for seed in seeds])
        drawn = {name: leaf.detach().float() for name, leaf in drawn.items()}
        if not _linear_leaves(self.factory, width):
            gains = torch.ones(n_tiles, dtype=torch.float32, device="cpu")
            drawn |= {_GAIN: gains, _SHIFT: torch.zeros_like(gains)}
        return drawn

    def tiles(self, leaves: Params, row_Urp: Tensor, col_Ucq: Tensor, *unused: Any) -> Tensor:
        """Apply the module to the codes of every weight, in chunks of rows; returns tiles [T, r, c]."""
        p, q, tiles = row_Urp.shape[-1], col_Ucq.shape[-1], len(next(iter(leaves.values())))
        skeleton = _skeleton(self.factory, p + q, get_ident())
        inner = {k: v for k, v in leaves.items() if k not in (_GAIN, _SHIFT)}
        # The joined codes are a sum: [row code, 0] + [0, column code].
        a, b = F.pad(row_Urp, (0, q)).expand(tiles, -1, -1), F.pad(col_Ucq, (p, 0)).expand(tiles, -1, -1)
        made = chunked_apply(lambda x, params: functional_call(skeleton, params, (x,))[..., 0], a, b, inner)
        if _GAIN not in leaves:
            return made
        return made * leaves[_GAIN][:, None, None] + leaves[_SHIFT][:, None, None]

    def to_json(self) -> dict[str, Any]:
        """Describe the factory by its import path; raises ValueError for a lambda or a local function."""
        path = f"{getattr(self.factory, '__module__', '')}:{getattr(self.factory, '__qualname__', '')}"
        if "<" in path or path.startswith(":") or path.endswith(":"):
            raise ValueError(f"from_module's factory must be importable by name to be saved, got {self.factory!r}")
        return {"type": self.type, "factory": path}


from_module = FromModule
