"""Generation: equal to a loop over single weights, differentiable in every way, pure, and a plain module in the end."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import gbfunc as gb
from gbfunc.generation import generate_piece
from gbfunc.hypernets import Hypernet
from gbfunc.layers import KINDS
from gbfunc.pnet.pure import PureNet
from tests.support import oracles
from tests.support.strategies import ALL_EXAMPLES, convnets, mlps, named
from tests.support.trees_equal import copy_tree, photograph, same_bits
from tests.support.zoo import BUFFERS_ONLY, ZOO, Animal, dtype_of, genome_of, loss_fn, mlp, noise_of, small

ALL = {**ZOO, "buffers_only": BUFFERS_ONLY}
EACH = pytest.mark.parametrize("animal", ALL.values(), ids=ALL)
HYPERNETS = pytest.mark.parametrize("hypernet", ALL_EXAMPLES, ids=named)


@EACH
def test_generate_equals_a_loop_over_single_weights(animal: Animal) -> None:
    _, plan, genome = genome_of(animal)
    noise = noise_of(plan)
    weights = gb.generate(plan, genome, noise=noise)
    expected = oracles.weights(plan, genome, noise)
    assert list(weights) == [t.name for t in plan.tensors] == list(expected)
    for t in plan.tensors:
        assert weights[t.name].dtype == getattr(torch, t.dtype)
        tolerance = 2e-2 if t.dtype == "bfloat16" else 1e-12 if t.dtype == "float64" else 2e-5
        torch.testing.assert_close(
            weights[t.name].double(), torch.from_numpy(np.array(expected[t.name])), rtol=tolerance, atol=tolerance
        )


# A tile of one weight has codes without numbers; torch says so where a g-net module has a layer for them.
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")
@given(st.one_of(mlps(9), convnets(3)), st.sampled_from(ALL_EXAMPLES), st.integers(1, 7), st.integers(0, 9))
def test_generate_equals_the_loop_for_any_pnet(pnet: nn.Module, hypernet: Hypernet, tile: int, seed: int) -> None:
    pnet = pnet.double()
    plan = gb.make_plan(pnet, hypernet, max_tile=tile)
    genome = gb.init_genome(plan, pnet, seed)
    expected = oracles.weights(plan, genome)
    for name, weight in gb.generate(plan, genome).items():
        torch.testing.assert_close(weight, torch.from_numpy(np.array(expected[name])), rtol=1e-9, atol=1e-9)


@EACH
def test_generation_is_pure(animal: Animal) -> None:
    pnet, plan, genome = genome_of(animal)
    before, picture, random = copy_tree(genome), photograph(pnet), torch.get_rng_state()
    first, second = gb.generate(plan, genome), gb.generate(plan, genome)
    gb.materialize(plan, genome, pnet)
    assert same_bits(first, second)
    assert same_bits(gb.init_genome(plan, pnet, 0), genome)
    assert same_bits(genome, before) and same_bits(photograph(pnet), picture)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("name", ["mlp", "gnet", "shared"])
def test_weights_are_generated_in_full_precision_under_autocast(name: str) -> None:
    _, plan, genome = genome_of(ZOO[name])
    with torch.autocast("cpu", torch.bfloat16):
        weights = gb.generate(plan, genome)
    assert same_bits(weights, gb.generate(plan, genome))


def test_noise_is_an_argument() -> None:
    _, plan, genome = genome_of(ZOO["stochastic"])
    mean = gb.generate(plan, genome)
    noise = noise_of(plan)
    assert same_bits(noise, noise_of(plan))
    drawn = gb.generate(plan, genome, noise=noise)
    zero = gb.generate(plan, genome, noise=copy_tree({e: {k: v * 0 for k, v in n.items()} for e, n in noise.items()}))
    for t in plan.generated:
        assert not torch.isclose(drawn[t.name], mean[t.name]).any()
        torch.testing.assert_close(zero[t.name], mean[t.name])
    assert gb.sample_noise(ZOO["mlp"].plan(mlp()), torch.Generator()) == {}


@EACH
def test_a_fresh_genome_has_the_planned_leaves_and_the_pnets_own_direct_values(animal: Animal) -> None:
    pnet, plan, genome = genome_of(animal)
    shapes = {e.name: {k: torch.Size(s) for k, s in e.shapes.items()} for e in plan.ensembles if e.shapes}
    assert {e: {k: v.shape for k, v in leaves.items()} for e, leaves in genome.gnets.items()} == shapes
    assert all(v.dtype == plan.dtype for leaves in genome.gnets.values() for v in leaves.values())
    own = dict(pnet.named_parameters())
    for name, value in genome.direct.items():
        assert not value.requires_grad and value.device.type == "cpu" and value.isfinite().all()
        assert own[name].is_meta or torch.equal(value, own[name])
    assert same_bits(genome.buffers, {k: v.detach() for k, v in pnet.named_buffers()})
    assert plan.genome_params == sum(v.numel() for v in tree_leaves([genome.gnets, genome.direct]))


def test_a_meta_pnet_starts_like_a_real_one() -> None:
    """The weights of norms are 1, vectors 0, and matrices have deviation 1 / sqrt(fan_in)."""
    with torch.device("meta"):
        pnet = nn.Sequential(nn.Embedding(300, 64), nn.LayerNorm(64), nn.Linear(64, 100))
    plan = gb.make_plan(pnet, gb.periodic(16))
    weights = gb.generate(plan, gb.init_genome(plan, pnet))
    assert torch.equal(weights["1.weight"], torch.ones(64)) and torch.equal(weights["1.bias"], torch.zeros(64))
    assert torch.equal(weights["2.bias"], torch.zeros(100))
    for name in ("0.weight", "2.weight"):
        assert float(weights[name].std()) == pytest.approx(1 / 8, rel=0.05)


def test_meta_buffers_are_refused() -> None:
    with torch.device("meta"):
        pnet = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="buffers .*running_mean.* are on the meta device"):
        gb.init_genome(gb.make_plan(pnet), pnet)


@pytest.mark.parametrize(
    "other",
    [nn.Linear(6, 7), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), nn.Sequential(mlp(), nn.Identity())],
    ids=["missing", "shape", "names"],
)
def test_another_pnet_is_refused(other: nn.Module) -> None:
    _, plan, genome = genome_of(ZOO["mlp"])
    for door in (lambda: gb.init_genome(plan, other), lambda: gb.materialize(plan, genome, other)):
        with pytest.raises(ValueError, match=r"net: pass .*('2.bias'\] and 1 more, unk|weight is .*, expected)"):
            door()


SPOILED: dict[str, tuple[Callable[[gb.Genome], gb.Genome], str]] = {
    "no direct": (lambda g: g._replace(direct={}), "missing .*direct.*0.bias"),
    "misspelt": (lambda g: g._replace(direct={**g.direct, "0.wieght": torch.zeros(1)}), "unknown .*direct.*0.wieght"),
    "broadcastable": (
        lambda g: g._replace(direct={**g.direct, "0.bias": torch.zeros(1)}),
        r"0.bias.* is \(1,\), expected \(7,\)",
    ),
    "no g-nets": (lambda g: g._replace(gnets={}), "missing .*periodic2_.*amplitude"),
    "unknown ensemble": (lambda g: g._replace(gnets={**g.gnets, "x": {"y": torch.zeros(1)}}), "unknown .*x.*y"),
    "too few tiles": (
        lambda g: g._replace(gnets={e: {k: v[:1] for k, v in n.items()} for e, n in g.gnets.items()}),
        r"wrong shape .*phase.* is \(1, 2\), expected \(\d, 2\)",
    ),
    "no buffers": (lambda g: g._replace(buffers={}), "missing .*buffers/1.num_batches_tracked"),
}


@pytest.mark.parametrize(("spoil", "words"), SPOILED.values(), ids=SPOILED)
def test_a_genome_that_does_not_fit_is_refused(spoil: Callable[[gb.Genome], gb.Genome], words: str) -> None:
    pnet = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7))
    plan = gb.make_plan(pnet, gb.periodic(2), max_tile=4)
    genome = spoil(gb.init_genome(plan, pnet))
    doors = [lambda: gb.materialize(plan, genome, pnet)]
    doors += [] if "buffers" in words else [lambda: gb.generate(plan, genome)]
    for door in doors:
        with pytest.raises(ValueError, match=f"the genome does not fit the plan: .*{words}"):
            door()


@EACH
def test_a_materialised_pnet_is_a_plain_module(animal: Animal) -> None:
    pnet, plan, genome = genome_of(animal)
    net = gb.materialize(plan, genome, pnet)
    assert [(n, type(m).__name__, m.training) for n, m in net.named_modules()] == [
        (n, type(m).__name__, m.training) for n, m in pnet.named_modules()
    ]
    assert not any(type(m).__module__.startswith("gbfunc") for m in net.modules())
    described = {k: (type(v), v.shape, v.dtype, v.requires_grad) for k, v in pnet.state_dict(keep_vars=True).items()}
    made = net.state_dict(keep_vars=True)
    assert {k: (type(v), v.shape, v.dtype, v.requires_grad) for k, v in made.items()} == described
    assert all(v.device.type == "cpu" and v.is_leaf and v.grad is None for v in made.values())

    batch = animal.batch(dtype_of(net))
    buffers = copy_tree(genome.buffers)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(2)
        expected = loss_fn(lambda x: PureNet(pnet)(gb.generate(plan, genome), buffers, x), batch)
        torch.manual_seed(2)
        torch.testing.assert_close(loss_fn(net, batch), expected, rtol=0, atol=0)
    assert same_bits(dict(net.named_buffers()), {k: b.detach() for k, b in buffers.items()})


def test_a_genome_shares_nothing_with_pnets() -> None:
    pnet, plan, genome = genome_of(ZOO["conv_bn"])
    before = copy_tree(genome)
    net = gb.materialize(plan, genome, pnet)
    F.mse_loss(net(ZOO["conv_bn"].batch()), torch.zeros(8, 3)).backward()
    torch.optim.SGD(net.parameters(), 1.0).step()
    with torch.no_grad():
        for tensor in [*pnet.parameters(), *pnet.buffers()]:
            tensor.fill_(9)
    assert same_bits(genome, before)
    copy.deepcopy(net)


def test_tied_weights_stay_tied() -> None:
    pnet, plan, genome = genome_of(ZOO["tied"])
    net: Any = gb.materialize(plan, genome, pnet)
    assert net.head.weight is net.embedding.weight
    assert torch.equal(net.head.weight, gb.generate(plan, genome)["embedding.weight"])
    assert plan.pnet_params == sum(p.numel() for p in pnet.parameters())


PIECE_NETS = {
    "linear": lambda: nn.Sequential(nn.Linear(11, 9), nn.Linear(9, 10)),
    "conv": lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv1d(6, 4, 2, groups=2)),
    "transposed": lambda: nn.ConvTranspose2d(5, 4, 2),
    "attention": lambda: nn.MultiheadAttention(6, 2),
    "embedding": lambda: nn.Embedding(9, 5),
}
PIECE_TYPES = [
    *(gb.periodic(2), gb.periodic(2, "layers"), gb.gnet((4,)), gb.stochastic((3,)), gb.low_rank(2)),
    *(gb.xox(2), gb.constant(0.1), gb.from_module(lambda width: nn.Linear(width, 1))),
]


@pytest.mark.parametrize("net", PIECE_NETS)
@pytest.mark.parametrize("hypernet", PIECE_TYPES, ids=named)
@given(data=st.data())
@settings(max_examples=10)
def test_a_piece_is_that_part_of_the_matrix(net: str, hypernet: Any, data: st.DataObject) -> None:
    torch.manual_seed(0)
    pnet = PIECE_NETS[net]().double()
    max_tile = data.draw(st.sampled_from([None, 1, 3, 4, (3, 5)]))
    plan = gb.make_plan(pnet, hypernet, max_tile=max_tile, include=[r"weight$"])
    genome = gb.init_genome(plan, pnet)
    leaves = {e: {k: x.requires_grad_() for k, x in of.items()} for e, of in genome.gnets.items()}
    direct = {k: x.clone().requires_grad_() for k, x in genome.direct.items()}
    genome = genome._replace(gnets=leaves, direct=direct)
    wanted = [x for of in leaves.values() for x in of.values()] + list(direct.values())
    tensor = data.draw(st.sampled_from(plan.tensors))
    whole = torch.cat(KINDS[tensor.kind].unfold(gb.generate(plan, genome)[tensor.name]))
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, whole.shape[0])] * 2)))
    c, d = sorted(data.draw(st.tuples(*[st.integers(0, whole.shape[1])] * 2)))
    piece = generate_piece(plan, genome, tensor.name, slice(a, b), slice(c, d))
    torch.testing.assert_close(piece, whole[a:b, c:d], rtol=1e-12, atol=1e-14)
    if piece.requires_grad and piece.numel():
        weight = torch.randn(piece.shape, dtype=torch.float64)
        ours, theirs = (
            torch.autograd.grad((x * weight).sum(), wanted, allow_unused=True, materialize_grads=True)
            for x in (piece, whole[a:b, c:d])
        )
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_a_piece_of_nothing_is_refused() -> None:
    pnet = nn.MultiheadAttention(4, 2)
    plan = gb.make_plan(pnet, gb.periodic(2))
    genome = gb.init_genome(plan, pnet)
    with pytest.raises(ValueError, match=r"'fc' is no parameter of the plan; it has \['in_proj_weight'"):
        generate_piece(plan, genome, "fc")
    with pytest.raises(ValueError, match="without a step"):
        generate_piece(plan, genome, "in_proj_weight", slice(0, 4, 2))


def test_an_unknown_kernel_is_refused() -> None:
    pnet = nn.Linear(6, 5)
    plan = gb.make_plan(pnet)
    genome, kernel = gb.init_genome(plan, pnet), cast(Any, "fast")
    for generate in (gb.generate, partial(generate_piece, name="weight")):
        with pytest.raises(ValueError, match=r"kernel must be one of .*'compiled'.*, got 'fast'"):
            generate(plan, genome, kernel=kernel)


@pytest.mark.parametrize("name", ZOO)
def test_there_and_back(name: str) -> None:
    _, plan, genome = genome_of(ZOO[name])
    vector, unflatten = gb.flatten(genome)
    assert vector.shape == (plan.genome_params,) and not vector.requires_grad
    assert same_bits(unflatten(vector), genome)
    gnets = {e: dict(reversed(leaves.items())) for e, leaves in reversed(genome.gnets.items())}
    assert torch.equal(gb.flatten(genome._replace(gnets=gnets))[0], vector)


def test_what_is_not_in_the_vector_stays() -> None:
    pnet = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    pnet.register_parameter("count", nn.Parameter(torch.tensor([3]), requires_grad=False))
    genome = gb.init_genome(gb.make_plan(pnet, gb.periodic(2), max_tile=4), pnet)
    vector, unflatten = gb.flatten(genome)
    made = unflatten(vector * 0)
    assert int(made.direct["count"]) == 3
    assert same_bits(made.buffers, genome.buffers)
    with pytest.raises(ValueError, match=r"expected a vector of \d+ numbers, got shape \(3,\)"):
        unflatten(vector[:3])


def test_gradients_through_learning_are_those_of_finite_differences() -> None:
    """Steps of gradient descent on the grown weights, differentiated with respect to the genome (Finn et al., 2017)."""
    generator = torch.Generator().manual_seed(0)
    pnet = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    plan = gb.make_plan(pnet, gb.periodic(2))
    vector, unflatten = gb.flatten(gb.init_genome(plan, pnet, 1))
    x, y = torch.randn(2, 6, 3, generator=generator, dtype=torch.float64), torch.tensor([[0, 1, 0, 1, 1, 0]] * 2)

    def loss(weights: dict[str, Tensor], i: int) -> Tensor:
        return nn.functional.cross_entropy(functional_call(pnet, weights, x[i]), y[i])

    def after_learning(v: Tensor) -> Tensor:
        weights = gb.generate(plan, unflatten(v))
        for _ in range(3):
            slopes = grad(loss)(weights, 0)
            weights = {k: w - 0.5 * slopes[k] for k, w in weights.items()}
        return loss(weights, 1)

    assert torch.autograd.gradcheck(after_learning, vector.requires_grad_())


def trained(genome: gb.Genome) -> tuple[Any, Any]:
    return genome.gnets, genome.direct


def objective(plan: gb.Plan, pnet: nn.Module, batch: Tensor, noise: Any = None) -> Callable[[Any], Tensor]:
    net = PureNet(pnet)
    buffers = {name: b.detach().clone() for name, b in pnet.named_buffers()}

    def loss(leaves: tuple[Any, Any]) -> Tensor:
        weights = gb.generate(plan, gb.Genome(*leaves, {}), noise=noise)
        return loss_fn(lambda x: net(weights, dict(buffers), x), batch)

    return loss


@HYPERNETS
def test_gradients_equal_finite_differences(hypernet: Hypernet) -> None:
    _, plan, genome = small(hypernet)
    leaves, spec = tree_flatten(trained(genome))
    # Away from the start: there biases of 0 put whole tiles on the kink of a ReLU.
    leaves = [(leaf + 0.1 * torch.cos(9 * leaf + 1)).requires_grad_() for leaf in leaves]
    noise = noise_of(plan)

    def weights(*values: Tensor) -> Tensor:
        gnets, direct = tree_unflatten(values, spec)
        made = gb.generate(plan, gb.Genome(gnets, direct, {}), noise=noise)
        return torch.cat([weight.flatten() for weight in made.values()])

    assert torch.autograd.gradcheck(weights, leaves, eps=1e-7, atol=1e-5, rtol=1e-5, fast_mode=True)


# torch's own forward derivatives are loaded by way of torch.jit.
@HYPERNETS
def test_forward_derivatives_equal_backward_ones(hypernet: Hypernet) -> None:
    pnet, plan, genome = small(hypernet)
    batch = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    loss = objective(plan, pnet, batch, noise_of(plan))
    loss(trained(genome))  # torch 2.5 cannot make codes inside of a transform.
    gradient = torch.func.grad(loss)(trained(genome))
    tangent = tree_map(lambda x: torch.cos(7 * x), trained(genome))
    slope = torch.func.jvp(loss, (trained(genome),), (tangent,))[1]
    expected = sum((g * t).sum() for g, t in zip(tree_leaves(gradient), tree_leaves(tangent), strict=True))
    torch.testing.assert_close(slope, expected, rtol=1e-10, atol=1e-12)


@HYPERNETS
def test_vmap_over_a_population_equals_a_loop(hypernet: Hypernet) -> None:
    pnet, plan, _ = small(hypernet)
    people = [trained(gb.init_genome(plan, pnet, seed)) for seed in range(3)]
    stacked = tree_map(lambda *x: torch.stack(x), *people)
    loss = objective(plan, pnet, torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3), noise_of(plan))

    weights = torch.vmap(lambda gnets, direct: gb.generate(plan, gb.Genome(gnets, direct, {})))(*stacked)
    alone = [gb.generate(plan, gb.Genome(gnets, direct, {})) for gnets, direct in people]
    expected = tree_map(lambda *x: torch.stack(x), *alone)
    torch.testing.assert_close(weights, expected, rtol=1e-10, atol=1e-12)

    gradients, losses = torch.vmap(torch.func.grad_and_value(loss))(stacked)
    each = [torch.func.grad_and_value(loss)(leaves) for leaves in people]
    torch.testing.assert_close(losses, torch.stack([value for _, value in each]), rtol=1e-10, atol=1e-12)
    expected = tree_map(lambda *x: torch.stack(x), *[gradient for gradient, _ in each])
    torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)
