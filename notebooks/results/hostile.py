"""One hostile client among four: `python notebooks/results/hostile.py`, a table of some minutes on one thread.

For each kind of hostile client and each strategy: the test accuracy after 10 rounds on the digits, and the distance of
the genome from that of the three honest clients alone, divided by the largest distance between six honest runs.
"""

import copy
import io
import logging
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as strategies

import gbfunc as gb
from gbfunc.federated import GenomeStrategy, LocalGrid, client_app, partition
from gbfunc.federated.client import ARRAYS, EXAMPLES, METRICS
from gbfunc.federated.wire import NUMBERS
from gbfunc.tasks import find_task
from gbfunc.tasks.data import Split

App = Callable[[Message, Context], Message]
NODES = {"fraction_train": 1.0, "fraction_evaluate": 0.0, "min_available_nodes": 2}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "FedAvgM": lambda: strategies.FedAvgM(**NODES, server_momentum=0.5),
    "FedMedian": lambda: strategies.FedMedian(**NODES),
    "FedTrimmedAvg": lambda: strategies.FedTrimmedAvg(**NODES, beta=0.25),
}


def _archive(**members: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, **members)
    return file.getvalue()


def _zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(10_000_000))
    return file.getvalue()


def _declared(count: int) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (count,)})
    return file.getvalue() + bytes(64)


def _bytes(data: bytes) -> Array:
    return Array("float32", (1,), "numpy.ndarray", data)


def _without_loss(metrics: dict[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in metrics.items() if k != "loss"}


# What a hostile client replies instead of its genome [P], and instead of its metrics.
ARRAYS_OF: dict[str, Callable[[np.ndarray, np.ndarray], Array]] = {
    "an empty array": lambda sent, x: Array(x[:0]),
    "an npz": lambda sent, x: _bytes(_archive(genome=x)),
    "a zip of 10 MB of zeros": lambda sent, x: _bytes(_zip()),
    "an npy that declares 10^12 numbers": lambda sent, x: _bytes(_declared(10**12)),
    "complex numbers": lambda sent, x: Array(x.astype(np.complex64)),
    "NaN in the genome": lambda sent, x: Array(np.where(np.arange(len(x)) == 3, np.float32(np.nan), x)),
    "1e30 in the genome": lambda sent, x: Array(np.where(np.arange(len(x)) == 3, np.float32(1e30), x)),
    "4 times the change, reversed": lambda sent, x: Array(sent - 4 * (x - sent)),
}
METRICS_OF: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a metric too few": _without_loss,
    "a metric too many": lambda metrics: {**metrics, "bonus": 1.0},
    "a list as a metric": lambda metrics: {**metrics, "loss": [1.0, 2.0]},
    "a loss of NaN": lambda metrics: {**metrics, "loss": float("nan")},
    "10^18 examples": lambda metrics: {**metrics, EXAMPLES: 10**18},
}
REPLAY = "the reply of the first round, again"
KINDS = (*ARRAYS_OF, *METRICS_OF, REPLAY)
REDUCED = ("1e30 in the genome", "10^18 examples", "4 times the change, reversed")
"""Replies that are used, some with a smaller change or weight; others are left out."""


def hostile(app: App, kind: str, partition_id: int) -> App:
    """Make an app whose client of one partition is hostile and otherwise as `app`'s, for messages in float32."""
    first: list[RecordDict] = []

    def answer(message: Message, context: Context) -> Message:
        sent = np.array(message.content.array_records[ARRAYS][NUMBERS].numpy())
        reply = app(message, context)
        if context.node_config["partition-id"] != partition_id:
            return reply
        arrays, metrics = reply.content.array_records[ARRAYS], dict(reply.content.metric_records[METRICS])
        first.append(copy.deepcopy(reply.content))
        if kind == REPLAY:
            content = copy.deepcopy(first[0])
        elif kind in METRICS_OF:
            content = RecordDict({ARRAYS: arrays, METRICS: MetricRecord(METRICS_OF[kind](metrics))})
        else:
            changed = ArrayRecord({NUMBERS: ARRAYS_OF[kind](sent, arrays[NUMBERS].numpy())})
            content = RecordDict({ARRAYS: changed, METRICS: MetricRecord(metrics)})
        return Message(content, reply_to=message)

    return answer


def _rows(rounds: int = 10, clients: int = 4) -> Iterator[str]:
    task = find_task("digits", None, {})
    task = task.with_pnet(task.pnet.scaled(0.1))
    pnet = task.build(0)
    plan = task.plan(pnet, genome_params=600)
    genome = gb.init_genome(plan, pnet, 0)
    parts = [torch.from_numpy(part) for part in partition(task.train.y, clients, alpha=0.5)]

    def examples(context: Context) -> Split:
        part = parts[context.node_config["partition-id"]]
        return Split(task.train.x[part], task.train.y[part])

    def run(strategy: str, nodes: int, seed: int = 0, kind: str | None = None) -> tuple[np.ndarray, float, Any]:
        app = client_app(plan, pnet, task.loss, examples, steps=30, seed=seed)
        server = GenomeStrategy(
            STRATEGIES[strategy](),
            plan,
            genome,
            lr=lambda round_: 0.015 * (1 + np.cos(np.pi * round_ / rounds)),
            up="float32",
            down="float32",
            seed=0,
        )
        made = app if kind is None else hostile(app, kind, clients - 1)
        with LocalGrid(made, [{"partition-id": i} for i in range(nodes)]) as grid:
            server.train(grid, rounds)
        accuracy = task.evaluate(gb.materialize(plan, server.genome, pnet), task.test)["accuracy"]
        return server.wire.vector(server.genome), accuracy, server.rounds

    yield "| hostile client | " + " | ".join(f"{name}: accuracy, distance" for name in STRATEGIES) + " | replies |"
    yield "|---" * (len(STRATEGIES) + 2) + "|"
    honest = {name: [run(name, clients - 1, seed) for seed in range(6)] for name in STRATEGIES}
    spread = {name: max(np.linalg.norm(a[0] - b[0]) for a in runs for b in runs) for name, runs in honest.items()}
    cells = [" to ".join(f"{100 * f(r[1] for r in honest[name]):.1f}" for f in (min, max)) for name in STRATEGIES]
    yield f"| none, three clients (six seeds) | {' | '.join(f'{cell}, 1.00' for cell in cells)} | |"
    for kind in KINDS:
        cells, counted = [], (0, 0)
        for name in STRATEGIES:
            vector, accuracy, done = run(name, clients, kind=kind)
            distance = np.linalg.norm(vector - honest[name][0][0]) / spread[name]
            cells.append(f"{100 * accuracy:.1f}, {distance:.2f}")
            counted = sum(len(r.left_out) for r in done), sum(len(r.bounded) for r in done)
        yield f"| {kind} | {' | '.join(cells)} | {counted[0]} left out, {counted[1]} bounded, of {rounds} |"


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for row in _rows():
        print(row, flush=True)
