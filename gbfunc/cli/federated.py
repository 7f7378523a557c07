"""`gbfunc federated`: simulates, in one process, clients that train one genome, each on private examples."""

from __future__ import annotations

import csv
import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import gbfunc as gb
from gbfunc.cli import printable
from gbfunc.cli.commands import Federated
from gbfunc.cli.genomes import GENOME_FILE, genome_metrics, read_genome
from gbfunc.cli.job import Job, about, find_optimizer, make_job, provenance, read_json
from gbfunc.cli.output import open_folder, print_metrics, reporter, write_history, write_metrics
from gbfunc.cli.parser import settings_of
from gbfunc.tasks.base import SCHEDULES
from gbfunc.tasks.data import Split

if TYPE_CHECKING:
    from gbfunc.federated import GenomeStrategy, LocalGrid

SERVER_FILE = "server.safetensors"


def run_federated(options: Federated) -> None:
    if options.sample > options.clients:
        raise ValueError(f"--sample must be at most --clients {options.clients}, got {options.sample}")
    saved = options.out is not None and (options.out / SERVER_FILE).exists()
    if options.resume and not saved:
        raise ValueError(f"--resume needs --out, a folder with {SERVER_FILE}, got {options.out}")
    if saved and not options.resume:
        raise ValueError(f"{options.out} has a federation: --resume continues it, or choose another --out")
    # Hide Flower's log: the command shows its own progress.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    job = make_job(options.data, options.genome, dense=options.dense)
    task = job.task
    if not isinstance(task.train, Split):
        raise ValueError(f"federated needs a task of classified examples, got --task {options.data.task}: take digits")
    with open_folder(options.out) as folder:
        rows: list[dict[str, float]] = []
        lines = (folder / "history.csv").read_text(encoding="utf-8").splitlines() if options.resume else []
        for row in csv.DictReader(lines):
            rows.append({k: int(x) if x.isdecimal() else float(x) for k, x in row.items() if k != "run"})
        strategy, grid = _federation(job, options)
        with grid, reporter("federated", options.rounds) as report:

            def measure(round_: int, arrays: Any) -> None:
                done = strategy.done
                known = bool(rows) and rows[-1]["round"] == done
                if known or (done % options.measure_every and done != options.rounds):
                    return
                found = task.measured(gb.materialize(job.plan, strategy.genome, job.pnet).eval(), task.val)
                up, down = grid.traffic.up, grid.traffic.down
                loss = strategy.rounds[-1].metrics.get("loss", float("nan")) if strategy.rounds else float("nan")
                counted = {"round": done, "train_loss": loss, "bytes_up": up, "bytes_down": down}
                rows.append(counted | {f"val_{name}": value for name, value in found.items()})
                if options.out is not None:
                    write_history(folder / "history.csv", {"federated": rows})
                left = sum(len(r.left_out) + len(r.bounded) for r in strategy.rounds)
                status = f"{up:,} bytes up" + (f", {left} replies left out or bounded" if left else "")
                report(done, status, task.metric.show(found[task.metric.name]))

            strategy.train(grid, options.rounds, evaluate_fn=measure)
        path = folder / GENOME_FILE
        gb.save(path, job.plan, strategy.genome, None, about(task, options.data))
        metrics = _metrics(job, options, path, strategy, grid)
        if options.out is not None:
            write_metrics(folder / "metrics.json", metrics)
    print_metrics(metrics, task)
    up, down = (metrics[f"bytes_{direction}_per_client_and_round"] for direction in ("up", "down"))
    print(f"{metrics['rounds']} rounds; per client and round {up:,.0f} bytes up, {down:,.0f} down")
    print(f"in total {metrics['bytes_up']:,} bytes up, {metrics['bytes_down']:,} down")
    for name in ("left_out", "bounded"):
        for round_, nodes in metrics[name].items():
            for node, words in nodes.items():
                print(printable(f"round {round_}: node {node} was {name.replace('_', ' ')}: {words}"))


