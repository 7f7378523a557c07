"""Tiny networks of Hugging Face's transformers."""

from typing import Any

import pytest
import torch

GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
BERT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MAMBA = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
SIZES = {"GPT2": GPT2, "Bert": BERT, "Mamba": MAMBA, "DebertaV2": BERT | {"num_hidden_layers": 1}, "Swinv2": {}}


def tiny(name: str, **options: Any) -> Any:
    """A network of a class such as `GPT2LMHeadModel`, in training mode, always with the same weights."""
    transformers = pytest.importorskip("transformers")
    kind = next(kind for kind in SIZES if name.startswith(kind))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**SIZES[kind] | options)).train()
