"""Train with one hostile client among four: `python notebooks/results/hostile.py` prints a table in some ten minutes.

The script uses one thread. For each kind of hostile client and each strategy, the table has the test accuracy after 10
rounds on the digits, and how far the hostile client moves the genome. This distance is the mean distance between the
genome of the four clients and the genomes of the three honest clients alone. It is divided by the mean distance between
two genomes of the three honest clients. Distances are between runs with different seeds. The table gives means and
standard deviations. In the row "honest", the fourth client is honest: this row shows the effect of one more client.
"""

import io
import logging
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as strategies

# This file does not import torch at its top, because Flower imports a client's app for every message.
App = Callable[[Message, Context], Message]
ARRAYS, METRICS, EXAMPLES, NUMBERS = "arrays", "metrics", "num-examples", "genome"
NODES = {"fraction_train": 1.0, "fraction_evaluate": 0.0, "min_available_nodes": 2}
STRATEGIES: dict[str, Callable[[], Any]] = {
    "FedAvgM": lambda: strategies.FedAvgM(**NODES, server_momentum=0.5),
    "FedMedian": lambda: strategies.FedMedian(**NODES),
    # Leaves out the smallest and the largest of the clients' values, of three clients and of four.
    "FedTrimmedAvg": lambda: strategies.FedTrimmedAvg(**NODES, beta=0.34),
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


# Replies of a hostile client instead of its genome [P] (`ARRAYS_OF`) and instead of its metrics (`METRICS_OF`).
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
"""Replies that the server uses, some with a smaller update or weight. The server leaves out all other replies."""


def hostile(app: App, kind: str, partition_id: int) -> App:
    """Return an app in which the client of one partition is hostile. Messages are in float32."""

    def answer(message: Message, context: Context) -> Message:
        sent = np.array(message.content.array_records[ARRAYS][NUMBERS].numpy())
        reply = app(message, context)
        if context.node_config["partition-id"] != partition_id:
            return reply
        arrays, metrics = reply.content.array_records[ARRAYS], reply.content.metric_records[METRICS]
        first = {name: context.state.setdefault(f"first {name}", reply.content[name]) for name in (ARRAYS, METRICS)}
        if kind == REPLAY:
            content = RecordDict(first)
        elif kind in METRICS_OF:
            content = RecordDict({ARRAYS: arrays, METRICS: MetricRecord(METRICS_OF[kind](dict(metrics)))})
        else:
            changed = ArrayRecord({NUMBERS: ARRAYS_OF[kind](sent, arrays[NUMBERS].numpy())})
            content = RecordDict({ARRAYS: changed, METRICS: metrics})
        return Message(content, reply_to=message)

    return answer


def _rows(rounds: int = 10, clients: int = 4, seeds: int = 6) -> Iterator[str]:
    import torch

    import gbfunc as gb
    from gbfunc.federated import GenomeStrategy, LocalGrid, client_app, partition
    from gbfunc.tasks import find_task
    from gbfunc.tasks.data import Split

    torch.set_num_threads(1)
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

    def distances(runs: list[Any], others: list[Any]) -> list[float]:
        pairs = [(a[0], b[0]) for i, a in enumerate(runs) for j, b in enumerate(others) if i != j]
        return [float(np.linalg.norm(a - b)) for a, b in pairs]

    yield "| fourth client | " + " | ".join(f"{name}: accuracy, distance" for name in STRATEGIES) + " | replies |"
    yield "|---" * (len(STRATEGIES) + 2) + "|"
    alone = {name: [run(name, clients - 1, seed) for seed in range(seeds)] for name in STRATEGIES}
    for kind in ("none", "honest", *KINDS):
        cells, counted = [], (0, 0)
        for name, three in alone.items():
            hostile_kind = kind if kind in KINDS else None
            runs, first = three, three[0] if kind == "none" else run(name, clients, 0, hostile_kind)
            # If the hostile client is left out in every round, the result equals that of the three honest clients.
            if not np.array_equal(first[0], three[0][0]):
                runs = [first, *(run(name, clients, seed, hostile_kind) for seed in range(1, seeds))]
            accuracy, distance = [100 * r[1] for r in runs], distances(runs, three)
            distance = np.divide(distance, np.mean(distances(three, three)))
            cells.append(" +- ".join(f"{f(accuracy):.1f}" for f in (np.mean, np.std)) + ", ")
            cells[-1] += " +- ".join(f"{f(distance):.2f}" for f in (np.mean, np.std))
            counted = sum(len(r.left_out) for r in first[2]), sum(len(r.bounded) for r in first[2])
        yield f"| {kind} | {' | '.join(cells)} | {counted[0]} left out, {counted[1]} bounded, of {rounds} |"


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    for row in _rows():
        print(row, flush=True)
