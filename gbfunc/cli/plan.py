"""`gbfunc plan`: what would be generated and what it would cost, without training."""

from __future__ import annotations

from dataclasses import dataclass

from gbfunc.cli.options import ModelOptions


@dataclass(frozen=True)
class Plan(ModelOptions):
    """Show what a genome of a given size would hold, tensor by tensor, without training it."""

    def run(self) -> None:
        """Print the plan's report."""
        if self.task == "control":
            from gbfunc.cli.control import make_control_job

            return print(make_control_job(self).plan.report())
        from gbfunc.cli.job import make_job

        print(make_job(self).plan.report())
