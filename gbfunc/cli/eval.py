"""`gbfunc eval`: measure a genome file on a task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gbfunc.cli.options import DataOptions


@dataclass(frozen=True, kw_only=True)
class Eval(DataOptions):
    """Rebuild the p-net from a genome file and measure it; widths of built-in p-nets are read from the file."""

    genome: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The genome, as `gbfunc train --out` writes it."""

    def run(self) -> None:
        """Measure and print."""
        if self.task == "control":
            from gbfunc.cli.control import run_eval

            return run_eval(self, self.genome)
        from gbfunc.cli.job import genome_metrics, read_genome
        from gbfunc.cli.output import print_metrics

        plan, task, net = read_genome(self.genome, self)
        print_metrics(genome_metrics(plan, self.genome, net, task), task.metrics)
