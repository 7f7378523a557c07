"""Classification of short texts: any two files of labelled lines, and TREC's questions (Li and Roth, 2002)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gbfunc.extras import import_extra
from gbfunc.tasks.base import Recipe, Task, accuracy, linear_decay
from gbfunc.tasks.data import SPLIT_SEED, Batch, Split, data_folder, hold_out, leave_out, reading
from gbfunc.tasks.pnets.base import Interface, PNet
from gbfunc.tasks.pnets.hugging_face import CONFIG, TOKENIZER, hugging_face, pretrained_folder
from gbfunc.tasks.text import Tokens, byte_pairs, check_int, read_text

N_VAL, VAL_PART = 500, 0.1  # number of training texts that validate, and the largest part of them
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

_LEAST_STEPS, _MOST_EPOCHS = 450, 20  # of a fine-tuning: few texts are seen more often, up to so often
_FULL_RATE = 5_400  # parameters up to which a genome of a pretrained network learns at the full rate
_LEFT_OUT = 0.1  # part of the tokens that a fine-tuning does not see (word dropout: Iyyer et al., 2015, 2.2)

Labels = NDArray[np.int64]

_POOL = 16  # batches whose texts are sorted by length together


@dataclass(frozen=True, eq=False)
class PaddedTexts(Split):
    """Texts [N, L] of different lengths with a class each; a batch is as long as its longest text."""

    lengths: Tensor  # tokens of each text [N], on the CPU

    def __getitem__(self, index: Any) -> Batch:
        return self.x[index, : int(self.lengths[index].max())], self.y[index]

    def order(self, shuffled_N: Tensor, batch_size: int, generator: torch.Generator) -> Sequence[Tensor]:
        """Divide shuffled texts into batches of similar lengths."""
        # Sorted within pools of batches: half as many pads, and batches remain random.
        pools = (pool[self.lengths[pool].argsort(stable=True)] for pool in shuffled_N.split(_POOL * batch_size))
        batches = [index_B for pool in pools for index_B in pool.split(batch_size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def load_task(
    name: str,
    data_dir: Path | None = None,
    pretrained: str | None = None,
    max_tokens: int = 64,
    vocabulary: int | None = None,
) -> Task:
    """Load the task of a folder: `train.txt` and `test.txt` hold a label, white space and a text per line, in UTF-8.

    A tenth of the training texts validates, 500 at most. The p-net is a small BERT, or the pretrained network, with a
    classifier on the mean of its tokens. TREC has 5,452 questions to learn from, and 500 to test, in 6 classes.

    Args:
        name: name of the task.
        data_dir: the folder.
        pretrained: folder, installed Python package, or model of the Hugging Face hub that gives tokens and weights.
        max_tokens: longer texts are cut.
        vocabulary: byte-pair tokens, made from the training texts, if nothing is pretrained; None for 1,000.
    """
    check_int(name, "max_tokens", max_tokens, 4)
    check_int(name, "vocabulary", vocabulary, 257)
    if pretrained is not None and vocabulary is not None:
        raise ValueError(f"the pretrained network {pretrained} has its vocabulary, got vocabulary {vocabulary}")
    classes, labels_N, learned, test_labels_N, tested = _read_folder(name, data_dir)
    val, train = hold_out(labels_N, (min(N_VAL, int(VAL_PART * len(labels_N))),), SPLIT_SEED)
    if pretrained is None:
        tokens = _learned_tokens([learned[i] for i in train], vocabulary or _VOCABULARY, max_tokens)
    else:
        tokens = pretrained_tokens(pretrained, max_tokens)
    interface = Interface((max_tokens,), len(classes), vocabulary=tokens.size, pad=tokens.pad)
    splits = [_split([learned[i] for i in part], labels_N[part], tokens) for part in (train, val)]
    splits.append(_split(tested, test_labels_N, tokens))
    config: dict[str, Any] = _SMALL if pretrained is None else {"pretrained": pretrained}
    return Task(
        name,
        interface,
        splits[0],
        splits[1],
        splits[2],
        hugging_face(interface, "bert" if pretrained is None else "", **config),
        partial(_recipe, len(splits[0]), tokens.pad),
        genome_params=None if pretrained is None else 3_000,
        compression=3.0,
        # In small chunks, which are as long as their longest text.
        evaluate=lambda net, split: {"accuracy": accuracy(net, split, _CHUNK)},
        encode=tokens.encode,
        about={"classes": classes},
    )


texts, trec = partial(load_task, "texts"), partial(load_task, "trec")


def _read_folder(name: str, data_dir: Path | None) -> tuple[list[str], Labels, list[str], Labels, list[str]]:
    """Read the classes in order, and labels [N] and texts to learn from and to test."""
    folder = data_folder(name, data_dir, "train.txt and test.txt")
    train, test = folder / "train.txt", folder / "test.txt"
    (labels, learned), (test_labels, tested) = read_labelled(train), read_labelled(test)
    classes = sorted(set(labels))
    number = {label: i for i, label in enumerate(classes)}
    if len(classes) < 2:
        raise ValueError(f"{train} must hold texts of two classes or more, got {classes[0]!r} alone")
    if len(learned) < _LEAST:
        raise ValueError(f"{train} must hold {_LEAST} texts or more, got {len(learned)}")
    if unknown := [i for i, label in enumerate(test_labels, 1) if label not in number]:
        names = ", ".join(map(repr, classes[:10])) + (", ..." if len(classes) > 10 else "")
        label = test_labels[unknown[0] - 1]
        raise ValueError(f"{test}, line {unknown[0]}: no label {label!r} in train.txt, which has {names}")
    labels_N, test_labels_N = (np.array([number[label] for label in part]) for part in (labels, test_labels))
    return classes, labels_N, learned, test_labels_N, tested


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


def read_labelled(path: Path) -> tuple[list[str], list[str]]:
    """Read labels and texts from a file with a label, white space (a space, a tab, ...) and a text per line."""
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


def _split(source: list[str], labels_N: Labels, tokens: Tokens) -> PaddedTexts:
    """Encode texts, and sort them by length, so that the texts of a chunk have much the same length."""
    coded = [tokens.encode(words) for words in source]
    lengths_N = torch.tensor([len(code) for code in coded])
    order_N = lengths_N.argsort(stable=True)
    x_NL = pad_sequence([coded[i] for i in order_N.tolist()], batch_first=True, padding_value=tokens.pad)
    return PaddedTexts(x_NL, torch.from_numpy(labels_N)[order_N], lengths_N[order_N])


def _learned_tokens(source: list[str], vocabulary: int, max_tokens: int) -> Tokens:
    """Learn byte-pair tokens from texts, after the pad, which is 0."""
    learned = byte_pairs("\n".join(source), vocabulary - 1)
    return Tokens(learned.size + 1, lambda words: learned.encode(words)[:max_tokens] + 1)


def pretrained_tokens(pretrained: str, max_tokens: int) -> Tokens:
    """Read the tokens of a pretrained network; raises as `texts`."""
    folder = pretrained_folder(pretrained)
    tokenizers, transformers = (
        import_extra(name, "a pretrained network of texts", "gbfunc[text,hf]")
        for name in ("tokenizers", "transformers")
    )
    path = folder / TOKENIZER
    with reading(path, "tokenizer of a pretrained network"):
        tokenizer: Any = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    # A model without a pad (GPT-2) has a token that ends a text, which none holds inside.
    pad = next((v for n in ("pad_token_id", "eos_token_id") if isinstance(v := getattr(config, n, None), int)), None)
    if pad is None:
        raise ValueError(f"{folder / CONFIG} names no pad_token_id, which fills up short texts")
    return Tokens(tokenizer.get_vocab_size(), lambda words: torch.tensor(tokenizer.encode(words).ids), pad=pad)
