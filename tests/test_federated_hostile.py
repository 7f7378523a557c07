"""Hostile clients: replies that are left out or bounded, and anything that a client may reply."""

import copy
import math
import zlib
from collections.abc import Iterable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="its versions of other packages are not those of the other tests: see .ci/run")

from flwr.app import Array, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict  # pyright: ignore[reportMissingImports]  # noqa: E501
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto  # pyright: ignore[reportMissingImports]
from flwr.proto.recorddict_pb2 import RecordDict as Proto  # pyright: ignore[reportMissingImports]
from flwr.serverapp import strategy as strategies  # pyright: ignore[reportMissingImports]
from google.protobuf.message import DecodeError

from gbfunc.federated import LocalGrid
from gbfunc.federated.client import ARRAYS, METRICS
from gbfunc.federated.server import _UNDECODABLE
from gbfunc.federated.wire import CODES, NUMBERS, PLACES
from gbfunc.formats.compact import MAGIC
from tests.support.federated import ALL, HOSTILE, N, grid_of, server, the_app, the_problem, trained


@pytest.mark.parametrize("name", HOSTILE["STRATEGIES"])
@pytest.mark.parametrize("kind", HOSTILE["KINDS"])
def test_a_hostile_client_is_left_out_or_bounded(kind: str, name: str) -> None:
    honest = []

    def listening(message: Message, context: Context) -> Message:
        reply = the_app()(message, context)
        if context.node_config["partition-id"] != 1:
            honest.append(reply.content.array_records[ARRAYS][NUMBERS].numpy())
        return reply

    replay = kind == HOSTILE["REPLAY"]
    found = trained(
        one := server(the_problem(), HOSTILE["STRATEGIES"][name]()), HOSTILE["hostile"](listening, kind, 1), 2
    )
    used = kind in HOSTILE["REDUCED"]
    assert [r.used for r in one.rounds] == [N if used or replay else N - 1, N if used else N - 1]
    assert [{*r.left_out} for r in one.rounds] == [set() if used or replay else {3}, set() if used else {3}]
    assert {*one.rounds[0].bounded} == ({3} if used and "reversed" not in kind else set())
    last = np.stack(honest[-3:])
    assert np.linalg.norm(found - last.mean(0)) < 6 * N * one.rounds[0].norm
    if name != "FedAvgM":
        # The middle of four numbers lies between the three honest ones.
        assert (found >= last.min(0) - 1e-6).all() and (found <= last.max(0) + 1e-6).all()


def test_the_only_reply_is_bounded_by_the_last_round() -> None:
    one = server(the_problem(), strategies.FedAvg(**ALL))
    trained(one, the_app())
    far = HOSTILE["hostile"](the_app(), "1e30 in the genome", 1)

    def alone(message: Message, context: Context) -> Message:
        gone = Message(Error(1, "\x1b[2Jgone\n"), reply_to=message)
        return far(message, context) if context.node_config["partition-id"] == 1 else gone

    before = one.wire.vector(one.genome)
    moved = np.linalg.norm(trained(one, alone, 2) - before)
    assert moved == pytest.approx(5 * one.rounds[0].norm, rel=1e-4)
    assert [*one.rounds[1].bounded] == [3] and one.rounds[1].left_out[2] == "?[2Jgone?"
    with pytest.raises(ValueError, match="bound must be at least 1, got nan"):
        server(the_problem(), bound=math.nan)


class Unreliable(LocalGrid):
    """Node 3's replies cannot be decoded or have another node's name; the reply of node 4 comes late."""

    raises: Exception | None = None
    late = True

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        (reply,) = super().pull_messages(message_ids)
        if reply.metadata.src_node_id == 4 and self.late:
            self.late, self._replies[next(iter(message_ids))] = False, reply
            return []
        if reply.metadata.src_node_id == 3:
            if self.raises is not None:
                raise self.raises
            reply.metadata.__dict__["_src_node_id"] = 5
        return [reply]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (DecodeError("wrong tag"), "Flower cannot decode the reply: DecodeError: wrong tag"),
        (KeyError("arraychunk_ids"), "Flower cannot decode the reply: KeyError: 'arraychunk_ids'"),
        (None, "the reply claims to be from node 5"),
    ],
)
def test_replies_that_flower_cannot_decode_are_left_out(
    error: Exception | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gbfunc.federated.server._POLL", 0.0)
    one = server(the_problem())
    with Unreliable(the_app(), [{"partition-id": i} for i in range(N)]) as grid:
        grid.raises = error
        one.train(grid, 1)
        assert (one.rounds[0].used, one.rounds[0].left_out) == (N - 1, {3: words})
        grid.raises = OSError("the server is gone")
        with pytest.raises(OSError, match="is gone"):
            one.train(grid, 2)


NAMES = st.sampled_from([NUMBERS, CODES, PLACES, "num-examples", "loss", "server-round", ""])
VALUES = st.one_of(st.floats(), st.integers(-(2**63), 2**63 - 1), st.lists(st.floats(), max_size=3))
EDITS = st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 255)), max_size=4)


@cache
def replies(up: str) -> list[Message]:
    kept = list[Message]()
    trained(server(the_problem(), up=up), lambda m, c: (kept.append(the_app()(m, c)), kept[-1])[1])
    return kept


@pytest.mark.process
@settings(max_examples=400, deadline=1_000)
@given(st.data(), st.sampled_from(["float32", "int4", "top40"]), st.sampled_from([*HOSTILE["STRATEGIES"]]))
def test_whatever_a_client_replies_the_genome_stays_finite(data: st.DataObject, up: str, name: str) -> None:
    sent = copy.deepcopy(replies(up))
    content, drawn = sent[1].content, data.draw
    arrays, metrics = content.array_records[ARRAYS], dict(content.metric_records[METRICS])
    for key, array in [*arrays.items()]:
        edited = bytearray(array.data[: len(array.data) - drawn(st.sampled_from([0, 0, 1, 40, 10**5]))])
        for at, byte in drawn(EDITS) if edited else ():
            edited[at % len(edited)] = byte
        del arrays[key]
        if key == CODES and len(edited) > 150 and drawn(st.booleans()):
            # Behind an npy header of 128 bytes: magic, flags, checksum, content.
            start = 128 + len(MAGIC)
            checked = bytes(edited[start : start + 1] + edited[start + 5 :])
            edited[start + 1 : start + 5] = zlib.crc32(checked).to_bytes(4, "little")
        arrays[drawn(st.one_of(st.just(key), NAMES))] = Array("float32", (1,), "numpy.ndarray", bytes(edited))
    for key in drawn(st.lists(NAMES, max_size=2)):
        metrics[key] = drawn(VALUES)
    record = recorddict_to_proto(RecordDict({ARRAYS: arrays, METRICS: MetricRecord(metrics)}))
    serialized = bytearray(record.SerializeToString())
    for at, byte in drawn(st.one_of(st.just([]), EDITS)):
        serialized[at % len(serialized)] = byte
    one = server(the_problem(), HOSTILE["STRATEGIES"][name](), up=up)
    try:
        sent[1].content = recorddict_from_proto(Proto.FromString(bytes(serialized)))
    except _UNDECODABLE:
        return
    with grid_of(the_app()) as grid:
        one.configure_train(1, one.wire.pack(one.wire.vector(one.genome), "float32"), ConfigRecord(), grid)
    one.aggregate_train(1, sent)
    ((_, used, left_out, _, means, _),) = one.rounds
    assert np.isfinite(one.wire.vector(one.genome)).all() and np.isfinite([*means.values()]).all()
    assert used == N - len(left_out) and {*left_out} <= {sent[1].metadata.src_node_id}
