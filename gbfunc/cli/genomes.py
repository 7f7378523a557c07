"""The commands `eval`, `predict`, `sample` and `export`, which read a genome file. Also reads teacher networks.

Suffixes: C channels, h rows and w columns of an image, K classes.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.cli import printable
from gbfunc.cli.commands import Eval, Export, Predict, Sample
from gbfunc.cli.job import SAID, chosen, load_task, read_json
from gbfunc.cli.options import DataOptions, PNetOptions, flags
from gbfunc.cli.output import open_folder, print_metrics
from gbfunc.exporting import export_module, page
from gbfunc.exporting.page import layers_in_a_row
from gbfunc.exporting.qr import write_qr
from gbfunc.files import replace_file
from gbfunc.storage.genome_file import is_genome, load_dtype
from gbfunc.tasks import Task, continue_text, logits_of
from gbfunc.tasks.base import History
from gbfunc.tasks.chat import chat_tokens
from gbfunc.tasks.pnets import Interface, find_pnet
from gbfunc.tasks.pnets.base import AtMost, is_import_path
from gbfunc.tasks.pnets.hugging_face import PREFIX
from gbfunc.tasks.text import pretrained_tokens, read_text
from gbfunc.types import JSON
from gbfunc.untrusted import read_arrays, read_picture

GENOME_FILE, BEST_FILE = "genome.safetensors", "best.safetensors"


def run_eval(options: Eval) -> None:
    path = options.genome
    plan, task, net = read_genome(path, options)
    metrics = genome_metrics(plan, path, net, task)
    report = plan.report(load_dtype(path), gb.load(path)[1], gb.load_metadata(path))
    print(*map(printable, report.split("\n")), "", sep="\n")
    print_metrics(metrics, task)


def run_sample(options: Sample) -> None:
    said = said_by(options.genome)
    o = options if options.task or "task" in said else replace(options, task="text")
    _, task, net = read_genome(o.genome, o, bare="pretrained" in said or o.pretrained is not None)
    written = continue_text(net, task, o.prompt, o.tokens, temperature=o.temperature, seed=o.seed)
    print(written if task.name == "chat" else o.prompt + written)


def read_genome(
    path: Path, data: DataOptions, task: Task | None = None, *, bare: bool = False
) -> tuple[gb.Plan, Task, nn.Module]:
    """Read plan, task and network from a file. With `bare`, load no data of the task if the file describes inputs."""
    said = said_by(path)
    if task is None:
        described = bare and data.data_dir is None and "interface" in said
        data = _described(path, data, said, described)
        task = _task_of(data, said) if described else load_task(data)
        differ = {"classes": "classes {}, the data {}", "alphabet": "another alphabet than the data's text"}
        for key, words in differ.items():
            in_file, in_data = said.get(key), task.about.get(key)
            if None not in (in_file, in_data) and in_file != in_data:
                words = words.format(in_file, in_data)
                raise ValueError(f"{path} has {words}: --data-dir must name data with the same ones")
    # Load the genome after the task: the modules of --pnet and --task may register types of g-nets.
    plan, genome = gb.load(path)
    # The seed initializes a base without pretrained weights. The limit protects the memory from a malicious file.
    with AtMost(32 * (plan.pnet_params + plan.buffer_bytes) + (1 << 26)):
        net = task.build(getattr(data, "seed", 0))
    return plan, task, _network(path, plan, genome, net)


def said_by(path: Path) -> Mapping[str, Any]:
    said = gb.load_metadata(path)
    return said if isinstance(said, Mapping) else {}


def _described(path: Path, options: DataOptions, said: Mapping[str, Any], described: bool) -> DataOptions:
    if not (options.task or said.get("task") or described):
        cure = f"pass --task NAME --pnet {said.get('pnet', 'NAME')}, or write them by gb.save(..., metadata=...)"
        raise ValueError(f"{path} does not say its task: {cure}, as the guide 'Files and exports' shows")
    # If the user chose a task other than that of the file, ignore the options in the file.
    said = said if options.task in ("", said.get("task", options.task)) else {}
    taken: JSON = {}
    code: list[str] = []
    for name, usual in SAID.items():
        if name not in said or getattr(options, name, None) != usual:
            continue
        value: Any = said[name]
        taken[name] = value if isinstance(value, str) else json.dumps(value)
        # A file must not run code: refuse names of functions, and of environments that import a module (module:name).
        word = str(value).removeprefix(PREFIX) if name == "pnet" else value
        if isinstance(word, str) and (is_import_path(word) or (name == "env" and ":" in word)):
            code.append(f"--{name} {value}")
    options = replace(options, **{"task": options.task or "digits"} | taken)
    if code:
        bundled = described or ":" in options.task or options.task in ("digits", "text", "control")
        code += ["--data-dir FOLDER"] * (not bundled and options.data_dir is None)
        raise ValueError(f"{path} names code that a file may not run: if you trust it, pass {' '.join(code)}")
    return options


def _task_of(options: DataOptions, said: Mapping[str, Any]) -> Task:
    try:
        inputs, *rest = said["interface"]
        interface = Interface(tuple(inputs), *rest)
        if not all(type(n) is int and n >= 1 for n in (*interface.inputs, interface.outputs)):
            raise TypeError(f"expected positive numbers, got {said['interface']!r}")
    except (TypeError, ValueError) as error:
        raise ValueError(f"the genome's file does not say what its inputs are ({error!r}): pass --data-dir") from error
    if options.task != (expected := said.get("task", options.task)):
        raise ValueError(f"the genome's file has the task {expected}, got --task {options.task}: pass --data-dir too")
    config, coders = read_json("--pnet-config", options.pnet_config) | chosen(options, "pretrained"), {}
    if interface.vocabulary and options.pretrained is None:
        raise ValueError("the genome's tokens were learned from its texts: pass their folder as --data-dir")
    if options.pretrained is not None and (interface.vocabulary or interface.tokens):
        most, chats = interface.inputs[0] if interface.vocabulary else None, options.task == "chat"
        tokens = chat_tokens(options.pretrained)[0] if chats else pretrained_tokens(options.pretrained, most)
        coders = {"encode": tokens.encode, "decode": tokens.decode}
    pnet = find_pnet(options.pnet or "mlp", interface, config)
    return Task(options.task, interface, None, None, None, pnet, **coders)


def _network(path: Path, plan: gb.Plan, genome: gb.Genome, pnet: nn.Module) -> nn.Module:
    try:
        return gb.materialize(plan, genome, pnet).eval()
    except ValueError as error:
        if plan.base is None:
            cure = "the same --pnet and --pnet-config as in its training"
            raise ValueError(f"{path} does not fit the p-net; it needs {cure}: {error}") from error
        named = plan.base.name or f"a network of {plan.base.params:,} parameters"
        raise ValueError(f"{path} is an adapter of {named}, the base that --pretrained must name: {error}") from error


def genome_metrics(plan: gb.Plan, path: Path, net: nn.Module, task: Task, history: History = ()) -> dict[str, object]:
    dense, size = plan.dense_bytes, path.stat().st_size
    about = {"task": task.name, "metric": task.metric.name, "pnet": task.pnet.name, "pnet_config": {**task.pnet.config}}
    params = {"pnet_params": plan.pnet_params, "genome_params": plan.genome_params, "ratio_params": plan.ratio_params}
    n_bytes = {"dense_bytes": dense, "genome_bytes": size, "ratio_bytes": dense / size}
    base = {"base": None if plan.base is None else plan.base._asdict()}
    return {**about, **params, **n_bytes, **base, **measure(task, net), **task.facts(history)}


def measure(task: Task, net: nn.Module, prefix: str = "") -> dict[str, float]:
    """Return a network's metrics on validation and test data: `{prefix}val_accuracy`, `{prefix}test_accuracy`, ..."""
    measured = {split: task.measured(net, getattr(task, split)) for split in ("val", "test")}
    return {f"{prefix}{split}_{name}": v for split, metrics in measured.items() for name, v in metrics.items()}


