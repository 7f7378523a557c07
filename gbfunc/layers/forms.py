"""Forms of a weight: how the g-nets generate a weight, and how a layer computes with the weight.

A form `needs` the matrix, the factors or the leaves of each generated matrix (a `Source`). `of(sources)` returns the
form's inputs, `{key: tensor}`: weight, factors or leaves. `apply` computes a layer's output from these. The forms are:

* `DenseWeight`: the dense tensor, which torch's own layer uses;
* `FactoredWeight` (`gbfunc.layers.factored`): `W = L R^T` for each tile, applied as `(x R) L^T` without forming `W`;
* `DeltaWeight` (`gbfunc.layers.factored`): a frozen weight plus factors;
* `RecomputedWeight` (`gbfunc.layers.recomputed`): `W = maker(*leaves)`, generated for each use and again in backward.

During a call of the p-net, each layer with a form holds a `Weight` (`gbfunc.layers.install`). Code that reads the
property `layer.weight` gets the dense, differentiable tensor. The layer then uses this tensor until the call ends.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.layers.kinds import LayerKind
from gbfunc.tiling import Piece
from gbfunc.types import Factors, Params, TensorMap

Self = TypeVar("Self", bound="WeightForm")

Needs = Literal["matrix", "factors", "leaves"]
"""What a `DenseWeight` or `WeightForm` takes from g-nets: matrices, factors of tiles, or the leaves themselves."""


class Source(Protocol):
    """One generated matrix. The weight's form requests the matrix, the factors of the tiles, or the g-nets' leaves."""

    def matrix(self) -> Tensor:
        """Return the matrix [rows, columns], or the block that `pieces` of `make_generator` selects."""
        ...

    def factors(self) -> Factors:
        """Return the factors of the tiles, [tiles, rows, rank] and [tiles, columns, rank]."""
        ...

    def inputs(self) -> Sequence[Tensor]:
        """Return the leaves of the matrix's g-nets, and the noise (`sample_noise`) of stochastic g-nets."""
        ...


class Target(NamedTuple):
    """A parameter of the p-net, which is folded (reshaped) from generated matrices."""

    name: str  # name of the parameter
    kind: LayerKind
    shape: tuple[int, ...]  # shape of the parameter, or of the block `piece`
    offsets: tuple[float, ...] = ()  # one number per matrix, added to all entries of the matrix
    narrow: torch.dtype | None = None  # dtype of the weight if narrower than the genome's; None does not cast
    base: Callable[[torch.device], Tensor] | None = None  # returns the frozen tensor of the base, to be added
    piece: Piece | None = None  # block of the matrix to generate; None for the entire matrix

    def fold(self, matrices: list[Tensor]) -> Tensor:
        """Add the offsets, fold (reshape) the matrices to the parameter or its block `piece`, and add the base."""
        if any(self.offsets):
            matrices = [m + x if x else m for m, x in zip(matrices, self.offsets, strict=True)]
        weight = self.kind.fold(matrices, self.shape)
        if self.base is not None:
            return added(self.base(weight.device), weight)
        return weight if self.narrow is None else weight.to(self.narrow)

    def block(self, weight: Tensor) -> Tensor:
        """Return the block `piece` of the entire parameter `weight`; without `piece`, return `weight`."""
        if self.piece is None:
            return weight
        return self.kind.fold([self.piece.of(self.kind.unfold(weight)[0])], self.shape)


def added(base: Tensor, delta: Tensor) -> Tensor:
    """Add a delta to a base in the wider of the two dtypes, and cast the sum to the base's dtype."""
    return (base + delta).to(base.dtype)


class DenseWeight:
    """The form of a weight that the p-net uses as a dense tensor."""

    needs: Needs = "matrix"

    def __init__(self, target: Target) -> None:
        self.target, self.keys = target, (target.name,)

    def of(self, sources: Sequence[Source]) -> Params:
        """Return `{name: dense tensor}`."""
        return {self.target.name: self.target.fold([source.matrix() for source in sources])}


class Use(NamedTuple):
    """The operation of a layer, `run(dense weight, x, bias)`, and the options of the operation."""

    operation: Literal["linear", "conv", "embedding"]
    run: Callable[..., Tensor]
    options: tuple[Any, ...] = ()


