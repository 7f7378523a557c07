"""Changes the layers of a p-net's copy so that they use generated weights."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from gbfunc.layers import forms
from gbfunc.layers.beside import beside_forward
from gbfunc.layers.forms import Outside, Parameters, Weight, WeightForm, generated_attribute, weight_of
from gbfunc.layers.kinds import DELTA


class LayerForm(NamedTuple):
    """A forward for layers with generated attributes `weights`. `plain(layer)` says if the options are supported."""

    forward: Callable[..., Any]
    weights: tuple[str, ...] = ("weight",)
    plain: Callable[[Any], bool] = lambda layer: True


def _stock_conv(layer: Any) -> bool:
    stock = next(c for c in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(layer, c))
    return type(layer)._conv_forward is stock._conv_forward


FORMS: Mapping[Callable[..., Any], LayerForm] = MappingProxyType(
    {
        nn.Linear.forward: LayerForm(forms.linear_forward),
        **{c.forward: LayerForm(forms.conv_forward, plain=_stock_conv) for c in (nn.Conv1d, nn.Conv2d, nn.Conv3d)},
        nn.Embedding.forward: LayerForm(
            forms.embedding_forward, plain=lambda layer: layer.max_norm is None and not layer.scale_grad_by_freq
        ),
    }
)
"""The `LayerForm` of each type of layer. The keys are the forwards of torch that the forms replace."""

BESIDE = LayerForm(beside_forward, (DELTA,))
"""The form of a layer whose custom forward hides its weight (see `gbfunc.layers.beside`)."""


def layer_form(layer: nn.Module) -> LayerForm | None:
    """Return the `LayerForm` of a torch layer, or of a layer that hides its weight. None for any other layer."""
    form = FORMS.get(_stock_forward(type(layer)), BESIDE if hasattr(layer, "in_features") else None)
    # If a method of this instance was replaced, the layer may compute something else than its class.
    patched = any(inspect.isroutine(getattr(type(layer), name, None)) for name in vars(layer))
    # nn.MultiheadAttention reads the weight of its output projection without calling the layer: keep the weight dense.
    read = isinstance(layer, nn.modules.linear.NonDynamicallyQuantizableLinear)
    return form if form is not None and form.plain(layer) and not (patched or read) else None


def _own_forward(layer: type[nn.Module]) -> Any:
    return getattr(layer, "_stock", layer).forward


def _stock_forward(layer: type[nn.Module]) -> Any:
    # The package transformers may be missing: look the class up only if the package has been imported.
    hugging_face = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    forward = _own_forward(layer)
    return nn.Linear.forward if hugging_face is not None and forward is hugging_face.forward else forward


def transposed(layer: nn.Module) -> bool:
    """Return whether a layer stores the transpose of a linear layer's weight, as Hugging Face's `Conv1D` does."""
    return _own_forward(type(layer)) is not _stock_forward(type(layer))


def formable(layer: nn.Module, attribute: str) -> bool:
    """Return whether a weight of a layer can have a `WeightForm`, such as factors, or is always a dense tensor."""
    form = layer_form(layer)
    there = attribute in (DELTA, *vars(layer).get("_names", ())) or getattr(layer, attribute, None) is not None
    return form is not None and attribute in form.weights and there


def _generated(attribute: str) -> property:
    # Do not use `functools.partial`, which older versions of torch.compile do not trace.
    def read(layer: Any) -> Tensor:
        weight = weight_of(layer, attribute)
        if weight is None:
            # After an AttributeError, nn.Module looks up the parameter that the layer has outside of calls.
            raise AttributeError(attribute)
        return weight.read() if isinstance(weight, Weight) else weight

    return property(read)


@lru_cache(maxsize=256)
def generated_class(stock: type[nn.Module], attributes: tuple[str, ...], has_form: bool) -> type[nn.Module]:
    """Make a subclass of a layer's class, with the same name, whose `attributes` return generated weights.

    With `has_form` (a weight has a `WeightForm`), the forward of the class's `LayerForm` replaces the class's forward.
    """

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        # Unpickling must make the class again, because a class that was made at run time cannot be imported.
        _, _, attributes_of, *more = stock.__reduce_ex__(self, protocol)
        if isinstance(attributes_of, dict) and "_flat_weights" in attributes_of:
            # Drop the list of weights: a recurrent layer looks up its weights again at the next call.
            attributes_of = attributes_of | {"_flat_weights": [None] * len(attributes_of["_flat_weights"])}
        return blank_layer, (stock, attributes, has_form), attributes_of, *more

    own: dict[str, Any] = {a: _generated(a) for a in attributes}
    own |= {"__module__": stock.__module__, "__qualname__": stock.__qualname__, "__reduce_ex__": __reduce_ex__}
    own |= {"_stock": getattr(stock, "_stock", stock), "_made_of": (stock, attributes, has_form)}
    if has_form:
        own["forward"] = FORMS.get(_stock_forward(stock), BESIDE).forward
    kind: Any = type(stock)
    return kind(stock.__name__, (stock,), own)


def blank_layer(stock: type[nn.Module], attributes: tuple[str, ...], has_form: bool) -> nn.Module:
    """Make an empty layer with generated weights. Unpickling then sets the layer's attributes."""
    cls = generated_class(stock, attributes, has_form)
    return cls.__new__(cls)


