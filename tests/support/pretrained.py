"""A tiny pretrained network as a folder, and texts that it has words for."""

import json
from pathlib import Path
from typing import Any

import torch

WORDS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "when", "where", "did", "does", "ann", "bob", "eat", "sleep", "?")


def save_network(folder: Path, seed: int = 7) -> Path:
    import tokenizers
    import transformers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    small: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=64, **small)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.BertModel(config).save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=special)
    tokenizer.enable_padding(length=30)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def save_language_model(folder: Path, seed: int = 7) -> Path:
    """Save a Llama of a few thousand parameters with tokens of bytes."""
    import tokenizers
    import transformers

    small: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=300, intermediate_size=32, num_key_value_heads=1, tie_word_embeddings=True, **small
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["once upon a time"], 300, show_progress=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


CHAT = (
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no role robot') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def save_chat_model(folder: Path, seed: int = 7) -> Path:
    kept = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT}
    (save_language_model(folder, seed) / "tokenizer_config.json").write_text(json.dumps(kept))
    return folder


def save_texts(folder: Path) -> Path:
    kinds = (("time", "When did"), ("place", "Where does"))
    names, ends = ("ann", "bob"), ("eat", "sleep", "eat and sleep")
    lines = [f"{kind} {start} {name} {end} ?" for name in names for end in ends for kind, start in kinds]
    for part in ("train", "test"):
        (folder / f"{part}.txt").write_text("\n".join(lines))
    return folder
