"""What training on several ranks sends, and what it waits for: the cases of `gbfunc bench --distributed`.

Each rank is a process that runs this module: `python -m gbfunc.lab.bench.wire ORDER`.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn

import gbfunc as gb
from gbfunc.hypernets import periodic
from gbfunc.lab.bench.cases import Case, Genes, Scale, features, sequences
from gbfunc.lab.bench.dense_parallel import CollectiveBytes, Group, ddp_step, fsdp_step, torchgb_step
from gbfunc.lab.bench.links import Port, open_loopback, open_switch, run_ranks, sent_bytes
from gbfunc.lab.bench.report import time_together
from gbfunc.lab.bench.variants import Batch, Step, genome_step
from gbfunc.plan import Plan
from gbfunc.tasks.pnets.gpt import GPT
from gbfunc.tasks.pnets.mlp import mlp

LINKS: Mapping[str, float | None] = MappingProxyType({"loopback": None, "100mbit": 100.0, "10mbit": 10.0})
"""Rate of each link in 10^6 bit/s; the loopback has none."""

PLACEMENTS = ("replicated", "sharded", "factors")
"""Where the library keeps the genome (see `make_train_step`)."""

VARIANTS = ("ddp", "fsdp2", "torchgb", *PLACEMENTS)
"""DDP and FSDP2 train the dense p-net, "torchgb" broadcasts generated weights and all-reduces their gradients."""

_WARM_UP = 2

# Of a TCP segment on Ethernet: 14 + 20 + 32 bytes of headers (time stamps on) before 1,448 bytes.
_HEADERS = (1_448 + 66) / 1_448


def _mlp(width: int, features_: int, tile: int) -> Case:
    genes = Genes(periodic(features_), tile)
    sizes = (width, width, width, 10)
    net, batch = partial(mlp, sizes, 0), partial(features, (256, width), 10)
    return Case("mlp " + "-".join(map(str, sizes)), net, batch, VARIANTS, genes)


def _gpt() -> Case:
    """The GPT of nanoGPT's recipe for a CPU: 65 characters, 4 layers of 128, context 64."""
    genes = Genes(periodic(8), 128, (r"^(tokens|positions)\.weight$",))
    return Case(
        "gpt 4x128", partial(GPT, 65, 64, 4, 128, 4, 512, bias=True), partial(sequences, 16, 64, 65), VARIANTS, genes
    )


CASES: Mapping[Scale, Mapping[str, Case]] = MappingProxyType(
    {
        "full": MappingProxyType({"mlp": _mlp(2048, 32, 512), "gpt": _gpt()}),
        "quick": MappingProxyType({"mlp": _mlp(128, 4, 32)}),
    }
)
"""Every case by scale and name."""


class Pace(NamedTuple):
    """How long to measure.

    Attributes:
        seconds: of all timed steps of a variant, about; one step at least.
        steps: most timed steps.
        timeout: seconds after which the ranks of one link are ended.
    """

    seconds: float
    steps: int
    timeout: float


PACES: Mapping[Scale, Pace] = MappingProxyType({"full": Pace(2.0, 20, 1800.0), "quick": Pace(0.2, 5, 100.0)})
"""How long to measure at each scale."""


class Row(NamedTuple):
    """One variant of a case on some ranks and one link.

    Attributes:
        case: the case.
        variant: the variant.
        ranks: number of ranks.
        link: the link, a name of `LINKS`.
        step_ms: median time of a step on rank 0, modelled where it could not be measured.
        timing: which of both.
        modelled_ms: time on the loopback, and the time that what is on the wire takes at the link's rate, one after
            the other; None on the loopback.
        wire_bytes: bytes that a rank's interface sent in a step, headers included; the mean over ranks. None if not
            measured.
        counted_bytes: bytes that a rank sends by the sizes of the collectives' tensors (see `CollectiveBytes`).
        ratio_to_ddp: time of a step over that of DDP; None where it was not measured.
        bytes_to_ddp: counted bytes over those of DDP.
        wire_to_ddp: bytes on the wire over those of DDP.
        ratio_params: parameters of the dense p-net over those of the genome; None for a dense p-net.
        repeats: steps of which `step_ms` is the median.
    """

    case: str
    variant: str
    ranks: int
    link: str
    step_ms: float
    timing: Literal["measured", "modelled"]
    modelled_ms: float | None
    wire_bytes: float | None
    counted_bytes: float
    ratio_to_ddp: float | None
    bytes_to_ddp: float | None
    wire_to_ddp: float | None
    ratio_params: float | None
    repeats: int


class Measured(NamedTuple):
    """What one rank found out about a variant.

    Attributes:
        seconds: times of the steps.
        wire_bytes: bytes that its interface sent in a step.
        counted_bytes: bytes that it sends by the tensors' sizes.
        busiest_bytes: the same for the model (see `CollectiveBytes`).
        losses: of the first steps, on its share of the batch.
        ratio_params: of the plan, None without one.
    """

    seconds: list[float]
    wire_bytes: float
    counted_bytes: float
    busiest_bytes: float
    losses: list[float]
    ratio_params: float | None


