"""`gbfunc sample`: let a genome of a text task write."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gbfunc.cli.options import DataOptions


@dataclass(frozen=True, kw_only=True)
class Sample(DataOptions):
    """Write text with the language model of a genome file; --data-dir is the text it learned, for its characters."""

    task: Annotated[str, tyro.conf.arg(metavar="NAME")] = "text"
    """What it learned: text, or package.module:function of your own."""

    genome: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The genome, as `gbfunc train --out` writes it."""

    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT", help_behavior_hint="(default: a new line)")] = "\n"
    """What it goes on from."""

    tokens: int = 300
    """How much to write: characters, or tokens of the task's vocabulary."""

    temperature: float = 0.8
    """Below 1 it writes more carefully, above 1 more freely; 0 takes the likeliest token each time."""

    seed: int = 0
    """Seed of what is drawn."""

    def run(self) -> None:
        """Print the prompt and what follows it."""
        from gbfunc.cli.job import check_seed, read_genome
        from gbfunc.tasks import continue_text

        check_seed(self.seed)
        _, task, net = read_genome(self.genome, self)
        follows = continue_text(net, task, self.prompt, self.tokens, temperature=self.temperature, seed=self.seed)
        print(self.prompt + follows)
