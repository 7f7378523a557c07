"""Measurements of generated against dense p-nets, side by side: what `gbfunc bench` runs."""

from gbfunc.lab.bench.cases import BENCHES, VARIANTS, Bench, Case, Genes, Scale, choose_benches
from gbfunc.lab.bench.report import (
    Ceilings,
    Row,
    describe,
    growth_curves,
    log_slope,
    measure_ceilings,
    run_bench,
)
from gbfunc.lab.bench.variants import Setting

__all__ = [
    "BENCHES",
    "VARIANTS",
    "Bench",
    "Case",
    "Ceilings",
    "Genes",
    "Row",
    "Scale",
    "Setting",
    "choose_benches",
    "describe",
    "growth_curves",
    "log_slope",
    "measure_ceilings",
    "run_bench",
]
