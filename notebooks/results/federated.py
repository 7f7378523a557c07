"""Average genomes in several ways: `python notebooks/results/federated.py WAY --data-dir DATA/mnist` prints a JSON row.

The training is that of federated.md on MNIST: p-net 784-200-200-10, genome of 1,994 numbers, 100 clients of which 10
train in each round. The script uses one thread.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedAvgM

import gbfunc as gb
from gbfunc import federated as fed
from gbfunc.federated.client import PROXIMAL
from gbfunc.federated.wire import NUMBERS, Wire
from gbfunc.tasks import accuracy, find_task
from gbfunc.tasks.base import SCHEDULES
from gbfunc.tasks.data import Split
from gbfunc.tasks.pnets import find_pnet

CLIENTS, SAMPLE, STEPS, ROWS = 100, 10, 20, 32


class Fitted(FedAvg):
    """A strategy that averages the weights of the clients' networks, and fits a genome to the averaged weights.

    The fit begins with the average of the clients' genomes. Genomes that differ only by a symmetry of the g-nets
    (signs, phases, the order of features) generate equal weights, so symmetries do not change the average of weights.
    The gain over the average of genomes is therefore what could be gained by aligning the features of the genomes.
    """

    wire: Wire
    fit: dict[str, Any]
    left: list[float]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the genome fitted to the average of the weights. Append the relative error of the fit to `left`."""
        replies = list(replies)
        genomes = [self.wire.genome(self.wire.unpack(r.content.array_records["arrays"])) for r in replies]
        plan = self.wire.plan
        weights = [gb.generate(plan, genome) for genome in genomes]
        target = {name: torch.stack([w[name] for w in weights]).mean(0) for name in weights[0]}
        arrays, metrics = super().aggregate_train(server_round, replies)
        assert arrays is not None
        start = self.wire.genome(self.wire.unpack(arrays))
        genome, errors = gb.fit_genome(plan, target, start=start, **self.fit)
        self.left.append(max(errors.values()))
        return self.wire.pack(self.wire.vector(genome), "float32"), metrics


class Pulled(FedAvgM):
    """FedAvgM with momentum at the server, and the proximal term of FedProx at the clients (Li et al., 2020)."""

    proximal = 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Add the weight of the proximal term to the messages for the clients."""
        config[PROXIMAL] = self.proximal
        return super().configure_train(server_round, arrays, config, grid)


class FittedWithMomentum(Pulled, Fitted):
    """`Fitted`, with momentum at the server."""


class Remembering(Pulled):
    """FedVARP (Jhunjhunwala et al., 2022): variance reduction at the server, for which no additional bytes are sent.

    The server keeps the last update of every client. In a round, the server subtracts from each reply the client's last
    update, scaled as the learning rate has fallen since, and adds the mean of the last updates of all clients, weighted
    by their numbers of examples.
    """

    rate: Callable[[int], float]
    examples: int
    memory: dict[int, tuple[np.ndarray, int, float]]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Correct each reply by the stored updates, store the new updates, and average the corrected replies."""
        replies, rate = list(replies), self.rate(server_round - 1)
        assert self.current_arrays is not None
        (sent,) = self.current_arrays.to_numpy_ndarrays()
        last = {node: change * (rate / then) for node, (change, _, then) in self.memory.items()}
        mean = sum((last[node] * (count / self.examples) for node, (_, count, _) in self.memory.items()), 0 * sent)
        for reply in replies:
            node = reply.metadata.src_node_id
            (after,) = reply.content.array_records["arrays"].to_numpy_ndarrays()
            corrected = after - last.get(node, 0 * sent) + mean
            count = int(reply.content.metric_records["metrics"]["num-examples"])
            self.memory[node] = after - sent, count, rate
            reply.content.array_records["arrays"] = ArrayRecord({NUMBERS: Array(corrected.astype(np.float32))})
        return super().aggregate_train(server_round, replies)


