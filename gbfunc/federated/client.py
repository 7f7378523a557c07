"""The client: a genome comes in, trains on local examples, and its change goes back; an app that Flower runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict  # pyright: ignore[reportMissingImports]
from flwr.clientapp import ClientApp  # pyright: ignore[reportMissingImports]
from torch import nn

from gbfunc import Plan, TrainState, init_genome, make_train_step, materialize, torch_optimizer
from gbfunc.federated.wire import CODES, Vector, Wire, check_format, difference
from gbfunc.tasks.base import Evaluate
from gbfunc.tasks.data import Augment, Data, endless_batches
from gbfunc.train import LossFn
from gbfunc.trees import tree_map

ARRAYS, CONFIG, METRICS = "arrays", "config", "metrics"
"""Names of the records of a message, those of Flower's strategies."""

IDENTITY, RATE, SENT_AS, PROXIMAL = "id", "lr", "as", "proximal-mu"
"""What a message's config says: `wire.identity`, learning rate, dtype of the reply, weight of FedProx's term."""

REFUSED = 100
"""Code of the error with which a client refuses a message; Flower's own are smaller."""

_LEFT = "left"


def client_app(
    plan: Plan,
    pnet: nn.Module,
    loss_fn: LossFn,
    examples: Callable[[Context], Data],
    *,
    steps: int = 20,
    batch_size: int = 32,
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam,
    options: Mapping[str, Any] | None = None,
    evaluate: Evaluate | None = None,
    augment: Augment | None = None,
    seed: int = 0,
    mods: Sequence[Callable[..., Message]] = (),
) -> ClientApp:
    """A `ClientApp` that trains genomes of a plan on what a node holds.

    The server's message says the learning rate and the dtype of the reply (see `GenomeStrategy`). With float32 the
    reply is the trained genome itself, which any strategy and differential privacy of Flower's take; otherwise it is
    the change, in a narrower dtype or in codes, whose error stays in the node's `context.state` and is added the next
    time (error feedback; Seide et al., 2014).

    Args:
        plan: the plan, as the genome's file has it on all sides.
        pnet: its p-net; of an adapter the pretrained one.
        loss_fn: as of `gb.make_train_step`.
        examples: the examples of a node, from its context (`context.node_config`); it is asked for each message.
        steps: local steps of a round.
        batch_size: examples of a step, or all of a node that has fewer.
        optimizer: class of `torch.optim`, which starts afresh in every round.
        options: of that class, as `gb.torch_optimizer` takes them.
        evaluate: metrics of a network on the node's examples, for rounds of evaluation.
        augment: changes the inputs of a batch.
        seed: of the order of the examples and of dropout, with the number of the node and of the round.
        mods: of Flower's (`flwr.clientapp.mod`), around training: `fixedclipping_mod`, `LocalDpMod(...)`. They compare
            the genome that comes with the one that goes, so messages in which these are not plain numbers are refused.

    Raises:
        ValueError: if plan and p-net do not fit together, or for options out of range.
    """
    if steps < 1 or batch_size < 1:
        raise ValueError(f"steps and batch_size must be at least 1, got {steps} and {batch_size}")
    rate = [0.0]
    made = torch_optimizer(optimizer, lr=lambda step: rate[0], **(options or {}))
    train_step = make_train_step(plan, pnet, loss_fn, made, donate=True)
    fresh = train_step.init(seed=seed)
    wire = Wire(plan, init_genome(plan, pnet))
    app = ClientApp()

    def trained(sent: Vector, context: Context, round_: int, proximal: float) -> tuple[Vector, int, float]:
        """The genome after its local steps, the examples that it saw come from, and the mean loss."""
        data, genome = examples(context), wire.genome(sent)
        if not len(data):
            raise ValueError(f"node {context.node_id} has no examples")
        number = np.random.SeedSequence([seed, context.node_id, round_]).generate_state(1, np.uint64)[0]
        order = torch.Generator().manual_seed(int(number) >> 1)
        state = tree_map(torch.clone, fresh)._replace(**genome._asdict(), seed=torch.tensor(int(number) >> 1))
        start, losses = state if not proximal else tree_map(torch.clone, state), []
        batches = endless_batches(data, min(batch_size, len(data)), order, augment)
        for batch in islice(batches, steps):
            state, info = train_step(state, batch)
            losses.append(info.loss)
            if proximal:
                state = _nearer(state, start, rate[0] * proximal)
        return wire.vector(state), len(data), float(torch.stack(losses).mean())

    @app.train(mods=[*mods])
    def train(message: Message, context: Context) -> Message:
        try:
            config, sent = _read(wire, message)
            rate[0], dtype = float(config[RATE]), str(config[SENT_AS])
            check_format(dtype, "the dtype that the server asks for")
            coded = CODES in message.content.array_records[ARRAYS]
            if mods and (dtype != "float32" or coded):
                down = "codes" if coded else "numbers"
                raise ValueError("mods compare the numbers of two genomes: up must be 'float32', and down no codes, "
                                 f"got up={dtype!r} and {down} down")  # fmt: skip
            after, count, loss = trained(sent, context, int(config["server-round"]), float(config.get(PROXIMAL, 0.0)))
            if not (np.isfinite(after).all() and math.isfinite(loss)):
                raise ValueError(f"training gave numbers that are not finite, at a learning rate of {rate[0]:g}")
            reply = wire.pack(after, dtype) if dtype == "float32" else _coded(wire, after - sent, dtype, context)
        except (ValueError, KeyError, TypeError) as error:
            return Message(Error(REFUSED, _words(error)), reply_to=message)
        metrics = MetricRecord({"num-examples": count, "loss": loss})
        return Message(RecordDict({ARRAYS: reply, METRICS: metrics}), reply_to=message)

    @app.evaluate()
    def measure(message: Message, context: Context) -> Message:
        try:
            if evaluate is None:
                raise ValueError("this client does not evaluate: give client_app(evaluate=), or fraction_evaluate=0")
            _, sent = _read(wire, message)
            data, net = examples(context), materialize(plan, wire.genome(sent), pnet).eval()
            metrics = MetricRecord({"num-examples": len(data), **evaluate(net, data)})
        except (ValueError, KeyError, TypeError) as error:
            return Message(Error(REFUSED, _words(error)), reply_to=message)
        return Message(RecordDict({METRICS: metrics}), reply_to=message)

    return app


