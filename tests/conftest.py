"""Settings that every test shares, and the folder of real data."""

import os
from pathlib import Path

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


def pytest_configure() -> None:
    torch.set_num_threads(1)  # torch may have been loaded before
    # The first multi-threaded call of these in a process can be off by 8e-5; one element first prevents it.
    for dtype in (torch.float32, torch.float64):
        for function in TRANSCENDENTAL:
            function(torch.ones(1, dtype=dtype))


@pytest.fixture(autouse=True)
def subnormal_numbers() -> None:
    # What torch 2.5 compiles makes the process flush them to zero, and hypothesis wants them.
    torch.set_flush_denormal(False)


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
