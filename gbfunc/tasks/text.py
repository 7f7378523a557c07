"""Language modelling on any text: the next character, or the next byte-pair token."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gbfunc.extras import import_extra
from gbfunc.tasks.base import LOSS, Net, Recipe, Task, logits_of, text_metrics, token_loss
from gbfunc.tasks.data import Windows
from gbfunc.tasks.pnets import PNETS, Interface, PNet

TEST_PART, VAL_PART = 0.05, 0.1
"""The last tenth validates and all up to it trains, as is usual for tiny shakespeare; the test is the beginning."""

# The batch of nanoGPT's run on a CPU (config/train_shakespeare_char.py and its readme), for twice as long.
_RECIPE = Recipe(lr=2e-2, direct_lr=4e-3, dense_lr=4e-3, batch_size=12, steps=4_000, measure_every=500, clip_norm=1.0)
_SMALL = 65_000  # genomes of up to so many parameters take the whole rate, larger ones less
_MAX_BYTES = 1 << 30


class Tokens(NamedTuple):
    """A vocabulary."""

    size: int  # number of tokens, the pad included
    encode: Callable[[str], Tensor]  # text to tokens [L]; `ValueError` for text without tokens
    decode: Callable[[list[int]], str] | None = None  # tokens to text
    digest: str = ""  # tells vocabularies of equal size apart
    pad: int = 0  # token that fills up short texts, if no text contains it


def check_int(task: str, name: str, value: Any, least: int) -> None:
    """Raise `ValueError` for an option of a task that is neither None nor an int from `least` on."""
    if value is not None and (type(value) is not int or value < least):
        raise ValueError(f"{name} of the {task} task must be an int >= {least}, got {value!r}")


def text(data_dir: Path | None = None, context: int = 64, vocabulary: int | None = None) -> Task:
    """Load the task of modelling a text: the first 5 % test, the last 10 % validate, the part between them trains.

    Args:
        data_dir: a text file in UTF-8, or a folder of text files (see `read_text`); None for the English of Python's
            help (`pydoc_data.topics`).
        context: tokens that the model sees.
        vocabulary: byte-pair tokens, made from the training part; None for characters.
    """
    check_int("text", "context", context, 2)
    check_int("text", "vocabulary", vocabulary, 257)
    source = python_help() if data_dir is None else read_text(data_dir)
    first, last = int(len(source) * TEST_PART), int(len(source) * (1 - VAL_PART))
    parts = (source[first:last], source[last:], source[:first])
    tokens = characters(source) if vocabulary is None else byte_pairs(parts[0], vocabulary)
    splits = [Windows(tokens.encode(part), context, len(part)) for part in parts]
    for split in splits:
        if (n := len(split.tokens)) <= context + 1:
            where = data_dir or "the text"
            raise ValueError(f"{where} is too short: a part of it has {n} tokens, and a window needs {context + 1}")
    interface = Interface((context,), tokens.size, tokens=True)
    return Task(
        "text",
        interface,
        splits[0],
        splits[1],
        splits[2],
        PNETS["gpt"](interface),
        _recipe,
        loss=token_loss,
        evaluate=text_metrics,
        metrics=LOSS,
        encode=tokens.encode,
        decode=tokens.decode,
        about={"alphabet": tokens.digest},
    )


def _recipe(pnet: PNet, genome_params: float) -> Recipe:
    """Choose the rate: of 6e-3, 4e-3 and 2e-2, 290,000 parameters take the first."""
    if _SMALL < genome_params < math.inf:
        return replace(_RECIPE, lr=_RECIPE.lr * (_SMALL / genome_params) ** 0.8)
    return _RECIPE


def python_help() -> str:
    """Return the English of Python's help: some hundred topics of its reference."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def read_text(path: Path) -> str:
    """Read a text file, or all `.txt` files under a folder as one text.

    Files of a folder follow each other in the order of their paths below the folder, on every machine, each beginning
    on a new line. Hidden files and folders are left out, and files without text.

    Raises:
        FileNotFoundError: if there is no file.
        ValueError: if the text is too large or empty, or a file is not UTF-8 or has a NUL.
    """
    if not path.exists():
        raise FileNotFoundError(f"no such text file or folder: {path}")
    files = [path]
    if path.is_dir():
        parts = {file.relative_to(path).parts: file for file in path.rglob("*.txt") if file.is_file()}
        files = [parts[part] for part in sorted(parts) if not any(name.startswith(".") for name in part)]
        if not files:
            raise FileNotFoundError(f"no .txt file in {path}")
    if (size := sum(file.stat().st_size for file in files)) > _MAX_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, a text may have {_MAX_BYTES:,}")
    contents = [content for file in files if (content := _read_file(file)).strip()]
    if not contents:
        raise ValueError(f"{path} holds no text")
    return "".join(c if c.endswith("\n") else f"{c}\n" for c in contents[:-1]) + contents[-1]


