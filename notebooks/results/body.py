"""Train a generated policy, a dense policy and random weights after a change of the robot's body or of gravity.

Run `python notebooks/results/body.py --out runs` (`pip install 'gbfunc[cli,mujoco]'`).

For each seed, PPO first trains a genome and a dense net of the same p-net in the unchanged environment (`gbfunc
train`). Then the body or gravity changes. PPO trains all weights of three networks further, at one constant rate: the
network generated from the genome, the dense net, and random weights. The first return is measured right after the
change, before any further training.

Options: `--env`, `--compression`, `--steps` (environment steps of the first training), `--lr` and `--dense-lr` (rates
of the first training), `--changed-steps` and `--changed-lr` (for the training after the change), `--changes` (`same`,
or one of gravity, friction and limb with a factor, such as `gravity=1.5`), `--seeds`, `--out`. After an interruption,
run the command again. First trainings continue from their last checkpoint. Trainings after the change start again. The
script writes `body.json` and `body.png`, and prints two tables.

Shuvaev et al. (2024) made this experiment on HalfCheetah.
"""

import argparse
import csv
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gymnasium
import torch
from matplotlib.figure import Figure
from torch import nn

import gbfunc as gb
from gbfunc.cli import main as gbfunc
from gbfunc.plots import LINES, PALETTE
from gbfunc.tasks import Task
from gbfunc.tasks.base import SCHEDULES
from gbfunc.tasks.control import SETTINGS, Episodes, control_task, find_environment, stream
from gbfunc.tasks.training import fit, genome_trainer

GROWN, CARRIED, NAIVE = "grown from the genome", "weights carried over", "naive"

LIMBS = {"HalfCheetah-v5": ("bshin", "fshin"), "Hopper-v5": ("leg",), "Walker2d-v5": ("leg", "leg_left")}
"""Names of the bodies of the limb whose length the change `limb` multiplies."""

ASSETS = {"HalfCheetah-v5": "half_cheetah.xml", "Hopper-v5": "hopper.xml", "Walker2d-v5": "walker2d_v5.xml"}

EPISODES = 5
"""Number of test episodes of an evaluation after the change."""


def scaled(element: ElementTree.Element, name: str, factor: float, first: int = 0) -> None:
    """Multiply the numbers of an attribute by a factor, beginning with number `first`."""
    numbers = [float(x) for x in element.get(name, "").split()]
    if numbers:
        element.set(name, " ".join(str(x * factor if i >= first else x) for i, x in enumerate(numbers)))


def changed_body(env_id: str, what: str, factor: float) -> str:
    """Return the XML of a robot whose gravity, friction or limb length is multiplied by a factor.

    For a longer limb, the limb's capsule and the position of the next body are scaled. MuJoCo computes masses and
    inertias from the new shapes.
    """
    source = Path(gymnasium.__file__).parent / "envs/mujoco/assets" / ASSETS[env_id]
    root = ElementTree.parse(source).getroot()
    if what == "gravity":
        option = root.find("option")
        assert option is not None
        option.set("gravity", f"0 0 {-9.81 * factor}")
    elif what == "friction":
        default = root.find("default/geom")
        assert default is not None
        # A file without friction uses MuJoCo's defaults. A contact has the larger friction of the two bodies, so the
        # friction of the floor must change as well.
        default.set("friction", default.get("friction", "1 0.005 0.0001"))
        for geom in root.iter("geom"):
            scaled(geom, "friction", factor)
    else:
        for body in (body for body in root.iter("body") if body.get("name") in LIMBS[env_id]):
            for geom in body.findall("geom"):
                scaled(geom, "pos", factor)
                # The size of a capsule is its radius and half of its length. The radius stays.
                scaled(geom, "size", factor, first=1)
            for following in body.findall("body"):
                scaled(following, "pos", factor)
    return ElementTree.tostring(root, encoding="unicode")


