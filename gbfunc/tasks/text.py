"""Language modelling, and classification of short texts. Suffixes: N texts, B of a batch, L tokens, V words."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gbfunc.extras import import_extra
from gbfunc.plan.spec import base_rate
from gbfunc.tasks.base import LOSS, Net, Recipe, Task, accuracy, linear_decay, logits_of, text_metrics, token_loss
from gbfunc.tasks.data import SPLIT_SEED, Batch, Data, Split, Windows, data_folder, hold_out, leave_out
from gbfunc.tasks.pnets import PNETS, Interface, PNet
from gbfunc.tasks.pnets.hugging_face import CONFIG, TOKENIZER, hugging_face, pretrained_network
from gbfunc.untrusted import one_error

_MAX_BYTES = 1 << 30

# The batch size is nanoGPT's on a CPU (config/train_shakespeare_char.py and readme). nanoGPT takes 2,000 steps.
_TEXT = Recipe(lr=2e-2, direct_lr=4e-3, dense_lr=4e-3, batch_size=12, steps=4_000, measure_every=500, clip_norm=1.0)
_TUNING = Recipe(lr=3e-2, dense_lr=1e-4, batch_size=4, steps=300, measure_every=100, clip_norm=1.0)
HELD_OUT = 128  # a pretrained model is evaluated on at most this number of windows or chats
_FULL_RATE = 65_000  # genomes with more parameters than this get a lower learning rate

_SMALL_BERT = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}
_SMALL_BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_FROM_SCRATCH = Recipe(lr=1e-2, direct_lr=3e-3, dense_lr=1e-3, batch_size=32, epochs=5, clip_norm=1.0)
_FINE_TUNING = replace(_FROM_SCRATCH, dense_lr=1e-4, betas=(0.9, 0.999), epochs=3, schedule=linear_decay)
_LEAST_STEPS, _MOST_EPOCHS = 450, 20  # fine-tuning runs for at least 450 steps, but for at most 20 epochs
_LEFT_OUT = 0.1  # fraction of the tokens that fine-tuning masks (word dropout: Iyyer et al., 2015, section 2.2)
LEAST = 10  # a data set needs at least this number of training texts
_POOL = 16  # number of batches in a pool of texts that are sorted by length


class Tokens(NamedTuple):
    """A vocabulary, and the functions between text and tokens."""

    size: int  # number of tokens in the vocabulary, the token `pad` included
    encode: Callable[[str], Tensor]  # text to tokens [L]; `ValueError` for unknown characters
    decode: Callable[[list[int]], str] | None = None  # tokens to text
    digest: str = ""  # hash that tells vocabularies of equal size apart
    pad: int = 0  # token that pads short texts; no text contains it


def check_int(task: str, name: str, value: Any, least: int) -> None:
    """Raise `ValueError` unless the option `name` of a task is None, or an int that is at least `least`."""
    if value is not None and (type(value) is not int or value < least):
        raise ValueError(f"{name} of the {task} task must be an int >= {least}, got {value!r}")


def _check_vocabulary(pretrained: str | None, vocabulary: int | None) -> None:
    if pretrained is not None and vocabulary is not None:
        raise ValueError(f"{pretrained} has its own vocabulary, got vocabulary {vocabulary}: leave the option out")


def text(
    data_dir: Path | None = None, context: int = 64, vocabulary: int | None = None, pretrained: str | None = None
) -> Task:
    """Load a text for language modelling. The first 5 % are for the test, and the last 10 % for validation.

    The text is a file in UTF-8, a folder (see `read_text`) or, by default, the text of Python's help
    (`pydoc_data.topics`). The model gets `context` tokens. A token is a character or, with `vocabulary`, one of this
    number of byte pairs, learned from the training split. A pretrained causal language model (see `pretrained_network`)
    has its own tokens, and is evaluated on the first 128 windows of a split.
    """
    check_int("text", "context", context, 2)
    check_int("text", "vocabulary", vocabulary, 257)
    source = python_help() if data_dir is None else read_text(data_dir)
    # Validate on the last tenth of the text, as is usual for the data set "tiny shakespeare".
    first, last = int(len(source) * 0.05), int(len(source) * 0.9)
    sources = (source[first:last], source[last:], source[:first])
    if pretrained is not None:
        _check_vocabulary(pretrained, vocabulary)
        tokens = pretrained_tokens(pretrained)
    else:
        tokens = characters(source) if vocabulary is None else byte_pairs(sources[0], vocabulary)
    splits = [Windows(tokens.encode(words), context, len(words)) for words in sources]
    if (n := min(len(split.tokens) for split in splits)) <= context + 1:
        expected = f"expected more than {context + 1} tokens in each part of {data_dir or 'the text'}"
        raise ValueError(f"{expected}, got {n}: use a longer text or a smaller context")
    return language_task("text", splits, tokens, context, pretrained)


def language_task(name: str, splits: Sequence[Data], tokens: Tokens, context: int, pretrained: str | None) -> Task:
    """Make the task of predicting the next token. `splits`: training, validation and test examples."""
    interface = Interface((context,), tokens.size, tokens=True)
    how: dict[str, Any] = dict(loss=token_loss, evaluate=text_metrics, metrics=LOSS, settings=_text_recipe)
    if pretrained is not None:
        metrics = LOSS if isinstance(splits[0], Windows) else LOSS[:1]
        how |= dict(genome_params=20_000, evaluate=partial(text_metrics, windows=8, most=HELD_OUT), metrics=metrics)
        pnet = hugging_face(interface, "", pretrained=pretrained)
        # For low-rank deltas of SmolLM2, the best learning rate is 1e-1 up to 25,000 parameters, and 6e-2 at 77,000.
        rate = {"low_rank": lambda n: 1e-1 * min(1.0, 25_000 / n) ** 0.5}
        how |= dict(settings=lambda p, n: replace(_TUNING, lr=rate.get(p.plan(n).hypernet.type, base_rate)(n)))
    else:
        pnet = PNETS["gpt"](interface)
    how |= dict(encode=tokens.encode, decode=tokens.decode, about={"alphabet": tokens.digest})
    train, val, test = splits
    return Task(name, interface, train, val, test, pnet, **how)


def _text_recipe(pnet: PNet, genome_params: float) -> Recipe:
    # Genomes of 290,000 parameters learn best at the rate 6e-3 (tried: 4e-3, 6e-3, 2e-2).
    if _FULL_RATE < genome_params < math.inf:
        return replace(_TEXT, lr=_TEXT.lr * (_FULL_RATE / genome_params) ** 0.8)
    return _TEXT


def python_help() -> str:
    """Return the text of Python's help: about a hundred topics of the language reference."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path) -> str:
    """Read a text file in UTF-8, or all `.txt` files under a folder as one text.

    Files are sorted by relative path, so that the text is the same on every machine. Each file begins on a new
    line. Hidden files, hidden folders and files without text are ignored.
    """
    if not path.exists():
        raise FileNotFoundError(f"no such text file or folder: {path}")
    files = [path]
    if path.is_dir():
        by_path = {file.relative_to(path).parts: file for file in path.rglob("*.txt") if file.is_file()}
        files = [by_path[key] for key in sorted(by_path) if not any(name.startswith(".") for name in key)]
        if not files:
            raise FileNotFoundError(f"expected .txt files in {path}, got none: name a file, or another folder")
    if (size := sum(file.stat().st_size for file in files)) > _MAX_BYTES:
        raise ValueError(f"expected at most {_MAX_BYTES:,} bytes of text, got {size:,} in {path}: take a part of it")
    contents: list[str] = []
    for file in files:
        try:
            # Skip the byte-order mark that some editors write.
            content = file.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not a text in UTF-8 (byte {error.start:,}): convert it to UTF-8") from error
        if "\0" in content:
            raise ValueError(f"{file} must be text, got NUL at character {content.index(chr(0)):,}: save it as text")
        contents += [content] if content.strip() else []
    if not contents:
        raise ValueError(f"{path} must have text, got only white space: name another file")
    return "".join(c if c.endswith("\n") else f"{c}\n" for c in contents[:-1]) + contents[-1]


