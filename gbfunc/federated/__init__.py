"""Federated learning with Flower and any of its strategies: messages contain genomes instead of weights."""

try:
    import flwr  # noqa: F401  # pyright: ignore[reportMissingImports]
except ImportError as _error:
    raise ImportError("federated learning needs its extra package: pip install 'gbfunc[flower]'") from _error

from gbfunc.federated.client import client_app
from gbfunc.federated.server import GenomeStrategy, Round
from gbfunc.federated.simulation import LocalGrid, Traffic, partition
from gbfunc.federated.wire import FORMATS, Wire

__all__ = ["FORMATS", "GenomeStrategy", "LocalGrid", "Round", "Traffic", "Wire", "client_app", "partition"]
