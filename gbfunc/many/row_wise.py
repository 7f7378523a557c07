"""A module of a p-net in which every row of the batch has its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
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

PLAIN = (bool, int, float, complex, str, bytes, Enum, type(None), torch.dtype, torch.device)
"""Inputs and outputs beside tensors: values that do not change, and are for all rows."""


class RowWise:
    """A module of the p-net under `vmap`: row `b` of its inputs with entry `b` of the tensors in `varying`.

    Args:
        pnet: the p-net.
        path: of the module in it.
        forms: weights of the module that are not dense, by their names in it.
        varying: its parameters, inputs of forms and buffers that have a row each, by their names in it.

    Attributes:
        n_rows: rows of the batch, set before each call.
        looped: whether rows run one after the other.
        running: whether a call goes on.
    """

    def __init__(self, pnet: nn.Module, path: str, forms: Mapping[str, WeightForm], varying: set[str]) -> None:
        module = pnet.get_submodule(path)
        infos = parameter_infos(module)
        # Of tensors that are tied inside of the module the first name stands for all.
        again = {alias for info in infos for alias in info.aliases}
        self.varying = {name for name in varying if name.partition("_form.")[0] not in again}
        self.path, self.forms, self.n_rows, self.looped, self.running = path, forms, 0, False, False
        self.net = PureNet(module, forms, prepare)
        self.parameters, self.buffers = [info.name for info in infos], [*buffers_of(module)]

    def install(self, skeleton: nn.Module) -> list[str]:
        """Take the place of the module's forward; names of the parameters that then have a dimension of rows."""
        module = skeleton.get_submodule(self.path)
        object.__setattr__(module, "forward", partial(self.forward, module))
        # Its hooks are called for each row; around the rows they would be called again, on tensors of all rows.
        for name in vars(nn.Module()):
            if name.endswith("_hooks"):
                vars(module)[name].clear()
        return [f"{self.path}.{name}" if self.path else name for name in self.parameters]

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
        buffers: Params = dict(module.named_buffers(remove_duplicate=False))
        return weights, {name: buffers[name] for name in self.buffers}

    def forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The module's outputs, row by row."""
        weights, buffers = self._tensors(module)
        everything = weights | buffers
        inputs = [x for _, x in tree_leaves((args, kwargs))]
        split = [self._has_rows(x) for x in inputs]
        rows = [x for x, of in zip(inputs, split, strict=True) if of]
        template: Any = None

        def row(mine: Params, rows: list[Tensor]) -> tuple[Tensor, ...]:
            nonlocal template
            each, flags = iter(rows), iter(split)
            a, k = tree_map(lambda x: next(each)[None] if next(flags) else x, (args, kwargs))
            here = everything | mine
            template = self.net({k: here[k] for k in weights}, {k: here[k] for k in buffers}, *a, **k)
            return tuple(x[0] for _, x in tree_leaves(template) if isinstance(x, Tensor))

        self.running = True
        try:
            made = iter(self._of_rows(row, {k: everything[k] for k in self.varying}, rows))
        finally:
            self.running = False
        for at, x in tree_leaves(template, "output") if self.path else ():
            # Of the whole p-net, whose rows may have one of their own each, the caller says so.
            if not isinstance(x, (Tensor, *PLAIN)) and not callable(x):
                raise ValueError(f"{self.path!r} has a {type(x).__name__} as {at}, which is that of one row")
        return tree_map(lambda x: next(made) if isinstance(x, Tensor) else x, template)

    def _of_rows(self, row: Callable[..., tuple[Tensor, ...]], mine: Params, rows: list[Tensor]) -> tuple[Tensor, ...]:
        """`vmap(row)`; one row after the other for a module that cannot run under vmap (LSTMs, control flow)."""
        if not self.looped:
            try:
                # The fused attention of CPUs has no batching rule.
                with sdpa_kernel(SDPBackend.MATH):
                    return vmap(row, randomness="different")(mine, rows)
            except Exception:  # An error of the module itself is raised again.
                outputs = self._loop(row, mine, rows)
                self.looped = True
                return outputs
        return self._loop(row, mine, rows)

    def _loop(self, row: Callable[..., tuple[Tensor, ...]], mine: Params, rows: list[Tensor]) -> tuple[Tensor, ...]:
        made = [row({k: x[b] for k, x in mine.items()}, [x[b] for x in rows]) for b in range(self.n_rows)]
        return tuple(torch.stack(outputs) for outputs in zip(*made, strict=True))

    def _has_rows(self, x: Any) -> bool:
        """Whether an input has a row for each genome, and not one for all of them."""
        if self.path and not isinstance(x, (Tensor, *PLAIN)) and not callable(x):
            raise ValueError(f"{self.path!r} has a {type(x).__name__} as input, whose rows are not known")
        if not isinstance(x, Tensor) or x.ndim == 0:
            return False
        # Inside of the p-net another first dimension equals the number of rows in some batches and not in others.
        if self.path and len(x) != self.n_rows and (len(x) != 1 or x.ndim == 1):
            raise ValueError(f"{self.path!r} has an input of shape {tuple(x.shape)} for {self.n_rows} rows")
        return len(x) == self.n_rows


def prepare(net: nn.Module) -> list[str]:
    """Eval mode, and let torch's encoders call their layers: their fused forward has no batching rule."""
    for module in net.eval().modules():
        if isinstance(module, nn.MultiheadAttention) and layer_form(module):
            object.__setattr__(module, "forward", partial(attention_forward, module))
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return []
