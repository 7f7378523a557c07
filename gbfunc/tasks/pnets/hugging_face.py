"""Any Hugging Face model from its configuration: `hf:gpt2`, `hf:llama`, `hf:vit`, ...; nothing is downloaded."""

from __future__ import annotations

from typing import Any

from torch import nn

from gbfunc.extras import import_extra
from gbfunc.tasks.pnets.base import BLOCKS, Interface, PNet
from gbfunc.tasks.pnets.text_classifier import text_classifier

PREFIX = "hf:"
_PLACES = "max_position_embeddings"
"""The general name of the field that says how long a text can be."""


def hugging_face(interface: Interface, model_type: str, **config: Any) -> PNet:
    """A Hugging Face model as a p-net: a causal language model, an image classifier, or `text_classifier`.

    What the task decides is filled in where the configuration does not say it: the vocabulary, the number of classes,
    size and channels of an image, and the length of a text where the model has a table of positions.
    """
    transformers = import_extra("transformers", "a Hugging Face p-net", "gbfunc[hf]")
    if interface.vocabulary:
        return text_classifier(interface, model_type, config)
    if "pretrained" in config:
        raise ValueError("pretrained weights are for tasks of texts with classes, such as trec")
    auto = transformers.AutoModelForCausalLM if interface.tokens else transformers.AutoModelForImageClassification
    try:
        template = transformers.AutoConfig.for_model(model_type)
    except ValueError as error:
        raise ValueError(f"Hugging Face knows no model type {model_type!r}") from error
    # Names that all models know, such as hidden_size, are the model's from here on: n_embd, say.
    given = {template.attribute_map.get(name, name): value for name, value in config.items()}
    fields = _from_task(interface, template) | given
    if unknown := [name for name in config if not hasattr(template, name)]:
        raise ValueError(f"the configuration of {PREFIX}{model_type} has no fields {unknown}")
    try:
        full = transformers.AutoConfig.for_model(model_type, **fields)
    except Exception as error:  # Its own validation raises many types.
        raise ValueError(f"the configuration of {PREFIX}{model_type} is refused: {error}") from error
    if type(full) not in auto._model_mapping:
        kind = "causal language model" if interface.tokens else "image classifier"
        raise ValueError(f"Hugging Face has no {kind} of type {model_type!r}: it does not fit this task")
    _check_outputs(interface, full, model_type)

    def make() -> nn.Module:
        try:
            return auto.from_config(full)
        except (ValueError, TypeError, RuntimeError, ZeroDivisionError) as error:
            raise ValueError(f"the configuration of {PREFIX}{model_type} makes no model: {error}") from error

    return PNet(name=f"{PREFIX}{model_type}", make=make, plan=lambda genome_params: BLOCKS, config=fields)


def _from_task(interface: Interface, template: Any) -> dict[str, Any]:
    """Fields that the task decides."""
    if interface.tokens:
        # Special tokens of the model's vocabulary may lie outside the task's.
        special = {name: None for name in ("bos_token_id", "eos_token_id", "pad_token_id") if hasattr(template, name)}
        places = template.attribute_map.get(_PLACES, _PLACES)
        length = {places: interface.inputs[0]} if hasattr(template, places) else {}
        return {"vocab_size": interface.outputs, "use_cache": False, **special, **length}
    channels, rows, _ = interface.inputs
    wanted = {"image_size": rows, "num_channels": channels, "num_labels": interface.outputs}
    return {name: value for name, value in wanted.items() if hasattr(template, name)}


def _check_outputs(interface: Interface, config: Any, model_type: str) -> None:
    outputs, what = (config.vocab_size, "tokens") if interface.tokens else (config.num_labels, "classes")
    if outputs < interface.outputs:
        raise ValueError(f"{PREFIX}{model_type} has {outputs} {what}, the task needs {interface.outputs}")
    places = getattr(config, _PLACES, None)
    if interface.tokens and places is not None and places < interface.inputs[0]:
        raise ValueError(f"{PREFIX}{model_type} reads {places} positions, the task's texts have {interface.inputs[0]}")
