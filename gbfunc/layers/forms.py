"""Forms of a weight: what the g-nets give for it, and how its layer computes with that.

A form owns both halves of a weight's life. `of(sources)` takes the matrices that the g-nets make, in the state that the
form `needs`, to the tensors that `torch.func.functional_call` sets in the p-net's skeleton, by the names in `keys`:

* `DenseWeight`: the tensor itself, formed; the layer is torch's own;
* `FactoredWeight` (`gbfunc.layers.factored`): `W = L R^T`, tile by tile, applied as `(x R) L^T`, never formed;
* `DeltaWeight` (there too): factors beside a frozen weight;
* `RecomputedWeight` (`gbfunc.layers.recomputed`): `W = make(*leaves)`, made for each use and again in backward.

All but the first are modules that stand beside a layer with torch's own forward. `layer.weight` is then a property that
gives the dense tensor, with its graph, to whoever reads it; for the rest of that call the layer uses that very tensor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.layers.kinds import LayerKind
from gbfunc.tiling import Piece
from gbfunc.types import Factors, Params

Needs = Literal["matrix", "factors", "leaves"]
"""What a form takes of the g-nets: matrices, factors of tiles, or their leaves, to evaluate them itself."""


AFTER_CALL = (
    "after the p-net's call, as by a custom backward or a hook on gradients, when it is there no more: compute with "
    "tensors that the forward saved (ctx.save_for_backward)"
)


def _refuse_hook(name: str, *args: Any) -> Any:
    raise RuntimeError(
        f"a hook on the weight {name!r} would not see that its layer used it in this call before it was read: read "
        "it before the layer runs, or pass lazy=False"
    )


class _Inputs(dict[str, Any]):
    """Parameters that `functional_call` sets, and that whoever goes through the p-net's parameters does not see."""

    def values(self) -> Any:
        return ()

    def items(self) -> Any:
        return ()


class Call:
    """What the forms of a p-net share: its dense weights by name, None outside of a call.

    `used` are names of weights that layers have used in this call without their being dense.
    """

    def __init__(self) -> None:
        # Not of the class: a compiled call would be compiled again when they become the object's.
        self.cache: dict[str, Tensor] | None = None
        self.used: set[str] = set()


class Source(Protocol):
    """One matrix of a weight, as an evaluation of the g-nets gives it (`gbfunc.generate.generator`)."""

    def matrix(self) -> Tensor:
        """The matrix [R, C], or the block of it that is wanted."""
        ...

    def factors(self) -> Factors:
        """Factors of its tiles, [T, r, k] and [T, c, k]."""
        ...

    def inputs(self) -> Sequence[Tensor]:
        """Leaves and noise of the g-nets that make it."""
        ...


class Target(NamedTuple):
    """The tensor of the p-net that matrices are folded to.

    Attributes:
        name: the parameter.
        kind: how its layer stores matrices.
        shape: of the parameter, or of the block of it that is wanted.
        offsets: what is added to each matrix.
        narrow: dtype of a p-net that is narrower than the genome; None is that of the matrices.
        base: the frozen tensor that a delta belongs to, by device; None where there is none.
        piece: the block of the matrix that is wanted; None is all of it.
    """

    name: str
    kind: LayerKind
    shape: tuple[int, ...]
    offsets: tuple[float, ...] = ()
    narrow: torch.dtype | None = None
    base: Callable[[torch.device], Tensor] | None = None
    piece: Piece | None = None

    def fold(self, matrices: list[Tensor]) -> Tensor:
        """The tensor, or its block, from its matrices."""
        if any(self.offsets):
            matrices = [m + x if x else m for m, x in zip(matrices, self.offsets, strict=True)]
        weight = self.kind.fold(matrices, self.shape)
        if self.base is not None:
            return added(self.base(weight.device), weight)
        return weight if self.narrow is None else weight.to(self.narrow)

    def block(self, weight: Tensor) -> Tensor:
        """The block of a tensor that is whole."""
        if self.piece is None:
            return weight
        return self.kind.fold([self.piece.of(self.kind.unfold(weight)[0])], self.shape)


