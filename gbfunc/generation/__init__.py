"""Generates the p-net's weights from a genome in one autograd graph: dense, as factors, or as another `WeightForm`."""

from gbfunc.generation.choose import generate, generate_piece, make_generator, to_serve
from gbfunc.generation.generator import Generator

__all__ = ["Generator", "generate", "generate_piece", "make_generator", "to_serve"]
