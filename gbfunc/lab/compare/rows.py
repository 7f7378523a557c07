"""Runs the trainings of a comparison. `compare.json` stores the chosen settings and the result of each seed."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gbfunc.lab.compare.base import USED, BudgetTooSmall, Method, Problem, Settings
from gbfunc.tasks import Net
from gbfunc.types import dtype_name


class Choice(NamedTuple):
    """The settings of a method for one budget, chosen by the metric on the validation split."""

    task: str
    method: str
    size: int  # Number of parameters of a periodic genome that fills the budget
    budget: int  # Largest number of bytes of all data that are needed to run the network
    dtype: str  # Dtype of the numbers in the file, unless the method sets another dtype
    steps: int  # Number of training steps
    settings: Settings | None  # The chosen settings, or None if no network fits the budget
    tried: list[Settings]  # Settings, training steps, bytes and validation metric of every training in the search
    searched: int  # Number of training steps in the search, summed over its trainings
    reason: str = ""  # Why no network fits; "" if one fits


class Row(NamedTuple):
    """The result of a method for one budget and one seed. The first six fields are as in `Choice`."""

    task: str
    method: str
    size: int
    budget: int
    dtype: str
    steps: int
    seed: int
    bytes: int  # Size of the file from which the network was read
    params: int  # Number of trained parameters in the file
    val: float  # Metric on the validation split
    test: float  # Metric on the test split
    seconds: float  # Duration of the training
    settings: Settings


class Results(NamedTuple):
    """The settings and the results that a comparison has found up to now."""

    choices: tuple[Choice, ...] = ()
    rows: tuple[Row, ...] = ()


def _head(problem: Problem, method: str) -> tuple[str, str, int, int, str, int]:
    return problem.task.name, method, problem.size, problem.budget, dtype_name(problem.dtype), problem.steps


def of_problem(results: Results, problem: Problem, method: str) -> Results:
    head = _head(problem, method)
    choices = tuple(choice for choice in results.choices if choice[:6] == head)
    return Results(choices, tuple(row for row in results.rows if row[:6] == head))


def _metric_of(problem: Problem, net: Net, split: Any) -> float:
    return problem.task.measured(net, split)[problem.task.metric.name]


def choose(name: str, method: Method, problem: Problem, most: int | None = None) -> Choice:
    """Choose settings by successive halving on the validation metric (K. Jamieson and A. Talwalkar, 2016).

    Three rounds train for 1/9, 1/3 and all of the steps, each time from the beginning. They keep the best third of the
    candidates (at least three), the best two, and the best. Files that use less than `USED` of the budget rank last.
    """
    head, task = _head(problem, name), problem.task
    tried: list[Settings] = []

    def rank(settings: Settings, steps: int) -> tuple[bool, float]:
        brief = problem._replace(recipe=replace(problem.recipe, steps=steps))
        size, value = 0, None
        try:
            data = method.train(brief, settings, 0).data
            size, value = len(data), _metric_of(problem, method.load(data, task), task.val)
        except FloatingPointError:
            pass  # The training diverged.
        tried.append({**settings, "steps": steps, "bytes": size, "val": value})
        if value is None or math.isnan(value):
            return False, -math.inf
        return size >= USED * problem.budget, task.metric.sign * value

    try:
        left = method.candidates(problem)[:most]
    except BudgetTooSmall as error:
        return Choice(*head, settings=None, tried=[], searched=0, reason=str(error))
    for share, passed, least in ((1 / 9, 1 / 3, 3), (1 / 3, 0.0, 2), (1.0, 0.0, 1)):
        # Skip a round if at most `least` candidates are left, because the round would keep all of them.
        if len(left) > least:
            ranks = [rank(settings, max(1, math.ceil(share * problem.steps))) for settings in left]
            order = sorted(range(len(left)), key=ranks.__getitem__, reverse=True)
            left = [left[i] for i in order[: max(least, math.ceil(passed * len(left)))]]
    return Choice(*head, settings=left[0], tried=tried, searched=sum(training["steps"] for training in tried))


def measure(name: str, method: Method, problem: Problem, settings: Settings, seed: int, path: Path) -> Row:
    """Train a network, write its data to a file, read the network from the file, and evaluate it."""
    start = time.perf_counter()
    trained = method.train(problem, settings, seed)
    seconds = round(time.perf_counter() - start, 2)
    path.write_bytes(trained.data)
    data = path.read_bytes()
    if len(data) > problem.budget:
        raise ValueError(f"{name} must fit {problem.budget:,} bytes, got {len(data):,}")
    net = method.load(data, problem.task)
    val, test = (_metric_of(problem, net, split) for split in (problem.task.val, problem.task.test))
    return Row(*_head(problem, name), seed, len(data), trained.params, val, test, seconds, settings)


def run_missing(
    methods: Mapping[str, Method],
    problems: Sequence[Problem],
    seeds: int,
    results: Results,
    folder: Path,
    report: Callable[[str], None] = lambda line: None,
    most: int | None = None,
) -> Iterator[Results]:
    """Run the searches and trainings that `results` lacks. After each search and each training, yield all results."""
    for problem in problems:
        for name, method in methods.items():
            known, where = of_problem(results, problem, name), f"{name} at {problem.budget:,} bytes"
            if known.choices:
                choice = known.choices[0]
            else:
                choice = choose(name, method, problem, most)
                results = results._replace(choices=(*results.choices, choice))
                report(f"{where}: {choice.reason or f'{choice.settings} after {choice.searched:,} steps of search'}")
                yield results
            for seed in range(seeds):
                if choice.settings is None or any(row.seed == seed for row in known.rows):
                    continue
                path = folder / "-".join(map(str, (*choice[:6], seed)))
                row = measure(name, method, problem, choice.settings, seed, path)
                results = results._replace(rows=(*results.rows, row))
                metric = f"validation {problem.task.metric.label} {problem.task.metric.show(row.val)}"
                report(f"{where}, seed {seed}: {metric}, {row.bytes:,} bytes, {row.seconds:.0f} s")
                yield results


def to_json(results: Results) -> dict[str, Any]:
    return {part: [entry._asdict() for entry in entries] for part, entries in results._asdict().items()}


def read_results(path: Path) -> Results:
    if not path.exists():
        return Results()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Results(tuple(Choice(**c) for c in content["choices"]), tuple(Row(**r) for r in content["rows"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} must be a file of gbfunc compare ({error}): move the file away") from error
