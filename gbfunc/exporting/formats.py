"""The formats of exported files: for each format, functions to write a traced program and to run the written file."""

from __future__ import annotations

import io
import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gbfunc.exporting.program import BATCH, Inputs, Run, Traced, quiet
from gbfunc.extras import import_extra

_IREE_FLAGS = (
    # Do not evaluate constant expressions: the file must contain the genome instead of the weights.
    "--iree-opt-const-eval=false",
    "--iree-opt-const-expr-hoisting=false",
    "--iree-llvmcpu-debug-symbols=false",
    "--iree-llvmcpu-target-cpu=generic",
    "--iree-vm-bytecode-module-strip-source-map=true",
    "--iree-vm-emit-polyglot-zip=false",
)


def _to_pt2(traced: Traced) -> bytes:
    traced.program.example_inputs = None
    raw, packed = io.BytesIO(), io.BytesIO()
    with quiet():
        torch.export.save(traced.program, raw)
    # Compress the file, because torch does not. `ZipInfo` has a fixed date, so equal programs have equal bytes.
    with zipfile.ZipFile(raw) as source, zipfile.ZipFile(packed, "w") as target:
        for entry in source.infolist():
            target.writestr(zipfile.ZipInfo(entry.filename), source.read(entry), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _run_pt2(data: bytes, folder: Path) -> Run:
    with quiet():
        net = torch.export.load(io.BytesIO(data)).module()
    return lambda inputs: inputs.outputs_of(net)


def _to_aoti(traced: Traced) -> bytes:
    with tempfile.TemporaryDirectory(prefix="gbfunc-") as folder, quiet():
        path = Path(folder, "model.pt2")
        torch._inductor.aoti_compile_and_package(traced.program, package_path=str(path))
        return path.read_bytes()


def _run_aoti(data: bytes, folder: Path) -> Run:
    path = folder / "model.pt2"
    path.write_bytes(data)
    net = torch._inductor.aoti_load_package(str(path))
    return lambda inputs: inputs.outputs_of(net)


def _to_onnx(traced: Traced) -> bytes:
    packages = ("onnx_ir", "onnx_ir.passes.common", "onnxscript.optimizer", "onnx")
    ir, passes, optimizer, _ = (import_extra(x, "an ONNX model", "gbfunc[onnx]") for x in packages)
    with quiet():
        options = {"output_names": traced.outputs, "dynamic_shapes": traced.dynamic_shapes}
        exported = torch.onnx.export(traced.program, dynamo=True, optimize=False, verbose=False, **options)
    assert exported is not None
    model = exported.model
    # Fold only small constants, not weights. `optimizer.optimize` of onnxscript 0.7.2 changed weights.
    optimizer.fold_constants(model, input_size_limit=16, output_size_limit=16)
    kinds = passes.DeduplicateInitializersPass, passes.CommonSubexpressionEliminationPass
    for change in (*kinds, passes.RemoveUnusedNodesPass, passes.ClearMetadataAndDocStringPass):
        change()(model)
    # Shorten the names of intermediate values to numbers. Inputs, outputs and weights keep their names.
    inner = (x for node in model.graph for x in node.outputs if x not in set(model.graph.outputs))
    for number, value in enumerate(inner):
        value.name = f"v{number}"
    for node in model.graph:
        node.name = ""
    proto = ir.to_proto(model)
    proto.graph.ClearField("value_info")
    if traced.dynamic_shapes is None:
        _name_sizes(proto.graph)
    if (size := proto.ByteSize()) >= 2**31:
        raise ValueError(f"an ONNX file must be below 2 GiB, got {size:,} bytes: pass weights='genome'")
    return proto.SerializeToString(deterministic=True)


def _name_sizes(graph: Any) -> None:
    sizes = [list(value.type.tensor_type.shape.dim) for value in (*graph.input, *graph.output)]
    inputs = sizes[: len(graph.input)]
    lengths = dict.fromkeys(size.dim_param for shape in inputs for size in shape[1:] if size.dim_param)
    names = {symbol: f"length_{i}" if i else "length" for i, symbol in enumerate(lengths)}
    names |= {size.dim_param: BATCH for shape in inputs for size in shape[:1] if size.dim_param}
    for size in (size for shape in sizes for size in shape if size.dim_param in names):
        size.dim_param = names[size.dim_param]


def _run_onnx(data: bytes, folder: Path) -> Run:
    runtime = import_extra("onnxruntime", "an ONNX model's run", "gbfunc[onnx]")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]

    def outputs(inputs: Inputs) -> list[Tensor]:
        feed = {name: x.numpy() for name, x in zip(names, inputs.tensors, strict=True)}
        return [torch.from_numpy(x) for x in session.run(None, feed)]

    return outputs


def _to_iree(traced: Traced) -> bytes:
    packages = ("iree.compiler.tools", "iree.compiler.tools.import_onnx.__main__")
    tools, importer = (import_extra(x, "a module for IREE", "gbfunc[iree]") for x in packages)
    with tempfile.TemporaryDirectory(prefix="gbfunc-") as folder:
        model, source = Path(folder, "model.onnx"), Path(folder, "model.mlir")
        model.write_bytes(_to_onnx(traced))
        importer.main(importer.parse_arguments([str(model), "-o", str(source)]))
        try:
            return tools.compile_file(str(source), target_backends=["llvm-cpu"], extra_args=[*_IREE_FLAGS])
        except tools.CompilerToolError as error:
            lacking = re.search(r'operator "onnx\.(\w+)"', str(error))
            what = f"the operator {lacking[1]}" if lacking else f"the model ({str(error)[:300]})"
            raise ValueError(f"IREE cannot compile {what}: write .onnx or .pt2 instead") from error


def _run_iree(data: bytes, folder: Path) -> Run:
    runtime = import_extra("iree.runtime", "an IREE module's run", "gbfunc[iree]")
    module = runtime.load_vm_flatbuffer(data, driver="local-sync")
    name = next(n for n in module.vm_module.function_names if not n.startswith("__") and not n.endswith("$async"))

    def outputs(inputs: Inputs) -> list[Tensor]:
        found = module[name](*(x.numpy() for x in inputs.tensors))
        return [torch.from_numpy(x.to_host().copy()) for x in (found if isinstance(found, tuple) else (found,))]

    return outputs


class Format(NamedTuple):
    """A file format: `write` converts a program to bytes, `read` converts bytes to a function that runs the program."""

    suffix: str
    write: Callable[[Traced], bytes]
    read: Callable[[bytes, Path], Run]  # Arguments: the bytes, and a folder for temporary files


FORMATS: Mapping[str, Format] = {
    "onnx": Format(".onnx", _to_onnx, _run_onnx),
    "pt2": Format(".pt2", _to_pt2, _run_pt2),
    "aoti": Format("", _to_aoti, _run_aoti),  # No suffix: the files end in `.pt2`, which selects "pt2"
    "iree": Format(".vmfb", _to_iree, _run_iree),
}
