"""Hugging Face models as p-nets, from tiny configurations; nothing is downloaded."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.tasks import loss_fn, token_loss
from gbfunc.tasks.pnets import Interface, PNet, find_pnet

pytest.importorskip("transformers", reason="Hugging Face p-nets need transformers")

IMAGE = Interface((3, 16, 16), 10)
TEXT = Interface((8,), 30, tokens=True)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY: dict[str, tuple[Interface, dict[str, Any]]] = {
    "hf:gpt2": (TEXT, {"n_layer": 2, "n_embd": 16, "n_head": 2}),
    "hf:llama": (TEXT, SIZES | {"num_key_value_heads": 1}),
    "hf:vit": (IMAGE, SIZES | {"patch_size": 8}),
    "hf:resnet": (IMAGE, {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 1], "layer_type": "basic"}),
}


@pytest.mark.parametrize("name", sorted(TINY))
def test_a_genome_of_a_tiny_model_learns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing may be downloaded.
    monkeypatch.setattr(socket.socket, "connect", None)
    interface, config = TINY[name]
    pnet = find_pnet(name, interface, config)
    assert json.loads(json.dumps(pnet.config)) == pnet.config
    net = pnet.build(0)
    assert all(torch.equal(v, pnet.build(0).state_dict()[k]) for k, v in net.state_dict().items())
    plan = gb.make_plan(net, **pnet.plan(1)._asdict(), compression=1.5)
    assert plan.ratio_params >= 1.5 and len(plan.generated) >= 4
    generator = torch.Generator().manual_seed(0)
    if interface.tokens:
        x = torch.randint(30, (4, 8), generator=generator)
        batch, loss = (x, x), token_loss
    else:
        batch, loss = (torch.randn(4, 3, 16, 16, generator=generator), torch.arange(4)), loss_fn
    step = gb.make_train_step(plan, net, loss, gb.torch_optimizer(torch.optim.Adam, lr=1e-2))
    state, first = step(step.init(seed=0), batch)
    for _ in range(5):
        state, info = step(state, batch)
    assert info.loss < first.loss
    back = gb.materialize(plan, state, pnet.build(1)).eval()
    assert torch.isfinite(loss(back, batch)[0])


def test_what_the_task_decides_is_filled_in() -> None:
    def config_of(pnet: PNet) -> Any:
        return pnet.build(0).config

    gpt2 = config_of(find_pnet("hf:gpt2", *TINY["hf:gpt2"]))
    assert gpt2.vocab_size == 30 and gpt2.n_positions == 8
    # A general name is the model's own, also beside what is filled in.
    named = config_of(find_pnet("hf:gpt2", TEXT, {"hidden_size": 16, "n_head": 2, "max_position_embeddings": 12}))
    assert (named.n_embd, named.n_positions) == (16, 12)
    assert config_of(find_pnet("hf:llama", *TINY["hf:llama"])).max_position_embeddings == 8
    vit = config_of(find_pnet("hf:vit", *TINY["hf:vit"]))
    assert (vit.image_size, vit.num_channels, vit.num_labels) == (16, 3, 10)


@pytest.mark.parametrize(
    ("name", "interface", "config", "message"),
    [
        ("hf:nope", TEXT, {}, "Hugging Face knows no model type 'nope'"),
        ("hf:", TEXT, {}, "Hugging Face knows no model type ''"),
        ("hf:gpt2", TEXT, {"n_layers_": 2}, r"the configuration of hf:gpt2 has no fields \['n_layers_'\]"),
        ("hf:gpt2", TEXT, {"vocab_size": 5}, "hf:gpt2 has 5 tokens, the task needs 30"),
        ("hf:gpt2", TEXT, {"n_positions": 4}, "hf:gpt2 reads 4 positions, the task's texts have 8"),
        ("hf:vit", TEXT, {}, "hf:vit is no causal language model"),
        ("hf:gpt2", IMAGE, {}, "hf:gpt2 is no image classifier"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, interface: Interface, config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_pnet(name, interface, config)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog " * 30)
    config = json.dumps(TINY["hf:gpt2"][1])
    model = ["--task", "text", "--data-dir", str(tmp_path), "--task-config", '{"context": 8}']
    model += ["--pnet", "hf:gpt2", "--pnet-config", config]
    assert main(["train", *model, "--compression", "2", "--steps", "5", "--out", str(tmp_path / "run")]) == 0
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["pnet"] == "hf:gpt2" and metrics["pnet_config"]["n_embd"] == 16
    capsys.readouterr()
    assert main(["eval", *model, "--genome", str(tmp_path / "run" / "genome.safetensors")]) == 0
    assert f"{metrics['test_loss']:.4f} nats" in capsys.readouterr().out
    assert main(["train", *model[:-1], '{"n_embd": 15, "n_head": 2}']) == 2
    assert capsys.readouterr().err.count("\n") == 1
