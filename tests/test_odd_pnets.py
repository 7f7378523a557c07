"""P-nets that reach their weights in odd ways: every mode gives what dense weights give, or refuses."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import gbfunc as gb

SGD = gb.torch_optimizer(torch.optim.SGD, lr=1.0)
MODES: dict[str, dict[str, Any]] = {
    "dense": {"lazy": False},
    "lazy": {"lazy": True},
    "auto": {},
    "layer": {"remat": "layer"},
    "microbatches": {"microbatches": 2},
}


def loss_of(net: Any, x: Tensor) -> Tensor:
    return net(x).square().mean()


class Pair(nn.Module):
    """Two layers that a function or a reference, kept in some odd place, joins."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


def over_self() -> nn.Module:
    net: Any = Pair()
    net.head = lambda h: net.b(h.tanh())
    net.forward = lambda x: net.head(net.a(x))
    return net


def over_a_layer() -> nn.Module:
    net: Any = Pair()
    a = net.a
    a.forward = lambda x, scale=2.0: scale * F.linear(x, a.weight, a.bias)
    return net


def default_of_an_argument() -> nn.Module:
    net: Any = Pair()
    net.head = lambda h, layers=[net.b]: layers[0](h)
    net.forward = lambda x: net.head(net.a(x))
    return net


def hooked() -> nn.Module:
    net: Any = Pair()
    a = net.a
    net.b.register_forward_hook(lambda module, inputs, output: a.weight.sum() * torch.as_tensor(output))
    return net


class Child(nn.Module):
    def __init__(self, parent: Any) -> None:
        super().__init__()
        self.layer, self.parent = nn.Linear(5, 3), weakref.ref(parent)

    def forward(self, x: Tensor) -> Any:
        parent: Any = self.parent()
        return self.layer(x) * parent.a.weight.sum()


def weak() -> nn.Module:
    net: Any = Pair()
    net.b = Child(net)
    return net


GLOBAL: Any = Pair()
GLOBAL.a.forward = lambda x: 3 * F.linear(x, GLOBAL.a.weight, GLOBAL.a.bias)


def patched_convolution() -> nn.Module:
    conv: Any = nn.Conv1d(2, 3, 3)
    stock = conv._conv_forward
    conv._conv_forward = lambda x, weight, bias: stock(x, weight - weight.mean(), bias)
    return nn.Sequential(nn.Unflatten(1, (2, 3)), conv, nn.Flatten())


class Leaves(nn.Module):
    """Goes through its layers as a regulariser does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        leaves = [m for m in self.modules() if not list(m.children())]
        y = self.b(self.a(x))
        return y * sum(m.weight.square().sum() for m in leaves if isinstance(m, nn.Linear)) * len(list(self.modules()))


class OwnWeights(nn.Module):
    """Reads what its layers hold by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        held: dict[str, Any] = dict(self.a._parameters)
        again: dict[str, Any] = {**self.a._parameters}
        return F.linear(x, held["weight"] + again["weight"], self.a._parameters.get("bias"))


ODD: dict[str, Callable[[], nn.Module]] = {
    "a function over the p-net": over_self,
    "a forward that is a closure": over_a_layer,
    "an argument's default": default_of_an_argument,
    "a hook that is a closure": hooked,
    "a weak reference": weak,
    "a global name": lambda: GLOBAL,
    "a method replaced on a layer": patched_convolution,
    "layers without children": Leaves,
    "parameters by name": OwnWeights,
}


def over_a_part() -> nn.Module:
    layer = nn.Linear(6, 3)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Any:
            return layer(x)

    return Around()


