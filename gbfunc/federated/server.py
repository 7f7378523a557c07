"""The server: any of Flower's strategies on genomes that travel in few bytes; an app that Flower runs."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict  # pyright: ignore[reportMissingImports]
from flwr.serverapp import Grid, ServerApp  # pyright: ignore[reportMissingImports]
from flwr.serverapp.strategy import Result, Strategy  # pyright: ignore[reportMissingImports]
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from gbfunc import Genome, Plan
from gbfunc.federated.client import ARRAYS, IDENTITY, METRICS, RATE, REFUSED, SENT_AS
from gbfunc.federated.simulation import LocalGrid, Traffic
from gbfunc.federated.wire import NUMBERS, Vector, Wire, check_format, difference
from gbfunc.files import replace_file
from gbfunc.types import GenomeLike

_LOG = logging.getLogger(__name__)

_VECTOR, _STATE = "genome", "strategy/"


class Round(NamedTuple):
    """What came back in a round of training.

    Attributes:
        round: its number, from 1.
        used: clients whose changes were used.
        left_out: why others were not, by the number of their node.
        metrics: means over those that were used.
    """

    round: int
    used: int
    left_out: Mapping[int, str]
    metrics: Mapping[str, Any]


class GenomeStrategy(Strategy):
    """A strategy of Flower's whose arrays are a genome, sent in few bytes each way.

    The strategy inside sees genomes in float32 alone: what it is to send is rounded to `down`, and what comes back, a
    change of what was sent, is added to the genome before it was rounded. Where both are float32, it may as well be
    used without this class, with `Wire.pack` for the arrays and `client.IDENTITY`, `RATE` and `SENT_AS` in the config.

    Args:
        strategy: FedAvg, FedAdam, FedProx, ..., also those of differential privacy.
        plan: the plan.
        genome: a genome of it.
        lr: the clients' learning rate, or a function of the round, which counts from 0.
        down: dtype in which the genome is sent (`wire.FORMATS`).
        up: dtype in which clients send changes; or `topK`, the K largest numbers of one (`Wire.pack`).
        checkpoint: a file that holds, after every round, all that the next one takes; `train` goes on from it where it
            is there. Nothing of it is code.
        seed: of the choice of clients; None leaves it to chance.

    Attributes:
        rounds: what came back, round by round, since this object was made.
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
        self.strategy, self.wire, self.rounds = strategy, Wire(plan, genome), list[Round]()
        self._lr: Callable[[int], float] = lr if callable(lr) else lambda round_: lr
        self._down, self._up, self._seed = down, up, seed
        self._path, self._done, self._grid = checkpoint, 0, None
        # Numbers that change are state, others are options.
        self._options = _numbers(strategy)
        self._vector = self.wire.vector(genome)

    @property
    def genome(self) -> Genome:
        """The genome as it is now."""
        return self.wire.genome(self._vector)

    @property
    def done(self) -> int:
        """Rounds that are done, those before a checkpoint included."""
        return self._done

    def summary(self) -> None:
        """Log the settings."""
        _LOG.info("genomes of %s numbers: %s down, %s up", f"{self.wire.size:,}", self._down, self._up)
        self.strategy.summary()

    def train(self, grid: Grid, rounds: int, **options: Any) -> Result:
        """Train until so many rounds are done in all, from the checkpoint where there is one.

        Args:
            grid: the nodes, as Flower gives them to a server's app.
            rounds: in all.
            **options: others of `Strategy.start`: `timeout`, `evaluate_fn`, ...

        Raises:
            ValueError: for a checkpoint of another plan, library or strategy, or a damaged one; if all clients of a
                round refuse, as they would in the next one.
            OSError: if the checkpoint cannot be written.
        """
        self._grid = grid if isinstance(grid, LocalGrid) else None
        if self._path is not None and self._path.exists():
            self._read(self._path)
        arrays = _record(self._vector)
        return self.start(grid, arrays, num_rounds=max(0, rounds - self._done), **options)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """What the strategy would send, in few bytes."""
        self._vector = self.wire.unpack(arrays)
        config[RATE], config[SENT_AS] = float(self._lr(self._done)), self._up
        return self._configured("configure_train", arrays, config, grid)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """What the strategy would send, in few bytes."""
        # The round that these nodes are to measure is over.
        return self._configured("configure_evaluate", arrays, config, grid, self._done)

    def _configured(
        self, method: str, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, number: int | None = None
    ) -> list[Message]:
        config[IDENTITY] = self.wire.identity
        number = self._done + 1 if number is None else number
        before = random.getstate()
        if self._seed is not None:
            # Flower draws nodes with the generator of the process.
            random.seed(f"{self._seed}/{number}/{method}")
        try:
            messages = list(getattr(self.strategy, method)(number, arrays, config, grid))
        finally:
            if self._seed is not None:
                random.setstate(before)
        if messages:
            packed = self.wire.pack(self._vector, self._down)
            for message in messages:
                records: dict[str, Any] = {ARRAYS: packed}
                message.content = RecordDict(records | {k: v for k, v in message.content.items() if k != ARRAYS})
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """What the strategy makes of the clients' genomes; the checkpoint is written."""
        used, left_out, refused = [], {}, 0
        for reply in replies:
            try:
                used.append(self._whole(reply))
            except ValueError as error:
                left_out[reply.metadata.src_node_id] = str(error)
                refused += reply.has_error() and reply.error.code == REFUSED
        for node, words in left_out.items():
            _LOG.warning("round %d: node %d is left out: %s", self._done + 1, node, words)
        if refused and refused == len(left_out) and not used:
            node, words = next(iter(left_out.items()))
            raise ValueError(f"round {self._done + 1}: all of {refused} clients refuse; node {node}: {words}")
        arrays, metrics = self.strategy.aggregate_train(self._done + 1, used)
        if arrays is not None:
            self._vector = self.wire.unpack(arrays)
            # In float32 whatever the strategy computes in.
            arrays = _record(self._vector)
        self._done += 1
        self.rounds.append(Round(self._done, len(used), left_out, dict(metrics or {})))
        if self._path is not None:
            self._write(self._path)
        return arrays, metrics

    def _whole(self, reply: Message) -> Message:
        """A client's reply with its genome in float32; `ValueError` for one that cannot be used."""
        if reply.has_error():
            raise ValueError(reply.error.reason or f"error {reply.error.code}")
        records = reply.content.array_records, reply.content.metric_records
        if [*records[0]] != [ARRAYS] or [*records[1]] != [METRICS]:
            raise ValueError(f"expected the records {ARRAYS!r} and {METRICS!r}, got {[*reply.content]}")
        vector, weight = self.wire.unpack(records[0][ARRAYS]), records[1][METRICS].get("num-examples")
        if not isinstance(weight, int | float) or not 0 < weight < math.inf:
            raise ValueError(f"expected a number of examples above 0, got {weight!r}")
        if self._up != "float32":
            vector = self._vector + vector
        if not np.isfinite(vector).all():
            raise ValueError("its genome holds numbers that are not finite")
        reply.content = RecordDict({ARRAYS: _record(vector), METRICS: records[1][METRICS]})
        return reply

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """What the strategy makes of the clients' metrics."""
        return self.strategy.aggregate_evaluate(self._done, replies)

    def _write(self, path: Path) -> None:
        tensors = {_VECTOR: torch.from_numpy(self._vector)}
        for prefix, part in _parts(self.strategy):
            for name, value in vars(part).items():
                if isinstance(value, dict) and value and all(isinstance(x, np.ndarray) for x in value.values()):
                    key = f"{_STATE}{prefix}{name}/"
                    tensors |= {f"{key}{k}": torch.from_numpy(np.array(x)) for k, x in value.items()}
        numbers = {k: x for k, x in _numbers(self.strategy).items() if x != self._options[k]}
        about = {"round": self._done, "id": self.wire.identity, "strategy": _name(self.strategy), "numbers": numbers}
        about |= {} if self._grid is None else {"traffic": self._grid.traffic}
        replace_file(path, save(tensors, {"server": json.dumps(about)}))

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                about = json.loads((file.metadata() or {})["server"])
                tensors = {k: file.get_tensor(k).numpy().copy() for k in file.keys()}  # noqa: SIM118 (not a dict)
            vector, done, there = tensors.pop(_VECTOR), int(about["round"]), str(about["id"])
            name, numbers = str(about["strategy"]), dict(about["numbers"])
            traffic = Traffic(*about.get("traffic", ()))
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a checkpoint of a server: {error}") from error
        if (words := difference(self.wire.identity, there)) is not None:
            raise ValueError(f"{path} cannot be gone on from: {words.replace('the server', 'its writer')}")
        if name != _name(self.strategy):
            raise ValueError(f"{path} is of the strategy {name}, got {_name(self.strategy)}")
        state: dict[str, Any] = numbers
        for key, array in tensors.items():
            attribute, _, entry = key.removeprefix(_STATE).rpartition("/")
            state.setdefault(attribute, {})[entry] = array
        parts = dict(_parts(self.strategy))
        for attribute, value in state.items():
            prefix, _, last = attribute.rpartition("/")
            part = parts.get(f"{prefix}/" if prefix else "")
            if last not in (() if part is None else vars(part)):
                raise ValueError(f"{path} holds {attribute!r}, which {name} has not: it is of another version of it")
            setattr(part, last, value)
        self._vector, self._done = self.wire.unpack(_record(vector)), done
        if self._grid is not None:
            self._grid.traffic = traffic


