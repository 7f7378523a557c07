"""Arguments of public functions that stand in each other's place, and odd ones: one error that names them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gbfunc as gb
from tests.support.strategies import Net
from tests.support.trees_equal import same_bits

PNET = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
PLAN = gb.make_plan(PNET, gb.low_rank(1))
GENOME = gb.init_genome(PLAN, PNET)
STEP = gb.make_train_step(
    PLAN, PNET, lambda net, x: net(x).square().mean(), gb.torch_optimizer(torch.optim.SGD, lr=0.1)
)
A_PLAN, A_GENOME, A_STEP, A_MODULE = "of gb.make_plan", "a Genome or", "of gb.make_train_step", "must be an nn.Module"
ORDER, SGD = "the order of arguments is ", torch.optim.SGD(PNET.parameters())
X: Any = None
api: Any = gb
SWAPPED: dict[str, tuple[Callable[[Any], object], str]] = {
    "make_plan": (lambda path: api.make_plan(gb.periodic(2), PNET), f"got Periodic: {ORDER}pnet, hypernet$"),
    "init_genome": (lambda path: api.init_genome(PNET, PLAN), A_PLAN),
    "fit_genome": (lambda path: api.fit_genome(PNET, PLAN), A_PLAN),
    "export a genome": (lambda path: api.export(path, GENOME, PLAN, PNET, X), A_PLAN),
    "export a p-net": (lambda path: api.export(path, PLAN, PNET, GENOME, X), A_MODULE),
    "save_lora without a folder": (lambda path: api.save_lora(PLAN, path, GENOME, PNET), A_PLAN),
    "save_lora": (lambda path: api.save_lora(path, GENOME, PLAN, PNET), A_PLAN),
    "Checkpointer": (lambda path: api.Checkpointer(STEP, path), A_STEP),
    "Checkpointer of a plan": (lambda path: api.Checkpointer(path, PLAN), A_STEP),
    "load_checkpoint": (lambda path: api.load_checkpoint(STEP, path, X), A_STEP),
    "save without a path": (lambda path: api.save(PLAN, path, GENOME), A_PLAN),
    "save": (lambda path: api.save(path, GENOME, PLAN), f"{ORDER}path, plan, genome, dtype, metadata$"),
    "save a p-net": (lambda path: api.save(path, PLAN, PNET.state_dict()), r"no genome; pass module.to_genome\(\)"),
    "save metadata": (lambda path: api.save(path, PLAN, GENOME, {"a": 1}), "write metadata={'a': 1}"),
    "GenomeModule": (lambda path: api.GenomeModule(PNET, PLAN), f"{ORDER}plan, pnet, genome"),
    "torch_optimizer": (lambda path: api.torch_optimizer(SGD, lr=0.1), "got an object of SGD: pass torch.optim.Adam$"),
    "flatten": (lambda path: api.flatten(PLAN), A_GENOME),
    "generate": (lambda path: api.generate(GENOME, PLAN), A_PLAN),
    "materialize": (lambda path: api.materialize(GENOME, PLAN, PNET), f"{ORDER}plan, genome, pnet$"),
    "materialize_many": (lambda path: api.materialize_many(GENOME, PLAN, PNET), A_PLAN),
    "merge_genomes": (lambda path: api.merge_genomes(PLAN, GENOME, PNET), r"got a genome: write \[genome\]"),
    "init": (lambda path: STEP.init(api.init_genome(PLAN, PNET)), "got a genome: write genome=genome"),
    "init of a file": (lambda path: STEP.init(genome=(PLAN, GENOME)), "got a tuple: write plan, genome = gb.load"),
    "suggested_lr": (lambda path: PLAN.suggested_lr("Adam"), "got str: pass a class, such as torch.optim.Adam"),  # pyright: ignore[reportArgumentType]
    "a script": (lambda path: api.make_plan(torch.jit.script(PNET)), "wrapped in ScriptModule"),
    "a trace": (lambda path: api.make_plan(torch.jit.trace(PNET, torch.ones(1, 6))), "wrapped in ScriptModule"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("name", SWAPPED)
def test_arguments_in_a_wrong_place_are_named(name: str, tmp_path: Path) -> None:
    call, words = SWAPPED[name]
    with pytest.raises((TypeError, ValueError), match=words):
        call(tmp_path / "net.onnx")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("seed", [np.int64(3), np.uint8(3), torch.tensor(3)], ids=repr)
def test_any_integer_is_a_seed(seed: Any) -> None:
    assert same_bits(gb.init_genome(PLAN, PNET, seed), gb.init_genome(PLAN, PNET, 3))
    assert same_bits(STEP.init(seed=seed), STEP.init(seed=3))
    fitted = [gb.fit_genome(PLAN, PNET, seed=n, steps=0).genome for n in (seed, 3)]
    assert same_bits(*fitted)


@pytest.mark.parametrize("seed", [3.0, True, -1, 2**63, "3", None], ids=repr)
def test_what_is_no_seed(seed: Any) -> None:
    for call in (lambda: gb.init_genome(PLAN, PNET, seed), lambda: STEP.init(seed=seed)):
        with pytest.raises(ValueError, match=r"seed must be an integer with 0 <= seed < 2\*\*63"):
            call()


@pytest.mark.parametrize("name", ["x" * 240, "\u00fc" * 127, "x" * 255])
def test_long_names_of_files(name: str, tmp_path: Path) -> None:
    gb.save(tmp_path / name, PLAN, GENOME)
    (tmp_path / f".{'x' * 64}.{'0' * 16}").write_bytes(b"another's")
    gb.save(tmp_path / name, PLAN, GENOME)
    assert same_bits(gb.load(tmp_path / name)[1], GENOME) and len([*tmp_path.iterdir()]) == 2
    with pytest.raises(OSError, match="File name too long"):
        gb.save(tmp_path / (name + "x" * 16), PLAN, GENOME)


def test_weights_of_a_base_without_deltas_are_reported() -> None:
    packed, own = Net(len, qweight=torch.ones(6, 6).char(), mask=torch.ones(6, 6).bool()), nn.Module()
    own.weight = nn.Parameter(torch.ones(6, 6))
    whole = nn.Linear(6, 6)
    whole.weight = nn.Parameter(torch.ones(6, 6, dtype=torch.uint8), requires_grad=False)
    net = nn.ModuleDict({"a": nn.Linear(6, 6), "b": whole, "packed": packed, "own": own, "e": nn.Embedding(3, 6)})
    # A quantised layer of torch, whose weight is no tensor of the module.
    net["hidden"] = nn.Identity()
    vars(net["hidden"])["in_features"] = 6

    def left_out(**options: Any) -> set[str]:
        plan = gb.make_plan(net, base="own", **options)
        assert gb.Plan.from_json(plan.to_json()) == plan
        lines = [line for line in plan.report().splitlines() if line.startswith("left out")]
        assert lines == [f"left out     {name}: {why}" for name, why in plan.left_out.items()]
        return {*plan.left_out}

    assert left_out() == left_out(target_modules="all-linear") == {"b", "own", "packed", "hidden"}
    assert left_out(target_modules=["a"]) == set() and left_out(target_modules="a|b") == {"b"}
    assert left_out(exclude=["own"], modules_to_save=["packed"]) == {"b", "hidden"}
    reasons = gb.make_plan(net, base="own").left_out
    assert (
        "a Linear: its forward fails for torch.float32: " in reasons["b"] and "has no out_features" in reasons["hidden"]
    )
    assert "with 'own.weight' in float32" in reasons["own"] and "with 'packed.qweight' in int8" in reasons["packed"]
    with pytest.raises(ValueError, match="no parameter of the p-net has a delta .*; left out 'b', a Linear"):
        gb.make_plan(nn.ModuleDict({"b": whole}), base="own")
    assert not gb.make_plan(PNET).left_out
