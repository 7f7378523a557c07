"""What `make_train_step` and the step refuse, and what they say instead."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gbfunc as gb
from tests.support.trees_equal import same_bits, torch_defaults
from tests.support.zoo import SGD, ZOO, loss_fn, mlp, step_of


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"microbatches": 0}, "microbatches must be an int >= 1, got 0"),
        ({"microbatches": True}, "microbatches must be an int >= 1, got True"),
        ({"clip_norm": math.nan}, "clip_norm must be a number > 0 or None, got nan"),
        ({"amp": torch.float32}, "amp must be None, torch.bfloat16 or torch.float16, got torch.float32"),
        ({"on_nonfinite": "ignore"}, "on_nonfinite must be .*'skip'.*'raise'.*got 'ignore'"),
        ({"kernel": "fast"}, "kernel must be .*'auto'.*got 'fast'"),
        ({"lazy": "always"}, "lazy must be .*'auto'.*got 'always'"),
        ({"remat": True}, "remat must be .*'layer'.*got True"),
        ({"compile": True, "microbatches": 2}, "compile=True .* needs microbatches=1 and remat='none'"),
    ],
    ids=str,
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        step_of("mlp", **options)


def test_a_p_net_that_was_cast_after_its_plan_was_made_is_refused() -> None:
    pnet = mlp()
    plan, genome = (made := gb.make_plan(pnet, gb.periodic(2))), gb.init_genome(made, pnet)
    words = "cast after its plan was made: '0.weight' is bfloat16, and the plan generates it in float32"
    for use in (
        lambda: gb.make_train_step(plan, pnet, loss_fn, SGD),
        lambda: gb.materialize(plan, genome, pnet),
        lambda: gb.GenomeModule(plan, pnet),
        lambda: gb.init_genome(plan, pnet),
    ):
        use()
        pnet.bfloat16()
        with pytest.raises(ValueError, match=words):
            use()
        pnet.float()


def test_a_buffer_that_no_file_holds_is_refused_before_it_is_trained() -> None:
    pnet = mlp()
    pnet.register_buffer("counts", torch.zeros(3, dtype=torch.uint16))
    with pytest.raises(ValueError, match="counts is uint16, which no genome file holds"):
        gb.make_plan(pnet, gb.periodic(2))


def test_an_aux_whose_tensors_are_not_seen_is_refused() -> None:
    class Hidden:
        def __init__(self, out: Tensor) -> None:
            self.out = out

    step, batch = step_of("mlp", lambda net, batch: (loss_fn(net, batch), {"a": Hidden(net(batch))}))
    with pytest.raises(ValueError, match="aux has a Hidden with tensors: give them as a dict"):
        step(step.init(0), batch)


def test_what_does_not_fit_together_is_refused_at_once() -> None:
    pnet = mlp()
    plan = ZOO["mlp"].plan(pnet)
    with pytest.raises(ValueError, match="the plan was made for another p-net"):
        gb.make_train_step(plan, nn.Linear(6, 7), loss_fn, SGD)
    with pytest.raises(ValueError, match=r"wrapped in DataParallel.*pass the module inside it \(\.module\)"):
        gb.make_train_step(plan, nn.DataParallel(pnet), loss_fn, SGD)
    with pytest.raises(TypeError, match="optimizer must come from gb.torch_optimizer, got SGD"):
        gb.make_train_step(plan, pnet, loss_fn, torch.optim.SGD(pnet.parameters(), 0.1))  # pyright: ignore
    step, other = gb.make_train_step(plan, pnet, loss_fn, SGD), step_of("conv1d")[0]
    with pytest.raises(ValueError, match="the genome does not fit the plan: missing .*unknown"):
        step(other.init()._replace(direct={}), ZOO["mlp"].batch())


@pytest.mark.parametrize("compile", [False, True])
def test_a_buffer_that_a_forward_gives_another_shape_is_refused_with_the_cure(
    compile: bool, graphs_alone: None, tmp_path: Path
) -> None:
    class Growing(nn.Sequential):
        places: Tensor

        def forward(self, x: Tensor) -> Tensor:
            if self.places.shape[0] < len(x):
                self.places = torch.arange(len(x), dtype=x.dtype)
            return super().forward(x) + self.places[: len(x), None]

    torch.manual_seed(0)
    torch._dynamo.reset()
    pnet, batch = Growing(nn.Linear(4, 3)).double(), torch.randn(5, 4, dtype=torch.float64)
    pnet.register_buffer("places", torch.zeros(0, dtype=torch.float64), persistent=False)
    plan = gb.make_plan(pnet, gb.periodic(2))
    step = gb.make_train_step(plan, pnet, loss_fn, SGD, compile=compile)
    cure = r"places is \(5,\), expected \(0,\).*run the p-net once, on its longest input, before gb.make_plan"
    with pytest.raises(ValueError, match=cure):
        step(step.init(), batch)
    if not compile:
        many = gb.population(step, 2)
        with pytest.raises(ValueError, match=cure):
            many(many.init(), batch)
    module = gb.GenomeModule(plan, pnet)
    module(batch)
    with pytest.raises(ValueError, match=cure):
        gb.save(tmp_path / "never.genome", plan, module.to_genome())
    assert not [*tmp_path.iterdir()]
    pnet(batch)
    plan = gb.make_plan(pnet, gb.periodic(2))
    step = gb.make_train_step(plan, pnet, loss_fn, SGD, compile=compile)
    state, first = step(step.init(), batch)
    assert step(state, batch)[1].loss < first.loss


def test_a_buffer_that_a_forward_gives_another_dtype_is_refused() -> None:
    class Counting(nn.Sequential):
        count: Tensor

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 0.5
            return super().forward(x)

    pnet = Counting(nn.Linear(4, 3))
    pnet.register_buffer("count", torch.tensor(0))
    step = gb.make_train_step(gb.make_plan(pnet), pnet, loss_fn, SGD)
    with pytest.raises(ValueError, match="buffer 'count' the dtype torch.float32, and the state has torch.int64"):
        step(step.init(), torch.randn(5, 4))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_reentrant_checkpoints_are_refused() -> None:
    class Inside(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return checkpoint(super().forward, input, use_reentrant=True)

    pnet = Inside(*ZOO["dropout"].pnet().children())
    step = gb.make_train_step(gb.make_plan(pnet, gb.periodic(2)), pnet, loss_fn, SGD)
    with pytest.raises(ValueError, match="nor from a torch.utils.checkpoint with use_reentrant=True"):
        step(step.init(), ZOO["dropout"].batch())


def test_defaults_of_torch_change_no_genome_and_no_step() -> None:
    pnet, x = mlp(), torch.ones(8, 6)
    plan = gb.make_plan(pnet, gb.periodic(2))
    states = []
    for device, dtype in (("cpu", torch.float32), ("meta", torch.float64)):
        with torch_defaults(device, dtype):
            step = gb.make_train_step(plan, pnet, loss_fn, SGD)
            states.append(step(step.init(seed=3), x)[0])
    assert same_bits(*(state[:3] for state in states))
