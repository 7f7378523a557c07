"""Forms of a weight: how the g-nets make it, and how its layer computes with it.

`of(sources)` takes the matrices of the g-nets, in the state that the form `needs`, to the tensors of a call, by the
names in `keys`; `apply` computes with these tensors:

* `DenseWeight`: the tensor itself, given to torch's own layer;
* `FactoredWeight` (`gbfunc.layers.factored`): `W = L R^T`, tile by tile, applied as `(x R) L^T`, never formed;
* `DeltaWeight` (there too): factors beside a frozen weight;
* `RecomputedWeight` (`gbfunc.layers.recomputed`): `W = make(*leaves)`, made for each use and again in backward.

During a call of the p-net each layer with a form holds a `Weight` (`gbfunc.layers.install`). The property
`layer.weight` gives the dense tensor with its graph; the layer uses this tensor for the rest of the call.
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
"""The input of a form: matrices, factors of tiles, or leaves of g-nets that the form evaluates."""


class Source(Protocol):
    """One matrix of a weight, from an evaluation of g-nets (`gbfunc.generation.generator`)."""

    def matrix(self) -> Tensor:
        """The matrix [R, C], or the requested block."""
        ...

    def factors(self) -> Factors:
        """Factors of the tiles, [T, r, k] and [T, c, k]."""
        ...

    def inputs(self) -> Sequence[Tensor]:
        """Leaves and noise of the g-nets."""
        ...


class Target(NamedTuple):
    """The tensor of the p-net that matrices fold to."""

    name: str  # of the parameter
    kind: LayerKind
    shape: tuple[int, ...]  # of the parameter, or of the requested block
    offsets: tuple[float, ...] = ()  # numbers added to each matrix
    narrow: torch.dtype | None = None  # dtype of a p-net narrower than the genome; None keeps that of the matrices
    base: Callable[[torch.device], Tensor] | None = None  # the frozen tensor to which the matrices are a delta
    piece: Piece | None = None  # the requested block of the matrix; None for all of the matrix

    def fold(self, matrices: list[Tensor]) -> Tensor:
        """Fold matrices to the tensor or its block."""
        if any(self.offsets):
            matrices = [m + x if x else m for m, x in zip(matrices, self.offsets, strict=True)]
        weight = self.kind.fold(matrices, self.shape)
        if self.base is not None:
            return added(self.base(weight.device), weight)
        return weight if self.narrow is None else weight.to(self.narrow)

    def block(self, weight: Tensor) -> Tensor:
        """The requested block of the whole tensor."""
        if self.piece is None:
            return weight
        return self.kind.fold([self.piece.of(self.kind.unfold(weight)[0])], self.shape)


def added(base: Tensor, delta: Tensor) -> Tensor:
    """The sum of a base and a delta, taken in the wider dtype, in the base's dtype."""
    return (base + delta).to(base.dtype)


class DenseWeight:
    """A dense weight, given to the p-net as a tensor."""

    needs: Needs = "matrix"

    def __init__(self, target: Target) -> None:
        self.target, self.keys = target, (target.name,)

    def of(self, sources: Sequence[Source]) -> Params:
        """The tensor, by name."""
        return {self.target.name: self.target.fold([source.matrix() for source in sources])}


class Use(NamedTuple):
    """One use of a weight by its layer: `run(dense weight, x, bias)`, and the options of this operation."""

    operation: Literal["linear", "conv", "embedding"]
    run: Callable[..., Tensor]
    options: tuple[Any, ...] = ()


class WeightForm:
    """The form of a weight that is not dense: how it is generated, formed and applied. A form holds no tensors.

    `inputs` are the tensors that make the weight of parameter `name`. A layer may store the transpose of a linear
    layer's weight (`transposed`).
    """

    needs: Needs
    frozen: tuple[str, ...] = ()  # keys that take no gradient

    def __init__(self, name: str, inputs: tuple[str, ...], transposed: bool) -> None:
        self.name, self.inputs, self.transposed = name, inputs, transposed
        self.keys = tuple(f"{name}_form.{k}" for k in inputs)  # names of the inputs among the tensors of a call
        self.reads = 0  # how often code other than the layer read the dense weight

    def __deepcopy__(self, memo: Any) -> WeightForm:
        return self

    def renamed(self: Self, name: str) -> Self:
        """The form of the weight under another name."""
        form = copy.copy(self)
        WeightForm.__init__(form, name, self.inputs, self.transposed)
        return form

    def taken(self, tensors: TensorMap) -> Params:
        """The inputs by their own names, from tensors by `keys`."""
        return {k: tensors[key] for k, key in zip(self.inputs, self.keys, strict=True)}

    def of(self, sources: Sequence[Source]) -> Params:
        """The tensors of a call, by `keys`, from the g-nets."""
        raise NotImplementedError

    def make(self, given: Params) -> Tensor:
        """The weight in its layer's shape, in the graph of the inputs."""
        raise NotImplementedError

    def apply(self, weight: Weight, use: Use, x: Tensor, bias: Tensor | None) -> Tensor:
        """`use.run(dense weight, x, bias)` on the form's inputs."""
        raise NotImplementedError


