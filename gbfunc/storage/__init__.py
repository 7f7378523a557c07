"""All that reads or writes files: the genome's file, and checkpoints of a training. No pickle.

A checkpoint is of the full state, which is tiny: one saved on N ranks is resumed on any number.
"""
