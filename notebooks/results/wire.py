"""Measure the bytes that a rank sends per step and the time of a step: `python notebooks/results/wire.py mlp`.

Each measurement prints a JSON row. Two kinds of schemes are compared. DDP, FSDP2, torchGB's scheme and the placements
of a genome split the batch. torch's tensor parallelism and tensor parallelism of a genome split layers. A link is the
loopback interface, or a switch with a limited rate between network namespaces, one per rank (needs root and iproute2).
Ranks use gloo and one thread.
"""

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import gbfunc as gb
from gbfunc.generation import make_generator
from gbfunc.lab.bench import cases
from gbfunc.lab.bench.cases import Case, Step, genome_step, gpt_case, mlp_case, plain_step
from gbfunc.lab.bench.report import steps_memory
from gbfunc.parallel.styles import tensor_styles
from gbfunc.parallel.tensor import PackedColwiseParallel, resolve
from gbfunc.trees import GNET, flat_genome

LINKS = {"loopback": None, "100mbit": 100, "10mbit": 10}
PLACEMENTS = ("replicated", "sharded", "factors")
DATA = ("ddp", "fsdp2", "torchgb", *PLACEMENTS)
TENSOR = ("dense_tensor_fsdp", "tensor_data", "tensor_data_remat")
CASES = {
    "mlp": mlp_case((2048, 2048, 2048, 10), 256, DATA, tile=512),
    "gpt": gpt_case(16, 64, 65, 4, 4, 128, DATA, h=8, tile=128),
    "mlp_tensor": mlp_case((2048, 2048, 2048, 10), 256, ("dense_tensor", "tensor")),
    "gpt_tensor": gpt_case(16, 64, 65, 4, 4, 128, TENSOR, h=8),
    "gpt_tensor_512": gpt_case(4, 512, 30_000, 4, 8, 512, TENSOR),
    "remat_tensor": mlp_case((2048,) * 13, 256, TENSOR),
    "tiny": mlp_case((128, 128, 128, 10), 64, (*DATA, "dense_tensor", "tensor"), h=4),
}
LR, TIMEOUT = 1e-8, 1800


def loss_fn(net: Any, batch: Any) -> Any:
    """Return the mean cross entropy. The loss of logits that are split over ranks is converted from a DTensor."""
    loss: Any = cases.loss_fn(net, batch)
    return loss.to_local() if isinstance(loss, DTensor) else loss


class Bytes(TorchDispatchMode):
    """Count the bytes that a rank sends in torch's collectives, by the collective's ranks, and the bytes of DTensors.

    For a tensor of n bytes and N ranks, a rank sends (N - 1) / N n for a gather, a scatter or (in the mean) a
    broadcast, and twice as much for an all-reduce.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_ranks, self.of_dtensors = Counter[tuple[int, ...]](), 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        space, _, name = func._schema.name.partition("::")
        if space in ("c10d", "_c10d_functional") and re.search("reduce|gather|broadcast", name):
            named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)}
            if "process_group" in named:
                group = dist.ProcessGroup.unbox(named["process_group"])
            else:
                group = dist.distributed_c10d._resolve_process_group(named["group_name"])
            ranks = tuple(dist.get_process_group_ranks(group))
            whole = nbytes(args[1] if "_reduce_scatter_base" in name else args[0])
            whole *= len(ranks) if name.startswith("all_gather_into") else 1
            sent = (2 if "allreduce" in name or "all_reduce" in name else 1) * (len(ranks) - 1) / len(ranks) * whole
            self.by_ranks[ranks] += round(sent)
            self.of_dtensors += sent if space == "_c10d_functional" else 0
        return func(*args, **(kwargs or {}))


def nbytes(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, torch.Tensor) else sum(map(nbytes, tensors))


# Schemes


def shard(net: nn.Module, **options: Any) -> None:
    """Apply FSDP2 to every block, or to every layer of an `nn.Sequential`, and to the remaining parameters."""
    for blocks in (net, *net.children()):
        for block in blocks if isinstance(blocks, nn.Sequential) else ():
            if any(True for _ in block.parameters()):
                fully_shard(block, **options)
    fully_shard(net, **options)


def layer_styles(net: nn.Module, ranks: int) -> dict[str, Any]:
    """Return the parallel styles of layers: by columns and by rows in turn for an MLP, and `tensor_styles` for a GPT.

    With an odd number of layers, the last layer of an MLP is not split. If the number of ranks divides the vocabulary,
    a GPT's logits stay split for `loss_parallel`.
    """
    if not isinstance(net, nn.Sequential):
        divided = net.get_submodule("head").get_parameter("weight").shape[0] % ranks == 0
        split = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        return {**tensor_styles(net), **({"head": split} if divided else {})}
    layers = [name for name, module in net.named_children() if isinstance(module, nn.Linear)]
    pairs = layers[: len(layers) // 2 * 2]
    return {name: RowwiseParallel() if i % 2 else ColwiseParallel() for i, name in enumerate(pairs)}


def tensor_step(net: nn.Module, batch: Any, tensor: int, sharded: bool) -> Step:
    """Build a step of the dense p-net that torch splits over neighbouring ranks.

    With `sharded`, FSDP2 shards the parameters over the data ranks.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tensor, tensor), mesh_dim_names=("data", "tensor"))
    styles, first = layer_styles(net, tensor), dict[int, str]()
    for name, style in resolve(net, styles).items():
        # Permute the rows of packed queries, keys and values, so that each rank gets complete heads.
        for p in net.get_submodule(name).parameters() if isinstance(style, PackedColwiseParallel) else ():
            p.data = p.detach().unflatten(0, (style.parts, tensor, -1)).transpose(0, 1).flatten(0, 2).contiguous()
    tied = {n: first.setdefault(id(p), n) for n, p in net.named_parameters(remove_duplicate=False)}
    parallelize_module(net, mesh["tensor"], styles)
    for name, owner in tied.items():
        if name != owner:
            parent, _, key = name.rpartition(".")
            setattr(net.get_submodule(parent), key, net.get_parameter(owner))
    if sharded:
        shard(net, mesh=mesh["data"])
    # A parameter group has one mesh, because a fused optimizer cannot mix DTensors of different meshes.
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in net.parameters():
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return plain_step(lambda: loss_fn(net, batch), [{"params": some} for some in groups.values()], LR)


