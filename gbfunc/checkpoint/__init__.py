"""Checkpoints: a whole training state and what its loop must know to go on, as one sealed file a step. No pickle.

A checkpoint is always of the full state, whatever the number of ranks: the genome is tiny, and bringing its shards
together costs less than one step does. So a state saved on N ranks is resumed on any number, one process writes, and
one rename commits.
"""

from gbfunc.checkpoint.load import Checkpoint, load_checkpoint
from gbfunc.checkpoint.save import Checkpointer

__all__ = ["Checkpoint", "Checkpointer", "load_checkpoint"]
