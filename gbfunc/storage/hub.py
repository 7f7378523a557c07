"""A genome as a folder of the Hugging Face hub: `genome.safetensors`, `config.json`, and a model card, `README.md`.

By the hub's own mixin, which moves the files. The package huggingface_hub is imported when the first folder is written
or read.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from gbfunc.plan import Plan, StoredDtype
from gbfunc.plan.file_layout import FORMAT
from gbfunc.storage.genome_file import load, save
from gbfunc.types import Genome, GenomeLike

GENOME_FILE = "genome.safetensors"
_INSTALL = "folders of the Hugging Face hub need the package huggingface_hub: pip install huggingface_hub"

_CARD = """---
{head}
---

# A genome{of}

{genome_params:,} trained parameters in a file of {genome_bytes:,} bytes, from which
gbfunc generates {what} of {pnet_params:,} parameters ({dense_bytes:,} bytes).
{base}
```python
import gbfunc as gb

pnet = ...  # {pnet}
module = gb.GenomeModule.from_pretrained("{place}", pnet=pnet)
outputs = module.eval()(...)
```
"""


def save_pretrained(
    plan: Plan,
    genome: GenomeLike,
    folder: str | os.PathLike[str],
    *,
    dtype: StoredDtype | None = None,
    push_to_hub: bool = False,
    **options: Any,
) -> str | None:
    """Write a genome's folder.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        folder: where to; it is made where there is none.
        dtype: as in `gb.save`.
        push_to_hub: whether to upload it, too.
        options: of the upload: `repo_id`, and those of `push_pretrained`.

    Returns:
        The commit's address with `push_to_hub=True`, else None.

    Raises:
        ImportError: without huggingface_hub.
        TypeError: for an unknown option, or one of an upload without `push_to_hub=True`.
        ValueError: if the genome does not fit the plan, or cannot be saved.
    """
    mixin = _mixin()
    _check_options("save_pretrained", mixin, options, {"dtype", "push_to_hub"})
    if options and not push_to_hub:
        raise TypeError(f"save_pretrained takes {', '.join(options)} with push_to_hub=True only")
    return mixin(_Held(plan, genome, dtype)).save_pretrained(Path(folder), push_to_hub=push_to_hub, **options)


def push_pretrained(
    plan: Plan, genome: GenomeLike, repo_id: str, *, dtype: StoredDtype | None = None, **options: Any
) -> str:
    """Upload a genome's folder, and return its address.

    Args:
        plan: the plan.
        genome: a `Genome` or `TrainState`.
        repo_id: its name on the hub.
        dtype: as in `gb.save`.
        options: of `huggingface_hub.ModelHubMixin.push_to_hub` (`commit_message`, `private`, `token`, ...).

    Raises:
        ImportError: without huggingface_hub.
        TypeError: for an unknown option.
        ValueError: if the genome does not fit the plan, or cannot be saved.
    """
    mixin = _mixin()
    _check_options("push_to_hub", mixin, options, {"dtype"})
    return mixin(_Held(plan, genome, dtype)).push_to_hub(repo_id, **options)


def _check_options(method: str, mixin: Any, options: Collection[str], ours: set[str]) -> None:
    """Raise `TypeError` for what an upload does not take, or what would have no effect."""
    # The folder has a config and a card of its own.
    known = {*inspect.signature(mixin.__base__.push_to_hub).parameters} - {"self", "config", "model_card_kwargs"}
    if unknown := sorted(set(options) - known):
        raise TypeError(f"{method} got unknown options {unknown}; it takes {sorted(known | ours)}")


def load_pretrained(
    name: str | os.PathLike[str], factories: Sequence[Callable[..., Any]] = (), **options: Any
) -> tuple[Plan, Genome]:
    """Read a genome's folder, or that of a name on the hub.

    Args:
        name: the folder or name.
        factories: as in `load`.
        options: of `huggingface_hub.ModelHubMixin.from_pretrained`.

    Raises:
        FileNotFoundError: if there is no such folder or name, or it has no genome.
        ImportError: without huggingface_hub.
        ValueError: if what it has is not a valid genome.
    """
    mixin, name = _mixin(), os.fspath(name)
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, GENOME_FILE)):
            raise FileNotFoundError(f"the folder {name!r} holds no {GENOME_FILE}, which save_pretrained writes")
        if not os.path.isfile(os.path.join(name, "config.json")):
            raise FileNotFoundError(f"the folder {name!r} holds no config.json, which save_pretrained writes")
    try:
        held = mixin.from_pretrained(name, factories=factories, **options).held
    except (EntryNotFoundError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled) as error:
        raise FileNotFoundError(f"{name!r} is neither a folder nor a genome that the hub gives: {error}") from error
    return held.plan, held.genome


class _Held:
    """A genome with its plan, in a class that the mixin does not take apart."""

    def __init__(self, plan: Plan, genome: GenomeLike, dtype: StoredDtype | None = None) -> None:
        self.plan, self.genome, self.dtype = plan, genome, dtype


def config_of(plan: Plan, genome_bytes: int) -> dict[str, Any]:
    """What `config.json` says: format, version, base, and sizes. It repeats what the genome's file holds."""
    base = plan.base
    sizes = {
        "genome_params": plan.genome_params,
        "genome_bytes": genome_bytes,
        "pnet_params": plan.pnet_params,
        "dense_bytes": plan.dense_bytes,
    }
    return {
        "format": FORMAT,
        "gbfunc_version": sys.modules["gbfunc"].__version__,
        "base": None if base is None else dict(base._asdict()),
        "plan": {"digest": plan.digest(), **sizes},
    }