def environment(env_id: str, change: str, folder: Path) -> str:
    """Register the changed environment, and return its name."""
    if change == "same":
        return env_id
    what, _, factor = change.partition("=")
    path = (folder / f"{env_id}-{change}.xml").resolve()
    path.write_text(changed_body(env_id, what, float(factor)), encoding="utf-8")
    name = f"{env_id.removesuffix('-v5')}-{what}{factor}-v5"
    usual = gymnasium.spec(env_id)
    if name not in gymnasium.registry:
        gymnasium.register(
            name,
            usual.entry_point,
            reward_threshold=usual.reward_threshold,
            max_episode_steps=usual.max_episode_steps,
            kwargs={**usual.kwargs, "xml_file": str(path)},
        )
    return name


def first_training(options: argparse.Namespace, kind: str, seed: int) -> dict[str, Any]:
    """Train a genome or a dense net in the unchanged environment. Return the metrics, also of an earlier training."""
    out = options.out / f"{kind}-{seed}"
    if not (out / "metrics.json").exists():
        size = ["--dense"] if kind == "dense" else ["--compression", str(options.compression)]
        lr = options.dense_lr if kind == "dense" else options.lr
        rate = [] if lr is None else ["--lr", str(lr)]
        command = ["train", "--task", "control", "--env", options.env, "--env-steps", str(options.steps), *size, *rate]
        task = control_task(find_environment(options.env), SETTINGS[options.env])
        per_pass = task.train.per_pass * task.train.settings.epochs * task.train.settings.minibatches
        keeping = ["--checkpoint-every", str(per_pass), "--resume", "auto"]
        if code := gbfunc([*command, "--seed", str(seed), "--out", str(out), *keeping]):
            raise SystemExit(code)
    return json.loads((out / "metrics.json").read_text())


def first_curve(options: argparse.Namespace, kind: str, seed: int) -> list[dict[str, float]]:
    """Read `env_steps` and `mean_return` on validation episodes from the history of a first training."""
    with (options.out / f"{kind}-{seed}" / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{"env_steps": float(row["env_steps"]), "mean_return": float(row["val_mean_return"])} for row in rows]


def start(options: argparse.Namespace, task: Task, kind: str, seed: int) -> nn.Module:
    """Make a network with the initial weights for the training after the change."""
    if kind == NAIVE:
        return task.build(stream(seed, 1))
    folder = options.out / f"{'genome' if kind == GROWN else 'dense'}-{seed}"
    return gb.materialize(*gb.load(folder / "genome.safetensors"), task.build(seed))


def learn(options: argparse.Namespace, change: str, kind: str, seed: int) -> list[dict[str, float]]:
    """Train a network after the change. Return rows of `env_steps` and `mean_return`, the first before the training."""
    path = options.out / "changed" / f"{change}, {kind}, {seed}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        return json.loads(path.read_text())
    env = find_environment(environment(options.env, change, path.parent))
    settings = replace(SETTINGS[options.env], env_steps=options.changed_steps, eval_every=4)
    task = control_task(env, settings)
    task = replace(task, val=Episodes(env, stream(0, 9), EPISODES))
    net, per_rollout = start(options, task, kind, seed), settings.epochs * settings.minibatches
    # Often at first.
    marks = [1, 2, 4, *range(8, settings.updates, 8)]
    recipe = replace(
        task.recipe(1),
        lr=options.changed_lr,
        schedule=SCHEDULES["constant"],
        measure_every=tuple(per_rollout * n for n in marks),
    )
    born = task.measured(net.eval(), task.val)["mean_return"]
    net.train()
    plan = gb.make_plan(net, rules=[(".", None)])
    history = fit(genome_trainer(plan, net, task, recipe, seed), task, recipe, seed).history
    rows = [{"env_steps": 0, "mean_return": born}]
    rows += [{"env_steps": row["env_steps"], "mean_return": row["val_mean_return"]} for row in history]
    path.write_text(json.dumps(rows))
    return rows


