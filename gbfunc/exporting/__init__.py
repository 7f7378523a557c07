"""Exports a generated network to files for other programs: ONNX, torch.export, AOTInductor, IREE, or dense weights."""

from gbfunc.exporting.base import Exported, export, export_module
from gbfunc.exporting.formats import FORMATS

__all__ = ["FORMATS", "Exported", "export", "export_module"]
