"""Chooses the hypernetwork of every parameter, and the modules that an adapter changes or adds."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gbfunc.hypernets import Hypernet
from gbfunc.layers import LayerKind, layer_kind
from gbfunc.layers.beside import hidden_layers, unit_outputs
from gbfunc.layers.kinds import DELTA
from gbfunc.plan.slots import TensorPlan
from gbfunc.pnet.describe import ParameterInfo, parameter_infos
from gbfunc.types import dtype_name

Rule = tuple[str, Hypernet | None]
_PACKED = (torch.int8, torch.uint8, torch.int32)
_LINEAR = ("linear", "transposed_linear", "beside")


class Targets(NamedTuple):
    """The modules that an adapter changes (`modules`) or adds (`new`): regular expressions for full names."""

    modules: Literal["all-linear"] | list[re.Pattern[str]] | None  # None: linear, convolution and attention layers
    new: list[re.Pattern[str]]
    infos: list[ParameterInfo]  # All parameters, and one entry for the hidden weight of each quantized layer
    hidden: dict[str, str]  # `{layer: reason}`: layers that hide their weight and cannot have a delta

    def saved(self, name: str) -> bool:
        path = name.split(".")[:-1]
        return any(_named(self.new, ".".join(path[:n])) for n in range(1, len(path) + 1))

    def changes(self, info: ParameterInfo, kind: LayerKind) -> bool:
        if self.modules is None or self.modules == "all-linear":
            return kind.selected and (self.modules is None or kind.name in _LINEAR)
        layers = [name.rpartition(".")[0] for name in (info.name, *info.aliases)]
        if not (info.tensor.numel() and info.tensor.is_floating_point()):
            return False
        named = any(_named(self.modules, layer.partition(".parametrizations")[0]) for layer in layers)
        return named and (kind.selected or kind.name == "embedding")

    def left_out(self, pnet: nn.Module, weights: dict[str, Tensor], prefixes: Collection[str]) -> dict[str, str]:
        """Return `{layer: reason}` for selected layers that cannot have a delta, except layers below `prefixes`."""
        # Look at buffers, too, because some libraries store the weights of quantized layers in buffers.
        packed = {k: b for k, b in pnet.named_buffers() if b.dtype in _PACKED and b.ndim > 1 and b.numel()}
        left = dict(self.hidden)
        for name, x in (weights | packed).items():
            what = f"{type(pnet.get_submodule(_layer_of(name))).__name__} with {name!r} in {dtype_name(x.dtype)}"
            left.setdefault(_layer_of(name), f"a {what}, without in_features and out_features")
        named = self.modules if isinstance(self.modules, list) else [re.compile("(?s).*")]
        asked = (k for k in left if _named(named, k) and not self.saved(f"{k}.weight"))
        return {k: left[k] for k in asked if not f"{k}.".startswith(tuple(prefixes))}


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0].partition(".parametrizations")[0]


def _named(patterns: list[re.Pattern[str]], module: str) -> bool:
    return any(pattern.fullmatch(module) for pattern in patterns)


def check_targets(
    pnet: nn.Module, base: str | None, modules: str | Sequence[str] | None, new: Sequence[str]
) -> Targets | None:
    """Check the arguments of `make_plan` that select modules, and return `Targets`. Return None without a base."""
    if base not in (None, "own"):
        got = type(base).__name__ if isinstance(base, nn.Module) else repr(base)
        raise ValueError(f"base must be None or 'own' (the p-net's present weights), got {got}")
    if not isinstance(new, Collection) or isinstance(new, str) or not all(isinstance(n, str) for n in new):
        raise TypeError(f"modules_to_save must be a list of names of modules, got {new!r}")
    several = isinstance(modules, Collection) and all(isinstance(n, str) for n in modules)
    if not (modules is None or several):
        raise TypeError(f"target_modules must be a list of names, a regular expression or None, got {modules!r}")
    if base is None:
        if modules is not None or new:
            raise ValueError("target_modules and modules_to_save need a base, got base=None: pass base='own'")
        return None
    every = pnet.named_modules(remove_duplicate=False)
    names = [k for k, m in every if k and (hasattr(m, "in_features") or [*m.parameters(), *m.buffers()])]

    def pattern(what: str, word: str, regular: bool = False) -> re.Pattern[str]:
        try:
            found = re.compile(word if regular else rf"(.*\.)?{re.escape(word)}")
        except re.error as error:
            raise ValueError(f"{what} {word!r} is not a regular expression: {error}") from error
        if not any(map(found.fullmatch, names)):
            raise ValueError(f"{what} {word!r} names no module with a parameter or buffer; the p-net has {names}")
        return found

    targets = Targets(None, [pattern("modules_to_save", word) for word in new], parameter_infos(pnet), {})
    like = next((x.tensor for x in targets.infos if x.tensor.is_floating_point()), torch.empty(0)).detach()
    for name, layer in hidden_layers(pnet):
        delta = f"{name}.{DELTA}".lstrip(".")
        try:
            units = [] if targets.saved(delta) else [unit_outputs(layer, like)]
            targets.infos.extend(ParameterInfo(delta, (), x, layer, DELTA) for x in units)
        except ValueError as error:
            targets.hidden[name] = f"a {type(layer).__name__}: {error}"
    if modules is None or modules == "all-linear":
        return targets._replace(modules=modules)
    words, regular = ([modules], True) if isinstance(modules, str) else (modules, False)
    changed = [pattern("target_modules", word, regular) for word in words]
    kinds = [(x, layer_kind(x.module, x.attribute, tuple(x.tensor.shape))) for x in targets.infos]
    for word, found in zip(words, changed, strict=True):
        if not any(targets._replace(modules=[found]).changes(*pair) for pair in kinds):
            what = "no linear, convolution, attention or embedding layer of floating-point weights"
            cure = "name the module's parameters in include, the layers inside it, or the module in modules_to_save"
            raise ValueError(f"target_modules {word!r} names {what}: {cure}")
    return targets._replace(modules=changed)


@dataclass
class Candidate:
    """A parameter, and the type of g-net that generates it, if any. The sizes of g-nets are chosen later."""

    info: ParameterInfo
    tensor: TensorPlan
    hypernet: Hypernet | None  # None for a direct parameter
    movable: bool = False  # True if g-nets may generate this direct parameter to reach a size target
    base: bool = False  # True if the parameter belongs to a base, so that a delta is generated
    single_tile: bool = False
    scales: dict[int, tuple[float, float]] = field(default_factory=dict)  # Scale and offset by index of the matrix


def choose(
    pnet: nn.Module,
    hypernet: Hypernet,
    include: Sequence[str],
    exclude: Sequence[str],
    rules: Sequence[Rule],
    targets: Targets | None,
) -> tuple[list[Candidate], dict[str, str]]:
    """Choose the hypernetwork of each parameter. `exclude` overrides `rules`; `rules` override `include` and defaults.

    Returns all parameters (with a base, only changed and new ones), and `{layer: reason}` for layers without a delta.
    """
    infos = parameter_infos(pnet) if targets is None else targets.infos
    # If some parameters require grad, all other parameters are frozen: the genome contains their values.
    some_trained = targets is None and any(info.tensor.requires_grad for info in infos)
    included = set[str]().union(*_matches("include", include, infos))
    excluded = set[str]().union(*_matches("exclude", exclude, infos))
    for rule in rules:
        if not (isinstance(rule, tuple | list) and len(rule) == 2):
            raise TypeError(f"a rule must be (pattern, hypernetwork or None), got {rule!r}")
        check_hypernet(f"the g-net of the rule {rule[0]!r}", hypernet if rule[1] is None else rule[1])
    by_rule: dict[str, Hypernet | None] = {}
    for names, (_, ruled) in zip(_matches("rules", [r[0] for r in rules], infos), rules, strict=True):
        by_rule = dict.fromkeys(names, ruled) | by_rule
    choices, unchanged, beside = [], dict[str, Tensor](), list[str]()
    for info in infos:
        name, weights, shape = info.name, info.tensor, tuple(info.tensor.shape)
        kind = layer_kind(info.module, info.attribute, shape)
        if kind.name == "beside":
            beside.append(f"{_layer_of(name)}.".lstrip("."))
            shape = tuple(getattr(info.module, side) for side in ("out_features", "in_features"))
        saved = targets is not None and any(map(targets.saved, (name, *info.aliases)))
        base = targets is not None and not saved
        if name in excluded:
            chosen, reason = None, "excluded"
        elif name in by_rule:
            chosen, reason = by_rule[name], "by rule"
        elif name in included:
            chosen, reason = hypernet, "included"
        elif some_trained and not weights.requires_grad:
            chosen, reason = None, "frozen"
        else:
            # Parameters of new modules are direct at first. `make_plan` generates the longest if a target needs it.
            generated = kind.selected if targets is None else base and targets.changes(info, kind)
            chosen, reason = hypernet if generated else None, ""
        movable = not reason and (kind.name in ("vector", "embedding") or (saved and kind.selected))
        if not (weights.numel() and weights.dtype.is_floating_point):
            if chosen is not None and reason:
                what = f"{name!r} ({weights.dtype}, {weights.numel()} entries)"
                raise ValueError(f"{what} cannot be generated: exclude it")
            chosen, movable = None, False
        if base and chosen is None:
            other = kind.name == "matrix" or (kind.selected and not weights.is_floating_point())
            unchanged |= {name: weights} if other and not reason and weights.ndim > 1 and weights.numel() else {}
            continue
        if kind.name == "beside" and not (chosen and chosen.factorised):
            words = "is added to a layer that hides its weight, and needs a type with factors, such as gb.bilinear()"
            raise ValueError(f"{name!r} {words}, got {chosen}")
        tensor = TensorPlan(name, shape, dtype_name(weights.dtype), kind.name, aliases=info.aliases, note=reason)
        choices.append(Candidate(info, tensor, chosen, movable and not base, base))
    left = {} if targets is None else targets.left_out(pnet, unchanged, beside)
    if targets is not None and not choices:
        words = "no parameter of the p-net has a delta or is new: name layers in target_modules or include"
        raise ValueError("; ".join([words, *(f"left out {k!r}, {why}" for k, why in left.items())]))
    return choices, left


def check_hypernet(what: str, hypernet: Any) -> None:
    if not isinstance(hypernet, Hypernet):
        got = f"the class {hypernet.__name__}: call it" if isinstance(hypernet, type) else repr(hypernet)
        raise TypeError(f"{what} must be an instance of a type of g-net, such as gb.periodic(), got {got}")
    if not isinstance(getattr(hypernet, "type", None), str):
        raise TypeError(f"{type(hypernet).__name__} has no name for files: define type: ClassVar[str] = 'a name'")
    try:
        signature(hypernet.apply).bind({}, None, None, noise=None, kernel="auto")
    except TypeError as error:
        usual = "apply(self, leaves, row_rp, col_cq, **unused), which also takes noise= and kernel="
        raise TypeError(f"{type(hypernet).__name__} must define {usual}: {error}") from error


def _matches(what: str, patterns: Sequence[str], infos: list[ParameterInfo]) -> list[set[str]]:
    if isinstance(patterns, str):
        raise TypeError(f"{what} must be a list of regular expressions, got the string {patterns!r}")
    matches = []
    for pattern in patterns:
        try:
            search = re.compile(pattern).search
        except (re.error, TypeError) as error:
            raise ValueError(f"{what} pattern {pattern!r} is not a regular expression: {error}") from error
        matches.append({p.name for p in infos if any(map(search, (p.name, *p.aliases)))})
        if not matches[-1]:
            names = [n for p in infos for n in (p.name, *p.aliases)]
            raise ValueError(f"{what} pattern {pattern!r} matches no parameter; the p-net has {names}")
    return matches
