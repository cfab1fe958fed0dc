"""A run in figures: `summary/1`, and what stands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from draftgate.loadgen.checking.lossless import LosslessCheck
from draftgate.loadgen.measuring.hops import HOP_FORMULAS, hops, hops_as_dict
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
from draftgate.loadgen.sending.health import judge_health
from draftgate.loadgen.types import LoadRun, Record

FORMULAS = {
    "goodput_rps": "intact requests that met all limits (TTFT, TPOT, deadline) / seconds of the"
    " schedule (of the run in a closed loop); failed and late ones are scheduled, too",
    "attainment": "intact requests that met all limits / all scheduled; 95 % Wilson interval",
    "accepted_tokens_per_s": "tokens of intact answers by the server's usage / seconds of the run",
    "percentiles": PERCENTILE_FORMULA,
}


def summarize(run: LoadRun, lossless: LosslessCheck | None = None) -> dict[str, Any]:
    """Return the `summary/1` of a run; what the contract does not name is in `details`.

    Latencies are of intact answers, from the scheduled instants; `errors` counts the others by
    cause. `valid` tells whether the generator kept up: of a run that is not, believe nothing.
    """
    reasons, overall = invalid_reasons(run), attainment(run.records)
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
            "figures": {
                figure.key: _distribution(run.records, figure.key) for figure in METRICS.values()
            },
            "formulas": FORMULAS
            | {figure.key: figure.formula for figure in METRICS.values()}
            | {f"hops: {name}": formula for name, formula in HOP_FORMULAS.items()},
            "decisions": None
            if (told := total_speculation(run.records)) is None
            else told.as_dict(),
            "hops": hops_as_dict(hops(run.records)),
            "lossless": None if lossless is None else _lossless(lossless),
            "health": None if run.health is None else asdict(run.health),
            "duration_s": run.duration_s,
            "scheduled_duration_s": run.scheduled_duration_s,
            "settings": run.settings,
        },
    }


def invalid_reasons(run: LoadRun) -> list[str]:
    """Return why nothing can be concluded from a run; empty if it is valid."""
    if run.health is None:
        unknown = "the record of the run ends early: how well the generator kept up is not known"
        return [*run.lost, unknown]
    return judge_health(run)


def schedule_s(run: LoadRun) -> float:
    """Return the seconds over which goodput is taken: the schedule's, else the run's.

    A closed loop has no schedule, and that of a trace whose requests all come at once no length.
    """
    return run.scheduled_duration_s or run.duration_s


def accepted_tokens_per_s(run: LoadRun) -> float | None:
    """Return the tokens of intact answers per second of the run; None if it had no length."""
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
        "errors": errors(records),
        **{key: _distribution(records, key) for key in ("ttft_s", "tpot_s", "latency_s")},
    }


def _distribution(records: Sequence[Record], key: str) -> dict[str, float] | None:
    found = distribution(values_of(METRICS[key], records))
    return None if found is None else found.as_dict()


def _lossless(check: LosslessCheck) -> dict[str, Any]:
    return {"passed": check.passed, **asdict(check), "rate_bound": check.rate_bound}
