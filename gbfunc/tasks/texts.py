"""Classification of short texts: any two files of labelled lines, and TREC's questions (Li and Roth, 2002)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gbfunc.extras import import_extra
from gbfunc.tasks.base import Recipe, Task, accuracy, linear_decay
from gbfunc.tasks.data import Batch, hold_out, leave_out, steps_per_epoch
from gbfunc.tasks.pnets.base import Interface, PNet
from gbfunc.tasks.pnets.hugging_face import hugging_face
from gbfunc.tasks.pnets.pretrained import CONFIG, TOKENIZER, pretrained_folder
from gbfunc.tasks.text import byte_pairs, read_text

N_VAL, VAL_PART, SPLIT_SEED = 500, 0.1, 0
"""So many training texts validate, but at most this part of them."""

_LEAST = 10
_VOCABULARY = 1_000
_CHUNK = 64
_SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
_SMALL |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

_FROM_SCRATCH = Recipe(lr=1e-2, direct_lr=3e-3, dense_lr=1e-3, batch_size=32, epochs=5, clip_norm=1.0)
_FINE_TUNING = Recipe(
    lr=3e-2,
    direct_lr=3e-3,
    dense_lr=1e-4,
    betas=(0.9, 0.999),
    batch_size=32,
    epochs=3,
    clip_norm=1.0,
    schedule=linear_decay,
)

_LEAST_STEPS, _MOST_EPOCHS = 450, 20
"""Of a fine-tuning: few texts are seen more often, up to so often."""

_FULL_RATE = 5_400
"""Parameters up to which a genome of a pretrained network learns at the full rate."""

_LEFT_OUT = 0.1
"""Part of the tokens that a fine-tuning does not see (word dropout: Iyyer et al., 2015, 2.2)."""

Labelled = tuple[list[str], list[str]]
"""Labels, and the text of each."""

_POOL = 16
"""Batches whose texts are sorted by length together."""


class Tokens(NamedTuple):
    """A vocabulary of texts with classes."""

    size: int  # tokens, the pad included
    pad: int  # the token that fills up short texts, which is in none of them
    encode: Callable[[str], Tensor]  # a text to its tokens [L]


@dataclass(frozen=True, eq=False)
class PaddedTexts:
    """Texts of different lengths with a class each; a batch is as long as its longest text."""

    x: Tensor  # tokens [N, L], filled up with the pad
    y: Tensor  # classes [N], int64
    lengths: Tensor  # tokens of each text [N], on the CPU

    def __len__(self) -> int:
        return len(self.y)

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """One shuffled pass in full batches of similar lengths; what does not fill one is left out."""
        steps = steps_per_epoch(self, batch_size)
        order_N = torch.randperm(len(self.y), generator=generator)[: steps * batch_size]
        # Of some batches at a time: half as many pads, and batches remain random.
        pools = (pool[self.lengths[pool].argsort(stable=True)] for pool in order_N.split(_POOL * batch_size))
        batches = [index_B for pool in pools for index_B in pool.split(batch_size)]
        for index_B in (batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()):
            here_B = index_B.to(self.y.device)
            yield self.x[here_B, : self.longest(index_B)], self.y[here_B]

    def chunks(self, size: int) -> Iterator[Batch]:
        """All examples in order."""
        for index_B in torch.arange(len(self.y)).split(size):
            rows = slice(int(index_B[0]), int(index_B[-1]) + 1)
            yield self.x[rows, : self.longest(index_B)], self.y[rows]

    def longest(self, index_B: Tensor) -> int:
        """Tokens of the longest of some texts."""
        return int(self.lengths[index_B].max())

    def to(self, device: torch.device | str) -> PaddedTexts:
        """A copy whose texts and labels are on `device`; lengths stay where they are."""
        return PaddedTexts(self.x.to(device), self.y.to(device), self.lengths)


def texts(
    data_dir: Path | None = None, pretrained: str | None = None, max_tokens: int = 64, vocabulary: int | None = None
) -> Task:
    """Classify the texts of a folder: `train.txt` and `test.txt` hold a label, white space, a text a line, in UTF-8.

    A tenth of the training texts validates, 500 at most. The p-net is a small BERT, or the pretrained network, with a
    classifier on the mean of its tokens.

    Args:
        data_dir: the folder.
        pretrained: folder, installed Python package, or model of the Hugging Face hub, whose tokens and weights are
            taken.
        max_tokens: longer texts are cut.
        vocabulary: byte-pair tokens, made from the training texts, where nothing is pretrained; None for 1,000.
    """
    return _task("texts", data_dir, pretrained, max_tokens, vocabulary)


def trec(
    data_dir: Path | None = None, pretrained: str | None = None, max_tokens: int = 64, vocabulary: int | None = None
) -> Task:
    """`texts` of TREC: 5,452 questions to learn from, 500 of which validate, and 500 to test, in 6 classes."""
    return _task("trec", data_dir, pretrained, max_tokens, vocabulary)


def _task(name: str, data_dir: Path | None, pretrained: str | None, max_tokens: int, vocabulary: int | None) -> Task:
    for option, value, least in (("max_tokens", max_tokens, 4), ("vocabulary", vocabulary, 257)):
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{option} of the task {name} must be an int >= {least}, got {value!r}")
    if pretrained is not None and vocabulary is not None:
        raise ValueError(f"the pretrained network {pretrained} has its vocabulary, got vocabulary {vocabulary}")
    (labels, learned), (test_labels, tested), classes = _read_folder(name, data_dir)
    number = {label: i for i, label in enumerate(classes)}
    labels_N = np.array([number[label] for label in labels])
    val, train = hold_out(labels_N, (min(N_VAL, int(VAL_PART * len(labels_N))),), SPLIT_SEED)
    if pretrained is None:
        tokens = _learned_tokens([learned[i] for i in train], vocabulary or _VOCABULARY, max_tokens)
    else:
        tokens = pretrained_tokens(pretrained, max_tokens)
    interface = Interface((max_tokens,), len(classes), vocabulary=tokens.size, pad=tokens.pad)
    splits = [_split([learned[i] for i in part], torch.from_numpy(labels_N[part]), tokens) for part in (train, val)]
    splits.append(_split(tested, torch.tensor([number[label] for label in test_labels]), tokens))
    config = _SMALL if pretrained is None else {"pretrained": pretrained}
    return Task(
        name=name,
        interface=interface,
        train=splits[0],
        val=splits[1],
        test=splits[2],
        pnet=hugging_face(interface, "bert" if pretrained is None else "", **config),
        settings=partial(_recipe, len(splits[0]), tokens.pad),
        genome_params=None if pretrained is None else 3_000,
        compression=3.0,
        # In small chunks, which are as long as their longest text.
        evaluate=lambda net, split: {"accuracy": accuracy(net, split, _CHUNK)},
        encode=tokens.encode,
        about={"classes": classes},
    )


def _read_folder(name: str, data_dir: Path | None) -> tuple[Labelled, Labelled, list[str]]:
    """What to learn from, what to test, and the classes in order."""
    if data_dir is None:
        raise ValueError(f"the task {name} needs its data: --data-dir names the folder with train.txt and test.txt")
    if not data_dir.is_dir():
        raise FileNotFoundError(f"no such folder: {data_dir} (it must hold train.txt and test.txt)")
    train, test = data_dir / "train.txt", data_dir / "test.txt"
    learned, tested = read_labelled(train), read_labelled(test)
    classes = sorted(set(learned[0]))
    if len(classes) < 2:
        raise ValueError(f"{train} must hold texts of two classes or more, got {classes[0]!r} alone")
    if len(learned[0]) < _LEAST:
        raise ValueError(f"{train} must hold {_LEAST} texts or more, got {len(learned[0])}")
    for i, label in enumerate(tested[0], 1):
        if label not in classes:
            names = ", ".join(map(repr, classes[:10])) + (", ..." if len(classes) > 10 else "")
            raise ValueError(f"{test}, line {i}: no label {label!r} in train.txt, which has {names}")
    return learned, tested, classes


def _recipe(n_texts: int, pad: int, pnet: PNet, genome_params: float) -> Recipe:
    if "pretrained" not in pnet.config:
        return _FROM_SCRATCH
    a_pass = max(1, n_texts // _FINE_TUNING.batch_size)
    epochs = min(max(_FINE_TUNING.epochs, math.ceil(_LEAST_STEPS / a_pass)), _MOST_EPOCHS)
    # Adam moves every coefficient alike, and the sum of more features further.
    lr = _FINE_TUNING.lr * _FULL_RATE / max(_FULL_RATE, genome_params)
    reasons = {
        "epochs": f"{n_texts:,} texts make {a_pass:,} steps a pass; it takes {_FINE_TUNING.epochs} passes, and up to "
        f"{_MOST_EPOCHS} where these are fewer than {_LEAST_STEPS} steps",
        "lr": f"{_FINE_TUNING.lr:g} up to {_FULL_RATE:,} parameters, beyond that in inverse proportion; these are "
        f"{genome_params:,.0f}",
        "augment": f"{100 * _LEFT_OUT:g} % of the tokens are left out, others each time: less is learned by heart",
    }
    return replace(_FINE_TUNING, epochs=epochs, lr=lr, augment=leave_out(_LEFT_OUT, pad), reasons=reasons)


def read_labelled(path: Path) -> Labelled:
    """Read a file of texts, a line each: a label, white space (a space, a tab, ...), the text."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file of labelled texts: {path}")
    labels, texts = [], []
    lines = read_text(path).removesuffix("\n").split("\n")
    for i, line in enumerate(lines, 1):
        label, words = [*re.split(r"\s", line.rstrip("\r"), maxsplit=1), ""][:2]
        if not label or not words.strip():
            shown = line if len(line) <= 40 else f"{line[:40]}..."
            raise ValueError(f"{path}, line {i}: expected a label, white space and a text, got {shown!r}")
        labels.append(label)
        texts.append(words.strip())
    return labels, texts