def characters(source: str) -> Tokens:
    """Make a vocabulary whose tokens are the characters of a text, in the order of their code points."""
    alphabet = "".join(sorted(set(source)))
    number = {char: i for i, char in enumerate(alphabet)}

    def encode(words: str) -> Tensor:
        if unknown := sorted(set(words) - number.keys()):
            names = ", ".join(map(repr, unknown[:10]))
            raise ValueError(f"expected the {len(alphabet)} characters of the text, got {names}: leave them out")
        return torch.tensor([number[char] for char in words])

    return Tokens(len(alphabet), encode, lambda tokens: "".join(alphabet[t] for t in tokens), digest_of(alphabet))


def byte_pairs(source: str, vocabulary: int) -> Tokens:
    """Learn a vocabulary of byte-level byte pairs (Sennrich et al., 2016; Radford et al., 2019) from a text."""
    tokenizers = import_extra("tokenizers", "a vocabulary of byte pairs", "gbfunc[text]")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([source], vocabulary, min_frequency=0, show_progress=False)
    size, digest = tokenizer.get_vocab_size(), digest_of(tokenizer.to_str())
    return Tokens(size, lambda words: torch.tensor(tokenizer.encode(words).ids), tokenizer.decode, digest)


def digest_of(words: str) -> str:
    """Return a short hash of a text."""
    return hashlib.sha256(words.encode()).hexdigest()[:8]


