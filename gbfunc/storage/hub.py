"""Genome folders for the Hugging Face hub: `genome.safetensors`, `config.json`, and a model card, `README.md`.

Uploads and downloads need the package huggingface_hub. Reading and writing local folders does not need the package.
"""

import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from gbfunc.extras import import_extra
from gbfunc.files import replace_file
from gbfunc.formats import Stored
from gbfunc.formats.layout import FORMAT
from gbfunc.plan import Plan
from gbfunc.storage.genome_file import load, save
from gbfunc.types import Genome, GenomeLike, Params

GENOME_FILE = "genome.safetensors"

_HUB = ("huggingface_hub", "the Hugging Face hub", "huggingface_hub")
# Hugging Face's `Trainer` passes these options to `save_pretrained`. The options are ignored.
_LARGE_FILES = "is_main_process max_shard_size safe_serialization save_function save_peft_format variant".split()

_CARD = """{head}
# A genome{of}

{genome_params:,} trained parameters in a file of {genome_bytes:,} bytes, from which
gbfunc generates {pnet_params:,} weights ({dense_bytes:,} bytes){base}.

```python
import gbfunc as gb

pnet = ...  # the network that it was made for
module = gb.GenomeModule.from_pretrained("{place}", pnet=pnet)
outputs = module.eval()(...)
```
"""


def save_pretrained(
    plan: Plan,
    genome: GenomeLike,
    folder: str | os.PathLike[str],
    *,
    dtype: Stored | None = None,
    push_to_hub: bool = False,
    repo_id: str | None = None,
    state_dict: Params | None = None,
    **options: Any,
) -> str | None:
    """Write a genome folder, as `GenomeModule.save_pretrained` does. A model card in the folder is not replaced."""
    options = {k: x for k, x in options.items() if k not in _LARGE_FILES}
    hub_options = [*options] + ["repo_id"] * (repo_id is not None)
    if hub_options and not push_to_hub:
        raise TypeError(f"save_pretrained takes {', '.join(hub_options)} with push_to_hub=True only")
    place = Path(folder)
    _write(place, plan, genome, dtype, "FOLDER OR NAME")
    if state_dict is not None:
        copies = {k: x.clone().contiguous() for k, x in state_dict.items()}
        save_file(copies, place / "model.safetensors", {"format": "pt"})
    return push_pretrained(plan, genome, repo_id or place.name, dtype=dtype, **options) if push_to_hub else None


def push_pretrained(
    plan: Plan,
    genome: GenomeLike,
    repo_id: str,
    *,
    dtype: Stored | None = None,
    branch: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    **options: Any,
) -> str:
    """Upload a genome folder, as `GenomeModule.push_to_hub` does, and return the URL of the commit."""
    api = import_extra(*_HUB).HfApi(token=token)
    inspect.signature(api.upload_folder).bind_partial(**options)
    with tempfile.TemporaryDirectory(prefix="gbfunc-") as folder:
        _write(Path(folder), plan, genome, dtype, repo_id)
        name = api.create_repo(repo_id=repo_id, private=private, exist_ok=True).repo_id
        return api.upload_folder(repo_id=name, folder_path=Path(folder), revision=branch, **options)


def load_pretrained(
    name: str | os.PathLike[str], factories: Sequence[Callable[..., Any]] = (), **options: Any
) -> tuple[Plan, Genome]:
    """Load plan and genome from a folder or a hub repository. `options` are as in `GenomeModule.from_pretrained`."""
    place = Path(name)
    if place.is_dir():
        return load(place / GENOME_FILE, factories=factories)
    hub = import_extra(*_HUB)
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        return load(hub.hf_hub_download(os.fspath(name), GENOME_FILE, **options), factories=factories)
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        words = "must be a folder or a hub repository with a genome"
        raise FileNotFoundError(f"{os.fspath(name)!r} {words}: {error}") from error


def _write(folder: Path, plan: Plan, genome: GenomeLike, dtype: Stored | None, place: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {
        "genome_params": plan.genome_params,
        "genome_bytes": save(folder / GENOME_FILE, plan, genome, dtype),
        "pnet_params": plan.pnet_params,
        "dense_bytes": plan.dense_bytes,
    }
    config = {
        "format": FORMAT,
        "gbfunc_version": sys.modules["gbfunc"].__version__,
        "base": None if plan.base is None else plan.base._asdict(),
        "plan": {"digest": plan.digest(), **sizes},
    }
    replace_file(folder / "config.json", f"{json.dumps(config, indent=2)}\n".encode())
    if (folder / "README.md").exists():
        return
    base, head, words = plan.base, card_head("gbfunc", ["gbfunc", "hypernetwork"]), {"of": "", "base": ""}
    if base is not None:
        head = card_head("gbfunc", ["gbfunc", "hypernetwork", "adapter"], base.name)
        words["of"] = f" of {quoted(base.name) if base.name else 'a pretrained network'}"
        words["of"] += f" (revision {quoted(base.revision)})" if base.revision else ""
        words["base"] = f", deltas of {base.params:,} frozen parameters with the digest {quoted(base.digest)}"
    card = _CARD.format(head=head, place=place, **words, **sizes)
    replace_file(folder / "README.md", card.encode())


def quoted(text: str) -> str:
    """Format an untrusted name as Markdown code. Characters that could end the code or start HTML become `?`."""
    plain = re.sub(r"[^\w ./:@+-]", "?", text[:200])
    return f"`{plain}`"


def card_head(library: str, tags: Sequence[str], base: str = "") -> str:
    """Return the metadata of a model card: YAML between lines of `---`, with all strings as JSON."""
    about = {"base_model": base} if base else {}
    lines = [f"{k}: {json.dumps(v)}" for k, v in (about | {"library_name": library, "tags": [*tags]}).items()]
    return "\n".join(["---", *lines, "---", ""])
