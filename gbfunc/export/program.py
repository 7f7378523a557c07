"""From a p-net with its genome, or with its weights, to one traced program that holds either.

genome: leaves --codes by integer arithmetic, g-nets, tiles--> weights --the p-net's forward--> outputs
dense:  weights --the p-net's forward--> outputs
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves  # which Hugging Face makes its outputs known to

from gbfunc.materialize import materialize
from gbfunc.plan import Plan
from gbfunc.pnet import skeleton_of
from gbfunc.trees import tree_map
from gbfunc.types import GenomeLike

if TYPE_CHECKING:
    # It takes half a second to import.
    from torch.export import ExportedProgram

Weights = Literal["genome", "dense"]
AUTO, BATCH = "auto", "batch"


class Inputs(NamedTuple):
    """What a network is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @staticmethod
    def of(example: Any, net: nn.Module) -> Inputs:
        """An example on the CPU: one input, a tuple of inputs, or inputs by name, in the order that the network has."""
        if isinstance(example, Mapping):
            names = list(inspect.signature(net.forward).parameters)
            order = sorted(example, key=lambda name: names.index(name) if name in names else len(names))
            args, kwargs = (), {name: example[name] for name in order}
        else:
            args, kwargs = tuple(example) if isinstance(example, tuple | list) else (example,), {}
        inputs = Inputs(args, kwargs).mapped(lambda x: x.detach().cpu().contiguous() if isinstance(x, Tensor) else x)
        if not inputs.tensors:
            raise ValueError(f"example must be a tensor, or a tuple or dict with some, got {type(example).__name__}")
        return inputs

    @property
    def tensors(self) -> list[Tensor]:
        """Its tensors, in order."""
        return tensors_of(tuple(self))

    def mapped(self, change: Callable[[Any], Any]) -> Inputs:
        """Inputs with `change(value)` in the place of every value."""
        return Inputs(*tree_map(change, tuple(self)))

    def longer(self) -> Inputs:
        """Append the first row of every tensor to it, for a batch size that a traced program has not seen."""
        return self.mapped(lambda x: torch.cat([x, x[:1]]) if _has_rows(x) else x)

    def outputs_of(self, net: Callable[..., Any]) -> list[Tensor]:
        """The tensors that a network gives for them, in order."""
        return tensors_of(net(*self.args, **self.kwargs))

    @property
    def has_texts(self) -> bool:
        """Whether there are tokens among them."""
        return any(map(_is_text, self.tensors))

    def shorter(self) -> Inputs:
        """Leave out the last token of every text, for a length that a traced program has not seen."""
        return self.mapped(lambda x: x[:, :-1] if _is_text(x) else x)

    def shapes(self, lengths: bool) -> Any:
        """Dynamic shapes, as `torch.export` takes them: the first dimension of every tensor is the batch.

        With `lengths`, the second one of texts has any size that the network takes.
        """
        from torch.export import Dim

        batch = Dim(BATCH)
        return self._by_tensor(lambda x: {0: batch, 1: Dim.AUTO} if lengths and _is_text(x) else {0: batch})

    def names(self, program: ExportedProgram) -> tuple[Any, dict[str, str]]:
        """Names of the dimensions that have any size in a program, and those of lengths by the program's own."""
        given = set(program.graph_signature.user_inputs)
        values = [n.meta["val"] for n in program.graph.nodes if n.op == "placeholder" and n.name in given]
        shapes = dict(zip(map(id, self.tensors), [v.shape for v in values if isinstance(v, Tensor)], strict=True))
        sizes = {id(x): shapes[id(x)][1] for x in self.tensors if _is_text(x)}
        symbols = dict.fromkeys(str(n) for n in sizes.values() if not isinstance(n, int))
        lengths = {symbol: f"length_{i}" if i else "length" for i, symbol in enumerate(symbols)}

        def named(x: Tensor) -> dict[int, str]:
            length = lengths.get(str(sizes.get(id(x))))
            return {0: BATCH} | ({} if length is None else {1: length})

        return self._by_tensor(named), lengths

    def _by_tensor(self, describe: Callable[[Tensor], Any]) -> Any:
        described = self.mapped(lambda x: describe(x) if _has_rows(x) else None)
        return described.kwargs or described.args