def _words(error: Exception) -> str:
    return f"the message has no {error}" if isinstance(error, KeyError) else str(error)


def _read(wire: Wire, message: Message) -> tuple[Mapping[str, Any], Vector]:
    """The config of a message and the genome in it; `ValueError` for one that is not of this plan."""
    config = message.content.config_records[CONFIG]
    if (words := difference(wire.identity, str(config[IDENTITY]))) is not None:
        raise ValueError(words)
    return config, wire.unpack(message.content.array_records[ARRAYS])


def _nearer(state: TrainState, start: TrainState, part: float) -> TrainState:
    """A state after the step of FedProx's term (Li et al., 2020): with SGD exactly its gradient's, else decoupled."""
    gnets, direct = tree_map(
        lambda x, y: x.lerp(y, part) if x.is_floating_point() else x,
        (state.gnets, state.direct),
        (start.gnets, start.direct),
    )
    return state._replace(gnets=gnets, direct=direct)


def _coded(wire: Wire, change: Vector, dtype: str, context: Context) -> ArrayRecord:
    """A change as it is sent, with what is left of those before; what is left now stays in the context."""
    if _LEFT in context.state.array_records:
        change = change + context.state.array_records[_LEFT][_LEFT].numpy()
    packed = wire.pack(change, dtype)
    context.state[_LEFT] = ArrayRecord({_LEFT: Array(change - wire.rounded(change, dtype))})
    return packed
