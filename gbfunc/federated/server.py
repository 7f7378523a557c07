"""The server: any of Flower's strategies on genomes that travel in few bytes."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict  # pyright: ignore[reportMissingImports]
from flwr.serverapp import Grid  # pyright: ignore[reportMissingImports]
from flwr.serverapp.strategy import Result, Strategy  # pyright: ignore[reportMissingImports]
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from gbfunc import Genome, Plan
from gbfunc.federated.client import ARRAYS, EXAMPLES, IDENTITY, METRICS, RATE, REFUSED, SENT_AS
from gbfunc.federated.simulation import LocalGrid, Traffic
from gbfunc.federated.wire import NUMBERS, Vector, Wire, check_format, difference
from gbfunc.files import replace_file
from gbfunc.types import GenomeLike

_LOG, _VECTOR = logging.getLogger(__name__), "genome"


class Round(NamedTuple):
    """Replies of a round, counted from 1.

    `used` is the number of clients whose changes were used, `metrics` are means over them. `left_out` says why others
    were left out of training or evaluation, by the number of their node.
    """

    round: int
    used: int
    left_out: dict[int, str]
    metrics: Mapping[str, Any]


class GenomeStrategy(Strategy):
    """A strategy of Flower's whose arrays are a genome, sent in few bytes each way.

    The strategy inside sees genomes in float32: the genome that it sends is rounded to `down`, and a change that comes
    back is added to the genome before rounding. Where both are float32, the strategy inside works without this class,
    with `Wire.pack` for the arrays and `client.IDENTITY`, `RATE` and `SENT_AS` in the config. `rounds` lists
    replies.

    Args:
        strategy: FedAvg, FedAdam, FedProx, ..., also a strategy of differential privacy.
        plan: the plan.
        genome: a genome of the plan, where training starts.
        lr: the clients' learning rate, or a function of the round, which counts from 0.
        down: dtype in which the genome is sent (`wire.FORMATS`).
        up: dtype in which clients send changes; or `topK`, the K largest numbers of a change (`Wire.pack`).
        checkpoint: a file that holds, after every round, all that the next round needs; if the file exists, `train`
            goes on from it. No part of the file is code.
        seed: seed of the choice of clients; None leaves the choice to chance.
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
        checkpoint: Path | None = None,
        seed: int | None = None,
    ) -> None:
        check_format(down, "down", change=False)
        check_format(up, "up")
        self.strategy, self.wire, self.rounds, self.done = strategy, Wire(plan, genome), list[Round](), 0
        self._lr: Callable[[int], float] = lr if callable(lr) else lambda round_: lr
        self._down, self._up = down, up
        self._seed = random.getrandbits(64) if seed is None else seed
        self._path, self._grid, self._options = checkpoint, None, _attributes(strategy)
        self._vector = self.wire.vector(genome)

    @property
    def genome(self) -> Genome:
        return self.wire.genome(self._vector)

    def summary(self) -> None:
        _LOG.info("genomes of %s numbers: %s down, %s up", f"{self.wire.size:,}", self._down, self._up)
        self.strategy.summary()

    def train(self, grid: Grid, rounds: int, **options: Any) -> Result:
        """Train until so many rounds are done in all, from the checkpoint if there is one.

        `grid` are the nodes, as Flower gives them to a server's app; `options` go to `Strategy.start`. Raises
        `ValueError` for a checkpoint of another server, or if all clients refuse in a round.
        """
        self._grid = grid if isinstance(grid, LocalGrid) else None
        if self._path is not None and self._path.exists():
            self._read(self._path)
        return self.start(grid, _record(self._vector), num_rounds=max(0, rounds - self.done), **options)

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        self._vector = self.wire.unpack(arrays)
        config[RATE], config[SENT_AS] = float(self._lr(self.done)), self._up
        return self._configured(self.strategy.configure_train, self.done + 1, arrays, config, grid)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Any:
        return self._configured(self.strategy.configure_evaluate, self.done, arrays, config, grid)

    def _configured(
        self, configure: Callable[..., Any], number: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        config[IDENTITY] = self.wire.identity
        # Flower draws nodes with the generator of the process.
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
        used, left_out = self._usable(replies, number, [ARRAYS])
        if replies and all(reply.has_error() and reply.error.code == REFUSED for reply in replies):
            node, words = next(iter(left_out.items()))
            raise ValueError(f"round {number}: all of {len(replies)} clients refuse; node {node}: {words}")
        arrays, metrics = self.strategy.aggregate_train(number, used)
        if arrays is not None:
            self._vector = self.wire.unpack(arrays)
            # The strategy may compute in another dtype.
            arrays = _record(self._vector)
        self.done = number
        self.rounds.append(Round(number, len(used), left_out, dict(metrics or {})))
        if self._path is not None:
            self._write(self._path)
        return arrays, metrics

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        used, left_out = self._usable(replies, self.done, [])
        self.rounds[-1].left_out.update({node: f"evaluation: {words}" for node, words in left_out.items()})
        return self.strategy.aggregate_evaluate(self.done, used)

    def _usable(self, replies: Iterable[Message], number: int, arrays: list[str]) -> tuple[list[Any], dict[int, str]]:
        used, left_out = [], {}
        for reply in replies:
            node = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise ValueError(reply.error.reason or f"error {reply.error.code}")
                reply.content = self._whole(reply.content, arrays)
                used.append(reply)
            except ValueError as error:
                left_out[node] = str(error)
                _LOG.warning("round %d: node %d is left out: %s", number, node, error)
        return used, left_out

    def _whole(self, content: RecordDict, arrays: list[str]) -> RecordDict:
        if [*content.array_records] != arrays or [*content.metric_records] != [METRICS]:
            raise ValueError(f"expected the records {', '.join((*arrays, METRICS))}, got {', '.join(content)}")
        metrics = content.metric_records[METRICS]
        weight = metrics.get(EXAMPLES)
        if not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(f"expected a number of examples above 0, got {weight!r}")
        if bad := [name for name, value in metrics.items() if not np.isfinite(value).all()]:
            raise ValueError(f"its {', '.join(bad)} is not finite")
        if not arrays:
            return RecordDict({METRICS: metrics})
        vector = self.wire.unpack(content.array_records[ARRAYS])
        if self._up != "float32":
            vector = self._vector + vector
        return RecordDict({ARRAYS: _record(vector), METRICS: metrics})

    def _write(self, path: Path) -> None:
        tensors, state = {_VECTOR: self._vector}, {}
        for at, (_, value) in _attributes(self.strategy).items():
            if hasattr(value, "load_state_dict"):
                state[at] = value.state_dict()
            elif isinstance(value, int | float) and not isinstance(value, bool):
                # Numbers that change are state, others are options.
                state |= {at: value} if value != self._options[at][1] else {}
            else:
                items = dict(enumerate(value)) if isinstance(value, list) else value
                items = items.items() if isinstance(items, dict) else ()
                tensors |= {f"{at}/{k}": np.array(x) for k, x in items if isinstance(x, np.ndarray)}
        about = {"round": self.done, "id": self.wire.identity, "strategy": _name(self.strategy), "state": state}
        about |= {} if self._grid is None else {"traffic": self._grid.traffic}
        replace_file(path, save(tensors, {"server": json.dumps(about)}))

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, framework="np") as file:
                about = json.loads((file.metadata() or {})["server"])
                tensors = {k: file.get_tensor(k) for k in file.keys()}  # noqa: SIM118 (not a dict)
            if (words := difference(self.wire.identity, about["id"])) is not None:
                raise ValueError(words.replace("the server", "its writer"))
            if about["strategy"] != _name(self.strategy):
                raise ValueError(f"it is of the strategy {about['strategy']}, got {_name(self.strategy)}")
            vector, state = self.wire.unpack(_record(tensors.pop(_VECTOR))), about["state"]
            for key, array in tensors.items():
                at, _, entry = key.rpartition("/")
                state.setdefault(at, {})[entry] = array
            attributes = _attributes(self.strategy)
            for at, value in state.items():
                owner, current = attributes[at]
                if hasattr(current, "load_state_dict"):
                    current.load_state_dict(value)
                    continue
                if isinstance(value, dict) and all(map(str.isdigit, value)):
                    value = [value[k] for k in sorted(value, key=int)]
                setattr(owner, at.rpartition("/")[2], value)
            if self._grid is not None:
                self._grid.traffic = Traffic(*about.get("traffic", ()))
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no checkpoint that this server can go on from: {error}") from error
        self._vector, self.done = vector, int(about["round"])


def _record(vector: Vector) -> ArrayRecord:
    return ArrayRecord({NUMBERS: Array(vector)})


def _attributes(strategy: Strategy, prefix: str = "") -> dict[str, tuple[Strategy, Any]]:
    """Owner and value of each attribute of a strategy, and of strategies inside it (privacy has one), by path."""
    found = {f"{prefix}{name}": (strategy, value) for name, value in vars(strategy).items()}
    for at, (_, value) in list(found.items()):
        if isinstance(value, Strategy):
            found |= _attributes(value, f"{at}/")
    return found


def _name(strategy: Strategy) -> str:
    parts = [value for _, value in _attributes(strategy).values() if isinstance(value, Strategy)]
    return "/".join(type(part).__name__ for part in (strategy, *parts))