def torchgb_step(net: nn.Module, case: Case, batch: Any) -> Step:
    """Build a step of torchGB's scheme: ranks generate and broadcast whole tensors, and DDP all-reduces gradients."""
    loads, owners = [0] * dist.get_world_size(), {}
    for t in sorted(gb.make_plan(net, **case.periodic).generated, key=lambda t: -t.numel):
        owners[t.name] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[t.name]] += t.numel
    mine = [name for name, owner in owners.items() if owner == dist.get_rank()]
    parallel, parameters = DistributedDataParallel(net), dict(net.named_parameters())
    leaves, generate = [], dict
    if mine:
        plan = gb.make_plan(net, **case.periodic, exclude=[f"^{re.escape(k)}$" for k in owners if k not in mine])
        genome = gb.init_genome(plan, net, 0)
        flat = flat_genome(genome._replace(direct={t.name: parameters[t.name] for t in plan.direct}))
        leaves, make = [x.requires_grad_() for k, x in flat.items() if k.startswith(GNET)], make_generator(plan)
        generate = lambda: make(flat)  # noqa: E731
    optimizer = torch.optim.AdamW(leaves + [p for k, p in parameters.items() if k not in owners], lr=LR, fused=True)

    def step() -> Any:
        optimizer.zero_grad()
        parallel.zero_grad()
        weights = generate()
        for name, owner in owners.items():
            if name in mine:
                parameters[name].data.copy_(weights[name])
            dist.broadcast(parameters[name].detach(), owner)
        loss = loss_fn(parallel, batch)
        loss.backward()
        torch.autograd.backward([weights[name] for name in mine], [parameters[name].grad for name in mine])
        optimizer.step()
        return loss.detach()

    return step


def build(case: Case, scheme: str, rank: int, ranks: int) -> tuple[Step, gb.Plan | None, Any]:
    """Build a step on this rank's part of the batch. Return the step, and the plan and the mesh of a genome."""
    tensor = (2 if "data" in scheme or "fsdp" in scheme else ranks) if "tensor" in scheme else 1
    parts, index = ranks // tensor, rank // tensor
    share, net = tuple(x.chunk(parts)[index] for x in case.batch()), case.pnet()
    plan, mesh = gb.make_plan(net, **case.periodic), None
    if scheme in PLACEMENTS or scheme.startswith("tensor"):
        shards = scheme in ("sharded", "factors")
        mesh, options = gb.mesh(*((1, parts) if shards else (parts, 1)), tensor=tensor), {"placement": scheme}
        if tensor > 1:
            options = {"lazy": "auto", "parallel": layer_styles(net, tensor)}
            options |= {"remat": "layer"} if "remat" in scheme else {}
        step = genome_step(plan, net, share, LR, mesh=mesh, **options)
    elif scheme == "torchgb":
        step = torchgb_step(net, case, share)
    elif "tensor" in scheme:
        step, plan = tensor_step(net, share, tensor, "fsdp" in scheme), None
    else:
        plan = None
        if scheme == "fsdp2":
            shard(net)
        net = DistributedDataParallel(net) if scheme == "ddp" else net
        step = plain_step(lambda: loss_fn(net, share), net.parameters(), LR)

    def in_parallel() -> Any:
        with loss_parallel() if tensor > 1 else contextlib.nullcontext():
            return step()

    return in_parallel, plan, mesh


