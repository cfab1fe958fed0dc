"""A client's request, validated and tokenised, before any decision."""

from __future__ import annotations

from dataclasses import dataclass

from draftgate.backends.token_ids import TokenIds
from draftgate.backends.types import GrammarSpec, SamplingParams, Task
from draftgate.policies.types import ANYTIME, ServiceLevel, SpeculationMode


@dataclass(frozen=True, slots=True)
class Job:
    """One client request.

    Attributes:
        request_id: unique on this node.
        prompts: token ids, at least one prompt.
        sampling: as requested; `max_tokens` is set when the job is sized.
        max_tokens: output limit per choice; None generates as much as fits.
        n: choices per prompt.
        mode, max_draft_tokens: the speculation that the client asks for.
        grammar: the grammar that every choice must match; None without one.
        service: its latency targets and priority.
        tenant: the owner; "" without API keys.
        share: the tenant's share relative to the usual 1.
        repetitions: how much each prompt repeats itself (`policies.speculation`); empty if unknown.
        fingerprint: equal for a retry of the same request; 0 if unknown.
        traced: whether the response reports each step.
        retries: the number of earlier attempts that the client reports; None without a report.
        task: generate, or embed the prompts, with `max_tokens` 0 and no speculation plan.
    """

    request_id: str
    prompts: tuple[TokenIds, ...]
    sampling: SamplingParams
    max_tokens: int | None
    n: int = 1
    mode: SpeculationMode = SpeculationMode.AUTO
    max_draft_tokens: int | None = None
    grammar: GrammarSpec | None = None
    service: ServiceLevel = ANYTIME
    tenant: str = ""
    share: float = 1.0
    repetitions: tuple[float | None, ...] = ()
    fingerprint: int = 0
    retries: int | None = None
    traced: bool = False
    task: Task = Task.GENERATE
