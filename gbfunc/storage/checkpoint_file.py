"""One checkpoint as bytes: named tensors, what goes with them, and a digest over all of it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from torch import Tensor

from gbfunc.plan import Plan
from gbfunc.types import JSON, Params

FORMAT = "gbfunc-checkpoint-1"
HOLE = "0" * 64
"""Where the digest goes."""

NAME = re.compile(r"step-(\d{8,})\.safetensors")


def list_steps(folder: Path, up_to: int | None = None) -> list[Path]:
    """The checkpoints of a folder, newest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            if (match := NAME.fullmatch(path.name)) and (up_to is None or int(match[1]) <= up_to):
                found.append((int(match[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


def named_leaves(tree: Any) -> Params:
    """Every tensor of a tree by its path, such as `opt/leaves/direct/0.bias/exp_avg`."""
    accessors, leaves, _ = optree.tree_flatten_with_accessor(tree)
    named: Params = {}
    for accessor, leaf in zip(accessors, leaves, strict=True):
        name = "/".join(str(getattr(entry, "field", entry.entry)) for entry in accessor)
        if not isinstance(leaf, Tensor):
            raise TypeError(f"a state must hold tensors alone, got {type(leaf).__name__} at {name!r}")
        if name in named:
            raise TypeError(f"two tensors of the state have the name {name!r}")
        named[name] = leaf
    return named


def plan_summary(plan: Plan) -> JSON:
    """What tells two plans apart, for the machine and for the reader."""
    return {
        "genome_params": plan.genome_params,
        "pnet_params": plan.pnet_params,
        "ensembles": [e.name for e in plan.ensembles],
        "sha256": hashlib.sha256(plan.to_json().encode()).hexdigest(),
    }


def seal(data: bytes) -> bytes:
    """Put the SHA-256 of a whole safetensors file, with a hole where it goes, into its header."""
    # Quotes within metadata are escaped, so that nothing else in a header reads like this.
    return data.replace(_entry(HOLE), _entry(hashlib.sha256(data).hexdigest()), 1)


def _entry(digest: str) -> bytes:
    return f'"sha256":"{digest}"'.encode()


def unseal(data: bytes) -> tuple[dict[str, str], Params]:
    """Metadata and tensors of a file that is as it was written.

    Raises:
        ValueError: if it is not, saying how.
    """
    try:
        size = int.from_bytes(data[:8], "little")
        digest = json.loads(data[8 : 8 + size])["__metadata__"]["sha256"]
        intact = hashlib.sha256(data.replace(_entry(digest), _entry(HOLE), 1)).hexdigest() == digest
        tensors = from_bytes(data) if intact else {}
    except (ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"it is damaged: no header can be read in its {len(data):,} bytes") from error
    if not intact:
        raise ValueError("it is damaged: its digest does not fit its content")
    return json.loads(data[8 : 8 + size])["__metadata__"], tensors


def restore(
    metadata: dict[str, str], tensors: Params, plan: Plan, like: Any, check: Callable[[JSON], None]
) -> tuple[Any, JSON]:
    """State and extra of a sound file, in the structure of `like`.

    Raises:
        ValueError: for one of another format, plan, p-net or optimizer, or one that `check` refuses.
    """
    if metadata.get("format") != FORMAT:
        raise ValueError(f"its format is {metadata.get('format')!r}, the one known here is {FORMAT!r}")
    extra = json.loads(metadata["extra"])
    check(extra)
    saved, own = json.loads(metadata["plan"]), plan_summary(plan)
    if saved["sha256"] != own.pop("sha256"):
        differing = [f"{k} {saved.get(k)} instead of {v}" for k, v in own.items() if saved.get(k) != v]
        same_size = "of the same size; make the p-net after the same torch.manual_seed, for its scales are in the plan"
        raise ValueError(f"it was saved with another plan ({', '.join(differing) or same_size})")
    expected = named_leaves(like)
    if expected.keys() != tensors.keys():
        missing, unknown = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
        raise ValueError(f"it was saved with another optimizer or p-net: missing {missing}, unknown {unknown}")
    restored = []
    for name, leaf in expected.items():
        tensor = tensors[name]
        if (tensor.shape, tensor.dtype) != (leaf.shape, leaf.dtype):
            found, wanted = (f"{tuple(t.shape)} {t.dtype}" for t in (tensor, leaf))
            raise ValueError(f"its tensor {name!r} is {found}, expected {wanted}")
        # In the layout of `like`: sums may depend on it in the last bit.
        restored.append(torch.empty_like(leaf, requires_grad=False).copy_(tensor))
    return optree.tree_unflatten(optree.tree_structure(like), restored), extra
