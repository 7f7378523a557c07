"""The static plan and how it is made.

`slots` and `spec` say what it is, `ensembles` what goes together, `select` what is generated, `budget` how
large; `build` does all of it.

`serial` writes and reads it as JSON, `packing` makes that short, `filesize` and `byte_target` know the genome's file,
`report` is the table for a person.
"""

from gbfunc.plan.build import make_plan
from gbfunc.plan.ensembles import Ensemble, TileSpan
from gbfunc.plan.filesize import FORMAT, NUMBERS, file_layout, file_metadata, file_tensors, genome_file_bytes
from gbfunc.plan.packing import unpack_plan
from gbfunc.plan.slots import DTYPES, BufferPlan, Slot, TensorPlan
from gbfunc.plan.spec import Plan

__all__ = [
    "DTYPES",
    "FORMAT",
    "NUMBERS",
    "BufferPlan",
    "Ensemble",
    "TileSpan",
    "Plan",
    "Slot",
    "TensorPlan",
    "file_layout",
    "file_metadata",
    "file_tensors",
    "genome_file_bytes",
    "make_plan",
    "unpack_plan",
]
