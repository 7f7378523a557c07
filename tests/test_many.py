"""Many genomes in one batch give each row what its genome gives alone, and their sum is a plain module."""

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.many import ManyGenomes
from gbfunc.plan import Plan
from tests.support.forms import assert_close, vectors
from tests.support.hugging_face import tiny
from tests.support.strategies import Net

TOKENS = torch.arange(30).reshape(5, 6) * 7 % 19
INDEX = torch.tensor([3, 0, 3, 1, 2])


def positions() -> nn.Module:
    def use(net: Any, tokens: Tensor) -> Tensor:
        x = net.embedding(tokens) + net.position(torch.arange(tokens.shape[1]))
        return net.head(net.hidden(x).tanh())

    parts = {"embedding": nn.Embedding(19, 12), "position": nn.Embedding(8, 12), "hidden": nn.Linear(12, 12)}
    head = nn.Linear(12, 19, bias=False)
    head.weight = parts["embedding"].weight
    return Net(use, **parts, head=head)


def time_first() -> nn.Module:
    parts = {"encoder": nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0), "scale": nn.LayerNorm(8)}
    return Net(lambda net, x: net.encoder(x.transpose(0, 1)).transpose(0, 1) * net.scale.weight, **parts)


def recurrent() -> nn.Module:
    def use(net: Any, x: Tensor) -> dict[str, Any]:
        every, (last, _) = net.cells(x)
        return {"y": net.out(every), "last": (last.mT[0].t(), None), "name": "y"}

    return Net(use, cells=nn.LSTM(8, 6, batch_first=True), out=nn.Linear(6, 3))


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 4))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 20), nn.Dropout(0.5), nn.Tanh(), nn.Linear(20, 5))


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2, enable_nested_tensor=False)


NETS: dict[str, tuple[Callable[[], nn.Module], Tensor, list[str] | None]] = {
    "mlp": (mlp, vectors(5, 8), ["0", "3"]),
    "conv": (conv_net, vectors(5, 3, 5, 5), ["0", "1", "4"]),
    "encoder": (encoder, vectors(5, 5, 8), None),
    "positions": (positions, TOKENS, [""]),
    "time first": (time_first, vectors(5, 7, 8), [""]),
    "recurrent": (recurrent, vectors(5, 4, 8), None),
    "bert": (lambda: tiny("BertModel", vocab_size=19), TOKENS, None),
    "gpt2": (lambda: tiny("GPT2LMHeadModel", vocab_size=19, use_cache=False), TOKENS, None),
}
LOOPS = pytest.mark.filterwarnings("ignore:rows run one by one:UserWarning")


def genomes_of(plan: Plan, pnet: nn.Module, n: int = 4) -> list[gb.Genome]:
    def moved(x: Tensor, by: float) -> Tensor:
        return x + by if x.is_floating_point() else x

    genomes = [gb.init_genome(plan, pnet, seed) for seed in range(n)]
    return [
        g._replace(
            direct={k: moved(x, 0.1 * i) for k, x in g.direct.items()},
            buffers={k: moved(x, 0.2 * i) for k, x in g.buffers.items()},
        )
        for i, g in enumerate(genomes)
    ]


def case(name: str, hypernet: Any = None) -> tuple[nn.Module, Plan, list[gb.Genome], Tensor]:
    build, x, _ = NETS[name]
    return *planned(build, hypernet or gb.periodic(2)), x


