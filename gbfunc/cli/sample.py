"""`gbfunc sample`: text by the language model of a genome file."""

from __future__ import annotations

from gbfunc.cli.commands import Sample
from gbfunc.cli.job import check_seed
from gbfunc.cli.networks import read_genome
from gbfunc.tasks import continue_text


def run(options: Sample) -> None:
    """Print the prompt and what follows it."""
    check_seed(options.seed)
    _, task, net = read_genome(options.genome, options)
    follows = continue_text(
        net, task, options.prompt, options.tokens, temperature=options.temperature, seed=options.seed
    )
    print(options.prompt + follows)