def server_app(
    make: Callable[[Context], GenomeStrategy],
    rounds: int,
    finish: Callable[[GenomeStrategy], None],
    **options: Any,
) -> ServerApp:
    """A `ServerApp` that trains a genome.

    Args:
        make: the strategy, from the context of the run (`context.run_config`).
        rounds: in all.
        finish: what to do with the strategy, and its genome, at the end.
        **options: others of `Strategy.start`.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = make(context)
        strategy.train(grid, rounds, **options)
        finish(strategy)

    return app


def _record(vector: Vector) -> ArrayRecord:
    return ArrayRecord({NUMBERS: Array(vector)})


def _parts(strategy: Strategy, prefix: str = "") -> Iterator[tuple[str, Strategy]]:
    """A strategy and those inside it (privacy's have one), by what their attributes' names begin with."""
    yield prefix, strategy
    for name, value in vars(strategy).items():
        if isinstance(value, Strategy):
            yield from _parts(value, f"{prefix}{name}/")


def _numbers(strategy: Strategy) -> dict[str, int | float]:
    """All numbers of a strategy by their names."""
    return {
        f"{prefix}{name}": value
        for prefix, part in _parts(strategy)
        for name, value in vars(part).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _name(strategy: Strategy) -> str:
    return "/".join(type(part).__name__ for _, part in _parts(strategy))
