"""What a p-net of the command line is: how to build it, how to plan its genome, how to make it smaller."""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from gbfunc.encoding import Encoding
from gbfunc.hypernets import Hypernet, periodic
from gbfunc.tiling import MaxTile

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""`package.module:name`."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shape of every parameter by its name."""


class Interface(NamedTuple):
    """What goes into a p-net and what comes out of it.

    Attributes:
        inputs: shape of one example: (channels, rows, columns) of an image, (positions,) of a text.
        outputs: classes, or tokens of the vocabulary.
        tokens: whether inputs are tokens (integers), each position of which is answered by a prediction.
        vocabulary: tokens that the texts of a task consist of whose outputs are classes of whole texts; else 0.
        pad: the token that fills up short ones of them.
        actions: what a policy decides on, in a task of control: a choice, or a vector; outputs are its numbers.
    """

    inputs: tuple[int, ...]
    outputs: int
    tokens: bool = False
    vocabulary: int = 0
    pad: int = 0
    actions: Literal["choice", "vector"] | None = None


class PlanOptions(NamedTuple):
    """Arguments of `make_plan`: how the weights of a p-net are best generated.

    Attributes:
        hypernet: type of the g-nets, without a size.
        encodings: `{parameter: (code of rows, code of columns)}`.
        rules: `((pattern, hypernetwork), ...)`.
        include: patterns of parameters to generate beside the default ones.
        exclude: patterns of parameters to keep direct.
        max_tile: largest tile.
        base: `"own"` where the p-net is pretrained, and its genome an adapter.
        target_modules: what such a genome changes; None for every linear, convolution and attention layer.
        modules_to_save: what is new in such a p-net.
    """

    hypernet: Hypernet = periodic()
    encodings: Mapping[str, tuple[Encoding | None, Encoding | None]] = MappingProxyType({})
    rules: tuple[tuple[str, Hypernet | None], ...] = ()
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_tile: MaxTile = None
    base: Literal["own"] | None = None
    target_modules: str | tuple[str, ...] | None = None
    modules_to_save: tuple[str, ...] = ()

    def with_hypernet(self, hypernet: Hypernet) -> PlanOptions:
        """Options with another type of g-net, also in rules that only tune the type that it replaces."""

        def replaced(rule: Hypernet | None) -> Hypernet | None:
            tunes = rule is not None and rule.type == self.hypernet.type and rule.size is None
            return hypernet if tunes else rule

        return self._replace(hypernet=hypernet, rules=tuple((pattern, replaced(rule)) for pattern, rule in self.rules))


BLOCKS = PlanOptions(hypernet=periodic(share="layers"))
"""For deep nets of equal blocks, which share code weights."""


@dataclass(frozen=True)
class PNet:
    """A p-net and what is known of it.

    Attributes:
        name: its family, as on the command line.
        make: the module, with initial weights from torch's default generator.
        plan: options of `make_plan` from the size of the genome, in parameters.
        scaled: the same family with its widths times a factor; None where there is no such thing.
        fitted: the same family with the widths that parameters of these shapes have, to read a genome's file; None
            where shapes do not say them.
        config: what it was made from, as JSON.
        label: its name with its sizes, for tables.
    """

    name: str
    make: Callable[[], nn.Module]
    plan: Callable[[float], PlanOptions] = lambda genome_params: PlanOptions()
    scaled: Callable[[float], PNet] | None = None
    fitted: Callable[[Shapes], PNet] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    def build(self, seed: int) -> nn.Module:
        """The module; its first weights depend on `seed` alone, and torch's default generator is left as it was."""
        with seeded(seed):
            return self.make()

    def planned(self, change: Callable[[PlanOptions], PlanOptions]) -> PNet:
        """A copy of the p-net whose options of a plan are `change(options)`, for a genome of any size."""
        return replace(self, plan=lambda genome_params: change(self.plan(genome_params)))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's default generator of the CPU, and put it back after."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def check_options(pnet: str, *, dropout: float = 0.0, heads: int = 1, **sizes: Any) -> None:
    """Raise `ValueError` for sizes that are no positive ints, a width that heads do not divide, or no dropout rate."""
    for name, value in {**sizes, "heads": heads}.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} of {pnet} must be an int >= 1, got {value!r}")
    if sizes.get("width", heads) % heads:
        raise ValueError(f"width of {pnet} must be a multiple of its {heads} heads, got {sizes['width']}")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout of {pnet} must be at least 0 and below 1, got {dropout!r}")


