"""Measured comparisons: `bench` of speed, memory and traffic, `compare` of accuracy at equal bytes."""