class Weight:
    """A weight during a call of its p-net, from the inputs of its form by name."""

    def __init__(self, form: WeightForm, given: Params) -> None:
        self.form, self.given = form, given
        self.formed: Tensor | None = None  # the dense tensor, once read
        self.applied = False  # whether a layer used the weight before the dense tensor was formed

    def dense(self) -> Tensor:
        """The dense weight; the same tensor throughout a call of the p-net."""
        if self.formed is None:
            first, mode = next(iter(self.given.values())), nullcontext()
            if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
                # A reader in inference mode may share the weight with a reader that takes gradients.
                mode = torch.inference_mode(first.is_inference())
            with mode, torch.enable_grad(), outside_autocast(first.device), unseen_by_checkpoints():
                self.formed = self.form.make(self.given)
        return self.formed

    def read(self) -> Tensor:
        """The dense weight, for code other than the layer's forward."""
        if not torch.compiler.is_compiling():
            # A graph is compiled again whenever a number that it changes has changed.
            self.form.reads += 1
        return self.dense()

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x @ W.T + bias`: [..., cols] -> [..., rows]."""
        transposed = self.form.transposed
        use = Use("linear", lambda weight, x, bias=None: dense_linear(weight, transposed, x, bias))
        return self.form.apply(self, use, x, bias)

    def conv(self, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """`conv(x, W, bias, **options)` for `torch.conv1d`, `conv2d` or `conv3d`."""
        use = Use("conv", lambda weight, x, bias=None: conv(x, weight, bias, **options), (conv, options))
        return self.form.apply(self, use, x, bias)

    def embedding(self, index: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of the weight: integers [...] -> [..., cols]."""
        use = Use("embedding", lambda weight, x, bias=None: F.embedding(x, weight, padding_idx), (padding_idx,))
        return self.form.apply(self, use, index, None)


Outside = Callable[[Any, str], Any]
"""`(layer, attribute) -> weight`, a `Weight` or a tensor, for reads outside of a call."""


def now(attribute: str) -> str:
    """The attribute of a layer that holds a generated weight during a call, a `Weight` or a tensor, otherwise None."""
    return f"_{attribute}_now"


def weight_of(layer: Any, attribute: str) -> Any:
    """A generated weight, a `Weight` or a tensor; None without one, and in a skeleton outside of a call."""
    if (weight := getattr(layer, now(attribute), None)) is not None or not hasattr(layer, now(attribute)):
        return weight
    outside: Outside | None = layer._outside
    return None if outside is None else outside(layer, attribute)


def linear_forward(layer: Any, input: Tensor) -> Tensor:
    """Forward of `nn.Linear` on a generated weight."""
    return weight_of(layer, "weight").linear(input, layer.bias)


def conv_forward(layer: Any, input: Tensor) -> Tensor:
    """Forward of `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d` on a generated weight."""
    conv: Any = (torch.conv1d, torch.conv2d, torch.conv3d)[len(layer.kernel_size) - 1]
    options = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups, "padding": layer.padding}
    if layer.padding_mode != "zeros":
        input = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        options["padding"] = (0,) * len(layer.kernel_size)
    return weight_of(layer, "weight").conv(conv, input, layer.bias, **options)


def embedding_forward(layer: Any, input: Tensor) -> Tensor:
    """Forward of `nn.Embedding` on a generated weight."""
    return weight_of(layer, "weight").embedding(input, layer.padding_idx)


class Parameters(dict[str, Any]):
    """Parameters of a layer in a skeleton; during a call, a read of a weight with a form gives the dense weight."""

    def __init__(self, layer: nn.Module, attributes: Collection[str]) -> None:
        super().__init__(layer._parameters)
        self._layer, self._attributes = layer, attributes

    def _weight(self, name: str) -> Weight | None:
        return getattr(self._layer, now(name)) if name in self._attributes else None

    def __getitem__(self, name: str) -> Any:
        weight = self._weight(name)
        return super().__getitem__(name) if weight is None else weight.read()

    def __setitem__(self, name: str, value: Any) -> None:
        weight = self._weight(name)
        if weight is None:
            super().__setitem__(name, value)
        else:
            # The p-net swaps the weight itself, for example by functional_call.
            weight.formed, weight.applied = value, False

    def items(self) -> Any:  # noqa: D102
        return [(name, self[name]) for name in self]


def unseen_by_checkpoints() -> AbstractContextManager[Any]:
    """Hide the tensors that are saved inside from a surrounding `torch.utils.checkpoint`."""
    # Older versions of torch cannot tell whether there are hooks.
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    top = getattr(autograd, "_top_saved_tensors_default_hooks", lambda _: True)
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or top(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switch off a caller's autocast on a device, for the generation of weights."""
    on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def dense_linear(weight: Tensor, transposed: bool, x: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ W.T + bias` with a dense weight that may be stored transposed."""
    return F.linear(x, weight.t() if transposed else weight, bias)
