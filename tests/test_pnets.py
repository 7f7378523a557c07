"""P-nets by name: they build, fit their task, scale, plan and read themselves back; wrong options are told."""

from pathlib import Path

import pytest
import torch

import gbfunc as gb
from gbfunc.tasks.pnets import PNETS, Interface, find_pnet, narrowed
from gbfunc.tasks.pnets.base import is_import_path, n_params

IMAGE = Interface((3, 32, 32), 10)
TEXT = Interface((16,), 30, tokens=True)
SMALL = {
    "mlp": (IMAGE, {"hidden": [20, 12]}),
    "convnet": (IMAGE, {"width": 6}),
    "lenet5": (IMAGE, {"width": 6}),
    "allconv": (IMAGE, {"width": 6}),
    "resnet18": (IMAGE, {"width": 4}),
    "resnet20": (IMAGE, {"width": 4}),
    "resnet56": (IMAGE, {"width": 2}),
    "vit": (IMAGE, {"width": 16, "layers": 2, "patch": 8}),
    "gpt": (TEXT, {"layers": 2, "width": 16, "heads": 2}),
    "actor_critic": (Interface((5,), 3, actions="choice"), {"hidden": [12, 8], "odd": True}),
    "recurrent_actor_critic": (Interface((5,), 3, actions="choice"), {"hidden": 12}),
    "conv_actor_critic": (Interface((2, 6, 7), 3, actions="choice"), {"width": 4, "hidden": 12}),
}


def logits(output):
    return output[0] if isinstance(output, tuple) else getattr(output, "logits", output)


def inputs(interface: Interface) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if interface.tokens:
        return torch.randint(interface.outputs, (2, *interface.inputs), generator=generator)
    return torch.randn(2, *interface.inputs, generator=generator)


def outputs(interface: Interface) -> tuple[int, ...]:
    return (2, *interface.inputs, interface.outputs) if interface.tokens else (2, interface.outputs)


def shapes(net: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in net.named_parameters()}


def check_learning(plan: gb.Plan, net: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> gb.TrainState:
    def loss_fn(net, batch):
        return torch.nn.functional.cross_entropy(logits(net(batch[0])).flatten(0, -2), batch[1].flatten())

    step = gb.make_train_step(plan, net, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=1e-2))
    state, first = step(step.init(seed=0), batch)
    for _ in range(5):
        state, info = step(state, batch)
    assert info.loss < first.loss
    return state


