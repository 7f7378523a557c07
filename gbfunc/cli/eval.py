"""`gbfunc eval`: where the bytes of a genome's file go, and its p-net, rebuilt and measured."""

from __future__ import annotations

from pathlib import Path

import gbfunc as gb
from gbfunc.cli.commands import Eval
from gbfunc.cli.networks import genome_metrics, read_genome
from gbfunc.cli.output import print_metrics
from gbfunc.storage.genome_file import load_dtype


def run(options: Eval) -> None:
    """Measure and print."""
    plan, task, net = read_genome(options.genome, options)
    metrics = genome_metrics(plan, options.genome, net, task)
    print(byte_report(options.genome), end="\n\n")
    print_metrics(metrics, task)


def byte_report(path: Path) -> str:
    """The plan's report with the bytes of its genome's file."""
    plan, genome = gb.load(path)
    return plan.report(load_dtype(path), genome, gb.load_metadata(path))
