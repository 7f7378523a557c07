"""From a genome to the p-net's weights, in one autograd graph: one path, in whatever form a layer takes them."""

from gbfunc.generate.generator import Generator, generate
from gbfunc.generate.piece import generate_piece

__all__ = ["Generator", "generate", "generate_piece"]
