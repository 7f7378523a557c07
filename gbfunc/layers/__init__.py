"""Layers of a p-net: how their weights fold to matrices (`kinds`), and how they compute with generated weights."""

from gbfunc.layers.kinds import KINDS, LayerKind, layer_kind

__all__ = ["KINDS", "LayerKind", "layer_kind"]
