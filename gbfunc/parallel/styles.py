"""Predefined styles of tensor parallelism for known p-nets, and padding of a vocabulary to a multiple of the ranks.

Layers of queries, keys and values, and the first layers of MLPs, are column parallel, so that each rank has entire
attention heads. Output layers of attention and the last layers of MLPs are row parallel. The embedding and the last
layer are split over the words of the vocabulary (Shoeybi et al., 2019).
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from gbfunc.parallel.tensor import DividedAttributes, PackedColwiseParallel, Styles


def tensor_styles(pnet: nn.Module) -> Styles:
    """Return styles for `make_train_step(parallel=)`; raise ValueError for an unsupported p-net.

    Supports the library's `GPT`, and Hugging Face's `GPT2LMHeadModel` and `LlamaForCausalLM`.
    """
    net: Any = pnet
    column, row, packed = ColwiseParallel(), RowwiseParallel(), PackedColwiseParallel
    words, head = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
    known: dict[str, Callable[[], Styles]] = {
        "GPT": lambda: {
            "tokens": words,
            "blocks.*": DividedAttributes("heads"),
            "blocks.*.qkv": packed(3, net.blocks[0].heads),
            "blocks.*.out": row,
            "blocks.*.up": column,
            "blocks.*.down": row,
            "head": head,
        },
        "GPT2LMHeadModel": lambda: {
            "transformer.wte": words,
            "transformer.h.*.attn": DividedAttributes("num_heads", "split_size"),
            "transformer.h.*.attn.c_attn": packed(3, net.config.n_head),
            "transformer.h.*.attn.c_proj": row,
            "transformer.h.*.mlp.c_fc": column,
            "transformer.h.*.mlp.c_proj": row,
            "lm_head": head,
        },
        # Attention of Llama computes the number of heads from the layers' width, so no attribute needs to be divided.
        "LlamaForCausalLM": lambda: {
            "model.embed_tokens": words,
            "model.layers.*.self_attn.q_proj": packed(1, net.config.num_attention_heads),
            "model.layers.*.self_attn.[kv]_proj": packed(1, net.config.num_key_value_heads),
            "model.layers.*.self_attn.o_proj": row,
            "model.layers.*.mlp.gate_proj": column,
            "model.layers.*.mlp.up_proj": column,
            "model.layers.*.mlp.down_proj": row,
            "lm_head": head,
        },
    }
    make = known.get(type(pnet).__name__)
    if make is None:
        raise ValueError(
            f"there are styles for {', '.join(known)}, got a {type(pnet).__name__}: write your own styles as "
            "parallel={'up': ColwiseParallel(), 'down': RowwiseParallel()}"
        )
    return make()


def pad_vocabulary(pnet: nn.Module, ranks: int) -> nn.Module:
    """Return a copy of a language model whose vocabulary is padded to a multiple of `ranks`.

    The size of the vocabulary is the number of rows of the first embedding. All embeddings and linear layers whose
    weights have this number of rows get additional rows of zeros. The logits of the additional rows are minus infinity.

    Args:
        pnet: a model whose output, or whose output's `logits`, are logits [..., words].
        ranks: number of ranks along the tensor axis.

    Raises:
        ValueError: if the model has no embedding.
    """
    words = next((m.num_embeddings for m in pnet.modules() if isinstance(m, nn.Embedding)), None)
    if words is None:
        raise ValueError(f"expected a p-net with an embedding, whose vocabulary is padded, got a {type(pnet).__name__}")
    padded = ranks * math.ceil(words / ranks)
    net, wider = copy.deepcopy(pnet), dict[Tensor, nn.Parameter]()
    for module in net.modules():
        size = "num_embeddings" if isinstance(module, nn.Embedding) else "out_features"
        if isinstance(module, nn.Embedding | nn.Linear) and getattr(module, size) == words:
            setattr(module, size, padded)
            for key, x in [*module.named_parameters(recurse=False)]:
                if x not in wider:  # Tied weights stay tied
                    zeros = x.new_zeros((padded - words, *x.shape[1:]))
                    wider[x] = nn.Parameter(torch.cat([x.detach(), zeros]), requires_grad=x.requires_grad)
                setattr(module, key, wider[x])
    net.register_forward_hook(partial(_no_probability, words))
    return net


def _no_probability(words: int, module: nn.Module, args: Any, out: Any) -> Any:
    plain = isinstance(out, Tensor)
    logits: Tensor = out if plain else out.logits
    masked = logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) >= words, -math.inf)
    if plain:
        return masked
    out.logits = masked
    return out
