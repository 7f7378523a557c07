"""P-nets that reach their weights in odd ways: every mode gives what dense weights give, or refuses."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import gbfunc as gb
from tests.support.strategies import Net

SGD = gb.torch_optimizer(torch.optim.SGD, lr=1.0)


def loss_of(net: Any, x: Tensor) -> Tensor:
    return net(x).square().mean()


def test_a_layer_and_its_transpose_may_share_a_square_weight() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    torch.manual_seed(0)
    pnet = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), conv1d(6, 6)).double()
    pnet[2].weight = pnet[0].weight
    plan, x = gb.make_plan(pnet, gb.periodic(2)), torch.randn(4, 6, dtype=torch.float64)
    genome = gb.init_genome(plan, pnet, 1)
    out = functional_call(pnet, gb.generate(plan, genome), (x,))
    for net in (gb.materialize(plan, genome, pnet, factored=True), gb.GenomeModule(plan, pnet, genome, lazy=True)):
        torch.testing.assert_close(net(x), out, rtol=1e-9, atol=1e-9)


class Clamped(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.no_grad():
            self.bias.clamp_(-0.01, 0.01)
        return super().forward(input)


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.mean = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.scale = nn.Parameter(torch.full((4,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.copy_(self.mean * 0.9 + self.layer.weight * 0.1)
            self.scale.data.clamp_(-0.2, 0.2)
        return self.layer(x) * self.scale + F.linear(x, self.mean)


@pytest.mark.parametrize(
    "options", [{"donate": True}, {"lazy": True}, {"remat": "layer"}, {"remat": "generate"}, {"compile": True}], ids=str
)
def test_a_forward_may_change_direct_parameters_in_place(options: dict[str, Any], graphs_alone: None) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    pnet, x = Averaged().double(), torch.randn(5, 6, dtype=torch.float64)
    plan = gb.make_plan(pnet, gb.periodic(2))
    step = gb.make_train_step(plan, pnet, loss_of, SGD, **options)
    state = step.init(0)
    module = gb.GenomeModule(plan, pnet, gb.init_genome(plan, pnet, 0), lazy=False)
    sgd = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=1.0)
    for _ in range(3):
        state, info = step(state, x)
        sgd.zero_grad()
        loss = loss_of(module, x)
        loss.backward()
        sgd.step()
        torch.testing.assert_close(info.loss, loss.detach())
    for name, x in module.to_genome().direct.items():
        torch.testing.assert_close(state.direct[name], x)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("make", "batch", "many"),
    [
        (lambda: nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Linear(4, 3)), torch.arange(5), False),
        (partial(Clamped, 4, 3), torch.ones(2, 4), False),
        (partial(Clamped, 4, 3), torch.ones(2, 4), True),
    ],
)
def test_the_state_that_was_given_stays_as_it_is(make: Callable[[], nn.Module], batch: Tensor, many: bool) -> None:
    torch.manual_seed(0)
    pnet = make()
    optimizer = gb.torch_optimizer(torch.optim.SGD, lr=1e-6)
    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(2)), pnet, loss_of, optimizer)
    train: Any = gb.population(step, 2) if many else step
    state = train.init()
    before = {k: v.clone() for k, v in state.direct.items()}
    new, _ = train(state, batch)
    for name, value in before.items():
        assert torch.equal(state.direct[name], value), name
    # What the forward did is in the new one, as in torch.
    assert max(float((new.direct[k] - v).abs().max()) for k, v in before.items()) > 0.1


@pytest.mark.parametrize("options", [{"lazy": True}, {"lazy": False, "microbatches": 2}], ids=str)
@pytest.mark.parametrize(("layer", "include"), [(nn.Embedding, []), (nn.Embedding, ["0"]), (nn.EmbeddingBag, ["0"])])
def test_sparse_embeddings_train_as_dense_ones(layer: Any, include: list[str], options: dict[str, Any]) -> None:
    answers, x = [], torch.tensor([[1, 3], [3, 0]])
    for sparse in (False, True):
        torch.manual_seed(0)
        pnet = nn.Sequential(layer(9, 4, sparse=sparse), nn.Linear(4, 3))
        plan = gb.make_plan(pnet, gb.periodic(2), include=include)
        step = gb.make_train_step(plan, pnet, loss_of, SGD, **options)
        state = step.init()
        module = gb.GenomeModule(plan, pnet, state)
        module(x).square().mean().backward()
        grads = [p.grad for k, p in module.named_parameters() if k.startswith("gnets:")]
        new, _ = step(state, x)
        answers.append([new.gnets, new.direct, grads])
    torch.testing.assert_close(*answers)


def test_aux_is_what_it_was_when_it_was_returned() -> None:
    pnet = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    plan = gb.make_plan(pnet, gb.periodic(1))

    def loss(net: Any, x: Tensor) -> tuple[Tensor, Any]:
        out = net(x).square().mean()
        return out, {"seen": net[0].num_batches_tracked, "bias": net[0].bias}

    step = gb.make_train_step(plan, pnet, loss, SGD, microbatches=2, donate=True)
    state = step.init()
    before = state.direct["0.bias"].clone()
    _, info = step(state, torch.randn(4, 3))
    assert float(info.aux["seen"]) == 1.5 and torch.equal(info.aux["bias"], before)


def own(width: int) -> nn.Module:
    parts = {"l": nn.Linear(width, 1, bias=False), "l_weight": nn.Parameter(torch.full((width, 1), 5.0))}
    return Net(lambda net, codes: net.l(codes) + codes.tanh() @ net.l_weight, **parts)


def test_leaves_whose_names_differ_by_a_dot_alone() -> None:
    pnet = nn.Linear(6, 4)
    plan = gb.make_plan(pnet, gb.from_module(own))
    step, again = (gb.make_train_step(plan, pnet, loss_of, SGD, remat=remat) for remat in ("none", "layer"))
    losses = [one(one.init(), torch.ones(2, 6))[1].loss for one in (step, again)]
    torch.testing.assert_close(*losses)
