"""The module of an adapter: its base is frozen, shared, and in no state dict."""

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import gbfunc as gb
from gbfunc.trees import flatten_tree
from tests.support.adapters import adapter, pretrained, tokens
from tests.support.forms import assert_close, vectors
from tests.support.versions import needs_whole_graphs


def loss_fn(net: Any, batch: Tensor) -> Tensor:
    return F.cross_entropy(net(batch), torch.tensor([0, 1, 2, 0, 1, 2]))


def test_the_base_is_neither_parameter_nor_buffer() -> None:
    pnet, plan, genome = adapter()
    module = gb.GenomeModule(plan, pnet, genome)
    direct = {"classifier.weight", "classifier.bias"}
    assert {k for k in module.state_dict() if not k.startswith("gnets:")} == direct
    assert sum(p.numel() for p in module.parameters()) == plan.genome_params and not list(module.buffers())


@pytest.mark.parametrize("lazy", [True, False, "auto"])
def test_a_plain_loop_is_the_functional_step_bit_by_bit(lazy: Any) -> None:
    pnet, plan, genome = adapter(gb.periodic(2), max_tile=6)
    assert torch.equal(gb.GenomeModule(plan, pnet, lazy=lazy)(tokens()), pnet(tokens())), "a fresh one is the base"
    step = gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.SGD, lr=0.1), lazy=lazy)
    state = step.init(0)._replace(gnets=genome.gnets, direct=genome.direct)
    module, before = gb.GenomeModule(plan, pnet, genome, lazy=lazy), copy.deepcopy(pnet.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        state, info = step(state, tokens())
        optimizer.zero_grad()
        loss = loss_fn(module, tokens())
        loss.backward()
        optimizer.step()
        assert torch.equal(loss, info.loss)
    given, expected = (flatten_tree(gb.Genome(g.gnets, g.direct, g.buffers)) for g in (module.to_genome(), state))
    assert all(torch.equal(given[k], x) for k, x in expected.items()) and given.keys() == expected.keys()
    assert all(torch.equal(x, before[k]) for k, x in pnet.state_dict().items()), "the p-net is as it was"


def test_training_mode_reaches_dropout_and_leaves_the_bases_statistics() -> None:
    pnet, plan, genome = adapter()
    module = gb.GenomeModule(plan, pnet, genome).train()
    assert not torch.equal(module(tokens()), module(tokens()))
    module.eval()
    assert torch.equal(module(tokens()), gb.GenomeModule(plan, pretrained(), genome)(tokens()))
    # Also where the p-net comes in training mode.
    module = gb.GenomeModule(plan, pnet.train(), genome)
    module(tokens())
    assert module.training and not torch.equal(module(tokens()), module(tokens()))


def test_a_norm_that_is_new_is_trained_and_keeps_statistics() -> None:
    pnet, plan, genome = adapter(modules_to_save=["classifier", "norm"], target_modules=["query"])
    module = gb.GenomeModule(plan, pnet, genome).train()
    before = module.to_genome().buffers
    module(tokens())
    after = module.to_genome().buffers
    changed = {k for k in after if not torch.equal(after[k], before[k])}
    assert changed == {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_bring_the_base(again: Any) -> None:
    pnet, plan, genome = adapter()
    module = gb.GenomeModule(plan, pnet, genome)
    assert torch.equal(again(module)(tokens()), module(tokens()))


def test_a_folder_names_the_base(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="folders of the hub need huggingface_hub")
    from huggingface_hub import ModelCard

    pnet, plan, genome = adapter()
    assert plan.base is not None
    named = plan.base._replace(name="someone/small", revision="abc")
    plan = gb.Plan(plan.tensors, plan.buffers, plan.target, named)
    module = gb.GenomeModule(plan, pnet, genome)
    module.save_pretrained(tmp_path)
    base = json.loads((tmp_path / "config.json").read_text())["base"]
    assert base == named._asdict() and base["name"] == "someone/small"
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict()["base_model"] == "someone/small" and "adapter" in card.data.to_dict()["tags"]
    assert f"digest `{named.digest}`" in card.text and "`someone/small` (revision `abc`)" in card.text
    other = gb.GenomeModule.from_pretrained(tmp_path, pnet=pretrained())
    assert torch.equal(other(tokens()), module(tokens()))
    with pytest.raises(ValueError, match=r"the genome's base 'someone/small' \(revision abc\) has digest"):
        gb.GenomeModule.from_pretrained(tmp_path, pnet=pretrained(1))


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_cast_reaches_the_base(dtype: torch.dtype, lazy: bool) -> None:
    pnet, plan, genome = adapter()
    module = gb.GenomeModule(plan, pnet, genome, lazy=lazy).eval()
    cast = copy.deepcopy(module).to(dtype)
    net = gb.materialize(plan, genome, pnet).eval().double()
    tolerance = 1e-6 if dtype == torch.float64 else 0.05
    for copied in (cast, copy.deepcopy(cast), pickle.loads(pickle.dumps(cast))):
        outputs = copied(tokens())
        assert outputs.dtype == dtype
        torch.testing.assert_close(outputs.double(), net(tokens()), rtol=tolerance, atol=tolerance)
    assert module(tokens()).dtype == pnet(tokens()).dtype == torch.float32, "a copy's base is its own"


@needs_whole_graphs
@pytest.mark.parametrize("lazy", [True, False, "auto"])
def test_torch_export_takes_any_batch_and_leaves_the_base(lazy: Any) -> None:
    pnet, plan, genome = adapter()
    module = gb.GenomeModule(plan, pnet, genome, lazy=lazy).eval()
    example = tokens().repeat(2, *[1] * (tokens().ndim - 1))
    program = torch.export.export(module, (example,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    torch.testing.assert_close(program(tokens()), module(tokens()))
    many = tokens().repeat(40, *[1] * (tokens().ndim - 1))
    torch.testing.assert_close(program(many), module(many))


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "vmap": lambda f, x: torch.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "vmap_grad": lambda f, x: torch.vmap(torch.func.grad(lambda x: f(x).square().sum()))(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x[0]),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x[0]),
}


X = vectors(5, 6)


def made(hypernet: Any = None) -> tuple[nn.Module, gb.Plan]:
    torch.manual_seed(0)
    pnet = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    return pnet, gb.make_plan(pnet, hypernet or gb.periodic(2), max_tile=5)


@pytest.mark.parametrize("lazy", [True, False, "auto"])
@pytest.mark.parametrize("hypernet", [gb.periodic(2), gb.bilinear(2), gb.gnet((3,))], ids=lambda h: h.type)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_the_inputs_are_those_of_the_dense_net(transform: str, hypernet: Any, lazy: Any) -> None:
    pnet, plan = made(hypernet)
    module, take = gb.GenomeModule(plan, pnet, lazy=lazy), TRANSFORMS[transform]
    leaves: dict[str, Tensor] = dict(module.named_parameters())
    gnets = {e: {k: leaves[f"gnets:{e}:{k}"] for k in own} for e, own in module.to_genome().gnets.items()}
    direct = {k: x for k, x in leaves.items() if not k.startswith("gnets:")}
    weights = gb.generate(plan, gb.Genome(gnets, direct, {}))
    expected, found = take(lambda x: functional_call(pnet, weights, x), X), take(module, X)
    assert_close(found, expected)
    # The transform is over: its result has a gradient of the genome.
    grads = (torch.autograd.grad(y.square().sum(), [*leaves.values()], allow_unused=True) for y in (found, expected))
    for gradient, target in zip(*grads, strict=True):
        assert (gradient is None) == (target is None)
        assert gradient is None or torch.allclose(gradient, target, 1e-10, 1e-10)


@pytest.mark.parametrize("kernel", ["auto", "compiled", "eager"])
def test_weights_are_generated_inside_of_a_transform(kernel: Any) -> None:
    pnet, plan = made()
    genome = gb.init_genome(plan, pnet)
    weights = gb.generate(plan, genome)["0.weight"]
    found = torch.vmap(lambda x: gb.generate(plan, genome, kernel=kernel)["0.weight"] @ x)(X)
    assert_close(found, X @ weights.T)
