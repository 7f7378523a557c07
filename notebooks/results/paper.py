"""Repeat the experiments of the genomic bottleneck (Shuvaev, Lachi, Koulakov and Zador, PNAS 2024).

Run `python notebooks/results/paper.py EXPERIMENT`, such as `mnist`. Each command prints a table with the paper's
figures and the figures of this machine, and writes a figure (`OUT/EXPERIMENT.png`) and the numbers
(`OUT/EXPERIMENT.json`). An interrupted command continues when it is started again, with bit-identical results. If two
experiments need the same training, the training in `OUT` is used again. `paper.md` has the results.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, NoReturn

sys.path.insert(0, str(Path(__file__).parents[2]))

MODULE = "notebooks.results.paper_images"


class Experiment(NamedTuple):
    """The module of an experiment, and the data and packages that the experiment needs."""

    about: str
    data: tuple[str, ...] = ()  # folders of --data-dir
    module: str = MODULE  # has a function with the experiment's name, which takes a `Setting`
    packages: tuple[tuple[str, str], ...] = (("matplotlib", "gbfunc[cli]"),)  # packages and the extras that bring them


EXPERIMENTS = {
    "mnist": Experiment("accuracy at birth at 322x, 470x and 1,038x", ("mnist",)),
    "shuffle": Experiment("grown, shuffled and naive networks learn", ("mnist",)),
    "birth": Experiment("learning after birth, with genomes of three sizes", ("mnist",)),
    "garments": Experiment("a network grown for MNIST learns drawn garments", ("mnist",)),
    "weights": Experiment("first layers of grown and naive networks: filters, spectra and a map", ("mnist",)),
    "cifar": Experiment("accuracy at birth at 92x, 146x and 361x", ("cifar10_full",)),
    "transfer": Experiment("from CIFAR-10 to CIFAR-100, with all or the first layers", ("cifar10", "cifar100")),
    "halves": Experiment("from five classes of CIFAR-10 to the other five", ("cifar10",)),
}


class Setting(NamedTuple):
    """Options of a command. None means the default of the experiment."""

    experiment: str
    seeds: tuple[int, ...]
    out: Path
    data_dir: Path
    quick: bool  # one seed, few images and epochs: a trial of a minute or two
    epochs: int | None  # epochs of a genome's training, or of the training of weights before a transfer
    learning: int | None  # epochs of learning after birth
    width: int | None  # channels of the convolutional p-net
    images: int | None  # training images of CIFAR


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(argv: Sequence[str] | None = None) -> Setting:
    """Read the arguments. Raises ValueError or ImportError in one line for arguments or packages that cannot work."""
    rows = [f"  {name:<10} {experiment.about}" for name, experiment in EXPERIMENTS.items()]
    parser = Parser(
        description=__doc__, epilog="\n".join(["experiments:", *rows]), usage="paper.py EXPERIMENT [OPTIONS]"
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("experiment", metavar="EXPERIMENT")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--quick", action="store_true", help="one seed, few images, an epoch: a minute or two")
    parser.add_argument("--out", type=Path, help="folder of trainings, table and figure (default: paper, paper-quick)")
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GBFUNC_DATA", "../shared/data")))
    for name, words in (
        ("epochs", "epochs of a genome's training"),
        ("learning", "epochs of learning after birth"),
        ("width", "channels of the first convolutions"),
        ("images", "training images of CIFAR"),
    ):
        parser.add_argument(f"--{name}", type=int, help=words)
    options = parser.parse_args(argv)
    name, seeds = options.experiment, [0] if options.quick else options.seeds
    if name not in EXPERIMENTS:
        raise ValueError(f"no experiment {name!r}: choose one of {', '.join(EXPERIMENTS)}")
    if len({*seeds}) != len(seeds) or min(seeds) < 0:
        raise ValueError(f"--seeds must be different integers >= 0, got {' '.join(map(str, seeds))}")
    for option in ("epochs", "learning", "width", "images"):
        if (value := getattr(options, option)) is not None and value < 1:
            raise ValueError(f"--{option} must be at least 1, got {value}")
    for package, extra in EXPERIMENTS[name].packages:
        if find_spec(package) is None:
            raise ImportError(f"{name} needs the package {package}: pip install '{extra}'")
    for folder in EXPERIMENTS[name].data:
        if not (options.data_dir / folder).is_dir():
            raise ValueError(
                f"no folder {options.data_dir / folder}: --data-dir must name the folder that holds {folder}"
            )
    given = {k: v for k, v in vars(options).items() if k in Setting._fields}
    out = options.out or Path("paper-quick" if options.quick else "paper")
    return Setting(**given | {"seeds": tuple(seeds), "out": out})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one experiment. Return the exit code: 0, 2 after an error of the user, or 128 + signal if interrupted."""
    try:
        setting = parse(argv)
        from gbfunc.cli import Stopped

        experiment = getattr(import_module(EXPERIMENTS[setting.experiment].module), setting.experiment)
        try:
            experiment(setting)
        except Stopped as stopped:
            print(f"paper.py: {str(stopped.args[1]).split(':')[0]}: run the command again to go on", file=sys.stderr)
            return 128 + stopped.args[0]
    except (ValueError, OSError, ImportError) as error:
        print(f"paper.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
