"""The plan as a value: static, hashable, JSON-able, honest about the file that it leads to."""

from typing import Any

import pytest
from torch import nn

import gbfunc as gb
from gbfunc.plan import Plan
from tests.support.plans import PLANS, Tied, plans
from tests.support.strategies import ALL_EXAMPLES, FACTORIES, named

every_plan = pytest.mark.parametrize("name", PLANS)


@every_plan
def test_making_it_again_gives_the_same_plan(name: str) -> None:
    assert plans()[name][1] == PLANS[name][1]


@every_plan
def test_counts_are_those_of_the_tensors(name: str) -> None:
    net, plan = PLANS[name]
    genome = gb.init_genome(plan, net)
    leaves = [leaf for e in genome.gnets.values() for leaf in e.values()] + list(genome.direct.values())
    assert plan.genome_params == sum(leaf.numel() for leaf in leaves)
    assert plan.pnet_params == sum(p.numel() for p in net.parameters())
    assert plan.ratio_params == pytest.approx(plan.pnet_params / max(1, plan.genome_params))
    unique = {t.data_ptr() if t.numel() else id(t): t for t in net.state_dict().values()}
    assert plan.dense_bytes == sum(t.numel() * t.itemsize for t in unique.values())
    assert plan.buffer_bytes == sum(b.numel() * b.itemsize for b in net.buffers())


@every_plan
def test_ensembles_hold_every_slot_once(name: str) -> None:
    _, plan = PLANS[name]
    slots = [(i, p) for i, t in enumerate(plan.tensors) for p in range(len(t.slots))]
    placed = [(p.tensor, p.matrix) for e in plan.ensembles for p in e.spans]
    assert sorted(placed) == slots
    assert len({e.name for e in plan.ensembles}) == len({(e.hypernet, e.dims) for e in plan.ensembles})
    for e in plan.ensembles:
        covered = [t for p in e.spans for t in range(p.first, p.first + p.slot.grid.n_tiles)]
        assert covered == list(range(e.n_tiles))
        assert sorted(set(e.groups)) == list(range(e.n_groups))


@pytest.mark.parametrize("hypernet", ALL_EXAMPLES, ids=named)
def test_every_hypernet_goes_through_a_plan(hypernet: Any) -> None:
    net = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    plan = gb.make_plan(net, hypernet, max_tile=4)
    assert Plan.from_json(plan.to_json(), FACTORIES) == plan
    tiles = 1 if hypernet.type in ("constant", "new_rows") else 4
    assert [t.slots[0].grid.n_tiles for t in plan.generated] == [tiles, tiles // 2 or 1]
    weights = gb.generate(plan, gb.init_genome(plan, net))
    assert {k: v.shape for k, v in weights.items()} == {k: v.shape for k, v in net.named_parameters()}


def test_the_report_as_a_table() -> None:
    plan = gb.make_plan(Tied(), gb.periodic(2), include=["emb"])
    lines = [line.split() for line in plan.report().splitlines()]
    assert lines[0] == ["tensor", "shape", "role", "by", "tiles", "parameters", "bytes", "note"]
    assert lines[2] == ["emb.weight", "11x6", "generated", "periodic(2)", "1", "of", "11x6", "18", "72", "included"]
    assert lines[3][:5] == ["head.weight", "tied", "to", "emb.weight", "0"]
    assert lines[4][:4] == ["head.bias", "11", "direct", "11"]
    buffers = gb.make_plan(nn.BatchNorm1d(3)).report()
    assert "running_mean         3      buffer" in buffers
    assert "(3)" in buffers


def test_tiles_of_a_kind_share_their_code_weights() -> None:
    net = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(3)))
    plan = gb.make_plan(net, gb.periodic(2, "layers"), max_tile=8)
    groups: dict[str, set[int]] = {}
    for e in plan.ensembles:
        for p in e.spans:
            own = e.groups[p.first : p.first + p.slot.grid.n_tiles]
            assert len(set(own)) == len(own)
            groups.setdefault(p.slot.group, set()).update(own)
    assert len(groups) == 3 + 1 + 1 + 1  # q, k, v; output; two feed-forward layers: each the same in all three blocks.
    assert sorted(len(g) for g in groups.values()) == [1, 1, 1, 1, 2, 2]
    assert sum(e.n_groups for e in plan.ensembles) == 8
    alone = gb.make_plan(net[0], gb.periodic(2, "layers"), max_tile=8)
    shared = 8 * 2 * (3 + 3)
    assert plan.genome_params - shared == 3 * (alone.genome_params - shared)
