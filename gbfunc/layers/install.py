"""Which layers of a p-net may compute on another form of their weights, and how the forms are put there."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from gbfunc.layers.attention import attention_forward
from gbfunc.layers.forms import Parameters, WeightForm, conv_forward, embedding_forward, linear_forward, made


class LayerForm(NamedTuple):
    """A layer's forward on `layer.<attribute>_form`, for which of its `weights`, and whether its options allow it."""

    forward: Callable[..., Any]
    weights: tuple[str, ...] = ("weight",)
    plain: Callable[[Any], bool] = lambda layer: True


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
    form = _class_form(layer)
    # A method may have been replaced on the layer itself.
    patched = any(inspect.isroutine(getattr(type(layer), name, None)) for name in vars(layer))
    return form if form is not None and form.plain(layer) and not patched else None


def _class_form(layer: nn.Module) -> LayerForm | None:
    """The form for the forward of a layer's class, whatever the layer's options."""
    return FORMS.get(nn.Linear.forward if transposed(layer) else _forward(layer))


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

    def reader(attribute: str) -> Any:
        form = f"{attribute}_form"
        return property(lambda self: self._modules[form].read() if shown else made(self._modules[form]("read")))

    own: dict[str, Any] = {a: reader(a) for a in attributes}

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        # No name leads to this class: pickles make it again.
        _, _, *state = stock.__reduce_ex__(self, protocol)
        return _blank, (stock, attributes, shown), *state

    if shown:

        def named_children(self: nn.Module) -> Any:
            return _without_forms(stock.named_children(self))

        def named_modules(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return _without_forms(stock.named_modules(self, *args, **kwargs))

        # Who looks for layers without children, or counts modules, finds those of the p-net.
        own |= {"named_children": named_children, "named_modules": named_modules}
    own |= {"__module__": stock.__module__, "forward": form.forward, "__reduce_ex__": __reduce_ex__}
    return type(stock.__name__, (stock,), own)


def _blank(stock: type[nn.Module], attributes: tuple[str, ...], shown: bool) -> nn.Module:
    """A layer that computes on forms, without what it holds: a pickle gives it that."""
    layer = stock.__new__(stock)
    form = _class_form(layer)
    assert form is not None
    layer.__class__ = _form_class(stock, form, attributes, shown)
    return layer


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
