"""All that reads or writes files: the genome's file, and checkpoints of a training. No pickle.

A checkpoint is of the full state, which is tiny: one saved on N ranks is resumed on any number.
"""

from gbfunc.storage.checkpoint import Checkpoint, Checkpointer, load_checkpoint
from gbfunc.storage.genome_file import is_genome_header, load, load_metadata, save

__all__ = ["Checkpoint", "Checkpointer", "is_genome_header", "load", "load_checkpoint", "load_metadata", "save"]