@pytest.mark.parametrize("name", sorted(PNETS))
def test_a_family_builds_scales_plans_and_trains(name: str) -> None:
    interface, config = SMALL[name]
    pnet = find_pnet(name, interface, config)
    assert shapes(find_pnet(name, interface, pnet.config).build(0)) == shapes(pnet.build(0)) and pnet.scaled is not None
    sizes = [n_params(pnet.scaled(f).make()) for f in (0.0, 0.5, 1.0, 2.0)]
    assert sizes == sorted(sizes) and sizes[2] == (total := n_params(pnet.build(0)))
    with torch.device("meta"):
        assert all(n_params(narrowed(pnet, params).make()) >= params for params in (1, total // 3, total))
    before = torch.get_rng_state()
    net = pnet.build(0)
    assert torch.equal(before, torch.get_rng_state())
    again, other = pnet.build(0).state_dict(), pnet.build(1).state_dict()
    assert all(torch.equal(v, again[k]) for k, v in net.state_dict().items())
    assert not all(torch.equal(v, other[k]) for k, v in net.state_dict().items())
    x = inputs(interface)
    assert logits(net(x)).shape == outputs(interface)
    size = int(n_params(net) / 2)
    plan = gb.make_plan(net, **pnet.plan(size)._asdict(), genome_params=size)
    assert plan.genome_params <= size
    check_learning(plan, net, (x, torch.zeros(outputs(interface)[:-1], dtype=torch.int64)))


def test_the_small_net_is_the_smallest_that_is_no_smaller() -> None:
    pnet = find_pnet("mlp", Interface((1, 8, 8), 10), {"hidden": [500]})
    for genome_params in (5, 85, 86, 300, 2_062):
        width = narrowed(pnet, genome_params).config["hidden"][0]
        assert 75 * width + 10 >= genome_params and (width == 1 or 75 * (width - 1) + 10 < genome_params)


@pytest.mark.parametrize("name", SMALL)
def test_another_type_of_g_net_takes_the_place_of_the_tuned_one(name: str) -> None:
    """Everywhere but where a rule gives a size, which is a choice of its own."""
    interface, config = SMALL[name]
    options = find_pnet(name, interface, config).plan(1_000)
    other = options.with_hypernet(gb.low_rank())
    assert other.hypernet == gb.low_rank()
    for (pattern, before), (same, after) in zip(options.rules, other.rules, strict=True):
        tuned = before is not None and before.type == "periodic" and before.size is None
        assert same == pattern and after == (gb.low_rank() if tuned else before)


def test_a_genome_of_lenet_begins_unsure() -> None:
    pnet = find_pnet("lenet5", Interface((1, 28, 28), 10), {})
    net = pnet.build(0)
    plan = gb.make_plan(net, **pnet.plan(2_000)._asdict(), genome_params=2_000)
    # Smooth images, as digits are.
    x = torch.randn(20, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    x = torch.nn.functional.interpolate(x, (28, 28), mode="bicubic")
    with torch.no_grad():
        found = [gb.materialize(plan, gb.init_genome(plan, net, seed), net)(x) for seed in range(3)]
    assert max(float(y.std()) for y in found) < 1


def test_published_sizes() -> None:
    for name, interface, config, size in (
        ("mlp", Interface((1, 28, 28), 10), {}, 636_010),
        ("gpt", Interface((64,), 65, tokens=True), {}, 805_248),  # nanoGPT's for a CPU, norms with biases
        ("resnet20", IMAGE, {}, 269_722),  # He et al., table 6: 0.27 and 0.85 million
        ("resnet56", IMAGE, {}, 853_018),
        # torchvision's has 1,000 classes and a stem of 7 x 7.
        ("resnet18", IMAGE, {}, 11_689_512 - 990 * 513 - 3 * 64 * (49 - 9)),
    ):
        assert n_params(find_pnet(name, interface, config).build(0)) == size


def test_gpt_looks_only_back() -> None:
    net = find_pnet("gpt", TEXT, SMALL["gpt"][1]).build(0).eval()
    x = inputs(TEXT)
    changed = x.clone()
    changed[:, 8:] = (changed[:, 8:] + 1) % 30
    assert torch.allclose(net(x)[:, :8], net(changed)[:, :8], atol=1e-6)
    assert not torch.allclose(net(x)[:, 8:], net(changed)[:, 8:], atol=1e-3)
    # Shorter texts are read too.
    assert torch.allclose(net(x[:, :5]), net(x)[:, :5], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "interface", "config", "message"),
    [
        ("nope", IMAGE, {}, "no p-net 'nope': choose one of mlp, convnet, lenet5"),
        ("mlp", Interface((8,), 2, vocabulary=9), {}, "take hf:TYPE"),
        ("gpt", IMAGE, {}, "gpt reads text"),
        ("lenet5", Interface((1, 8, 8), 10), {}, "reads images of 16 x 16 or more, the task has inputs of 1 x 8 x 8"),
        ("vit", IMAGE, {"patch": 5}, "patch of vit must divide the images of 32 x 32, got 5"),
        ("gpt", TEXT, {"width": 10, "heads": 4}, "multiple of its 4 heads, got 10"),
        ("gpt", TEXT, {"layers": 0}, "layers of gpt must be an int >= 1, got 0"),
        ("gpt", TEXT, {"depth": 3}, "the p-net gpt has no option depth: its options are layers, width"),
        ("allconv", IMAGE, {"width": "wide"}, "width of allconv must be an int >= 1, got 'wide'"),
        ("vit", Interface((4, 8, 8), 3, actions="choice"), {}, "reads images, the task has observations"),
        ("gpt", TEXT, {"bias": 1}, "bias of gpt must be true or false, got 1"),
        ("mlp", IMAGE, {"hidden": 3}, "options of the p-net mlp do not fit"),
        ("mlp", IMAGE, {"hidden": [0]}, r"hidden of mlp must be at least 1, got \[0\]"),
        ("os:sep", IMAGE, {}, "must be a function that returns an nn.Module, got str"),
        ("os:getpid", IMAGE, {}, "must return an nn.Module or a PNet, got int"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, interface: Interface, config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_pnet(name, interface, config)


def test_own_pnets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets.py").write_text(
        "from torch import nn\n"
        "from gbfunc.tasks.pnets import PlanOptions, PNet\n"
        "def build(width=4):\n    return nn.Sequential(nn.Flatten(), nn.Linear(3072, width), nn.Linear(width, 10))\n"
        "def fitting(interface):\n    return nn.Linear(7, interface.outputs)\n"
        "def planned():\n    return PNet('mine', build, plan=lambda size: PlanOptions(max_tile=4))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert [is_import_path(name) for name in ("a:b", "a.b:c.d", "mlp", "a/b:c")] == [True, True, False, False]
    net = find_pnet("own_nets:build", IMAGE, {"width": 5}).build(0)
    assert net(inputs(IMAGE)).shape == (2, 10) and shapes(net)["1.weight"] == (5, 3072)
    assert shapes(find_pnet("own_nets:fitting", IMAGE, {}).build(0))["weight"] == (10, 7)
    planned = find_pnet("own_nets:planned", IMAGE, {})
    assert (planned.plan(100).max_tile, planned.name) == (4, "own_nets:planned")
    with pytest.raises(ValueError, match="own_nets:build has no option depth: its options are width"):
        find_pnet("own_nets:build", IMAGE, {"depth": 5})
    with pytest.raises(ImportError, match="cannot import own_nothing"):
        find_pnet("own_nothing:build", IMAGE, {})
