"""Runs modules of a p-net under `vmap`: row b of a module's inputs uses the weights of row b's genome."""

import math
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gbfunc.layers.forms import WeightForm
from gbfunc.layers.kinds import DELTA
from gbfunc.pnet.describe import buffers_of, parameter_infos
from gbfunc.pnet.pure import PureNet
from gbfunc.trees import tree_leaves, tree_map
from gbfunc.types import Params

PLAIN = (bool, int, float, complex, str, bytes, Enum, type(None), torch.dtype, torch.device)
"""Types of values besides tensors that inputs and outputs may contain. All rows share such a value."""


class RowWise:
    """A module of the p-net under `vmap`: row `b` of the inputs uses entry `b` of each tensor that `varying` names."""

    tensors: tuple[Params, int]  # set before each call: the p-net's tensors by name, and the number of rows

    def __init__(self, pnet: nn.Module, path: str, forms: Mapping[str, WeightForm], varying: Collection[str]) -> None:
        module, prefix = pnet.get_submodule(path), f"{path}." if path else ""
        # The p-net lists a tied tensor under its first name only.
        first = {name: info.name for info in parameter_infos(pnet) for name in (info.name, *info.aliases)}
        own = {info.name: first[f"{prefix}{info.name}"] for info in parameter_infos(module)}
        # Add the deltas of quantised layers (`gbfunc.layers.beside`), which are not among the parameters of the module.
        own |= {k.removeprefix(prefix): k for k in forms if k.startswith(prefix) and k.rpartition(".")[2] == DELTA}
        mine = {name: forms[there].renamed(name) for name, there in own.items() if there in forms}
        self.path, self._net = path, PureNet(module, mine, lambda net: unfused(net.eval()))
        self._weights = {k: v for k, v in own.items() if k not in mine}
        for k, form in mine.items():
            self._weights |= zip(form.keys, forms[own[k]].keys, strict=True)
        self._buffers = {name: f"{prefix}{name}" for name in buffers_of(module)}
        self._varying = [name for name, there in (self._weights | self._buffers).items() if there in varying]

    def install(self, skeleton: nn.Module) -> None:
        """Replace the module's forward in `skeleton`, a copy of the p-net, by this object."""
        module = skeleton.get_submodule(self.path)
        object.__setattr__(module, "forward", self)
        # Remove the module's hooks from `skeleton`: this object's own copy of the module calls the hooks.
        for name in vars(nn.Module()):
            if name.endswith("_hooks"):
                vars(module)[name].clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's outputs, each row with the tensors of its genome."""
        tensors, n_rows = self.tensors
        everything = {k: tensors[v] for k, v in (self._weights | self._buffers).items()}
        inputs = [x for _, x in tree_leaves((args, kwargs))]
        split = [self._has_rows(x, n_rows) for x in inputs]
        template: Any = None

        def row(mine: Params, rows: list[Tensor]) -> tuple[Tensor, ...]:
            nonlocal template
            each, flags = iter(rows), iter(split)
            a, k = tree_map(lambda x: next(each)[None] if next(flags) else x, (args, kwargs))
            here = everything | mine
            template = self._net(*({n: here[n] for n in names} for names in (self._weights, self._buffers)), *a, **k)
            return tuple(x[0] for _, x in tree_leaves(template) if isinstance(x, Tensor))

        row_inputs = [x for x, of_rows in zip(inputs, split, strict=True) if of_rows]
        # Use unfused attention, because the fused attention of CPUs has no batching rule.
        with sdpa_kernel(SDPBackend.MATH):
            outputs = vmap(row, randomness="different")({k: everything[k] for k in self._varying}, row_inputs)
        for at, x in tree_leaves(template, "output"):
            if not isinstance(x, (Tensor, *PLAIN)) and not callable(x):
                raise ValueError(f"{self.path!r} has a {type(x).__name__} as {at}, which cannot be joined over rows")
        left = iter(outputs)
        return tree_map(lambda x: next(left) if isinstance(x, Tensor) else x, template)

    def _has_rows(self, x: Any, n_rows: int) -> bool:
        if not isinstance(x, (Tensor, *PLAIN)) and not callable(x):
            raise ValueError(f"{self.path!r} has a {type(x).__name__} as input, whose rows are not known")
        if not isinstance(x, Tensor) or x.ndim == 0:
            return False
        # Refuse inner inputs without a dimension of rows: a batch of as many rows as their first dimension splits them.
        if self.path and len(x) != n_rows and (len(x) != 1 or x.ndim == 1):
            raise ValueError(f"{self.path!r} has an input of shape {tuple(x.shape)} for {n_rows} rows")
        return len(x) == n_rows


def unfused(net: nn.Module) -> list[str]:
    """Switch off the fused evaluation forwards of torch's attention and encoders, which have no batching rule."""
    for module in net.modules():
        if isinstance(module, nn.MultiheadAttention) and not module.training:
            module.training, module.dropout = True, 0.0
        elif isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return []


def joined(outputs: Sequence[Any], order: Tensor) -> Any:
    """Join outputs of several batches, and select rows by `order`. Pad smaller tensors with -inf (integers: -1)."""
    tensors = iter([*zip(*([x for _, x in tree_leaves(out) if isinstance(x, Tensor)] for out in outputs), strict=True)])

    def join(first: Any) -> Any:
        if not isinstance(first, Tensor):
            return first
        each, padded = next(tensors), list[Tensor]()
        padding = -math.inf if first.is_floating_point() else -1
        sides = [max(n) for n in zip(*(x.shape[1:] for x in each), strict=True)]
        for x in each:
            missing = [n for side, own in zip(sides[::-1], x.shape[:0:-1], strict=True) for n in (0, side - own)]
            padded.append(F.pad(x, missing, value=padding) if any(missing) else x)
        return torch.cat(padded)[order.to(first.device)]

    return tree_map(join, outputs[0])
