"""Formats of genomes: how files store numbers, the layout of files, and the size of files.

`rounding` and `steps` round numbers to integers, `symbols` and `step_stream` compress integers, `layout` and `compact`
arrange the bytes of a file, and `sizes` counts the bytes. No function here reads files or checks a plan:
`gbfunc.storage` reads and checks files.
"""

# ruff: noqa: F401
from gbfunc.formats.compact import Compact, pack
from gbfunc.formats.rounding import BITS, STORED_DTYPES, StoredDtype, stored_name
from gbfunc.formats.sizes import document, file_bytes, genome_file_bytes
from gbfunc.formats.step_stream import allocate
from gbfunc.formats.steps import AUTO, Steps, Stored, as_stored, bytes_each, check_steps, stored_as
