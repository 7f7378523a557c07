"""Flower's own servers over TLS: a SuperLink and four SuperNodes, of which one is hostile in another way each round."""

import ast
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import gbfunc as gb
from gbfunc.tasks import find_task
from tests.support.ranks import ROOT

pytest.importorskip("flwr", reason="its versions of other packages are not those of the other tests: see .ci/run")

HOSTILE = runpy.run_path(str(ROOT / "notebooks/results/hostile.py"))
KINDS = ("none", *HOSTILE["KINDS"], "undecodable", "signed by another")
CLIENT = """
import os, runpy
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

HOSTILE, KINDS = runpy.run_path(os.environ["HOSTILE"]), os.environ["KINDS"].split(";")
client = ClientApp()

# Trains without torch, whose import takes longer than the round.
def honest(message, context):
    number = message.content.config_records["config"]["server-round"]
    sent = message.content.array_records["arrays"]["genome"].numpy()
    change = np.random.default_rng([context.node_id, number]).normal(0, 1e-3, sent.shape)
    metrics = MetricRecord({"loss": 1.0, "num-examples": 100, "server-round": number})
    arrays = ArrayRecord({"genome": Array((sent + change).astype(np.float32))})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

class Undecodable(MetricRecord):
    def deflate(self):
        whole = super().deflate()
        return whole[: whole.index(b"\\0") + 1] + b"\\xff" * (len(whole) - whole.index(b"\\0") - 1)

class Signed(Message):
    def deflate(self):
        node, self.metadata.__dict__["_src_node_id"] = self.metadata.src_node_id, 7
        whole = super().deflate()
        self.metadata.__dict__["_src_node_id"] = node
        return whole

Undecodable.__qualname__, Signed.__qualname__ = "MetricRecord", "Message"

@client.train()
def train(message, context):
    kind = KINDS[message.content.config_records["config"]["server-round"] - 1]
    if kind == "none":
        import digits
        return digits.client(message, context)
    if kind in HOSTILE["KINDS"]:
        return HOSTILE["hostile"](honest, kind, 3)(message, context)
    reply = honest(message, context)
    if context.node_config["partition-id"] != 3:
        return reply
    if kind == "undecodable":
        reply.content["metrics"] = Undecodable(dict(reply.content["metrics"]))
        return reply
    return Signed(reply.content, reply_to=message)
"""
WAITS = "import time\nsleep = time.sleep\ntime.sleep = lambda seconds: sleep(min(seconds, 0.2))"
"""Makes Flower's processes look for messages five times a second instead of every three seconds."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def certificates(folder: Path) -> None:
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    authority = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"]
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for words in (
        ["req", "-x509", *key, "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key", "-out", "ca.crt"],
        ["req", *key, "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr"],
        ["x509", "-req", "-in", "server.csr", *authority, "-days", "2", "-out", "server.crt", "-extfile", "names"],
    ):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


@pytest.mark.process
@pytest.mark.timeout(900)  # A minute of processors, on few that others use, too.
def test_no_hostile_node_over_tls_stops_the_rounds(tmp_path: Path) -> None:
    certificates(tmp_path)
    task = find_task("digits", None, {})
    pnet = task.with_pnet(task.pnet.scaled(0.1)).build(0)  # pyright: ignore[reportOptionalCall]
    plan = task.plan(pnet, genome_params=600)
    gb.save(tmp_path / "genome", plan, gb.init_genome(plan, pnet, seed=0))
    guide = (ROOT / "notebooks/guides/federated.md").read_text(encoding="utf-8")
    code, project = (guide.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "toml"))
    for before, after in (
        ("4, 6", f"4, {len(KINDS)}"),
        ('up="int4", down="int8"', 'up="float32", down="float32"'),
        ("_nodes=2", "_nodes=4"),
        ("FedAvg", "FedMedian"),
        ("    print(", '    print = functools.partial(builtins.print, file=open(f"{GENOME}.said", "w"))\n    print('),
        ("import math\n", "import builtins\nimport functools\nimport math\n"),
    ):
        assert before in code
        code = code.replace(before, after, 1 if "print" in before else -1)
    app, flwr, site = (tmp_path / name for name in ("app", "flwr", "site"))
    for folder in (app, flwr, site):
        folder.mkdir()
    (app / "pyproject.toml").write_text(project.replace("digits:client", "node:client"))
    (app / "digits.py").write_text(code)
    (app / "node.py").write_text(CLIENT)
    (site / "sitecustomize.py").write_text(WAITS)
    port = free_port()
    (flwr / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        f'root-certificates = "{tmp_path / "ca.crt"}"\n'
    )
    bin_ = Path(sys.executable).parent
    env = os.environ | {
        "GENOME": str(tmp_path / "genome"),
        "KINDS": ";".join(KINDS),
        "HOSTILE": str(ROOT / "notebooks/results/hostile.py"),
        "FLWR_HOME": str(flwr),
        "FLWR_TELEMETRY_ENABLED": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
        "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}",
    }
    started: list[Any] = []

    def start(*words: str) -> None:
        with (tmp_path / f"{len(started)}.log").open("w") as log:
            started.append(
                subprocess.Popen(words, cwd=tmp_path, env=env, stdout=log, stderr=log, start_new_session=True)
            )

    try:
        tls = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.crt", "--ssl-keyfile", "server.key"]
        link = ["--host", "127.0.0.1", "--port", str(port), "--disable-runtime-dependency-installation"]
        start("flower-superlink", *link, *tls)
        for i in range(4):
            link = ["--root-certificates", "ca.crt", "--superlink", f"127.0.0.1:{port}", "--port", str(free_port())]
            start("flower-supernode", *link, "--node-config", f"partition-id={i}")
        for _ in range(600):
            with socket.socket() as s:
                if not s.connect_ex(("127.0.0.1", port)):
                    break
            time.sleep(0.1)
        run = ["flwr", "run", "app", "here", "--stream"]
        done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            process.wait(60)
    logs = done.stdout + done.stderr + "".join(p.read_text() for p in sorted(tmp_path.glob("*.log")))
    assert (tmp_path / "genome.said").exists(), logs[-3_000:]
    rounds = ast.literal_eval((tmp_path / "genome.said").read_text().rpartition(" {'accuracy'")[0])
    used = {kind: (count, *left_out.values()) for kind, (count, left_out) in zip(KINDS, rounds, strict=True)}
    for kind in ("none", *HOSTILE["REDUCED"]):
        assert used.pop(kind) == (4,)
    assert {count for count, _ in used.values()} == {3}
    assert "Flower cannot decode the reply: DecodeError" in used["undecodable"][1]
    assert used["signed by another"][1] == "the reply claims to be from node 7"
