"""Any Hugging Face encoder of texts with a linear classifier on the mean of its tokens, pretrained or not.

Suffixes: B texts of a batch, L positions, E width, K classes.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gbfunc.hypernets import bilinear
from gbfunc.tasks.pnets.base import BLOCKS, Interface, PlanOptions, PNet
from gbfunc.tasks.pnets.pretrained import pretrained_folder

_ADAPTER = PlanOptions(hypernet=bilinear(share="shapes"), base="own", modules_to_save=("classifier",))

_SHORT = 128
"""Tokens up to which plain attention is no slower than the fused one, whose backward pass takes ten times as long in
bfloat16 on a CPU."""


class TextClassifier(nn.Module):
    """Classes of texts: an encoder, the mean over the tokens of a text, a linear classifier.

    Args:
        encoder: maps `input_ids` and `attention_mask` [B, L] to an object with `last_hidden_state` [B, L, E].
        width: E.
        classes: K.
        pad: the token that fills up short texts.
    """

    def __init__(self, encoder: nn.Module, width: int, classes: int, pad: int) -> None:
        super().__init__()
        self.pad = pad
        self.encoder = encoder
        self.classifier = nn.Linear(width, classes)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        """[B, L] -> [B, K]."""
        mask_BL = tokens_BL != self.pad
        # Encoders ask whether all of the mask is true, which a tensor of shapes alone cannot answer.
        mask = None if tokens_BL.is_meta else mask_BL.long()
        hidden_BLE = self.encoder(input_ids=tokens_BL, attention_mask=mask).last_hidden_state
        weight_BL1 = mask_BL[:, :, None].to(hidden_BLE.dtype)
        return self.classifier((hidden_BLE * weight_BL1).sum(1) / weight_BL1.sum(1).clamp(min=1))


def text_classifier(interface: Interface, model_type: str, config: Mapping[str, Any]) -> PNet:
    """`TextClassifier` with an encoder of a type, whose pooler is left out where it has one.

    Of a configuration alone, what the task decides is filled in: the vocabulary, its pad, and the length of a text.
    A pretrained encoder keeps its configuration, but drops nothing in training.

    Args:
        interface: of a task of texts with classes.
        model_type: `bert`, ...; empty for the pretrained network's.
        config: fields of the configuration; `pretrained` names a network (`pretrained_folder`) to take weights from.
    """
    fields = dict(config)
    source = fields.pop("pretrained", None)
    folder = None if source is None else pretrained_folder(str(source))
    template = _configuration(model_type, folder, {})
    name = f"hf:{template.model_type}"
    if model_type not in ("", template.model_type):
        raise ValueError(f"{source} holds a network of type {template.model_type}, got hf:{model_type}")
    if unknown := [field for field in fields if not hasattr(template, field)]:
        raise ValueError(f"the configuration of {name} has no fields {unknown}")
    # Names that all models know, such as hidden_size, are the model's from here on: n_embd, say.
    given = {template.attribute_map.get(field, field): value for field, value in fields.items()}
    fields = (_from_task(interface, template) if folder is None else _without_dropout(template)) | given
    try:
        full = _configuration(model_type, folder, fields)
    except Exception as error:  # Its own validation raises many types.
        raise ValueError(f"the configuration of {name} is refused: {error}") from error
    _check(interface, full, name)

    def make() -> nn.Module:
        try:
            encoder: Any = _new(full) if folder is None else _pretrained(str(source), folder, fields)
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
            raise ValueError(f"the configuration of {name} makes no model: {error}") from error
        if interface.inputs[0] <= _SHORT:
            encoder.set_attn_implementation("eager")
        return TextClassifier(encoder, full.hidden_size, interface.outputs, interface.pad).train()

    if source is None:
        return PNet(name=name, make=make, plan=lambda genome_params: BLOCKS, config=fields)
    return PNet(name=name, make=make, plan=lambda size: _ADAPTER, config={"pretrained": str(source), **fields})


def _configuration(model_type: str, folder: Path | None, fields: Mapping[str, Any]) -> Any:
    """A configuration of a type, or that in a folder, with some fields changed."""
    import transformers

    if folder is None:
        try:
            return transformers.AutoConfig.for_model(model_type, **fields)
        except ValueError as error:
            if fields:
                raise
            raise ValueError(f"Hugging Face knows no model type {model_type!r}") from error
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, **fields)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder} holds no configuration of a Hugging Face model: {error}") from error


def _from_task(interface: Interface, template: Any) -> dict[str, Any]:
    """Fields that the task decides."""
    special = {name: None for name in ("bos_token_id", "eos_token_id") if hasattr(template, name)}
    # RoBERTa counts positions from the pad on.
    places = {"max_position_embeddings": interface.inputs[0] + interface.pad + 1}
    wanted = {"vocab_size": interface.vocabulary, "pad_token_id": interface.pad, **places, "use_cache": False}
    mapped = {template.attribute_map.get(name, name): v for name, v in wanted.items() if hasattr(template, name)}
    return special | mapped


def _without_dropout(template: Any) -> dict[str, Any]:
    """Fields that switch dropout off, and caches."""
    rates = {n: 0.0 for n, v in vars(template).items() if isinstance(v, float) and ("dropout" in n or "pdrop" in n)}
    return rates | ({"use_cache": False} if hasattr(template, "use_cache") else {})


def _check(interface: Interface, full: Any, name: str) -> None:
    """Raise `ValueError` for a model that reads no texts as the task has them."""
    import transformers

    texts = isinstance(getattr(full, "vocab_size", None), int) and isinstance(getattr(full, "hidden_size", None), int)
    if type(full) not in transformers.AutoModel._model_mapping or full.is_encoder_decoder or not texts:
        raise ValueError(f"{name} is no encoder of texts: it does not fit this task")
    if full.vocab_size < interface.vocabulary:
        raise ValueError(f"{name} has {full.vocab_size} tokens, the task needs {interface.vocabulary}")
    places = getattr(full, "max_position_embeddings", None)
    # Below 0: no limit (XLNet).
    if places is not None and 0 <= places < interface.inputs[0]:
        raise ValueError(f"{name} reads {places} positions, the task's texts have {interface.inputs[0]} (max_tokens)")


def _new(full: Any) -> nn.Module:
    import transformers

    return _without_pooler(transformers.AutoModel.from_config(full))


def _pretrained(source: str, folder: Path, fields: Mapping[str, Any]) -> nn.Module:
    """The encoder in a folder, which goes by the name of its source: a package, or a model of the hub."""
    encoder: Any = copy.deepcopy(_read(folder, json.dumps(fields), _stamp(folder)))
    encoder.config.name_or_path = source
    # The hub's cache has a folder for each commit.
    encoder.config._commit_hash = folder.name if folder.parent.name == "snapshots" else None
    return encoder


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of a folder's files: a key for what is read from them."""
    files = ((path, path.stat()) for path in sorted(folder.iterdir()))
    return tuple((path.name, stat.st_size, stat.st_mtime_ns) for path, stat in files)


@lru_cache(maxsize=1)
def _read(folder: Path, fields: str, stamp: object) -> nn.Module:
    """The pretrained encoder of a folder as it was at a time; the latest is kept, to be copied."""
    import transformers

    full = _configuration("", folder, json.loads(fields))
    with _quiet():
        try:
            encoder = transformers.AutoModel.from_pretrained(folder, config=full, local_files_only=True)
        except Exception as error:  # Damaged files raise many types.
            raise ValueError(f"the weights in {folder} cannot be read: {error}") from error
    return _without_pooler(encoder.float())


def _without_pooler(encoder: Any) -> nn.Module:
    if getattr(encoder, "pooler", None) is not None:
        encoder.pooler = None
    return encoder


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and remarks of transformers."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