def teacher_file(path: Path) -> Path:
    names = (GENOME_FILE, "model.safetensors", "net.safetensors", "pytorch_model.bin", "model.pt")
    found = [path] if path.is_file() else [path / name for name in names if (path / name).is_file()]
    if not found:
        missing = f"{path} has none of {', '.join(names)}" if path.is_dir() else f"no such file or folder: {path}"
        raise FileNotFoundError(f"--teacher: {missing}")
    return found[0]


def read_teacher(path: Path, task: Task, options: PNetOptions) -> nn.Module:
    """Read a trained network: a genome file (of any p-net), a Hugging Face folder, or weights (.safetensors, .pt)."""
    file = teacher_file(path)
    try:
        with file.open("rb") as opened:
            pickled = opened.read(2) in (b"PK", b"\x80\x02")
        if not pickled and is_genome(file):
            if "pnet" not in said_by(file):
                return _network(file, *gb.load(file), task.build(0))
            own = options.pnet if is_import_path(options.pnet or "") else None
            data_dir = options.data_dir if task.interface.vocabulary else None
            without = replace(options, pnet=own, pnet_config="{}", sizes=None, data_dir=data_dir)
            return read_genome(file, without, bare=True)[2]
        net = task.build(0)
        if (path / "config.json").is_file() and hasattr(net, "from_pretrained"):
            net, found = net.from_pretrained(path, output_loading_info=True, local_files_only=True)  # pyright: ignore[reportCallIssue]
            if missing := found["missing_keys"]:
                raise ValueError(f"expected weights of all parameters, got none for {sorted(missing)}")
        elif pickled:
            weights: Any = torch.load(file, map_location="cpu", weights_only=True)
            # Checkpoints of other programs often store the weights under one of these keys.
            for key in ("state_dict", "model_state_dict", "model"):
                if isinstance(weights, Mapping) and isinstance(weights.get(key), Mapping):
                    weights = weights[key]
            if not isinstance(weights, Mapping) or not all(isinstance(x, Tensor) for x in weights.values()):
                raise ValueError(f"expected tensors by name, such as net.state_dict(), got {type(weights).__name__}")
            net.load_state_dict({re.sub(r"^(module\.|_orig_mod\.)+", "", name): x for name, x in weights.items()})
        else:
            load_model(net, file)
    except UnpicklingError as error:
        cure = "save net.state_dict() with torch.save, or as safetensors"
        raise ValueError(f"--teacher: {file} has objects other than weights, which are not run: {cure}") from error
    except (SafetensorError, RuntimeError, ValueError) as error:
        named = " (modules must have the same names; --pnet file:function builds another p-net)"
        words = named, ", as a .pt or .safetensors file, or be a genome"
        cure = words[isinstance(error, SafetensorError)] * (not isinstance(error, ValueError))
        raise ValueError(f"--teacher: {file} must have the weights of {task.pnet.name}{cure}: {error}") from error
    return net.eval()


