"""The events of one rank in one training step: its layers' forward, backward and update, and what travels between.

Entries are named `activation[layer, microbatch]` (the input of a layer), `dactivation[...]` (its gradient),
`weight[layer]`, `dweight[layer]` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from gbfunc.parallel.pipeline_order import Action, PipelineOrder, pipeline_order
from gbfunc.parallel.schedule import Event, Kind

WeightSource = Literal["stored", "generated", "remat"]
PerLayer = float | Sequence[float]


class ScheduleCosts(NamedTuple):
    """Durations and sizes, in any units; the defaults are those of the puzzles, and what these lack is gbfunc's.

    What a layer takes is one number for all layers, or one for each. A duration or an activation is that of one
    microbatch.

    Attributes:
        forward: of a layer.
        backward: of a layer.
        backward_input: of a layer, the half of backward that gives the gradient of its input.
        backward_weight: of a layer, the half that gives the gradient of its weight.
        generate: a layer's weight from the genome, whatever the microbatch.
        generate_backward: the gradient of the genome from that of a layer's weight.
        loss: with its gradient.
        update: of a layer's weight; of the whole genome where weights are generated.
        all_reduce: of a layer's gradient; of the whole genome's where weights are generated.
        all_gather: of a layer's weight.
        reduce_scatter: of a layer's gradient.
        send: of a microbatch's activation or its gradient, during which the sender does nothing else.
        receive: likewise, of the receiver.
        transit: time between the two, in which both may do something else.
        activation: size of the input of a layer, and of its gradient; one more than layers, the last is the output.
        weight: size of a layer's weight, and of its gradient.
        optimizer: size of the state of a layer's optimizer.
        genome: size of the genome, and of its gradient.
        genome_optimizer: size of the state of its optimizer.
    """

    forward: PerLayer = 1.0
    backward: PerLayer = 1.0
    backward_input: PerLayer = 0.5
    backward_weight: PerLayer = 0.5
    generate: PerLayer = 0.1
    generate_backward: PerLayer = 0.2
    loss: float = 0.0
    update: PerLayer = 0.5
    all_reduce: PerLayer = 0.3
    all_gather: PerLayer = 0.3
    reduce_scatter: PerLayer = 0.3
    send: float = 0.2
    receive: float = 0.2
    transit: float = 0.0
    activation: PerLayer = 256 * 512
    weight: PerLayer = 512 * 512
    optimizer: PerLayer = 512 * 512
    genome: float = 512 * 512 / 32
    genome_optimizer: float = 512 * 512 / 32


class Recipe(NamedTuple):
    """What tells the schedules apart.

    Attributes:
        order: of a pipeline; `"once"`: forward and backward of all microbatches together; `"each"`: one by one.
        data_parallel: whether the ranks have a microbatch each, and are not just the stages of a pipeline.
        gathers: where weights are sharded, which layers a rank helps to gather when they are needed: those of its
            stage, or all, as each is sharded over the ranks of all stages.
        scatters: whether gradients are reduced and scattered at once, not all-reduced in the end.
        sums: whether a layer has one gradient, to which each microbatch adds, and not one for each microbatch.
        keeps_ends: whether the output of the last layer of a stage, and the gradient of the input of its first, stay
            stored when they are no longer needed.
    """

    order: PipelineOrder | Literal["once", "each"]
    data_parallel: bool = False
    gathers: Literal["stage", "all"] | None = None
    scatters: bool = False
    sums: bool = True
    keeps_ends: bool = False


class Job(NamedTuple):
    """What is asked for, with its sizes worked out."""

    recipe: Recipe
    weights: WeightSource
    costs: ScheduleCosts
    layers: int
    microbatches: int
    stages: tuple[int, ...]  # the rank of each, in a pipeline
    ranks: int  # of a pipeline
    replicas: int
    virtual: int


class Program:
    """The events of one rank, and what it stores from the beginning."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.costs, self.recipe = job, job.costs, job.recipe
        self.rank, self.place = rank, rank % job.ranks
        self.generated = job.weights != "stored"
        self.sharded = self.recipe.gathers is not None and not self.generated
        self.together = job.microbatches if self.recipe.order == "once" else 1
        self.layers = [
            layer for stage, place in enumerate(job.stages) if place == self.place for layer in self.of(stage)
        ]
        world = tuple(range(job.ranks * job.replicas))
        self.world = world
        # Those that have the same layers, or, where every rank stores a part of every layer, all.
        self.group = world if self.recipe.gathers == "all" else world[self.place :: job.ranks]
        self.made: set[int] = set()
        # Names of each layer's gradients.
        self.gradients: dict[int, dict[str, None]] = {layer: {} for layer in self.layers}
        self.events: list[Event] = []
        self.stored = self.initial()

    def of(self, stage: int) -> range:
        """Layers of a stage."""
        size = self.job.layers // len(self.job.stages)
        return range(stage * size, (stage + 1) * size)

    def initial(self) -> dict[str, float]:
        """What the rank stores before its first event."""
        costs = self.costs
        if self.generated:
            return {"genome": costs.genome, "genome optimizer": costs.genome_optimizer}
        layers = range(self.job.layers) if self.recipe.gathers == "all" else self.layers
        kinds = {"shard" if self.sharded else "weight": costs.weight, "optimizer": costs.optimizer}
        parts = len(self.group) if self.sharded else 1
        return {f"{kind}[{layer}]": _at(size, layer) / parts for layer in layers for kind, size in kinds.items()}

    def run(self) -> None:
        """One training step."""
        if self.sharded and self.recipe.gathers == "all":
            self.run_gathering_all()
        else:
            for action in self.actions():
                self.act(action)
        self.finish()

    def actions(self) -> tuple[Action, ...]:
        """What the rank does of its stages and microbatches."""
        if self.recipe.order == "once":
            return (Action("F", self.place, 0), Action("B", self.place, 0))
        order = "1f1b" if self.recipe.order == "each" else self.recipe.order
        return pipeline_order(order, self.place, self.job.ranks, self.job.microbatches, self.job.virtual)

    def act(self, action: Action) -> None:
        """Forward, backward or a half of backward through a stage, with the messages before and after it."""
        op, stage, i = action
        layers = self.of(stage)
        if op == "F":
            self.receive_input(stage, i)
            for layer in layers:
                self.acquire(layer, i)
                self.forward(layer, i)
            self.send_output(stage, i)
            return
        if op != "W":
            self.receive_gradient(stage, i)
        for layer in reversed(layers):
            if op != "W":
                self.acquire(layer, i)
            self.backward(layer, i, op)
        if op != "W":
            self.send_gradient(stage, i)

    def run_gathering_all(self) -> None:
        """Forward and backward where every layer's weight is sharded over the ranks of all stages, one layer each.

        All of them take part in gathering and reducing every layer, between their messages.
        """
        for layer in range(self.job.layers):
            mine = layer in self.layers
            if mine:
                self.receive_input(layer, 0)
            self.acquire(layer, 0, keep=mine)
            if mine:
                self.forward(layer, 0)
                self.send_output(layer, 0)
        for layer in reversed(range(self.job.layers)):
            mine = layer in self.layers
            if mine:
                self.receive_gradient(layer, 0)
            self.acquire(layer, 0, keep=mine)
            if mine:
                self.backward(layer, 0, "B")
                self.send_gradient(layer, 0)
            else:
                self.reduce_scatter(layer, 0)

    def emit(self, kind: Kind, duration: float, layer: int | None = None, i: int | None = None, **rest: Any) -> None:
        """Add an event."""
        self.events.append(Event(kind, duration, layer, i, **rest))

    def activation(self, layer: int, i: int) -> dict[str, float]:
        """A layer's input."""
        return {f"activation[{layer}, {i}]": _at(self.costs.activation, layer) * self.together}

    def dactivation(self, layer: int, i: int) -> dict[str, float]:
        """The gradient of a layer's input."""
        return {f"dactivation[{layer}, {i}]": _at(self.costs.activation, layer) * self.together}

    def weight(self, layer: int) -> dict[str, float]:
        """A layer's whole weight."""
        return {f"weight[{layer}]": _at(self.costs.weight, layer)}

    def freed(self, *entries: Mapping[str, float]) -> tuple[str, ...]:
        """Names of entries."""
        return tuple(name for entry in entries for name in entry)

    def passing(self, layer: int) -> dict[str, float]:
        """The whole weight where it is there only while the layer is worked on."""
        return self.weight(layer) if self.sharded or self.job.weights == "remat" else {}

    def acquire(self, layer: int, i: int, keep: bool = True) -> None:
        """Have a layer's whole weight ready; or just help others to have it."""
        weight = self.weight(layer)
        if self.sharded:
            frees = () if keep else self.freed(weight)
            rest = {"stores": weight, "frees": frees, "ranks": self.group, "tag": f"weight[{layer}]"}
            self.emit("all_gather", _at(self.costs.all_gather, layer), layer, **rest)
        elif self.job.weights == "remat" or (self.generated and layer not in self.made):
            self.made.add(layer)
            self.emit("generate", _at(self.costs.generate, layer), layer, i, stores=weight)

    def forward(self, layer: int, i: int) -> None:
        """Forward of a layer."""
        stores, frees = self.activation(layer + 1, i), self.freed(self.passing(layer))
        loads = self.activation(0, i) if layer == 0 else {}
        duration = _at(self.costs.forward, layer) * self.together
        self.emit("forward", duration, layer, i, loads=loads, stores=stores, frees=frees)

    def backward(self, layer: int, i: int, op: Literal["B", "I", "W"]) -> None:
        """Backward of a layer, or a half of it, and what is done with the gradient of its weight."""
        costs, stores, frees = self.costs, {}, ()
        if op in "BI":
            stores |= self.dactivation(layer, i) if layer or self.recipe.keeps_ends else {}
            frees += self.freed(self.passing(layer))
        if op in "BW":
            gradient = f"dweight[{layer}]" if self.recipe.sums else f"dweight[{layer}, {i}]"
            self.gradients[layer][gradient] = None
            stores[gradient] = _at(costs.weight, layer)
            frees += self.freed(self.activation(layer, i), self.dactivation(layer + 1, i))
        kinds: dict[str, tuple[Kind, PerLayer]] = {
            "B": ("backward", costs.backward),
            "I": ("backward_input", costs.backward_input),
            "W": ("backward_weight", costs.backward_weight),
        }
        kind, cost = kinds[op]
        scatters = self.sharded and self.recipe.scatters
        # The pipelined one frees what it can before its gradient is reduced.
        late = self.freed(self.passing(layer)) if self.recipe.gathers == "all" else frees
        early = tuple(name for name in frees if not scatters or name not in late)
        self.emit(kind, _at(cost, layer) * self.together, layer, i, stores=stores, frees=early)
        if scatters:
            self.reduce_scatter(layer, i, late)
        elif self.job.weights == "remat" and op != "I":
            self.generate_backward(layer, i)

    def reduce_scatter(self, layer: int, i: int, frees: tuple[str, ...] = ()) -> None:
        """Sum a layer's gradient over the ranks, each of which keeps its part."""
        part = {f"dweight[{layer}]": _at(self.costs.weight, layer) / len(self.group)}
        rest = {"stores": part, "frees": frees, "ranks": self.group, "tag": f"dweight[{layer}]"}
        self.gradients.setdefault(layer, {})[f"dweight[{layer}]"] = None
        self.emit("reduce_scatter", _at(self.costs.reduce_scatter, layer), layer, i, **rest)

    def generate_backward(self, layer: int, i: int | None = None, also: tuple[str, ...] = ()) -> None:
        """Add to the genome's gradient what a layer's gradient gives."""
        frees = (*self.gradients[layer], *also)
        self.gradients[layer] = {}
        stores = {"dgenome": self.costs.genome}
        self.emit("generate_backward", _at(self.costs.generate_backward, layer), layer, i, stores=stores, frees=frees)

    def neighbour(self, stage: int) -> int | None:
        """The rank of another stage in this replica; none where it is this rank, or there is no such stage."""
        if not 0 <= stage < len(self.job.stages) or self.job.stages[stage] == self.place:
            return None
        return self.rank - self.place + self.job.stages[stage]

    def receive_input(self, stage: int, i: int) -> None:
        """Receive the input of a stage."""
        self.receive(self.neighbour(stage - 1), self.activation(self.of(stage)[0], i), i)

    def send_output(self, stage: int, i: int) -> None:
        """Send the output of a stage."""
        self.send(self.neighbour(stage + 1), self.activation(self.of(stage)[-1] + 1, i), i)

    def receive_gradient(self, stage: int, i: int) -> None:
        """Receive the gradient of a stage's output, or, at the end, have it from the loss."""
        layer = self.of(stage)[-1] + 1
        gradient = self.dactivation(layer, i)
        if layer < self.job.layers:
            self.receive(self.neighbour(stage + 1), gradient, i)
            return
        frees = () if self.recipe.keeps_ends else self.freed(self.activation(layer, i))
        self.emit("loss", self.costs.loss * self.together, None, i, stores=gradient, frees=frees)

    def send_gradient(self, stage: int, i: int) -> None:
        """Send the gradient of a stage's input."""
        self.send(self.neighbour(stage - 1), self.dactivation(self.of(stage)[0], i), i)

    def receive(self, peer: int | None, entry: Mapping[str, float], i: int) -> None:
        """Receive an entry, unless it is here."""
        if peer is not None:
            self.emit("receive", self.costs.receive, None, i, stores=entry, peer=peer, tag=next(iter(entry)))

    def send(self, peer: int | None, entry: Mapping[str, float], i: int) -> None:
        """Send an entry, unless it stays here."""
        if peer is not None:
            frees = () if self.recipe.keeps_ends else self.freed(entry)
            rest = {"frees": frees, "peer": peer, "tag": next(iter(entry)), "transit": self.costs.transit}
            self.emit("send", self.costs.send, None, i, **rest)

    def finish(self) -> None:
        """Reduce gradients over the ranks, and update."""
        if self.generated:
            self.finish_genome()
            return
        for layer, gradients in sorted(self.gradients.items()):
            if len(self.group) > 1 and not self.recipe.scatters:
                rest = {"ranks": self.group, "tag": f"dweight[{layer}]"}
                self.emit("all_reduce", _at(self.costs.all_reduce, layer), layer, **rest)
            self.emit("update", _at(self.costs.update, layer), layer, frees=tuple(gradients))

    def finish_genome(self) -> None:
        """The same for a genome, whose gradient is all that is reduced."""
        if self.job.weights == "generated":
            for layer in reversed(self.layers):
                self.generate_backward(layer, also=self.freed(self.weight(layer)))
        if len(self.world) > 1:
            self.emit("all_reduce", _at(self.costs.all_reduce, 0), ranks=self.world, tag="dgenome")
        self.emit("update", _at(self.costs.update, 0), frees=("dgenome",))


def _at(cost: PerLayer, layer: int) -> float:
    """What a layer takes."""
    return cost[layer] if isinstance(cost, Sequence) else cost
