"""Federated learning: what travels, what strategies make of it, who is refused, and going on from a checkpoint."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gbfunc as gb
from gbfunc.tasks.data import Split
from gbfunc.trees import flatten_tree

pytest.importorskip("flwr", reason="its versions of other packages are not those of the other tests: see .ci/run")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message  # pyright: ignore  # noqa: E501
from flwr.clientapp import ClientApp, mod  # pyright: ignore[reportMissingImports]
from flwr.serverapp import strategy as strategies  # pyright: ignore[reportMissingImports]

from gbfunc.federated import FORMATS, GenomeStrategy, Wire, client_app
from gbfunc.federated.client import ARRAYS, IDENTITY, RATE, SENT_AS
from gbfunc.federated.wire import CODES, NUMBERS, PLACES, difference
from tests.support.federated import ALL, N, Problem, grid_of, server, the_app, the_problem, trained


@pytest.fixture
def problem() -> Problem:
    return the_problem()


@pytest.fixture
def app() -> ClientApp:
    return the_app()


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_genome_comes_through_as_its_dtype_holds_it(
    problem: Problem, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(problem.plan, problem.genome)
    vector = wire.vector(problem.genome)
    packed = wire.pack(vector, dtype)
    back = wire.unpack(packed)
    bits = {"float32": 32, "float16": 16}.get(dtype) or int(dtype.removeprefix("int"))
    step = 0 if bits == 32 else 2.0**-10 if bits == 16 else 2 / (2**bits - 1)
    assert np.abs(back - vector).max() <= step * np.abs(vector).max()
    # The array's own header, a scale and a zero point for each block.
    assert len(packed[CODES if dtype.startswith("int") else NUMBERS].data) <= len(vector) * bits / 8 + 300
    for name, leaf in flatten_tree(problem.genome).items():
        torch.testing.assert_close(flatten_tree(wire.genome(vector))[name], leaf, rtol=0, atol=0)
    # More codes than runs are for.
    monkeypatch.setattr("gbfunc.federated.wire.MOST_RUNS", 0)
    np.testing.assert_array_equal(wire.unpack(wire.pack(vector, dtype)), back)


@pytest.mark.parametrize("count", [1, 7, 10_000])
def test_the_largest_numbers_come_to_their_places(problem: Problem, count: int) -> None:
    wire = Wire(problem.plan, problem.genome)
    vector = wire.vector(problem.genome)
    packed = wire.pack(vector, f"top{count}")
    back = wire.unpack(packed)
    kept = np.argsort(-np.abs(vector))[:count]
    np.testing.assert_array_equal(back[kept], vector[kept].astype(np.float16))
    assert np.count_nonzero(back) <= count
    bits = 16 + (wire.size - 1).bit_length()
    assert sum(len(array.data) for array in packed.values()) <= min(count, wire.size) * bits / 8 + 300


def test_running_statistics_travel_and_counts_of_batches_stay() -> None:
    pnet = nn.Sequential(nn.Linear(6, 20), nn.BatchNorm1d(20), nn.Linear(20, 3))
    plan = gb.make_plan(pnet, gb.periodic(features=2))
    genome = gb.init_genome(plan, pnet)
    wire = Wire(plan, genome)
    assert wire.size == plan.genome_params + 40
    for dtype in ("float32", "int8"):
        back = wire.genome(wire.unpack(wire.pack(wire.vector(genome), dtype)))
        torch.testing.assert_close(back.buffers["1.running_var"], torch.ones(20), rtol=1e-2, atol=0)
        assert back.buffers["1.num_batches_tracked"].dtype == torch.int64
    # Complex numbers would stay behind in silence.
    pnet = nn.Linear(4, 4)
    pnet.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))
    plan = gb.make_plan(pnet)
    with pytest.raises(ValueError, match="messages must have real numbers, got complex numbers in direct/turn"):
        Wire(plan, gb.init_genome(plan, pnet))


def test_damaged_records_are_refused(problem: Problem) -> None:
    wire = Wire(problem.plan, problem.genome)
    vector = wire.vector(problem.genome)
    codes = np.array(wire.pack(vector, "int4")[CODES].numpy())
    codes[-1] ^= 1
    numbers, places = (x.numpy() for x in wire.pack(vector, "top3").values())
    for arrays, words in (
        ({CODES: codes}, "checksum"),
        ({NUMBERS: vector[1:]}, "numbers, got float32"),
        ({NUMBERS: vector.astype(np.int32)}, "got int32"),
        ({"weights": vector}, "one array"),
        ({NUMBERS: vector * math.nan}, "not finite"),
        ({NUMBERS: numbers, PLACES: places[1:]}, "bits of place each"),
        ({NUMBERS: vector, PLACES: places}, "expected numbers in float16"),
        ({NUMBERS: numbers, PLACES: 0 * places}, "increasing places"),
        ({NUMBERS: numbers, PLACES: ~(0 * places)}, "increasing places"),
    ):
        with pytest.raises(ValueError, match=words):
            wire.unpack(ArrayRecord({name: Array(x) for name, x in arrays.items()}))
    for scale, dtype, words in (
        (math.inf, "int8", "not finite"),
        (1e6, "float16", "not finite in float16"),
        (1.0, "int9", "one of float32, float16, int2"),
    ):
        with pytest.raises(ValueError, match=words):
            wire.pack(vector * np.float32(scale), dtype)
    with pytest.raises(ValueError, match="down must be one of .* got 'top3'"):
        server(problem, down="top3")


def local_genomes(problem: Problem, app: ClientApp) -> tuple[list[np.ndarray], list[int]]:
    found = {}

    def listening(message: Message, context: Context) -> Message:
        reply = app(message, context)
        vector = Wire(problem.plan, problem.genome).unpack(reply.content.array_records[ARRAYS])
        found[context.node_config["partition-id"]] = vector, len(problem.examples(context))
        return reply

    trained(server(problem), listening)
    return [found[i][0] for i in range(N)], [found[i][1] for i in range(N)]


def test_averages_are_those_of_the_clients_genomes(problem: Problem, app: ClientApp) -> None:
    vectors, counts = local_genomes(problem, app)
    mean = np.average(np.stack(vectors).astype(np.float64), axis=0, weights=counts)
    assert np.abs(vectors[0] - vectors[1]).max() > 1e-3
    np.testing.assert_allclose(trained(server(problem), app), mean, rtol=0, atol=1e-5)
    # The change in codes is near it, and so is a start that was rounded on its way.
    whole = np.linalg.norm(mean - server(problem).wire.vector(problem.genome))
    for options in ({"up": "int8"}, {"up": "float16", "down": "float16"}, {"up": "int8", "down": "int8"}):
        found = trained(server(problem, **options), app)
        assert 0 < np.linalg.norm(found - mean) < 0.3 * whole


def test_a_strategy_works_without_ours(problem: Problem, app: ClientApp) -> None:
    wire = Wire(problem.plan, problem.genome)
    config = ConfigRecord({IDENTITY: wire.identity, RATE: 1e-2, SENT_AS: "float32"})
    with grid_of(app) as grid:
        start = wire.pack(wire.vector(problem.genome), "float32")
        result = strategies.FedAvg(**ALL).start(grid, start, num_rounds=1, train_config=config)
    np.testing.assert_allclose(wire.unpack(result.arrays), trained(server(problem), app), rtol=0, atol=1e-6)


OPTIONS = {"FedAvgM": {"server_momentum": 0.5}, "FedProx": {"proximal_mu": 0.1}, "Krum": {"num_malicious_nodes": 1}}
OPTIONS |= {"MultiKrum": {"num_nodes_to_select": 3}, "FedTrimmedAvg": {"beta": 0.25}}
STRATEGIES = ("FedAdam", "FedYogi", "FedAdagrad", "FedMedian", *OPTIONS)


@pytest.mark.parametrize("name", (*STRATEGIES, "Bulyan", "privacy"))
def test_every_strategy_works_as_it_is(problem: Problem, app: ClientApp, name: str) -> None:
    first = server(problem).wire.vector(problem.genome)
    if name == "privacy":
        inner = strategies.FedAvg(**ALL)
        strategy = strategies.DifferentialPrivacyServerSideFixedClipping(inner, 1e-3, 1.0, N)
    else:
        strategy = getattr(strategies, name)(**ALL, **OPTIONS.get(name, {}))
    found = trained(one := server(problem, strategy, up="int4", down="int8"), app, rounds=2)
    assert np.isfinite(found).all() and 0 < np.abs(found - first).max() < 1
    assert [r.used for r in one.rounds] == [N, N] and not any(r.left_out for r in one.rounds)


@pytest.mark.parametrize("kind", ["server", "local"])
def test_mods_clip_what_clients_send(problem: Problem, app: ClientApp, kind: str) -> None:
    norm, strategy, mods = 1e-3, strategies.FedAvg(**ALL), mod.LocalDpMod(1e-3, 1e-9, 1.0, 1e-5)
    if kind == "server":
        strategy = strategies.DifferentialPrivacyClientSideFixedClipping(strategy, 1e-9, norm, N)
        mods = mod.fixedclipping_mod
    clipped = client_app(problem.plan, problem.pnet, problem.task.loss, problem.examples, steps=3, mods=[mods])
    first = server(problem).wire.vector(problem.genome)
    moved = np.linalg.norm(trained(server(problem, strategy, down="float32"), clipped) - first)
    assert 0 < moved < 1.01 * norm < np.linalg.norm(trained(server(problem), app) - first)
    # In codes a reply is a change: the mod would take it for the genome.
    for options in ({"up": "float16"}, {"down": "int8"}):
        with pytest.raises(ValueError, match="all of 4 clients refuse.*mods compare the numbers of two genomes"):
            trained(server(problem, strategy, **options), clipped)


def test_the_proximal_term_pulls_to_the_start(problem: Problem) -> None:
    app = client_app(problem.plan, problem.pnet, problem.task.loss, problem.examples, optimizer=torch.optim.SGD)
    first = server(problem).wire.vector(problem.genome)
    found = trained(server(problem, strategies.FedProx(**ALL, proximal_mu=100.0)), app)
    np.testing.assert_allclose(found, first, rtol=0, atol=1e-6)
    assert np.abs(trained(server(problem), app) - first).max() > 1e-3
    with pytest.raises(ValueError, match="not finite, at a learning rate of 1e\\+30"):
        trained(server(problem, lr=1e30), app)


@pytest.mark.parametrize("up", ["int2", "top40"])
def test_what_is_not_sent_is_sent_the_next_time(problem: Problem, app: ClientApp, up: str) -> None:
    wire = Wire(problem.plan, problem.genome)

    def seen(up: str, rounds: int) -> list[tuple[np.ndarray, Any, Any]]:
        found = []

        def listening(message: Message, context: Context) -> Message:
            before = context.state.array_records.get("left")
            reply = app(message, context)
            if context.node_config["partition-id"] == 0:
                held = [None if x is None else x["left"].numpy() for x in (before, context.state.get("left"))]
                found.append((wire.unpack(reply.content.array_records[ARRAYS]), *held))
            return reply

        trained(server(problem, up=up), listening, rounds)
        return found

    sent = seen(up, 2)
    change = seen("float32", 1)[0][0] - wire.vector(problem.genome)
    np.testing.assert_allclose(sent[0][0] + sent[0][2], change, rtol=0, atol=1e-5)
    assert np.abs(sent[0][0] - change).max() > 1e-3 and sent[0][1] is None
    np.testing.assert_array_equal(sent[1][1], sent[0][2])


def test_another_plan_base_or_library_is_refused_by_name(problem: Problem, app: ClientApp) -> None:
    task, plans = problem.task, [problem.task.plan(problem.pnet, genome_params=300)]
    apps = [client_app(plans[0], problem.pnet, task.loss, problem.examples, steps=1)]
    for seed in (0, 1):
        plans.append(gb.make_plan(task.build(seed), gb.periodic(features=2), base="own"))
        apps.append(client_app(plans[-1], task.build(seed), task.loss, problem.examples, steps=3))
    with pytest.raises(ValueError, match="base"):
        client_app(plans[1], task.build(1), task.loss, problem.examples)
    with pytest.raises(ValueError, match=f"all of {N} clients refuse; node 2: another plan"):
        trained(server(problem), apps[0])
    own = GenomeStrategy(strategies.FedAvg(**ALL), plans[1], gb.init_genome(plans[1], task.build(0)), lr=1e-2, seed=0)
    # Of the network, only the base's digest is anywhere but in the clients.
    for strategy, good, bad, what in ((server(problem), app, apps[0], "plan"), (own, apps[1], apps[2], "base")):
        trained(strategy, lambda m, c, x=good, y=bad: (y if c.node_config["partition-id"] == 2 else x)(m, c))
        ((node, words),) = strategy.rounds[0].left_out.items()
        assert strategy.rounds[0].used == N - 1 and node == 4 and f"another {what}" in words
    after = task.evaluate(gb.materialize(plans[1], own.genome, task.build(0)), task.train)
    assert after != task.evaluate(task.build(0), task.train)
    here = own.wire.identity
    words = "another library: 0.1.0 here, 0.0.9 at the server: all sides need one version of gbfunc"
    assert difference(here, here) is None and words in str(difference(here, f"0.0.9{here[5:]}"))


class Book(dict[str, int]):
    state_dict, load_state_dict = dict.copy, dict.update


def adaptive() -> Any:
    inner = strategies.FedAdam(fraction_train=0.5, fraction_evaluate=0.0, eta=1e-2, beta_1=0.9, beta_2=0.99)
    # Its norm of clipping adapts: state that is one number.
    return strategies.DifferentialPrivacyServerSideAdaptiveClipping(inner, 1e-9, 2, initial_clipping_norm=1.0)


def momentum() -> Any:
    return strategies.FedAvgM(fraction_train=0.5, fraction_evaluate=0.0, server_momentum=0.9)


@pytest.mark.parametrize("make", [adaptive, momentum])
def test_a_server_goes_on_from_its_checkpoint(
    problem: Problem, app: ClientApp, tmp_path: Path, make: Callable[[], Any]
) -> None:
    options: dict[str, Any] = {"up": "int4", "down": "int8", "lr": lambda round_: 1e-2 / (round_ + 1)}
    straight = trained(server(problem, make(), **options), app, rounds=4)
    path = tmp_path / "server.safetensors"
    kept = {"moments": [(np.arange(3), {7: np.float32(2.5)})], "count": 3, "on": True}
    first = server(problem, make(), checkpoint=path, **options)
    first.strategy.book, first.strategy.held = Book(spent=7), kept
    trained(first, app, 2)
    second = server(problem, make(), checkpoint=path, **options)
    second.strategy.book = Book()
    found = trained(second, app, 4)
    assert [r.round for r in second.rounds] == [1, 2, 3, 4] and second.rounds[:2] == first.rounds
    assert second.strategy.book == {"spent": 7}
    assert str(second.strategy.held) == str({**kept, "moments": [(np.arange(3), {7: np.array(2.5, np.float32)})]})
    if make is momentum:
        np.testing.assert_array_equal(found, straight)
    else:
        np.testing.assert_allclose(found, straight, rtol=0, atol=1e-5)
        assert second.strategy.clipping_norm > first.strategy.clipping_norm > 1


def test_checkpoints_of_others_are_refused(problem: Problem, app: ClientApp, tmp_path: Path) -> None:
    path = tmp_path / "server.safetensors"
    trained(server(problem, checkpoint=path), app)
    with pytest.raises(ValueError, match="expected the strategy FedAvg, got FedAdam"):
        trained(server(problem, strategies.FedAdam(**ALL), checkpoint=path), app, 2)
    plan = problem.task.plan(problem.pnet, genome_params=300)
    smaller = problem._replace(plan=plan, genome=gb.init_genome(plan, problem.pnet))
    with pytest.raises(ValueError, match="another plan"):
        trained(server(smaller, checkpoint=path), app, 2)
    for damaged in (path.read_bytes()[:-9], b"\x80\x04no pickle"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="must be a checkpoint of this server"):
            trained(server(problem, checkpoint=path), app, 2)


def test_clients_evaluate_and_who_cannot_is_left_out_by_name(problem: Problem) -> None:
    task, rest = problem.task, []

    def examples(context: Context) -> Split:
        data, i = problem.examples(context), context.node_config["partition-id"]
        return Split(data.x[: 9 * i], data.y[: 9 * i])

    def evaluate(net: Any, data: Any) -> dict[str, float]:
        rest.append(data)
        return {"accuracy": math.nan} if len(data) == 9 else task.evaluate(net, data)

    app = client_app(problem.plan, problem.pnet, task.loss, examples, steps=1, evaluate=evaluate)
    one = server(problem, strategies.FedAvg(min_available_nodes=N))
    with grid_of(app) as grid:
        result = one.train(grid, 1)
    told = {2: "evaluation: node 2 must have examples, got none", 3: "evaluation: accuracy must be finite"}
    assert one.rounds[0].used == N - 1 and one.rounds[0].left_out == told
    # Means over the clients' examples are that over all.
    whole = Split(*(torch.cat([getattr(x, k) for x in rest if len(x) > 9]) for k in ("x", "y")))
    accuracy = task.evaluate(gb.materialize(problem.plan, one.genome, problem.pnet), whole)["accuracy"]
    assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx(accuracy)