@torch.no_grad()
def continue_text(net: Net, task: Task, prompt: str, tokens: int, *, temperature: float = 0.8, seed: int = 0) -> str:
    """Let a language model write `tokens` tokens, and return the text after the prompt.

    `net` maps tokens [1, positions] to logits [1, positions, tokens of the vocabulary], on the CPU. The logits are
    divided by the temperature: below 1, likely tokens become likelier. At 0, the model always writes the likeliest
    token. Raises `ValueError` for a task without texts, an empty prompt, unknown characters, or numbers out of range.
    """
    if task.encode is None or task.decode is None:
        raise ValueError(f"expected a task of texts with encode and decode, got {task.name}: take text or chat")
    if not prompt:
        raise ValueError("the prompt must hold at least one character, got an empty one")
    if type(tokens) is not int or tokens < 1:
        raise ValueError(f"tokens must be an int >= 1, got {tokens!r}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be a number >= 0, got {temperature!r}")
    (context,) = task.interface.inputs
    generator = torch.Generator().manual_seed(seed)
    written = task.encode(prompt).tolist()
    if "pretrained" in task.pnet.config:
        sampled = {"temperature": temperature} if temperature else {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            ids = torch.tensor([written])
            all_1L = cast(Any, net).generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=bool(sampled), **sampled
            )
        return task.decode(all_1L[0, len(written) :].tolist())
    # Ignore surplus logits: a model may have more outputs than the task has tokens.
    start, known = len(written), task.interface.outputs
    for _ in range(tokens):
        logits_V = logits_of(net(torch.tensor([written[-context:]])))[0, -1, :known].double()
        if temperature == 0:
            token = logits_V.argmax()
        else:
            # Subtract the largest logit, so that a temperature near 0 does not overflow.
            weights_V = ((logits_V - logits_V.max()) / temperature).softmax(0)
            token = torch.multinomial(weights_V, 1, generator=generator)
        written.append(int(token))
    return task.decode(written[start:])


