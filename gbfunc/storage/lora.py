r"""Exports adapter deltas as a LoRA adapter (Hu et al., 2022) that `peft.PeftModel.from_pretrained` reads.

A delta with tiles `L[i, j] @ R[i, j].T` is a product of two thin matrices, whose rank is the sum of the tiles' ranks:

    W_base + delta = W_base + B A,    A [k', in],  B [out, k'],    k' = nr nc k

Every tile has k columns of B, with `L[i, j]` in the rows of tile row i, and k rows of A, with `R[i, j].T` in the
columns of tile column j. B includes the scales of the g-nets, so LoRA's own scale `lora_alpha / r` is 1.

Suffixes: i tile rows (nr of them), j tile columns (nc), r and c rows and columns of a tile, k rank of a tile.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor, nn

from gbfunc.base import Base
from gbfunc.files import replace_file
from gbfunc.generation import make_generator
from gbfunc.genome import check_genome, check_plan
from gbfunc.layers.factored import FactoredWeight, as_low_rank
from gbfunc.layers.install import transposed
from gbfunc.plan import DTYPES, Plan
from gbfunc.storage.hub import card_head, quoted
from gbfunc.trees import flat_genome
from gbfunc.types import GenomeLike, Params

_PREFIX = "base_model.model."
_CONTAINERS = nn.ModuleDict | nn.ModuleList | nn.ParameterDict | nn.ParameterList
_INSTEAD = "; gb.materialize(plan, genome, pnet) gives the whole network instead"


def save_lora(folder: str | os.PathLike[str], plan: Plan, genome: GenomeLike, pnet: nn.Module) -> int:
    """Writes a LoRA adapter for `peft.PeftModel.from_pretrained(pnet, folder)`; returns the bytes of the tensors' file.

    The folder has each delta as two thin matrices, and the complete new modules (`modules_to_save`). The folder is
    therefore larger than the genome's file, and cannot be converted back into a genome. With any program that supports
    LoRA, the outputs equal the grown network's. If a delta's weight is tied, every layer that uses the weight gets a
    copy of the two matrices. Do not merge the copies in peft, because peft would add all copies to the weight.

    Args:
        folder: the folder, created if it does not exist; its files are replaced.
        plan: a plan with a base.
        genome: a `Genome` or `TrainState`.
        pnet: the base network.

    Raises:
        ValueError: if plan, genome and p-net do not fit together, or if LoRA cannot represent a tensor of the plan.
        OSError: if a file cannot be written.
    """
    check_plan(plan, pnet)
    check_genome(plan, genome)
    base = plan.base_tensors(pnet)
    if base is None or plan.base is None:
        raise ValueError(f"a LoRA adapter changes a base, and the plan has none (make_plan(base='own')){_INSTEAD}")
    deltas, heads = [t for t in plan.tensors if t.base], [t for t in plan.tensors if not t.base]
    if not deltas:
        raise ValueError(f"a LoRA adapter changes a layer, and the plan has only new modules{_INSTEAD}")
    if grown := [t.name for t in deltas if t.new_rows]:
        raise ValueError(f"{grown} have new rows, and a LoRA adapter adds to rows that the base has{_INSTEAD}")
    generator = make_generator(plan, pnet=pnet, lazy=True, base=base, names={t.name for t in deltas})
    with torch.no_grad():
        weights = generator(flat_genome(genome))
        dense = make_generator(plan, base=base, names={t.name for t in heads})(flat_genome(genome))
    ranks, tensors = {}, {}
    for tensor in deltas:
        form = generator.forms.get(tensor.name)
        if not isinstance(form, FactoredWeight):
            types = ", ".join(sorted({s.hypernet.type for s in tensor.slots}))
            why = f"(a {tensor.kind} by {types}) has no factors, which LoRA needs"
            if tensor.can_factor(plan.dtype):
                why = "is not of a layer that LoRA knows: its forward is not torch's"
            raise ValueError(f"the delta of {tensor.name!r} {why}{_INSTEAD}")
        a, b = as_low_rank(*form.by_tile(form.taken(weights)), form.grid)
        # If several layers share a tied weight, write the factors once per layer.
        for name in (tensor.name, *tensor.aliases):
            tensors |= _layer_tensors(pnet, name, a, b)
            ranks[name.rpartition(".")[0]] = len(a)
    # Copies, because safetensors rejects tensors that share memory.
    new = {name: dense[t.name].to(DTYPES[t.dtype], copy=True) for t in heads for name in (t.name, *t.aliases)}
    saved = _new_modules(pnet, new.keys())
    available = new | dict(genome.buffers)
    keys = [f"{module}.{k}" for module in saved for k in pnet.get_submodule(module).state_dict()]
    if missing := [k for k in keys if k not in available]:
        raise ValueError(f"modules_to_save of a LoRA adapter must be complete, but {missing} are the base's{_INSTEAD}")
    tensors |= {f"{_PREFIX}{k}": available[k] for k in keys}
    config = _config(plan.base, pnet, ranks, saved)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    data = to_bytes({k: x.detach().cpu().contiguous() for k, x in tensors.items()}, {"format": "pt"})
    replace_file(place / "adapter_model.safetensors", data)
    replace_file(place / "adapter_config.json", f"{json.dumps(config, indent=2)}\n".encode())
    if not (place / "README.md").exists():
        head, named = card_head("peft", ["gbfunc", "lora"], plan.base.name), quoted(plan.base.name or "unnamed")
        words = f"A genome of {plan.genome_params:,} parameters, exported by gbfunc as a LoRA adapter."
        card = f"{head}\n{words}\n\nBase: {named}, digest {quoted(plan.base.digest)}.\n"
        replace_file(place / "README.md", card.encode())
    return len(data)


def _layer_tensors(pnet: nn.Module, name: str, a: Tensor, b: Tensor) -> Params:
    layer, _, attribute = name.rpartition(".")
    module = pnet.get_submodule(layer)
    if (why := _unknown(module, attribute)) is not None:
        raise ValueError(f"the delta of {name!r} cannot be part of a LoRA adapter of peft: {why}{_INSTEAD}")
    key = f"{_PREFIX}{layer}.lora_"
    if isinstance(module, nn.Embedding):
        # The weight of an embedding has one row per token, so peft stores an embedding's factors transposed.
        return {f"{key}embedding_A": b.t(), f"{key}embedding_B": a.t()}
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        a = a.unflatten(1, (module.in_channels, *module.kernel_size))
        b = b.unflatten(1, (-1, *(1,) * len(module.kernel_size)))
    return {f"{key}A.weight": a, f"{key}B.weight": b}


def _unknown(module: nn.Module, attribute: str) -> str | None:
    if attribute != "weight":
        return f"it adapts weights, not {attribute!r} of a {type(module).__name__}"
    if isinstance(module, nn.Embedding):
        return None if module.max_norm is None else "max_norm would cut its factors"
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        plain = module.groups == 1 and module.padding_mode == "zeros" and set(module.dilation) == {1}
        return None if plain else "of convolutions it has those of one group, zero padding and no dilation"
    known = isinstance(module, nn.Linear) or transposed(module)
    return None if known else f"it does not know layers of type {type(module).__name__}"


def _new_modules(pnet: nn.Module, new: Collection[str]) -> list[str]:
    holders = {name.rpartition(".")[0] for name in new}
    saved = sorted(h for h in holders if not any(h.startswith(f"{other}.") for other in holders if other != h))
    modules = [name for name, _ in pnet.named_modules(remove_duplicate=False)]
    for name in saved:
        if isinstance(pnet.get_submodule(name), _CONTAINERS):
            raise ValueError(f"modules_to_save of a LoRA adapter have a forward, and {name!r} has none{_INSTEAD}")
        # peft selects all modules whose names end with the given name, even in the middle of a word.
        others = [other for other in modules if other != name and other.endswith(name)]
        if others or not name:
            what = f"peft would take {others} for {name!r} too" if name else "a parameter of no submodule is new"
            raise ValueError(f"modules_to_save of a LoRA adapter cannot name the new parameters: {what}{_INSTEAD}")
    return saved


def _config(base: Base, pnet: nn.Module, ranks: Mapping[str, int], saved: list[str]) -> dict[str, Any]:
    usual = Counter(ranks.values()).most_common(1)[0][0] if ranks else 1
    # peft uses the first key of `rank_pattern` that matches the end of a layer's name: use keys for full names only.
    patterns = {f"^{re.escape(layer)}": rank for layer, rank in ranks.items() if rank != usual}
    names = [name for name, _ in pnet.named_modules(remove_duplicate=False) if name not in ranks]
    inside = tuple(f"{module}." for module in saved)
    clash = any(n.endswith(f".{layer}") for n in names if not f"{n}.".startswith(inside) for layer in ranks)
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base.name or None,
        "revision": base.revision or None,
        "target_modules": "|".join(map(re.escape, ranks)) if clash else [*ranks],
        "modules_to_save": saved or None,
        "r": usual,
        "lora_alpha": usual,
        "rank_pattern": patterns,
        "alpha_pattern": dict(patterns),
        "fan_in_fan_out": any(transposed(pnet.get_submodule(layer)) for layer in ranks),
    }
