"""Simulates federated learning in one process, with the apps, strategies and messages of a real deployment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Context, Message, RecordDict  # pyright: ignore[reportMissingImports]
from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
from flwr.common.serde import message_from_proto, message_to_proto, recorddict_from_proto, recorddict_to_proto  # pyright: ignore[reportMissingImports]
from flwr.proto.message_pb2 import Message as MessageProto  # pyright: ignore[reportMissingImports]
from flwr.proto.recorddict_pb2 import RecordDict as RecordDictProto  # pyright: ignore[reportMissingImports]
from flwr.serverapp import Grid  # pyright: ignore[reportMissingImports]
from flwr.supercore.run import Run  # pyright: ignore[reportMissingImports]
from flwr.supercore.task_identity import TaskIdentity  # pyright: ignore[reportMissingImports]
from numpy.typing import ArrayLike, NDArray

_SERVER, _RUN = 1, 1  # Flower's numbers of the server and of the first run


class Traffic(NamedTuple):
    """Total bytes sent to clients and from clients, the number of messages, and the bytes of the largest reply."""

    down: int = 0
    up: int = 0
    messages: int = 0
    largest_up: int = 0


class LocalGrid(Grid):
    """Nodes that run a client's app in this process, one after another: `with LocalGrid(...) as grid:`.

    Every message is serialized and deserialized. A node keeps its `context.state` from round to round. Inside
    the `with` block, new messages name Flower's server as their sender.

    `nodes` has the config of every node, as in `flower-supernode --node-config`. `traffic` counts the bytes sent.
    """

    def __init__(self, app: ClientApp, nodes: Iterable[Mapping[str, str | int | float | bool]]) -> None:
        self.traffic, self._app, self._replies = Traffic(), app, dict[str, Message]()
        numbered = enumerate(nodes, _SERVER + 1)
        self._contexts = {number: Context(_RUN, number, {**config}, RecordDict(), {}) for number, config in numbered}

    def __enter__(self) -> LocalGrid:
        task: Any = TaskIdentity
        self._before = task._task_id, task._run_id, task._node_id
        task._task_id, task._run_id, task._node_id = 1, _RUN, _SERVER
        return self

    def __exit__(self, *error: Any) -> None:
        task: Any = TaskIdentity
        task._task_id, task._run_id, task._node_id = self._before

    def states(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the serialized `context.state` of every node whose state is not empty."""
        for number, context in self._contexts.items():
            if context.state:
                yield number, recorddict_to_proto(context.state).SerializeToString()

    def restore(self, states: Mapping[int, bytes]) -> None:
        for number, context in self._contexts.items():
            context.state = recorddict_from_proto(RecordDictProto.FromString(states.get(number, b"")))

    def set_run(self, run: Run) -> None:
        pass  # All messages of a local grid belong to one run

    @property
    def run(self) -> Run:
        return Run.create_empty(_RUN)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = []
        for message in messages:
            before, (sent, down) = self.traffic, _through(message)
            names.append(str(before.messages))
            self._replies[names[-1]], up = _through(self._app(sent, self._contexts[message.metadata.dst_node_id]))
            largest = max(before.largest_up, up)
            self.traffic = Traffic(before.down + down, before.up + up, before.messages + 1, largest)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))


def _through(message: Message) -> tuple[Message, int]:
    data = message_to_proto(message).SerializeToString()
    return message_from_proto(MessageProto.FromString(data)), len(data)


LEAST = 10  # Least number of examples of a client; with fewer, `partition` draws again (Li et al., 2021)


def partition(labels: ArrayLike, clients: int, alpha: float = math.inf, seed: int = 0) -> list[NDArray[np.int64]]:
    """Divide examples among clients, given the examples' labels. Return the indices of each client's examples.

    For every class, a Dirichlet distribution with concentration `alpha` draws what fraction of the class each client
    gets (Hsu, Qi and Brown, 2019). If `alpha` is 0.3, most examples of a client come from about three MNIST classes.
    For `math.inf`, all clients get equally many random examples. A seed gives the same result on every machine.

    Raises `ValueError` for arguments out of range, or if a client would have fewer than 10 examples.

    >>> [len(part) for part in partition([0, 1] * 50, clients=4)]
    [25, 25, 25, 25]
    """
    labels_N = np.asarray(labels)
    if labels_N.ndim != 1 or clients < 1 or not alpha > 0:
        raise ValueError(f"expected labels [N], clients >= 1 and alpha > 0, got {labels_N.shape}, {clients}, {alpha}")
    if len(labels_N) < LEAST * clients:
        raise ValueError(f"{clients} clients need {LEAST} examples each, got {len(labels_N)} in all")
    # Use RandomState, which draws the same numbers in all versions of NumPy, unlike Generator.
    draw = np.random.RandomState(seed)
    if math.isinf(alpha):
        return [np.sort(part) for part in np.array_split(draw.permutation(len(labels_N)), clients)]
    classes = [np.flatnonzero(labels_N == label) for label in np.unique(labels_N)]
    for _ in range(1_000):
        pieces = []
        for members in classes:
            order, shares = draw.permutation(members), draw.dirichlet([alpha] * clients)
            pieces.append(np.split(order, (np.cumsum(shares)[:-1] * len(members)).astype(np.int64)))
        indices = [np.sort(np.concatenate(of_client)) for of_client in zip(*pieces, strict=True)]
        if min(map(len, indices)) >= LEAST:
            return indices
    raise ValueError(f"no split of {len(labels_N)} examples gives each of {clients} clients {LEAST} at alpha {alpha:g}")
