"""Formats of genomes: how numbers are stored, where they stand in a file, and how many bytes a file takes.

`rounding` and `steps` quantise, `symbols` and `step_stream` code integers, `layout` and `compact` lay files out, and
`sizes` counts their bytes. Functions take a plan as it is and read no files; `gbfunc.storage` does.
"""

from gbfunc.formats.compact import Compact, pack
from gbfunc.formats.rounding import BITS, STORED_DTYPES, StoredDtype, stored_name
from gbfunc.formats.sizes import document, file_bytes, genome_file_bytes
from gbfunc.formats.step_stream import allocate
from gbfunc.formats.steps import AUTO, Steps, Stored, as_stored, bytes_each, check_steps, stored_as

__all__ = ["AUTO", "BITS", "STORED_DTYPES", "Compact", "Steps", "Stored", "StoredDtype", "allocate", "as_stored"]
__all__ += [
    "bytes_each",
    "check_steps",
    "document",
    "file_bytes",
    "genome_file_bytes",
    "pack",
    "stored_as",
    "stored_name",
]
