"""Records whose metrics can be calculated by hand."""

from __future__ import annotations

from math import inf

from draftgate.loadgen.sending import health
from draftgate.loadgen.types import (
    ClientHealth,
    LoadRun,
    PlannedRequest,
    Record,
    RequestSpec,
    Slo,
    TextChunk,
)

HEALTHY = ClientHealth(max_lag_s=0.002, p99_lag_s=0.001, cpu_share=0.2, loop_stall_s=0.003)


def record(
    index: int = 0,
    at_s: float = 1.0,
    first_s: float = 0.5,
    gaps_s=(0.1, 0.1, 0.2),
    tokens: int | None = 9,
    chunk_tokens=None,
    verdict: str = "ok",
    slo: Slo = Slo(),  # noqa: B008
    class_name: str = "code",
    n: int = 1,
    **fields,
) -> Record:
    """Return a record scheduled at `at_s` and sent 10 ms later, with text after `first_s`.

    The stream ends 20 ms after its last text. `chunk_tokens` has the tokens of each chunk.
    """
    instants = [at_s + first_s]
    for gap_s in gaps_s:
        instants.append(instants[-1] + gap_s)
    counts = chunk_tokens or [None] * len(instants)
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + (tokens or 0)}
    question = RequestSpec("x = 1", (), 64, index, class_name, slo=slo, n=n)
    values = {
        "chunks": tuple(TextChunk(t, k, 4) for t, k in zip(instants, counts, strict=True)),
        "texts": (" tok" * len(instants),),
        "finish_reasons": ("length",),
        "usage": None if tokens is None else usage,
        "status": 200,
    }
    values |= {"end_s": instants[-1] + 0.02} | fields
    return Record(
        PlannedRequest(index, at_s, question), at_s, at_s + 0.01, verdict=verdict, **values
    )


def failed(index: int, verdict: str = "cut", at_s: float = 1.0, **fields) -> Record:
    """Return a request whose stream broke after two chunks."""
    values = {"gaps_s": (0.1,), "tokens": None, "detail": f"<{verdict}>"} | fields
    return record(index, at_s, verdict=verdict, **values)


def speculation(k: int = 4, drafted: int = 8, accepted: int = 6, **fields) -> dict:
    """Return the metrics that the gateway reports."""
    report = {
        "policy": "auto",
        "mode": "auto",
        "proposer": "ngram",
        "max_draft_tokens": k,
        "reason": "it pays",
        "price": 0.1,
        "num_spec_steps": 2,
        "num_drafted_tokens": drafted,
        "num_accepted_tokens": accepted,
        "acceptance_histogram": [0, 0, 1, 0, 1],
    }
    return {"seed": 1, "worker_id": "w0", "speculative_decoding": report | fields}


def a_run(records=None, **fields) -> LoadRun:
    """Return a valid run of two classes with a failed request and speculation reports."""
    interactive = Slo(ttft_s=0.6, tpot_s=0.055)
    if records is None:
        records = [
            record(0, 0.0, slo=interactive, class_name="interactive", metrics=speculation()),
            record(1, 0.5, 0.7, slo=interactive, class_name="interactive", metrics=speculation(2)),
            record(2, 1.0, class_name="batch", metrics=speculation(0, 0, 0, mode="off")),
            failed(3, at_s=1.5, class_name="batch"),
        ]
    values = {"duration_s": 4.0, "scheduled_duration_s": 2.0, "health": HEALTHY} | fields
    settings = {"url": "http://server:8000", "model": "<demo>", "slo": {"ttft_s": 0.6}}
    return LoadRun(settings, records, **values)


def accept_any_health(monkeypatch) -> None:
    """Make runs valid even on a busy machine."""
    for name in ("MAX_P99_LAG_S", "MAX_LAG_S", "MAX_LOOP_STALL_S", "MAX_CPU_SHARE"):
        monkeypatch.setattr(health, name, inf)
