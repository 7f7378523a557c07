"""The static plan: `slots` and `spec` say what it is, `ensembles` what goes together.

`select`, `budget` and `build` make it; `serial` writes and reads it as JSON, `rounding` says how its numbers are
stored, and `file_layout` what stands where in the genome's file.
"""

from gbfunc.plan.build import make_plan
from gbfunc.plan.ensembles import Ensemble
from gbfunc.plan.report import document, file_bytes, genome_file_bytes
from gbfunc.plan.rounding import STORED_DTYPES, StoredDtype, stored_name
from gbfunc.plan.serial import register
from gbfunc.plan.slots import DTYPES, Slot, TensorPlan
from gbfunc.plan.spec import Plan
from gbfunc.plan.step_stream import allocate
from gbfunc.plan.steps import AUTO, Steps, Stored, as_stored, bytes_each, check_steps, stored_as

__all__ = [
    "AUTO",
    "DTYPES",
    "STORED_DTYPES",
    "Ensemble",
    "Plan",
    "Slot",
    "Steps",
    "Stored",
    "allocate",
    "check_steps",
    "stored_as",
    "StoredDtype",
    "bytes_each",
    "document",
    "file_bytes",
    "TensorPlan",
    "genome_file_bytes",
    "make_plan",
    "register",
    "as_stored",
    "stored_name",
]
