"""Flower's own servers over TLS: a SuperLink and four SuperNodes, of which one is hostile in another way each round."""

import os
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

KINDS = ("an npy that declares 10^12 numbers", "a list as a metric", "1e30 in the genome")
APP = """
import runpy
from flwr.clientapp import ClientApp

HOSTILE, honest, client = runpy.run_path(os.environ["HOSTILE"])["hostile"], client, ClientApp()

@client.train()
def train(message, context):
    kind = os.environ["KINDS"].split(";")[int(message.content.config_records["config"]["server-round"]) - 1]
    return HOSTILE(honest, kind, 3)(message, context)
"""


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


@pytest.mark.slow
def test_a_hostile_node_over_tls_does_not_stop_the_rounds(tmp_path: Path) -> None:
    certificates(tmp_path)
    task = find_task("digits", None, {})
    pnet = task.with_pnet(task.pnet.scaled(0.1)).build(0)  # pyright: ignore[reportOptionalCall]
    plan = task.plan(pnet, genome_params=600)
    gb.save(tmp_path / "genome", plan, gb.init_genome(plan, pnet, seed=0))
    guide = (ROOT / "notebooks/guides/federated.md").read_text(encoding="utf-8")
    code, project = (guide.split(f"```{kind}\n")[1].split("```")[0] for kind in ("python", "toml"))
    app = tmp_path / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(project)
    head = code.partition("if __name__")[0].replace("4, 6", f"4, {len(KINDS)}")
    head = head.replace('up="int4", down="int8"', 'up="float32", down="float32"').replace("_nodes=2", "_nodes=4")
    (app / "digits.py").write_text(head + APP)
    port, flwr = free_port(), tmp_path / "flwr"
    flwr.mkdir()
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
        "PYTHONPATH": str(ROOT),
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
        time.sleep(15)
        run = ["flwr", "run", "app", "here", "--stream"]
        done = subprocess.run(run, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900)
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGTERM)
        for process in started:
            process.wait(60)
    logs = done.stdout + done.stderr + "".join(p.read_text() for p in sorted(tmp_path.glob("*.log")))
    assert "'accuracy': " in logs, logs[-3_000:]
    assert (tmp_path / "genome.trained").exists()
    for words in ("expected 4,000,000,000,000 bytes", "its metrics are loss[2], num-examples", "times the median"):
        assert words in logs
