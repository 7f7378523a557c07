"""From a genome to the p-net's weights, in one autograd graph: one path, in whatever form a layer takes them."""

from gbfunc.generation.choose import generate, generate_piece, make_generator, to_serve
from gbfunc.generation.generator import Generator

__all__ = ["Generator", "generate", "generate_piece", "make_generator", "to_serve"]