def _split(source: list[str], y_N: Tensor, tokens: Tokens) -> PaddedTexts:
    """Texts as tokens, the shortest first: those of a chunk then have much the same length."""
    coded = [tokens.encode(words) for words in source]
    lengths_N = torch.tensor([len(code) for code in coded])
    order_N = lengths_N.argsort(stable=True)
    x_NL = torch.full((len(coded), int(lengths_N.max())), tokens.pad)
    for row, i in zip(x_NL, order_N.tolist(), strict=True):
        row[: len(coded[i])] = coded[i]
    return PaddedTexts(x_NL, y_N[order_N], lengths_N[order_N])


def _learned_tokens(source: list[str], vocabulary: int, max_tokens: int) -> Tokens:
    """Byte-pair tokens of texts, after the pad, which is 0."""
    learned = byte_pairs("\n".join(source), vocabulary - 1)
    return Tokens(learned.size + 1, 0, lambda words: learned.encode(words)[:max_tokens] + 1)


def pretrained_tokens(pretrained: str, max_tokens: int) -> Tokens:
    """The tokens of a pretrained network; raises as `texts`."""
    folder = pretrained_folder(pretrained)
    tokenizers, transformers = (
        import_extra(name, "a pretrained network of texts", "gbfunc[text,hf]")
        for name in ("tokenizers", "transformers")
    )
    path = folder / TOKENIZER
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path} (the tokens of the pretrained network)")
    try:
        tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # The type that tokenizers raises.
        raise ValueError(f"{path} holds no tokens: {error}") from error
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    # A model without a pad (GPT-2) has a token that ends a text, which none holds inside.
    pad = next((v for n in ("pad_token_id", "eos_token_id") if isinstance(v := getattr(config, n, None), int)), None)
    if pad is None:
        raise ValueError(f"{folder / CONFIG} names no pad_token_id, which fills up short texts")
    return Tokens(tokenizer.get_vocab_size(), pad, lambda words: torch.tensor(tokenizer.encode(words).ids))
