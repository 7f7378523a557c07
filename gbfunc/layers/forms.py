"""Forms of a weight: what the g-nets give for it, and how its layer computes with that.

A form owns both halves of a weight's life. `of(sources)` takes the matrices that the g-nets make, in the state that the
form `needs`, to the tensors of a call, by the names in `keys`; its operations compute with them:

* `DenseWeight`: the tensor itself, formed; the layer is torch's own;
* `FactoredWeight` (`gbfunc.layers.factored`): `W = L R^T`, tile by tile, applied as `(x R) L^T`, never formed;
* `DeltaWeight` (there too): factors beside a frozen weight;
* `RecomputedWeight` (`gbfunc.layers.recomputed`): `W = make(*leaves)`, made for each use and again in backward.

During a call of the p-net a `Weight` stands in each layer with a form (`gbfunc.layers.install`). `layer.weight` is a
property that gives the dense tensor, with its graph; for the rest of the call the layer uses that very tensor.
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
"""What a form takes of the g-nets: matrices, factors of tiles, or their leaves, to evaluate them itself."""


class Source(Protocol):
    """One matrix of a weight, as an evaluation of the g-nets gives it (`gbfunc.generation.generator`)."""

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


class WeightForm:
    """The form of a weight that is not dense: how it is generated, formed and applied. It holds no tensors.

    Subclasses give `of`, `make` and the three operations, which take the `Weight` of a call.

    Attributes:
        name: the parameter.
        inputs: names of the tensors that make the weight.
        keys: the names that these tensors have among those of a call.
        frozen: those of the keys that take no gradient.
        reads: how often the dense weight was read by another than its layer.
    """

    needs: Needs
    frozen: tuple[str, ...] = ()

    def __init__(self, name: str, inputs: tuple[str, ...]) -> None:
        self.name, self.inputs, self.keys, self.reads = name, inputs, tuple(f"{name}_form.{k}" for k in inputs), 0

    def __deepcopy__(self, memo: Any) -> WeightForm:
        return self

    def renamed(self: Self, name: str) -> Self:
        """The form of the weight under another name."""
        form = copy.copy(self)
        WeightForm.__init__(form, name, self.inputs)
        return form

    def taken(self, tensors: TensorMap) -> Params:
        """The inputs by their own names, from tensors by `keys`."""
        return {k: tensors[key] for k, key in zip(self.inputs, self.keys, strict=True)}

    def of(self, sources: Sequence[Source]) -> Params:
        """The tensors of a call, by `keys`, from what the g-nets give."""
        raise NotImplementedError

    def make(self, given: Params) -> Tensor:
        """The weight in its layer's shape, in the graph of the inputs."""
        raise NotImplementedError

    def linear(self, weight: Weight, x: Tensor, bias: Tensor | None, rows: slice | None) -> Tensor:
        """`x @ W[rows].T + bias`: [..., cols] -> [..., rows]."""
        raise NotImplementedError

    def conv(
        self, weight: Weight, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, **options: Any
    ) -> Tensor:
        """`conv(x, W, bias, **options)` for `torch.conv1d`, `conv2d` or `conv3d`."""
        raise NotImplementedError

    def embedding(self, weight: Weight, index: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of the weight: integers [...] -> [..., cols]."""
        raise NotImplementedError


class Weight:
    """A weight while its p-net is called.

    Attributes:
        form: its form.
        given: the inputs of the form by name.
        formed: the dense tensor, once somebody has asked for it.
        applied: whether a layer has used the weight before it was formed.
    """

    def __init__(self, form: WeightForm, given: Params) -> None:
        self.form, self.given = form, given
        self.formed: Tensor | None = None
        self.applied = False

    def dense(self) -> Tensor:
        """The dense weight; the same tensor throughout a call of the p-net."""
        if self.formed is None:
            first, mode = next(iter(self.given.values())), nullcontext()
            if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
                # A reader in inference mode may share the weight with one that takes gradients, where there are some.
                mode = torch.inference_mode(first.is_inference())
            with mode, torch.enable_grad(), outside_autocast(first.device), unseen_by_checkpoints():
                self.formed = self.form.make(self.given)
        return self.formed

    def read(self) -> Tensor:
        """The dense weight, for code other than the layer's forward."""
        if not torch.compiler.is_compiling():
            # A number that a graph changes is one that it is compiled anew for, at every call.
            self.form.reads += 1
        return self.dense()

    def linear(self, x: Tensor, bias: Tensor | None, rows: slice | None = None) -> Tensor:
        """`x @ W[rows].T + bias`."""
        return self.form.linear(self, x, bias, rows)

    def conv(self, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """`conv(x, W, bias, **options)`."""
        return self.form.conv(self, conv, x, bias, **options)

    def embedding(self, index: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of the weight."""
        return self.form.embedding(self, index, padding_idx)


Outside = Callable[[Any, str], Any]
"""`(layer, attribute) -> weight`, a `Weight` or a tensor: a generated weight that is read outside of a call."""


def now(attribute: str) -> str:
    """The name under which a layer has a generated weight during a call: a `Weight`, or a tensor; None outside."""
    return f"_{attribute}_now"


def weight_of(layer: Any, attribute: str) -> Any:
    """The generated weight of a layer, a `Weight` or a tensor; None in a skeleton outside of a call."""
    weight = getattr(layer, now(attribute))
    outside: Outside | None = layer._outside
    return outside(layer, attribute) if weight is None and outside is not None else weight


def generated_weight(layer: Any, attribute: str) -> Any:
    """`weight_of` a layer that may have none: then None."""
    return weight_of(layer, attribute) if hasattr(layer, now(attribute)) else None


def linear_forward(layer: Any, input: Tensor) -> Tensor:
    """The forward of `nn.Linear` on whatever form its weight has."""
    return weight_of(layer, "weight").linear(input, layer.bias)


def conv_forward(layer: Any, input: Tensor) -> Tensor:
    """The forward of `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d` on whatever form the weight has."""
    conv: Any = (torch.conv1d, torch.conv2d, torch.conv3d)[len(layer.kernel_size) - 1]
    options = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups, "padding": layer.padding}
    if layer.padding_mode != "zeros":
        input = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        options["padding"] = (0,) * len(layer.kernel_size)
    return weight_of(layer, "weight").conv(conv, input, layer.bias, **options)


def embedding_forward(layer: Any, input: Tensor) -> Tensor:
    """The forward of `nn.Embedding` on whatever form its weight has."""
    return weight_of(layer, "weight").embedding(input, layer.padding_idx)


class Parameters(dict[str, Any]):
    """Parameters of a layer in a skeleton: during a call, those with a form are the dense weights to whoever reads."""

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
            # A p-net that swaps the weight itself, by functional_call say, computes with what it gives.
            weight.formed, weight.applied = value, False

    def __iter__(self) -> Any:
        # With a method of this name `dict(parameters)` reads each entry as `parameters[name]` does.
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


def unseen_by_checkpoints() -> AbstractContextManager[Any]:
    """Keep what is computed inside out of the tensors that a `torch.utils.checkpoint` around it counts and drops."""
    # Older versions of torch cannot tell whether there is one.
    autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    top = getattr(autograd, "_top_saved_tensors_default_hooks", lambda _: True)
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or top(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_is, _as_is)


def _as_is(x: Tensor) -> Tensor:
    return x


def outside_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switch a caller's autocast off for a device: it is for the p-net, not for what makes its weights."""
    on = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def dense_linear(weight: Tensor, transposed: bool, rows: slice | None, x: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ W[rows].T + bias` with a dense weight, or the transpose that is stored of it."""
    weight = weight.t() if transposed else weight
    return F.linear(x, weight if rows is None else weight[rows], bias)