def planned(build: Callable[[], nn.Module], hypernet: Any, **options: Any) -> tuple[nn.Module, Plan, list[gb.Genome]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pnet = build().double().eval()
    plan = gb.make_plan(pnet, hypernet, **options)
    genomes = []
    for i, g in enumerate(genomes_of(plan, pnet)):
        # Deltas start at zero.
        moved = {n: {k: x + 0.1 * i * vectors(*x.shape) for k, x in e.items()} for n, e in g.gnets.items()}
        genomes.append(g._replace(gnets=moved) if "base" in options else g)
    return pnet, plan, genomes


def adapters(hypernet: Any, targets: list[str]) -> tuple[nn.Module, Plan, list[gb.Genome]]:
    return planned(Classifier, hypernet, base="own", target_modules=targets, modules_to_save=["head"])


def checked(
    pnet: nn.Module, plan: Plan, genomes: list[gb.Genome], x: Tensor, index: Tensor | None = None
) -> ManyGenomes:
    index = INDEX if index is None else index
    net: Any = gb.materialize_many(plan, genomes, pnet)
    assert_close(tensors(net(index, x)), one_by_one(plan, genomes, pnet, index, x), 1e-10)
    return net


def tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    children = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else ()
    return [x for child in children for x in tensors(child)]


def one_by_one(plan: Plan, genomes: list[gb.Genome], pnet: nn.Module, index: Tensor, x: Tensor) -> list[Tensor]:
    nets = [gb.materialize(plan, genome, pnet) for genome in genomes]
    with torch.no_grad():
        rows = [tensors(nets[i](x[b : b + 1])) for b, i in enumerate(index.tolist())]
    return [torch.cat(parts) for parts in zip(*rows, strict=True)]


@LOOPS
@pytest.mark.parametrize(
    ("name", "hypernet"),
    [*product(NETS, [None]), *product(("mlp", "conv"), (gb.gnet((3,)), gb.low_rank(2), gb.xox(2)))],
)
def test_every_row_is_that_of_its_genome_alone(name: str, hypernet: Any) -> None:
    pnet, plan, genomes, x = case(name, hypernet)
    net = checked(pnet, plan, genomes, x)
    assert NETS[name][2] in (None, net.row_wise)
    # Another batch, and what has been learned of the net stays so.
    index = INDEX.flip(0)[:3]
    assert_close(tensors(net(index, x[:3])), one_by_one(plan, genomes, pnet, index, x[:3]))


@pytest.mark.parametrize("n_rows", [1, 2, 5, 6, 7, 8])
def test_batches_as_large_as_another_dimension(n_rows: int) -> None:
    """Six positions of six rows must not be taken for the rows."""
    pnet, plan, genomes, _ = case("positions")
    index, x = torch.arange(n_rows) % 4, torch.arange(n_rows * 6).reshape(n_rows, 6) % 19
    checked(pnet, plan, genomes, x, index)


def test_what_genomes_share_is_computed_once() -> None:
    pnet, plan, genomes, x = case("mlp")
    first = genomes[0]
    leaves = {name: first.gnets[name] for name in first.gnets if "20x8" in name}
    alike = [g._replace(gnets=g.gnets | leaves, direct=g.direct | {"0.bias": first.direct["0.bias"]}) for g in genomes]
    assert leaves and checked(pnet, plan, alike, x).row_wise == ["3"]
    assert gb.materialize_many(plan, [first, first], pnet).row_wise == []


def test_gradients_reach_the_inputs() -> None:
    pnet, plan, genomes, x = case("mlp")
    net = gb.materialize_many(plan, genomes, pnet)
    given = x.clone().requires_grad_()
    net(INDEX, given).square().sum().backward()
    for b, i in enumerate(INDEX.tolist()):
        row = x[b : b + 1].clone().requires_grad_()
        gb.materialize(plan, genomes[i], pnet)(row).square().sum().backward()
        assert given.grad is not None and row.grad is not None
        assert_close(given.grad[b : b + 1], row.grad)


def test_it_is_always_in_eval_mode_and_leaves_the_pnet_alone() -> None:
    pnet, plan, genomes, x = case("mlp")
    before = {k: v.clone() for k, v in pnet.state_dict().items()}
    net = gb.materialize_many(plan, genomes, pnet.train())
    assert_close(net.train()(INDEX, x), net(INDEX, x))
    assert pnet.training and all(torch.equal(before[k], v) for k, v in pnet.state_dict().items())
    net.eval().float().requires_grad_(False)
    assert pnet.training and all(x.dtype == torch.float64 and x.requires_grad for x in pnet.parameters())
    assert not net.state_dict() and not [*net.parameters()]


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_work_on(again: Callable[[Any], Any]) -> None:
    pnet, plan, genomes = adapters(gb.periodic(1), ["0"])
    net, x = gb.materialize_many(plan, genomes, pnet), vectors(5, 8)
    expected = net(INDEX, x)
    assert torch.equal(again(net)(INDEX, x), expected)


@LOOPS
@pytest.mark.parametrize("name", ["mlp", "recurrent"])
def test_threads_call_it_at_once(name: str) -> None:
    pnet, plan, genomes, x = case(name)
    expected = one_by_one(plan, genomes, pnet, INDEX, x)
    net = gb.materialize_many(plan, genomes, pnet)
    with ThreadPoolExecutor(6) as pool:
        made = [*pool.map(lambda n: tensors(net(INDEX[:n], x[:n])), [5, 1, 4, 5, 1, 3])]
    for out in made:
        assert_close(out, [part[: len(y)] for part, y in zip(expected, out, strict=True)])


def test_inputs_for_all_rows() -> None:
    """Masks and the like that have no rows are for every row; keywords pass."""
    pnet, plan, genomes, x = case("bert")
    mask, types = (x > 2).long(), torch.arange(6)[None] % 2
    net = gb.materialize_many(plan, genomes, pnet)
    out = net(INDEX, x, attention_mask=mask, token_type_ids=types).last_hidden_state
    for b, i in enumerate(INDEX.tolist()):
        alone = gb.materialize(plan, genomes[i], pnet)
        with torch.no_grad():
            row = alone(x[b : b + 1], attention_mask=mask[b : b + 1], token_type_ids=types).last_hidden_state
        assert_close(out[b : b + 1], row)


def test_refuses() -> None:
    pnet, plan, genomes, x = case("mlp")
    net = gb.materialize_many(plan, genomes, pnet)
    for index, error, message in [
        (INDEX.int(), TypeError, r"int64 tensor \[B\] of genomes' numbers, got torch.int32"),
        ([0, 1, 2, 3, 0], TypeError, "got list"),
        (INDEX[None], ValueError, r"shape \[B\] with B >= 1, got \(1, 5\)"),
        (INDEX[:0], ValueError, r"got \(0,\)"),
        (INDEX + 1, ValueError, r"within 0 .. 3, got 1 .. 4"),
        (INDEX - 1, ValueError, r"within 0 .. 3, got -1 .. 2"),
        (INDEX[:3], ValueError, r"must have 3 rows, one per entry of index, got inputs of shapes \[\(5, 8\)\]"),
    ]:
        with pytest.raises(error, match=message):
            net(index, x)
    with pytest.raises(ValueError, match="at least one genome"):
        gb.materialize_many(plan, [], pnet)
    with pytest.raises(ValueError, match="the genome does not fit the plan"):
        gb.materialize_many(plan, [genomes[0], genomes[1]._replace(direct={})], pnet)
    with pytest.raises(ValueError, match="another p-net"):
        gb.materialize_many(plan, genomes, conv_net())


def test_a_sum_of_genomes() -> None:
    pnet, plan, genomes, _ = case("conv")
    shares = [0.5, 2.0, -1.0, 0.25]
    state = gb.merge_genomes(plan, genomes, pnet, shares).state_dict()
    each = [gb.materialize(plan, g, pnet).state_dict() for g in genomes]
    for name, x in state.items():
        if x.is_floating_point():
            assert_close(x, sum(a * one[name] for a, one in zip(shares, each, strict=True)))
    mean = gb.merge_genomes(plan, genomes[:2], pnet).state_dict()
    assert_close(mean["0.weight"], (each[0]["0.weight"] + each[1]["0.weight"]) / 2)
    alone = gb.merge_genomes(plan, genomes[:1], pnet).state_dict()
    assert all(torch.equal(x, each[0][name]) for name, x in alone.items())
    for wrong in ([1.0], [1.0, 0.0, 0.0, float("nan")]):
        with pytest.raises(ValueError, match="expected 4 finite weights"):
            gb.merge_genomes(plan, genomes, pnet, wrong)


class Classifier(nn.Module):
    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((8,), 0.3))
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
        self.head = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))

    def forward(self, x: Tensor, shifts: Tensor | None = None) -> Tensor:
        return self.head(self.body(x + (self.shift if shifts is None else shifts.sum(0))))


