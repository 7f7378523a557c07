"""The genome as a module: the same numbers as the functional side, in the shape that trainers of modules expect."""

import contextlib
import copy
import inspect
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import gbfunc as gb
from gbfunc.trees import flatten_tree
from tests.support.adapters import RATE, trained
from tests.support.versions import needs_whole_graphs
from tests.support.zoo import ZOO, dtype_of, genome_of, loss_fn

SGD = gb.torch_optimizer(torch.optim.SGD, lr=RATE)
DRAWING = {"dropout", "transformer", "stochastic"}
"""Animals that draw random numbers in training mode."""


def module_of(name: str, **options: Any) -> tuple[nn.Module, gb.GenomeModule, Tensor]:
    pnet, plan, genome = genome_of(ZOO[name])
    return pnet, gb.GenomeModule(plan, pnet, genome, **options), ZOO[name].batch(dtype_of(pnet))


def assert_same(genome: Any, other: Any) -> None:
    flat, given = (flatten_tree(gb.Genome(g.gnets, g.direct, g.buffers)) for g in (genome, other))
    assert flat.keys() == given.keys()
    assert {k for k in flat if not torch.equal(flat[k], given[k])} == set()


@pytest.mark.parametrize("lazy", [True, False, "auto"])
@pytest.mark.parametrize("name", sorted(ZOO.keys() - DRAWING))
def test_a_plain_loop_is_the_functional_step_bit_by_bit(name: str, lazy: Any) -> None:
    pnet, module, batch = module_of(name, lazy=lazy)
    step = gb.make_train_step(module.plan, pnet, loss_fn, SGD, lazy=lazy)
    state = step.init(0)
    losses = []
    for _ in range(3):
        state, info = step(state, batch)
        losses.append(info.loss)
    assert torch.equal(torch.stack(trained(module, batch)), torch.stack(losses))
    assert_same(module.to_genome(), state)


@pytest.mark.parametrize("name", ["mlp", "conv_bn", "lstm", "weight_norm", "shared", "only_direct"])
def test_names_are_those_of_the_genome(name: str) -> None:
    pnet, module, _ = module_of(name)
    plan = module.plan
    named = {f"gnets:{e.name}:{k}" for e in plan.ensembles for k in e.leaves}
    named |= {t.name for t in plan.direct}
    assert {k for k, _ in module.named_parameters()} == named
    assert {k for k, _ in module.named_buffers()} == {b.name for b in plan.buffers}
    kept = {b.name for b in plan.buffers if b.persistent}
    assert module.state_dict().keys() == named | kept


def test_a_state_dict_goes_through_a_file_into_another_module() -> None:
    pnet, module, batch = module_of("conv_bn")
    trained(module, batch)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = gb.GenomeModule(module.plan, pnet, seed=7)
    other.load_state_dict(torch.load(file, weights_only=True), strict=True)
    assert_same(other.to_genome(), module.to_genome())
    assert torch.equal(other(batch), module(batch))


def test_a_state_dict_of_another_plan_is_refused() -> None:
    # Names and shapes of leaves are equal; the p-net's first weights set other scales.
    plain, other = (
        gb.GenomeModule(gb.make_plan(net, gb.periodic(2)), net) for net in (nn.Linear(40, 30), nn.Linear(40, 30))
    )
    outer = nn.Sequential(other)
    with pytest.raises(RuntimeError, match="state dict belongs to another plan"):
        outer.load_state_dict(nn.Sequential(plain).state_dict(), strict=False)
    outer.load_state_dict(copy.deepcopy(outer.state_dict()))
    other.load_state_dict(dict(plain.state_dict()))
    assert_same(plain.to_genome(), other.to_genome())


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("name", ["conv_bn", "tied", "attention"])
def test_copies_and_pickles_work_on(again: Callable[[Any], Any], name: str) -> None:
    pnet, module, batch = module_of(name, lazy=True)
    module.eval()
    other = again(module)
    assert type(other) is type(module) and isinstance(other, (type(pnet), gb.GenomeModule))
    assert not other.training and torch.equal(other(batch), module(batch))
    before = module.to_genome()
    trained(other.train(), batch, 1)
    changed = {k: not torch.equal(x, before.direct[k]) for k, x in module.to_genome().direct.items()}
    # A shallow copy shares its parameters, as that of any module does.
    assert any(changed.values()) == (again is copy.copy)


