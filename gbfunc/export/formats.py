"""The kinds of files: how each is made of a traced program, and run again."""

from __future__ import annotations

import io
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gbfunc.export.program import Inputs, Run, Traced, quiet
from gbfunc.extras import import_extra

_FOLDED = 16
"""Entries of a constant up to which it may stand in the place of what computes it: sizes and indices, no weights."""

_LARGEST_ONNX = 2**31 - 1

_IREE_FLAGS = (
    # Constants that are computed stay computed: the file holds the genome, not the weights.
    "--iree-opt-const-eval=false",
    "--iree-opt-const-expr-hoisting=false",
    "--iree-llvmcpu-debug-symbols=false",
    "--iree-vm-bytecode-module-strip-source-map=true",
    "--iree-vm-emit-polyglot-zip=false",
)


def to_pt2(traced: Traced) -> bytes:
    """A file that `torch.export.load` reads; its description is compressed, which torch leaves out."""
    traced.program.example_inputs = None
    raw, packed = io.BytesIO(), io.BytesIO()
    with quiet():
        torch.export.save(traced.program, raw)
    with zipfile.ZipFile(raw) as source, zipfile.ZipFile(packed, "w") as target:
        for entry in source.infolist():
            text = entry.filename.endswith(".json")
            # The date is fixed: the same program gives the same bytes.
            info = zipfile.ZipInfo(entry.filename)
            info.compress_type = zipfile.ZIP_DEFLATED if text else zipfile.ZIP_STORED
            target.writestr(info, source.read(entry))
    return packed.getvalue()


def run_pt2(data: bytes, folder: Path) -> Run:
    """By torch."""
    with quiet():
        net = torch.export.load(io.BytesIO(data)).module()
    return lambda inputs: inputs.outputs_of(net)


def to_aoti(traced: Traced) -> bytes:
    """A package of machine code that `torch._inductor.aoti_load_package` and its C++ namesake load."""
    with tempfile.TemporaryDirectory(prefix="gbfunc-") as folder:
        path = Path(folder, "model.pt2")
        with quiet():
            torch._inductor.aoti_compile_and_package(traced.program, package_path=str(path))
        return path.read_bytes()


def run_aoti(data: bytes, folder: Path) -> Run:
    """By AOTInductor's runtime, which is part of torch."""
    path = folder / "model.pt2"
    path.write_bytes(data)
    net = torch._inductor.aoti_load_package(str(path))
    return lambda inputs: inputs.outputs_of(net)


def to_onnx(traced: Traced) -> bytes:
    """A model of standard operations; nothing that is computed of the genome is folded into it."""
    packages = ("onnx_ir", "onnx_ir.passes.common", "onnxscript.optimizer", "onnx")
    ir, passes, optimizer, _ = (import_extra(x, "an ONNX model", "gbfunc[onnx]") for x in packages)
    with quiet():
        # The shapes name dimensions, which the program has lost.
        made = torch.onnx.export(
            traced.program,
            dynamo=True,
            optimize=False,
            verbose=False,
            output_names=traced.outputs,
            dynamic_shapes=traced.dynamic_shapes,
        )
    assert made is not None
    model = made.model
    # Not `optimize`, whose rule for a product between reshapes made other weights of a tiled MLP g-net (0.7.2).
    optimizer.fold_constants(model, input_size_limit=_FOLDED, output_size_limit=_FOLDED)
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    inner = any(x.type in graphs for node in model.graph for x in node.attributes.values())
    for change in (
        # Of a loop whose result is a value from outside it leaves a graph that no runtime takes (onnx_ir 1.1).
        *([] if inner else [passes.IdentityEliminationPass()]),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.ClearMetadataAndDocStringPass(),
    ):
        change(model)
    _shorten(model.graph)
    proto = ir.to_proto(model)
    proto.graph.ClearField("value_info")
    if (size := proto.ByteSize()) > _LARGEST_ONNX:
        raise ValueError(f"one ONNX file holds less than 2 GiB, this model has {size:,} bytes: weights='genome'")
    return proto.SerializeToString(deterministic=True)


def _shorten(graph: Any) -> None:
    """Number what is computed; inputs, outputs and weights keep their names."""
    outputs = set(graph.outputs)
    numbered = (value for node in graph for value in node.outputs if value not in outputs)
    for number, value in enumerate(numbered):
        value.name = f"v{number}"
    for node in graph:
        node.name = ""


def run_onnx(data: bytes, folder: Path) -> Run:
    """By onnxruntime."""
    runtime = import_extra("onnxruntime", "an ONNX model's run", "gbfunc[onnx]")
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]

    def outputs(inputs: Inputs) -> list[Tensor]:
        given = {name: x.numpy() for name, x in zip(names, inputs.tensors, strict=True)}
        return [torch.from_numpy(x) for x in session.run(None, given)]

    return outputs


def to_iree(traced: Traced) -> bytes:
    """A module for IREE's runtime on any CPU of this machine's kind, compiled of the ONNX model."""
    packages = ("iree.compiler.tools", "iree.compiler.tools.import_onnx.__main__")
    tools, importer = (import_extra(x, "a module for IREE", "gbfunc[iree]") for x in packages)
    with tempfile.TemporaryDirectory(prefix="gbfunc-") as folder:
        model, source = Path(folder, "model.onnx"), Path(folder, "model.mlir")
        model.write_bytes(to_onnx(traced))
        importer.main(importer.parse_arguments([str(model), "-o", str(source)]))
        flags = [*_IREE_FLAGS, "--iree-llvmcpu-target-cpu=generic"]
        try:
            return tools.compile_file(str(source), target_backends=["llvm-cpu"], extra_args=flags)
        except tools.CompilerToolError as error:
            raise ValueError(f"IREE cannot compile the model: {str(error)[:300]}") from error


def run_iree(data: bytes, folder: Path) -> Run:
    """By IREE's runtime."""
    runtime = import_extra("iree.runtime", "an IREE module's run", "gbfunc[iree]")
    module = runtime.load_vm_flatbuffer(data, driver="local-sync")
    name = next(n for n in module.vm_module.function_names if not n.startswith("__") and not n.endswith("$async"))

    def outputs(inputs: Inputs) -> list[Tensor]:
        made = module[name](*(x.numpy() for x in inputs.tensors))
        return [torch.from_numpy(x.to_host().copy()) for x in (made if isinstance(made, tuple) else (made,))]

    return outputs


class Format(NamedTuple):
    """A kind of file.

    Attributes:
        suffix: of its files, "" where another format has it.
        write: from a program to the file's bytes.
        read: from the file's bytes, and a folder for what its runtime needs, to its program.
    """

    suffix: str
    write: Callable[[Traced], bytes]
    read: Callable[[bytes, Path], Run]


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "onnx": Format(".onnx", to_onnx, run_onnx),
        "pt2": Format(".pt2", to_pt2, run_pt2),
        "aoti": Format("", to_aoti, run_aoti),
        "iree": Format(".vmfb", to_iree, run_iree),
    }
)
"""Every kind of program by name."""
