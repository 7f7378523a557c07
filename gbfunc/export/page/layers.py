"""A p-net of one's own as layers in a row, for a page: what `networks.js` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

Layer = list[Any]
"""A layer's name in `networks.js`, and its options: as JSON."""


def layers_in_a_row(pnet: nn.Module) -> list[Layer]:
    """Describe an `nn.Sequential`, nested or not, of the stock layers in `_LAYERS`, in evaluation mode.

    Raises `ValueError` for any other p-net, naming the module that has no description.
    """
    return list(_walk(pnet, "", {module: name for name, module in pnet.named_modules()}))


def _walk(module: nn.Module, name: str, names: Mapping[nn.Module, str]) -> Iterator[Layer]:
    if type(module).forward is nn.Sequential.forward:
        for child in module._modules.values():
            assert child is not None
            # Its first name, if it stands in two places: buffers have that one alone.
            yield from _walk(child, names[child], names)
        return
    describe = _LAYERS.get(type(module))
    hooked = bool(module._forward_hooks or module._forward_pre_hooks)
    if describe is None or hooked or not name:
        what = f"the p-net is of type {type(module).__name__}" if not name else f"{name!r} is {module}"
        what += ", with a hook" if hooked else ""
        known = ", ".join(kind.__name__ for kind in _LAYERS)
        raise ValueError(f"a page runs an nn.Sequential of {known} without hooks; {what}")
    layer = describe(module, name)
    if layer is None:
        raise ValueError(f"{name!r} is {module}, of which a page knows the usual options alone")
    if layer:
        yield layer


def _conv(conv: nn.Conv2d, name: str) -> Layer | None:
    padding = [0, 0] if conv.padding == "valid" else conv.padding
    if padding == "same":
        around = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        padding = None if any(n % 2 for n in around) else [n // 2 for n in around]
    if padding is None or conv.padding_mode != "zeros":
        return None
    return ["conv", name, list(conv.stride), list(padding), list(conv.dilation)]


def _norm(norm: nn.BatchNorm1d | nn.BatchNorm2d, name: str) -> Layer | None:
    return ["batch_norm", name, norm.eps] if norm.running_var is not None else None


def _layer_norm(norm: nn.LayerNorm, name: str) -> Layer | None:
    learnt = name if norm.elementwise_affine else None
    return ["layer_norm", learnt, norm.eps] if len(norm.normalized_shape) == 1 else None


def _max_pool(pool: nn.MaxPool2d, name: str) -> Layer | None:
    usual = not (pool.ceil_mode or pool.return_indices) and pool.dilation in (1, (1, 1))
    return ["max_pool", pool.kernel_size, pool.stride, pool.padding] if usual else None


def _avg_pool(pool: nn.AvgPool2d, name: str) -> Layer | None:
    padded = pool.padding not in (0, (0, 0)) and not pool.count_include_pad
    usual = not (pool.ceil_mode or pool.divisor_override or padded)
    return ["avg_pool", pool.kernel_size, pool.stride, pool.padding] if usual else None


_LAYERS: Mapping[type[nn.Module], Callable[[Any, str], Layer | None]] = {
    nn.Linear: lambda m, name: ["linear", name],
    nn.Conv2d: _conv,
    nn.BatchNorm1d: _norm,
    nn.BatchNorm2d: _norm,
    nn.LayerNorm: _layer_norm,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _avg_pool,
    nn.AdaptiveAvgPool2d: lambda m, name: ["means"] if m.output_size in (1, (1, 1)) else None,
    nn.Flatten: lambda m, name: ["flatten"] if (m.start_dim, m.end_dim) == (1, -1) else None,
    nn.ReLU: lambda m, name: ["relu"],
    nn.Tanh: lambda m, name: ["tanh"],
    nn.Sigmoid: lambda m, name: ["sigmoid"],
    nn.SiLU: lambda m, name: ["silu"],
    nn.GELU: lambda m, name: ["gelu" if m.approximate == "none" else "gelu_tanh"],
    nn.Dropout: lambda m, name: [],
    nn.Dropout2d: lambda m, name: [],
    nn.Identity: lambda m, name: [],
}
"""The description of each layer: [] for one that does nothing in evaluation, None for options that a page lacks."""
