"""Coverage-guided fuzzing of what strangers send: `python -m tests.fuzz TARGET [SECONDS]`, with `gbfunc[fuzz]`.

Each target changes the structure (the tree of a plan, the integers of a stream) and mends digests and sums, so that
readers see what lies behind them. Anything but `ValueError`, 2 s, or 1 GB beside the imports is a finding.
"""

import io
import json
import logging
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import atheris  # pyright: ignore[reportMissingModuleSource]

with atheris.instrument_imports(include=["gbfunc"]):  # pyright: ignore[reportAttributeAccessIssue]
    import gbfunc as gb
    from gbfunc.exporting import qr
    from gbfunc.storage import checkpoint

    with suppress(ImportError):  # In the environment of Flower alone.
        from gbfunc.federated import client, server, wire  # noqa: F401
        from tests import test_federated_hostile as flower

        for up in ("float32", "int4", "top40"):
            flower.replies(up)

import torch

from tests.support.forgery import Genuine, forged, refused_or_usable
from tests.support.zoo import step_of
from tests.test_storage_genome_file_hostile import ODD, coded, places, planted

FOLDER = Path(tempfile.mkdtemp())
GENUINE = Genuine(FOLDER / "genuine")
PATH = FOLDER / "fuzzed"
STEP, _ = step_of("mlp")
with gb.Checkpointer(FOLDER / "run", STEP) as writer:
    writer.save(STEP.init(), {"epoch": 1, "x": (b"a", torch.ones(2))})
SAVED = next((FOLDER / "run").glob("step-*"))
METADATA, TENSORS = checkpoint._decode(SAVED.read_bytes())


def changed(tree: Any, data: Any) -> Any:
    """A tree with some values replaced."""
    for _ in range(data.ConsumeIntInRange(0, 3)):
        values = [*ODD, data.ConsumeUnicodeNoSurrogates(9), data.ConsumeInt(8), data.ConsumeRegularFloat()]
        spots = list(places(tree))
        planted(tree, spots[data.ConsumeIntInRange(0, len(spots) - 1)], data.PickValueInList(values))
    return tree


def fuzz_file(data: Any) -> None:
    text = json.dumps(changed(GENUINE.json, data))
    tensors = GENUINE.tensors
    if data.ConsumeBool():
        name = data.PickValueInList(["float32", "float16", "int64"])
        tensors[name] = torch.ones(data.ConsumeIntInRange(0, 99), dtype=getattr(torch, name))
    PATH.write_bytes(forged(text, tensors))
    refused_or_usable(PATH)


def fuzz_plan(data: Any) -> None:
    text = json.dumps(changed(GENUINE.json, data))
    plan = gb.Plan.from_json(text)
    assert gb.Plan.from_json(plan.to_json()) == plan


def fuzz_steps(data: Any) -> None:
    text = json.dumps(changed(GENUINE.json, data))
    flags = data.PickValueInList([9, 9 + 16, 9 + 64, 2, 8, 2 + 32, 7 + 32])
    PATH.write_bytes(coded(flags, text, data.ConsumeBytes(4000)))
    refused_or_usable(PATH)


def fuzz_checkpoint(data: Any) -> None:
    about = {k: v for k, v in METADATA.items() if k not in ("format", "sha256")}
    key = data.PickValueInList([*about])
    about[key] = (
        data.ConsumeUnicodeNoSurrogates(99) if data.ConsumeBool() else json.dumps(changed(json.loads(about[key]), data))
    )
    tensors = dict(TENSORS)
    if data.ConsumeBool():
        name = data.PickValueInList([*tensors])
        tensors[name] = torch.full([2] * data.ConsumeIntInRange(0, 2), data.ConsumeInt(4))
    SAVED.write_bytes(checkpoint._encode(tensors, about))
    gb.load_checkpoint(SAVED.parent, STEP, STEP.init())


def fuzz_qr(data: Any) -> None:
    import segno

    text = (
        "page#" + data.ConsumeUnicodeNoSurrogates(200) if data.ConsumeBool() else data.ConsumeUnicodeNoSurrogates(200)
    )
    drawn = io.BytesIO()
    segno.make_qr(text or " ").save(drawn, kind="png", scale=3)
    picture = bytearray(drawn.getvalue())
    for _ in range(data.ConsumeIntInRange(0, 2)):
        picture[data.ConsumeIntInRange(0, len(picture) - 1)] ^= data.ConsumeIntInRange(0, 255)
    PATH.write_bytes(picture)
    PATH.write_bytes(qr.read_qr(PATH))
    gb.load(PATH)


def fuzz_flower(data: Any) -> None:
    logging.disable()
    flower.test_whatever_a_client_replies_the_genome_stays_finite.hypothesis.fuzz_one_input(data.ConsumeBytes(8192))


TARGETS: dict[str, Callable[[Any], None]] = {
    name.removeprefix("fuzz_"): f for name, f in list(globals().items()) if name.startswith("fuzz_")
}


def main(target: str, seconds: str = "600") -> None:
    def once(data: bytes) -> None:
        try:
            TARGETS[target](atheris.FuzzedDataProvider(data))  # pyright: ignore[reportAttributeAccessIssue]
        except ValueError as error:
            # The messages of libraries may have more lines.
            assert len(str(error)) < 5000

    limits = ["-timeout=2", "-rss_limit_mb=2600", "-max_len=8192", f"-max_total_time={seconds}"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={FOLDER}/"], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