@torch.no_grad()
def run_predict(options: Predict) -> None:
    if not options.inputs:
        raise ValueError("predict needs files to classify, got none: name images or texts")
    said = said_by(options.genome)
    # Data are needed only if the file does not describe the inputs, or if the tokenizer was learned from the data.
    _, task, net = read_genome(options.genome, options, bare=True)
    if task.interface.tokens or task.interface.actions:
        raise ValueError(f"predict needs a task with classes, got {task.name}: use sample for a language model")
    names = said.get("classes") or [str(i) for i in range(task.interface.outputs)]
    if not isinstance(names, list) or len(names) != task.interface.outputs:
        raise ValueError(f"{options.genome} must name {task.interface.outputs} classes, got {names!r}")
    for path in options.inputs:
        for name, x in _texts(path, task) if task.interface.vocabulary else _images(path, task, said):
            probabilities_K = logits_of(net(x[None]))[0].softmax(0)
            best = probabilities_K.topk(min(options.top, len(names)))
            ranked = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            print("\t".join([name, *(f"{printable(str(names[k]))}\t{value:.4f}" for k, value in ranked)]), flush=True)


def _texts(path: Path, task: Task) -> Iterator[tuple[str, Tensor]]:
    assert task.encode is not None
    for i, line in enumerate(read_text(path).splitlines(), 1):
        if line.strip():
            yield f"{path}:{i}", task.encode(line.strip())


