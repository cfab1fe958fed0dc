"""The vocabulary of decisions: what a policy may see, and what it answers.

All values are immutable. Units are in the names: `_s` seconds, `_tokens` tokens.
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
"""Modes which name a proposer."""


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """What a request may expect.

    Attributes:
        ttft_s: most seconds from its arrival to its first token; None asks for nothing.
        tpot_s: most seconds for each further token on average; None asks for nothing.
        priority: its class; lower ones come first, 0 is usual (as vLLM counts).
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    priority: int = 0


ANYTIME: Final = ServiceLevel()
"""Asks for nothing."""

ANY_PROPOSER: Final = "any"
"""In a plan: whatever the worker has and pays most, for each sequence and step."""


class DraftCounts(Struct, frozen=True, rename={"accepted": "agreed", "rejected": "refuted"}):
    """Draft tokens of earlier requests that were put to the test; old ones count less.

    Attributes:
        accepted: tokens that were right.
        rejected: tokens that were wrong, behind right ones only.
    """

    accepted: float = 0.0
    rejected: float = 0.0


UNTESTED: Final = DraftCounts()
"""No draft was verified yet."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a policy may know of a request before it runs.

    Attributes:
        prompt_tokens: length of the prompt.
        max_tokens: most tokens the request may generate.
        temperature: 0 is greedy.
        mode: what the client asked for.
        max_draft_tokens: the client's cap on the draft length; None leaves it to the policy.
        service: how soon its tokens are wanted, and how much they matter.
        repetition: share of the tokens that a look-up in the prompt would have drafted right within
            it (`repetition`); None where nothing can be told.
        tenant_drafts: what became of the drafts of earlier requests of its tenant and model, greedy
            ones if it is greedy, else drawn ones.
        model_drafts: the same of all tenants.
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
    """How far a worker goes on with a request whose reader falls behind (back-pressure).

    The text is the same at every pace: noise belongs to positions, not to instants.
    """

    FULL = 0
    """As any other."""
    SPARING = 1
    """Behind all others, and without drafts."""
    PAUSED = 2
    """Not at all; it keeps its place and, as long as nobody needs them, its keys and values."""


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """How fast a worker is: by its last steps (running means) and by its step costs; 0: unknown.

    Attributes:
        tpot_s: seconds between two tokens of a decoding sequence, whatever else its steps do.
        prompt_token_s: seconds for each prompt token, of steps that feed some.
        sequence_s: seconds by which one more decoding sequence lengthens `tpot_s`.
        step_s: seconds of a step with one decoding sequence, as its costs have it.
        step_sequence_s: by which one more lengthens a step of those that decoded last.
        step_token_s: seconds for each prompt token of a step that is full of them.
    """

    tpot_s: float = 0.0
    prompt_token_s: float = 0.0
    sequence_s: float = 0.0
    step_s: float = 0.0
    step_sequence_s: float = 0.0
    step_token_s: float = 0.0


UNKNOWN_SPEED: Final = WorkerSpeed()
"""Nothing has run yet."""


class WorkerLoad(Struct, frozen=True, rename={"max_sequences": "seats"}):
    """A worker's load, as the gateway sees it.

    Attributes:
        running, waiting: sequences in the batch, and queued for it.
        kv_blocks_free, kv_blocks_total: KV memory of the worker, in blocks.
        price: expected tokens a draft slot must promise now (design, section 1); 0 when idle.
        acceptance: running chance that a drafted token is accepted.
        proposers: what the worker can draft with, cheapest first.
        step_cost_error: running median of |measured / predicted - 1| over step times.
        max_sequences: most sequences that run at once; 0 where nobody knows.
        prompt_tokens: prompt tokens of its sequences that are still to be computed, and what is to
            be computed again of those that were preempted; what may be cached is counted, too.
        step_tokens: most tokens of a step; 0 where nobody knows.
        kv_block_tokens: tokens of a KV block.
        speed: what its steps take now.
        paused: sequences whose readers have fallen far behind: they take no seat, nor any memory
            that others need, and count neither as running nor as waiting.
        steps: that it has planned since it was started, those included for which there was nothing
            to do: it stands still where the worker hangs. None where nobody counts.
        others: of `running` and `waiting`, what somebody else has sent there, as far as is known.
        draft_tokens: mean tokens of a draft, where it drafts for every request by its own rule; 0
            where it does as it is told.
        age_s: how old the figures are that it was asked for over HTTP; None where all are counted
            as they change.
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
        proposer: what may draft, by name or `ANY_PROPOSER`; None when the request does not
            speculate.
        max_draft_tokens: most draft tokens of a step; 0 when the request does not speculate.
        reason: the decision in words, for the client.
        price: the price the decision was made at; None when no price was looked at.
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
        survivals: the chance of each slot that it and all before it are accepted; as many as the
            plan's cap, the tokens left to generate and the proposer allow. The best come first, so
            they never rise: the first n are the draft of n slots.
        depth_s: seconds of drafting one token deeper, once for all candidates with this cost; 0 if
            the draft is there already.
        weight: what a token of this sequence is worth (`weights`).
        start_s: seconds, as far as this step has to bear them, that it takes to begin drafting for
            it; only where each depth costs something.
        call_s: seconds of drafting at all, beside depths; once for all candidates of one `depth_s`,
            and the same for all of them.
    """

    survivals: tuple[float, ...]
    depth_s: float = 0.0
    weight: float = 1.0
    start_s: float = 0.0
    call_s: float = 0.0

    @property
    def max_draft_tokens(self) -> int:
        """The longest draft the step may verify for it."""
        return len(self.survivals)


@dataclass(frozen=True, slots=True)
class StepView:
    """The step that is about to be planned, before drafts are added.

    Attributes:
        tokens: tokens of the step without drafts.
        kv_tokens: KV tokens the step reads.
        sequences: sequences that will sample a token.
        slot_budget: most draft slots the step has room for.
        candidates: sequences that may draft.
        weight: what the sampled tokens of all sequences are worth; None if each is worth 1.
        acceptance: running chance that a drafted token is accepted, over all of the worker.
        prefill_tokens: how many of `tokens` are of prompts.
        free_slots: beside so many slots all of them join; each further slot takes the room of one.
        verify_s: seconds by which any drafts lengthen the step, however many are verified, beside
            what each of them does (`policies.costs.drafting_cost`).
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
        kv_tokens: KV tokens these read.
        sequences: how many sequences decode.
        most_prefill_tokens: room for prompt tokens; 0 if none wait.
        prompt_kv_tokens: tokens of the next prompt that are in the cache.
        within_s: seconds the step may take by the tightest target of its decodes; None without one.
        cost_error: how far forecasts of step times are off: median of |measured / predicted - 1|.
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
