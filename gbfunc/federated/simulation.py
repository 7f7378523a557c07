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

_IDENTITY: Mapping[str, int | None] = {"_task_id": 1, "_run_id": _RUN, "_node_id": _SERVER}
"""What a process of Flower's knows of itself."""


class Traffic(NamedTuple):
    """Bytes of messages, serialised as Flower sends them, their metadata included; of those sent the ones answered.

    Attributes:
        down: from the server to clients, in all.
        up: from clients to the server, in all.
        messages: there and back.
        largest_up: bytes of the largest reply.
    """

    down: int = 0
    up: int = 0
    messages: int = 0
    largest_up: int = 0


class LocalGrid(Grid):
    """Nodes that run a client's app in this process, one after the other.

    Every message is serialised and read again, so that nothing but what a real one holds gets to the other side. A node
    keeps its `context.state` from round to round. It takes the place of `flwr run` with its simulation engine (Ray),
    which starts a process a core: on few cores, for genomes, one process is faster.

    It is a context manager, as Flower's messages take their sender from their process: `with LocalGrid(...) as grid:`.

    Args:
        app: the client's app.
        nodes: the config of each node, as `flower-supernode --node-config` has it.

    Attributes:
        traffic: what was sent so far, before a checkpoint that a `GenomeStrategy` goes on from, too.
    """

    def __init__(self, app: ClientApp, nodes: Iterable[Mapping[str, str | int | float | bool]]) -> None:
        self.traffic, self._app, self._replies = Traffic(), app, dict[str, Message]()
        self._contexts = {
            number: Context(_RUN, number, dict(config), RecordDict(), {})
            for number, config in enumerate(nodes, _SERVER + 1)
        }

    def __enter__(self) -> LocalGrid:
        self._before = {name: getattr(TaskIdentity, name) for name in _IDENTITY}
        self._identify(_IDENTITY)
        return self

    def __exit__(self, *error: Any) -> None:
        self._identify(self._before)

    def _identify(self, values: Mapping[str, int | None]) -> None:
        for name, value in values.items():
            setattr(TaskIdentity, name, value)

    def set_run(self, run: Run) -> None:
        """There is one run."""

    @property
    def run(self) -> Run:
        """An empty one."""
        return Run.create_empty(_RUN)

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """A message to a node."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the client's app on each; the replies wait."""
        names = []
        for message in messages:
            name = str(self.traffic.messages)
            self._replies[name] = self._answered(message, name)
            names.append(name)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies."""
        return [self._replies.pop(name) for name in message_ids if name in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """The replies; none is late."""
        return self.pull_messages(self.push_messages(messages))

    def _answered(self, message: Message, name: str) -> Message:
        message.metadata.__dict__["_message_id"] = name
        sent, down = _through(message)
        reply, up = _through(self._app(sent, self._contexts[message.metadata.dst_node_id]))
        before = self.traffic
        largest = max(before.largest_up, up)
        self.traffic = Traffic(before.down + down, before.up + up, before.messages + 1, largest)
        return reply


def _through(message: Message) -> tuple[Message, int]:
    """A message as it arrives, and its bytes."""
    data = message_to_proto(message).SerializeToString()
    return message_from_proto(MessageProto.FromString(data)), len(data)
