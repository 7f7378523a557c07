"""A g-net from any `nn.Module`, by `torch.func.stack_module_state` and `torch.func.functional_call`."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from threading import get_ident
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from gbfunc.hypernets.base import Hypernet, Leaf
from gbfunc.hypernets.kernels.operation import chunked_apply
from gbfunc.types import Params, TileDims

Factory = Callable[[int], nn.Module]

_GAIN, _SHIFT = "gain", "shift"


def _build(factory: Factory, width: int, seed: int, device: str = "cpu") -> nn.Module:
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.device(device):
        # Hide torch's warning about empty parameters: codes have width 0 if a tile has a single weight.
        warnings.filterwarnings("ignore", "Initializing zero-element tensors is a no-op", UserWarning)
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float32)
        try:
            return factory(width)
        finally:
            torch.set_default_dtype(default)


# Every thread has its own copy of the module, because `functional_call` replaces the copy's weights during a call.
@lru_cache(maxsize=64)
def _skeleton(factory: Factory, width: int, thread: int) -> nn.Module:
    return _build(factory, width, 0, "meta")


@dataclass(frozen=True)
class FromModule(Hypernet):
    """A g-net from any module: `factory(width)` builds an `nn.Module` that maps [..., width] -> [..., 1].

    The input is the code of a weight's row, followed by the code of its column. Two more parameters are trained per
    tile, a gain and a shift of the output.

    Args:
        factory: builds the module. To save a genome, the factory must be importable by name. To load a genome, pass the
            factory to `gb.load`.

    Raises:
        TypeError: if the factory is not callable.
        ValueError: if the factory does not build a module with one output, or if the module has buffers, draws random
            numbers in its forward, has a frozen parameter, or has a parameter named gain or shift.
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
            raise ValueError("a g-net module must have no buffers: remove layers such as batch norm")
        if {_GAIN, _SHIFT} & module.state_dict().keys():
            raise ValueError(f"a g-net module must not have parameters called {_GAIN!r} or {_SHIFT!r}: rename them")
        if frozen := [name for name, p in module.state_dict(keep_vars=True).items() if not p.requires_grad]:
            raise ValueError(f"all parameters of a g-net are trained, but {frozen} are frozen: unfreeze or remove them")
        try:
            out = vmap(module)(torch.empty(1, 3, 2, device="meta"))[0]
        except RuntimeError as error:
            if "random" not in str(error):
                raise
            raise ValueError("a g-net module must draw no random numbers: remove layers such as dropout") from error
        if tuple(out.shape) != (3, 1):
            raise ValueError(f"the factory's module must map [..., width] to [..., 1]; [3, 2] gave {list(out.shape)}")

    def leaves(self, dims: TileDims) -> dict[str, Leaf]:
        """Return the module's parameters, and the gain and shift of the output."""
        parameters = _skeleton(self.factory, dims.row_width + dims.col_width, get_ident()).named_parameters()
        leaves = {name: Leaf(tuple(p.shape), "code") for name, p in parameters}
        return leaves | {_GAIN: Leaf((), "linear"), _SHIFT: Leaf((), "linear")}

    def init(self, dims: TileDims, n_tiles: int, n_groups: int, generator: torch.Generator) -> Params:
        width = dims.row_width + dims.col_width
        seeds = torch.randint(0, 2**62, (n_tiles,), generator=generator, dtype=torch.int64, device="cpu").tolist()
        drawn, _ = stack_module_state([_build(self.factory, width, seed) for seed in seeds])
        gains = torch.ones(n_tiles, dtype=torch.float32, device="cpu")
        own = {_GAIN: gains, _SHIFT: torch.zeros_like(gains)}
        return {name: leaf.detach().float() for name, leaf in drawn.items()} | own

    def tiles(self, leaves: Params, row_Urp: Tensor, col_Ucq: Tensor, *unused: Any) -> Tensor:
        """Apply the module to the codes of every weight, in blocks of rows; returns [tiles, rows, columns]."""
        p, q = row_Urp.shape[-1], col_Ucq.shape[-1]
        skeleton, inner = _skeleton(self.factory, p + q, get_ident()), dict(leaves)
        gain, shift = (inner.pop(name)[:, None, None] for name in (_GAIN, _SHIFT))
        # `chunked_apply` adds both arguments, and [row code, 0] + [0, column code] is the concatenation of the codes.
        a, b = (x.expand(len(gain), -1, -1) for x in (F.pad(row_Urp, (0, q)), F.pad(col_Ucq, (p, 0))))
        tiles = chunked_apply(lambda x, params: functional_call(skeleton, params, (x,))[..., 0], a, b, inner)
        return tiles * gain + shift

    def to_json(self) -> dict[str, Any]:
        """Describe the factory by its import path; raises ValueError for a lambda or a local function."""
        path = f"{getattr(self.factory, '__module__', '')}:{getattr(self.factory, '__qualname__', '')}"
        if "<" in path or path.startswith(":") or path.endswith(":"):
            raise ValueError(f"from_module's factory must be importable by name to be saved, got {self.factory!r}")
        return {"type": self.type, "factory": path}


from_module = FromModule
