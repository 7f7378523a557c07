"""The module form in the hands of code that looks at a module's class, names, layers and tensors."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import replicate
from torch.optim.swa_utils import AveragedModel, update_bn

import gbfunc as gb
from tests.support.forms import assert_close, vectors
from tests.support.hugging_face import tiny


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)).double()


def both(pnet: nn.Module, hypernet: Any = None, lazy: Any = "auto", **options: Any) -> tuple[Any, Any]:
    plan = gb.make_plan(pnet, hypernet or gb.periodic(2), **options)
    genome = gb.init_genome(plan, pnet)
    return gb.GenomeModule(plan, pnet, genome, lazy=lazy), gb.materialize(plan, genome, pnet)


GPT2 = partial(tiny, "GPT2LMHeadModel", vocab_size=50)


def trainer_of(net: Any, folder: Path, data: Any = None, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(str(folder), report_to=[], use_cpu=True, **options)
    return transformers.Trainer(net, arguments, train_dataset=data, eval_dataset=data)


@pytest.mark.parametrize("lazy", [True, False])
def test_a_trainer_smooths_shifted_labels_and_spares_norms_decay(lazy: bool, tmp_path: Path) -> None:
    ids = torch.arange(48).reshape(4, 12) * 7 % 50
    net, dense = both(GPT2(), lazy=lazy)
    found = []
    for one in (net, dense):
        trainer = trainer_of(one.eval(), tmp_path, label_smoothing_factor=0.1, weight_decay=0.1)
        found.append(trainer.compute_loss(one, {"input_ids": ids, "labels": ids}).detach())
        decayed = trainer.get_decay_parameter_names(one)
        assert not [name for name in decayed if "ln_" in name or name.endswith("bias")]
    assert_close(found[0], found[1], 1e-5)


@pytest.mark.parametrize("lazy", [True, False])
def test_norms_are_found_by_their_type(lazy: bool) -> None:
    loader, averaged = [vectors(5, 6) * (i + 1) for i in range(3)], []
    for one in both(norms(), lazy=lazy):
        model = AveragedModel(one.train())
        update_bn(loader, model)
        averaged.append(model.eval()(vectors(4, 6)))
    assert_close(averaged[0], averaged[1])
    net, dense = both(norms(), lazy=lazy)
    for one in (net, dense):
        for module in one.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eval()
    before = net.to_genome().buffers
    net(vectors(5, 6))
    torch.testing.assert_close(net.to_genome().buffers, before)
    converted: Any = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    assert isinstance(converted[1], nn.SyncBatchNorm)


def test_hooks_and_apply_reach_layers_by_type() -> None:
    net, dense = (one.eval() for one in both(norms()))
    seen: list[Any] = []
    for module in net.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda layer, args, out: seen.append(layer.out_features))
    assert_close(net(vectors(4, 6)), dense(vectors(4, 6)))
    assert seen == [8, 3]
    for one in (net, dense):
        one.apply(lambda m: nn.init.constant_(m.bias, 0.5) if isinstance(m, nn.Linear) else None)
    assert_close(net(vectors(4, 6)), dense(vectors(4, 6)))


class Tempered(nn.Module):
    temperature = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)) / self.temperature


@pytest.mark.parametrize("lazy", [True, False])
def test_attributes_parts_and_replaced_layers(lazy: bool) -> None:
    net, dense = both(Tempered().double(), lazy=lazy)
    x = vectors(4, 6)
    net.temperature = dense.temperature = 0.1
    assert_close(net(x), dense(x))
    assert_close(net.encode(x), dense.encode(x))
    net.encode(x).sum().backward()
    assert all(p.grad is not None for k, p in net.named_parameters() if "8x6" in k)
    head = nn.Linear(8, 5).double()
    net.head = dense.head = head
    assert_close(net(x), dense(x))
    with pytest.raises(ValueError, match="the module has parameters that the plan does not know"):
        net.to_genome()


def clone_module(module: nn.Module) -> nn.Module:
    """A copy whose parameters are functions of the module's, as meta-learners make it."""
    clone = module.__new__(type(module))
    clone.__dict__ = module.__dict__.copy()
    clone._parameters = {k: None if p is None else p * 1.5 for k, p in module._parameters.items()}  # pyright: ignore
    clone._buffers = {k: None if b is None else b.clone() for k, b in module._buffers.items()}
    clone._modules = {k: None if m is None else clone_module(m) for k, m in module._modules.items()}
    return clone