def card_text(plan: Plan, genome_bytes: int, place: str, head: str) -> str:
    """The model card: what the genome is, how large, of which base, and how to load it, under its metadata."""
    base, named = plan.base, ""
    if base is not None:
        named = f"`{base.name}`" if base.name else "a pretrained network"
        named += f" (revision `{base.revision}`)" if base.revision else ""
    words = (
        ""
        if base is None
        else (
            f"\nIt changes {named}: {base.params:,} frozen parameters, {base.bytes:,} bytes, digest `{base.digest}`.\n"
        )
    )
    return _CARD.format(
        head=head,
        of=f" of {named}" if named else "",
        what="the weights of a network" if base is None else "deltas of a network",
        base=words,
        pnet="the network that it was made for" if base is None else "the pretrained network, with its new head if any",
        place=place,
        genome_bytes=genome_bytes,
        genome_params=plan.genome_params,
        pnet_params=plan.pnet_params,
        dense_bytes=plan.dense_bytes,
    )


@lru_cache(maxsize=1)
def _mixin() -> Any:
    """The class that speaks with the hub."""
    try:
        from huggingface_hub import ModelCard, ModelCardData, ModelHubMixin, hf_hub_download
    except ImportError as error:
        raise ImportError(_INSTALL) from error

    class HubGenome(ModelHubMixin, library_name="gbfunc", tags=["gbfunc", "hypernetwork"]):
        """A genome with its plan, which the hub's mixin writes and reads."""

        def __init__(self, held: _Held) -> None:
            self.held, self.place, self.size = held, "FOLDER OR NAME", 0

        def _save_pretrained(self, save_directory: Path) -> None:
            plan = self.held.plan
            self.size = save(save_directory / GENOME_FILE, plan, self.held.genome, self.held.dtype)
            text = json.dumps(config_of(plan, self.size), indent=2)
            (save_directory / "config.json").write_text(f"{text}\n", encoding="utf-8")

        @classmethod
        def _from_pretrained(
            cls, *, model_id: str, factories: Sequence[Callable[..., Any]], **options: Any
        ) -> HubGenome:
            file = os.path.join(model_id, GENOME_FILE)
            if not os.path.isdir(model_id):
                file = hf_hub_download(model_id, GENOME_FILE, **options)
            return cls(_Held(*load(file, factories=factories)))

        def push_to_hub(self, repo_id: str, **options: Any) -> str:
            self.place = repo_id
            return super().push_to_hub(repo_id, **options)

        def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
            base = self.held.plan.base
            data = ModelCardData(**self._hub_mixin_info.model_card_data.to_dict())
            if base is not None:
                data.base_model = base.name or None
                data.tags = [*(data.tags or []), "adapter"]
            return ModelCard(card_text(self.held.plan, self.size, self.place, data.to_yaml()))

    return HubGenome
