"""The bench measures what it says: the same weights by all means, bytes that are alive, times side by side."""

import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gbfunc as gb
from gbfunc.cli.lab import measure, print_results
from gbfunc.generation import make_generator
from gbfunc.lab.bench import cases
from gbfunc.lab.bench.report import time_together
from gbfunc.tasks import find_task
from gbfunc.tasks.pnets.mlp import mlp
from gbfunc.trees import flat_genome

CPU = cases.Setting(torch.device("cpu"), 1)
KEYS = {"case", "variant", "step_ms", "ratio_to_dense", "ratio_to_naive", "peak_mb", "weights"}
KEYS |= {"features", "first_ms", "ratios_to_dense", "launches", "busy"}


def tiny(variants: tuple[str, ...], width: int = 12, name: str = "tiny") -> cases.Case:
    return cases.Case(
        name,
        partial(mlp, (8, width, 3), 0),
        partial(cases.features, (6, 8), 3),
        variants,
        {"hypernet": gb.periodic(2)},
        {"hypernet": gb.gnet((3,)), "max_tile": 5},
    )


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 2)
        self.head = nn.Linear(20, 7)


def test_naive_generates_what_the_library_does_and_its_gradients() -> None:
    pnet = Mixed().double()
    plan, naive = (gb.make_plan(pnet, g((4,)), max_tile=3, include=(r"bias",)) for g in (gb.gnet, cases.NaiveGNet))
    genome = gb.init_genome(plan, pnet, 1)
    leaves = [leaf.requires_grad_() for own in genome.gnets.values() for leaf in own.values()]
    assert len(plan.generated) == 4

    def found(plan: gb.Plan) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        weights = make_generator(plan, kernel="eager")(flat_genome(genome))
        total = torch.cat([(w * torch.arange(w.numel()).reshape(w.shape).sin()).flatten() for w in weights.values()])
        return weights, torch.autograd.grad(total.sum(), leaves)

    torch.testing.assert_close(found(naive), found(plan), rtol=1e-10, atol=1e-12)


TRAINING = [v for v in cases.VARIANTS if "compiled" not in v and "captured" not in v]


def test_variants_of_one_genome_have_the_same_loss() -> None:
    case = tiny(())
    for kind in ("periodic", "relu"):
        names = [v for v in TRAINING if cases.VARIANTS[v][0] == kind]
        losses = torch.tensor(
            [[float(step()) for _ in range(3)] for step in (cases.build(case, n, CPU)[0] for n in names)]
        )
        torch.testing.assert_close(losses, losses[:1].expand_as(losses), rtol=1e-5, atol=1e-6)


def test_the_demo_s_genome_is_that_of_the_command() -> None:
    pytest.importorskip("sklearn")
    task, (case,) = find_task("digits", None, {}), cases.BENCHES["quick"]["demo"]
    expected, pnet = task.plan(task.build(0), genome_params=task.genome_params), case.pnet()
    assert case.periodic is not None and gb.make_plan(pnet, **case.periodic) == expected
    assert expected.genome_params == 450


def test_functions_are_called_in_turn() -> None:
    calls: list[str] = []

    def function(name: str) -> None:
        calls.append(name)
        time.sleep(2e-3)

    found = time_together({n: partial(function, n) for n in "ab"}, CPU.device, rounds=3, visit=1e-9)
    assert "".join(calls) == "aaabbb" + 3 * "ab"
    assert all(min(timing) >= 2e-3 for timing in found.values())


def test_results_are_written_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    growth = tuple(tiny(("dense", "periodic lazy"), width, f"w{width}") for width in (8, 16))
    benches = {"mlps": growth, "alone": (cases.generation_case(110, ("relu eager", "naive")),)}
    results = measure(benches, CPU, tmp_path, rounds=2, visit=1e-4, repeat=3)
    assert results == json.loads((tmp_path / "bench.json").read_text())
    assert {"machine", "device", "threads", "torch", "rows"} == results.keys()
    assert results["threads"] == 1
    rows = results["rows"]
    assert [(row["case"], row["variant"]) for row in rows] == [
        (case.name, v) for bench in benches.values() for case in bench for v in case.variants
    ]
    for row in rows:
        assert row.keys() == KEYS and row["step_ms"] > 0
    assert [row["ratio_to_dense"] is None for row in rows] == [False] * 4 + [True] * 2
    assert rows[0]["ratio_to_dense"] == rows[5]["ratio_to_naive"] == 1
    assert len(rows[1]["ratios_to_dense"]) == 3 and rows[1]["ratio_to_dense"] == sorted(rows[1]["ratios_to_dense"])[1]
    print_results(results)
    out = capsys.readouterr().out
    words = ("w8", "periodic lazy", "naive", "range")
    assert all(word in out for word in words)


def test_every_case_can_be_built_from_its_names() -> None:
    for benches in cases.BENCHES.values():
        for bench in benches.values():
            names = [case.name for case in bench]
            assert len(set(names)) == len(names)
            for case in bench:
                assert set(case.variants) <= cases.VARIANTS.keys()
                kinds = {cases.VARIANTS[v][0] for v in case.variants} - {""}
                assert all(getattr(case, kind) is not None for kind in kinds)
    words, following = cases.sequences(2, 6, 11)
    assert torch.equal(words[:, 1:], following[:, :-1])
    assert cases.choose(cases.BENCHES["quick"], None) == cases.BENCHES["quick"]
    assert list(cases.choose(cases.BENCHES["full"], ("remat", "gpt"))) == ["gpt", "remat"]