def _images(path: Path, task: Task, said: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    shape = task.interface.inputs
    if not {"mean", "std"} <= said.keys():
        raise ValueError(f"the genome's file lacks mean and std of {task.name}'s pixels: gb.save(..., metadata=...)")
    mean, std, white = (_numbers(said, name, shape[0]) for name in ("mean", "std", "white"))
    if not (std > 0).all():
        raise ValueError(f"the genome's file must have a std above 0, got {said['std']!r:.80}")
    if path.suffix.lower() in (".npy", ".npz"):
        found = _arrays(path, shape)
    else:
        picture = read_picture(path, "L" if shape[0] == 1 else "RGB", "picture, .npy or .npz file").resize(shape[:0:-1])
        pixels_hwC = np.asarray(picture, np.float32).reshape(*shape[1:], shape[0])
        found = [(str(path), pixels_hwC.transpose(2, 0, 1) * (white / 255))]
    for name, pixels_Chw in found:
        yield name, torch.from_numpy(((pixels_Chw - mean) / std).astype(np.float32))


def _numbers(said: Mapping[str, Any], name: str, channels: int) -> NDArray[np.float32]:
    value = said.get(name, 255)
    numbers = np.asarray(value, object).ravel().tolist()
    known = all(type(x) in (int, float) and abs(x) < 1e30 for x in numbers)
    if not known or len(numbers) not in ({1} if name == "white" else {1, channels}):
        raise ValueError(f"the genome's file must have a number, or one per channel, as {name}, got {value!r:.80}")
    return np.array(numbers, np.float32).reshape(-1, 1, 1)


def _arrays(path: Path, shape: tuple[int, ...]) -> Iterator[tuple[str, NDArray[Any]]]:
    for name, array in read_arrays(path).items():
        images = _shaped(array, shape)
        if images is None or not len(images) or array.dtype.kind == "b" or not np.isfinite(array).all():
            got = f"{array.dtype} {array.shape} in {name or 'array'}"
            raise ValueError(f"{path} must have images of shape {shape} in finite numbers, got {got}")
        for i, image in enumerate(images):
            yield f"{path}[{name}, {i}]" if name else f"{path}[{i}]", image


def _shaped(array: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any] | None:
    for kind in (shape, *([shape[1:]] if shape[0] == 1 else ()), last := (*shape[1:], shape[0])):
        if array.shape[-len(kind) :] == kind and array.ndim - len(kind) in (0, 1):
            images = array.reshape(-1, *kind)
            return images.transpose(0, 3, 1, 2) if kind == last != shape else images.reshape(-1, *shape)
    return None


def run_export(options: Export) -> None:
    out = options.out
    if out.exists() and options.genome.exists() and out.samefile(options.genome):
        raise ValueError(f"--out must differ from the genome's file, got {out}: choose another name")
    if out.is_dir():
        raise IsADirectoryError(f"--out must be a file, got the folder {out}")
    if options.qr is not None or out.suffix.lower() == ".html":
        return _to_browser(options)
    if out.suffix.lower() in (".png", ".svg"):
        raise ValueError(f"{out} is a QR code, which opens a page: pass the page's address as --qr PAGE")
    plan, task, net = read_genome(options.genome, options, bare=True)
    # Random inputs are enough to trace the program, and to compare its outputs with those of the p-net.
    shape, generator = (4, *task.interface.inputs), torch.Generator().manual_seed(0)
    if vocabulary := task.interface.vocabulary or task.interface.tokens * task.interface.outputs:
        x = torch.randint(vocabulary, shape, generator=generator)
    else:
        x = torch.randn(shape, generator=generator)
    with open_folder(out.parent):
        if plan.base is not None and options.weights != "genome":
            # Export the network without the genome: the weights already include the adapter's changes.
            result = export_module(out, net, x, options.to)
        else:
            result = gb.export(out, plan, gb.load(options.genome)[1], net, x, options.weights, options.to)
    error = "" if result.max_error is None else f"; its outputs are those of the p-net within {result.max_error:.1e}"
    print(f"{out}: {result.bytes:,} bytes, the genome has {options.genome.stat().st_size:,}{error}")


def _to_browser(options: Export) -> None:
    if (options.weights or options.to) is not None:
        raise ValueError("--weights and --to are for programs: pages and QR codes always have the genome")
    said, data = said_by(options.genome), options.genome.read_bytes()
    for name in ("task", "pnet"):
        if (value := getattr(options, name)) not in (None, "", in_file := said.get(name, value)):
            raise ValueError(f"a page has the {name} of the genome's file, {in_file}: drop {flags([name])} {value}")
    page.check(gb.load(options.genome)[0])
    with open_folder(options.out.parent):
        if options.qr is not None:
            write_qr(options.out, data, options.qr)
            print(f"{options.out}: the code of {options.qr} with the {len(data):,} bytes of the genome")
            return
        networks, alphabets, unknown = {}, {}, ""
        if said.get("pnet") not in page.PNETS:
            try:
                if lacks := [name for name in ("pnet", "interface", "mean", "std") if name not in said]:
                    cure = "write them by gb.save(..., metadata=...), as the guide 'Files and exports' shows"
                    raise ValueError(f"the file does not say its {', '.join(lacks)}: {cure}")
                net = read_genome(options.genome, options, bare=True)[2]
                networks[str(said["pnet"])] = page.network(layers_in_a_row(net), said)
            except (ValueError, ImportError) as error:
                unknown = f"; it shows how the weights grow, and does not run the network: {error}"
        if not unknown and "alphabet" in said:
            _, task, _ = read_genome(options.genome, options)
            assert task.decode is not None
            characters = task.decode(list(range(task.interface.outputs)))
            if len(characters) != task.interface.outputs:
                raise ValueError("a page needs a text task with characters as tokens, got byte pairs: export to .onnx")
            alphabets[str(said["alphabet"])] = characters
        text = page.page(data, alphabets, networks).encode()
        replace_file(options.out, text)
    print(f"{options.out}: {len(text):,} bytes, the genome has {len(data):,}{unknown}")
