"""One rank of a measurement: `python -m gbfunc.lab.bench.rank ORDER`, started by `gbfunc.lab.bench.wire`."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import gbfunc as gb
from gbfunc.lab.bench.cases import Case, Genes
from gbfunc.lab.bench.dense_parallel import CollectiveBytes, Group, ddp_step, fsdp_step, torchgb_step
from gbfunc.lab.bench.links import Port, sent_bytes
from gbfunc.lab.bench.measure import time_together
from gbfunc.lab.bench.variants import Batch, Step, genome_step
from gbfunc.lab.bench.wire import CASES, LINKS, PLACEMENTS, Measured, Pace
from gbfunc.plan import Plan

_WARM_UP = 2


class Placed(NamedTuple):
    """A variant, ready to run on this rank."""

    step: Step
    ratio_params: float | None


def main(argv: Sequence[str]) -> None:
    """Measure all variants of all cases of an order, and write what was found beside those of the other ranks."""
    order = json.loads(argv[0])
    pace = Pace(*order["pace"])
    # Whoever started this may be gone.
    signal.alarm(int(pace.timeout) + 5)
    torch.set_num_threads(1)
    folder, rank, port = Path(order["folder"]), order["rank"], Port(*order["port"])
    group = Group(rank, order["ranks"], folder / "store")
    found: list[tuple[str, str, str, dict[str, Any]]] = []
    with group.joined(pace.timeout):
        for scale, name in order["cases"]:
            case = CASES[scale][name]
            for variant in case.variants:
                placed = build(case, variant, group, order["lr"])
                for link, measured in measure(placed, group, port, order["links"], pace).items():
                    found.append((case.name, variant, link, measured._asdict()))
                del placed
    (folder / f"{rank}.json").write_text(json.dumps(found))


def build(case: Case, variant: str, group: Group, lr: float) -> Placed:
    """Make a variant with this rank's share of the batch."""
    net, genes, plan = _planned(case)
    x, target = case.batch()
    share: Batch = (x.chunk(group.ranks)[group.rank], target.chunk(group.ranks)[group.rank])
    if variant == "ddp":
        return Placed(ddp_step(net, share, lr), None)
    if variant == "fsdp2":
        return Placed(fsdp_step(net, share, lr), None)
    if variant == "torchgb":
        return Placed(torchgb_step(net, genes, share, lr), plan.ratio_params)
    mesh = gb.mesh(data=group.ranks) if variant == "replicated" else gb.mesh(gnets=group.ranks)
    return Placed(genome_step(plan, net, share, lr, mesh=mesh, placement=variant), plan.ratio_params)


def _planned(case: Case) -> tuple[nn.Module, Genes, Plan]:
    """The p-net, the same on all ranks, and the plan of its genome."""
    if case.periodic is None:
        raise ValueError(f"{case.name} has no periodic g-nets")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        net = case.net()
    genes = case.periodic
    return net, genes, gb.make_plan(net, genes.hypernet, max_tile=genes.max_tile, include=genes.include)


def one_rank_ratios(case: Case, *, rounds: int, lr: float = 1e-8) -> dict[str, float]:
    """Time of a step on a mesh of this rank alone over that without a mesh, by placement; timed side by side."""
    net, _, plan = _planned(case)
    steps = {"": genome_step(plan, net, case.batch(), lr)}
    steps |= {p: genome_step(plan, net, case.batch(), lr, mesh=gb.mesh(), placement=p) for p in PLACEMENTS}
    times = time_together(steps, torch.device("cpu"), rounds=rounds)
    return {placement: times[placement].seconds / times[""].seconds for placement in PLACEMENTS}


def measure(placed: Placed, group: Group, port: Port, links: Sequence[str], pace: Pace) -> dict[str, Measured]:
    """Warm up without a limit, count one step, then time steps on each link together with the other ranks."""
    losses = [float(placed.step()) for _ in range(_WARM_UP)]
    with CollectiveBytes(group.rank, group.ranks) as counted:
        losses.append(float(placed.step()))
    found = {}
    for link in links:
        port.limit(LINKS[link])
        seconds, wire = _timed(placed.step, group, port.interface, pace)
        port.limit(None)
        sizes = (counted.sent, counted.busiest)
        found[link] = Measured(seconds, wire / port.sharing, *sizes, losses, placed.ratio_params)
    return found


def _timed(step: Step, group: Group, interface: str, pace: Pace) -> tuple[list[float], float]:
    """Times of steps in a row, as many as fit after a first one, and the bytes that an interface sent in one.

    Ranks leave a meeting some milliseconds apart, which only a step that takes much longer may be charged with.
    """
    group.meet()
    before = sent_bytes(interface)
    group.meet()
    seconds = [_seconds(step)]
    more = group.agree(min(pace.steps, int(pace.seconds / seconds[0])))
    seconds += [_seconds(step) for _ in range(more)]
    group.meet()
    wire = (sent_bytes(interface) - before) / len(seconds)
    return seconds[2:] or seconds, wire


def _seconds(step: Step) -> float:
    start = time.perf_counter()
    float(step())
    return time.perf_counter() - start


if __name__ == "__main__":
    main(sys.argv[1:])