ByVariant = dict[tuple[str, str], dict[str, list[Measured]]]
"""`{(case, link): {variant: what each rank found}}`."""


def choose_cases(scale: Scale, names: tuple[str, ...] | None) -> Mapping[str, Case]:
    """The cases of a scale, or those of them that are named.

    Raises:
        ValueError: for a name that the scale does not have.
    """
    cases = CASES[scale]
    unknown = [name for name in names or () if name not in cases]
    if unknown:
        raise ValueError(f"--cases {' '.join(unknown)}: unknown with --distributed; expected some of {' '.join(cases)}")
    return {name: case for name, case in cases.items() if not names or name in names}


def measure_ranks(
    cases: Sequence[tuple[Scale, str]], ranks: int, links: Sequence[str], pace: Pace, lr: float = 1e-8
) -> ByVariant:
    """Run all variants of some cases on as many new processes, of one thread each, over some links.

    Args:
        cases: scale and name of each.
        ranks: number of processes.
        links: names of `LINKS`: the loopback alone, or slow ones alone.
        pace: how long.
        lr: learning rate; by default nets stay as they were drawn.

    Raises:
        OSError: if a rank fails or takes too long, or if the links cannot be made.
    """
    place = open_loopback if list(links) == ["loopback"] else open_switch
    with tempfile.TemporaryDirectory(prefix="gbfunc-wire-") as name, place(ranks) as ports:
        common = {"cases": list(cases), "ranks": ranks, "links": list(links), "pace": pace, "lr": lr, "folder": name}
        orders = [common | {"rank": rank, "port": port} for rank, port in enumerate(ports)]
        module = [sys.executable, "-m", "gbfunc.lab.bench.wire"]
        commands = [[*port.prefix, *module, json.dumps(order)] for port, order in zip(ports, orders, strict=True)]
        env = {"GLOO_SOCKET_IFNAME": ports[0].interface, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        run_ranks(commands, timeout=pace.timeout, env=env)
        reports = [json.loads(Path(name, f"{rank}.json").read_text()) for rank in range(ranks)]
    found: ByVariant = {}
    for report in reports:
        for case, variant, link, measured in report:
            found.setdefault((case, link), {}).setdefault(variant, []).append(Measured(**measured))
    return found


def rows_of(found: ByVariant, case: str, ranks: int, link: str) -> list[Row]:
    """The rows of a case on a link, from what was found on the loopback, and on that link if it could be made.

    Args:
        found: what each rank measured.
        case: the case's name.
        ranks: number of ranks.
        link: a name of `LINKS`.
    """
    mbit, rows = LINKS[link], []
    for variant, loopback in found[case, "loopback"].items():
        there = found.get((case, link), {}).get(variant)
        modelled = None if mbit is None else 1e3 * modelled_seconds(loopback, mbit)
        measured = None if there is None else 1e3 * statistics.median(there[0].seconds)
        rows.append(
            Row(
                case=case,
                variant=variant,
                ranks=ranks,
                link=link,
                step_ms=cast("float", modelled if measured is None else measured),
                timing="modelled" if there is None else "measured",
                modelled_ms=modelled,
                wire_bytes=None if there is None else _mean(there, "wire_bytes"),
                counted_bytes=_mean(loopback, "counted_bytes"),
                ratio_to_ddp=None,
                bytes_to_ddp=None,
                wire_to_ddp=None,
                ratio_params=loopback[0].ratio_params,
                repeats=0 if there is None else len(there[0].seconds),
            )
        )
    ddp = next((row for row in rows if row.variant == "ddp"), None)
    return [row if ddp is None else _beside(row, ddp) for row in rows]


def _beside(row: Row, ddp: Row) -> Row:
    return row._replace(
        ratio_to_ddp=row.step_ms / ddp.step_ms,
        bytes_to_ddp=row.counted_bytes / ddp.counted_bytes,
        wire_to_ddp=None if row.wire_bytes is None or ddp.wire_bytes is None else row.wire_bytes / ddp.wire_bytes,
    )


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
    total = 0.0
    for variants in loopback.values():
        for mbit in (LINKS[link] for link in links):
            steps = [modelled_seconds(m, mbit) for m in variants.values() if mbit is not None]
            total += sum(s * (1 + min(pace.steps, int(pace.seconds / s))) for s in steps)
    return total


def _mean(found: Sequence[Measured], by: str) -> float:
    return statistics.fmean(getattr(m, by) for m in found)


class Placed(NamedTuple):
    """A variant, ready to run on this rank."""

    step: Step
    ratio_params: float | None


def run_rank(argv: Sequence[str]) -> None:
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
    run_rank(sys.argv[1:])