def _has_rows(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim > 0


def _is_text(x: Any) -> bool:
    """Tokens [B, L], or a mask of them, of three or more: of two, a shorter one would be a size of its own to torch."""
    return isinstance(x, Tensor) and x.ndim == 2 and not x.is_floating_point() and x.shape[1] > 2


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of what a network takes or gives, in order."""
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def module_of(plan: Plan, genome: GenomeLike, pnet: nn.Module, weights: Weights) -> nn.Module:
    """The p-net in evaluation mode on the CPU, with a genome that generates its weights at each call, or with them.

    Raises:
        ValueError: if plan, genome and p-net do not fit together, or the genome changes a base.
    """
    if weights == "dense":
        return ready(materialize(plan, genome, pnet))
    if plan.base is not None:
        raise ValueError("the genome changes a base, whose weights a file with the genome alone lacks: weights='dense'")
    from gbfunc.module import GenomeModule

    # The p-net gives its architecture alone.
    return ready(GenomeModule(plan, _plain(skeleton_of(pnet)), genome, lazy=False))


def ready(net: nn.Module) -> nn.Module:
    """A network as it is shipped: in evaluation mode on the CPU, without gradients."""
    return _plain(net).cpu().eval().requires_grad_(False)


def _plain(net: nn.Module) -> nn.Module:
    """The network without a cache of keys and values among its outputs, where Hugging Face's has one."""
    for module in net.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False
    return net


class Traced(NamedTuple):
    """A network's call as a graph of operations.

    Attributes:
        program: the graph, with the genome's leaves or the weights.
        dynamic_shapes: names of the dimensions of its inputs that may have any size, as `torch.export` takes them.
        outputs: names of its outputs.
        lengths: whether texts may have any length.
    """

    program: ExportedProgram
    dynamic_shapes: Any
    outputs: list[str]
    lengths: bool


def trace(net: nn.Module, inputs: Inputs, dynamic_shapes: Any) -> Traced:
    """A network's call as a graph, without the places in the source of its operations.

    Raises:
        ValueError: if `torch.export` cannot trace it.
        ImportError: with a torch older than 2.6.
    """
    import torch.export

    if torch.__version__ < "2.6":
        raise ImportError(f"exports are traced by torch >= 2.6, this is {torch.__version__}")
    batched = dynamic_shapes in (AUTO, BATCH)
    given = inputs.longer() if batched else inputs
    shapes: Any = given.shapes(dynamic_shapes == AUTO) if batched else dynamic_shapes
    try:
        with torch.no_grad(), quiet():
            with _same_buffers(net):
                outputs = net(*given.args, **given.kwargs)
            program = torch.export.export(net, given.args, given.kwargs, dynamic_shapes=shapes)
    except Exception as error:  # whatever a forward raises, and several private errors of torch's
        hint = "; dynamic_shapes=None keeps the example's shapes" if dynamic_shapes is not None else ""
        raise ValueError(f"torch.export cannot trace the p-net: {' '.join(str(error).split())[:300]}{hint}") from error
    for node in program.graph.nodes:
        for key in ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn"):
            node.meta.pop(key, None)
    lengths: dict[str, str] = {}
    if batched:
        shapes, lengths = given.names(program)
    taken = {node.name for node in program.graph.nodes if node.op == "placeholder"}
    names = [f"{name}_out" if name in taken else name for name in _names(outputs)]
    return Traced(program, shapes, names, bool(lengths))


@contextmanager
def _same_buffers(net: nn.Module) -> Iterator[None]:
    """Put buffers back as they were: a file has those of the genome, whatever a forward changes."""
    before = [(name, b, b.clone()) for name, b in net.named_buffers(remove_duplicate=False)]
    yield
    for name, buffer, value in before:
        path, _, attribute = name.rpartition(".")
        # What is expanded cannot be written to, but by no forward either.
        same = torch.equal(buffer, value)
        setattr(net.get_submodule(path), attribute, buffer if same else buffer.copy_(value))


def _names(outputs: Any) -> list[str]:
    """Names of a network's outputs: those that they have (Hugging Face), else `output`, or `output_0`, ..."""
    tensors = tensors_of(outputs)
    if isinstance(outputs, Mapping) and len(tensors) == len(outputs):
        return [str(key) for key in outputs]
    return ["output"] if len(tensors) == 1 else [f"output_{i}" for i in range(len(tensors))]


@contextmanager
def quiet() -> Any:
    """Without what torch's own exporters say of themselves (of torchvision, too), about which a user can do nothing."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*axis name: .* will not be used", UserWarning)
            warnings.filterwarnings("ignore", ".*torch.jit.script_method. is deprecated", DeprecationWarning)
            warnings.filterwarnings("ignore", ".*isinstance\\(treespec, LeafSpec\\)", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


Run = Callable[[Inputs], list[Tensor]]
"""A file's program: from inputs to its outputs."""
