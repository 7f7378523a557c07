"""What old versions of torch cannot do, as marks of the tests that need it."""

import inspect
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import ScheduleInterleaved1F1B

try:
    from torch.distributed.fsdp import fully_shard as fully_shard
except ImportError:  # torch 2.5
    from torch.distributed._composable.fsdp import fully_shard as fully_shard  # pyright: ignore[reportPrivateImportUsage]

TRACES_WHOLE_NETS = torch.__version__ >= "2.6"
"""Whether one graph can hold forms of layers, and exchanges between ranks: not with Dynamo of torch 2.5."""

HAS_PIPELINES = "scale_grads" in inspect.signature(ScheduleInterleaved1F1B).parameters

needs_whole_graphs = pytest.mark.skipif(
    not TRACES_WHOLE_NETS, reason=f"Dynamo of torch {torch.__version__}: 2.6 is needed"
)
needs_pipelines = pytest.mark.skipif(
    not HAS_PIPELINES, reason=f"torch {torch.__version__} has no pipelines that do without scaled gradients: 2.7 has"
)


def with_pipelines(names: Iterable[str], *words: str) -> list[Any]:
    return [pytest.param(n, marks=[needs_pipelines] if any(w in n for w in words) else []) for n in names]