WAYS = {"genomes": Pulled, "weights": FittedWithMomentum, "memory": Remembering}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train and measure one way of averaging."""
    task = find_task("mnist", options.data_dir, {})
    task = task.with_pnet(find_pnet("mlp", task.interface, {**task.pnet.config, "hidden": (200, 200)}))
    pnet = task.build(options.seed)
    plan = task.plan(pnet, genome_params=1998)
    recipe, train = task.recipe(plan.genome_params), task.train
    parts = [torch.from_numpy(p) for p in fed.partition(train.y, CLIENTS, options.alpha)]
    schedule = SCHEDULES["cosine"](recipe, options.lr, options.rounds)
    state = {"code": options.lr}

    def rate(round_: int) -> float:
        # After the part `freeze` of the rounds, the code weights are frozen, at the clients and at the server.
        state["code"] = float(schedule(round_)) * (round_ < options.freeze * options.rounds)
        return float(schedule(round_))

    app = fed.client_app(
        plan,
        pnet,
        task.loss,
        lambda context: Split(*(x[parts[context.node_config["partition-id"]]] for x in (train.x, train.y))),
        steps=STEPS,
        batch_size=ROWS,
        optimizer=torch.optim.Adam,
        options=recipe.optimizer_options | {"code": {"lr": lambda step: state["code"]}},
        augment=recipe.augment,
        seed=options.seed,
    )
    sampling = {"fraction_train": 1e-9, "min_train_nodes": SAMPLE, "min_available_nodes": CLIENTS}
    sampling |= {"fraction_evaluate": 0.0, "server_momentum": options.momentum}
    inner, left = WAYS[options.way](**sampling), list[float]()
    inner.proximal = options.proximal
    if isinstance(inner, Fitted):
        inner.wire, inner.left = Wire(plan, gb.init_genome(plan, pnet)), left
        inner.fit = {"steps": options.fit_steps, "lr": options.fit_lr}
    if isinstance(inner, Remembering):
        inner.rate, inner.examples, inner.memory = rate, len(train), {}
    genome = gb.init_genome(plan, pnet, options.seed)
    strategy = fed.GenomeStrategy(inner, plan, genome, lr=rate, down=options.down, up=options.up, seed=options.seed)
    start, found = time.process_time(), {}
    with fed.LocalGrid(app, [{"partition-id": i} for i in range(CLIENTS)]) as grid:
        for done in range(25, options.rounds + 1, 25):
            strategy.train(grid, done)
            genome = strategy.genome
            found[done] = round(100 * accuracy(gb.materialize(plan, genome, pnet).eval(), task.val), 2)
    return {
        **{k: v for k, v in vars(options).items() if k != "data_dir"},
        "numbers": plan.genome_params,
        "val": found,
        "test": round(100 * accuracy(gb.materialize(plan, genome, pnet).eval(), task.test), 2),
        "fit_left": [round(left[i], 4) for i in (0, len(left) // 2, -1)] if left else [],
        "bytes_up": grid.traffic.up,
        "cpu_s": round(time.process_time() - start),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=(*WAYS,), help="what the server averages; memory: genomes, by FedVARP")
    parser.add_argument("--freeze", type=float, default=1.0, help="part of the rounds before code weights freeze")
    parser.add_argument("--fit-steps", type=int, default=30)
    parser.add_argument("--fit-lr", type=float, default=0.003)
    parser.add_argument("--momentum", type=float, default=0.5)
    parser.add_argument("--proximal", type=float, default=0.0, help="weight of FedProx's proximal term")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--up", default="int4")
    parser.add_argument("--down", default="int8")
    parser.add_argument("--alpha", type=float, default=float("inf"))
    parser.add_argument("--rounds", type=int, default=125)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", default=f"{os.environ.get('GBFUNC_DATA', '../shared/data')}/mnist")
    torch.set_num_threads(1)
    print(json.dumps(run(parser.parse_args())), flush=True)
