"""Chats: the template of the model, the loss of answers alone, and a tiny model that learns to answer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gbfunc as gb
from gbfunc.tasks import find_task
from gbfunc.tasks.pnets.hugging_face import pretrained_network
from tests.support.pretrained import CHAT, save_chat_model

pytest.importorskip("transformers", reason="they need transformers")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_chat_model(tmp_path / "llama")


def chats(path: Path, *more: Any) -> Path:
    lines = [{"prompt": f"hi {'a' * n}", "answer": "yes sir"} for n in range(12)]
    path.write_text("\n\n".join(x if isinstance(x, str) else json.dumps(x) for x in (*lines, *more)))
    return path


def test_the_loss_is_that_of_the_answers_by_a_hand_made_mask(model: Path, tmp_path: Path) -> None:
    turns = (("system", "be kind"), ("user", "a"), ("assistant", "b c"), ("user", "d"), ("assistant", "e"))
    messages = [{"role": role, "content": content} for role, content in turns]
    data = chats(tmp_path / "own.jsonl", *[{"messages": messages}] * 60)
    task: Any = find_task("chat", data, {"pretrained": str(model), "context": 80})
    assert [len(x) for x in (task.train, task.val, task.test)] == [62, 7, 3]
    net = task.build(0).eval().requires_grad_(False)
    for split in (task.train, task.val, task.test):
        losses = []
        for x_L, y_L, length in zip(*split[:], split.lengths.tolist(), strict=True):
            # A token is a character here. The answers, each with its ";", follow "[assistant]"; one ends the chat.
            text, inside = f"{task.decode(x_L[:length].tolist())};", False
            logp_LV = net(x_L[None]).logits[0].log_softmax(-1)
            for i, char in enumerate(text[:-1]):
                inside = (inside and char != ";") or text[: i + 1].endswith("[assistant]")
                assert inside == (int(y_L[i]) >= 0) and (not inside or task.decode([int(y_L[i])]) == text[i + 1])
                losses += [-float(logp_LV[i, y_L[i]])] if inside else []
        assert task.evaluate(net, split)["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert task.decode(task.encode("hi").tolist()) == "[user]hi;[assistant]"


def test_an_adapter_answers_through_the_template(model: Path, tmp_path: Path, command: Any) -> None:
    data, out = chats(tmp_path / "own.jsonl"), tmp_path / "out"
    train = ["train", "--task", "chat", "--pretrained", str(model), "--data-dir", str(data), "--genome-params", "900"]
    command([*train, "--task-config", '{"context": 64}', "--steps", "60", "--lr", "0.1", "--out", str(out)])
    metrics = json.loads((out / "metrics.json").read_text())
    task: Any = find_task("chat", data, {"pretrained": str(model), "context": 64})
    net: Any = task.build(0).eval()
    assert metrics["test_loss"] < task.evaluate(net, task.test)["loss"] - 0.1
    grown: Any = gb.materialize(*gb.load(out / "genome.safetensors"), net).eval()
    ids = task.encode("hi a")[None]
    written = grown.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
    # Neither data nor task are named, and only the answer is written.
    sample = ["sample", "--genome", str(out / "genome.safetensors"), "--temperature", "0", "--tokens", "9"]
    assert command([*sample, "--prompt", "hi a"]).out == task.decode(written[0, ids.shape[1] :].tolist()) + "\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{no", "line 25 is not a valid chat: Expecting property name"),
        ('["a"]', 'line 25 is not a valid chat: expected {"prompt": ..., "answer": ...} or {"messages"'),
        ({"prompt": "a", "answer": " "}, "line 25 is not a valid chat: expected answers of the assistant with text"),
        ({"messages": [{"role": "robot", "content": "a"}, {"role": "assistant", "content": "b"}]}, "no role robot"),
        ({"prompt": "a" * 99, "answer": "b"}, "an answer within 64 tokens, got none: raise context to 119"),
    ],
)
def test_wrong_lines_are_named(line: Any, message: str, model: Path, tmp_path: Path, command: Any) -> None:
    data = ["--data-dir", str(chats(tmp_path / "own.jsonl", line)), "--pretrained", str(model)]
    told = command(["train", "--task", "chat", *data, "--task-config", '{"context": 64}'], 2).err
    assert message in told and told.count("\n") == 1


def test_models_that_cannot_answer_are_refused(model: Path, tmp_path: Path, command: Any) -> None:
    train = ["train", "--task", "chat", "--data-dir", str(chats(tmp_path / "own.jsonl"))]
    assert "needs --pretrained, and --data-dir" in command(train, 2).err
    (model / "tokenizer_config.json").unlink()
    told = command([*train, "--pretrained", str(model)], 2).err
    assert "has no chat template: take a model that was tuned on chats, or --task text" in told


def test_gguf_files_are_unpacked_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = pytest.importorskip("gguf", reason="it writes GGUF files")
    state, words = load_file(model / "model.safetensors"), json.loads((model / "tokenizer.json").read_text())["model"]
    sizes = {"vocab_size": 300, "context_length": 64, "embedding_length": 16, "block_count": 2, "head_count": 2}
    sizes |= {"feed_forward_length": 32, "head_count_kv": 1, "rope_freq_base": 1e4, "layer_norm_rms_eps": 1e-6}
    sizes |= {"tokenizer_model": "gpt2", "token_list": [*words["vocab"], *map(str, range(1_000, 2_000))][:300]}
    sizes |= {"token_merges": [" ".join(pair) for pair in words["merges"]], "chat_template": CHAT}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    monkeypatch.setenv("GBFUNC_CACHE", str(tmp_path / "cache"))
    for architecture in ("llama", "alien"):
        writer = gguf.GGUFWriter(tmp_path / f"{architecture}.gguf", architecture)
        for name, value in sizes.items():
            getattr(writer, f"add_{name}")(value)
        for name, x in state.items():
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), x.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    found = pretrained_network(str(tmp_path / "llama.gguf"))
    assert [*(tmp_path / "cache").iterdir()] == [found] and (found / "chat_template.jinja").read_text() == CHAT
    # Rows of queries and keys have another order in GGUF files.
    again = {k: x.sort(0)[0] for k, x in load_file(found / "model.safetensors").items()}
    torch.testing.assert_close(again, {k: x.sort(0)[0] for k, x in state.items()}, rtol=0, atol=0)
    with pytest.raises(ValueError, match="GGUF model with architecture alien is not supported yet"):
        pretrained_network(str(tmp_path / "alien.gguf"))
