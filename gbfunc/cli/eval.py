"""`gbfunc eval`: measure a genome file on a task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from gbfunc.cli.options import DataOptions


@dataclass(frozen=True, kw_only=True)
class Eval(DataOptions):
    """Rebuild the p-net from a genome file and measure it; sizes of its layers are read from the file."""

    genome: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """The genome, as `gbfunc train --out` writes it."""

    def run(self) -> None:
        """Measure and print."""
        from gbfunc.cli.job import read_genome
        from gbfunc.cli.output import print_metrics
        from gbfunc.tasks import accuracy

        plan, task, net = read_genome(self.genome, self)
        genome_bytes = self.genome.stat().st_size
        print_metrics(
            {
                "task": task.name,
                "pnet_params": plan.pnet_params,
                "genome_params": plan.genome_params,
                "ratio_params": plan.ratio_params,
                "dense_bytes": plan.dense_bytes,
                "genome_bytes": genome_bytes,
                "ratio_bytes": plan.dense_bytes / genome_bytes,
                "val_accuracy": accuracy(net, task.val),
                "test_accuracy": accuracy(net, task.test),
            }
        )
