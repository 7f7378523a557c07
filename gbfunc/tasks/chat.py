"""The task `chat`: a language model learns to answer. Only the tokens of answers count in the loss.

Suffixes: N chats, L positions of a chat.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gbfunc.extras import import_extra
from gbfunc.tasks.base import Task
from gbfunc.tasks.data import SPLIT_SEED, hold_out
from gbfunc.tasks.pnets.hugging_face import pretrained_network
from gbfunc.tasks.text import HELD_OUT, LEAST, Tokens, by_length, check_int, digest_of, language_task, read_text
from gbfunc.untrusted import one_error

_OUTSIDE = -100  # target where the next token is in no answer; cross entropy ignores this target
_FORMS = '{"prompt": ..., "answer": ...} or {"messages": [{"role": ..., "content": ...}, ...]} with texts'


def chat(data_dir: Path | None = None, pretrained: str | None = None, context: int = 512) -> Task:
    """Load chats on which the language model `pretrained` is trained to write the answers of the assistant.

    `data_dir` is a UTF-8 file. Each line is a chat in JSON: `{"prompt": ..., "answer": ...}`, or `{"messages":
    [{"role": "user", "content": ...}, ...]}` with at least one message of the role `assistant`. A random tenth of the
    chats is for validation, and a twentieth for the test (at most 128 each). Only the first `context` tokens are used.
    """
    check_int("chat", "context", context, 2)
    if data_dir is None or pretrained is None:
        raise ValueError(f"the chat task needs --pretrained, and --data-dir with a file of lines {_FORMS}")
    tokens, tokenizer = chat_tokens(pretrained)
    coded: list[tuple[Tensor, Tensor]] = []
    for i, line in enumerate(read_text(data_dir).split("\n"), 1):
        if line.strip():
            with one_error(f"{data_dir}, line {i}", "chat"):
                coded.append(_coded(tokenizer, _messages(json.loads(line)), context))
    if (n := len(coded)) < LEAST:
        raise ValueError(f"{data_dir} must hold {LEAST} chats or more, got {n}: add chats, one per line")
    counts = min(HELD_OUT, n // 10), min(HELD_OUT, max(1, n // 20))
    indices = hold_out(np.zeros(n, np.int64), counts, SPLIT_SEED)
    y_NL = pad_sequence([y_L for _, y_L in coded], batch_first=True, padding_value=_OUTSIDE)
    val, test, train = (by_length([coded[i][0] for i in index], y_NL[index]) for index in indices)
    return language_task("chat", (train, val, test), tokens, context, pretrained)


def chat_tokens(pretrained: str) -> tuple[Tokens, Any]:
    """Return a chat model's vocabulary and tokenizer. `Tokens.encode` puts a prompt into the model's chat template."""
    folder = pretrained_network(pretrained)
    transformers = import_extra("transformers", "a chat template", "gbfunc[llm]")
    with one_error(folder, "folder with the tokenizer of a pretrained network"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if not tokenizer.chat_template:
        raise ValueError(f"{pretrained} has no chat template: take a model that was tuned on chats, or --task text")

    def encode(prompt: str) -> Tensor:
        asked = [{"role": "user", "content": prompt}]
        return torch.tensor(tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False))

    digest = digest_of(tokenizer.backend_tokenizer.to_str() + str(tokenizer.chat_template))
    return Tokens(len(tokenizer), encode, partial(tokenizer.decode, skip_special_tokens=True), digest), tokenizer


def _messages(found: Any) -> list[dict[str, str]]:
    found = found if isinstance(found, dict) else {}
    pair = (("user", "prompt"), ("assistant", "answer"))
    messages: Any = found.get("messages", [{"role": role, "content": found.get(key)} for role, key in pair])
    known = isinstance(messages, list) and all(isinstance(m, dict) for m in messages)
    if not known or not all(isinstance(m.get(k), str) for m in messages for k in ("role", "content")):
        raise ValueError(f"expected {_FORMS}")
    answers = [m["content"].strip() for m in messages if m["role"] == "assistant"]
    if not answers or not all(answers):
        raise ValueError("expected answers of the assistant with text, got none or an empty one: add the answer")
    return messages


def _coded(tokenizer: Any, messages: list[dict[str, str]], context: int) -> tuple[Tensor, Tensor]:
    """Return a chat's tokens [L] and targets [L]: the next token, or -100 if the next token is in no answer."""
    write = partial(tokenizer.apply_chat_template, tokenize=False)
    text, spans = write(messages), []
    for n in (n for n, message in enumerate(messages) if message["role"] == "assistant"):
        asked, answered = write(messages[:n], add_generation_prompt=True), write(messages[: n + 1])
        if not (text.startswith(answered) and answered.startswith(asked)):
            raise ValueError("the chat template changes earlier messages: give a line for each answer")
        spans.append((len(asked), len(answered)))
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside_L = torch.tensor([any(a < end and start < b for a, b in spans) for start, end in coded["offset_mapping"]])
    x_L = torch.tensor(coded["input_ids"])
    y_L = x_L.masked_fill(~inside_L, _OUTSIDE)[1 : context + 1]
    if bool((y_L == _OUTSIDE).all()):
        raise ValueError(f"expected an answer within {context} tokens, got none: raise context to {len(x_L)}")
    return x_L[:-1][:context], y_L