@dataclass(frozen=True, eq=False)
class PaddedTexts(Split):
    """Padded texts [N, L] with classes [N] or next tokens [N, L]. A batch is cut to the length of its longest text."""

    lengths: Tensor  # number of tokens per text [N], on the CPU

    def __getitem__(self, index: Any) -> Batch:
        x, y = self.x[index, : int(self.lengths[index].max())], self.y[index]
        return x, y if y.ndim == 1 else y[:, : x.shape[1]]

    def order(self, shuffled_N: Tensor, batch_size: int, generator: torch.Generator) -> Sequence[Tensor]:
        # Sort texts by length within random pools: half the padding of unsorted texts, and batches are still random.
        pools = (pool[self.lengths[pool].argsort(stable=True)] for pool in shuffled_N.split(_POOL * batch_size))
        batches = [index_B for pool in pools for index_B in pool.split(batch_size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def classified(
    name: str,
    data_dir: Path | None = None,
    pretrained: str | None = None,
    max_tokens: int = 64,
    vocabulary: int | None = None,
) -> Task:
    """Load texts with classes from UTF-8 files `train.txt` and `test.txt`. A line is a label, white space and a text.

    A tenth of the training texts, at most 500, is for validation. The p-net is a pretrained network with its own tokens
    (see `pretrained_network`), or a small BERT with `vocabulary` byte pairs (by default 1,000), learned from the
    training texts. A linear layer classifies the mean output over a text's first `max_tokens` tokens. The data set of
    `trec` (Li and Roth, 2002) has 5,452 questions for training and 500 for the test, in 6 classes.
    """
    check_int(name, "max_tokens", max_tokens, 4)
    check_int(name, "vocabulary", vocabulary, 257)
    _check_vocabulary(pretrained, vocabulary)
    folder = data_folder(name, data_dir, "train.txt and test.txt")
    labels, learned = read_labelled(path := folder / "train.txt")
    test_labels, tested = read_labelled(test_path := folder / "test.txt")
    if len(classes := sorted(set(labels))) < 2:
        raise ValueError(f"{path} must hold texts of two classes or more, got {classes[0]!r} alone")
    if len(learned) < LEAST:
        raise ValueError(f"{path} must hold {LEAST} texts or more, got {len(learned)}")
    number = {label: i for i, label in enumerate(classes)}
    if unknown := [(i, label) for i, label in enumerate(test_labels, 1) if label not in number]:
        names = ", ".join(map(repr, classes[:10])) + (", ..." if len(classes) > 10 else "")
        line, label = unknown[0]
        raise ValueError(f"{test_path}, line {line}: expected a label of train.txt, {names}, got {label!r}: edit it")
    labels_N, test_labels_N = (np.array([number[label] for label in names]) for names in (labels, test_labels))
    val_index, train_index = hold_out(labels_N, (min(500, len(labels_N) // 10),), SPLIT_SEED)
    if pretrained is None:
        # Number the byte pairs from 1, because 0 is the token that pads short texts.
        pairs = byte_pairs("\n".join(learned[i] for i in train_index), (vocabulary or 1_000) - 1)
        tokens = Tokens(pairs.size + 1, lambda words: pairs.encode(words)[:max_tokens] + 1)
    else:
        tokens = pretrained_tokens(pretrained, max_tokens)
    interface = Interface((max_tokens,), len(classes), vocabulary=tokens.size, pad=tokens.pad)
    splits = [([learned[i] for i in index], labels_N[index]) for index in (train_index, val_index)]
    coded = (([*map(tokens.encode, texts)], torch.from_numpy(y_N)) for texts, y_N in (*splits, (tested, test_labels_N)))
    train, val, test = (by_length(*split, tokens.pad) for split in coded)
    config: dict[str, Any] = _SMALL_BERT if pretrained is None else {"pretrained": pretrained}
    pnet = hugging_face(interface, "bert" if pretrained is None else "", **config)
    how: dict[str, Any] = dict(genome_params=None if pretrained is None else 3_000, compression=3.0)
    # Evaluate in small chunks: all texts of a chunk are padded to its longest text, so small chunks need less padding.
    how |= dict(evaluate=lambda net, split: {"accuracy": accuracy(net, split, 64)})
    how |= dict(settings=partial(_recipe, len(train), tokens.pad), encode=tokens.encode, about={"classes": classes})
    return Task(name, interface, train, val, test, pnet, **how)


texts, trec = partial(classified, "texts"), partial(classified, "trec")


def read_labelled(path: Path) -> tuple[list[str], list[str]]:
    """Read labels and texts from a file. A line is a label, white space (such as a space or a tab) and a text."""
    if not path.is_file():
        raise FileNotFoundError(f"no such file of labelled texts: {path}")
    labels, texts = [], []
    for i, line in enumerate(read_text(path).removesuffix("\n").split("\n"), 1):
        label, words = [*re.split(r"\s", line.rstrip("\r"), maxsplit=1), ""][:2]
        if not label or not words.strip():
            shown = line if len(line) <= 40 else f"{line[:40]}..."
            raise ValueError(f"{path}, line {i}: expected a label, white space and a text, got {shown!r}")
        labels.append(label)
        texts.append(words.strip())
    return labels, texts


def by_length(coded: list[Tensor], y_N: Tensor, pad: int = 0) -> PaddedTexts:
    """Pad texts and sort them by length: texts of similar length are evaluated together, with little padding."""
    lengths_N = torch.tensor([len(code) for code in coded])
    order_N = lengths_N.argsort(stable=True)
    x_NL = pad_sequence([coded[i] for i in order_N.tolist()], batch_first=True, padding_value=pad)
    return PaddedTexts(x_NL, y_N[order_N], lengths_N[order_N])


def _recipe(n_texts: int, pad: int, pnet: PNet, genome_params: float) -> Recipe:
    if "pretrained" not in pnet.config:
        return _FROM_SCRATCH
    a_pass = max(1, n_texts // _FINE_TUNING.batch_size)
    epochs = min(max(_FINE_TUNING.epochs, math.ceil(_LEAST_STEPS / a_pass)), _MOST_EPOCHS)
    lr = base_rate(genome_params)
    reasons = {
        "epochs": f"{n_texts:,} texts make {a_pass:,} steps per pass; {_FINE_TUNING.epochs} passes, or up to "
        f"{_MOST_EPOCHS} passes to reach {_LEAST_STEPS} steps",
        "lr": f"as plan.suggested_lr() for a base and {genome_params:,.0f} parameters",
        "augment": f"a random {100 * _LEFT_OUT:g} % of the tokens are masked in each step, against overfitting",
    }
    return replace(_FINE_TUNING, epochs=epochs, lr=lr, augment=leave_out(_LEFT_OUT, pad), reasons=reasons)


def pretrained_tokens(pretrained: str, max_tokens: int | None = None) -> Tokens:
    """Read a network's vocabulary. For classification, `encode` adds special tokens and truncates to `max_tokens`."""
    folder = pretrained_network(pretrained)
    needed = "a pretrained network of texts", "gbfunc[text,hf]"
    tokenizers, transformers = (import_extra(name, *needed) for name in ("tokenizers", "transformers"))
    with one_error(path := folder / TOKENIZER, "tokenizer of a pretrained network"):
        tokenizer = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    if not (classes := max_tokens is not None):
        pad = 0
    else:
        tokenizer.enable_truncation(max_tokens)
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        # A model without a padding token (GPT-2) pads with its end-of-text token, which occurs inside no text.
        pads = (getattr(config, name, None) for name in ("pad_token_id", "eos_token_id"))
        if (pad := next((x for x in pads if isinstance(x, int)), None)) is None:
            raise ValueError(f"{folder / CONFIG} must have a pad_token_id, which pads short texts, got none: add it")

    def encode(words: str) -> Tensor:
        return torch.tensor(tokenizer.encode(words, add_special_tokens=classes).ids)

    return Tokens(tokenizer.get_vocab_size(), encode, tokenizer.decode, digest_of(tokenizer.to_str()), pad)