def spread(values: Sequence[float]) -> str:
    """Format the mean of some values, and the standard deviation if there are several values."""
    deviation = f" ± {statistics.stdev(values):,.0f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):,.0f}{deviation}"


def curves(runs: Mapping[str, Mapping[str, Sequence[Sequence[Mapping[str, float]]]]]) -> Figure:
    """Draw returns against environment steps: the mean and the range over seeds.

    The first plot shows the first training. Each further plot shows the training after one change.
    """
    figure = Figure(figsize=(0.6 + 3.6 * len(runs), 3.4), layout="constrained")
    (row,) = figure.subplots(1, len(runs), squeeze=False)
    for axes, (change, starts) in zip(row, runs.items(), strict=True):
        for (kind, seeds), color, line in zip(starts.items(), PALETTE, LINES, strict=False):
            steps = [point["env_steps"] / 1e3 for point in seeds[0]]
            values = [[point["mean_return"] for point in points] for points in zip(*seeds, strict=True)]
            axes.plot(steps, [statistics.fmean(x) for x in values], label=kind, color=color, linestyle=line)
            axes.fill_between(steps, [min(x) for x in values], [max(x) for x in values], color=color, alpha=0.15)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(title=change, xlabel="environment steps (thousands)", ylabel="mean return")
        axes.legend(frameon=False)
    return figure


def main(argv: list[str] | None = None) -> None:
    """Run the first trainings and the trainings after the changes, print the tables and draw the figure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", choices=sorted(ASSETS), default="HalfCheetah-v5")
    parser.add_argument("--compression", type=float, default=4.9)
    parser.add_argument("--steps", type=int, default=999_424)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--dense-lr", type=float)
    parser.add_argument("--changed-steps", type=int, default=200_704)
    parser.add_argument("--changed-lr", type=float, default=3e-4)
    parser.add_argument(
        "--changes", nargs="+", default=["same", "gravity=0.5", "gravity=1.5", "friction=0.3", "limb=1.3"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("body"))
    options = parser.parse_args(argv)
    for change in options.changes:
        what, _, factor = change.partition("=")
        if change != "same" and (
            what not in ("gravity", "friction", "limb") or not factor.replace(".", "", 1).isdigit()
        ):
            parser.error(f"--changes takes same, gravity=X, friction=X and limb=X, got {change}")
    try:
        find_environment(options.env)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    lines = [f"| {options.env}, {options.steps:,} steps | parameters | return of the trained net |", "|---|---|---|"]
    for kind in ("genome", "dense"):
        found = [first_training(options, kind, seed) for seed in options.seeds]
        size = f"{found[0]['genome_params']:,} ({found[0]['ratio_params']:.1f}x)"
        lines.append(f"| {kind} | {size} | {spread([row['test_mean_return'] for row in found])} |")
    kinds = ("genome", "dense")
    first = {kind: [first_curve(options, kind, seed) for seed in options.seeds] for kind in kinds}
    runs: dict[str, dict[str, Any]] = {"first training": first}
    lines += [
        "",
        "| change | weights | at birth | after a tenth | at the end | mean of the curve |",
        "|---|---|---|---|---|---|",
    ]
    for change in options.changes:
        runs[change] = {}
        for kind in (GROWN, CARRIED, NAIVE):
            seeds = runs[change][kind] = [learn(options, change, kind, seed) for seed in options.seeds]
            tenth = min(range(len(seeds[0])), key=lambda i: abs(seeds[0][i]["env_steps"] - options.changed_steps / 10))
            cells = [spread([rows[i]["mean_return"] for rows in seeds]) for i in (0, tenth, -1)]
            cells.append(spread([statistics.fmean(row["mean_return"] for row in rows) for rows in seeds]))
            lines.append(f"| {change} | {kind} | {' | '.join(cells)} |")
    # `gbfunc train` has spoken before.
    print("\n".join(["", *lines]))
    (options.out / "body.json").write_text(json.dumps(runs))
    curves(runs).savefig(options.out / "body.png", dpi=150)


if __name__ == "__main__":
    main()