def added(base: Tensor, delta: Tensor) -> Tensor:
    """The weight of a base and a delta, in the base's dtype; the sum is taken in the wider one."""
    return (base + delta).to(base.dtype)


class DenseWeight:
    """A weight that is formed, and given to the p-net as it is."""

    needs: Needs = "matrix"

    def __init__(self, target: Target) -> None:
        self.target, self.keys = target, (target.name,)

    def of(self, sources: Sequence[Source]) -> Params:
        """The tensor, by name."""
        return {self.target.name: self.target.fold([source.matrix() for source in sources])}


class WeightForm(nn.Module):
    """The weight of a layer, parameter `name`, in a form other than dense; `functional_call` sets its `inputs`.

    Subclasses give `of`, `make` and the three operations. `keys` are the names that the inputs have in the p-net's
    skeleton, and `frozen` those of them that take no gradient. `reads` counts how often the dense weight was read by
    another than the layer; `call` is that of the p-net that it is in.
    """

    needs: Needs
    frozen: tuple[str, ...] = ()

    def __init__(self, name: str, inputs: tuple[str, ...]) -> None:
        super().__init__()
        self.name, self.inputs = name, inputs
        self.keys = self.keys_at(name)
        self.__dict__["_parameters"] = _Inputs.fromkeys(inputs)
        self.reads = 0
        self.call = Call()

    def keys_at(self, name: str) -> tuple[str, ...]:
        """Names of the inputs where the weight has this name."""
        return tuple(f"{name}_form.{k}" for k in self.inputs)

    def __prepare_scriptable__(self) -> Any:
        raise TypeError(
            "torch.jit.script knows no factored layers: give it that of factored=False, or use torch.jit.trace"
        )

    def of(self, sources: Sequence[Source]) -> Params:
        """What the g-nets give, by `keys`."""
        raise NotImplementedError

    def taken(self, tensors: Mapping[str, Tensor]) -> Params:
        """The inputs by their own names, from a mapping by `keys`."""
        return {k: tensors[key] for k, key in zip(self.inputs, self.keys, strict=True)}

    def keep_inputs(self, tensors: Mapping[str, Tensor]) -> None:
        """Take contiguous copies of the inputs as parameters of the form's, as a module for serving has them."""
        copies = {k: x.detach().clone(memory_format=torch.contiguous_format) for k, x in tensors.items()}
        self.__dict__["_parameters"] = {k: nn.Parameter(x) for k, x in copies.items()}

    def forward(self, operation: str, *args: Any, **kwargs: Any) -> Any:
        """A method by name: what loads a module's parameters before its call, as offloading does, finds the inputs."""
        return getattr(self, operation)(*args, **kwargs)

    def make(self) -> Tensor:
        """The weight in its layer's shape, in the graph of the inputs."""
        raise NotImplementedError

    def linear(self, x: Tensor, bias: Tensor | None, rows: slice = slice(None)) -> Tensor:
        """`x @ W[rows].T + bias`: [..., cols] -> [..., rows]."""
        raise NotImplementedError

    def conv(self, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """`conv(x, W, bias, **options)` for `torch.conv1d`, `conv2d` or `conv3d`."""
        raise NotImplementedError

    def embedding(self, index: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of the weight: integers [...] -> [..., cols]."""
        raise NotImplementedError

    @property
    def given(self) -> dict[str, Any]:
        """The inputs by name; RuntimeError outside of a call of the p-net, where there are none."""
        if self._parameters[self.inputs[0]] is None:
            raise RuntimeError(f"the weight {self.name!r} is used {AFTER_CALL}")
        return self._parameters

    @property
    def active(self) -> bool:
        """Whether there is a weight: a call of the p-net is going on, and has given the inputs."""
        return self.call.cache is not None and self._parameters[self.inputs[0]] is not None

    @property
    def formed(self) -> Tensor | None:
        """The dense weight, if this call of the p-net has it."""
        cache = self.call.cache
        return cache.get(self.name) if cache else None

    def dense(self) -> Tensor:
        """The dense weight; the same tensor throughout a call of the p-net."""
        weight = self.formed
        if weight is None:
            device = self.given[self.inputs[0]].device
            # Whoever reads it without gradients may use it with them later; autocast is for the p-net.
            inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
            mode = torch.inference_mode(False) if inference else nullcontext()
            with mode, torch.enable_grad(), outside_autocast(device):
                weight = self.make()
            if self.call.cache is not None:
                self.call.cache[self.name] = weight
        return weight

    def use(self) -> None:
        """Note that the layer computes without the dense weight."""
        if self.call.cache is not None and not torch.compiler.is_compiling():
            self.call.used.add(self.name)

    def read(self) -> Tensor:
        """The dense weight, read outside of the layer's forward."""
        if self._parameters[self.inputs[0]] is None:
            # With this error, `layer.weight` is the skeleton's placeholder outside of a call.
            raise AttributeError(self.name)
        if not torch.compiler.is_compiling():
            # A number that a graph changes is one that it is compiled anew for, at every call.
            self.reads += 1
        late = self.name in self.call.used and self.formed is None
        weight = self.dense()
        if late:
            refused: Any = weight
            refused.register_hook = refused.retain_grad = partial(_refuse_hook, self.name)
        return weight


class _AnyTensor(type(Tensor)):
    def __instancecheck__(cls, instance: Any) -> bool:
        # `torch.testing` compares tensors of related types alone.
        return isinstance(instance, Tensor)


class MadeWeight(Tensor, metaclass=_AnyTensor):
    """A dense weight that a layer made for who reads it, and makes anew for the next: changes of it are refused.

    What `detach()` and `data` give is a plain tensor, to be kept, changed and saved; setting `data` is refused.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operator on a plain tensor; `RuntimeError` for one that changes the weight."""
        kwargs = kwargs or {}
        if _CHANGES.fullmatch(func.__name__) and type([*args, *kwargs.values()][0]) is cls:
            raise RuntimeError(
                f"{func.__name__!r} would change a weight that its layer makes of factors at each read, and be lost: "
                "change the factors, or take gb.materialize(..., factored=False)"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file has the plain tensor."""
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


_CHANGES = re.compile(r"__(set|setitem|i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift))__|\w*[^_]_")


def made(weight: Tensor) -> Tensor:
    """A weight as one who reads it of a layer for serving gets it; graphs hold the tensor itself."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or type(weight) is not Tensor:
        return weight
    tracing: Callable[[], bool] = torch.jit.is_tracing  # pyright: ignore[reportPrivateImportUsage]
    return weight if tracing() else weight.as_subclass(MadeWeight)


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """What switches a caller's autocast off for a device: it is for the p-net, not for what makes its weights."""
    on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def dense_linear(weight: Tensor, transposed: bool, rows: slice, x: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ W[rows].T + bias` with a dense weight, or the transpose that is stored of it."""
    weight = weight.t() if transposed else weight
    return F.linear(x, weight if rows.stop is None else weight[rows], bias)


def linear_forward(layer: Any, input: Tensor) -> Tensor:
    """The forward of `nn.Linear` on whatever form its weight has."""
    return layer.weight_form("linear", input, layer.bias)


def conv_forward(layer: Any, input: Tensor) -> Tensor:
    """The forward of `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d` on whatever form the weight has."""
    conv: Any = (torch.conv1d, torch.conv2d, torch.conv3d)[len(layer.kernel_size) - 1]
    options = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups, "padding": layer.padding}
    if layer.padding_mode != "zeros":
        input = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        options["padding"] = (0,) * len(layer.kernel_size)
    return layer.weight_form("conv", conv, input, layer.bias, **options)


def embedding_forward(layer: Any, input: Tensor) -> Tensor:
    """The forward of `nn.Embedding` on whatever form its weight has."""
    return layer.weight_form("embedding", input, layer.padding_idx)


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
