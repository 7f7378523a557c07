"""Hugging Face models as p-nets: tiny configurations, and pretrained encoders in folders; nothing is downloaded."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import gbfunc as gb
from gbfunc.cli import main
from gbfunc.tasks import find_task
from gbfunc.tasks.pnets import Interface, PNet, find_pnet
from gbfunc.tasks.pnets.hugging_face import TextClassifier, pretrained_network
from tests.support.pretrained import WORDS, save_network, save_texts
from tests.test_pnets import check_learning, inputs, logits

transformers = pytest.importorskip("transformers", reason="Hugging Face p-nets need transformers")

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
    x = inputs(interface)
    state = check_learning(plan, net, (x, x if interface.tokens else torch.arange(2)))
    assert logits(gb.materialize(plan, state, pnet.build(1)).eval()(x)).isfinite().all()


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
        ("hf:nope", TEXT, {}, "expected a type in transformers.CONFIG_MAPPING, such as gpt2, got 'nope'"),
        ("hf:gpt2", TEXT, {"n_layers_": 2}, r"the configuration of hf:gpt2 has no fields \['n_layers_'\]"),
        ("hf:gpt2", TEXT, {"vocab_size": 5}, "hf:gpt2 has 5 tokens, the task needs 30"),
        ("hf:gpt2", TEXT, {"n_positions": 4}, "hf:gpt2 reads 4 positions, the task's texts 8: lower context"),
        ("hf:vit", IMAGE, {"num_hidden_layers": 100_000}, "has num_hidden_layers 100000, expected at most 65,536"),
        ("hf:vit", Interface((1, 8, 8), 10**9), {}, "has num_labels 1000000000, expected at most 65,536"),
        ("hf:vit", IMAGE, {"_attn_implementation": "org/kernel"}, "which may load code"),
        ("hf:vit", TEXT, {}, "of the kind causal language model, got hf:vit"),
        ("hf:gpt2", IMAGE, {}, "of the kind image classifier, got hf:gpt2"),
        ("hf:vit", Interface((8,), 2, vocabulary=9), {}, "of the kind encoder of texts, got hf:vit"),
        ("hf:t5", Interface((8,), 2, vocabulary=9), {}, "of the kind encoder of texts, got hf:t5"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, interface: Interface, config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_pnet(name, interface, config)


@pytest.fixture
def network(tmp_path: Path) -> Path:
    return save_network(tmp_path / "network")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return save_texts(tmp_path)


def test_the_encoder_is_the_same_for_every_seed_and_the_classifier_is_not(network: Path, data: Path) -> None:
    task = find_task("texts", data, {"pretrained": str(network)})
    first, again, other = (task.build(seed).state_dict() for seed in (0, 0, 1))
    stored = transformers.BertModel.from_pretrained(network).state_dict()
    for name, value in first.items():
        assert torch.equal(value, again[name])
        if name.startswith("encoder."):
            assert torch.equal(value, other[name]) and torch.equal(value, stored[name.removeprefix("encoder.")])
    assert not torch.equal(first["classifier.weight"], other["classifier.weight"])
    assert not any("pooler" in name for name in first)


def test_texts_get_the_tokens_of_the_network(network: Path, data: Path) -> None:
    task = find_task("texts", data, {"pretrained": str(network), "max_tokens": 6})
    assert task.encode is not None and task.encode("When did Ann eat?").tolist() == [1, 4, 6, 8, 10, 2]
    assert task.encode("When did Ann never eat ?").tolist() == [1, 4, 6, 8, 3, 2]
    assert task.interface == Interface((6,), 2, vocabulary=len(WORDS), pad=0)
    assert task.train.x.shape[1] == 6


def test_nothing_is_dropped_unless_asked_for(network: Path) -> None:
    interface = Interface((8,), 2, vocabulary=len(WORDS))
    pnet = find_pnet("hf:bert", interface, {"pretrained": str(network)})
    assert json.loads(json.dumps(pnet.config))["hidden_dropout_prob"] == 0.0
    x_BL = torch.randint(1, len(WORDS), (3, 8))
    net = pnet.build(0)
    assert torch.equal(net(x_BL), net(x_BL))
    net = find_pnet("hf:bert", interface, {"pretrained": str(network), "hidden_dropout_prob": 0.5}).build(0)
    assert not torch.equal(net(x_BL), net(x_BL))


def test_its_outputs_are_the_mean_of_the_encoder(network: Path) -> None:
    net = find_pnet("hf:bert", Interface((8,), 2, vocabulary=len(WORDS)), {"pretrained": str(network)}).build(0)
    assert isinstance(net, TextClassifier)
    x_BL = torch.tensor([[1, 4, 6, 2, 0, 0], [1, 5, 2, 0, 0, 0]])
    reference = transformers.BertModel.from_pretrained(network, add_pooling_layer=False)
    for row, length in zip(x_BL, (4, 3), strict=True):
        mean_E = reference(row[None, :length]).last_hidden_state[0].mean(0)
        torch.testing.assert_close(net(x_BL[:2])[0 if length == 4 else 1], net.classifier(mean_E), rtol=1e-5, atol=1e-5)


def test_places_of_networks(network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pretrained_network(str(network)) == network
    package = tmp_path / "site" / "a_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('it need not be imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    with pytest.raises(FileNotFoundError, match="package a_package must hold config.json"):
        pretrained_network("a-package")
    (network.rename(package / "model"))
    assert pretrained_network("a-package") == package / "model"
    _ = [(tmp_path / name).write_bytes(b"GGUF") for name in ("a.gguf", "b.gguf")]  # one too many
    for name, message in (
        (str(tmp_path / "no"), "no such folder or Python package"),
        ("no_such_package", "with a pretrained network: no_such_package: installed packages: "),
        (str(tmp_path), "must hold config.json and model.*safetensors .*, or one .gguf file"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            pretrained_network(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--pnet", "hf:gpt2"], "a network of type hf:bert, got --pnet hf:gpt2"),
        (["--pnet-config", '{"max_position_embeddings": 8}'], "hf:bert reads 8 positions, the task's texts 64: lower"),
        (["--pnet-config", '{"no_field": 8}'], "has no fields ['no_field']"),
        (["--task-config", '{"max_tokens": 65}'], "hf:bert reads 64 positions, the task's texts 65: lower max_tokens"),
    ],
)
def test_what_does_not_fit_a_pretrained_network_is_refused(
    network: Path, data: Path, options: list[str], message: str, command: Any
) -> None:
    told = command(["train", "--task", "texts", "--data-dir", str(data), "--pretrained", str(network), *options], 2).err
    assert message in told and told.count("\n") == 1


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_damaged_networks_are_refused(network: Path, data: Path, name: str, command: Any) -> None:
    (network / name).write_bytes(b"{damaged")
    told = command(["train", "--task", "texts", "--data-dir", str(data), "--pretrained", str(network)], 2).err
    assert str(network) in told and told.count("\n") == 1
    (network / name).unlink()
    assert main(["train", "--task", "texts", "--data-dir", str(data), "--pretrained", str(network)]) == 2
