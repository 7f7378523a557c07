"""Comparisons on a user's machine: `bench` measures speed and memory, `compare` accuracy at equal numbers of bytes."""
