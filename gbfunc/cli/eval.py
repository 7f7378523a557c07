"""`gbfunc eval`: the p-net of a genome file, rebuilt and measured."""

from __future__ import annotations

from gbfunc.cli.commands import Eval
from gbfunc.cli.networks import genome_metrics, read_genome
from gbfunc.cli.output import print_metrics


def run(options: Eval) -> None:
    """Measure and print."""
    plan, task, net = read_genome(options.genome, options)
    print_metrics(genome_metrics(plan, options.genome, net, task), task)