def test_a_genome_goes_in_and_out_as_copies() -> None:
    pnet, plan, genome = genome_of(ZOO["conv_bn"])
    kept = copy.deepcopy(genome)
    module = gb.GenomeModule(plan, pnet, genome)
    assert_same(module.to_genome(), genome)
    taken = module.to_genome()
    trained(module, ZOO["conv_bn"].batch())
    assert_same(genome, kept)
    assert_same(taken, kept)
    assert not any(x.requires_grad for x in flatten_tree(taken).values())
    assert_same(gb.GenomeModule(plan, pnet, seed=3).to_genome(), gb.init_genome(plan, pnet, 3))


@pytest.mark.parametrize("name", ["dropout", "transformer", "stochastic"])
def test_the_mode_reaches_dropout_and_noise(name: str) -> None:
    pnet, module, batch = module_of(name)
    module.train()
    assert not torch.equal(module(batch), module(batch))
    torch.manual_seed(4)
    first = module(batch)
    torch.manual_seed(4)
    assert torch.equal(module(batch), first)
    module.eval()
    dense = gb.materialize(module.plan, module.to_genome(), pnet).eval()
    torch.testing.assert_close(module(batch), dense(batch))


def test_a_module_starts_in_the_pnets_mode() -> None:
    pnet, plan, genome = genome_of(ZOO["dropout"])
    assert gb.GenomeModule(plan, pnet.eval(), genome).training is False
    assert gb.GenomeModule(plan, pnet.train(), genome).training is True
    pnet.get_submodule("1").eval()
    module = gb.GenomeModule(plan, pnet, genome)
    batch = ZOO["dropout"].batch()
    assert torch.equal(module(batch), module(batch)), "a part that is in evaluation mode stays so"


def test_autocast_is_for_the_pnet_and_not_for_generation() -> None:
    pnet, module, batch = module_of("mlp", lazy=False)
    step = gb.make_train_step(module.plan, pnet, loss_fn, SGD, lazy=False, amp=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(batch)
        loss = loss_fn(module, batch)
    assert out.dtype == torch.bfloat16
    assert torch.equal(loss.detach(), step(step.init(0), batch)[1].loss)


@needs_whole_graphs
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("name", ["mlp", "conv_bn", "running"])
def test_a_compiled_module_gives_the_same(name: str, lazy: bool) -> None:
    _, module, batch = module_of(name, lazy=lazy)
    other = copy.deepcopy(module)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(other, backend=counter, fullgraph=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=RATE) for m in (module, other)]
    for _ in range(2):
        losses = [loss_fn(net, batch) for net in (module, compiled)]
        torch.testing.assert_close(losses[1], losses[0])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert counter.frame_count == 1
    for x, y in zip(flatten_tree(other.to_genome()).values(), flatten_tree(module.to_genome()).values(), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("name", ["dropout", "stochastic"])
def test_a_compiled_module_follows_its_mode(name: str) -> None:
    _, module, batch = module_of(name, lazy=False)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager")
    assert not torch.equal(compiled(batch), compiled(batch))
    module.eval()
    torch.testing.assert_close(compiled(batch), module(batch))
    module.train()
    assert not torch.equal(compiled(batch), compiled(batch))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"hidden": 4}
        self.main_input_name, self.parts = "input_ids", [nn.Linear(2, 2)]
        self.cached = torch.ones(2)
        self.body = nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        out = self.body(input_ids) * scale
        return out if labels is None else F.cross_entropy(out, labels)

    def hidden_size(self) -> int:
        return self.body.in_features

    @property
    def device(self) -> torch.device:
        return self.body.weight.device


