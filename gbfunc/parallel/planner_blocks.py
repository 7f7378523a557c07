"""A p-net with one of each kind of block: what is true of a block is true of all that are equal to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from gbfunc.plan import Plan, TensorPlan
from gbfunc.pnet import skeleton_of

# Attributes that number a module among others.
_NUMBERS = ("idx", "index", "id", "number")


class Reduced(NamedTuple):
    """A p-net without the blocks that are equal to an earlier one.

    Attributes:
        plan: of its tensors.
        pnet: on the meta device.
        blocks: names of its blocks.
        places: for each block of the p-net, which of these it is equal to.
        names: for each parameter of the p-net, the one that it is equal to.
    """

    plan: Plan
    pnet: nn.Module
    blocks: tuple[str, ...]
    places: tuple[int, ...]
    names: Mapping[str, str]


def reduce_blocks(
    plan: Plan, pnet: nn.Module, blocks: Sequence[str], given: Sequence[Any], styles: Mapping[str, Any]
) -> Reduced:
    """One of each kind of block.

    Args:
        plan: the plan.
        pnet: the p-net.
        blocks: names of its blocks, children of one module.
        given: what each of them is given: shapes.
        styles: of tensor parallelism, by name of module.
    """
    tensors = {name: t for t in plan.tensors for name in (t.name, *t.aliases)}
    seen: dict[Any, int] = {}
    kept: list[str] = []
    places: list[int] = []
    names: dict[str, str] = {}
    for block, shapes in zip(blocks, given, strict=True):
        key = repr((_kind(pnet.get_submodule(block), block, tensors, styles), shapes))
        if key not in seen:
            seen[key] = len(kept)
            kept.append(block)
        places.append(seen[key])
        same = kept[seen[key]]
        members = pnet.get_submodule(block).named_parameters(remove_duplicate=False)
        names |= {f"{block}.{k}": f"{same}.{k}" for k, _ in members}
    small = skeleton_of(pnet)
    for block in set(blocks) - set(kept):
        parent, _, child = block.rpartition(".")
        del small.get_submodule(parent)._modules[child]
    there = {name for name, _ in small.named_parameters(remove_duplicate=False)}
    rest = [_restricted(t, there) for t in plan.tensors]
    buffers = {name for name, _ in small.named_buffers()}
    reduced = Plan(tuple(t for t in rest if t is not None), tuple(b for b in plan.buffers if b.name in buffers))
    return Reduced(reduced, small, tuple(kept), tuple(places), names)


def _restricted(tensor: TensorPlan, there: set[str]) -> TensorPlan | None:
    """A tensor by those of its names that are there."""
    names = [name for name in (tensor.name, *tensor.aliases) if name in there]
    return replace(tensor, name=names[0], aliases=tuple(names[1:])) if names else None


def _kind(block: nn.Module, name: str, tensors: Mapping[str, TensorPlan], styles: Mapping[str, Any]) -> Any:
    """What tells blocks apart."""
    modules = []
    for key, module in block.named_modules():
        plain = {
            k: v
            for k, v in vars(module).items()
            if isinstance(v, int | float | str | tuple) and not k.endswith(_NUMBERS)
        }
        style = styles.get(f"{name}.{key}" if key else name)
        modules.append((key, type(module), sorted(plain.items(), key=lambda item: item[0]), id(style)))
    parameters = []
    for key, p in block.named_parameters(remove_duplicate=False):
        tensor = tensors[f"{name}.{key}"]
        slots = [(s.hypernet, s.grid) for s in tensor.slots]
        parameters.append((key, tuple(p.shape), p.dtype, p.requires_grad, tensor.kind, slots, len(tensor.aliases)))
    return modules, parameters
