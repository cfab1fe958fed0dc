"""The results of `draftgate bench cpu` by cell, and their Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import exp, isfinite, log
from statistics import fmean
from typing import Any, Final, NamedTuple

from draftgate.loadgen.measuring.confidence import mean_ratio
from draftgate.loadgen.measuring.metrics import percentile

LEAST_CPU_S: Final = 0.01
"""Resolution of the CPU time in /proc."""


class Cell(NamedTuple):
    """A number of concurrent streams at a temperature.

    If `prompt_tokens` is not 0, the cell measures prompts of this length instead of outputs.
    """

    temperature: float
    streams: int
    prompt_tokens: int = 0

    @property
    def label(self) -> str:
        """Name of the cell in a table."""
        if self.prompt_tokens:
            return f"prompt of {self.prompt_tokens:,}"
        return f"T {self.temperature:g}, {self.streams}"


class Run(NamedTuple):
    """An arm in a cell of a round.

    Attributes:
        tokens: output tokens of all requests, or their prompt tokens if the cell measures prompts.
        seconds: time from the first request to the end of the last response.
        cpu_s: CPU seconds of the server with all its processes.
        others_cpu_s: CPU seconds of the other servers, which had no requests.
        ttft_s, tpot_s: one value for each request.
        drafted, accepted: draft tokens, or None if the server does not count them.
        same_texts: share of the texts that equal those of `Draftgate off`.
        nats_per_token: mean negative log probability of sampled texts under the model.
        resident_mb: main memory of the server after the run.
    """

    round: int
    temperature: float
    streams: int
    prompt_tokens: int
    arm: str
    group: int
    tokens: int
    seconds: float
    cpu_s: float
    others_cpu_s: float
    ttft_s: list[float]
    tpot_s: list[float]
    drafted: int | None
    accepted: int | None
    same_texts: float = 1.0
    nats_per_token: float | None = None
    resident_mb: float = 0.0

    @property
    def cell(self) -> Cell:
        """The cell of the run."""
        return Cell(self.temperature, self.streams, self.prompt_tokens)

    @property
    def tokens_per_cpu_s(self) -> float:
        """Tokens for each CPU second of the server."""
        return self.tokens / max(self.cpu_s, LEAST_CPU_S)


def summary(runs: Sequence[Run], arms: Iterable[str], reference: str) -> list[dict[str, Any]]:
    """Return a row for each arm in each cell, in the order of the arms.

    The reference runs in every group of a round. The ratio of an arm is to its run in the same
    round and group.
    """
    cells = sorted({run.cell for run in runs})
    order = list(arms)
    return [
        _row(cell, arm, chosen, _ratios(runs, chosen, reference))
        for cell in cells
        for arm in order
        if (chosen := [run for run in runs if (run.cell, run.arm) == (cell, arm)])
    ]


def _ratios(runs: Sequence[Run], chosen: Sequence[Run], reference: str) -> list[float]:
    bases = {(r.cell, r.round, r.group): r for r in runs if r.arm == reference}
    return [
        run.tokens_per_cpu_s / base.tokens_per_cpu_s
        for run in chosen
        if (base := bases.get((run.cell, run.round, run.group))) is not None
    ]


def _row(cell: Cell, arm: str, runs: Sequence[Run], ratios: Sequence[float]) -> dict[str, Any]:
    ratio = mean_ratio(ratios) if ratios else None
    tpot_s = sorted(value for run in runs for value in run.tpot_s)
    ttft_s = sorted(value for run in runs for value in run.ttft_s)
    drafted = [run.drafted for run in runs if run.drafted is not None]
    accepted = sum(run.accepted or 0 for run in runs)
    return {
        **cell._asdict(),
        "arm": arm,
        "rounds": len({run.round for run in runs}),
        "tokens_per_s": round(sum(r.tokens for r in runs) / sum(r.seconds for r in runs), 2),
        "tokens_per_cpu_s": round(exp(fmean(log(run.tokens_per_cpu_s) for run in runs)), 2),
        "to_reference": None if ratio is None else [_finite(end) for end in ratio],
        "tpot_p50_ms": round(1e3 * percentile(tpot_s, 0.5), 2),
        "tpot_p99_ms": round(1e3 * percentile(tpot_s, 0.99), 2),
        "ttft_p50_ms": round(1e3 * percentile(ttft_s, 0.5), 2),
        "drafted": sum(drafted) if drafted else None,
        "accepted": accepted if drafted else None,
        "same_texts": round(fmean(run.same_texts for run in runs), 3),
        "nats_per_token": _mean([run.nats_per_token for run in runs]),
        "resident_mb": max(run.resident_mb for run in runs),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 3) if known else None


def _finite(value: float) -> float | None:
    """Return a value for JSON, which has no infinity."""
    return round(value, 4) if isfinite(value) else None


def tables(rows: Sequence[Mapping[str, Any]], reference: str) -> Iterator[str]:
    """Yield the lines of the Markdown tables: an overview, and the details of each cell."""
    cells = list(dict.fromkeys(map(_cell, rows)))
    yield (
        "Tokens per CPU second of the server (best of a cell in bold): output tokens by "
        "temperature and streams, prompt tokens by length. The memory is the most after a run."
    )
    yield ""
    yield from _overview(rows, cells)
    for cell in cells:
        yield ""
        yield f"{cell.label}{'' if cell.prompt_tokens else ' streams'}"
        yield ""
        yield from _details([row for row in rows if _cell(row) == cell], reference)


def _cell(row: Mapping[str, Any]) -> Cell:
    return Cell(row["temperature"], row["streams"], row["prompt_tokens"])


def _overview(rows: Sequence[Mapping[str, Any]], cells: Sequence[Cell]) -> Iterator[str]:
    values = {(row["arm"], _cell(row)): row["tokens_per_cpu_s"] for row in rows}
    best = {cell: max(v for (_, c), v in values.items() if c == cell) for cell in cells}
    yield "| server | " + " | ".join(cell.label for cell in cells) + " | memory, MB |"
    yield "| --- |" + " ---: |" * (len(cells) + 1)
    for arm in dict.fromkeys(row["arm"] for row in rows):
        shown = []
        for cell in cells:
            value = values.get((arm, cell))
            text = "-" if value is None else f"{value:,.1f}"
            shown.append(f"**{text}**" if value == best[cell] else text)
        memory = max(row["resident_mb"] for row in rows if row["arm"] == arm)
        yield f"| {arm} | {' | '.join(shown)} | {memory:,.0f} |"


def _details(rows: Sequence[Mapping[str, Any]], reference: str) -> Iterator[str]:
    yield (
        f"| server | tokens/s | tokens/CPU s | to {reference} | TPOT P50, ms | TPOT P99, ms | "
        "TTFT P50, ms | accepted drafts | same texts | nats per token |"
    )
    yield "| --- |" + " ---: |" * 9
    for row in rows:
        shown = [
            f"{row['tokens_per_s']:,.1f}",
            f"{row['tokens_per_cpu_s']:,.1f}",
            "1" if row["arm"] == reference else _ratio_text(row["to_reference"]),
            *(f"{row[name]:,.1f}" for name in ("tpot_p50_ms", "tpot_p99_ms", "ttft_p50_ms")),
            _accepted_text(row),
            f"{row['same_texts']:.0%}",
            "-" if row["nats_per_token"] is None else f"{row['nats_per_token']:.2f}",
        ]
        yield f"| {row['arm']} | {' | '.join(shown)} |"


def _ratio_text(ratio: Sequence[float | None] | None) -> str:
    if ratio is None:
        return "-"
    mean, low, high = ratio
    known = low is not None and high is not None and isfinite(high) and low > 0
    return f"{mean:.2f}" + (f" ({low:.2f} to {high:.2f})" if known else "")


def _accepted_text(row: Mapping[str, Any]) -> str:
    if row["drafted"] is None:
        return "not reported"
    return f"{row['accepted']:,} of {row['drafted']:,}" if row["drafted"] else "none"
