"""The client: trains the genome of a message on local examples and replies with its change; an app that Flower runs."""

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

from gbfunc import Plan, make_train_step, materialize, torch_optimizer
from gbfunc.federated.wire import CODES, Wire, check_format, difference
from gbfunc.tasks.data import Augment, Data, endless_batches
from gbfunc.train.gradients.loss import LossFn
from gbfunc.trees import tree_map

ARRAYS, CONFIG, METRICS, EXAMPLES = "arrays", "config", "metrics", "num-examples"  # as Flower's strategies have them
IDENTITY, RATE, SENT_AS, PROXIMAL, ROUND = "id", "lr", "as", "proximal-mu", "server-round"
"""Entries of a message's config: `wire.identity`, learning rate, dtype of the reply, FedProx's weight, round."""

REFUSED, _LEFT = 100, "left"
"""Code of the error with which a client refuses a message (Flower's own are smaller); a node's error feedback."""


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
    evaluate: Callable[[Any, Any], dict[str, float]] | None = None,
    augment: Augment | None = None,
    seed: int = 0,
    mods: Sequence[Callable[..., Message]] = (),
) -> ClientApp:
    """Make a `ClientApp` that trains genomes of a plan on the examples of a node.

    The server's message sets the learning rate and the dtype of the reply (see `GenomeStrategy`). In float32 the reply
    is the trained genome itself, which any strategy and differential privacy of Flower's take. Otherwise the reply is
    the change, in a narrower dtype or in codes; its error stays in the node's `context.state` and is added to the next
    change (error feedback; Seide et al., 2014).

    Args:
        plan: the plan, as the genome's file has it on all sides.
        pnet: the p-net of the plan; for an adapter the pretrained one.
        loss_fn: as for `gb.make_train_step`.
        examples: gives the examples of a node from its context (`context.node_config`), for each message.
        steps: local steps of a round.
        batch_size: examples of a step, or all examples of a node that has fewer.
        optimizer: class of `torch.optim`, which starts afresh in every round.
        options: options of that class, as for `gb.torch_optimizer`.
        evaluate: gives metrics of a network on the node's examples, for rounds of evaluation.
        augment: changes the inputs of a batch.
        seed: seed of the order of the examples and of dropout, with the number of the node and of the round.
        mods: mods of Flower around training (`fixedclipping_mod`, `LocalDpMod(...)`), for messages in plain numbers.
    """
    if steps < 1 or batch_size < 1:
        raise ValueError(f"steps and batch_size must be at least 1, got {steps} and {batch_size}")
    rate = [0.0]
    made = torch_optimizer(optimizer, lr=lambda step: rate[0], **(options or {}))
    train_step = make_train_step(plan, pnet, loss_fn, made, donate=True)
    fresh = train_step.init(seed=seed)
    wire, app = Wire(plan, fresh), ClientApp()

    def train(config: Mapping[str, Any], arrays: ArrayRecord, data: Data, context: Context) -> dict[str, Any]:
        rate[0], dtype, proximal = float(config[RATE]), str(config[SENT_AS]), float(config.get(PROXIMAL, 0.0))
        check_format(dtype, "the dtype that the server asks for")
        if mods and (dtype != "float32" or CODES in arrays):
            down = "codes" if CODES in arrays else "numbers"
            raise ValueError("mods compare the numbers of two genomes: up must be 'float32', and down no codes, "
                             f"got up={dtype!r} and {down} down")  # fmt: skip
        sent = wire.unpack(arrays)
        sequence = np.random.SeedSequence([seed, context.node_id, int(config[ROUND])])
        number = int(sequence.generate_state(1, np.uint64)[0]) >> 1
        order = torch.Generator().manual_seed(number)
        state = tree_map(torch.clone, fresh)._replace(**wire.genome(sent)._asdict(), seed=torch.tensor(number))
        start, losses = wire.genome(sent) if proximal else None, []
        for batch in islice(endless_batches(data, min(batch_size, len(data)), order, augment), steps):
            state, info = train_step(state, batch)
            losses.append(info.loss)
            if start is not None:
                # The step of FedProx's term (Li et al., 2020): exactly its gradient's with SGD, otherwise decoupled.
                pairs = [(state.gnets, state.direct), (start.gnets, start.direct)]
                pulled = tree_map(lambda x, y: x.lerp(y, rate[0] * proximal) if x.is_floating_point() else x, *pairs)
                state = state._replace(gnets=pulled[0], direct=pulled[1])
        after, loss = wire.vector(state), float(torch.stack(losses).mean())
        if not (np.isfinite(after).all() and math.isfinite(loss)):
            raise ValueError(f"training gave numbers that are not finite, at a learning rate of {rate[0]:g}")
        if dtype == "float32":
            reply = wire.pack(after, dtype)
        else:
            before = context.state.array_records.get(_LEFT)
            change = after - sent if before is None else after - sent + before[_LEFT].numpy()
            reply = wire.pack(change, dtype)
            context.state[_LEFT] = ArrayRecord({_LEFT: Array(change - wire.unpack(reply))})
        return {ARRAYS: reply, METRICS: {"loss": loss}}

    def measure(config: Mapping[str, Any], arrays: ArrayRecord, data: Data, context: Context) -> dict[str, Any]:
        if evaluate is None:
            raise ValueError("this client does not evaluate: give client_app(evaluate=), or fraction_evaluate=0")
        net = materialize(plan, wire.genome(wire.unpack(arrays)), pnet).eval()
        return {METRICS: evaluate(net, data)}

    def answers(handle: Callable[..., dict[str, Any]]) -> Callable[[Message, Context], Message]:
        def answer(message: Message, context: Context) -> Message:
            try:
                config, arrays = message.content.config_records[CONFIG], message.content.array_records[ARRAYS]
                if (words := difference(wire.identity, str(config[IDENTITY]))) is not None:
                    raise ValueError(words)
                data = examples(context)
                if not len(data):
                    raise ValueError(f"node {context.node_id} has no examples")
                content = handle(config, arrays, data, context)
                counted = {EXAMPLES: len(data), ROUND: int(config[ROUND])}
                content[METRICS] = MetricRecord(counted | dict(content[METRICS]))
                return Message(RecordDict(content), reply_to=message)
            except (ValueError, KeyError, TypeError) as error:
                words = f"the message has no {error}" if isinstance(error, KeyError) else str(error)
                return Message(Error(REFUSED, words), reply_to=message)

        return answer

    app.train(mods=[*mods])(answers(train))
    app.evaluate()(answers(measure))
    return app
