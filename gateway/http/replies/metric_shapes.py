"""The field `metrics` of responses, an extension of OpenAI's format."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType

from draftgate.gateway.dispatch.flows import Hop


class RevisionReply(Struct):
    """A revision of the plan of a running request, after a number of output tokens of its choice.

    The field `drafting` is `on` or `off`, and `cause` is `price`, `evidence`, `deadline` or
    `drafts_lose`.
    """

    drafting: str
    cause: str
    output_tokens: int
    reason: str


class SpeculativeDecoding(Struct):
    """The speculation plan of a request and its outcome.

    The field `cause` is the reason as one of `policies.speculation.plan_reason.PlanCause`. The
    field `saved_s` has the seconds that drafts saved, summed over the choices, and is negative if
    drafts cost time.

    Clients of vLLM read four further fields, which follow from the others: the numbers of draft
    tokens and of accepted ones under vLLM's names, the mean number of tokens of a step that
    verified a draft, and the share of draft tokens that were accepted.
    """

    policy: str
    mode: str
    proposer: str | None
    max_draft_tokens: int
    cause: str
    reason: str
    price: float | None
    num_spec_steps: int
    num_drafted_tokens: int
    num_accepted_tokens: int
    acceptance_histogram: tuple[int, ...]
    saved_s: float
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    revisions: list[RevisionReply] | UnsetType = UNSET


class PromptMetrics(Struct):
    """The worker of one of several prompts, and the outcome of speculation for its choices."""

    worker_id: str
    speculative_decoding: SpeculativeDecoding


class ResumeReply(Struct):
    """The continuation of a prompt on another worker after its worker was lost.

    The text does not change if both workers have the same numerics class.
    """

    prompt: int
    from_worker_id: str
    to_worker_id: str
    kept_tokens: int
    same_numerics_class: bool


class FlowReply(Struct):
    """The place of a request in its flow, with the remaining time and the budget at its arrival.

    The budget is null after the deadline.
    """

    hop: int
    remaining_ms: float
    budget_ms: float | None


def flow_reply(hop: Hop | None) -> FlowReply | UnsetType:
    """Return the place of a request, or nothing for a request without a flow."""
    if hop is None:
        return UNSET
    budget_ms = None if hop.division is None else _milliseconds(hop.division.budget_s)
    return FlowReply(hop.place.number, _milliseconds(hop.place.remaining_s), budget_ms)


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 3)


class ResponseMetrics(Struct):
    """The values needed to repeat the request, and the outcome of speculation.

    The worker and plan of a request with several prompts are those of the first prompt, and the
    outcome is the sum. The field `prompts` has the values of each prompt. After the loss of a
    worker, `worker_id` is the last worker and `resumes` lists each loss. The outcome includes the
    drafts of lost workers, as far as their tokens had arrived.
    """

    seed: int
    numerics_class: str | None
    worker_id: str
    speculative_decoding: SpeculativeDecoding
    prompts: list[PromptMetrics] | UnsetType = UNSET
    resumes: list[ResumeReply] | UnsetType = UNSET
    flow: FlowReply | UnsetType = UNSET


OptionalMetrics = ResponseMetrics | UnsetType


class PoolingMetrics(Struct):
    """The flow of a request that embeds or scores texts."""

    flow: FlowReply


def pooling_metrics(hop: Hop | None) -> PoolingMetrics | UnsetType:
    """Return the metrics of a request, or nothing for a request without a flow."""
    flow = flow_reply(hop)
    return UNSET if flow is UNSET else PoolingMetrics(flow)
