"""The values that policies receive and return.

Values are immutable, except tickets, which policies do not change either. Names end with their
units: `_s` for seconds, `_tokens` for tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

from msgspec import Struct

from draftgate.policies.speculation.plan_reason import NO_FIGURES, PlanCause, PlanFigures
from draftgate.policies.values import immutable


class SpeculationMode(StrEnum):
    """The modes that a client may request in `speculation.mode`."""

    AUTO = "auto"
    OFF = "off"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"
    SPARSE_SELF = "sparse_self"
    EAGLE = "eagle"


class Role(StrEnum):
    """The phase of requests that a worker prefers. A role is a soft weight, not a limit."""

    ANY = "any"
    PREFILL = "prefill"
    DECODE = "decode"


PROPOSER_MODES: Final = frozenset(
    {
        SpeculationMode.NGRAM,
        SpeculationMode.DRAFT_MODEL,
        SpeculationMode.SPARSE_SELF,
        SpeculationMode.EAGLE,
    }
)
"""Modes that name a proposer."""


@immutable
class ServiceLevel:
    """The targets and the priority of a request.

    Attributes:
        ttft_s: longest time from its arrival to its first token in seconds, or None without a
            target.
        tpot_s: longest mean time per further token in seconds, or None without a target.
        priority: priority class, where lower values go first and 0 is usual (as in vLLM).
        expected_tokens: number of output tokens that the client expects of each choice, or None.
        next_call_s: time after the response within which the client will continue the conversation
            in seconds, or None if it has not said so.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: int = 0
    expected_tokens: int | None = None
    next_call_s: float | None = None

    @property
    def is_offline(self) -> bool:
        """Whether the request is a line of a batch (`OFFLINE_PRIORITY`)."""
        return self.priority >= OFFLINE_PRIORITY

    @property
    def has_targets(self) -> bool:
        """Whether there is a target."""
        return self.ttft_s is not None or self.tpot_s is not None

    def are_met(self, ttft_s: float | None, tpot_s: float | None) -> bool | None:
        """Return whether times meet the targets, or None without a target. None is no time."""
        if not self.has_targets:
            return None
        return all(
            target is None or found is None or found <= target
            for found, target in ((ttft_s, self.ttft_s), (tpot_s, self.tpot_s))
        )


ANYTIME: Final = ServiceLevel()
"""No targets."""

BATCH_PRIORITY: Final = 1
"""Priority of batch work, such as the documents of an index. It runs in time that others leave."""

OFFLINE_PRIORITY: Final = (1 << 31) + 1
"""Priority of the lines of batches, below every priority that a request may state.

They get only the capacity that all other requests leave. Such a request leaves the batch of its
worker while another prompt waits, and continues afterwards."""

ANY_PROPOSER: Final = "any"
"""Proposer of a plan in which the worker chooses the best proposer for each sequence and step."""


# Recorded decisions and reports contain these counts under their original names.
class DraftCounts(Struct, frozen=True, rename={"accepted": "agreed", "rejected": "refuted"}):
    """Verified draft tokens of earlier requests, where old tokens count less.

    Attributes:
        accepted: number of correct tokens.
        rejected: number of wrong tokens after only correct tokens, because later tokens are not
            tested.
    """

    accepted: float = 0.0
    rejected: float = 0.0


UNTESTED: Final = DraftCounts()
"""Counts without any verified draft."""


@immutable
class RequestView:
    """The facts about a request that are known before it runs.

    Attributes:
        prompt_tokens: length of the prompt.
        max_tokens: maximum number of tokens that the request may generate.
        temperature: sampling temperature, where 0 is greedy.
        mode: speculation mode that the client requested.
        max_draft_tokens: client's cap on the draft length, or None to leave it to the policy.
        service: latency targets and priority.
        repetition: share of its tokens that n-gram lookups in the prompt would have drafted
            correctly (`speculation.repetition`), or None if unknown.
        tenant_drafts: record of the drafts of its tenant and model, for greedy or for sampled
            requests like this one.
        model_drafts: the same record over all tenants.
    """

    prompt_tokens: int
    max_tokens: int
    temperature: float
    mode: SpeculationMode = SpeculationMode.AUTO
    max_draft_tokens: int | None = None
    service: ServiceLevel = ANYTIME
    repetition: float | None = None
    tenant_drafts: DraftCounts = UNTESTED
    model_drafts: DraftCounts = UNTESTED


class Pace(IntEnum):
    """The treatment of a request by a worker when its reader is slow (back-pressure).

    The text is the same at every pace, because noise belongs to positions, not to times.
    """

    FULL = 0
    """Run like any other request."""
    SPARING = 1
    """Run after all others, without drafts, and no faster than the client can take tokens."""
    PAUSED = 2
    """Stop the request. It keeps its place, and keeps its KV until another request needs the
    memory."""


