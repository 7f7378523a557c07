"""The server, which applies any strategy of Flower to genomes, and sends and receives genomes in compact messages."""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np
import optree
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict  # pyright: ignore[reportMissingImports]
from flwr.serverapp import Grid  # pyright: ignore[reportMissingImports]
from flwr.serverapp.strategy import Result, Strategy  # pyright: ignore[reportMissingImports]
from google.protobuf.message import DecodeError as ProtobufError
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from gbfunc import Genome, Plan
from gbfunc.federated.client import ARRAYS, EXAMPLES, IDENTITY, METRICS, RATE, REFUSED, ROUND, SENT_AS
from gbfunc.federated.simulation import LocalGrid, Traffic
from gbfunc.federated.wire import NUMBERS, Vector, Wire, check_format, difference
from gbfunc.files import replace_file
from gbfunc.storage.checkpoint import pack_values, unpack_values
from gbfunc.types import GenomeLike, Params

_UNDECODABLE = ValueError, LookupError, TypeError, AttributeError, RecursionError, ProtobufError, SafetensorError
_LOG, _VECTOR, _NODE, _ARRAYS = logging.getLogger(__name__), "genome", "node ", "ArrayRecord"
_POLL = 3.0  # Seconds between two requests for replies, as in Flower


class Round(NamedTuple):
    """The result of a round.

    Attributes:
        round: the number of the round, from 1.
        used: the number of clients whose updates the strategy used.
        left_out: `{number of the node: reason}` for replies that were not used in training or evaluation.
        bounded: `{number of the node: reason}` for replies whose update or number of examples was reduced.
        metrics: means over the clients whose updates were used.
        norm: the median of the updates' norms, before reductions (for an even count, the smaller of the middle two).
    """

    round: int
    used: int
    left_out: dict[int, str]
    bounded: dict[int, str]
    metrics: Mapping[str, Any]
    norm: float


class _Reply(NamedTuple):
    message: Message
    metrics: dict[str, Any]
    update: NDArray[Any]


