"""From questions to token ids and jobs, without a tokenizer.

A simulated token is a piece of text of the counter's characters per token, and its id is the byte
the piece begins with. So prompts have the lengths that the workload gave them, and two prompts that
begin alike have ids that do, which is all that the simulator asks of them (prefix caching).
"""

from __future__ import annotations

from math import ceil
from typing import Any, Final

import numpy as np

from draftgate.backends.sim.acceptance import TASK_ENDS
from draftgate.backends.token_ids import compact
from draftgate.backends.types import SamplingParams
from draftgate.gateway.dispatch.job import Job
from draftgate.loadgen.types import PlannedRequest, RequestSpec
from draftgate.loadgen.workloads import ApproximateCounter, prompt_text
from draftgate.policies.types import ServiceLevel, SpeculationMode

COUNTER: Final = ApproximateCounter()

RECORDED: Final = {
    "code": ("completion", 0.0),
    "interactive": ("completion", 0.0),
    "chat": ("completion", 0.8),
    "standard": ("completion", 0.8),
    "shared_prefix": ("completion", 0.8),
    "rag": ("rewrite", 0.0),
    "long_document": ("long_context", 0.0),
    "batch": ("long_context", 0.0),
}
"""Which records a class of requests replays, and the temperature it has where none is asked for.

Chosen by what n-gram drafts of up to 8 bring in each record, beside what prompt look-up brought in
a replay of Llama-3.1-8B's texts: chat 1.63 tokens a step (ShareGPT: 1.67), code completion 1.72 (no
figure), retrieval 2.5 (news 1.56, code editing 3.15), quotations 3.7 (2026-11-21)."""

OTHERWISE: Final = ("completion", 0.8)
"""What other classes replay: those of traces, which tell lengths only."""


def token_ids(text: str, characters_per_token: float = COUNTER.characters_per_token) -> bytes:
    """Return a text's token ids, at least one."""
    raw = np.frombuffer(text.encode("latin-1", "replace") or b" ", dtype=np.uint8)
    count = ceil(len(raw) / characters_per_token)
    places = (np.arange(count) * characters_per_token).astype(np.int64)
    return raw[places].tobytes()


def job_of(planned: PlannedRequest) -> Job:
    """Return the job of a planned request; its id names what is replayed for it."""
    question = planned.request
    task, usual = RECORDED.get(question.class_name, OTHERWISE)
    fields = dict(question.extra)
    temperature = float(fields.get("temperature", usual))
    mode, most = _speculation(fields.get("speculation", {}))
    return Job(
        request_id=f"{task}{TASK_ENDS}{planned.index}",
        prompts=(compact(token_ids(prompt_text(question))),),
        sampling=SamplingParams(question.max_tokens, question.seed, temperature, ignore_eos=True),
        max_tokens=question.max_tokens,
        n=question.n,
        mode=mode,
        max_draft_tokens=most,
        service=ServiceLevel(question.slo.ttft_s, question.slo.tpot_s),
    )


def without_text(question: RequestSpec) -> RequestSpec:
    """Return what reports need of a question: its text may be megabytes."""
    return RequestSpec(
        "",
        (),
        question.max_tokens,
        question.seed,
        question.class_name,
        question.tenant,
        question.session,
        question.slo,
        question.n,
    )


def _speculation(wanted: dict[str, Any]) -> tuple[SpeculationMode, int | None]:
    mode = SpeculationMode(wanted.get("mode", SpeculationMode.AUTO))
    return mode, wanted.get("max_draft_tokens")
