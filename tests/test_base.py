"""Adapters: a frozen base and generated deltas of it, in every mode and on p-nets that nobody tuned for."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.formats import genome_file_bytes
from tests.support.dense_oracle import assert_same, dense_answer, moved_deltas, step_answer, weights_of
from tests.support.strategies import Net
from tests.support.sweep_nets import HYPERNETS, NETS, Setting
from tests.support.zoo import SGD, loss_fn

MODES: dict[str, dict[str, Any]] = {"dense": {"lazy": False}, "auto": {"lazy": "auto", "microbatches": 2}}
MODES |= {remat: {"remat": remat, "lazy": True} for remat in ("generate", "layer")}


def settle(pnet: nn.Module) -> nn.Module:
    for module in pnet.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return pnet


def adapted(net: str, hypernet: str, max_tile: Any) -> tuple[Callable[[], nn.Module], gb.Plan, Setting]:
    setting = Setting(net, hypernet, 0)
    options = {**NETS[net].options, "hypernet": HYPERNETS[hypernet](), "max_tile": max_tile}
    return lambda: settle(setting.pnet()), gb.make_plan(settle(setting.pnet()), **options, base="own"), setting


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("net", NETS)
def test_a_step_is_that_of_base_and_delta(net: str, mode: str) -> None:
    place = list(NETS).index(net)
    hypernet, max_tile = [*HYPERNETS][place % len(HYPERNETS)], (None, 3)[(place + list(MODES).index(mode)) % 2]
    make, plan, setting = adapted(net, "periodic" if hypernet == "stochastic" else hypernet, max_tile)
    expected = dense_answer(plan, make(), loss_fn, setting.batch(), microbatches=MODES[mode].get("microbatches", 1))
    assert max(float(g.abs().max()) for g in expected.gradients.values()) > 1e-6
    assert_same(step_answer(plan, make(), loss_fn, setting.batch(), **MODES[mode]), expected, setting.tolerance)


def kept_outputs() -> tuple[list[Tensor], Callable[..., Tensor]]:
    outputs = []

    def keep(net: Any, batch: Tensor) -> Tensor:
        outputs.append(net(batch).detach())
        return loss_fn(net, batch)

    return outputs, keep


EACH_NET = [(net, "periodic") for net in ("conv2d", "encoder", "tied", "gpt2", "bfloat16", "complex")]


@pytest.mark.parametrize(("net", "hypernet"), EACH_NET + [("mlp", h) for h in HYPERNETS if h != "new_rows"])
def test_the_network_is_the_base_bit_for_bit_at_first(net: str, hypernet: str) -> None:
    make, plan, setting = adapted(net, hypernet, None)
    pnet, batch = make().eval(), setting.batch()
    genome = gb.init_genome(plan, pnet, 3)
    weights, expected = gb.generate(plan, genome, base=pnet), pnet(batch)
    for name, tensor in pnet.named_parameters():
        assert torch.equal(weights[name], tensor), name
    for factored in (False, True):
        assert torch.equal(gb.materialize(plan, genome, pnet, factored=factored)(batch), expected)
    outputs, keep = kept_outputs()
    for options in MODES.values():
        step = gb.make_train_step(plan, pnet, keep, SGD, **{**options, "microbatches": 1})
        step(step.init(0), batch)
    assert plan.stochastic or all(torch.equal(out, expected) for out in outputs)


@pytest.mark.parametrize("name", ["periodic", "low_rank", "xox", "gnet", "module"])
def test_all_leaves_of_a_delta_come_to_move(name: str) -> None:
    pnet = NETS["mlp"].pnet().double()
    plan = gb.make_plan(pnet, HYPERNETS[name](), base="own")
    step = gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=0.05))
    first = state = step.init(0)
    losses = []
    for _ in range(10):
        state, info = step(state, NETS["mlp"].batch(torch.float64))
        losses.append(float(info.loss))
    assert losses[-1] < losses[0]
    for ensemble, leaves in state.gnets.items():
        for leaf, values in leaves.items():
            assert not torch.equal(values, first.gnets[ensemble][leaf]), leaf


def moved_genome(plan: gb.Plan, pnet: nn.Module) -> gb.Genome:
    genome = gb.init_genome(plan, pnet)
    return genome._replace(gnets=moved_deltas(plan, genome.gnets))


def headed(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 20))
    return Net(lambda net, x: net.classifier(torch.relu(net.body(x))), body=body, classifier=nn.Linear(20, 3))


@pytest.mark.parametrize(
    "options",
    [{"modules_to_save": ["classifier"]}, {"include": ["bias"], "exclude": [r"body\.2"], "modules_to_save": []}],
    ids=["head", "vectors"],
)
def test_materialized_networks_and_weights_agree(options: dict[str, Any]) -> None:
    pnet = headed().eval()
    plan = gb.make_plan(pnet, gb.low_rank(1), base="own", **options)
    assert "classifier.bias" in {t.name for t in plan.tensors}
    genome, x = moved_genome(plan, pnet), torch.randn(5, 6)
    weights = gb.generate(plan, genome, base=pnet)
    for name, weight in weights_of(plan, genome, pnet).items():
        torch.testing.assert_close(weights[name], weight)
    expected = torch.func.functional_call(pnet, weights, (x,))
    for factored in (False, True):
        torch.testing.assert_close(gb.materialize(plan, genome, pnet, factored=factored).eval()(x), expected)
    assert not torch.allclose(expected, pnet(x))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norms_of_a_base_keep_their_vectors(norm: Callable[[nn.Module], nn.Module]) -> None:
    pnet = nn.Sequential(norm(nn.Linear(6, 4)), nn.Linear(4, 3))
    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(2), base="own"), pnet, loss_fn, SGD)
    with torch.no_grad():
        expected = loss_fn(pnet.eval(), x := torch.randn(5, 6))
    torch.testing.assert_close(step(step.init(), x)[1].loss, expected)


def test_what_is_frozen_is_in_no_plan_and_no_file(tmp_path: Path) -> None:
    pnet = headed()
    plan = gb.make_plan(pnet, gb.periodic(2), base="own", target_modules=["body.0"], modules_to_save=["classifier"])
    assert [t.name for t in plan.tensors] == ["body.0.weight", "classifier.weight", "classifier.bias"]
    assert [t.role for t in plan.tensors] == ["delta", "direct", "direct"] and not plan.buffers
    assert plan.base is not None and plan.base.params == sum(p.numel() for p in pnet.body.parameters())
    assert plan.pnet_params == sum(p.numel() for p in pnet.parameters())
    size = gb.save(tmp_path / "g.safetensors", plan, gb.init_genome(plan, pnet))
    assert size == genome_file_bytes(plan)
    with safe_open(tmp_path / "g.safetensors", framework="pt") as file:
        assert sum(file.get_tensor(k).numel() for k in file.keys()) == plan.genome_params  # noqa: SIM118
    loaded, _ = gb.load(tmp_path / "g.safetensors")
    assert loaded == plan and loaded.base == plan.base
    for words in ("base ", f"{plan.base.params:,} parameters", "delta", "2 new tensors"):
        assert words in plan.report()


def test_another_base_is_refused_everywhere(tmp_path: Path) -> None:
    pnet, other = headed(0), headed(1)
    plan = gb.make_plan(pnet, gb.periodic(2), base="own", modules_to_save=["classifier"])
    genome = gb.init_genome(plan, pnet)
    for use in (
        lambda: gb.generate(plan, genome, base=other),
        lambda: gb.materialize(plan, genome, other),
        lambda: gb.GenomeModule(plan, other, genome),
        lambda: gb.make_train_step(plan, other, loss_fn, SGD),
    ):
        with pytest.raises(ValueError, match="digest"):
            use()
    with pytest.raises(ValueError, match="base="):
        gb.generate(plan, genome)
    whole = gb.make_plan(pnet, gb.periodic(2))
    with pytest.raises(ValueError, match="no base"):
        gb.generate(whole, gb.init_genome(whole, pnet), base=pnet)
    # A new head is no part of the base.
    other.body = pnet.body
    gb.materialize(plan, genome, other)
    with torch.no_grad():
        pnet.body[0].bias[0] += 1e-6
    with pytest.raises(ValueError, match="digest"):
        gb.materialize(plan, genome, pnet)


def test_the_base_is_neither_trained_nor_changed_nor_copied() -> None:
    pnet = headed().eval()
    before = {k: v.clone() for k, v in pnet.state_dict().items()}
    plan = gb.make_plan(pnet, gb.periodic(2), base="own", modules_to_save=["classifier"])
    step = gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=0.1))
    state = step.init(0)
    for _ in range(3):
        state, _ = step(state, torch.randn(4, 6))
    assert all(torch.equal(v, before[k]) for k, v in pnet.state_dict().items())
    assert set(state.direct) == {"classifier.weight", "classifier.bias"}
    weights = gb.generate(plan, state, base=pnet)
    assert weights["body.1.weight"].data_ptr() == pnet.body[1].weight.data_ptr()
    assert not torch.equal(weights["classifier.weight"], pnet.classifier.weight)


def test_statistics_of_a_base_stay_as_they_are() -> None:
    pnet = headed().train()
    outputs, keep = kept_outputs()
    x = torch.randn(4, 6)
    plan = gb.make_plan(pnet, gb.periodic(2), base="own", modules_to_save=["classifier"])

    def trains(net: Any, batch: Tensor) -> Tensor:
        assert net.train().training and not net.body[1].training
        return keep(net.eval().train(), batch)

    step = gb.make_train_step(plan, pnet, trains, SGD)
    state, _ = step(step.init(0), x)
    assert int(pnet.body[1].num_batches_tracked) == 0 and not state.buffers and pnet.body[1].training
    torch.testing.assert_close(outputs.pop(), headed().eval()(x))
    plan = gb.make_plan(pnet, gb.periodic(2), base="own", modules_to_save=["classifier", "body.1"])
    step = gb.make_train_step(plan, pnet, keep, SGD)
    state, _ = step(step.init(0), x)
    assert int(state.buffers["body.1.num_batches_tracked"]) == 2
    torch.testing.assert_close(outputs.pop(), headed().train()(x))


def test_a_base_that_changes_its_buffers_is_refused() -> None:
    pnet: Any = Net(lambda net, x: net.layer(x + net.calls.add_(1)), layer=nn.Linear(6, 3), calls=torch.zeros(()))
    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(2), base="own"), pnet, loss_fn, SGD)
    with pytest.raises(ValueError, match="changes 'calls' of its base: name its module in modules_to_save"):
        step(step.init(0), torch.randn(4, 6))
    assert float(pnet.calls) == 0


@pytest.mark.parametrize(
    ("modules", "names"),
    [
        (None, "0.query 0.value 0.out 1.query 1.value 1.out"),
        (["query", "value"], "0.query 0.value 1.query 1.value"),
        (["1.query"], "1.query"),
        (r"1\.(query|out)", "1.query 1.out"),
        ("all-linear", "0.query 0.value 0.out 1.query 1.value 1.out"),
        (["words", "1.out"], "words 1.out"),
    ],
)
def test_target_modules_are_named_as_in_peft(modules: Any, names: str) -> None:
    layers = [nn.ModuleDict({k: nn.Linear(4, 4) for k in ("query", "value", "out")}) for _ in range(2)]
    pnet = nn.ModuleDict({"0": layers[0], "1": layers[1], "words": nn.Embedding(7, 4), "classifier": nn.Linear(4, 2)})
    plan = gb.make_plan(pnet, gb.low_rank(1), base="own", target_modules=modules, modules_to_save=["classifier"])
    assert {t.name.removesuffix(".weight") for t in plan.tensors if t.base} == set(names.split())


@pytest.mark.parametrize(("target", "role"), [(60, "generated"), (371, "generated"), (372, "direct")])
def test_a_head_is_generated_where_it_would_take_most_of_the_target(target: int, role: str) -> None:
    pnet = nn.Sequential(nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 3))
    plan = gb.make_plan(pnet, base="own", modules_to_save=["2"], genome_params=target)
    assert plan.genome_params <= target
    assert {t.name: t.role for t in plan.tensors}["2.weight"] == role
    assert ("2.weight: the given values are lost; a genome of 372" in plan.report()) == (role == "generated")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_base_in_another_dtype_is_named(dtype: torch.dtype) -> None:
    wide = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 20))
    plan = gb.make_plan(wide, gb.periodic(2), base="own")
    genome, name = moved_genome(plan, wide), str(dtype).removeprefix("torch.")
    words = f"made for weights in float32, these are in {name}: load them in float32, .*to\\(torch.{name}\\)"
    with pytest.raises(ValueError, match=words):
        gb.materialize(plan, genome, copy.deepcopy(wide).to(dtype))


def test_wrong_targets_are_refused() -> None:
    pnet = headed()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"base": "other"}, "base must be"),
        ({"target_modules": ["body.0"]}, "base='own'"),
        ({"modules_to_save": ["classifier"]}, "base='own'"),
        ({"base": "own", "target_modules": ["nothing"]}, "names no module"),
        ({"base": "own", "target_modules": "("}, "regular expression"),
        ({"base": "own", "modules_to_save": ["nothing"]}, "names no module"),
        ({"base": "own", "target_modules": [], "modules_to_save": []}, "no parameter of the p-net has a delta"),
        ({"base": "own", "target_modules": ["body.0", "body.1"]}, "'body.1' names no linear"),
        ({"base": "own", "target_modules": ["body.0", "body"]}, "'body' names no linear"),
    ]
    for options, words in wrong:
        with pytest.raises(ValueError, match=words):
            gb.make_plan(pnet, **options)
    for options in ({"modules_to_save": "classifier"}, {"target_modules": [3]}, {"target_modules": 3}):
        with pytest.raises(TypeError):
            gb.make_plan(pnet, base="own", **options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="names no module with a parameter or buffer"):
        gb.make_plan(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), base="own", modules_to_save=["1"])
    with pytest.raises(ValueError, match="meta device"):
        gb.make_plan(nn.Linear(3, 3, device="meta"), base="own")


def test_a_forged_base_in_a_plan_is_refused() -> None:
    plan = gb.make_plan(headed(), gb.periodic(2), base="own")
    data = json.loads(plan.to_json())
    assert gb.Plan.from_json(plan.to_json()) == plan
    for base in (["x"], ["x", -1, 3, "", ""], [1, 1, 1, "", ""], None):
        with pytest.raises(ValueError):
            gb.Plan.from_json(json.dumps(data | {"base": base}))
    del data["base"]
    with pytest.raises(ValueError, match="must have a base"):
        gb.Plan.from_json(json.dumps(data))


def test_gradients_and_maps_go_through_a_base() -> None:
    pnet = headed().double().eval()
    plan = gb.make_plan(pnet, gb.low_rank(1), base="own")
    genome = moved_genome(plan, pnet)
    x, base = torch.randn(4, 6, dtype=torch.float64), plan.base_tensors(pnet)

    def loss(gnets: Any) -> Tensor:
        weights = gb.generate(plan, genome._replace(gnets=gnets), base=base)
        return torch.func.functional_call(pnet, weights, (x,)).square().mean()

    gradient = torch.func.grad(loss)(genome.gnets)
    (ensemble, leaves), *_ = gradient.items()
    leaf, step = next(iter(leaves)), 1e-6
    bumped = {e: dict(own) for e, own in genome.gnets.items()}
    bumped[ensemble][leaf] = bumped[ensemble][leaf] + step * torch.ones_like(bumped[ensemble][leaf])
    torch.testing.assert_close((loss(bumped) - loss(genome.gnets)) / step, leaves[leaf].sum(), rtol=1e-4, atol=1e-7)
    with pytest.raises(ValueError, match="made outside"):
        torch.func.grad(lambda x: x * gb.generate(plan, genome, base=pnet)["body.0.bias"].sum())(torch.ones(()))


def test_a_base_is_not_split_over_ranks_of_a_model() -> None:
    pnet = headed()
    plan = gb.make_plan(pnet, gb.periodic(2), base="own")
    with pytest.raises(ValueError, match="not split"):
        gb.make_train_step(plan, pnet, loss_fn, SGD, parallel={})
    with pytest.raises(ValueError, match="not split"):
        gb.plan_parallel(plan, pnet, torch.randn(4, 6), ranks=2)


def test_a_forward_does_not_change_the_base() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.5)
            return super().forward(input)

    pnet = nn.Sequential(nn.Sequential(nn.Embedding(9, 6), Scaled(6, 6)), nn.Linear(6, 3))
    plan = gb.make_plan(pnet, gb.low_rank(1), base="own", include=[r"1\.weight"], exclude=["0"])
    step = gb.make_train_step(plan, pnet, lambda net, x: net(x).square().mean(), SGD)
    with pytest.raises(ValueError, match="of its base: name its module in modules_to_save"):
        step(step.init(), torch.arange(9))
    pnet = nn.Sequential(nn.Embedding(9, 6, max_norm=0.5), nn.Linear(6, 3))
    with pytest.raises(ValueError, match="a base must be frozen, got '0', whose max_norm changes"):
        gb.make_plan(pnet, gb.low_rank(1), base="own", include=[r"1\.weight"], exclude=["0"])
