"""A GPT of torchGB's shape, biases included, written as anyone would; and batches of random examples.

Suffixes: B examples of a batch, L positions, E width, V words of the vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GPT(nn.Module):
    """A decoder-only Transformer with pre-norm blocks (Radford et al., 2019) whose output layer is tied to its words.

    Args:
        vocabulary: words.
        length: longest sequence.
        layers: blocks.
        width: width of the residual stream.
        hidden: units of each block's MLP.
        heads: attention heads, a divisor of `width`.
    """

    def __init__(self, vocabulary: int, length: int, layers: int, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, hidden, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, index_BL: Tensor) -> Tensor:
        """Scores of the next word at every position: [B, L] -> [B, L, V]."""
        x_BLE = self.words(index_BL) + self.positions.weight[: index_BL.shape[1]]
        return self.head(self.norm(self.blocks(x_BLE)))


class Block(nn.Module):
    """Causal self-attention and an MLP, each on a normalised residual stream."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x_BLE: Tensor) -> Tensor:
        """[B, L, E] -> [B, L, E]."""
        packed = self.query_key_value(self.attention_norm(x_BLE)).unflatten(-1, (3, self.heads, -1))
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BLE = x_BLE + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BLE + self.down(F.gelu(self.up(self.mlp_norm(x_BLE))))


def features(shape: tuple[int, ...], classes: int) -> tuple[Tensor, Tensor]:
    """A batch of normal inputs [B, ...] with random classes [B]."""
    draw = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=draw), torch.randint(classes, shape[:1], generator=draw)


def sequences(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """A batch of random words [B, L] and the words after them [B, L]."""
    words = torch.randint(vocabulary, (batch, length + 1), generator=torch.Generator().manual_seed(0))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()