@pytest.mark.parametrize("lazy", [True, False])
def test_copies_with_parameters_of_their_own_use_them(lazy: bool) -> None:
    net, _ = both(norms().eval(), gb.low_rank(2), lazy=lazy)
    factored = gb.materialize(net.plan, net.to_genome(), norms().eval(), factored=True)
    x = vectors(4, 6)
    for one in (net, factored):
        clone, expected = clone_module(one), copy.deepcopy(one)
        with torch.no_grad():
            for p in expected.parameters():
                p.mul_(1.5)
        assert_close(clone(x), expected(x))
        clone(x).square().mean().backward()
        expected(x).square().mean().backward()
        for (name, p), q in zip(one.named_parameters(), expected.parameters(), strict=True):
            assert p.grad is not None and q.grad is not None, name
            assert_close(p.grad, q.grad * 1.5)


@pytest.mark.parametrize("lazy", [True, False])
def test_replicas_use_their_own_tensors(lazy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`nn.DataParallel` copies to each device; here both copies are on the CPU, the second of other numbers."""
    net, dense = both(norms().eval(), gb.low_rank(2), lazy=lazy)
    factored = gb.materialize(net.plan, net.to_genome(), norms().eval(), factored=True)

    def broadcast(tensors: Any, devices: Any, detach: bool = False) -> list[list[Tensor]]:
        return [[x.clone() for x in tensors], [x * 1.5 if x.is_floating_point() else x.clone() for x in tensors]]

    module: Any = __import__("torch.nn.parallel.replicate", fromlist=["replicate"])
    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", broadcast)
    monkeypatch.setattr(module, "_get_device_index", lambda x, optional=False: 0, raising=False)
    for one in (net, factored):
        first, second = replicate(one, [0, 1])
        expected = copy.deepcopy(one)
        with torch.no_grad():
            for x in (*expected.parameters(), *expected.buffers()):
                x.mul_(1.5) if x.is_floating_point() else None
        assert_close(first(vectors(4, 6)), dense.eval()(vectors(4, 6)))
        assert_close(second(vectors(4, 6)), expected(vectors(4, 6)))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", ["module", "factored", "adapter"])
def test_inference_mode_gives_what_no_grad_gives(kind: str, nested: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    pnet = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    options = {"base": "own"} if kind == "adapter" else {}
    net, _ = both(pnet, gb.low_rank(2), lazy=True, **options)
    if kind == "factored":
        net = gb.materialize(net.plan, net.to_genome(), pnet, factored=True)
    net.eval()
    x = vectors(3, 5, 8).float()
    with torch.no_grad():
        expected = net(x)
    with torch.inference_mode():
        assert_close(net(x), expected, 1e-6)


def test_a_question_answerer_is_evaluated(tmp_path: Path) -> None:
    net, dense = both(tiny("BertForQuestionAnswering", vocab_size=30))
    ids = torch.arange(48).reshape(4, 12) * 7 % 30
    data = [{"input_ids": x, "start_positions": x[0] % 12, "end_positions": x[1] % 12} for x in ids]
    losses = [trainer_of(one, tmp_path).evaluate(data)["eval_loss"] for one in (net, dense)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    options = {"num_train_epochs": 2, "eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch"}
    trainer = trainer_of(net, tmp_path, data, load_best_model_at_end=True, **options)
    trainer.train()
    best = min(log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-5)


def test_an_ensemble_of_modules_under_vmap_and_changed_leaves() -> None:
    net, _ = both(Tempered().double())
    x, leaves = vectors(4, 6), {k: p.detach() * 1.1 for k, p in net.named_parameters()}
    other = copy.deepcopy(net)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    assert_close(torch.func.functional_call(net, leaves, (x,)), other(x))
    params, buffers = torch.func.stack_module_state([net, other])
    found = torch.vmap(lambda p, b: torch.func.functional_call(net, (p, b), (x,)))(params, buffers)
    assert_close(found, torch.stack([net(x), other(x)]))
