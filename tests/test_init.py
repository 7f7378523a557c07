"""The names of `gbfunc` itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import gbfunc as gb


def test_names_at_the_top_are_there_and_shown() -> None:
    assert dir(gb) == sorted({*gb.__all__}) and all(getattr(gb, name) is not None for name in gb.__all__)


UNUSED = """
import sys, torch
before = set(sys.modules)

def found(*names):
    print(sorted((sys.modules.keys() - before) & {*names}))

import gbfunc as gb
found("optree", *(f"gbfunc.{room}" for room in ("fit", "many", "module", "parallel", "storage", "train")))
print(gb.train.make_train_step is gb.make_train_step)
found("torch.distributed.tensor", "torch.utils.flop_counter", "torch.export")
gb.GenomeModule
found("huggingface_hub", "peft", "transformers", "accelerate")
from gbfunc.cli import main
try:
    main(["train", "--help"])
except SystemExit:
    print()
found("sklearn", "matplotlib", "scipy", "pandas")
import gbfunc.plots
found("matplotlib.pyplot")
"""


@pytest.mark.process
def test_what_a_program_does_not_use_is_not_imported() -> None:
    """In one process, as an import of torch takes seconds: the library, a module, help on a command, figures."""
    done = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, check=True)
    first, second, third, fourth, *text, fifth, sixth = done.stdout.splitlines()
    assert second == "True" and "--epochs INT" in "".join(text)
    assert [first, third, fourth, fifth, sixth] == ["[]"] * 5


def test_no_name_is_that_of_a_room_which_is_imported_later() -> None:
    later = [name for names in gb._LATER.values() for name in names]
    assert len({*later}) == len(later) and {*later} <= {*gb.__all__}
    assert not {name for name in later if importlib.util.find_spec(f"gbfunc.{name}")}


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'gbfunc' has no attribute 'tile_gird'"):
        gb.tile_gird  # noqa: B018
