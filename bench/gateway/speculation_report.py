"""Paired ratios of `draftgate bench speculation`, with intervals, and their table.

A turn is one round of one cell, in which all policies run the same requests back to back. The ratio
of two policies is taken within each turn, so load and clock speed of the machine cancel. Ratios are
averaged as logarithms. Intervals are Student's 95% intervals over the rounds. A percentile
bootstrap of five rounds would be too narrow, because it ignores that their spread is itself an
estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import exp, inf, isfinite, log, sqrt
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

from bench.gateway.speculation_cells import Cell
from draftgate.loadgen.measuring.confidence import student_quantile

JUDGED: Final = "auto"
LEAST_UPPER_BOUND: Final = 0.99
"""Least upper 95% bound of the ratio of `auto` to the best other policy, in every cell."""


class Run(NamedTuple):
    """A cell under one policy in one round.

    Attributes:
        tokens: output tokens of all requests.
        seconds: time from the first request to the end of the last response.
        latency_s, ttft_s: means over the requests.
        cpu_s: CPU seconds of the server.
        steps, drafted, accepted: steps with drafts, and their verified and accepted tokens.
        switched_on, switched_off: revisions of plans while requests ran.
        price: mean price of a slot when the requests were planned, or None.
        different: requests whose text differs from the first text of the same request.
    """

    round: int
    outputs: str
    text: str
    streams: int
    policy: str
    tokens: int
    seconds: float
    latency_s: float
    ttft_s: float
    cpu_s: float
    steps: int
    drafted: int
    accepted: int
    switched_on: int
    switched_off: int
    price: float | None
    different: int

    @property
    def cell(self) -> Cell:
        """The cell of the run."""
        return Cell(self.outputs, self.text, self.streams)


MEASURES: Final[Mapping[str, Callable[[Run], float]]] = {
    "tokens_per_s": lambda run: run.tokens / run.seconds,
    "latency_s": lambda run: run.latency_s,
    "tokens_per_cpu_s": lambda run: run.tokens / max(run.cpu_s, 0.01),  # /proc counts 10 ms
}


class Ratio(NamedTuple):
    """A geometric mean of ratios, with the ends of its 95% interval."""

    mean: float
    low: float
    high: float

    def as_list(self) -> list[float | None]:
        """Return the rounded values, with None for an end that is unknown."""
        return [round(each, 4) if isfinite(each) else None for each in self]


def mean_ratio(logarithms: Sequence[float]) -> Ratio:
    """Return the mean of paired ratios from the logarithm of each, at least one."""
    count, mean = len(logarithms), fmean(logarithms)
    if count < 2:
        return Ratio(exp(mean), 0.0, inf)
    half = student_quantile(count - 1) * stdev(logarithms) / sqrt(count)
    return Ratio(exp(mean), exp(mean - half), exp(mean + half))


class Turns:
    """The complete turns of a measurement."""

    def __init__(self, runs: Iterable[Run], policies: Sequence[str]) -> None:
        self.policies = policies
        self._turns: dict[Cell, dict[int, dict[str, Run]]] = {}
        for run in runs:
            self._turns.setdefault(run.cell, {}).setdefault(run.round, {})[run.policy] = run

    @property
    def cells(self) -> list[Cell]:
        """The cells with a complete turn."""
        return [cell for cell in self._turns if self.of(cell)]

    def of(self, cell: Cell) -> dict[int, dict[str, Run]]:
        """Return the complete turns of a cell by round."""
        turns = self._turns.get(cell, {})
        return {r: runs for r, runs in turns.items() if runs.keys() >= set(self.policies)}

    def mean(self, cell: Cell, policy: str, measure: str) -> float:
        """Return the geometric mean of a measure over the rounds of a cell."""
        value = MEASURES[measure]
        return exp(fmean(log(value(runs[policy])) for runs in self.of(cell).values()))

    def ratio(self, cell: Cell, other: str, measure: str) -> Ratio:
        """Return the ratio of `auto` to another policy in a cell."""
        return mean_ratio([_log_ratio(runs, other, measure) for runs in self.of(cell).values()])

    def over_cells(self, cells: Sequence[Cell], other: str, measure: str) -> Ratio | None:
        """Return the mean ratio over cells, or None if no round has all of these cells.

        The interval is over the means of each round, so it includes what moves a whole round.
        """
        turns = [self.of(cell) for cell in cells]
        whole = set.intersection(*(set(rounds) for rounds in turns)) if turns else set()
        means = [
            fmean(_log_ratio(rounds[number], other, measure) for rounds in turns)
            for number in sorted(whole)
        ]
        return mean_ratio(means) if means else None

    def best_other(self, cell: Cell) -> str:
        """Return the policy other than `auto` with the most tokens per second in a cell."""
        others = [policy for policy in self.policies if policy != JUDGED]
        return max(others, key=lambda policy: self.mean(cell, policy, "tokens_per_s"))


def _log_ratio(runs: Mapping[str, Run], other: str, measure: str) -> float:
    value = MEASURES[measure]
    return log(value(runs[JUDGED]) / value(runs[other]))


def summary(turns: Turns) -> dict[str, Any]:
    """Return the means of each cell, the ratios of `auto`, and the ratios over groups of cells."""
    cells = [_cell_summary(turns, cell) for cell in turns.cells]
    groups = {"all": turns.cells}
    for outputs in dict.fromkeys(cell.outputs for cell in turns.cells):
        groups[outputs] = [cell for cell in turns.cells if cell.outputs == outputs]
    return {
        "cells": cells,
        "over_cells": {name: _group_summary(turns, group) for name, group in groups.items()},
        "cells_below_best": [
            cell["cell"] for cell in cells if (cell["to_best"][2] or inf) < LEAST_UPPER_BOUND
        ],
    }


def _cell_summary(turns: Turns, cell: Cell) -> dict[str, Any]:
    others = [policy for policy in turns.policies if policy != JUDGED]
    best = turns.best_other(cell)
    return {
        "cell": list(cell),
        "rounds": len(turns.of(cell)),
        **{
            measure: {p: round(turns.mean(cell, p, measure), 4) for p in turns.policies}
            for measure in MEASURES
        },
        "auto_to": {
            measure: {p: turns.ratio(cell, p, measure).as_list() for p in others}
            for measure in MEASURES
        },
        "best_other": best,
        "to_best": turns.ratio(cell, best, "tokens_per_s").as_list(),
        "auto_drafts": _drafts(turns, cell),
    }


def _drafts(turns: Turns, cell: Cell) -> dict[str, float]:
    """Return what `auto` drafted per 1,000 output tokens."""
    runs = [turn[JUDGED] for turn in turns.of(cell).values()]
    thousands = sum(run.tokens for run in runs) / 1e3
    names = ("steps", "drafted", "accepted", "switched_on", "switched_off")
    return {name: round(sum(getattr(r, name) for r in runs) / thousands, 2) for name in names}


def _group_summary(turns: Turns, cells: Sequence[Cell]) -> dict[str, Any]:
    others = [policy for policy in turns.policies if policy != JUDGED]
    found = {
        measure: {p: turns.over_cells(cells, p, measure) for p in others} for measure in MEASURES
    }
    return {
        measure: {p: None if ratio is None else ratio.as_list() for p, ratio in ratios.items()}
        for measure, ratios in found.items()
    }


def table(result: Mapping[str, Any], policies: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a Markdown table: tokens per second, and the ratios of `auto`."""
    head = ["outputs", "text", "streams", *policies, "auto / best other", "latency, auto / off"]
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for cell in result["cells"]:
        rates = [f"{cell['tokens_per_s'][policy]:,.0f}" for policy in policies]
        best = f"{_shown(cell['to_best'])} {cell['best_other']}"
        latency = _shown(cell["auto_to"]["latency_s"].get("off"))
        yield f"| {' | '.join([*map(str, cell['cell']), *rates, best, latency])} |"
    yield ""
    for name, measures in result["over_cells"].items():
        for measure, ratios in measures.items():
            shown = ", ".join(f"{policy} {_shown(ratio)}" for policy, ratio in ratios.items())
            yield f"mean ratio of auto over cells ({name}, {measure}): {shown}"
    below = [" ".join(map(str, cell)) for cell in result["cells_below_best"]]
    yield f"cells where auto is below the best (upper bound < 0.99): {'; '.join(below) or 'none'}"


def _shown(ratio: Sequence[float | None] | None) -> str:
    if ratio is None:
        return "-"
    mean, low, high = ratio
    return f"{mean:.3f}" + ("" if high is None else f" ({low:.3f} to {high:.3f})")