def rows_of(shapes: Shapes, name: str, net: str, ndim: int = 2) -> int:
    """Rows of a weight, which the parameters of such a net have."""
    if len(shapes.get(name, ())) != ndim:
        raise ValueError(f"expected the parameters of {net} with {name}")
    return shapes[name][0]


def narrowed(pnet: PNet, params: int) -> PNet:
    """The smallest p-net of the same family with at least `params` parameters: a dense net to compare a genome with.

    Raises:
        ValueError: if the family has no widths to change.
    """
    if pnet.scaled is None:
        raise ValueError(f"the p-net {pnet.name} has no smaller one of its kind")

    def size(factor: float) -> int:
        assert pnet.scaled is not None
        with torch.device("meta"):
            return n_params(pnet.scaled(factor).make())

    low, high = 0.0, 1.0
    if size(low) >= params:
        return pnet.scaled(low)
    while size(high) < params:
        high *= 2
    # Widths are whole numbers, of millions at most.
    for _ in range(22):
        middle = (low + high) / 2
        low, high = (low, middle) if size(middle) >= params else (middle, high)
    return pnet.scaled(high)


def brief(shapes: Shapes, most: int = 2) -> str:
    """Names and shapes of the first parameters, in a few words.

    >>> brief({"0.weight": (48, 64), "0.bias": (48,), "2.weight": (10, 48)})
    '0.weight (48, 64), 0.bias (48,) and 1 more'
    """
    words = ", ".join(f"{name} {shape}" for name, shape in list(shapes.items())[:most])
    return words + (f" and {len(shapes) - most} more" if len(shapes) > most else "")


def scaled_width(width: int, factor: float, multiple: int = 1) -> int:
    """A width times a factor, as the nearest multiple above 0."""
    return max(1, math.floor(width * factor / multiple + 0.5)) * multiple


def n_params(module: nn.Module) -> int:
    """Parameters of a module, tied ones once."""
    return sum(p.numel() for p in module.parameters())


def is_import_path(name: str) -> bool:
    """Whether `name` has the form `package.module:name`."""
    return _PATH.fullmatch(name) is not None


def import_factory(path: str, returns: str) -> Callable[..., Any]:
    """The function `package.module:name`, which returns `returns`; the present folder counts as a place of modules.

    Raises:
        ImportError: if there is no such module, or it cannot be imported.
        ValueError: if it has no such name, or that names no function.
    """
    module_name, _, name = path.partition(":")
    folder = os.getcwd()
    added = folder not in sys.path and "" not in sys.path
    if added:
        # As `python -m` does; a console script leaves it out.
        sys.path.insert(0, folder)
    try:
        factory: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ImportError(f"cannot import {module_name} of {path}: {error}") from error
    finally:
        if added:
            sys.path.remove(folder)
    for part in name.split("."):
        if not hasattr(factory, part):
            raise ValueError(f"{module_name} has no {name!r} ({path})")
        factory = getattr(factory, part)
    if not callable(factory):
        raise ValueError(f"{path} must be a function that returns {returns}, got {type(factory).__name__}")
    return factory


def options_for(what: str, factory: Callable[..., Any], config: Mapping[str, Any], **given: Any) -> dict[str, Any]:
    """Arguments for a factory: its options `config`, and of what is `given` as much as it has parameters for.

    Raises:
        ValueError: for options that it does not take, or that it needs and are not there.
    """
    parameters = inspect.signature(factory).parameters
    known = [name for name in parameters if name not in given]
    unknown = [name for name in config if name not in known]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise ValueError(f"{what} has no option {', '.join(unknown)}: its options are {', '.join(known) or 'none'}")
    arguments = {**{name: value for name, value in given.items() if name in parameters}, **config}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [name for name, p in parameters.items() if p.default is p.empty and p.kind not in variadic]
    if missing := [name for name in needed if name not in arguments]:
        example = f'{{"{missing[0]}": ...}}'
        raise ValueError(
            f"{what} needs the option {', '.join(missing)}, such as {example}, got {dict(config) or 'none'}"
        )
    return arguments
