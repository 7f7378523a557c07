"""A p-net as a pure function of its tensors.

The function works on a skeleton: a copy of the module whose tensors have no storage. The user's module is not touched.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gbfunc.base import BaseTensors
from gbfunc.layers.forms import Weight, WeightForm, generated_attribute
from gbfunc.layers.install import install
from gbfunc.pnet.describe import buffers_of, check_pnet, keep_statistics, named_tensors, parameter_infos, skeleton_of
from gbfunc.trees import TensorSpec, compare_trees
from gbfunc.types import Params, TensorMap


class PureNet:
    """A p-net as a pure function: `call(weights, buffers, *args, **kwargs)`.

    If the p-net replaces a buffer, a call puts the new tensor into the dict `buffers`. Pass clones, because the
    p-net may change buffers in place. The training mode is the mode at construction. One thread runs a call at a time.

    Args:
        pnet: the p-net, which is not changed.
        forms: {name of a weight: how layers compute with other tensors, such as factors}. Instead of the weight, calls
            pass these tensors, under the names `keys` of the form.
        adapt: a function that changes the skeleton. It returns names of parameters whose shapes are not checked.
        frozen: the base, if any. Calls do not pass the base's buffers. The base's batch norms stay in evaluation mode.

    Attributes:
        skeleton: the copy of the p-net, with tensors on the meta device.
    """

    def __init__(
        self,
        pnet: nn.Module,
        forms: Mapping[str, WeightForm] | None = None,
        adapt: Callable[[nn.Module], Collection[str]] = lambda skeleton: (),
        frozen: BaseTensors | None = None,
    ) -> None:
        check_pnet(pnet)
        forms = forms or {}
        self.skeleton = skeleton_of(pnet)
        kept = () if frozen is None else frozen.buffers
        for layer in keep_statistics(self.skeleton, kept):
            vars(layer)["train"] = lambda mode=True, layer=layer: layer
        specs = {name: TensorSpec(tuple(tensor.shape)) for name, _, tensor, *_ in parameter_infos(pnet)}
        self._buffers = dict.fromkeys((k for k in buffers_of(pnet) if k not in kept), TensorSpec())
        install(self.skeleton, forms)
        specs |= {name: TensorSpec() for name in adapt(self.skeleton) if name in specs}
        self._forms, self._frozen = list(dict.fromkeys(forms.values())), frozen
        self._expected = {k: spec for k, spec in specs.items() if k not in forms}
        self._expected |= {key: TensorSpec() for form in self._forms for key in form.keys}
        self._places = _places(pnet, self.skeleton, forms)
        self._holders = {name: (holder, key) for name, holder, key, _ in reversed(self._places)}
        self._modules, self._modes = list(self.skeleton.modules()), None
        self._lock, self._checked = threading.RLock(), False

    @property
    def dense_reads(self) -> dict[str, int]:
        """How often the p-net read a weight of `forms` as a dense tensor: `{name: number > 0}`."""
        return {form.name: form.reads for form in self._forms if form.reads}

    def __call__(self, weights: TensorMap, buffers: Params, /, *args: Any, **kwargs: Any) -> Any:
        """Return the p-net's output; the first call raises ValueError if the tensors do not fit the p-net."""
        return self.run(weights, buffers, lambda net, *args, **kwargs: net(*args, **kwargs), *args, **kwargs)

    def run(
        self, weights: TensorMap, buffers: Params, function: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call `function(net, *args, **kwargs)`, where `net` is the p-net with these tensors.

        When the function returns, the tensors are removed from the p-net, except in the context `kept`.

        Raises:
            ValueError: if the tensors of the first call do not fit the p-net, or if the p-net changes a tensor of the
                frozen base.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._on(weights, buffers, function, args, kwargs)
        with self._lock:
            if not self._checked:
                compare_trees(self._expected, weights, "parameters do not fit the p-net")
                compare_trees(self._buffers, buffers, "buffers do not fit the p-net")
                self._checked = True
            frozen: Params = {}
            if self._frozen is not None:
                params, own = self._frozen.on(next(iter(weights.values())).device)
                frozen = params | own
            versions = [x._version for x in frozen.values()]
            out = self._on(weights, buffers, function, args, kwargs)
            if changed := [k for (k, x), v in zip(frozen.items(), versions, strict=True) if x._version != v]:
                raise ValueError(f"the p-net changes {changed[0]!r} of its base: name its module in modules_to_save")
            return out

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Return a context in which tensors stay in the p-net after a call, so that backward can run layers again."""
        with self._lock:
            before, outer = self._values(), self._modes
            self._modes = [module.training for module in self._modules]
            try:
                yield
            finally:
                self._set(before)
                self._set_modes(self._modes)
                self._modes = outer

    def _on(self, weights: TensorMap, buffers: Params, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        tensors: dict[str, Any] = {**weights, **buffers}
        if self._frozen is not None:
            tensors.update(self._frozen.on(next(iter(weights.values())).device)[1])
        for form in self._forms:
            tensors[form.name] = Weight(form, form.taken(weights))
        # `torch.func.functional_call` would do the same, but would look up the modules of all tensors in every call.
        before, modes = self._values(), self._modes
        self._set_modes(modes := modes or [module.training for module in self._modules])
        try:
            self._set([tensors[name] for name, *_ in self._places])
            return function(self.skeleton, *args, **kwargs)
        finally:
            for name in buffers:
                holder, key = self._holders[name]
                buffers[name] = holder[key]
                if self._modes is not None:
                    # A layer that backward runs again would update the buffer twice: the second run updates a copy.
                    holder[key] = buffers[name].detach().clone()
            if self._modes is None:
                self._set(before)
                self._set_modes(modes)

    def _values(self) -> list[Any]:
        get = dict.__getitem__
        return [getattr(x, key) if of_form else get(x, key) for _, x, key, of_form in self._places]

    def _set(self, values: Sequence[Any]) -> None:
        for (_, holder, key, of_form), x in zip(self._places, values, strict=True):
            if of_form:
                # Do not write to `vars(holder)`: torch.compile would not notice the change.
                object.__setattr__(holder, key, x)
            else:
                # Call dict's own method: `Parameters`, the dict of layers with generated weights, overrides it.
                dict.__setitem__(holder, key, x)

    def _set_modes(self, modes: Sequence[bool]) -> None:
        for module, training in zip(self._modules, modes, strict=True):
            if module.training != training:
                module.training = training


def _places(pnet: nn.Module, skeleton: nn.Module, forms: Mapping[str, WeightForm]) -> list[tuple[str, Any, str, bool]]:
    """List where each tensor is: (name, dict, key, False), or (name, layer, attribute, True) for names in `forms`."""
    first: dict[int, str] = {}
    places, seen = [], set[tuple[int, str]]()
    for name, tensor in named_tensors(pnet, ties=True):
        original = first.setdefault(id(tensor), name)
        path, _, key = name.rpartition(".")
        module = skeleton.get_submodule(path)
        if (id(module), key) in seen:
            continue
        seen.add((id(module), key))
        if name in forms:
            places.append((forms[name].name, module, generated_attribute(key), True))
        else:
            holder = module._parameters if key in module._parameters else module._buffers
            places.append((original, holder, key, False))
    # Add names in `forms` that are no parameters: deltas of layers that hide their weight (quantised layers).
    for name in forms.keys() - {name for name, _ in named_tensors(pnet, ties=True)}:
        path, _, key = name.rpartition(".")
        places.append((name, skeleton.get_submodule(path), generated_attribute(key), True))
    return places
