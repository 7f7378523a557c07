"""Which layers of a p-net may compute on another form of their weights, and how the forms are put there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.layers.attention import attention_forward
from gbfunc.layers.forms import WeightForm


class LayerForm(NamedTuple):
    """A layer's forward on `layer.<attribute>_form`, for which of its `weights`, and whether its options allow it."""

    forward: Callable[..., Any]
    weights: tuple[str, ...] = ("weight",)
    plain: Callable[[Any], bool] = lambda layer: True


def linear_forward(layer: Any, input: Tensor) -> Tensor:
    """The forward of `nn.Linear` on whatever form its weight has."""
    return layer.weight_form.linear(input, layer.bias)


def conv_forward(layer: Any, input: Tensor) -> Tensor:
    """The forward of `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d` on whatever form the weight has."""
    conv: Any = (torch.conv1d, torch.conv2d, torch.conv3d)[len(layer.kernel_size) - 1]
    options = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups, "padding": layer.padding}
    if layer.padding_mode != "zeros":
        input = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        options["padding"] = (0,) * len(layer.kernel_size)
    return layer.weight_form.conv(conv, input, layer.bias, **options)


def embedding_forward(layer: Any, input: Tensor) -> Tensor:
    """The forward of `nn.Embedding` on whatever form its weight has."""
    return layer.weight_form.embedding(input, layer.padding_idx)


def _stock_conv(layer: Any) -> bool:
    stock = next(c for c in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(layer, c))
    return type(layer)._conv_forward is stock._conv_forward


FORMS: Mapping[Callable[..., Any], LayerForm] = MappingProxyType(
    {
        nn.Linear.forward: LayerForm(linear_forward),
        nn.Conv1d.forward: LayerForm(conv_forward, plain=_stock_conv),
        nn.Conv2d.forward: LayerForm(conv_forward, plain=_stock_conv),
        nn.Conv3d.forward: LayerForm(conv_forward, plain=_stock_conv),
        nn.Embedding.forward: LayerForm(
            embedding_forward, plain=lambda layer: layer.max_norm is None and not layer.scale_grad_by_freq
        ),
        nn.MultiheadAttention.forward: LayerForm(
            attention_forward,
            ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
            plain=lambda layer: layer.bias_k is None and layer.bias_v is None and not layer.add_zero_attn,
        ),
    }
)
"""Every form of a layer, by the stock forward whose place it takes."""


def layer_form(layer: nn.Module) -> LayerForm | None:
    """The form that can take the place of a layer; None where its forward is not the stock one."""
    form = FORMS.get(nn.Linear.forward if transposed(layer) else _forward(layer))
    return form if form is not None and form.plain(layer) and not _patched(layer) else None


def _patched(layer: nn.Module) -> bool:
    """Whether a method was replaced on the layer itself."""
    return any(inspect.isroutine(getattr(type(layer), name, None)) for name in vars(layer))


def transposed(layer: nn.Module) -> bool:
    """Whether a layer multiplies by the transpose of what a linear layer does: Hugging Face's `Conv1D`."""
    # The class belongs to a library that need not be installed.
    hugging_face = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return hugging_face is not None and _forward(layer) is hugging_face.forward


def _forward(layer: nn.Module) -> Any:
    """The forward of a layer's class; None for a scripted one, which has none."""
    return getattr(type(layer), "forward", None)


def formable(layer: nn.Module, attribute: str) -> bool:
    """Whether a weight of a layer can have another form than dense."""
    form = layer_form(layer)
    return form is not None and attribute in form.weights and layer._parameters.get(attribute) is not None


@lru_cache(maxsize=256)
def _form_class(stock: type[nn.Module], form: LayerForm, attributes: tuple[str, ...], shown: bool) -> type[nn.Module]:
    """A subclass of a layer's class that computes on the forms of these weights."""
    own: dict[str, Any] = {a: property(lambda self, a=a: self._modules[f"{a}_form"].read()) for a in attributes}
    if shown:

        def named_children(self: nn.Module) -> Any:
            return _without_forms(stock.named_children(self))

        def named_modules(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _without_forms(stock.named_modules(self, *args, **kwargs))

        # Who looks for layers without children, or counts modules, finds those of the p-net.
        own |= {"named_children": named_children, "named_modules": named_modules}
    return type(stock.__name__, (stock,), {"__module__": stock.__module__, "forward": form.forward, **own})


def _without_forms(named: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    return ((name, m) for name, m in named if not isinstance(m, WeightForm))


def install(net: nn.Module, forms: Mapping[str, WeightForm], *, shown: bool) -> None:
    """Put forms in the place of weights of a p-net's copy, and change the classes of their layers accordingly.

    `forms` are by name of parameter, names of tied ones included. With `shown`, whoever goes through the layers'
    parameters sees the dense weights, as in a skeleton, else the forms' parameters alone.
    """
    layers: dict[nn.Module, dict[str, WeightForm]] = {}
    for name, weight in forms.items():
        prefix, _, attribute = name.rpartition(".")
        layer = net.get_submodule(prefix)
        if not formable(layer, attribute):
            raise ValueError(f"{name!r} of a {type(layer).__name__} cannot have another form than dense")
        layers.setdefault(layer, {})[attribute] = weight
        layer.add_module(f"{attribute}_form", weight)
    for layer in net.modules():
        # Attention does not call its output projection, but multiplies by its weight.
        if isinstance(layer, nn.MultiheadAttention) and layer.out_proj in layers and layer_form(layer):
            layers.setdefault(layer, {})
    for layer, attributes in layers.items():
        form = layer_form(layer)
        assert form is not None
        layer.__class__ = _form_class(type(layer), form, tuple(attributes), shown)
        if shown:
            layer.__dict__["_parameters"] = Parameters(layer._parameters, attributes)
        else:
            for attribute in attributes:
                del layer._parameters[attribute]


class Parameters(dict[str, Any]):
    """Parameters of a layer, in which those with a form are the dense weights: for whoever goes through them."""

    def __init__(self, parameters: Mapping[str, Any], forms: Mapping[str, WeightForm]) -> None:
        super().__init__(parameters)
        self.forms = forms

    def __getitem__(self, name: str) -> Any:
        form = self.forms.get(name)
        # Outside of a call there is only the skeleton's placeholder.
        return form.read() if form is not None and form.active else super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        form = self.forms.get(name)
        if form is None or form.call.cache is None or not form.active:
            super().__setitem__(name, value)
        else:
            # A p-net that swaps the weight itself, by functional_call say, computes with what it gives.
            form.call.cache[form.name] = value

    def __iter__(self) -> Any:
        # As it is; but with a method of this name `dict(parameters)` reads each entry as `parameters[name]` does.
        return super().__iter__()

    def get(self, name: str, default: Any = None) -> Any:
        """`self[name]`, or the default."""
        return self[name] if name in self else default

    def copy(self) -> Any:
        """A plain dict."""
        return dict(self)

    def values(self) -> Any:
        """`self[name]` for all names."""
        return [self[name] for name in self]

    def items(self) -> Any:
        """Names, and `self[name]`."""
        return [(name, self[name]) for name in self]