def test_forward_has_the_pnets_signature() -> None:
    pnet = Classifier()
    module = gb.GenomeModule(gb.make_plan(pnet, gb.periodic(2)), pnet)
    assert inspect.signature(module.forward) == inspect.signature(pnet.forward)
    assert inspect.signature(type(module).forward) == inspect.signature(Classifier.forward)
    assert inspect.signature(copy.deepcopy(module).forward) == inspect.signature(pnet.forward)
    out = module(torch.ones(2, 4), labels=torch.tensor([0, 1]), scale=2.0)
    assert out.shape == ()


def test_a_subclass_keeps_its_forward() -> None:
    class Doubled(gb.GenomeModule):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    pnet, plan, genome = genome_of(ZOO["mlp"])
    batch = ZOO["mlp"].batch()
    doubled = Doubled(plan, pnet, genome)
    assert isinstance(doubled, Doubled)
    assert torch.equal(doubled(batch), 2 * gb.GenomeModule(plan, pnet, genome)(batch))


def test_the_module_has_all_that_the_pnet_has() -> None:
    pnet = Classifier()
    module: Any = gb.GenomeModule(gb.make_plan(pnet, gb.periodic(2)), pnet)
    dense = gb.materialize(module.plan, module.to_genome(), pnet)
    assert type(module).__name__ == "Classifier" and isinstance(module, Classifier)
    assert module.config == {"hidden": 4} and module.hidden_size() == 4 and module.device == torch.device("cpu")
    assert [name for name, _ in module.named_modules()] == [name for name, _ in pnet.named_modules()]
    # Outside of a forward a weight is generated by itself, with its graph.
    torch.testing.assert_close(module.body.weight, dense.get_parameter("body.weight"))
    assert module.body.weight.requires_grad
    assert not any(x.is_meta for x in (*module.parameters(), *module.buffers()))
    net: Any = module
    net.scale, net.extra = 3, nn.Linear(2, 2)
    with pytest.raises(
        ValueError, match=r"has parameters that the plan does not know: \['extra.weight', 'extra.bias'\]"
    ):
        net.to_genome()


def test_what_does_not_fit_is_refused() -> None:
    pnet, plan, genome = genome_of(ZOO["mlp"])
    with pytest.raises(TypeError, match="expected a plan of gb.make_plan, got a Sequential"):
        gb.GenomeModule(pnet, plan)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"got two: write materialize\(\*gb.load\(path\), pnet\)"):
        gb.materialize((plan, genome), pnet)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="wrapped in GenomeModule: a genome generates its weights already"):
        gb.make_plan(gb.GenomeModule(plan, pnet), genome_params=100)
    with pytest.raises(ValueError, match="a genome's state dict, got one with the dense weight '0.weight': load it"):
        gb.GenomeModule(plan, pnet).load_state_dict(pnet.state_dict())
    with pytest.raises(ValueError, match="the plan was made for another p-net"):
        gb.GenomeModule(plan, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="the genome does not fit the plan: missing"):
        gb.GenomeModule(plan, pnet, genome._replace(gnets={}))
    with pytest.raises(
        TypeError, match=r"expected a Genome or a TrainState .*: pass module.plan and module.to_genome\(\)"
    ):
        gb.save("genome", plan, gb.GenomeModule(plan, pnet))
    with pytest.raises(ValueError, match="the p-net is wrapped in OptimizedModule"):
        gb.GenomeModule(plan, torch.compile(pnet, backend="eager"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="lazy must be one of"):
        gb.GenomeModule(plan, pnet, lazy="yes")  # pyright: ignore[reportArgumentType]
    pnet.plan = "a"  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"the p-net has attributes \['plan'\], names that GenomeModule uses"):
        gb.GenomeModule(plan, pnet)


@pytest.mark.parametrize(("optimized", "every"), [("p-net", 1), ("module", 1), ("module", 60)])
def test_an_optimizer_of_the_pnet_is_reported(optimized: str, every: int) -> None:
    pnet, module, batch = module_of("mlp")
    optimizer = torch.optim.SGD((pnet if optimized == "p-net" else module).parameters(), lr=0.1)
    reported = pytest.warns(UserWarning, match="make the optimizer after GenomeModule")
    with reported if optimized == "p-net" else contextlib.nullcontext():
        for i in range(120):
            module(batch).square().mean().backward()
            if i % every == every - 1:
                optimizer.step()
                optimizer.zero_grad()
