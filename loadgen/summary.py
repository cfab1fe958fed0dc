"""Figures of a run, in the form `summary/1`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil, floor
from typing import Any

from loadgen.audit import Verdict
from loadgen.client import Record


def summarize(records: Sequence[Record], elapsed_s: float) -> dict[str, Any]:
    """Return the `summary/1` of a closed loop.

    `valid`, `goodput_rps` and `attainment` are null: a closed loop has no schedule to fall behind
    and no SLO was given. Latencies are of intact streams; `errors` counts all others by cause.
    """
    intact = [record for record in records if record.verdict is Verdict.OK]
    tokens = sum(record.completion_tokens or 0 for record in intact)
    failed = Counter(r.verdict.value for r in records if r.verdict is not Verdict.OK)
    return {
        "requests": len(records),
        "valid": None,
        "goodput_rps": None,
        "attainment": None,
        "errors": dict(sorted(failed.items())),
        "accepted_tokens_per_s": tokens / elapsed_s if elapsed_s > 0 else None,
        "ttft_s": distribution(record.ttft_s for record in intact),
        "tpot_s": distribution(record.tpot_s for record in intact),
        "latency_s": distribution(record.latency_s for record in intact),
    }


def drafted_and_accepted(records: Iterable[Record]) -> tuple[int, int] | None:
    """Return the draft tokens verified and accepted; None if the server reported none."""
    reports = [(r.metrics or {}).get("speculative_decoding") for r in records]
    known = [report for report in reports if isinstance(report, dict)]
    if not known:
        return None
    drafted = sum(report.get("num_drafted_tokens") or 0 for report in known)
    return drafted, sum(report.get("num_accepted_tokens") or 0 for report in known)


def distribution(values: Iterable[float | None]) -> dict[str, float] | None:
    """Return mean and percentiles of the known values; None if there are none."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    percentiles = {f"p{p}": percentile(known, p / 100) for p in (50, 90, 99)}
    return {"mean": sum(known) / len(known), **percentiles}


def percentile(ascending: Sequence[float], share: float) -> float:
    """Return the value below which that share lies, interpolated between its neighbours."""
    place = share * (len(ascending) - 1)
    below, above = ascending[floor(place)], ascending[ceil(place)]
    return below + (above - below) * (place - floor(place))
