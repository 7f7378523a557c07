"""The base of the command line's p-nets: `PNet` builds a module, gives plan options, and scales the layers' widths."""

from __future__ import annotations

import inspect
import math
import os
import pkgutil
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import count
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gbfunc.encoding import Encoding
from gbfunc.hypernets import Hypernet, periodic
from gbfunc.tiling import MaxTile

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_TAKE = {"images": "mlp", "text": "gpt", "texts with classes": "hf:TYPE", "observations": "actor_critic"}
_EXPECTED = {bool: "true or false", int: "an int >= 1", float: "a number >= 0"}


class Interface(NamedTuple):
    """Inputs and outputs of a p-net."""

    inputs: tuple[int, ...]  # shape of one example: (channels, rows, columns) of an image, (positions,) of a text
    outputs: int  # number of classes, of tokens, of actions to choose from, or of entries of an action vector
    tokens: bool = False  # whether inputs are tokens (integers), with a prediction for each position
    vocabulary: int = 0  # size of the vocabulary, for a task of texts with classes; otherwise 0
    pad: int = 0  # token that pads short texts, for a task of texts with classes
    actions: Literal["choice", "vector"] | None = None  # the kind of action, for a task of control

    @property
    def reads(self) -> str:
        if self.actions:
            return "observations"
        return "text" if self.tokens else "texts with classes" if self.vocabulary else "images"


class PlanOptions(NamedTuple):
    """The best known arguments of `make_plan` for a p-net."""

    hypernet: Hypernet = periodic()  # type of the g-nets; `make_plan` chooses their size
    # {name of a parameter: (encoding of its rows, encoding of its columns)}
    encodings: Mapping[str, tuple[Encoding | None, Encoding | None]] = MappingProxyType({})
    rules: tuple[tuple[str, Hypernet | None], ...] = ()  # (regular expression of names, type of g-nets or None: direct)
    include: tuple[str, ...] = ()  # regular expressions: parameters to generate in addition to the defaults
    exclude: tuple[str, ...] = ()  # regular expressions: parameters to keep direct
    max_tile: MaxTile = None  # largest number of rows and columns of a tile
    base: Literal["own"] | None = None  # "own" if the genome is an adapter of the pretrained p-net
    target_modules: str | tuple[str, ...] | None = None  # modules that an adapter changes; None: see `make_plan`
    modules_to_save: tuple[str, ...] = ()  # modules that are not part of the base, such as a new head

    def with_hypernet(self, hypernet: Hypernet) -> PlanOptions:
        """Replace the default type of g-nets, also in `rules` of the replaced type, except rules that set a size."""
        tuned = {rule for _, rule in self.rules if rule and rule.type == self.hypernet.type and rule.size is None}
        rules = tuple((pattern, hypernet if rule in tuned else rule) for pattern, rule in self.rules)
        return self._replace(hypernet=hypernet, rules=rules)


BLOCKS = PlanOptions(hypernet=periodic(share="layers"))
"""Plan options for a deep net with equal blocks. The blocks share code weights."""


@dataclass(frozen=True)
class PNet:
    """A p-net with the options of its plan and a function that scales its widths."""

    name: str  # value of the option --pnet
    make: Callable[[], nn.Module]  # builds the module, with initial weights from torch's default generator
    # Returns options of `make_plan` for a number of genome parameters.
    plan: Callable[[float], PlanOptions] = lambda genome_params: PlanOptions()
    config: Mapping[str, Any] = field(default_factory=dict)  # options of the p-net (--pnet-config), as JSON values
    scaled: Callable[[float], PNet] | None = None  # maps a factor of all widths to a new p-net; None: fixed widths

    def build(self, seed: int) -> nn.Module:
        """Make the module with the initial weights of a seed; torch's default generator is unchanged."""
        with seeded(seed):
            return self.make()


def family(
    name: str,
    factory: Callable[..., PNet],
    interface: Interface,
    make: Callable[[], nn.Module],
    plan: PlanOptions | Callable[[float], PlanOptions],
    config: Mapping[str, Any],
    widths: Mapping[str, Any],
    multiple: int = 1,
) -> PNet:
    """Describe a p-net with scalable widths.

    A call `factory(interface, **config)` must return this p-net. `widths` maps the options that are widths to ints or
    lists of ints. Scaled widths are rounded to multiples of `multiple`, for example of the number of attention heads.
    """

    def scaled(factor: float) -> PNet:
        def times(width: Any) -> Any:
            if isinstance(width, list):
                return [times(n) for n in width]
            return max(1, math.floor(width * factor / multiple + 0.5)) * multiple

        return factory(interface, **{**config, **{name: times(width) for name, width in widths.items()}})

    return PNet(name, make, (lambda size: plan) if isinstance(plan, PlanOptions) else plan, config, scaled)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generator of the CPU, and restore the generator afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


