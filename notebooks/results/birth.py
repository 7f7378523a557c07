"""A grown network taught further, beside random weights: `python notebooks/results/birth.py genome.safetensors`.

Options: `--data-dir`, `--other TASK` with `--other-data-dir` (another task of as many classes), `--lr`, `--epochs` or
`--steps`, `--seed`, `--out`. Without `--lr`, each network takes the rate that is best on validation data. Writes
`metrics.json`, `birth.png` and the taught weights (`net.safetensors`), and prints a JSON row for each network.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from safetensors.torch import save_model

from gbfunc.cli.genomes import read_genome
from gbfunc.cli.options import DataOptions
from gbfunc.lab.birth import GROWN, RATES, in_the_size_of, lessons, teach
from gbfunc.plots import birth_curves
from gbfunc.tasks import find_task


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("genome", type=Path)
    for name in ("data-dir", "other-data-dir"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--other")
    parser.add_argument("--lr", type=float)
    for name, value in (("epochs", 1), ("steps", None), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=Path("taught"))
    options = parser.parse_args(argv)
    plan, task, grown = read_genome(options.genome, DataOptions("", options.data_dir))
    recipe = replace(task.recipe(plan.genome_params), epochs=options.epochs, steps=options.steps)
    recipe = replace(recipe, dense_lr=options.lr or recipe.dense_lr)
    tasks = [task]
    if options.other is not None:
        other = find_task(options.other, options.other_data_dir, {})
        tasks.append(replace(in_the_size_of(other, task.interface), pnet=task.pnet))
    rates, learned = RATES if options.lr is None else (1.0,), {}
    for one in tasks:
        learned[one.name] = teach(grown, one, lessons(one, recipe), options.seed, rates=rates)
    options.out.mkdir(parents=True, exist_ok=True)
    save_model(learned[task.name][GROWN].net, str(options.out / "net.safetensors"))
    runs = {name: {start: taught.rows for start, taught in starts.items()} for name, starts in learned.items()}
    lr = {name: {start: taught.lr for start, taught in starts.items()} for name, starts in learned.items()}
    (options.out / "metrics.json").write_text(json.dumps({"runs": runs, "lr": lr}, indent=2))
    birth_curves(runs, task.metric.name, task.metric.unit).savefig(options.out / "birth.png", dpi=150)
    for name, starts in runs.items():
        for start, rows in starts.items():
            reached = {f"{row['step']:.0f}": row[task.metric.name] for row in rows}
            print(json.dumps({"task": name, "weights": start, "lr": lr[name][start], task.metric.name: reached}))


if __name__ == "__main__":
    main()
