"""All that reads or writes files: the genome's file, and checkpoints of a training. No pickle.

A checkpoint is always of the full state, whatever the number of ranks: the genome is tiny, and bringing its shards
together costs less than one step does. So a state saved on N ranks is resumed on any number, one process writes, and
one rename commits.
"""

from gbfunc.storage.checkpoint import Checkpoint, Checkpointer, load_checkpoint
from gbfunc.storage.genome_file import load, save

__all__ = ["Checkpoint", "Checkpointer", "load", "load_checkpoint", "save"]
