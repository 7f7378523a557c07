"""Rounds in one process: a real federation's apps, strategies and messages, without its servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flwr.app import Context, Message, RecordDict  # pyright: ignore[reportMissingImports]
from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
from flwr.common.serde import message_from_proto, message_to_proto  # pyright: ignore[reportMissingImports]
from flwr.proto.message_pb2 import Message as MessageProto  # pyright: ignore[reportMissingImports]
from flwr.serverapp import Grid  # pyright: ignore[reportMissingImports]
from flwr.supercore.run import Run  # pyright: ignore[reportMissingImports]
from flwr.supercore.task_identity import TaskIdentity  # pyright: ignore[reportMissingImports]

_SERVER, _RUN = 1, 1
"""Numbers of the server's node and of the run, as Flower's first run has them."""


class Traffic(NamedTuple):
    """Bytes of messages to clients and from clients, metadata included, and of the largest reply."""

    down: int = 0
    up: int = 0
    messages: int = 0
    largest_up: int = 0


class LocalGrid(Grid):
    """Nodes that run a client's app in this process, one after the other: `with LocalGrid(...) as grid:`.

    Every message is serialised and read again, so the other side gets what a real message holds. A node keeps its
    `context.state` from round to round. Flower's own simulation engine (Ray) starts a process for each core, which
    takes longer than rounds of genomes do on few cores. Flower's messages take their sender from the process, which
    the context manager sets.

    `nodes` are the configs of the nodes, as `flower-supernode --node-config` has them. `traffic` counts the bytes sent
    so far, including those before a checkpoint from which a `GenomeStrategy` goes on.
    """

    def __init__(self, app: ClientApp, nodes: Iterable[Mapping[str, str | int | float | bool]]) -> None:
        self.traffic, self._app, self._replies = Traffic(), app, dict[str, Message]()
        self._contexts = {
            number: Context(_RUN, number, dict(config), RecordDict(), {})
            for number, config in enumerate(nodes, _SERVER + 1)
        }

    def __enter__(self) -> LocalGrid:
        task: Any = TaskIdentity
        self._before = task._task_id, task._run_id, task._node_id
        task._task_id, task._run_id, task._node_id = 1, _RUN, _SERVER
        return self

    def __exit__(self, *error: Any) -> None:
        task: Any = TaskIdentity
        task._task_id, task._run_id, task._node_id = self._before

    def set_run(self, run: Run) -> None:
        """Do nothing: there is one run."""

    @property
    def run(self) -> Run:
        """An empty run."""
        return Run.create_empty(_RUN)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Make a message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Numbers of all nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the client's app on each message; replies wait to be pulled."""
        names = []
        for message in messages:
            name = str(self.traffic.messages)
            sent, down = _through(message)
            self._replies[name], up = _through(self._app(sent, self._contexts[message.metadata.dst_node_id]))
            before = self.traffic
            largest = max(before.largest_up, up)
            self.traffic = Traffic(before.down + down, before.up + up, before.messages + 1, largest)
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Give the replies to some messages."""
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Give the replies; none is late."""
        return self.pull_messages(self.push_messages(messages))


def _through(message: Message) -> tuple[Message, int]:
    """Serialise a message and read it again; also count its bytes."""
    data = message_to_proto(message).SerializeToString()
    return message_from_proto(MessageProto.FromString(data)), len(data)
