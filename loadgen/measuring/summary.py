"""Summarizes a run as `summary/1`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from draftgate.loadgen.checking.lossless import LosslessCheck
from draftgate.loadgen.measuring.hops import HOP_FORMULAS, summarize_hops
from draftgate.loadgen.measuring.metrics import (
    METRICS,
    PERCENTILE_FORMULA,
    completion_tokens,
    distribution,
    errors,
    intact,
    values_of,
)
from draftgate.loadgen.measuring.slo import Attainment, attainment, attainment_by_class, goodput_rps
from draftgate.loadgen.measuring.speculation import total_speculation
from draftgate.loadgen.sending.health import invalid_reasons
from draftgate.loadgen.types import LoadRun, Record

FORMULAS = {
    "goodput_rps": "intact requests that met all limits (TTFT, TPOT, gaps, deadline) / seconds of"
    " the schedule (of the run in a closed loop); failed and late requests count as not met",
    "attainment": "intact requests that met all limits / all scheduled; 95 % Wilson interval",
    "accepted_tokens_per_s": "tokens of intact responses by the usage / seconds of the run",
    "percentiles": PERCENTILE_FORMULA,
}


def summarize(run: LoadRun, lossless: LosslessCheck | None = None) -> dict[str, Any]:
    """Return the `summary/1` of a run. `details` holds fields that may change.

    Latencies are of intact responses and count from the scheduled times. `errors` counts the other
    responses by cause. `valid` is false if the generator did not keep up, because such a run does
    not measure the server.
    """
    reasons, overall = invalid_reasons(run), attainment(run.records)
    speculation = total_speculation(run.records)
    return {
        "requests": len(run.records),
        "valid": not reasons,
        "goodput_rps": goodput_rps(overall.met, schedule_s(run)),
        "attainment": overall.share,
        "errors": errors(run.records),
        "accepted_tokens_per_s": accepted_tokens_per_s(run),
        **{key: _distribution(run.records, key) for key in ("ttft_s", "tpot_s", "latency_s")},
        "details": {
            "invalid_reasons": reasons,
            "attainment_interval": list(overall.interval),
            "classes": {a.class_name: _class(a, run) for a in attainment_by_class(run.records)},
            "figures": {key: _distribution(run.records, key) for key in METRICS},
            "formulas": FORMULAS
            | {key: metric.formula for key, metric in METRICS.items()}
            | {f"hops: {name}": formula for name, formula in HOP_FORMULAS.items()},
            "decisions": None if speculation is None else speculation.as_dict(),
            "hops": {hop.name: hop.as_dict() for hop in summarize_hops(run.records)},
            "lossless": None if lossless is None else _lossless(lossless),
            "health": None if run.health is None else asdict(run.health),
            "duration_s": run.duration_s,
            "scheduled_duration_s": run.scheduled_duration_s,
            "settings": run.settings,
        },
    }


def schedule_s(run: LoadRun) -> float:
    """Return the seconds of the schedule for goodput, or else of the run.

    A closed loop has no schedule. The schedule of a trace whose requests arrive simultaneously has
    no length.
    """
    return run.scheduled_duration_s or run.duration_s


def accepted_tokens_per_s(run: LoadRun) -> float | None:
    """Return the tokens of intact responses per second, or None for an empty run."""
    tokens = sum(completion_tokens(record) or 0 for record in intact(run.records))
    return tokens / run.duration_s if run.duration_s > 0 else None


def _class(counted: Attainment, run: LoadRun) -> dict[str, Any]:
    records = [r for r in run.records if r.planned.request.class_name == counted.class_name]
    return {
        "requests": counted.requests,
        "goodput_rps": goodput_rps(counted.met, schedule_s(run)),
        "attainment": counted.share,
        "attainment_interval": list(counted.interval),
        "intact": counted.intact,
        "met_ttft": counted.ttft_met,
        "met_tpot": counted.tpot_met,
        "met_latency": counted.latency_met,
        "met_gap": counted.gap_met,
        "errors": errors(records),
        **{key: _distribution(records, key) for key in ("ttft_s", "tpot_s", "latency_s")},
    }


def _distribution(records: Sequence[Record], key: str) -> dict[str, float] | None:
    found = distribution(values_of(METRICS[key], records))
    return None if found is None else found.as_dict()


def _lossless(check: LosslessCheck) -> dict[str, Any]:
    return {"passed": check.passed, **asdict(check), "rate_bound": check.rate_bound}
