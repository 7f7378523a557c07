"""Exports a generated network to files that other programs run: ONNX, torch.export, AOTInductor, IREE, or weights."""

from gbfunc.exporting.base import Exported, export, export_module
from gbfunc.exporting.formats import FORMATS

__all__ = ["FORMATS", "Exported", "export", "export_module"]
