"""What training on several ranks sends, and what it waits for: the cases of `gbfunc bench --distributed`.

Each rank is a process that runs this module: `python -m gbfunc.lab.bench.wire ORDER`.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import gbfunc as gb
from gbfunc.lab.bench.cases import Case, Scale, gpt_case, mlp_case
from gbfunc.lab.bench.dense_parallel import CollectiveBytes, Group
from gbfunc.lab.bench.links import Port, open_loopback, open_switch, run_module, sent_bytes
from gbfunc.lab.bench.memory import steps_memory
from gbfunc.lab.bench.report import time_together
from gbfunc.lab.bench.schemes import PURPOSES, Built, build, lightest
from gbfunc.lab.bench.variants import Step, first_net, genome_step, plan_of

LINKS: Mapping[str, float | None] = {"loopback": None, "100mbit": 100.0, "10mbit": 10.0}
"""Rate of each link in 10^6 bit/s; the loopback has none."""

PLACEMENTS = ("replicated", "sharded", "factors")
"""Where the library keeps the genome (see `make_train_step`)."""

VARIANTS = ("ddp", "fsdp2", "torchgb", *PLACEMENTS)
"""Of the cases that split the batch over all ranks (see `SCHEMES`)."""

_TENSOR = ("dense_tensor", "tensor")
_TENSOR_DATA = ("dense_tensor_fsdp", "tensor_data", "tensor_data_remat")

CASES: Mapping[Scale, Mapping[str, Case]] = {
    "full": {
        "mlp": mlp_case((2048, 2048, 2048, 10), 256, VARIANTS, tile=512),
        # The GPT of nanoGPT's recipe for a CPU: 65 characters, 4 layers of 128, context 64.
        "gpt": gpt_case(16, 64, 65, 4, 4, 128, VARIANTS, h=8, tile=128),
        "mlp_tensor": mlp_case((2048, 2048, 2048, 10), 256, _TENSOR, name="mlp tensor 2048-2048-2048-10"),
        "gpt_tensor": gpt_case(16, 64, 65, 4, 4, 128, _TENSOR_DATA, name="gpt tensor 4x128", h=8),
        # The GPT of `gbfunc bench`.
        "gpt_tensor_512": gpt_case(4, 512, 30_000, 4, 8, 512, _TENSOR_DATA, name="gpt tensor 4x512"),
        "remat_tensor": mlp_case((2048,) * 13, 256, _TENSOR_DATA, name="mlp tensor 12x2048"),
    },
    "quick": {
        "mlp": mlp_case((128, 128, 128, 10), 256, VARIANTS, h=4, tile=32),
        "mlp_tensor": mlp_case((128, 128, 128, 10), 64, _TENSOR, name="mlp tensor 128-128-128-10", h=4),
        "gpt_tensor": gpt_case(8, 16, 33, 2, 4, 64, _TENSOR_DATA, name="gpt tensor 2x64", h=4),
        "gpt_tensor_32": gpt_case(8, 16, 32, 1, 4, 32, _TENSOR_DATA, name="gpt tensor 1x32", h=2),
    },
}
"""Every case by scale and name."""

_WARM_UP = 2

# Of a TCP segment on Ethernet: 14 + 20 + 32 bytes of headers (time stamps on) before 1,448 bytes.
_HEADERS = (1_448 + 66) / 1_448


class Pace(NamedTuple):
    """How long to measure."""

    seconds: float  # of all timed steps of a variant, about; one step at least
    steps: int  # most timed steps
    timeout: float  # seconds after which the ranks of one link are ended
    memory: bool = False  # whether to measure that of every variant in processes of its own


PACES: Mapping[Scale, Pace] = {"full": Pace(2.0, 20, 1800.0, memory=True), "quick": Pace(0.2, 5, 100.0)}
"""How long to measure at each scale."""


Row = dict[str, Any]
"""One variant of a case on some ranks and one link, as `wire.json` has it (see `rows_of`); None is what was not
measured."""


class Measured(NamedTuple):
    """What one rank measured of a variant."""

    seconds: list[float]  # of the steps
    wire_bytes: float  # that its interface sent in a step
    counted_bytes: float  # that it sends by the tensors' sizes
    busiest_bytes: float  # the same for the model (see `CollectiveBytes`)
    losses: list[float]  # of the first steps, on its share of the batch
    ratio_params: float | None  # of the plan, None without one
    purposes: dict[str, float] = {}  # the counted bytes by what they are (see `PURPOSES`)


ByVariant = dict[tuple[str, str], dict[str, list[Measured]]]
"""`{(case, link): {variant: what each rank measured}}`."""


def measure_ranks(
    cases: Sequence[tuple[Scale, str]], ranks: int, links: Sequence[str], pace: Pace, lr: float = 1e-8
) -> ByVariant:
    """Run all variants of cases (scale and name) on as many new processes, of one thread each, over some links.

    Links are names of `LINKS`: the loopback alone, or slow ones alone. By default nets stay as they were drawn.
    """
    results: ByVariant = {}
    for report in _launch(ranks, links, pace, lr, cases=list(cases)):
        for case, variant, link, measured in report:
            results.setdefault((case, link), {}).setdefault(variant, []).append(Measured(*measured))
    return results


def measure_peaks(scale: Scale, name: str, ranks: int, pace: Pace) -> dict[str, float]:
    """Peak memory (B) of the rank that needs most, by variant of a case; see `memory.steps_memory`.

    Where weights are generated the p-net is made on the meta device, as one that outgrows a rank would be.
    """
    variants = CASES[scale][name].variants
    return {v: max(_launch(ranks, ["loopback"], pace, 1e-8, memory=(scale, name, v))) for v in variants}


def _launch(ranks: int, links: Sequence[str], pace: Pace, lr: float, **order: Any) -> list[Any]:
    """What each rank, a new process, reports of an order."""
    place = open_loopback if list(links) == ["loopback"] else open_switch
    order |= {"ranks": ranks, "links": list(links), "pace": pace, "lr": lr}
    return run_module("gbfunc.lab.bench.wire", order, ranks, pace.timeout, place)


def rows_of(
    results: ByVariant, case: str, ranks: int, link: str, peaks: Mapping[str, float] | None = None
) -> list[Row]:
    """The rows of a case on a link, from what was measured on the loopback, and there if it could be made."""
    mbit, rows = LINKS[link], []
    for variant, loopback in results[case, "loopback"].items():
        there = results.get((case, link), {}).get(variant)
        modelled = None if mbit is None else 1e3 * modelled_seconds(loopback, mbit)
        row: Row = {"case": case, "variant": variant, "ranks": ranks, "link": link}
        row |= {
            # Median on rank 0, modelled where it could not be measured.
            "step_ms": modelled if there is None else 1e3 * statistics.median(there[0].seconds),
            "timing": "modelled" if there is None else "measured",
            "modelled_ms": modelled,
            # Of a rank in a step, the mean over ranks: by its interface, headers included, and by `CollectiveBytes`.
            "wire_bytes": _mean(there, "wire_bytes") if there else None,
            "counted_bytes": _mean(loopback, "counted_bytes"),
        }
        row |= {f"{p}_bytes": statistics.fmean(m.purposes.get(p, 0.0) for m in loopback) for p in PURPOSES}
        row["peak_bytes"] = (peaks or {}).get(variant)
        # To the case's first variant.
        first = rows[0] if rows else row
        for ratio, of in (
            ("step_ratio", "step_ms"),
            ("bytes_ratio", "counted_bytes"),
            ("wire_ratio", "wire_bytes"),
            ("peak_ratio", "peak_bytes"),
        ):
            row[ratio] = row[of] / first[of] if row[of] and first[of] else None
        # Parameters of the dense p-net over those of the genome; steps of which `step_ms` is the median.
        row |= {"ratio_params": loopback[0].ratio_params, "repeats": len(there[0].seconds) if there else 0}
        rows.append(row)
    return rows


def modelled_seconds(loopback: Sequence[Measured], mbit: float) -> float:
    """A step's time on a slow link, from what was measured on the loopback.

    step + busiest bytes x (bytes on the loopback / bytes counted) x headers / rate: nothing overlaps, no packet is
    late. Where gloo sends more than it must (its reduce-scatter is an all-reduce) the loopback's counters tell.
    """
    sent = _mean(loopback, "wire_bytes") / _mean(loopback, "counted_bytes")
    waited = _mean(loopback, "busiest_bytes") * sent * _HEADERS * 8 / (mbit * 1e6)
    return statistics.median(loopback[0].seconds) + waited


def expected_seconds(loopback: ByVariant, links: Sequence[str], pace: Pace) -> float:
    """About how long slow links will take: the modelled time of all the steps that are to be timed there."""
    measured = [m for variants in loopback.values() for m in variants.values()]
    steps = [modelled_seconds(m, mbit) for m in measured for link in links if (mbit := LINKS[link]) is not None]
    return sum(s * (1 + min(pace.steps, int(pace.seconds / s))) for s in steps)


def _mean(measured: Sequence[Measured], by: str) -> float:
    return statistics.fmean(getattr(m, by) for m in measured)


def run_rank(order: Mapping[str, Any]) -> None:
    """Measure all variants of all cases of an order, and write the results beside those of the other ranks."""
    pace = Pace(*order["pace"])
    # Whoever started this may be gone.
    signal.alarm(int(pace.timeout) + 5)
    torch.set_num_threads(1)
    folder, rank, port = Path(order["folder"]), order["rank"], Port(*order["port"])
    group = Group(rank, order["ranks"], folder / "store")
    with group.joined(pace.timeout):
        report = _peak(order, group) if "memory" in order else _measurements(order, group, port, pace)
    (folder / f"{rank}.json").write_text(json.dumps(report))


def _peak(order: Mapping[str, Any], group: Group) -> float:
    scale, name, variant = order["memory"]

    def make(case: Case) -> Step:
        return build(lightest(case, variant), variant, group, order["lr"]).step

    return steps_memory(CASES[scale][name], make, torch.device("cpu")).peak


def _measurements(
    order: Mapping[str, Any], group: Group, port: Port, pace: Pace
) -> list[tuple[str, str, str, Measured]]:
    results: list[tuple[str, str, str, Measured]] = []
    for scale, name in order["cases"]:
        case = CASES[scale][name]
        for variant in case.variants:
            built = build(case, variant, group, order["lr"])
            for link, measured in measure(built, group, port, order["links"], pace).items():
                results.append((case.name, variant, link, measured))
            del built
    return results


def one_rank_ratios(case: Case, *, rounds: int, lr: float = 1e-8) -> dict[str, float]:
    """Time of a step on a mesh of this rank alone over that without a mesh, by placement; timed side by side."""
    assert case.periodic is not None
    net = first_net(case)
    plan = plan_of(net, case.periodic)
    steps = {"": genome_step(plan, net, case.batch(), lr)}
    steps |= {p: genome_step(plan, net, case.batch(), lr, mesh=gb.mesh(), placement=p) for p in PLACEMENTS}
    times = time_together(steps, torch.device("cpu"), rounds=rounds)
    return {placement: times[placement].seconds / times[""].seconds for placement in PLACEMENTS}


def measure(built: Built, group: Group, port: Port, links: Sequence[str], pace: Pace) -> dict[str, Measured]:
    """Warm up without a limit, count one step, then time steps on each link together with the other ranks."""
    step = built.step
    losses = [float(step()) for _ in range(_WARM_UP)]
    built.purposes(CollectiveBytes())
    with CollectiveBytes() as counted:
        losses.append(float(step()))
    purposes = built.purposes(counted)
    results = {}
    for link in links:
        port.limit(LINKS[link])
        seconds, wire = _timed(step, group, port.interface, pace)
        port.limit(None)
        results[link] = Measured(
            seconds, wire / port.sharing, counted.sent, counted.busiest, losses, built.ratio_params, purposes
        )
    return results


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
    run_rank(json.loads(sys.argv[1]))
    # What was measured is written: torch's threads for collectives can abort a process that ends as usual.
    os._exit(0)
