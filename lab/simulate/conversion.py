"""Conversion of planned requests to jobs, and of deliveries to records.

The conversion makes token ids without a tokenizer. Each token is a piece of text of the average
length, and its id is the first byte of that piece. Prompts therefore keep the lengths of the
workload. Prompts with a common prefix have common ids, as prefix caching requires.

The records have loadgen's form, so that loadgen's metrics and reports apply.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any, Final

import numpy as np
from msgspec import to_builtins

from draftgate.backends.token_ids import compact
from draftgate.backends.types import Delta, SamplingParams
from draftgate.gateway.dispatch.hold import Hold
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.http.answer import speculation_reply
from draftgate.lab.sim.recording import CLASS_SEPARATOR
from draftgate.lab.sim.textless_worker import Deliveries
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import ChunkColumns, PlannedRequest, Record
from draftgate.loadgen.workloads.base import TokenEstimator, prompt_text
from draftgate.policies.types import ServiceLevel, SpeculationMode

COUNTER: Final = TokenEstimator()

GREEDY: Final = {"code", "interactive", "rag", "long_document", "batch"}
"""Classes of requests that are greedy by default; the others have `USUAL_TEMPERATURE`."""

USUAL_TEMPERATURE: Final = 0.8


def token_ids(text: str) -> bytes:
    """Return the token ids of a text, at least one."""
    raw = np.frombuffer(text.encode("latin-1", "replace") or b" ", dtype=np.uint8)
    places = np.arange(ceil(len(raw) / COUNTER.characters_per_token)) * COUNTER.characters_per_token
    return raw[places.astype(np.int64)].tobytes()


def job_of(planned: PlannedRequest) -> Job:
    """Return the job of a planned request.

    The id of the job begins with the class of the request, which selects the recorded texts.
    """
    request = planned.request
    fields = dict(request.extra)
    usual = 0.0 if request.class_name in GREEDY else USUAL_TEMPERATURE
    temperature = float(fields.get("temperature", usual))
    speculation: dict[str, Any] = fields.get("speculation", {})
    return Job(
        request_id=f"{request.class_name}{CLASS_SEPARATOR}{planned.index}",
        prompts=(compact(token_ids(prompt_text(request))),),
        sampling=SamplingParams(request.max_tokens, request.seed, temperature, ignore_eos=True),
        max_tokens=request.max_tokens,
        n=request.n,
        mode=SpeculationMode(speculation.get("mode", SpeculationMode.AUTO)),
        max_draft_tokens=speculation.get("max_draft_tokens"),
        service=ServiceLevel(request.slo.ttft_s, request.slo.tpot_s),
    )


def record_of(planned: PlannedRequest, hold: Hold, last: Delta, deliveries: Deliveries) -> Record:
    """Return the record of a complete response."""
    assert planned.at_s is not None
    assert last.outcome is not None
    speculation: dict[str, Any] = to_builtins(
        speculation_reply(hold.request.speculation, last.outcome)
    )
    speculation.pop("reason")  # no report uses this sentence, and a run may have 100,000 records
    metrics: dict[str, Any] = {
        "worker_id": hold.worker.worker_id,
        "speculative_decoding": speculation,
    }
    if deliveries.scheduled_s is not None:
        metrics["queue_s"] = deliveries.scheduled_s - planned.at_s
    return Record(
        _without_text(planned),
        planned.at_s,
        planned.at_s,
        deliveries.at_s[-1],
        Verdict.OK,
        chunks=ChunkColumns(deliveries.at_s, deliveries.tokens),
        finish_reasons=(str(last.finish_reason),),
        usage={
            "prompt_tokens": len(hold.request.prompt_ids),
            "completion_tokens": sum(deliveries.tokens),
            "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
        },
        metrics=metrics,
        status=200,
    )


def rejection_of(planned: PlannedRequest, status: int, detail: str) -> Record:
    """Return the record of a request that was rejected on arrival."""
    assert planned.at_s is not None
    at_s, kept = planned.at_s, _without_text(planned)
    return Record(kept, at_s, at_s, at_s, Verdict.HTTP_STATUS, detail=detail, status=status)


def _without_text(planned: PlannedRequest) -> PlannedRequest:
    """Return a request without its text, which reports do not need and may take megabytes."""
    request = replace(planned.request, prompt="", messages=(), inputs=(), extra=(), facts=())
    return PlannedRequest(planned.index, planned.at_s, request)
