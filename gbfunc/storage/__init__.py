"""Genome files and training checkpoints, read and written without pickle."""