def _federation(job: Job, options: Federated) -> tuple[GenomeStrategy, LocalGrid]:
    from gbfunc import federated as fed

    task, seed = job.task, options.data.seed
    # Divide the examples without the seed, so that runs with different seeds give a client the same examples.
    indices = [torch.from_numpy(i) for i in fed.partition(task.train.y, options.clients, options.alpha)]

    def examples(context: Any) -> Any:
        own = indices[context.node_config["partition-id"]]
        tensors = {name: x[own] for name, x in vars(task.train).items() if isinstance(x, torch.Tensor)}
        return replace(task.train, **tensors)

    optimizer = find_optimizer(options.optimizer or ("SGD" if options.dense else "Adam"))
    recipe = replace(job.recipe, optimizer=optimizer)
    learning = {"optimizer": optimizer, "options": recipe.optimizer_options, "augment": recipe.augment, "seed": seed}
    sizes = {"steps": options.local_steps, "batch_size": options.batch_size}
    app = fed.client_app(job.plan, job.pnet, task.loss, examples, **sizes, **learning)
    convolutions = any(t.kind in ("conv", "conv_transpose") for t in job.plan.generated)
    # Use a lower learning rate for convolutions: at 0.02, the rate for MLPs, genomes of LeNet-5 do not learn.
    lr = options.lr or (0.1 if options.dense else 1e-2 if convolutions else 2e-2)
    schedule = SCHEDULES[options.schedule](recipe, lr, options.rounds)
    genome, path = gb.init_genome(job.plan, job.pnet, seed), None if options.out is None else options.out / SERVER_FILE
    sending = {"lr": lambda round_: float(schedule(round_)), "down": options.down, "up": options.up}
    strategy = fed.GenomeStrategy(_strategy(options), job.plan, genome, **sending, checkpoint=path, seed=seed)
    return strategy, fed.LocalGrid(app, [{"partition-id": i} for i in range(options.clients)])


def _strategy(options: Federated) -> Any:
    from flwr.serverapp import strategy as strategies  # pyright: ignore[reportMissingImports]

    robust = {"Bulyan", "Krum", "MultiKrum"}
    known = sorted(robust | {name for name in strategies.__all__ if name.startswith("Fed") and "Xgb" not in name})
    name = options.strategy or ("FedAvg" if options.dense else "FedAvgM")
    if name not in known:
        raise ValueError(f"--strategy must be one of {', '.join(known)}, got {name!r}")
    usual: dict[str, Any] = {"num_malicious_nodes": 1} if name in robust else {}
    usual |= {"num_nodes_to_select": max(1, options.sample - 1)} if name == "MultiKrum" else {}
    usual |= {"server_momentum": 0.5} if options.strategy is None and not options.dense else {}
    # Flower trains max(int(fraction_train * clients), min_train_nodes) clients; a fraction of 0 turns training off.
    nodes = {"fraction_train": 1e-9, "min_train_nodes": options.sample, "min_available_nodes": options.clients}
    config = nodes | {"fraction_evaluate": 0.0} | usual | read_json("--strategy-config", options.strategy_config)
    if many := [k for k, x in config.items() if k.startswith("min_") and isinstance(x, int) and x > options.clients]:
        expected = f"--strategy-config: {many[0]} must be at most --clients {options.clients}"
        raise ValueError(f"{expected}, got {config[many[0]]}")
    try:
        strategy = getattr(strategies, name)(**config)
    except TypeError as error:
        raise ValueError(f"--strategy-config does not fit {name}: {error}") from error
    sample = max(int(strategy.fraction_train * options.clients), strategy.min_train_nodes)
    if name in robust and sample < (least := (4 if name == "Bulyan" else 2) * strategy.num_malicious_nodes + 3):
        got = f"{strategy.num_malicious_nodes} num_malicious_nodes"
        raise ValueError(f"{name} needs at least {least} clients a round for {got}, got --sample {sample}")
    if name == "FedTrimmedAvg" and strategy.beta * sample < 1:
        raise ValueError(
            f"FedTrimmedAvg with beta {strategy.beta:g} trims none of {sample} clients: "
            f"""give --strategy-config '{{"beta": B}}' with B >= {1 / sample:.2g}"""
        )
    return strategy


def _metrics(job: Job, options: Federated, path: Path, strategy: GenomeStrategy, grid: LocalGrid) -> dict[str, Any]:
    plan, _, net = read_genome(path, options.data, job.task)
    traffic, n = grid.traffic, max(1, grid.traffic.messages)
    return {
        **genome_metrics(plan, path, net, job.task),
        "network": "federated" if job.hypernet else "federated, dense",
        "rounds": strategy.done,
        "bytes_up": traffic.up,
        "bytes_down": traffic.down,
        "bytes_up_per_client_and_round": traffic.up / n,
        "bytes_down_per_client_and_round": traffic.down / n,
        "largest_reply": traffic.largest_up,
        "left_out": {str(r.round): r.left_out for r in strategy.rounds if r.left_out},
        "bounded": {str(r.round): r.bounded for r in strategy.rounds if r.bounded},
        "config": settings_of(options, {}),
    } | provenance(job.task, plan, torch.device("cpu"))