class AtMost(TorchDispatchMode):
    """A context that limits memory: raises ValueError before all new tensors together exceed `numbers` entries."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.numbers = self.left = numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = [x for x in args if isinstance(x, list | tuple) and all(type(n) is int for n in x)]
        with suppress(RuntimeError):  # Shapes that do not broadcast
            sizes.append(torch.broadcast_shapes(*(x.shape for x in args if isinstance(x, torch.Tensor))))
        if max(map(math.prod, sizes), default=0) > self.left:
            raise ValueError(f"expected a network with tensors of at most {self.numbers:,} numbers, got more")
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not any(out is x for x in args):
            self.left -= out.numel()
        return out


def check_reads(pnet: str, interface: Interface, kind: str, ndim: int | None = None, least: int = 1) -> None:
    """Raise `ValueError` unless `interface.reads` is `kind`, with `ndim` dimensions and at least `least` rows."""
    if (reads := interface.reads) != kind:
        raise ValueError(f"the p-net {pnet} reads {kind}, the task has {reads}: take {_TAKE[reads]}")
    if len(interface.inputs) != (ndim or len(interface.inputs)) or min(interface.inputs[1:], default=least) < least:
        sizes = f"images of {least} x {least} or more" if ndim == 3 else "vectors (for images: conv_actor_critic)"
        got = " x ".join(map(str, interface.inputs))
        raise ValueError(f"the p-net {pnet} reads {sizes}, the task has inputs of {got}: take another p-net")


def check_heads(pnet: str, width: int, heads: int) -> None:
    """Raise `ValueError` unless `width` is a multiple of the number of attention heads."""
    if width % heads:
        raise ValueError(f"width of {pnet} must be a multiple of its {heads} heads, got {width}")


def check_types(pnet: str, factory: Callable[..., Any], config: Mapping[str, Any]) -> None:
    """Raise `ValueError` for options whose types differ from their defaults' types, and for ints below 1."""
    for name, value in config.items():
        kind = type(inspect.signature(factory).parameters[name].default)
        fits = isinstance(value, int | float) if kind is float else type(value) is kind or kind not in _EXPECTED
        numbers = value if isinstance(value, list | tuple) else [value] if type(value) is int else []
        if not fits or not all(type(n) is int and n >= (kind is not float) for n in numbers):
            raise ValueError(f"{name} of {pnet} must be {_EXPECTED.get(kind, 'at least 1')}, got {value!r}")


def narrowed(pnet: PNet, params: int) -> PNet:
    """Scale all widths of a p-net by one factor. Return the smallest p-net with at least `params` parameters."""
    if (scaled := pnet.scaled) is None:
        raise ValueError(f"expected a p-net with scalable widths, got {pnet.name}: choose a family of gbfunc")

    def size(factor: float) -> int:
        with torch.device("meta"):
            return n_params(scaled(factor).make())

    most = next(2.0**i for i in count() if size(2.0**i) >= params)
    # Search factors in steps of most / 2**22. Before rounding, a step changes widths below 4 million by less than 1.
    step = most / (1 << 22)
    return scaled(step * bisect_left(range(1 << 22), params, key=lambda n: size(step * n)))


def n_params(module: nn.Module) -> int:
    """Count the parameters of a module. Tied parameters count once."""
    return sum(p.numel() for p in module.parameters())


def is_import_path(name: str) -> bool:
    """Return whether `name` has the form `package.module:name`."""
    return _PATH.fullmatch(name) is not None


def import_factory(path: str, returns: str) -> Callable[..., Any]:
    """Import `package.module:name`, also from the working folder. `returns` names the expected result, for errors."""
    # Search the working folder too, which Python leaves out when it runs the script `gbfunc`.
    sys.path.insert(0, folder := os.getcwd())
    try:
        factory = pkgutil.resolve_name(path)
    except ImportError as error:
        cure = f": write {path.replace('.py:', ':')}, in the folder of the file" if ".py:" in path else ""
        raise ImportError(f"cannot import {path}: {error}{cure}") from error
    except AttributeError as error:
        cure = "".join(f": did you mean {name}?" for name in get_close_matches(str(error.name), dir(error.obj), 1))
        raise ValueError(f"cannot find {path}: {error}{cure}") from error
    finally:
        sys.path.remove(folder)
    if not callable(factory):
        raise ValueError(f"{path} must be a function that returns {returns}, got {type(factory).__name__}")
    return factory


def options_for(what: str, factory: Callable[..., Any], config: Mapping[str, Any], **available: Any) -> dict[str, Any]:
    """Return `config` and the `available` arguments that `factory` has; ValueError for options that it lacks."""
    signature = inspect.signature(factory)
    known = [name for name in signature.parameters if name not in available]
    unknown = [name for name in config if name not in known]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        raise ValueError(f"{what} has no option {', '.join(unknown)}: its options are {', '.join(known) or 'none'}")
    arguments = {**{name: value for name, value in available.items() if name in signature.parameters}, **config}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(f"{what}: {error}, got the options {dict(config) or 'none'}") from error
    return arguments