def _read_file(path: Path) -> str:
    try:
        # Some editors write a mark of the byte order first, which is no character of the text.
        content = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8 (byte {error.start:,})") from error
    if "\0" in content:
        raise ValueError(f"{path} is damaged or no text: it has a NUL at character {content.index(chr(0)):,}")
    return content


def characters(source: str) -> Tokens:
    """Take the characters of a text as tokens, in the order of their code points."""
    alphabet = sorted(set(source))
    number = {char: i for i, char in enumerate(alphabet)}

    def encode(part: str) -> Tensor:
        if unknown := sorted(set(part) - number.keys()):
            names = ", ".join(map(repr, unknown[:10]))
            raise ValueError(f"no {names} among the {len(alphabet)} characters of the text")
        return torch.tensor([number[char] for char in part])

    def decode(tokens: list[int]) -> str:
        return "".join(alphabet[t] for t in tokens)

    return Tokens(len(alphabet), encode, decode, _digest("".join(alphabet)))


def byte_pairs(source: str, vocabulary: int) -> Tokens:
    """Learn byte-level byte-pair tokens (Sennrich et al., 2016; Radford et al., 2019) from a text."""
    tokenizers = import_extra("tokenizers", "a vocabulary of byte pairs", "gbfunc[text]")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([source], vocabulary, min_frequency=0, show_progress=False)
    size, digest = tokenizer.get_vocab_size(), _digest(tokenizer.to_str())
    return Tokens(size, lambda part: torch.tensor(tokenizer.encode(part).ids), tokenizer.decode, digest)


def _digest(words: str) -> str:
    return hashlib.sha256(words.encode()).hexdigest()[:8]


@torch.no_grad()
def continue_text(net: Net, task: Task, prompt: str, tokens: int, *, temperature: float = 0.8, seed: int = 0) -> str:
    """Let a language model write: each token is drawn given the tokens before it that the model can see.

    Args:
        net: maps tokens [1, L] to logits [1, L, V], on the CPU.
        task: a task of texts.
        prompt: beginning of the text.
        tokens: number of tokens to write.
        temperature: divides the logits before the softmax: below 1 is more careful, 0 takes the likeliest token.
        seed: seed of the draws.

    Returns:
        The text after the prompt.

    Raises:
        ValueError: for a task without texts, an empty prompt, unknown characters, or numbers out of range.
    """
    if task.encode is None or task.decode is None:
        raise ValueError(f"the task {task.name} has no text to go on from: take one that encodes and decodes")
    if not prompt:
        raise ValueError("the prompt must hold at least one character, got an empty one")
    if type(tokens) is not int or tokens < 1:
        raise ValueError(f"tokens must be an int >= 1, got {tokens!r}")
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be a number >= 0, got {temperature!r}")
    (context,) = task.interface.inputs
    generator = torch.Generator().manual_seed(seed)
    written = task.encode(prompt).tolist()
    # A model may have room for more tokens than the task has.
    start, known = len(written), task.interface.outputs
    for _ in range(tokens):
        logits_V = logits_of(net(torch.tensor([written[-context:]])))[0, -1, :known].double()
        if temperature == 0:
            token = logits_V.argmax()
        else:
            # The largest logit becomes 0: a temperature near 0 must not overflow.
            weights_V = ((logits_V - logits_V.max()) / temperature).softmax(0)
            token = torch.multinomial(weights_V, 1, generator=generator)
        written.append(int(token))
    return task.decode(written[start:])
