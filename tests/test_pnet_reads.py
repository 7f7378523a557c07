"""P-nets that reach their weights otherwise than through `self`: every mode is right, or refuses with the cure."""

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
from torch.utils.dlpack import from_dlpack

import gbfunc as gb
from tests.test_odd_pnets import SGD, Pair, loss_of

MODES: dict[str, dict[str, Any]] = {
    "dense": {"lazy": False},
    "lazy": {"lazy": True},
    "auto": {},
    "layer": {"remat": "layer"},
    "microbatches": {"microbatches": 2},
}


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


class Sharing(Pair):
    """Has a function of what is made over the memory of a weight."""

    def __init__(self, share: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.double()
        shared = share(self.a.weight.detach())
        self.scaled = lambda h: h * torch.as_tensor(shared).sum()

    def forward(self, x: Tensor) -> Any:
        return self.b(self.scaled(self.a(x)))


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


def _by_proxy(layer: Any, weight: Tensor) -> Any:
    of: Any = weakref.proxy(layer)
    return lambda x: x * of.weight.sum()


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "a forward around which its part is": over_a_part,
    "a number": lambda: ByFunction(lambda layer, weight: lambda x: x * weight.sum().item()),
    "an array": lambda: ByFunction(lambda layer, weight: lambda x: x * float(weight.detach().numpy().sum())),
    "an array made before": lambda: Sharing(lambda weight: weight.numpy()[2:]),
    "a tensor over the same memory": lambda: Sharing(from_dlpack),
    "a proxy": lambda: ByFunction(_by_proxy),
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


WAYS = [*MODES, "generate", "donate", "compile", "population", "module", "materialize", "merge", "many", "export"]
COMPILED = ("a forward that is a closure", "a custom function's backward", "a list")
# An export has no backward.
SLOW = {"compile": COMPILED, "export": COMPILED[::2]}
CASES = [(name, mode) for name in ODD | REFUSED | MAYBE for mode in WAYS if name in SLOW.get(mode, (name,))]


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
        elif mode == "export":
            program = torch.export.export(gb.GenomeModule(plan, pnet, state), (x,), strict=False)
            torch.testing.assert_close(program.module()(x).detach(), out, rtol=1e-9, atol=1e-9)
        elif mode in ("materialize", "merge"):
            net = gb.merge_genomes(plan, [state], pnet) if mode == "merge" else gb.materialize(plan, state, pnet)
            found = net(x)
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


class SavesLate(nn.Module):
    """Checkpoints from some call on, by a flag that all copies share."""

    def __init__(self, late: list[bool], reentrant: bool, script: bool) -> None:
        super().__init__()
        self.layer: Any = torch.jit.script(nn.Linear(3, 3)) if script else nn.Linear(3, 3)
        self.use = lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant) if late else layer(x)

    def forward(self, x: Tensor) -> Any:
        return self.use(self.layer, x)


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


class ReadsLate(Pair):
    """Reads a weight otherwise than through itself from the 5th step on, by a function that all copies share."""

    def __init__(self, steps: list[int], detached: bool) -> None:
        super().__init__()
        weight = self.a.weight
        odd = weight.detach() if detached else weight
        self.read = lambda net: net.a.weight if len(steps) < 5 else odd

    def forward(self, x: Tensor) -> Any:
        return self.b(F.linear(x, self.read(self)))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's
@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("mode", [*MODES, "generate", "compile", "population"])
def test_what_is_read_in_an_odd_way_after_the_first_call_is_refused(
    mode: str, detached: bool, graphs_alone: None
) -> None:
    if mode == "compile" and detached:
        pytest.skip("what a compiled step reads without a gradient later on is not seen")
    steps, x = list[int](), torch.ones(4, 6)
    pnet = ReadsLate(steps, detached)
    plan = gb.make_plan(pnet, gb.periodic(2))
    options = (MODES | {"generate": {"remat": "generate"}, "compile": {"compile": True}, "population": {}})[mode]
    step: Any = gb.make_train_step(plan, pnet, loss_of, gb.torch_optimizer(torch.optim.SGD, lr=0.0), **options)
    step = gb.population(step, 2) if mode == "population" else step
    state = step.init()
    # Of the 8th call at the latest, where no gradient tells.
    with pytest.raises(ValueError, match=r"self\..* 'a.weight'|self\.a\.weight"):
        for number in range(1, 9):
            steps.append(number)
            state, _ = step(state, x)
    assert len(steps) == 5 or detached


def test_an_array_of_the_pnet_in_the_memory_of_a_weight_is_refused() -> None:
    net: Any = Pair()
    net.constant, net.listed = net.a.weight.detach().numpy().copy(), [net.a.weight.detach().numpy()]
    plan = gb.make_plan(net, gb.periodic(2))
    with pytest.raises(
        ValueError, match=r"a Pair of the p-net holds an array in the memory of its parameter 'a.weight'"
    ):
        gb.make_train_step(plan, net, loss_of, SGD)
    net.listed = []
    gb.make_train_step(plan, net, loss_of, SGD)


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