def install(net: nn.Module, forms: Mapping[str, WeightForm | None], outside: Outside | None = None) -> None:
    """Prepare the layers of a p-net's copy for generated weights, which each call of the p-net sets as attributes.

    Args:
        net: the copy of the p-net.
        forms: the `WeightForm` of each parameter or buffer by name, including tied names; None for a dense tensor.
        outside: generates a weight that code reads outside of a call. With `outside`, the layers' own tensors are
            deleted. Otherwise the tensors stay, but during a call `parameters()` returns the generated weights.
    """
    layers: dict[nn.Module, dict[str, WeightForm | None]] = {}
    names: dict[nn.Module, dict[str, str]] = {}
    with_form: set[nn.Module] = set()
    for name, form in forms.items():
        prefix, _, attribute = name.rpartition(".")
        layer = net.get_submodule(prefix)
        if form is not None and not formable(layer, attribute):
            raise ValueError(f"{name!r} of a {type(layer).__name__} cannot have another form than dense: use None")
        layers.setdefault(layer, {})[attribute] = form
        names.setdefault(layer, {})[attribute] = name
        with_form |= set() if form is None else {layer}
    for layer, attributes in layers.items():
        for attribute in attributes if outside is not None else ():
            with suppress(AttributeError):
                delattr(layer, attribute)
        layer.__class__ = generated_class(type(layer), tuple(attributes), layer in with_form)
        vars(layer).update(_outside=outside, _forms=attributes, _names=names.get(layer, {}))
        vars(layer).update(dict.fromkeys(map(generated_attribute, attributes)))
        if outside is None:
            vars(layer)["_parameters"] = Parameters(layer, attributes)


def install_served(net: nn.Module, forms: Mapping[str, WeightForm], inputs: Mapping[str, Tensor]) -> None:
    """Prepare a module for inference: store the tensors of each `WeightForm` as parameters, such as `weight_left`."""
    install(net, forms, _of_own_inputs)
    parameters = {key: nn.Parameter(inputs[key].contiguous()) for form in forms.values() for key in form.keys}
    for name, form in forms.items():
        path, _, attribute = name.rpartition(".")
        for k, key in zip(form.inputs, form.keys, strict=True):
            net.get_submodule(path).register_parameter(f"{attribute}_{k}", parameters[key])


def _of_own_inputs(layer: nn.Module, attribute: str) -> Weight:
    form = vars(layer)["_forms"][attribute]
    return Weight(form, {k: getattr(layer, f"{attribute}_{k}") for k in form.inputs})
