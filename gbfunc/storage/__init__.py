"""Genome files and training checkpoints, read and written without pickle.

A checkpoint holds the full state, which is small. A run can resume on a different number of ranks.
"""
