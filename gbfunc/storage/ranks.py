"""What only rank 0 does, with its outcome on every rank: all go on, or all raise the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

from gbfunc.parallel import Mesh, from_rank_0


def ask_rank_0(mesh: Mesh, do: Callable[[], Any]) -> Any:
    """What `do` returns on rank 0 (JSON), on every rank; all ranks must call.

    Raises:
        ValueError: if it raises one on rank 0.
        OSError: likewise.
        CollectiveError: if a rank is missing.
    """
    answer: dict[str, Any] = {}
    failure = None
    if mesh.rank == 0:
        try:
            answer = {"value": do()}
        except (ValueError, OSError) as error:
            failure = error
            answer = {"error": str(error), "errno": error.errno if isinstance(error, OSError) else None}
    data = torch.frombuffer(bytearray(json.dumps(answer).encode()), dtype=torch.uint8)
    (size,) = from_rank_0(mesh, [torch.tensor(len(data))])
    (data,) = from_rank_0(mesh, [data if mesh.rank == 0 else data.new_zeros(int(size))])
    if failure is not None:
        raise failure
    answer = json.loads(data.numpy().tobytes())
    if "error" in answer:
        message = f"on rank 0: {answer['error']}"
        raise ValueError(message) if answer["errno"] is None else OSError(answer["errno"], message)
    return answer["value"]