class _EachReply:
    """A grid (connection to nodes) that pulls replies one by one. Flower's grid drops all replies if one is damaged.

    This grid also refuses a reply whose sender is not the node that got the message.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        messages, replies = list(messages), list[Message]()
        waiting = dict(zip(self._grid.push_messages(messages), messages, strict=False))
        end = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            for name, message in [*waiting.items()]:
                if (reply := self._pull(name, message)) is not None:
                    replies.append(reply)
                    del waiting[name]
            if not waiting or time.monotonic() > end:
                return replies
            time.sleep(_POLL)

    def _pull(self, name: str, sent: Message) -> Message | None:
        try:
            if not (found := [*self._grid.pull_messages([name])]):
                return None
            reply, node = found[0], found[0].metadata.src_node_id
            if node == sent.metadata.dst_node_id:
                return reply
            words = reply.error.reason if reply.has_error() else f"the reply claims to be from node {node}"
        except _UNDECODABLE as error:
            words = f"Flower cannot decode the reply: {type(error).__name__}: {error}"
        return Message(Error(0, words), reply_to=sent)


class GenomeStrategy(Strategy):
    """Wraps a strategy of Flower so that messages contain genomes, or updates of genomes, in a compact form.

    The wrapped strategy sees genomes in float32. The server rounds the strategy's genome to the dtype `down` and sends
    the result. Clients reply with updates. The server adds an update to its unrounded genome. The attribute `rounds`
    lists the results of all rounds.

    A reply is not used, and the round continues, if the reply cannot be read, belongs to a different round, or has
    metrics whose names differ from the metrics of most clients. The norm of an update, and a client's number of
    examples, are reduced to at most `bound` times the median of the round.

    Args:
        strategy: FedAvg, FedAdam, FedProx, ..., or a strategy with differential privacy.
        plan: the plan.
        genome: a genome of the plan, from which training starts.
        lr: the clients' learning rate, or a function from the number of finished rounds to the learning rate.
        down: the dtype in which the genome is sent (`wire.FORMATS`).
        up: the dtype in which clients send updates, or `topK` for the K largest numbers of an update (`Wire.pack`).
        bound: the largest norm of an update and the largest number of examples, as multiples of the round's medians;
            `math.inf` for no bound. With a single reply, the last round's median norm is used if it is smaller.
        checkpoint: a file, written after every round, with all data that the next round needs, including the states of
            the nodes of a `LocalGrid`. If the file exists, `train` resumes from it. Reading the file runs no code.
        seed: seed of the selection of clients; None draws a random seed.
    """

    def __init__(
        self,
        strategy: Strategy,
        plan: Plan,
        genome: GenomeLike,
        *,
        lr: float | Callable[[int], float],
        down: str = "float16",
        up: str = "int4",
        bound: float = 5.0,
        checkpoint: Path | None = None,
        seed: int | None = None,
    ) -> None:
        check_format(down, "down", change=False)
        check_format(up, "up")
        if not bound >= 1:
            raise ValueError(f"bound must be at least 1, got {bound}: a median client counts in full")
        self.strategy, self.wire, self.rounds, self.done = strategy, Wire(plan, genome), list[Round](), 0
        self._lr: Callable[[int], float] = lr if callable(lr) else lambda round_: lr
        self._down, self._up, self._bound = down, up, bound
        self._seed = random.getrandbits(64) if seed is None else seed
        self._path, self._grid = checkpoint, None
        self._options = {at: _packed(value, {}) for at, value in _attributes(strategy).items()}
        self._vector = self.wire.vector(genome)

    @property
    def genome(self) -> Genome:
        return self.wire.genome(self._vector)

    def summary(self) -> None:
        _LOG.info("genomes of %s numbers: %s down, %s up", f"{self.wire.size:,}", self._down, self._up)
        self.strategy.summary()

    def train(self, grid: Grid, rounds: int, **options: Any) -> Result:
        """Train until `rounds` rounds are done. If the checkpoint exists, resume from it; its rounds count.

        `grid` is Flower's grid of nodes, and `options` go to `Strategy.start`. Raises `ValueError` if the
        checkpoint was written by a different server, or if all clients refuse a message.
        """
        self._grid = grid if isinstance(grid, LocalGrid) else None
        if self._path is not None and self._path.exists():
            self._read(self._path)
        return self.start(_EachReply(grid), _record(self._vector), num_rounds=max(0, rounds - self.done), **options)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        self._vector = self.wire.unpack(arrays)
        config[RATE], config[SENT_AS] = float(self._lr(self.done)), self._up
        return self._configured(self.strategy.configure_train, self.done + 1, arrays, config, grid)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        return self._configured(self.strategy.configure_evaluate, self.done, arrays, config, grid)

    def _configured(
        self, configure: Callable[..., Any], number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        config[IDENTITY], config[ROUND] = self.wire.identity, number
        # Flower selects nodes by Python's global random generator: seed the generator, and restore it afterwards.
        before = random.getstate()
        random.seed(f"{self._seed}/{number}/{configure.__name__}")
        try:
            messages = list(configure(number, arrays, config, grid))
        finally:
            random.setstate(before)
        packed = self.wire.pack(self._vector, self._down) if messages else None
        for message in messages:
            message.content = RecordDict({**message.content, ARRAYS: packed})
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies, number = list(replies), self.done + 1
        read, left_out = self._read_replies(replies, number, training=True)
        if replies and all(reply.has_error() and reply.error.code == REFUSED for reply in replies):
            node, words = next(iter(left_out.items()))
            raise ValueError(f"round {number}: all of {len(replies)} clients refuse; node {node}: {words}")
        norm, bounded = self._bound_replies(read)
        _warn(number, left_out, bounded)
        arrays, metrics = self.strategy.aggregate_train(number, [reply.message for reply in read.values()])
        if arrays is not None:
            self._vector = self.wire.unpack(arrays)
            # Convert to float32, because the strategy may compute in another dtype.
            arrays = _record(self._vector)
        elif read:
            _LOG.warning("round %d: %s used none of %d updates", number, _name(self.strategy), len(read))
        self.done = number
        used = 0 if arrays is None else len(read)
        self.rounds.append(Round(number, used, left_out, bounded, dict(metrics or {}), norm))
        if self._path is not None:
            self._write(self._path)
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        read, left_out = self._read_replies(replies, self.done, training=False)
        _, bounded = self._bound_replies(read)
        _warn(self.done, left_out, bounded)
        last = self.rounds[-1]
        for recorded, found in ((last.left_out, left_out), (last.bounded, bounded)):
            recorded.update({node: f"evaluation: {words}" for node, words in found.items()})
        return self.strategy.aggregate_evaluate(self.done, [reply.message for reply in read.values()])

    def _read_replies(
        self, replies: Iterable[Message], number: int, *, training: bool
    ) -> tuple[dict[int, _Reply], dict[int, str]]:
        read, left_out = dict[int, _Reply](), dict[int, str]()
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise ValueError(reply.error.reason or f"error {reply.error.code}")
                read[node] = self._read_reply(reply, number, training)
            except Exception as error:  # Bytes from clients may raise any exception
                kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
                left_out[node] = kind + _printable(error)
        forms = {node: _form(reply.metrics) for node, reply in read.items()}
        for usual, _ in Counter(forms.values()).most_common(1):
            for node in [node for node, form in forms.items() if form != usual]:
                del read[node]
                left_out[node] = _printable(f"expected the metrics of most clients, {usual}, got {forms[node]}")
        return read, left_out

    def _read_reply(self, message: Message, number: int, training: bool) -> _Reply:
        content, arrays = message.content, [ARRAYS] if training else []
        if [*content.array_records] != arrays or [*content.metric_records] != [METRICS]:
            raise ValueError(f"expected the records {', '.join((*arrays, METRICS))}, got {', '.join(content)}")
        metrics = dict(content.metric_records[METRICS])
        if (answered := metrics.pop(ROUND, None)) != number:
            raise ValueError(f"expected a reply to round {number}, got one to {answered}")
        weight = metrics.get(EXAMPLES)
        if not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(f"expected a number of examples above 0, got {weight!r}")
        if bad := [name for name, value in metrics.items() if not np.isfinite(value).all()]:
            raise ValueError(f"{', '.join(bad)} must be finite")
        update, content = np.zeros(0, np.float32), RecordDict({METRICS: MetricRecord(metrics)})
        if training:
            update = self.wire.unpack(message.content.array_records[ARRAYS])
            content[ARRAYS] = _record(update)
            if self._up == "float32":
                with np.errstate(over="ignore"):
                    update = update.astype(np.float64) - self._vector
        message.content = content
        return _Reply(message, metrics, update)

    def _bound_replies(self, read: Mapping[int, _Reply]) -> tuple[float, dict[int, str]]:
        """Reduce updates and numbers of examples to the bound. Return the median norm, and {node: what was reduced}."""
        norms = {node: float(np.linalg.norm(reply.update.astype(np.float64))) for node, reply in read.items()}
        norm, weight = _median(norms.values()), _median(reply.metrics[EXAMPLES] for reply in read.values())
        if len(norms) == 1:
            norm = min([norm, *(r.norm for r in self.rounds[-1:] if r.norm)])
        words = dict[int, list[str]]()
        for node, (message, metrics, update) in read.items():
            if metrics[EXAMPLES] > self._bound * weight:
                message.content.metric_records[METRICS][EXAMPLES] = self._bound * weight
                words.setdefault(node, []).append(f"{metrics[EXAMPLES]:.3g} examples count as {self._bound * weight:g}")
            if norms[node] > self._bound * norm > 0:
                times = f"an update of {norms[node] / norm:.3g} times the median norm counts as {self._bound:g}"
                words.setdefault(node, []).append(times)
                update = (update * (self._bound * norm / norms[node])).astype(np.float32)
            elif self._up == "float32":
                continue  # The reply contains a genome, not an update
            if len(update):
                message.content.array_records[ARRAYS] = _record(self._vector + update)
        return norm, {node: "; ".join(found) for node, found in words.items()}

    def _write(self, path: Path) -> None:
        tensors, state = {_VECTOR: torch.from_numpy(self._vector)}, {}
        for at, value in _attributes(self.strategy).items():
            before, packed = len(tensors), _packed(value, tensors)
            # Store only attributes that training changed. To resume, the program constructs the same strategy again.
            if len(tensors) > before or packed != self._options.get(at):
                state[at] = packed
        about = {"round": self.done, "id": self.wire.identity, "strategy": _name(self.strategy), "state": state}
        about |= {"rounds": [r._asdict() for r in self.rounds]}
        if self._grid is not None:
            nodes = {f"{_NODE}{k}": torch.frombuffer(bytearray(x), dtype=torch.uint8) for k, x in self._grid.states()}
            about, tensors = about | {"traffic": self._grid.traffic}, tensors | nodes
        replace_file(path, save(tensors, {"server": json.dumps(about)}))

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, framework="np") as file:
                about = json.loads((file.metadata() or {})["server"])
                tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 (not a dict)
            if (words := difference(self.wire.identity, about["id"])) is not None:
                raise ValueError(words.replace("the server", "its writer"))
            if about["strategy"] != _name(self.strategy):
                raise ValueError(f"expected the strategy {about['strategy']}, got {_name(self.strategy)}")
            vector, rounds = self.wire.unpack(_record(tensors[_VECTOR])), []
            for r in about["rounds"]:
                nodes = {name: {int(k): str(x) for k, x in r[name].items()} for name in ("left_out", "bounded")}
                rounds.append(Round(**(r | nodes)))
            attributes = _attributes(self.strategy)
            for at, packed in about["state"].items():
                owner, _, name = at.rpartition("/")
                value = None if packed is None else _unpacked(packed, tensors)
                if (load := getattr(attributes.get(at), "load_state_dict", None)) is not None:
                    load(value)
                else:
                    setattr(attributes[owner] if owner else self.strategy, name, value)
            if self._grid is not None:
                self._grid.traffic = Traffic(*about["traffic"])
                states = {k.removeprefix(_NODE): x.tobytes() for k, x in tensors.items() if k.startswith(_NODE)}
                self._grid.restore({int(k): x for k, x in states.items()})
        except _UNDECODABLE as error:
            raise ValueError(f"{path} must be a checkpoint of this server: {error}") from error
        self._vector, self.done, self.rounds = vector, int(about["round"]), rounds


def _warn(number: int, left_out: Mapping[int, str], bounded: Mapping[int, str]) -> None:
    for node, words in (*left_out.items(), *bounded.items()):
        _LOG.warning("round %d: node %d: %s", number, node, words)


def _record(vector: Vector) -> ArrayRecord:
    return ArrayRecord({NUMBERS: Array(vector)})


def _median(values: Iterable[float]) -> float:
    return median_low([x for x in values if x > 0] or [0.0])


def _form(metrics: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}[{len(x)}]" if isinstance(x, list) else name for name, x in sorted(metrics.items()))


def _printable(words: object) -> str:
    return "".join(x if x.isprintable() else "?" for x in str(words)[:300])


def _packed(value: Any, tensors: Params) -> str | None:
    def leaf(x: Any) -> Any:
        if isinstance(x, ArrayRecord):
            return {_ARRAYS: {name: leaf(array.numpy()) for name, array in x.items()}}
        return torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray | np.generic) else x

    try:
        value = value.state_dict() if hasattr(value, "state_dict") else value
        return json.dumps(pack_values(optree.tree_map(leaf, value), tensors))
    except TypeError:
        return None


def _unpacked(text: str, arrays: Mapping[str, NDArray[Any]]) -> Any:
    def hook(x: dict[str, Any]) -> Any:
        return ArrayRecord({k: Array(v) for k, v in x[_ARRAYS].items()}) if _ARRAYS in x else unpack_values(arrays, x)

    return json.loads(text, object_hook=hook)


def _attributes(strategy: Strategy, prefix: str = "") -> dict[str, Any]:
    found = {f"{prefix}{name}": value for name, value in vars(strategy).items()}
    for at, value in list(found.items()):
        if isinstance(value, Strategy):
            found |= _attributes(value, f"{at}/")
    return found


def _name(strategy: Strategy) -> str:
    wrapped = [value for value in _attributes(strategy).values() if isinstance(value, Strategy)]
    return "/".join(type(x).__name__ for x in (strategy, *wrapped))
