"""A client app for Flower: trains the genome in a message on local examples, and replies with an update."""

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

ARRAYS, CONFIG, METRICS, EXAMPLES = "arrays", "config", "metrics", "num-examples"  # Names that Flower's strategies use
IDENTITY, RATE, SENT_AS, PROXIMAL, ROUND = "id", "lr", "as", "proximal-mu", "server-round"
"""Keys of a message's config: `Wire.identity`, learning rate, dtype of the reply, weight of FedProx's term, round."""

REFUSED, _RESIDUAL = 100, "left"
"""The error code of a refused message (Flower's codes are smaller); the name of a client's stored rounding error."""


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
    """Build a `ClientApp` that trains genomes of a plan on the examples of a node.

    The server's message sets the learning rate and the dtype of the reply (see `GenomeStrategy`). If the dtype is
    float32, the reply is the trained genome, as all strategies and differential privacy of Flower expect. For a
    narrower dtype, the reply is the update (the trained genome minus the received genome), rounded to this dtype. The
    rounding error is stored in `context.state` and added to the next update (error feedback; Seide et al., 2014).

    Args:
        plan: the plan, which must be the server's plan.
        pnet: the p-net of the plan; for an adapter, the pretrained network.
        loss_fn: as in `gb.make_train_step`.
        examples: returns the examples of a node from its context (`context.node_config`); called for each message.
        steps: number of training steps per round.
        batch_size: number of examples per step; a node with fewer examples uses all its examples in every step.
        optimizer: a class of `torch.optim`; the optimizer's state is reset in every round.
        options: options of the optimizer, as in `gb.torch_optimizer`.
        evaluate: returns metrics of a network on the node's examples; None if clients do not evaluate.
        augment: random changes of the inputs of a batch (see `gbfunc.tasks.data`).
        seed: seed of the order of examples and of dropout; nodes and rounds get different random numbers.
        mods: Flower's mods around training, such as `LocalDpMod(...)`. They require `up="float32"` at the server.
    """
    if steps < 1 or batch_size < 1:
        raise ValueError(f"steps and batch_size must be at least 1, got {steps} and {batch_size}")
    rate = [0.0]
    with_rate = torch_optimizer(optimizer, lr=lambda step: rate[0], **(options or {}))
    train_step = make_train_step(plan, pnet, loss_fn, with_rate, donate=True)
    fresh = train_step.init(seed=seed)
    wire, app = Wire(plan, fresh), ClientApp()

    def train(config: Mapping[str, Any], arrays: ArrayRecord, data: Data, context: Context) -> dict[str, Any]:
        rate[0], dtype, proximal = float(config[RATE]), str(config[SENT_AS]), float(config.get(PROXIMAL, 0.0))
        check_format(dtype, "the dtype that the server asks for")
        if mods and (dtype != "float32" or CODES in arrays):
            down = "an integer dtype" if CODES in arrays else "a float dtype"
            raise ValueError("mods compare the numbers of two genomes: up must be 'float32', and down a float dtype, "
                             f"got up={dtype!r} and {down}")  # fmt: skip
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
                # FedProx's term (Li et al., 2020), applied as decoupled weight decay towards the received genome.
                pairs = [(state.gnets, state.direct), (start.gnets, start.direct)]
                pulled = tree_map(lambda x, y: x.lerp(y, rate[0] * proximal) if x.is_floating_point() else x, *pairs)
                state = state._replace(gnets=pulled[0], direct=pulled[1])
        after, loss = wire.vector(state), float(torch.stack(losses).mean())
        if not (np.isfinite(after).all() and math.isfinite(loss)):
            raise ValueError(f"the numbers after training are not finite, at a learning rate of {rate[0]:g}: lower it")
        if dtype == "float32":
            reply = wire.pack(after, dtype)
        else:
            before = context.state.array_records.get(_RESIDUAL)
            update = after - sent if before is None else after - sent + before[_RESIDUAL].numpy()
            reply = wire.pack(update, dtype)
            context.state[_RESIDUAL] = ArrayRecord({_RESIDUAL: Array(update - wire.unpack(reply))})
        return {ARRAYS: reply, METRICS: {"loss": loss}}

    def measure(config: Mapping[str, Any], arrays: ArrayRecord, data: Data, context: Context) -> dict[str, Any]:
        if evaluate is None:
            raise ValueError("this client does not evaluate: pass client_app(evaluate=), or fraction_evaluate=0")
        return {METRICS: evaluate(materialize(plan, wire.genome(wire.unpack(arrays)), pnet).eval(), data)}

    def answers(handle: Callable[..., dict[str, Any]]) -> Callable[[Message, Context], Message]:
        def answer(message: Message, context: Context) -> Message:
            try:
                config, arrays = message.content.config_records[CONFIG], message.content.array_records[ARRAYS]
                if (words := difference(wire.identity, str(config[IDENTITY]))) is not None:
                    raise ValueError(words)
                data = examples(context)
                if not len(data):
                    raise ValueError(f"node {context.node_id} must have examples, got none")
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
