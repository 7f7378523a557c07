"""Layers of a p-net: their weights as matrices (`kinds`), and their forms when these are generated (`forms`)."""

from gbfunc.layers.kinds import KINDS, LayerKind, layer_kind

__all__ = ["KINDS", "LayerKind", "layer_kind"]
