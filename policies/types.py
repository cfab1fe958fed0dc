"""The vocabulary of decisions: what policies see, and what they answer.

All values are immutable. Names end with their units: `_s` seconds, `_tokens` tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

from msgspec import Struct


class SpeculationMode(StrEnum):
    """What a client may ask for in `speculation.mode`."""

    AUTO = "auto"
    OFF = "off"
    NGRAM = "ngram"
    DRAFT_MODEL = "draft_model"
    SPARSE_SELF = "sparse_self"


PROPOSER_MODES: Final = frozenset(
    {SpeculationMode.NGRAM, SpeculationMode.DRAFT_MODEL, SpeculationMode.SPARSE_SELF}
)
"""Modes that name a proposer."""


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """The targets and the priority of a request.

    Attributes:
        ttft_s: most seconds from its arrival to its first token; None without a target.
        tpot_s: most seconds per further token on average; None without a target.
        priority: its class; lower ones come first, 0 is usual (as in vLLM).
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: int = 0


ANYTIME: Final = ServiceLevel()
"""No targets."""

ANY_PROPOSER: Final = "any"
"""In a plan: for each sequence and step, the proposer of the worker that pays most."""


# Recorded decisions and reports contain these counts under their first names, which stay.
class DraftCounts(Struct, frozen=True, rename={"accepted": "agreed", "rejected": "refuted"}):
    """Verified draft tokens of earlier requests; old ones count less.

    Attributes:
        accepted: tokens that were right.
        rejected: tokens that were wrong after right ones only; tokens after those are not tested.
    """

    accepted: float = 0.0
    rejected: float = 0.0


UNTESTED: Final = DraftCounts()
"""No draft was verified yet."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know about a request before it runs.

    Attributes:
        prompt_tokens: length of the prompt.
        max_tokens: most tokens that the request may generate.
        temperature: 0 is greedy.
        mode: what the client asked for.
        max_draft_tokens: the client's cap on the draft length; None leaves it to the policy.
        service: its targets and priority.
        repetition: share of its tokens that n-gram lookups in the prompt would have drafted
            correctly (`speculation.repetition`); None if that is unknown.
        tenant_drafts: record of the drafts of its tenant and model, for greedy or for sampled
            requests, whichever it is.
        model_drafts: the same over all tenants.
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
    """How a worker treats a request whose reader falls behind (back-pressure).

    The text is the same at every pace, because noise belongs to positions, not to times.
    """

    FULL = 0
    """Like any other request."""
    SPARING = 1
    """After all others, and without drafts."""
    PAUSED = 2
    """Not at all. The request keeps its place, and its KV while no other request needs the
    memory."""


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """How fast a worker is, by its last steps (running means) and its step costs; 0 if unknown.

    Attributes:
        tpot_s: seconds between two tokens of a decoding sequence, whatever else its steps do.
        prompt_token_s: seconds per prompt token, of steps with prompts.
        sequence_s: seconds by which one more decoding sequence lengthens `tpot_s`.
        step_s: seconds of a step with one decoding sequence, by the step costs.
        step_sequence_s: seconds by which one more sequence lengthens the last step's batch.
        step_token_s: seconds per prompt token of a step that is full of them.
    """

    tpot_s: float = 0.0
    prompt_token_s: float = 0.0
    sequence_s: float = 0.0
    step_s: float = 0.0
    step_sequence_s: float = 0.0
    step_token_s: float = 0.0


UNKNOWN_SPEED: Final = WorkerSpeed()
"""Nothing has run yet."""


# `seats` is the name of the capacity in recorded decisions and in reports of nodes to each other.
class WorkerLoad(Struct, frozen=True, rename={"max_sequences": "seats"}):
    """A worker's load, as the gateway sees it.

    Attributes:
        running, waiting: sequences in the batch, and queued for it.
        kv_blocks_free, kv_blocks_total: KV memory of the worker, in blocks.
        price: expected tokens that a draft slot must promise now; 0 on an idle worker.
        acceptance: running probability that a drafted token is accepted.
        proposers: the worker's proposers, cheapest first.
        step_cost_error: running median of |measured / predicted - 1| over step times.
        max_sequences: most sequences that run at once; 0 if unknown.
        prompt_tokens: prompt tokens that are still to be computed, and tokens to compute again
            after preemption; cached ones count as well.
        step_tokens: most tokens of a step; 0 if unknown.
        kv_block_tokens: tokens of a KV block.
        speed: how fast its steps are now.
        paused: sequences whose readers have fallen far behind. They take no capacity, nor memory
            that others need, and count neither as running nor as waiting.
        steps: number of planned steps since the start, empty ones included; it stands still if the
            worker hangs. None if steps are not counted.
        others: the known part of `running` and `waiting` that clients other than gateways sent.
        draft_tokens: mean tokens per draft, if the worker drafts for every request by its own rule;
            0 if it follows plans.
        age_s: age of the figures, if they were requested over HTTP; None if they are counted as
            they change.
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


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """The gateway's decision for one request; the worker decides each step within it.

    Attributes:
        policy: the name of the policy that decided.
        mode: what the client asked for.
        proposer: what may draft, by name or `ANY_PROPOSER`; None without speculation.
        max_draft_tokens: most draft tokens of a step; 0 without speculation.
        reason: the decision in words, for the client.
        price: the price at the decision; None if the policy did not look at it.
    """

    policy: str
    mode: SpeculationMode
    proposer: str | None
    max_draft_tokens: int
    reason: str
    price: float | None = None


