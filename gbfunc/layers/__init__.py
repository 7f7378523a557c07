"""Layers of a p-net: how weights are folded from matrices (`kinds`), and how layers compute with generated weights."""

from gbfunc.layers.kinds import KINDS, LayerKind, layer_kind

__all__ = ["KINDS", "LayerKind", "layer_kind"]
