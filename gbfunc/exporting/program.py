"""Traces the call of a network as one program, with its weights or with the genome that generates them."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # Knows Hugging Face's outputs, unlike optree

from gbfunc.trees import tree_map

if TYPE_CHECKING:
    # Not at run time, because the import takes half a second.
    from torch.export import ExportedProgram

AUTO, BATCH = "auto", "batch"


class Inputs(NamedTuple):
    """The arguments of a network's call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(example: Any, net: nn.Module) -> Inputs:
        """Copy an example to the CPU: an input, a tuple of inputs, or a dict, which is sorted as in `forward`."""
        args, kwargs = tuple(example) if isinstance(example, tuple | list) else (example,), {}
        if isinstance(example, Mapping):
            names = list(inspect.signature(net.forward).parameters)
            order = sorted(example, key=lambda name: names.index(name) if name in names else len(names))
            args, kwargs = (), {name: example[name] for name in order}
        inputs = Inputs(args, kwargs).mapped(lambda x: x.detach().cpu().contiguous() if isinstance(x, Tensor) else x)
        if not inputs.tensors:
            raise ValueError(f"example must be a tensor, or a tuple or dict with some, got {type(example).__name__}")
        return inputs

    @property
    def tensors(self) -> list[Tensor]:
        return _tensors_of(tuple(self))

    def mapped(self, change: Callable[[Any], Any]) -> Inputs:
        return Inputs(*tree_map(change, tuple(self)))

    def longer(self) -> Inputs:
        """Append a copy of the first row to every tensor, to check a batch size other than the example's."""
        return self.mapped(lambda x: torch.cat([x, x[:1]]) if _has_rows(x) else x)

    def shorter(self) -> Inputs:
        """Remove the last token of every text, to check a length other than the example's."""
        return self.mapped(lambda x: x[:, :-1] if is_text(x) else x)

    def outputs_of(self, net: Callable[..., Any]) -> list[Tensor]:
        return _tensors_of(net(*self.args, **self.kwargs))


def _tensors_of(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0


def is_text(x: Any) -> bool:
    """Return True for texts: integers [batch, length > 2], as torch requires a length above 1 also after `shorter`."""
    return isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point() and x.shape[1] > 2


class Traced(NamedTuple):
    """The graph of a network's call, and the names of its outputs."""

    program: ExportedProgram
    outputs: list[str]
    dynamic_shapes: Any  # The user's option, which can name dimensions. None if the option is "auto", "batch" or None


def trace(net: nn.Module, inputs: Inputs, dynamic_shapes: Any) -> Traced:
    """Trace a network's call; ValueError if `torch.export` fails. The graph does not refer to files of source code."""
    from torch.export import Dim, export

    if torch.__version__ < "2.6":
        raise ImportError(f"exports need torch >= 2.6, got {torch.__version__}")
    batched = dynamic_shapes in (AUTO, BATCH)
    args, kwargs = inputs.longer() if batched else inputs
    shapes = dynamic_shapes
    if batched:
        batch = {0: Dim(BATCH)}
        text = batch | ({1: Dim.AUTO} if dynamic_shapes == AUTO else {})
        described = inputs.mapped(lambda x: text if is_text(x) else batch if _has_rows(x) else None)
        shapes = described.kwargs or described.args
    buffers = [(*name.rpartition(".")[::2], x) for name, x in net.named_buffers(remove_duplicate=False)]
    values = {id(x): x.clone() for *_, x in buffers}
    try:
        # Call the p-net before tracing, because some p-nets fill caches. Then restore buffers that the call changed.
        with torch.no_grad():
            outputs = net(*inputs.args, **inputs.kwargs)
    except Exception as error:  # A forward may raise any exception
        shown, why = [list(x.shape) for x in inputs.tensors], " ".join(str(error).split())[:300]
        raise ValueError(f"the p-net cannot read the example, of shapes {shown}: {why}") from error
    try:
        for path, name, x in buffers:
            setattr(net.get_submodule(path), name, values[id(x)])
        with torch.no_grad(), quiet():
            program = export(net, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        hint = "; dynamic_shapes=None keeps the example's shapes" if dynamic_shapes is not None else ""
        raise ValueError(f"torch.export cannot trace the p-net: {' '.join(str(error).split())[:300]}{hint}") from error
    for node in program.graph.nodes:
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"):
            node.meta.pop(key, None)
    taken = {node.name for node in program.graph.nodes if node.op == "placeholder"}
    names = [f"{name}_out" if name in taken else name for name in _names(outputs)]
    return Traced(program, names, None if batched else dynamic_shapes)


def _names(outputs: Any) -> list[str]:
    tensors = _tensors_of(outputs)
    if isinstance(outputs, Mapping) and len(tensors) == len(outputs):
        return [str(key) for key in outputs]
    return ["output"] if len(tensors) == 1 else [f"output_{i}" for i in range(len(tensors))]


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the logs and warnings of torch's exporters, which do not help users."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


Run = Callable[[Inputs], list[Tensor]]