class WeightForm:
    """How a layer gets and applies a weight that is not dense, for example as factors. Forms hold no tensors.

    `inputs` names the tensors from which the weight of parameter `name` is computed, such as left and right factors.
    `transposed` says that the layer stores the transpose of a linear layer's weight.
    """

    needs: Needs
    frozen: tuple[str, ...] = ()  # the `keys` of inputs without a gradient

    def __init__(self, name: str, inputs: tuple[str, ...], transposed: bool) -> None:
        self.name, self.inputs, self.transposed = name, inputs, transposed
        self.keys = tuple(f"{name}_form.{k}" for k in inputs)  # names of these tensors in the generator's output
        self.reads = 0  # how often code outside of the layer's forward read the dense weight

    def __deepcopy__(self, memo: Any) -> WeightForm:
        return self

    def renamed(self: Self, name: str) -> Self:
        """Return a copy of the form for the same parameter under the name that it has in another module."""
        form = copy.copy(self)
        WeightForm.__init__(form, name, self.inputs, self.transposed)
        return form

    def taken(self, tensors: TensorMap) -> Params:
        """Select the tensors `inputs` from the `tensors` that a generator returns. Return `{input: tensor}`."""
        return {k: tensors[key] for k, key in zip(self.inputs, self.keys, strict=True)}

    def of(self, sources: Sequence[Source]) -> Params:
        """Compute the form's tensors, `{key: tensor}`, from `sources`, which generate one matrix of the weight each."""
        raise NotImplementedError

    def make(self, inputs: Params) -> Tensor:
        """Form the dense weight, in the layer's shape and differentiable in `inputs`."""
        raise NotImplementedError

    def apply(self, weight: Weight, use: Use, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `use.run(dense weight, x, bias)`, without forming the weight if possible."""
        raise NotImplementedError


class Weight:
    """A generated weight during a call of the p-net: a `WeightForm`, and the form's tensors, `{input: tensor}`."""

    def __init__(self, form: WeightForm, inputs: Params) -> None:
        self.form, self.inputs = form, inputs
        self.formed: Tensor | None = None  # the dense tensor, after the first read
        self.applied = False  # whether the layer has applied the weight's factors, without the dense tensor

    def dense(self) -> Tensor:
        """Return the dense weight: the same tensor throughout a call of the p-net."""
        if self.formed is None:
            first, mode = next(iter(self.inputs.values())), nullcontext()
            if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
                # Leave inference mode, unless inputs are inference tensors: autograd may later use the dense weight.
                mode = torch.inference_mode(first.is_inference())
            with mode, torch.enable_grad(), outside_autocast(first.device), unseen_by_checkpoints():
                self.formed = self.form.make(self.inputs)
        return self.formed

    def read(self) -> Tensor:
        """Return the dense weight to code other than the layer's forward, and count the read for `dense_reads`."""
        if not torch.compiler.is_compiling():
            # Do not count in compiled code, which would be recompiled whenever the counter changes.
            self.form.reads += 1
        return self.dense()

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute `x @ W.T + bias`: [..., cols] -> [..., rows]."""
        transposed = self.form.transposed
        use = Use("linear", lambda weight, x, bias=None: dense_linear(weight, transposed, x, bias))
        return self.form.apply(self, use, x, bias)

    def conv(self, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """Compute `conv(x, W, bias, **options)` for `torch.conv1d`, `conv2d` or `conv3d`."""
        use = Use("conv", lambda weight, x, bias=None: conv(x, weight, bias, **options), (conv, options))
        return self.form.apply(self, use, x, bias)

    def embedding(self, index: Tensor, padding_idx: int | None) -> Tensor:
        """Look up rows of the weight: integers [...] -> [..., cols]."""
        use = Use("embedding", lambda weight, x, bias=None: F.embedding(x, weight, padding_idx), (padding_idx,))
        return self.form.apply(self, use, index, None)


Outside = Callable[[Any, str], Any]
"""A function `(layer, attribute) -> Weight or tensor` that generates a weight for code outside of calls."""


def generated_attribute(attribute: str) -> str:
    """Name the layer attribute that holds a generated weight. The attribute is None outside of calls of the p-net."""
    return f"_generated_{attribute}"


def weight_of(layer: Any, attribute: str) -> Any:
    """Return a layer's generated weight (`Weight` or tensor). Outside of calls: from `install`'s `outside`, or None."""
    key = generated_attribute(attribute)
    if (weight := getattr(layer, key, None)) is not None or not hasattr(layer, key):
        return weight
    outside: Outside | None = layer._outside
    return None if outside is None else outside(layer, attribute)


class Parameters(dict[str, Any]):
    """Replaces a layer's `_parameters`: in a call of the p-net, `parameters()` returns generated weights as tensors."""

    def __init__(self, layer: nn.Module, attributes: Collection[str]) -> None:
        super().__init__(layer._parameters)
        self._layer, self._attributes = layer, attributes

    def _weight(self, name: str) -> Weight | None:
        return getattr(self._layer, generated_attribute(name)) if name in self._attributes else None

    def __getitem__(self, name: str) -> Any:
        weight = self._weight(name)
        return super().__getitem__(name) if weight is None else weight.read()

    def __setitem__(self, name: str, value: Any) -> None:
        weight = self._weight(name)
        if weight is None:
            super().__setitem__(name, value)
        else:
            # The p-net's own forward replaces the weight, for example by `functional_call`: use the new value.
            weight.formed, weight.applied = value, False

    def items(self) -> Any:  # noqa: D102
        return [(name, self[name]) for name in self]


def unseen_by_checkpoints() -> AbstractContextManager[Any]:
    """Hide tensors saved for backward in this context from checkpoints, whose second forward may not save them."""
    # Older versions of torch cannot tell whether a checkpoint surrounds this code: assume that one does.
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    top = getattr(autograd, "_top_saved_tensors_default_hooks", lambda _: True)
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or top(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switch off the caller's autocast on a device, so that weights are generated in full precision."""
    on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def dense_linear(weight: Tensor, transposed: bool, x: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `x @ W.T + bias` with a dense weight that may be stored transposed."""
    return F.linear(x, weight.t() if transposed else weight, bias)


def linear_forward(layer: Any, input: Tensor) -> Tensor:
    """Compute the forward of `nn.Linear` with a generated weight."""
    return weight_of(layer, "weight").linear(input, layer.bias)


def conv_forward(layer: Any, input: Tensor) -> Tensor:
    """Compute the forward of `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d` with a generated weight."""
    conv: Any = (torch.conv1d, torch.conv2d, torch.conv3d)[len(layer.kernel_size) - 1]
    options = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups, "padding": layer.padding}
    if layer.padding_mode != "zeros":
        input = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        options["padding"] = (0,) * len(layer.kernel_size)
    return weight_of(layer, "weight").conv(conv, input, layer.bias, **options)


def embedding_forward(layer: Any, input: Tensor) -> Tensor:
    """Compute the forward of `nn.Embedding` with a generated weight."""
    return weight_of(layer, "weight").embedding(input, layer.padding_idx)