@dataclass(frozen=True, slots=True)
class DraftCandidate:
    """A decoding sequence whose next step could verify a draft.

    Attributes:
        survivals: for each slot, the probability that it and all before it are accepted. As many
            as the plan's cap, the tokens left to generate and the proposer allow. They never rise:
            the first n are the draft of n slots.
        depth_s: seconds of drafting one token deeper, once for all candidates with this cost; 0 if
            the draft exists already.
        weight: what a token of this sequence is worth (`speculation.weights`).
        start_s: seconds to begin drafting for it, as far as this step bears them; only if depths
            cost something.
        call_s: seconds of drafting at all, besides depths; once for all candidates of one `depth_s`
            and equal for all of them.
    """

    survivals: tuple[float, ...]
    depth_s: float = 0.0
    weight: float = 1.0
    start_s: float = 0.0
    call_s: float = 0.0

    @property
    def max_draft_tokens(self) -> int:
        """The longest draft that the step may verify for it."""
        return len(self.survivals)


@dataclass(frozen=True, slots=True)
class StepView:
    """The step that is about to be planned, before drafts are added.

    Attributes:
        tokens: tokens of the step without drafts.
        kv_tokens: KV tokens that the step reads.
        sequences: sequences that will sample a token.
        slot_budget: most draft slots that the step can verify.
        candidates: sequences that may draft.
        weight: what the sampled tokens of all sequences are worth; None if each is worth 1.
        acceptance: running probability that a drafted token is accepted, over all of the worker.
        prefill_tokens: how many of `tokens` belong to prompts.
        free_slots: slots that displace no prompt token; each further slot displaces one.
        verify_s: seconds by which drafts lengthen the step, however many are verified
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
        """What the sampled tokens of all sequences are worth."""
        return float(self.sequences) if self.weight is None else self.weight


@dataclass(frozen=True, slots=True)
class BatchView:
    """A step with its decodes and drafts, before prompts join it.

    Attributes:
        tokens: tokens of the decodes and of their drafts.
        kv_tokens: KV tokens that these read.
        sequences: number of decoding sequences.
        most_prefill_tokens: most prompt tokens that fit; 0 if no prompt waits.
        prompt_kv_tokens: cached tokens of the next prompt.
        within_s: seconds that the tightest target of the decodes leaves; None without a target.
        cost_error: median of |measured / predicted - 1| over step times.
    """

    tokens: int
    kv_tokens: int
    sequences: int
    most_prefill_tokens: int
    prompt_kv_tokens: int = 0
    within_s: float | None = None
    cost_error: float = 0.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request in the queue, as far as its order depends on it.

    Attributes:
        key: identifies the request; unique, ascending with arrival.
        arrived_s: when it arrived.
        deadline_s: when it should start at the latest.
        priority: its class; lower ones come first (as in vLLM).
        tenant: its tenant.
        share: the weight of the tenant among tenants, more than 0.
        work_s: seconds of the whole pool that it takes, by which it delays all after it; 0 if
            unknown.
        returning: whether it was started once, and lost its worker.
    """

    key: int
    arrived_s: float
    deadline_s: float
    priority: int = 0
    tenant: str = ""
    share: float = 1.0
    work_s: float = 0.0
    returning: bool = False