# Ranks and links


def run_rank(rank: int, order: dict[str, Any]) -> list[Any]:
    """Measure every scheme on every link on this rank. Return the rows."""
    case, ranks, rows = CASES[order["case"]], order["ranks"], []
    store = f"file://{order['folder']}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT))
    for scheme in order["schemes"]:
        if order["memory"]:
            if scheme.startswith("tensor") or scheme in PLACEMENTS:
                case = replace(case, net=lambda make=case.net: on_meta(make))
            make = lambda c, scheme=scheme: build(c, scheme, rank, ranks)[0]  # noqa: E731
            rows.append({"peak_mb": steps_memory(case, make, torch.device("cpu")) / 1e6})
            continue
        step, plan, mesh = build(case, scheme, rank, ranks)
        for _ in range(2):
            float(step())
        before = Counter(mesh.traffic) if mesh else {}
        with Bytes() as counted:
            float(step())
        by_axis = mesh.traffic - before if mesh else {}
        sent = by_axis.total() + counted.of_dtensors if mesh else counted.by_ranks.total()
        row = {"sent_kb": sent / 1e3, "ratio_params": plan and round(plan.ratio_params, 1)}
        if "tensor" in scheme:
            mates = counted.by_ranks[tuple(range(rank // 2 * 2, rank // 2 * 2 + 2))]
            row["activations_kb"] = (by_axis["tensor"] + counted.of_dtensors if mesh else mates) / 1e3
        for link in order["links"]:
            limit(order["ports"] if rank == 0 else [], LINKS[link])
            wire = f"/sys/class/net/{'wire' if order['ports'] else 'lo'}/statistics/tx_bytes"
            dist.barrier()
            sent, seconds = int(Path(wire).read_text()), [timed(step)]
            more = torch.tensor(min(20, int(order["seconds"] / seconds[0])))
            dist.broadcast(more, 0)
            seconds += [timed(step) for _ in range(int(more))]
            dist.barrier()
            sent = (int(Path(wire).read_text()) - sent) / len(seconds)
            limit(order["ports"] if rank == 0 else [], None)
            here = {"link": link, "step_ms": 1e3 * statistics.median(seconds[2:] or seconds), "steps": len(seconds)}
            rows.append({"scheme": scheme, **row, **here, "wire_kb": sent / (1 if order["ports"] else ranks) / 1e3})
    return rows


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make()


def timed(step: Step) -> float:
    start = time.perf_counter()
    float(step())
    return time.perf_counter() - start


def sh(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True)


def limit(ports: list[tuple[str, str]], mbit: int | None) -> None:
    """Limit both ends of each cable to `mbit` * 10^6 bit/s with Ethernet headers (`man tc-tbf`), or lift the limit."""
    queue = "pfifo" if mbit is None else f"tbf rate {mbit}mbit burst {max(3_028, mbit * 125)} latency 50ms"
    sh(*(f"tc -n {name} qdisc replace dev {interface} root {queue}" for name, interface in ports))


@contextlib.contextmanager
def switch(ranks: int) -> Any:
    """Make a network namespace for every rank, joined by a veth pair to one switch.

    Yields the names of the namespaces, and both ends of every cable.
    """
    hub, *names = (f"gbfunc-{os.getpid()}-{i}" for i in range(ranks + 1))
    ends = [end for i, name in enumerate(names) for end in ((hub, f"port{i}"), (name, "wire"))]
    try:
        sh(*(f"ip netns add {name}" for name in (hub, *names)))
        sh(f"ip -n {hub} link add dev switch type bridge", f"ip -n {hub} link set dev switch up")
        for i, name in enumerate(names):
            sh(
                f"ip -n {hub} link add dev port{i} type veth peer name wire netns {name}",
                f"ip -n {hub} link set dev port{i} master switch",
                f"ip -n {name} address add 10.213.77.{i + 1}/24 dev wire",
                f"ip -n {name} link set dev lo up",
            )
        # Send single packets, as on a real wire. Otherwise the counters see 64 KiB with one header.
        sh(*(f"ip -n {where} link set dev {interface} gso_max_segs 1 up" for where, interface in ends))
        yield names, ends
    finally:
        for name in (hub, *names):
            subprocess.run(f"ip netns delete {name}".split(), capture_output=True)


def launch(ranks: int, order: dict[str, Any]) -> list[list[Any]]:
    """Start a process per rank and return the rows of each. If one process fails, all are ended."""
    slow = order["links"] != ["loopback"]
    with switch(ranks) if slow else contextlib.nullcontext(((), [])) as (names, ports), contextlib.ExitStack() as stack:
        order |= {"ranks": ranks, "ports": ports, "folder": stack.enter_context(tempfile.TemporaryDirectory())}
        env = os.environ | {"GLOO_SOCKET_IFNAME": "wire" if slow else "lo", "OMP_NUM_THREADS": "1"}
        processes = []
        for rank in range(ranks):
            place = ["ip", "netns", "exec", names[rank]] if slow else []
            command = [*place, sys.executable, __file__, order["case"], "--rank", str(rank), json.dumps(order)]
            processes.append(subprocess.Popen(command, env=env))
            stack.callback(processes[-1].kill)
        while None in (codes := [p.poll() for p in processes]):
            if any(codes):
                break
            time.sleep(0.05)
        if any(codes):
            raise SystemExit(f"exit codes of ranks: {codes}")
        return [json.loads(Path(order["folder"], f"{rank}.json").read_text()) for rank in range(ranks)]


def bars(case: str, rows: list[dict[str, Any]]) -> None:
    """Draw the bytes by number of ranks, and the time by link, into `wire_CASE.png`."""
    panels = {"sent in a step (kB)": {}, "time of a step (ms)": {}}
    for row in rows:
        panels["sent in a step (kB)"].setdefault(f"{row['ranks']} ranks", {})[row["scheme"]] = row["sent_kb"]
        times = panels["time of a step (ms)"].setdefault(f"{row['ranks']} ranks, {row['link']}", {})
        times[row["scheme"]] = row["step_ms"]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for one, (label, groups) in zip(axes, panels.items(), strict=True):
        for i, scheme in enumerate(CASES[case].variants):
            places = [x + i / 8 for x in range(len(groups))]
            one.bar(places, [group[scheme] for group in groups.values()], 1 / 8, label=scheme)
        one.set(ylabel=label, yscale="log", xticks=[x + 0.3 for x in range(len(groups))], xticklabels=list(groups))
    axes[0].legend()
    figure.savefig(f"wire_{case}.png", dpi=150)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--ranks", type=int, nargs="+", default=(2, 4))
    parser.add_argument("--links", nargs="+", choices=LINKS, default=["loopback"])
    parser.add_argument("--seconds", type=float, default=2.0, help="approximate time for the steps of a scheme")
    parser.add_argument(
        "--memory", action="store_true", help="measure only the peak memory, of the rank that needs the most"
    )
    parser.add_argument("--figure", action="store_true", help="also draw wire_CASE.png")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.rank:
        given = json.loads(options.rank[1])
        found = json.dumps(run_rank(int(options.rank[0]), given))
        Path(given["folder"], f"{options.rank[0]}.json").write_text(found)
        # End without cleaning up, because torch's threads for collectives can abort a process that exits normally.
        os._exit(0)
    schemes, rows = CASES[options.case].variants, []
    order = {"case": options.case, "seconds": options.seconds, "memory": options.memory}
    fast, slow = (["loopback"] * ("loopback" in options.links), [k for k in options.links if k != "loopback"])
    for ranks in options.ranks:
        for links in filter(None, ([["loopback"]] if options.memory else (fast, slow))):
            for some in [[scheme] for scheme in schemes] if options.memory else [schemes]:
                reports = launch(ranks, order | {"links": links, "schemes": some})
                for same in zip(*reports, strict=True):
                    numbers = {k: statistics.fmean(r[k] for r in same) for k in same[0] if k.endswith("_kb")}
                    numbers |= {k: max(r[k] for r in same) for k in same[0] if k == "peak_mb"}
                    row = {"case": options.case, "ranks": ranks, "scheme": some[0], **same[0], **numbers}
                    row = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    if options.figure:
        bars(options.case, rows)
