"""Forms of a layer: what stands in the skeleton of a p-net for a layer whose weight is generated.

A layer whose forward is the stock one (`y = x W^T + b`, a convolution, an embedding, attention) is replaced by a form
of it whose inputs are what the g-nets give:

* `FactoredWeight`: `W = L R^T`, tile by tile, applied as `(x R) L^T` and never multiplied out;
* `RecomputedWeight` (`gbfunc.layers.recomputed`): `W = make(*leaves)`, made for each use and again in backward.

`torch.func.functional_call` sets these inputs like any parameters. `layer.weight` is a property that gives the dense
tensor, with its graph, to whoever reads it; for the rest of that call the layer uses that very tensor.

Suffixes: i tile rows (nr of them), j tile columns (nc), r and c rows and columns of a tile, k rank, B batch rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gbfunc.costs import FLOPS_PER_ELEMENT
from gbfunc.tiling import TileGrid, join_tiles

_CHANNELS, _SLOWER = 16, 1.25
"""Convolutions compute this many channels at once, those with few channels in this part more time for each FLOP."""


def lazy_pays(
    rows: int,
    cols: int,
    k: int,
    tiles: tuple[int, int],
    batch_rows: int,
    frozen_base: bool = False,
    conv: bool = False,
) -> bool:
    """Whether applying the factors costs less than forming the weight, forward and backward.

    With R rows, C columns, nr x nc `tiles` of rank k and B batch rows (positions, for a convolution), in FLOPs,
    with e = 40 FLOPs per element moved (6 times for the weight or its gradient, 15 times for the thin product):

        dense    = 6 R C (B + k) + 6 e R C                  three GEMMs each for layer and generation
        factored = 6 B k (nr C + nc R) + 15 e B nr nc k     three pairs of thin GEMMs

    Beside a `frozen_base`, the factors spare one GEMM of the weight's size, that of its gradient, and not three. For a
    `conv`, nr k counts as the next multiple of 16, and factors cost a quarter more (measured: 3 x 3 kernels, 16 to 192
    channels, in float32 and bfloat16).

    >>> lazy_pays(4096, 4096, 64, (1, 1), 256), lazy_pays(128, 128, 64, (1, 1), 4096)
    (True, False)
    """
    tile_rows, tile_cols = tiles
    dense = rows * cols * ((2 if frozen_base else 6) * batch_rows + 6 * (k + FLOPS_PER_ELEMENT))
    thin = 6 * (tile_rows * cols + tile_cols * rows) + 15 * FLOPS_PER_ELEMENT * tile_rows * tile_cols
    if conv:
        k, dense = k + _missing_ranks(tile_rows, k), dense / _SLOWER
    return batch_rows * k * thin < dense


def _missing_ranks(tile_rows: int, k: int) -> int:
    """What k lacks so that the filters of a column of tiles are a multiple of `_CHANNELS`."""
    return -k % (_CHANNELS // math.gcd(tile_rows, _CHANNELS))


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

    cache: dict[str, Tensor] | None = None
    used: set[str] = set()  # noqa: RUF012 (replaced for each call)


class WeightForm(nn.Module):
    """The weight of a layer, parameter `name`, in a form other than dense; `functional_call` sets its `inputs`.

    Subclasses give `make` and the three operations. `reads` counts how often the dense weight was read by another than
    the layer; `call` is that of the p-net that it is in.
    """

    def __init__(self, name: str, inputs: tuple[str, ...]) -> None:
        super().__init__()
        self.name, self.inputs = name, inputs
        self.__dict__["_parameters"] = _Inputs.fromkeys(inputs)
        self.reads = 0
        self.call = Call()

    def hold(self, tensors: Mapping[str, Tensor]) -> None:
        """Take copies of the inputs as parameters of the form's, as a module for serving has them."""
        self.__dict__["_parameters"] = {k: nn.Parameter(x.detach().clone()) for k, x in tensors.items()}

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
        """The inputs by name: tensors during a call of the p-net, None outside of one."""
        return self._parameters

    @property
    def active(self) -> bool:
        """Whether there is a weight: a call of the p-net is going on, and has given the inputs."""
        return self.call.cache is not None and self.given[self.inputs[0]] is not None

    @property
    def held(self) -> Tensor | None:
        """The dense weight, if this call of the p-net has it."""
        cache = self.call.cache
        return cache.get(self.name) if cache else None

    def dense(self) -> Tensor:
        """The dense weight; the same tensor throughout a call of the p-net."""
        weight = self.held
        if weight is None:
            device = self.given[self.inputs[0]].device
            # Whoever reads it without gradients may use it with them later; autocast is for the p-net.
            inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
            mode = torch.inference_mode(False) if inference else nullcontext()
            autocast = nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)
            with mode, torch.enable_grad(), autocast:
                weight = self.make()
            if self.call.cache is not None:
                self.call.cache[self.name] = weight
        return weight

    def use(self) -> None:
        """Note that the layer computes without the dense weight."""
        if self.call.cache is not None and not torch.compiler.is_compiling():
            self.call.used.add(self.name)

    def read(self) -> Tensor:
        """The dense weight for someone else than the layer."""
        self.reads += 1
        late = self.name in self.call.used and self.held is None
        weight = self.dense()
        if late:
            refused: Any = weight
            refused.register_hook = refused.retain_grad = partial(_refuse_hook, self.name)
        return weight