@immutable
class WorkerSpeed:
    """The speed of a worker, by its last steps (running means) and its step costs, or 0.

    Attributes:
        tpot_s: seconds between two tokens of a decoding sequence, including all work of its steps.
        prompt_token_s: seconds per prompt token, in steps with prompts.
        sequence_s: seconds that an additional decoding sequence adds to `tpot_s`.
        step_s: seconds of a step with one decoding sequence, by the step costs.
        step_sequence_s: seconds that an additional sequence adds to a step of the last batch.
        step_token_s: seconds per prompt token, in a step that is full of prompt tokens.
        pair_s: seconds per pair of a prompt token and a KV token that it attends to.
        prompt_share: share of the last seconds in which it computed prompts, 0 to 1. It stays
            unchanged while the worker is idle.
    """

    tpot_s: float = 0.0
    prompt_token_s: float = 0.0
    sequence_s: float = 0.0
    step_s: float = 0.0
    step_sequence_s: float = 0.0
    step_token_s: float = 0.0
    pair_s: float = 0.0
    prompt_share: float = 0.0


UNKNOWN_SPEED: Final = WorkerSpeed()
"""The speed of a worker that has run no step."""


# `seats` is the name of the capacity in recorded decisions and in reports between nodes.
class WorkerLoad(Struct, frozen=True, rename={"max_sequences": "seats"}):
    """A worker's load from the view of the gateway.

    Attributes:
        running, waiting: number of sequences in the batch, and in its queue.
        kv_blocks_free, kv_blocks_total: free and total KV memory of the worker, in blocks.
        price: present price of a draft slot in expected tokens, or 0 on an idle worker.
        acceptance: running probability that a draft token is accepted.
        proposers: names of the worker's proposers, cheapest first.
        step_cost_error: running median of |measured / predicted - 1| over step times.
        max_sequences: maximum number of concurrent sequences, or 0 if unknown.
        prompt_tokens: prompt tokens that are not computed yet, including cached tokens, and tokens
            to compute again after preemption.
        step_tokens: maximum number of tokens in a step, or 0 if unknown.
        kv_block_tokens: number of tokens in a KV block.
        speed: present speed of its steps.
        paused: number of sequences paused for slow readers. They take no capacity, nor memory that
            others need, and count neither as running nor as waiting.
        steps: number of planned steps since the start, including empty steps, or None if steps are
            not counted. The number does not change while the worker hangs.
        others: known part of `running` and `waiting` that belongs to clients other than gateways.
        draft_tokens: mean tokens per draft if the worker drafts for every request by its own rule,
            or 0 if it follows plans.
        age_s: age of the metrics in seconds if they arrive over HTTP, or None if they are always
            current.
        head_tokens: tokens in KV memory that the first sequence in its queue needs, or 0 if no
            sequence waits.
        urgent: number of its open sequences with a priority class above the usual one.
        adapter_waiting: part of `waiting` that waits for LoRA adapters.
        drafts_lose: whether drafts have cost it more time than they may, so that it drafts nothing
            (`speculation.savings`).
        cached_blocks: number of blocks with known prefixes in an upstream's memory, as far as it
            reports them, in use or not.
    """

    running: int
    waiting: int
    kv_blocks_free: int
    kv_blocks_total: int
    price: float
    acceptance: float
    proposers: tuple[str, ...]
    step_cost_error: float = 0.0
    max_sequences: int = 0
    prompt_tokens: int = 0
    step_tokens: int = 0
    kv_block_tokens: int = 16
    speed: WorkerSpeed = UNKNOWN_SPEED
    paused: int = 0
    steps: int | None = None
    others: int = 0
    draft_tokens: float = 0.0
    age_s: float | None = None
    head_tokens: int = 0
    urgent: int = 0
    adapter_waiting: int = 0
    drafts_lose: bool = False
    cached_blocks: int = 0

    @property
    def kv_total_tokens(self) -> int:
        """The tokens that its KV memory holds."""
        return self.kv_blocks_total * self.kv_block_tokens

    @property
    def kv_usage(self) -> float:
        """The share of the KV memory in use, or 0.0 if the worker does not report it."""
        return 1 - self.kv_blocks_free / self.kv_blocks_total if self.kv_blocks_total else 0.0

    @property
    def kv_free_tokens(self) -> int:
        """The tokens for which it has free KV memory."""
        return self.kv_blocks_free * self.kv_block_tokens


