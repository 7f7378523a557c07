"""The `control` task on the command line: `plan`, `train` and `eval` with environments in the place of data."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from rich.table import Table

import gbfunc as gb
from gbfunc.cli.job import check_seed, dense_plan, is_dense, results_folder
from gbfunc.cli.options import DataOptions, ModelOptions, find_device, find_dtype
from gbfunc.cli.output import write_figure, write_history, write_metrics
from gbfunc.hypernets import HYPERNETS
from gbfunc.tasks.control import (
    ActorCritic,
    control_rules,
    control_settings,
    final_returns,
    grow,
    train_control,
)
from gbfunc.tasks.environments import EPISODES, Environment, find_environment
from gbfunc.tasks.ppo import Settings

if TYPE_CHECKING:
    from gbfunc.cli.train import Train

HIDDEN = (64, 64)
COMPRESSION = 10.0
GENOME_FILE = "genome.safetensors"


class ControlJob(NamedTuple):
    """What a command works on: an environment, networks for it, and which of their tensors are generated."""

    env: Environment
    pnet: ActorCritic
    plan: gb.Plan


def make_control_job(options: ModelOptions) -> ControlJob:
    """Find the environment and plan the genome.

    Raises:
        ImportError: if gymnasium is missing.
        ValueError: for options that do not fit the task, or each other.
    """
    check_seed(options.seed)
    env = find_environment(options.env)
    sizes = options.sizes or (env.n_obs, *HIDDEN, env.n_actions)
    if len(sizes) < 3 or min(sizes) < 1 or (sizes[0], sizes[-1]) != (env.n_obs, env.n_actions):
        raise ValueError(f"--sizes must start with the {env.n_obs} numbers that {env.id} shows, have a hidden layer "
                         f"and end with its actions, {env.n_actions}; got {' '.join(map(str, sizes))}")  # fmt: skip
    pnet = ActorCritic(env, sizes[1:-1], options.seed)
    compression = options.compression
    if is_dense(options):
        return ControlJob(env, pnet, dense_plan(pnet, options))
    if compression is None and options.genome_params is None:
        compression = COMPRESSION
    plan = gb.make_plan(
        pnet,
        HYPERNETS[options.hypernet or "periodic"](),
        genome_params=options.genome_params,
        compression=compression,
        rules=control_rules(env, pnet),
    )
    return ControlJob(env, pnet, plan)


def find_settings(env: Environment, options: Train) -> Settings:
    """The environment's settings with the user's own in place.

    Raises:
        ValueError: for settings out of range, and for options of other tasks.
    """
    foreign = {name: getattr(options, name) for name in ("epochs", "steps", "batch_size", "data_dir", "pnet")}
    if given := [f"--{name.replace('_', '-')}" for name, value in foreign.items() if value is not None]:
        raise ValueError(f"{', '.join(given)}: the control task learns from an environment; its length is --env-steps")
    if find_device(options.device).type != "cpu":
        raise ValueError(f"the control task runs on the CPU, where its environments are; got --device {options.device}")
    settings = control_settings(env.id)
    size = settings.n_envs * settings.horizon
    if options.env_steps is not None and options.env_steps < size:
        raise ValueError(f"--env-steps must be at least one rollout, {size:,} steps, got {options.env_steps:,}")
    lr = options.lr or (settings.dense_lr if options.dense else settings.lr)
    if options.lr is not None and not 0 < options.lr < float("inf"):
        raise ValueError(f"--lr must be a positive number, got {options.lr}")
    return replace(settings, lr=lr, env_steps=options.env_steps or settings.env_steps)


def run_train(options: Train) -> None:
    """Train, measure what the genome's file holds, write the results, print them."""
    job = make_control_job(options)
    settings = find_settings(job.env, options)
    label = "dense" if options.dense else "genome"

    def report(row: Mapping[str, float]) -> None:
        print(
            f"{label}: {row['env_steps']:,.0f}/{settings.updates * settings.n_envs * settings.horizon:,} steps, "
            f"mean return {row['mean_return']:.1f} +- {row['std_return']:.1f}, {row['seconds']:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    with results_folder(options.out) as folder:
        result = train_control(*job, settings, options.seed, report)
        path = folder / GENOME_FILE
        gb.save(path, job.plan, result.state, find_dtype(options.dtype))
        metrics = _measure(options, path) | {
            "network": label,
            "env_steps": int(result.history[-1]["env_steps"]),
            "env_steps_to_solve": result.solved,
            "steps": result.steps,
            "seconds": result.seconds,
        }
        if options.out is not None:
            from gbfunc.plots import return_curve

            runs = {label: result.history}
            write_history(folder / "history.csv", runs)
            write_figure(folder / "learning_curve.png", return_curve(runs, job.env.id, job.env.threshold))
            write_metrics(folder / "metrics.json", metrics)
        _print(metrics)


def run_eval(options: DataOptions, path: Path) -> None:
    """Measure a genome's file in the environment and print what it holds."""
    _print(_measure(options, path))


def _measure(options: DataOptions, path: Path) -> dict[str, object]:
    """Sizes of the whole model, and returns of what the genome's file holds.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, or made for other networks than the environment needs.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no such genome file: {path}")
    plan, genome = gb.load(path)
    env = find_environment(options.env)
    hidden = [t.shape[0] for t in plan.tensors if t.name.startswith("actor.") and len(t.shape) == 2][:-1]
    net = grow(plan, genome, ActorCritic(env, hidden))
    seed = getattr(options, "seed", 0)
    returns, size = final_returns(net, env, seed), path.stat().st_size
    return {
        "task": "control",
        "env": env.id,
        "hidden": hidden,
        "pnet_params": plan.pnet_params,
        "genome_params": plan.genome_params,
        "ratio_params": plan.ratio_params,
        "dense_bytes": plan.dense_bytes,
        "genome_bytes": size,
        "ratio_bytes": plan.dense_bytes / size,
        "episodes": EPISODES,
        "mean_return": float(returns.mean()),
        "std_return": float(returns.std()),
        "threshold": env.threshold,
        "seed": seed,
    }


def _print(metrics: Mapping[str, object]) -> None:
    m: dict = dict(metrics)
    table = Table("", f"{m['env']}: {m.get('network', 'genome')}", "dense p-net", "ratio")
    for column in table.columns[1:]:
        column.justify = "right"
    table.add_row("parameters", f"{m['genome_params']:,}", f"{m['pnet_params']:,}", f"{m['ratio_params']:.1f}")
    table.add_row("bytes", f"{m['genome_bytes']:,}", f"{m['dense_bytes']:,}", f"{m['ratio_bytes']:.1f}")
    table.add_row(f"mean return of {m['episodes']} episodes", f"{m['mean_return']:.1f} +- {m['std_return']:.1f}")
    if "steps" in m:
        solved = "never" if m["env_steps_to_solve"] is None else f"{m['env_steps_to_solve']:,}"
        if m["threshold"] is not None:
            table.add_row(f"environment steps until {m['threshold']:g}", solved)
        table.add_row("training", f"{m['env_steps']:,} steps", f"{m['seconds']:.1f} s")
    Console().print(table)
