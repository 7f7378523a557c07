"""From a genome to the p-net's parameters, in one autograd graph."""

from gbfunc.generate.generator import Generator, generate

__all__ = ["Generator", "generate"]
