"""Bitwise comparison and copies of trees of tensors, for tests of purity."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import optree
import torch
from torch import Tensor, nn


def copy_tree(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, tree)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees have the same structure, dtypes, shapes and bits; NaN equals itself."""
    leaves_a, spec_a = optree.tree_flatten(a)
    leaves_b, spec_b = optree.tree_flatten(b)
    return spec_a == spec_b and all(_same(x, y) for x, y in zip(leaves_a, leaves_b, strict=True))


def _same(x: Any, y: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return x == y
    if x.dtype != y.dtype or x.shape != y.shape or x.device != y.device:
        return False
    return x.is_meta or bytes_of(x) == bytes_of(y)


def bytes_of(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def photograph(module: nn.Module) -> Any:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {
        "tensors": {name: copy_tree(x) for name, x in tensors},
        "identities": [(name, id(x), x.requires_grad, x.grad is None) for name, x in tensors],
        "modules": [
            (name, id(m), type(m), m.training, sorted(vars(m)), len(m._forward_hooks), len(m._forward_pre_hooks))
            for name, m in module.named_modules()
        ],
    }


@contextmanager
def torch_defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
