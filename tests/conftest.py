"""Settings that every test shares, and the folder of real data."""

import gc
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

# Read when torch is loaded, here and in the processes that tests start: workers of pytest-xdist and ranks share the
# cores, and one thread gives the same order of summation everywhere.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]

# Torch's first calls and busy machines are slow at random: no limit on time, only on the number of examples.
settings.register_profile(
    "gbfunc",
    deadline=None,
    max_examples=25,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("gbfunc")

TRANSCENDENTAL = (torch.sin, torch.cos, torch.tanh, torch.exp, torch.log, torch.sqrt, torch.erf)
LONG = (
    *("tensor_parallel", "distributed", "pages", "planner", "pipeline", "kernels_triton", "layers_transforms"),
    *("exporting", "generation", "train_forms", "module", "storage_genome_file_hostile", "weight_operations"),
)
"""Files of 10 seconds and more, which begin first: what runs alone at the end is short."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist would begin with the files of the most tests.
    torch.set_num_threads(1)  # torch may have been loaded before
    # The first multi-threaded call of these in a process can be off by 8e-5; one element first prevents it.
    for dtype in (torch.float32, torch.float64):
        for function in TRANSCENDENTAL:
            function(torch.ones(1, dtype=dtype))


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make no cases that `not slow`, part of the default, would deselect: there are some 4,500 of them."""
    if "not slow" in metafunc.config.option.markexpr:
        marks = metafunc.definition.own_markers
        few = any(mark.name == "slow" for mark in marks)
        marks[:] = [_quick(mark, few) if mark.name == "parametrize" else mark for mark in marks]


def _quick(mark: pytest.Mark, few: bool) -> pytest.Mark:
    """A parametrisation without its slow cases; of a test that is slow itself, the first case alone."""
    names, cases, *others = mark.args
    quick = [case for case in cases if not any(m.name == "slow" for m in getattr(case, "marks", ()))]
    if few and callable(mark.kwargs.get("ids")):
        quick = quick[:1]
    if len(quick) == len(cases):
        return mark
    return pytest.mark.parametrize(names, quick, *others, **mark.kwargs).mark


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)


def pytest_collection_finish() -> None:
    gc.freeze()  # At its end pytest collects five times: half a second each where libraries and cases are looked at.


@pytest.fixture(autouse=True)
def subnormal_numbers() -> None:
    # What torch 2.5 compiles makes the process flush them to zero, and hypothesis wants them.
    torch.set_flush_denormal(False)


@pytest.fixture
def graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.compile` makes graphs and their guards, and no programs of them, which takes half a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs `gbfunc` with arguments, asserts its exit status, and returns what it wrote: `out` and `err`."""
    from gbfunc.cli import main

    def run(arguments: list[Any], code: int = 0) -> Any:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == code
        return capsys.readouterr()

    return run


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The machine's own Chromium; a test that needs one is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as started:
        # Without a sandbox Chromium also runs as root, as in a container.
        running = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data sets: `GBFUNC_DATA`, else `../shared/data` beside the repository."""
    named = os.environ.get("GBFUNC_DATA")
    if named and not Path(named).is_dir():
        raise NotADirectoryError(f"GBFUNC_DATA must name a folder, and {named!r} is none")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no real data: GBFUNC_DATA is not set and {folder} does not exist")
    return folder


@pytest.fixture(scope="module")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tests.support.forgery import Genuine

    return Genuine(tmp_path_factory.mktemp("genome") / "genome.safetensors")