class FactoredWeight(WeightForm):
    """A weight whose matrix has the tiles `L[i, j] @ R[i, j].T`: inputs left [nr, nc, r, k] and right [nr, nc, c, k].

    The layer stores it in `shape`, `transposed` as in Hugging Face's `Conv1D`. With `auto` the factors are used where
    `lazy_pays` says so, and else the dense weight.
    """

    left: Tensor
    right: Tensor
    more: ClassVar[tuple[str, ...]] = ()
    """Inputs beside the factors."""

    def __init__(self, name: str, shape: tuple[int, ...], grid: TileGrid, transposed: bool, auto: bool) -> None:
        super().__init__(name, ("left", "right", *self.more))
        self.shape, self.grid, self.transposed, self.auto = shape, grid, transposed, auto

    def make(self) -> Tensor:
        """Multiply the factors out."""
        left, right = self.given["left"], self.given["right"]
        # One matrix product is faster than a batch of one.
        single = self.grid.n_tiles == 1
        matrix = left[0, 0] @ right[0, 0].mT if single else join_tiles((left @ right.mT).flatten(0, 1), self.grid)
        return (matrix.t() if self.transposed else matrix).reshape(self.shape)

    def _thin(self, batch_rows: int, conv: bool = False) -> bool:
        """Whether the factors are used and not the dense weight."""
        if self.held is not None:
            return False
        grid, (nr, nc, _, k) = self.grid, self.left.shape
        thin = not self.auto or lazy_pays(grid.rows, grid.cols, k, (nr, nc), batch_rows, "base" in self.more, conv)
        if thin:
            self.use()
        return thin

    def linear(self, x: Tensor, bias: Tensor | None, rows: slice = slice(None)) -> Tensor:
        """`x @ W[rows].T + bias` as two thin products, where these pay."""
        y = self.thin_linear(x, bias, rows)
        return dense_linear(self.dense(), self.transposed, rows, x, bias) if y is None else y

    def thin_linear(self, x: Tensor, bias: Tensor | None, rows: slice) -> Tensor | None:
        """`x @ (L R^T)[rows].T + bias`; None where the dense weight is used."""
        grid, left, right = self.grid, self.left, self.right
        start, stop = rows.start or 0, grid.rows if rows.stop is None else rows.stop
        tiles = slice(start // grid.tile_rows, -(-stop // grid.tile_rows))
        # Rows that begin within a tile and end in another one are cut out of the dense weight.
        across = start % grid.tile_rows and tiles.stop - tiles.start > 1
        if across or not self._thin(math.prod(x.shape[:-1])):
            return None
        if x.shape[-1] != grid.cols:
            raise ValueError(f"expected an input with {grid.cols} features, got shape {tuple(x.shape)}")
        if rows.stop is not None:
            left, right = left[tiles], right[tiles]
            if len(left) == 1:
                left = left[:, :, start - tiles.start * grid.tile_rows :][:, :, : stop - start]
        return _linear(x, left, right, stop - start, bias)

    def conv(self, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
        """`conv(x, W, bias, **options)` as two thin convolutions, where these pay."""
        y = self.thin_conv(conv, x, bias, options)
        return conv(x, self.dense(), bias, **options) if y is None else y

    def thin_conv(
        self, conv: Callable[..., Tensor], x: Tensor, bias: Tensor | None, options: dict[str, Any]
    ) -> Tensor | None:
        """A convolution with k filters per tile, then a 1x1 convolution; tiles must not cut kernels."""
        positions = math.prod(self.shape[2:])
        whole = options["groups"] == 1 and self.grid.tile_cols % positions == 0
        if not whole or not self._thin(_positions(x, self.shape[2:], options), conv=True):
            return None
        if x.ndim == len(self.shape) - 1:
            y = self.thin_conv(conv, x.unsqueeze(0), bias, options)
            return None if y is None else y.squeeze(0).contiguous()
        channels, kernel = self.shape[1], self.shape[2:]
        if x.shape[1] != channels:
            raise ValueError(f"expected an input with {channels} channels, got shape {tuple(x.shape)}")
        # Torch's own convolutions of images have them so on a CPU, those of volumes do not.
        last = (x.ndim == 4 or (x.ndim > 3 and not x.is_cpu)) and x.stride(1) == 1 and x.stride(-1) >= channels
        left, right, (nr, nc, r, k) = self.left, self.right, self.left.shape
        if nc > 1 and x.is_cpu and (missing := _missing_ranks(nr, k)):
            # Groups of other sizes take up to three times as long.
            left, right, k = F.pad(left, (0, missing)), F.pad(right, (0, missing)), k + missing
        width = self.grid.tile_cols // positions
        if nc * width != channels:
            x = F.pad(x, (0, 0) * len(kernel) + (0, nc * width - channels))
        filters = right.permute(1, 0, 3, 2).reshape(nc * nr * k, width, *kernel)
        thin = conv(x, filters, None, **options | {"groups": nc})
        if nc > 1 and nr > 1:
            thin = thin.unflatten(1, (nc, nr, k)).transpose(1, 2).flatten(1, 3)
        mix = left.transpose(1, 2).reshape(nr * r, nc * k, *(1,) * len(kernel))
        if nr * r == self.grid.rows:
            y = conv(thin, mix, bias, groups=nr)
        else:
            y = conv(thin, mix, None, groups=nr)[:, : self.grid.rows]
            y = y if bias is None else y + bias.to(y.dtype).reshape(-1, *(1,) * len(kernel))
        # Channels are last in memory where those of the input are: dropout draws its mask in the order of memory.
        return y.movedim(1, -1).contiguous().movedim(-1, 1) if last else y.contiguous()

    def embedding(self, index: Tensor, padding_idx: int | None) -> Tensor:
        """Rows of the weight, from its factors where these pay."""
        y = self.thin_embedding(index, padding_idx)
        return F.embedding(index, self.dense(), padding_idx) if y is None else y

    def thin_embedding(self, index: Tensor, padding_idx: int | None) -> Tensor | None:
        """Rows of the left factors times the right factors; None where the dense weight is used."""
        nr, nc, r, k = self.left.shape
        # Rows of several tiles need each token's right factors: past the weight's size, form it.
        if not self._thin(index.numel()) or (nr > 1 and index.numel() * k > self.grid.rows):
            return None
        flat = index.reshape(-1)
        table = self.left.transpose(1, 2).reshape(nr * r, nc * k)[: self.grid.rows]
        rows_Bjk = F.embedding(flat, table).reshape(flat.shape[0], nc, k)
        # Rows of a weight are as wide as the weight, also under autocast.
        with nullcontext() if index.is_meta else torch.autocast(index.device.type, enabled=False):
            if nr == 1:
                y_Bjc = (rows_Bjk.transpose(0, 1) @ self.right[0].mT).transpose(0, 1)
            else:
                y_Bjc = (rows_Bjk.unsqueeze(2) @ self.right[flat // r].mT).squeeze(2)
        y = y_Bjc.reshape(*index.shape, nc * self.grid.tile_cols)[..., : self.grid.cols].contiguous()
        if padding_idx is not None:
            # Gradients of the padding row stop here, in both factors.
            y = torch.where((index == padding_idx % self.grid.rows).unsqueeze(-1), y.detach(), y)
        return y


def dense_linear(weight: Tensor, transposed: bool, rows: slice, x: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ W[rows].T + bias` with a dense weight, or the transpose that is stored of it."""
    weight = weight.t() if transposed else weight
    return F.linear(x, weight if rows.stop is None else weight[rows], bias)


def _linear(x: Tensor, left: Tensor, right: Tensor, rows: int, bias: Tensor | None) -> Tensor:
    """`x @ W.T + bias` from factors [nr, nc, r, k] and [nr, nc, c, k]: [..., cols] -> [..., rows]."""
    nr, nc, r, k = left.shape
    c = right.shape[2]
    if nr == nc == 1:
        return F.linear(F.linear(x, right.flatten(0, 2).t()), left.flatten(0, 2), bias)
    lead, cols = x.shape[:-1], x.shape[-1]
    batch = math.prod(lead)
    x_jBc = F.pad(x.reshape(batch, cols), (0, nc * c - cols)).reshape(batch, nc, c).transpose(0, 1)
    thin = x_jBc @ right.permute(1, 2, 0, 3).reshape(nc, c, nr * k)
    # The sum over tile columns j is part of the second product, whose inner dimension is (j, k).
    thin_iBJ = thin.reshape(nc, batch, nr, k).permute(2, 1, 0, 3).reshape(nr, batch, nc * k)
    y_iBr = thin_iBJ @ left.transpose(2, 3).reshape(nr, nc * k, r)
    # Contiguous as F.linear's output is: dropout draws its mask in the order of memory.
    y = y_iBr.transpose(0, 1).reshape(*lead, nr * r)[..., :rows].contiguous()
    # Under autocast the products are narrow and the bias is not; F.linear returns the narrow dtype.
    return y if bias is None else y + bias.to(y.dtype)


def _positions(x: Tensor, kernel: tuple[int, ...], options: Mapping[str, Any]) -> int:
    """Rows of the matrix product that a convolution is: its output positions, batch included."""
    n, padding = len(kernel), options["padding"]
    batch = x.shape[0] if x.ndim == n + 2 else 1
    if padding == "same":
        return batch * math.prod(x.shape[-n:])
    padding = (0,) * n if padding == "valid" else padding
    # A loop: the compiler does not take a generator of sizes that it does not know.
    for size, k, s, p, d in zip(x.shape[-n:], kernel, options["stride"], padding, options["dilation"], strict=True):
        batch *= (size + 2 * p - d * (k - 1) - 1) // s + 1
    return batch


def linear_forward(layer: Any, input: Tensor) -> Tensor:
    """The forward of `nn.Linear` on whatever form its weight has."""
    return layer.weight_form.linear(input, layer.bias)


def conv_forward(layer: Any, input: Tensor) -> Tensor:
    """That of `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`."""
    conv: Any = (torch.conv1d, torch.conv2d, torch.conv3d)[len(layer.kernel_size) - 1]
    options = {"stride": layer.stride, "dilation": layer.dilation, "groups": layer.groups, "padding": layer.padding}
    if layer.padding_mode != "zeros":
        input = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        options["padding"] = (0,) * len(layer.kernel_size)
    return layer.weight_form.conv(conv, input, layer.bias, **options)


def embedding_forward(layer: Any, input: Tensor) -> Tensor:
    """That of `nn.Embedding`."""
    return layer.weight_form.embedding(input, layer.padding_idx)


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
