"""The static plan and how it is made: `spec` what it is, `select` what is generated, `budget` how large, `build` all of it.

`serial` writes and reads it as JSON, `filesize` knows the genome's file, `report` is the table for a person.
"""

from gbfunc.plan.build import make_plan
from gbfunc.plan.filesize import FORMAT, file_layout, file_metadata, genome_file_bytes
from gbfunc.plan.spec import DTYPES, BufferPlan, Ensemble, Placement, Plan, Slot, TensorPlan

__all__ = [
    "DTYPES",
    "FORMAT",
    "BufferPlan",
    "Ensemble",
    "Placement",
    "Plan",
    "Slot",
    "TensorPlan",
    "file_layout",
    "file_metadata",
    "genome_file_bytes",
    "make_plan",
]