@pytest.mark.parametrize("hypernet", [gb.periodic(1), gb.gnet((3,)), gb.periodic(1, "layers")], ids=str)
def test_adapters_of_one_base(hypernet: Any) -> None:
    pnet, plan, genomes = adapters(hypernet, ["0"])
    net = checked(pnet, plan, genomes, vectors(5, 8))
    assert net.row_wise == ["body.0", "head.0", "head.1"]
    parameters = dict(pnet.named_parameters())
    base = {parameters[f"body.{name}"].data_ptr() for name in ("0.weight", "2.weight", "2.bias")}
    held = {x.data_ptr() for x in net.buffers()}
    # The base is not copied; dense weights are each genome's.
    assert len(base - held) == (hypernet.type == "gnet")
    with torch.no_grad():
        parameters["body.0.bias"].add_(1)
    with pytest.raises(ValueError, match="digest"):
        gb.materialize_many(plan, genomes, pnet)


def test_complex_numbers_are_summed() -> None:
    pnet = nn.Linear(3, 2, dtype=torch.complex64)
    pnet.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
    plan = gb.make_plan(pnet)
    genomes = [gb.init_genome(plan, pnet, seed) for seed in range(2)]
    genomes[1].direct["weight"].mul_(2j)
    genomes[1].buffers["phase"].mul_(3j)
    state = gb.merge_genomes(plan, genomes, pnet, [0.75, 0.25]).state_dict()
    assert_close(state["weight"], (0.75 + 0.5j) * genomes[0].direct["weight"], 1e-6)
    assert_close(state["phase"], (0.75 + 0.75j) * genomes[0].buffers["phase"], 1e-6)


def test_a_cast_reaches_the_base() -> None:
    pnet, plan, genomes = adapters(gb.periodic(1), ["0"])
    net, x = gb.materialize_many(plan, genomes, pnet), vectors(5, 8)
    want = one_by_one(plan, genomes, pnet, INDEX, x)[0]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-5)):
        assert_close(net.to(dtype)(INDEX, x.to(dtype)).double(), want, tolerance)


def test_a_sum_of_deltas() -> None:
    pnet, plan, genomes = adapters(gb.periodic(1), ["0", "2"])
    shares = [1.5, -0.5, 0.25, 1.0]
    before = pnet.state_dict()
    state = gb.merge_genomes(plan, genomes, pnet, shares).state_dict()
    each = [gb.materialize(plan, g, pnet).state_dict() for g in genomes]
    assert list(state) == list(before)
    for name, x in before.items():
        if x.is_floating_point():
            assert_close(state[name], x + sum(a * (one[name] - x) for a, one in zip(shares, each, strict=True)))
    alone = gb.merge_genomes(plan, genomes[2:3], pnet).state_dict()
    assert all(torch.equal(x, each[2][name]) for name, x in alone.items())
    nothing = gb.merge_genomes(plan, genomes, pnet, [0.0] * 4).state_dict()
    assert all(torch.equal(x, before[name]) for name, x in nothing.items() if x.is_floating_point())