@immutable
class SpeculationPlan:
    """The gateway's speculation decision for one request.

    The worker decides each step within the plan.

    Attributes:
        policy: name of the policy that decided.
        mode: speculation mode that the client requested.
        proposer: name of the proposer or `ANY_PROPOSER`, or None without speculation.
        max_draft_tokens: maximum number of draft tokens in a step, or 0 without speculation.
        reason: the decision in words, for the client, rendered from cause and figures.
        price: price at the decision, or None if the policy ignores prices.
        cause, figures: cause of the decision and the compared values (`plan_reason`).
        later_proposer: proposer if the worker switches drafting on in a plan that is off
            (`speculation.revision`), or None if the plan stays off.
        later_draft_tokens: maximum number of draft tokens in that case.
    """

    policy: str
    mode: SpeculationMode
    proposer: str | None
    max_draft_tokens: int
    reason: str
    price: float | None = None
    cause: PlanCause = PlanCause.OTHER
    figures: PlanFigures = NO_FIGURES
    later_proposer: str | None = None
    later_draft_tokens: int = 0


@immutable
class DraftCandidate:
    """A decoding sequence whose next step could verify a draft.

    Attributes:
        survivals: for each slot, the probability that its token and all previous tokens are
            accepted. The length is limited by the plan's cap, the remaining tokens and the
            proposer. The values never rise, and the first n belong to the draft of n slots.
        depth_s: seconds to draft one token deeper, once for all candidates with this cost, or 0 if
            the draft exists already.
        weight: weight of a token of this sequence (`speculation.weights`).
        start_s: seconds to begin its draft, as far as this step bears them, only if depths have a
            cost.
        call_s: seconds to call the proposer at all, without depths. All candidates with the same
            `depth_s` share this cost and have the same value.
    """

    survivals: tuple[float, ...]
    depth_s: float = 0.0
    weight: float = 1.0
    start_s: float = 0.0
    call_s: float = 0.0

    @property
    def max_draft_tokens(self) -> int:
        """The longest draft of the sequence that the step may verify."""
        return len(self.survivals)


@immutable
class StepView:
    """A step before drafts join it.

    Attributes:
        tokens: number of tokens in the step without drafts.
        kv_tokens: number of KV tokens that the step reads.
        sequences: number of sequences that will sample a token.
        slot_budget: maximum number of draft slots that the step can verify.
        candidates: sequences that may draft.
        weight: total weight of the sampled tokens, or None if each weighs 1.
        acceptance: running probability that a draft token of the worker is accepted.
        prefill_tokens: number of prompt tokens among `tokens`.
        free_slots: number of slots that displace no prompt token. Each further slot displaces one.
        verify_s: seconds that drafts add to the step, however many are verified
            (`costs.drafting_cost`).
    """

    tokens: int
    kv_tokens: int
    sequences: int
    slot_budget: int
    candidates: tuple[DraftCandidate, ...]
    weight: float | None = None
    acceptance: float = 0.5
    prefill_tokens: int = 0
    free_slots: int = 0
    verify_s: float = 0.0

    @property
    def total_weight(self) -> float:
        """The total weight of the sampled tokens."""
        return float(self.sequences) if self.weight is None else self.weight


@immutable
class BatchView:
    """A step with its decodes and drafts, before prompts join it.

    Attributes:
        tokens: number of tokens in the decodes and their drafts.
        kv_tokens: number of KV tokens that these tokens read.
        sequences: number of decoding sequences.
        most_prefill_tokens: maximum number of prompt tokens that fit, or 0 if no prompt waits.
        prompt_kv_tokens: number of cached tokens of the next prompt.
        within_s: seconds of the longest step after which each decode can still meet its mean TPOT
            target (`batching.longest_step_s`), or None without a target.
        tpot_s: tightest TPOT target of the decodes in seconds, or None.
        drafting_s: seconds of computing drafts before the step, which count towards the targets.
        cost_error: median of |measured / predicted - 1| over step times.
    """

    tokens: int
    kv_tokens: int
    sequences: int
    most_prefill_tokens: int
    prompt_kv_tokens: int = 0
    within_s: float | None = None
    tpot_s: float | None = None
    drafting_s: float = 0.0
    cost_error: float = 0.0


@dataclass(slots=True, eq=False)
class Ticket:
    """The place of a request in a queue, and the values that determine its order.

    A queue may use a subclass for its requests. A policy changes no ticket.

    Attributes:
        key: unique identifier of the request, ascending with arrival.
        arrived_s: time of its arrival.
        deadline_s: latest time at which it should start.
        priority: priority class, where lower values go first (as in vLLM).
        tenant: tenant of the request.
        share: weight of the tenant among tenants, more than 0.
        work_s: work of the request in seconds of the whole pool, or 0 if unknown.
        returning: whether the request had its turn but got no lease, so that it waits again.
    """

    key: int
    arrived_s: float
    deadline_s: float
    priority: int = 0
    tenant: str = ""
    share: float = 1.0
    work_s: float = 0.0
    returning: bool = False
