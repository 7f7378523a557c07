"""A module of a p-net in which every row of the batch has its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gbfunc.layers.attention import attention_forward
from gbfunc.layers.forms import WeightForm
from gbfunc.layers.install import layer_form
from gbfunc.pnet import PureNet, buffers_of, parameter_infos
from gbfunc.trees import tree_leaves, tree_map
from gbfunc.types import Params


class NoRowsError(ValueError):
    """A module at `path` has an input or output whose first dimension is not that of rows."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"module {path!r} of the p-net has {what}: batches must come first")
        self.path = path


class RowWise:
    """A module of the p-net under `vmap`: row `b` of its inputs with entry `b` of the tensors in `varying`.

    Args:
        pnet: the p-net.
        path: of the module in it.
        forms: weights of the module that are not dense, by their names in it.
        varying: its parameters, inputs of forms and buffers that have a row each, by their names in it.
    """

    def __init__(self, pnet: nn.Module, path: str, forms: Mapping[str, WeightForm], varying: set[str]) -> None:
        module = pnet.get_submodule(path)
        self.path, self.forms, self.varying, self.mapped = path, forms, varying, True
        self.checked = False
        self.net = PureNet(module, forms)
        self.net.skeleton.eval()
        without_fused(self.net.skeleton)
        self.parameters = [info.name for info in parameter_infos(module)]
        self.buffers = [*buffers_of(module)]

    def install(self, skeleton: nn.Module) -> list[str]:
        """Take the place of the module's forward; names of the parameters that then have a dimension of rows."""
        module = skeleton.get_submodule(self.path)
        object.__setattr__(module, "forward", partial(self.forward, module))
        read: dict[str, set[str]] = {}
        for key in self.varying:
            owner, _, attribute = key.partition("_form.")[0].rpartition(".")
            read.setdefault(owner, set()).add(attribute)
        for owner, attributes in read.items():
            _guard(module.get_submodule(owner), attributes, self.path)
        return [_join(self.path, name) for name in self.parameters]

    def _tensors(self, module: nn.Module) -> tuple[Params, Params]:
        """Parameters, or inputs of their forms, and buffers that the module has during a call of the p-net."""
        weights: Params = {}
        for name in self.parameters:
            prefix, _, attribute = name.rpartition(".")
            owner: Any = module.get_submodule(prefix)
            if name in self.forms:
                given: dict[str, Any] = owner.get_submodule(f"{attribute}_form")._parameters
                weights |= {f"{name}_form.{k}": given[k] for k in self.forms[name].inputs}
            else:
                given = owner._parameters
                weights[name] = given[attribute]
        held: Params = dict(module.named_buffers(remove_duplicate=False))
        return weights, {name: held[name] for name in self.buffers}

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs, row by row."""
        weights, buffers = self._tensors(module)
        everything = weights | buffers
        mine = {k: everything[k] for k in self.varying}
        n_rows = len(next(iter(mine.values())))
        inputs = [x for _, x in tree_leaves((args, kwargs))]
        split = [self._has_rows(x, n_rows) for x in inputs]
        rows = [x for x, of in zip(inputs, split, strict=True) if of]
        template: Any = None

        def call(mine: Params, rows: list[Tensor]) -> list[Tensor]:
            nonlocal template
            each, flags = iter(rows), iter(split)
            a, k = tree_map(lambda x: next(each) if next(flags) else x, (args, kwargs))
            here = {name: mine.get(name, x) for name, x in everything.items()}
            template = self.net({k: here[k] for k in weights}, {k: here[k] for k in buffers}, *a, **k)
            return [x for _, x in tree_leaves(template) if isinstance(x, Tensor)]

        def row(mine: Params, rows: list[Tensor]) -> tuple[Tensor, ...]:
            return tuple(x[0] for x in call(mine, [x[None] for x in rows]))

        if not self.checked:
            self._check(call, {k: x[0] for k, x in mine.items()}, [x[:1] for x in rows])
        made = iter(self._of_rows(row, mine, rows))
        return tree_map(lambda x: next(made) if isinstance(x, Tensor) else x, template)

    def _check(self, call: Callable[..., list[Tensor]], mine: Params, rows: list[Tensor]) -> None:
        """Raise `NoRowsError` unless all outputs have the rows first; a batch of one has other dimensions of one."""
        with torch.no_grad():
            shapes = [[x.shape for x in call(mine, [x.expand(n, *x.shape[1:]) for x in rows])] for n in (1, 2)]
        for one, two in zip(*shapes, strict=True):
            # What has no input with rows, as a table of positions, gives one row for all.
            if one[:1] != (1,) or one[1:] != two[1:] or two[:1] not in ((2,), (1,) if not rows else (2,)):
                raise NoRowsError(self.path, f"an output of shape {tuple(two)} for a batch of two rows")
        self.checked = True

    def _of_rows(self, row: Callable[..., tuple[Tensor, ...]], *given: Any) -> tuple[Tensor, ...]:
        """`vmap(row)`; one row after the other for a module that cannot run under vmap (LSTMs, control flow)."""
        if self.mapped:
            try:
                # The fused attention of CPUs has no batching rule.
                with sdpa_kernel(SDPBackend.MATH):
                    return vmap(row, randomness="different")(*given)
            except RuntimeError:
                # An error of the module itself is raised again.
                outputs = self._loop(row, *given)
                self.mapped = False
                return outputs
        return self._loop(row, *given)

    def _loop(self, row: Callable[..., tuple[Tensor, ...]], mine: Params, rows: list[Tensor]) -> tuple[Tensor, ...]:
        n_rows = len(next(iter(mine.values())))
        made = [row({k: x[b] for k, x in mine.items()}, [x[b] for x in rows]) for b in range(n_rows)]
        return tuple(torch.stack(outputs) for outputs in zip(*made, strict=True))

    def _has_rows(self, x: Any, n_rows: int) -> bool:
        """Whether an input has a row for each genome, and not one for all of them."""
        if not isinstance(x, Tensor) or x.ndim == 0:
            return False
        if len(x) == n_rows or (len(x) == 1 and x.ndim > 1) or not self.path:
            return len(x) == n_rows
        raise NoRowsError(self.path, f"an input of shape {tuple(x.shape)} for {n_rows} rows")


def without_fused(net: nn.Module) -> None:
    """Let torch's encoders call their layers: their fused forward reads weights and has no batching rule."""
    for module in net.modules():
        if isinstance(module, nn.MultiheadAttention) and layer_form(module):
            object.__setattr__(module, "forward", partial(attention_forward, module))
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def _guard(module: nn.Module, attributes: set[str], path: str) -> None:
    """Let whoever reads these tensors of a module from outside, where they are those of all rows, raise."""

    def refuse(_: nn.Module) -> Tensor:
        raise NoRowsError(path, "weights that are read by another module, which has all rows at once")

    stock = type(module)
    guards = dict.fromkeys(attributes, property(refuse))
    module.__class__ = type(stock.__name__, (stock,), {"__module__": stock.__module__, **guards})


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
