"""Steps of quantisation from a training: files of a size, training that sees them, the command line."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gbfunc as gb
from gbfunc.formats import Steps, as_stored, file_bytes
from gbfunc.trees import flat_genome, like_genome

BATCH = 64


def problem() -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(BATCH, 32)
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 5)), (x, (x[:, :5] * 2).argmax(1))


def loss_fn(net: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


def make(plan: gb.Plan, pnet: nn.Module, **options: Any) -> Any:
    return gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.Adam, lr=2e-2), **options)


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, gb.Plan, gb.TrainState, Any]:
    pnet, batch = problem()
    plan = gb.make_plan(pnet, genome_params=400)
    train_step = make(plan, pnet)
    state = train_step.init(0)
    for _ in range(120):
        state, _ = train_step(state, batch)
    return pnet, plan, state, batch


@pytest.mark.parametrize("target", [300, 420, 690])
def test_files_have_the_size(trained: Any, tmp_path: Path, target: int) -> None:
    _, plan, state, _ = trained
    steps = gb.allocate_steps(plan, state, target, batch_size=BATCH, metadata={"a": [1]})
    size = gb.save(tmp_path / "g", plan, state, steps, {"a": [1]})
    assert 0.98 * target <= size <= target
    assert sum(file_bytes(plan, steps, state, {"a": [1]}).values()) == size


@pytest.mark.parametrize("hypernet", [None, gb.gnet((8,)), gb.bilinear(2)], ids=["periodic", "gnet", "bilinear"])
def test_more_bytes_are_never_worse(trained: Any, tmp_path: Path, hypernet: Any) -> None:
    pnet, plan, state, batch = trained
    if hypernet is not None:
        train_step = make(plan := gb.make_plan(pnet, hypernet), pnet)
        state = train_step.init(0)
        for _ in range(60):
            state, _ = train_step(state, batch)
    weights, apart = gb.generate(plan, state), []
    for target in (600, 900, 1500, 3000, 9000):
        gb.save(tmp_path / "g", plan, state, gb.allocate_steps(plan, state, target, batch_size=BATCH))
        stored = gb.generate(*gb.load(tmp_path / "g"))
        apart.append(max(float((stored[k] - w).norm() / w.norm()) for k, w in weights.items()))
    assert apart[-1] < 3e-3 and apart == pytest.approx(sorted(apart, reverse=True), rel=0.3, abs=1e-3)


def test_after_a_spike_of_the_gradients(trained: Any, tmp_path: Path) -> None:
    _, plan, state, _ = trained

    def times(factor: float) -> gb.TrainState:
        leaves = {k: leaf | {"exp_avg_sq": leaf["exp_avg_sq"] * factor} for k, leaf in state.opt.leaves.items()}
        return state._replace(opt=state.opt._replace(leaves=leaves))

    calm, spiked = (gb.allocate_steps(plan, times(factor), 420, batch_size=BATCH) for factor in (1.0, 2.0**110))
    assert calm.rate < 1e-3 and spiked.rate < BATCH
    assert gb.save(tmp_path / "g", plan, state, spiked) <= 420
    indices = [[i for _, of_parts in steps.indices for i in of_parts] for steps in (calm, spiked)]
    assert max(abs(i - j) for i, j in zip(*indices, strict=True)) <= 1
    with pytest.raises(ValueError, match="are not finite: training has diverged"):
        gb.allocate_steps(plan, times(float("inf")), 420)


def loss_of(plan: gb.Plan, pnet: nn.Module, genome: Any, batch: Any) -> float:
    return loss_fn(gb.materialize(plan, genome, pnet), batch).item()


def test_better_than_codes_of_as_many_bytes(trained: Any, tmp_path: Path) -> None:
    pnet, plan, state, batch = trained
    whole = loss_of(plan, pnet, state, batch)
    for dtype in ("int4", "int5"):
        size = gb.save(tmp_path / dtype, plan, state, dtype)
        gb.save(tmp_path / "auto", plan, state, gb.allocate_steps(plan, state, size))
        lost = [loss_of(plan, pnet, gb.load(tmp_path / name)[1], batch) - whole for name in (dtype, "auto")]
        assert lost[1] < 0.5 * lost[0]


def test_training_sees_the_file_and_makes_it_smaller(trained: Any, tmp_path: Path) -> None:
    pnet, plan, state, batch = trained
    steps = gb.allocate_steps(plan, state, 330, batch_size=BATCH)
    assert steps.rate > 0
    steps = replace(steps, rate=1e-3)
    train_step = make(plan, pnet, rounding=steps)
    sizes = []
    for _ in range(40):
        size = gb.save(tmp_path / "g", plan, state, steps)
        seen = loss_of(plan, pnet, gb.load(tmp_path / "g")[1], batch)
        state, info = train_step(state, batch)
        # The loss alone, without what bits cost.
        assert float(info.loss) == pytest.approx(seen, rel=1e-4, abs=1e-5)
        sizes.append(size)
    assert sum(sizes[-5:]) < sum(sizes[:5])


def test_the_step_adds_the_gradient_of_bits(trained: Any) -> None:
    pnet, plan, state, batch = trained
    steps = gb.allocate_steps(plan, state, 330, batch_size=BATCH)
    leaves = {k: x.detach().requires_grad_() for k, x in flat_genome(state).items()}
    near, rate = as_stored(plan, leaves, steps)
    dense = gb.generate(plan, like_genome(near, gb.Genome(state.gnets, state.direct, state.buffers)))
    loss = F.cross_entropy(torch.func.functional_call(pnet, dense, (batch[0],)), batch[1])
    found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    plain = gb.torch_optimizer(torch.optim.SGD, lr=1.0)
    train_step = gb.make_train_step(plan, pnet, loss_fn, plain, rounding=steps)
    after, _ = train_step(train_step.init(0)._replace(gnets=state.gnets, direct=state.direct), batch)
    for name, x in flat_genome(after).items():
        expected = leaves[name].detach() - found[name] - rate[name]
        torch.testing.assert_close(x, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_what_cannot_be_allocated(trained: Any) -> None:
    pnet, plan, state, batch = trained
    with pytest.raises(ValueError, match=r"genome_bytes must be at least \d+ for this plan, got 60"):
        gb.allocate_steps(plan, state, 60)
    fresh = make(plan, pnet).init(0)
    with pytest.raises(ValueError, match="as Adam has after a step: no step was taken"):
        gb.allocate_steps(plan, fresh, 400)
    other = gb.make_train_step(plan, pnet, loss_fn, gb.torch_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9))
    moved, _ = other(other.init(0), batch)
    with pytest.raises(ValueError, match=r"as Adam has after a step: its optimizer keeps \['momentum_buffer'\]"):
        gb.allocate_steps(plan, moved, 400)
    steps = gb.allocate_steps(plan, state, 400)
    wrong = gb.make_plan(pnet, genome_params=300)
    with pytest.raises(ValueError, match="for this plan, got those of another"):
        make(wrong, pnet, rounding=steps)
    assert isinstance(steps, Steps)


SIZED = {"rounding": "auto", "genome_bytes": 420, "total_steps": 40}


@pytest.mark.parametrize("options", [{"donate": True}, {"microbatches": 2}])
def test_a_step_chooses_its_own_steps(options: dict[str, Any], tmp_path: Path) -> None:
    """As the same steps of `allocate_steps` at 60 to 85 %, between steps with this rounding; states carry them."""
    pnet, batch = problem()
    plan, note = gb.make_plan(pnet, genome_params=400), {"about": "it"}
    auto = make(plan, pnet, **SIZED, metadata=note, **options)
    state, by_hand = auto.init(0), auto.init(0)
    plain = make(plan, pnet, **options)
    assert auto.rounding(state) is None
    for i in range(40):
        if i in (24, 26, 28, 31, 34):
            steps = gb.allocate_steps(plan, by_hand, 420, batch_size=BATCH, metadata=note)
            plain = make(plan, pnet, rounding=steps, **options)
        if i == 30:
            # What is saved goes on, in another process as well.
            with gb.Checkpointer(tmp_path / "run", auto) as checkpointer:
                checkpointer.save(state)
            auto = make(plan, pnet, **SIZED, metadata=note, **options)
            state = gb.load_checkpoint(tmp_path / "run", auto, auto.init(1)).state
        state, info = auto(state, batch)
        by_hand, expected = plain(by_hand, batch)
        assert torch.equal(info.loss, expected.loss)
    assert auto.rounding(state) == steps
    size = gb.save(tmp_path / "g", plan, state, auto.stored(state), note)
    assert 0.9 * 420 < size <= 420
    # Before any choice, the file has the size as well.
    early, _ = auto(auto.init(0), batch)
    assert gb.save(tmp_path / "g", plan, early, auto.stored(early), note) <= 420
    assert make(plan, pnet, rounding="int8").stored(state) == "int8"


def test_what_does_not_go_with_steps_of_its_own() -> None:
    pnet, _ = problem()
    plan = gb.make_plan(pnet, genome_params=400)
    for options, words in (
        ({"rounding": "auto"}, "needs genome_bytes= and total_steps="),
        ({"rounding": "int8", "genome_bytes": 4, "total_steps": 2}, "which go with no other rounding"),
        ({**SIZED, "total_steps": 0}, "total_steps must be an int >= 1, got 0"),
        ({**SIZED, "placement": "sharded"}, "on each rank, the same on all, got placement='sharded'"),
        ({**SIZED, "local_steps": 2}, "local_steps=2"),
    ):
        with pytest.raises(ValueError, match=words):
            make(plan, pnet, **options)