class ByFunction(nn.Module):
    """Computes with a function that has the weight otherwise than by its arguments."""

    def __init__(self, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a = nn.Linear(6, 3)
        self.use = use(self.a, self.a.weight)

    def forward(self, x: Tensor) -> Any:
        return self.use(self.a(x))


def function_that_reads(forward: bool) -> Callable[[Any, Tensor], Any]:
    def make(layer: Any, weight: Tensor) -> Any:
        class Scale(torch.autograd.Function):
            generate_vmap_rule = True

            @staticmethod
            def forward(x: Tensor) -> Tensor:
                return x * weight.sum() if forward else x.clone()

            @staticmethod
            def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

            @staticmethod
            def backward(ctx: Any, *gradients: Tensor) -> Any:
                return gradients[0] * (2.0 if forward else layer.weight.sum())

        return Scale.apply

    return make


class Viewing(Pair):
    """Has a view of a weight as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        self.turned = self.a.weight.detach().t()

    def forward(self, x: Tensor) -> Any:
        return self.b(x @ self.turned + self.a.bias)


class Partial(Pair):
    """Has a weight as an argument of a function."""

    def __init__(self) -> None:
        super().__init__()
        self.use = functools.partial(F.linear, weight=self.a.weight, bias=self.a.bias)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.use(x))


class Listing(Pair):
    """Has its weights in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = [self.a.weight]

    def forward(self, x: Tensor) -> Any:
        return self.b(x @ self.listed[0].t() + self.a.bias)


class Scripted(nn.Module):
    """Has a scripted part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.jit.script(nn.Linear(6, 5)), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x).tanh())


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "a forward around which its part is": over_a_part,
    "a number": lambda: ByFunction(lambda layer, weight: lambda x: x * weight.sum().item()),
    "an array": lambda: ByFunction(lambda layer, weight: lambda x: x * float(weight.detach().numpy().sum())),
    "a proxy": lambda: ByFunction(lambda layer, weight: lambda x, of=weakref.proxy(layer): x * of.weight.sum()),
    "a custom function": lambda: ByFunction(function_that_reads(True)),
    "a custom function's backward": lambda: ByFunction(function_that_reads(False)),
}
MAYBE: dict[str, Callable[[], nn.Module]] = {
    "a method": lambda: ByFunction(lambda layer, weight: functools.partial(_scaled, layer)),
    "a view": Viewing,
    "a list": Listing,
    "a partial function": Partial,
    "a scripted part": Scripted,
}


def _scaled(layer: nn.Module, x: Tensor) -> Tensor:
    return x * torch.as_tensor(layer.weight).sum()


def _answers(
    pnet: nn.Module, plan: gb.Plan, state: gb.TrainState, x: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Output, loss and gradient of a genome by materialised weights in a p-net that torch swaps them in."""
    leaves = {f"{e}/{k}": v.requires_grad_() for e, of in state.gnets.items() for k, v in of.items()}
    out = functional_call(pnet, gb.generate(plan, state), (x,))
    gradients = torch.autograd.grad(out.square().mean(), list(leaves.values()), allow_unused=True)
    return out.detach(), out.square().mean().detach(), dict(zip(leaves, gradients, strict=True))


def _compared(state: gb.TrainState, new: gb.TrainState, gradients: dict[str, Tensor]) -> None:
    for path, gradient in gradients.items():
        e, k = path.split("/")
        torch.testing.assert_close(state.gnets[e][k].detach() - new.gnets[e][k], gradient, rtol=1e-7, atol=1e-9)


def right_or_refused(check: Callable[[], None]) -> bool:
    """Whether a call was right; one that is refused says so, and what to do."""
    try:
        check()
    except ValueError as error:
        assert "other than through the module" in str(error) and "write self." in str(error), error
        return False
    return True


WAYS = [*MODES, "generate", "donate", "compile", "population", "module", "materialize", "many"]
COMPILED = ("a forward that is a closure", "a custom function's backward", "a list")
CASES = [(name, mode) for name in ODD | REFUSED | MAYBE for mode in WAYS if mode != "compile" or name in COMPILED]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_what_is_reached_in_an_odd_way_is_right_or_refused(name: str, mode: str) -> None:
    torch.manual_seed(0)
    pnet, x = (ODD | REFUSED | MAYBE)[name]().double(), torch.randn(4, 6, dtype=torch.float64)
    plan = gb.make_plan(pnet, gb.periodic(2))
    many = mode == "population"
    options = MODES.get(
        mode, {"generate": {"remat": "generate"}}.get(mode, {mode: True} if mode in ("donate", "compile") else {})
    )
    step = gb.make_train_step(plan, pnet, loss_of, SGD, **options)
    state = step.init(1)
    plain = Pair().double() if isinstance(pnet, Viewing | Listing | Partial) else pnet
    out, loss, gradients = _answers(plain, plan, step.init(1), x)

    def check() -> None:
        if mode == "module":
            module = gb.GenomeModule(plan, pnet, state)
            found = module(x)
            torch.testing.assert_close(found.detach(), out, rtol=1e-9, atol=1e-9)
            found.square().mean().backward()
            for path, gradient in gradients.items():
                torch.testing.assert_close(module.gnets.get_parameter(path.replace("/", ".")).grad, gradient)
        elif mode == "materialize":
            found = gb.materialize(plan, state, pnet)(x)
            torch.testing.assert_close(found.detach(), out, rtol=1e-9, atol=1e-9)
            found.sum().backward()
        elif mode == "many":
            genomes = [state, step.init(2)]
            rows = [_answers(plain, plan, g, x)[0] for g in (step.init(1), step.init(2))]
            found = gb.materialize_many(plan, genomes, pnet)(torch.tensor([0, 1, 0, 1]), x)
            expected = torch.stack([rows[i % 2][i] for i in range(4)])
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        elif many:
            population = gb.population(step, 2)
            states, info = population(population.init([1, 2]), x)
            torch.testing.assert_close(info.loss[0], loss, rtol=1e-9, atol=1e-9)
            _compared(step.init(1), population.member(states, 0), gradients)
        else:
            found, info = step(step.init(1), x)
            torch.testing.assert_close(info.loss, loss, rtol=1e-9, atol=1e-9)
            _compared(step.init(1), found, gradients)

    if name == "parameters by name" and mode == "many":
        pytest.skip("of layers that have rows, none can be read so")
    backward = name == "a custom function's backward"
    right = right_or_refused(check)
    assert not right if name in REFUSED and not (backward and mode == "many") else True
    assert right or name not in ("layers without children", "parameters by name", "a scripted part")
    if name == "a weak reference":
        assert right


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


class Clamped(nn.Module):
    """Keeps a bias within bounds, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.layer.bias.clamp_(-0.01, 0.01)
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("make", "batch", "many"),
    [
        (lambda: nn.Sequential(nn.Embedding(5, 4, max_norm=0.1), nn.Linear(4, 3)), torch.arange(5), False),
        (Clamped, torch.ones(2, 4), False),
        (Clamped, torch.ones(2, 4), True),
    ],
)
def test_the_state_that_was_given_stays_as_it_is(make: Callable[[], nn.Module], batch: Tensor, many: bool) -> None:
    torch.manual_seed(0)
    pnet = make()
    step = gb.make_train_step(
        gb.make_plan(pnet, gb.periodic(2)), pnet, loss_of, gb.torch_optimizer(torch.optim.SGD, lr=1e-6)
    )
    train: Any = gb.population(step, 2) if many else step
    state = train.init()
    before = {k: v.clone() for k, v in state.direct.items()}
    new, _ = train(state, batch)
    for name, value in before.items():
        assert torch.equal(state.direct[name], value), name
    # What the forward did is in the new one, as in torch.
    assert max(float((new.direct[k] - v).abs().max()) for k, v in before.items()) > 0.1


def test_sparse_gradients_of_direct_parameters_are_as_good_as_dense_ones() -> None:
    answers = []
    for sparse in (False, True):
        torch.manual_seed(0)
        pnet = nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 3))
        step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(2)), pnet, loss_of, SGD)
        answers.append(step(step.init(), torch.tensor([1, 3, 3]))[0].direct["0.weight"])
    torch.testing.assert_close(*answers)


def test_views_of_a_part_are_one() -> None:
    pnet = Pair()
    plan = gb.make_plan(pnet, gb.periodic(2))

    def loss(net: Any, x: Tensor) -> Tensor:
        assert net.a is net.a and net.a is not net.b
        assert [m for m in (net.a, net.b) if m is not net.a] == [net.b]
        return loss_of(net, x)

    step = gb.make_train_step(plan, pnet, loss, SGD)
    step(step.init(), torch.ones(2, 6))


@pytest.mark.parametrize("hook", ["register_hook", "retain_grad"])
@pytest.mark.parametrize("options", [{"lazy": True}, {"remat": "layer"}], ids=str)
def test_a_hook_that_comes_too_late_is_refused(hook: str, options: dict[str, Any]) -> None:
    pnet, seen = Pair(), list[Tensor]()
    plan = gb.make_plan(pnet, gb.periodic(2))

    def loss(net: Any, x: Tensor, early: bool) -> Tensor:
        weight = net.a.weight if early else None
        y = net(x)
        # A penalty may read it when it likes.
        weight = net.a.weight if weight is None else weight
        getattr(weight, hook)(*([seen.append] if hook == "register_hook" else []))
        return y.square().mean() + weight.square().sum()

    for early in (True, False):
        step = gb.make_train_step(plan, pnet, lambda net, x, early=early: loss(net, x, early), SGD, **options)
        if early:
            step(step.init(), torch.ones(2, 6))
            continue
        with pytest.raises(RuntimeError, match="a hook on the weight 'a.weight' would not see"):
            step(step.init(), torch.ones(2, 6))
    assert len(seen) == (hook == "register_hook")


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


class Own(nn.Module):
    """A g-net with two leaves of nearly one name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.l = nn.Linear(width, 1, bias=False)
        self.l_weight = nn.Parameter(torch.full((width, 1), 5.0))

    def forward(self, codes: Tensor) -> Tensor:
        return self.l(codes) + codes.tanh() @ self.l_weight


def test_leaves_whose_names_differ_by_a_dot_alone() -> None:
    pnet = nn.Linear(6, 4)
    plan = gb.make_plan(pnet, gb.from_module(Own))
    losses, modes = [], list[dict[str, Any]](({}, {"remat": "layer"}))
    for options in modes:
        step = gb.make_train_step(plan, pnet, loss_of, SGD, **options)
        losses.append(step(step.init(), torch.ones(2, 6))[1].loss)
    torch.testing.assert_close(*losses)


MASKS = {
    "whole numbers": {"key_padding_mask": torch.ones(4, 5, dtype=torch.int64)},
    "one row of keys": {"key_padding_mask": torch.zeros(1, 5, dtype=torch.bool)},
    "one row of targets": {"attn_mask": torch.zeros(1, 5)},
    "a mask for each head": {"attn_mask": torch.zeros(2, 5, 5)},
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_masks_that_torch_refuses_are_refused(masks: dict[str, Tensor]) -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Any:
            return self.attention(x, x, x, **masks)[0]

    pnet = Attending()
    plan = gb.make_plan(pnet, gb.periodic(2))
    for lazy in (False, True):
        step = gb.make_train_step(plan, pnet, loss_of, SGD, lazy=lazy)
        with pytest.raises((AssertionError, RuntimeError), match="mask|Mask"):
            step(step.init(), torch.randn(4, 5, 8))


class Patches(nn.Module):
    """Patches come first where the layer is, as in torch's transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.layer = nn.Conv2d(3, 4, 3, stride=3), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.conv(x).flatten(2).permute(2, 0, 1)).permute(1, 0, 2)


class Positions(nn.Module):
    """Positions of one token more than there are."""

    def __init__(self) -> None:
        super().__init__()
        self.positions, self.layer = nn.Embedding(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        h = F.pad(x, (0, 0, 1, 0))
        return self.layer(h + self.positions(torch.arange(h.shape[1])))


@pytest.mark.parametrize("rows", range(2, 7))
@pytest.mark.parametrize(("make", "shape"), [(Patches, (3, 6, 6)), (Positions, (4, 6))])
def test_a_dimension_that_equals_the_rows_by_chance_is_none_of_them(
    make: Callable[[], nn.Module], shape: tuple[int, ...], rows: int
) -> None:
    torch.manual_seed(0)
    pnet = make().double().eval()
    plan = gb.make_plan(pnet, gb.periodic(2))
    genomes = [gb.init_genome(plan, pnet, seed) for seed in range(3)]
    genomes = [g._replace(direct={k: v + i for k, v in g.direct.items()}) for i, g in enumerate(genomes)]
    x, index = torch.randn(rows, *shape, dtype=torch.float64), torch.arange(rows) % 3
    one_by_one = [gb.materialize(plan, genomes[int(g)], pnet)(x[i : i + 1]) for i, g in enumerate(index)]
    found = gb.materialize_many(plan, genomes, pnet)(index, x)
    torch.testing.assert_close(found, torch.cat(one_by_one), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("lazy", [False, True])
def test_a_checkpoint_that_only_training_reaches_is_refused(lazy: bool) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.layer, x, use_reentrant=False) if self.training else self.layer(x)

    pnet = Saving()
    module = gb.GenomeModule(gb.make_plan(pnet, gb.periodic(2)), pnet, lazy=lazy)
    module.eval()(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"calls torch\.utils\.checkpoint inside its forward"):
        module.train()(torch.ones(2, 3))


class SavesLate(nn.Module):
    """Checkpoints from some call on, by a flag that all copies share."""

    def __init__(self, late: list[bool], reentrant: bool, script: bool) -> None:
        super().__init__()
        self.layer: Any = torch.jit.script(nn.Linear(3, 3)) if script else nn.Linear(3, 3)
        self.use = lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant) if late else layer(x)

    def forward(self, x: Tensor) -> Any:
        return self.use(self.layer, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("script", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_after_the_first_call_is_refused(reentrant: bool, script: bool) -> None:
    late, x = list[bool](), torch.ones(2, 3, requires_grad=True)
    pnet = SavesLate(late, reentrant, script)
    plan = gb.make_plan(pnet, gb.periodic(2))
    module, step = gb.GenomeModule(plan, pnet), gb.make_train_step(plan, pnet, loss_of, SGD)
    state, _ = step(step.init(), x)
    module(x).sum().backward()
    late.append(True)
    for call in (lambda: module(x), lambda: module.run(loss_of, x), lambda: step(state, x)):
        with pytest.raises(ValueError, match=r"calls torch\.utils\.checkpoint inside its forward"):
            call()
    with torch.no_grad():
        module(x)
    late.clear()
    step(state, x)


def test_a_loss_function_may_read_the_pnet_that_it_began_from() -> None:
    pnet, x = Pair().double(), torch.randn(4, 6, dtype=torch.float64)

    def loss(net: Any, x: Tensor) -> Tensor:
        distance = sum((p - q).square().sum() for p, q in zip(net.parameters(), pnet.parameters(), strict=True))
        # The head of the original, whose backward reads its weight, on what the generated layer gives.
        return (pnet.b(net.a(x)) - pnet(x).detach()).square().mean() + distance + net(pnet.a.weight).mean()

    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(2)), pnet, loss, SGD)
    step(step(step.init(), x)[0], x)


def test_a_base_of_its_own_is_read_and_no_other_way_to_it() -> None:
    pnet, x = over_a_layer(), torch.randn(4, 6)
    for net, words in ((Pair(), None), (pnet, "parameter 'a.weight' other than through the module")):
        plan = gb.make_plan(net, gb.periodic(2), base="own")
        for lazy in (False, True):
            step = gb.make_train_step(plan, net, loss_of, SGD, lazy=lazy)
            with nullcontext() if words is None else pytest.raises(ValueError, match=words):
                step(step.init(), x)


def test_inputs_without_dimensions_are_for_all_rows() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Any:
            return self.layer(x) * scale + (0 if shift is None else shift)

    pnet = Scaled()
    plan = gb.make_plan(pnet, gb.periodic(1))
    genomes = [gb.init_genome(plan, pnet, seed) for seed in range(2)]
    many: Any = gb.materialize_many(plan, genomes, pnet)
    x, scale, runs, run = torch.randn(2, 3), torch.tensor(2.0), list[int](), many._run
    many._run = lambda *call: (runs.append(len(call[0])), run(*call))[1]
    expected = torch.cat([gb.materialize(plan, g, pnet)(x[i : i + 1], scale) for i, g in enumerate(genomes)])
    for more in ((), (torch.ones(2, 1),), (), (torch.ones(2, 1),)):
        torch.testing.assert_close(many(torch.arange(2), x, scale, *more), expected + len(more))
    # Each of the two kinds of calls was tried out once.
    assert len(runs) == 4 + 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_layer_has_the_generated_weights() -> None:
    pnet: Any = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 2))
    plan, x = gb.make_plan(pnet, gb.periodic(1), include=["weight"]), torch.ones(3, 4)
    genome = gb.init_genome(plan, pnet)
    assert any(t.name == "0.weight" for t in plan.generated)
    out = functional_call(pnet, gb.generate(plan, genome), (x,))
    before = pnet(x)
    for factored in (False, True):
        torch.testing.assert_close(gb.materialize(plan, genome, pnet, factored=factored)(x), out)
    torch.testing.assert_close(gb.GenomeModule(plan, pnet, genome, lazy=True)(x), out)
    assert torch.equal(pnet(x), before)
