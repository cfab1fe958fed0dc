"""The sequence: the tokens and KV state of one choice of a request on a worker.

All states and transitions are in this file. The first `num_computed` tokens have their keys and
values in the cache, and the other tokens are *pending*. A decode is a sequence with one pending
token, and a prefill has several. A preempted sequence starts again at 0.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Final

from draftgate.backends.core.draft_pages import DraftTable
from draftgate.backends.core.drafts import PREDICTION
from draftgate.backends.core.grammar import Grammar, token_mask
from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.prompt_logprobs import PromptLogprobs, joined
from draftgate.backends.token_ids import TokenIds, compact
from draftgate.backends.types import (
    FinishReason,
    GenerationRequest,
    Pace,
    Phases,
    ResumedChoice,
    SpeculationOutcome,
    Task,
)
from draftgate.policies.speculation.draft_prior import temperature_band
from draftgate.policies.speculation.plan_reason import PlanCause
from draftgate.policies.speculation.revision import DraftingSwitch, PlanRevision
from draftgate.policies.speculation.savings import TRIAL_SHARE, TRIAL_TOKENS
from draftgate.policies.speculation.survival import RequestRecord
from draftgate.policies.speculation.weights import due_in_s
from draftgate.policies.types import ANYTIME, BATCH_PRIORITY, SpeculationMode


class SequenceState(IntEnum):
    """The states of a sequence."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


_TRANSITIONS: Final[dict[SequenceState, frozenset[SequenceState]]] = {
    # admitted to the batch, or cancelled in the queue
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    # preempted (to be recomputed) or paused, or finished
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens, KV blocks and counters of one choice of a request.

    Attributes:
        key: unique identifier on the worker, ascending in the order in which the worker got it.
        token_ids: token ids of prompt and output.
        prompt_tokens: length of the prompt.
        num_computed: number of leading tokens whose keys and values are in the cache.
        block_table: KV blocks in order, where block i holds the tokens from `i * block_size` on.
            Other sequences may share the leading blocks. A 64-bit array, which devices read
            directly.
        block_hashes: hash chain over the full blocks of `token_ids` (see `prefix_cache`).
        known_blocks: number of leading blocks that the prefix cache knows by their hash.
        cached_tokens: number of prompt tokens found in the cache when the sequence first ran.
        draft_table: pages of a draft model's keys and values.
        grammar: constraint on the output, or None.
        last_step: number of the last step with this sequence, or -1 before the first.
        pace: full speed, reduced for a slow reader (`SPARING`), or paused.
        client_tpot_s: seconds in which a slow reader can take a token, or 0 without a limit.
        next_decode_s: time from which its next token may be decoded while other sequences run.
        prefill_tokens: number of pending tokens to feed in prompt chunks, or at admission.
        draft_records: outcomes of the sequence's own drafts, by source.
        weight: present value of one of its tokens (`policies.speculation.weights`).
        queued_s: time of its arrival at this worker, on the worker's clock.
        order: its rank on the worker, by the time of its arrival at its first worker and its
            priority class (`queues.CLASS_S`). A sequence that moves thus keeps its rank. Otherwise
            it would be preempted first.
        scheduled_s: start of its first step, or None before that step.
        chunks: end of the step and number of tokens, for each prompt chunk.
        first_token_s: time when it began to decode on this worker, or None before.
        first_output_tokens: length of its output at that time.
        histogram: number of verifying steps, by the number of accepted tokens.
        pooled: result of a request that generates nothing (`Delta.pooled`).
        prompt_logprobs: log probabilities of the prompt that steps have computed, in order.
        scored_rows: number of leading rows of the prompt whose log probabilities are planned or not
            requested. Row i gives that of token i + 1.
        most_tokens: length of prompt and output at which it ends. Without output, this is the
            length of the prompt plus one. That token never exists, but the last prompt token is
            fed like a decode.
        embeds: whether the prompt is embedded, without sampling any token.
        is_document: whether the prompt is embedded as batch work.
        ends_with_prompt: whether it ends with its prompt, without sampling any token.
        is_plain: whether only the sampler uses its logits.
        has_service: whether the request has a service level.
        offline: whether the request is a line of a batch, which runs while no other prompt waits.
        proposer: proposer that may draft while drafting is on, or None.
        draft_cap: maximum number of draft tokens in a step while drafting is on.
        has_prediction: whether the worker may draft from the prediction of the request.
        stop_ids: tokens that end it, in addition to end-of-sequence tokens.
        allowed: mask of the tokens that may be sampled, as a grammar's, or empty for all.
        draft_source: proposer of its last draft that was verified, empty for `next_ids`.
        draft_band: band of temperatures whose drafts are counted together (`draft_prior`).
        drafting: whether drafting is on, and the basis for its next revision.
        revisions: revisions of the plan.
        lost_tokens: time that its drafts took, in tokens that it would have got without drafts,
            minus the tokens that they brought.
        saved_s: seconds that the drafts of its steps saved, negative if they cost time.
        accepted_prediction_tokens, rejected_prediction_tokens: numbers of accepted and rejected
            draft tokens from the prediction.
        adapter_slot: slot in which its worker keeps the adapter of the request, or 0 for none.
        next_ids: tokens of another worker that the first sampling step verifies
            (`ResumedChoice.next_ids`), empty afterwards.
    """

    key: int
    request: GenerationRequest
    choice: int
    token_ids: TokenIds
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    block_table: array[int] = field(default_factory=lambda: array("q"))
    block_hashes: list[bytes] = field(default_factory=list)
    known_blocks: int = 0
    cached_tokens: int = 0
    draft_table: DraftTable = field(default_factory=DraftTable)
    grammar: Grammar | None = None
    finish_reason: FinishReason | None = None
    preemptions: int = 0
    last_step: int = -1
    pace: Pace = Pace.FULL
    client_tpot_s: float = 0.0
    next_decode_s: float = 0.0
    prefill_tokens: int = 0
    draft_records: dict[str, RequestRecord] = field(default_factory=dict)
    weight: float = 1.0
    queued_s: float = 0.0
    order: tuple[float, int] = (0.0, 0)
    scheduled_s: float | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)
    first_token_s: float | None = None
    first_output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    pooled: bytes | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    prompt_tokens: int = field(init=False)
    scored_rows: int = field(init=False)
    most_tokens: int = field(init=False)
    embeds: bool = field(init=False)
    is_document: bool = field(init=False)
    ends_with_prompt: bool = field(init=False)
    is_plain: bool = field(init=False)
    has_service: bool = field(init=False)
    offline: bool = field(init=False)
    proposer: str | None = field(init=False)
    draft_cap: int = field(init=False)
    has_prediction: bool = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    allowed: bytes = field(init=False)
    draft_source: str = ""
    draft_band: int = field(init=False)
    drafting: DraftingSwitch = field(init=False)
    revisions: list[PlanRevision] = field(default_factory=list)
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    lost_tokens: float = 0.0
    saved_s: float = 0.0
    next_ids: tuple[int, ...] = ()
    adapter_slot: int = 0

    def __post_init__(self) -> None:
        """Compute the fields that every step needs."""
        request = self.request
        prompt_tokens = self.prompt_tokens = len(request.prompt_ids)
        self.embeds = request.task is Task.EMBED
        self.is_document = self.embeds and request.service.priority >= BATCH_PRIORITY
        self.ends_with_prompt = request.sampling.max_tokens == 0
        self.most_tokens = prompt_tokens + max(request.sampling.max_tokens, 1)
        # The first delta of choice 0 has delivered the log probabilities if it has an output.
        scores = request.sampling.prompt_logprobs is not None and not self.choice
        is_new = len(self.token_ids) == prompt_tokens
        self.scored_rows = 0 if scores and is_new else prompt_tokens
        self.is_plain = request.grammar is None and request.sampling.leaves_logits
        self.has_service = request.service != ANYTIME
        self.offline = request.service.is_offline
        plan = request.speculation
        self.proposer = plan.proposer or plan.later_proposer
        self.draft_cap = plan.max_draft_tokens or plan.later_draft_tokens
        self.draft_band = temperature_band(request.sampling.temperature)
        stopped = plan.cause is PlanCause.DRAFTS_LOSE
        self.drafting = DraftingSwitch(on=plan.max_draft_tokens > 0, stopped=stopped)
        # A client that names a proposer gets no other drafts.
        may_draft = self.proposer is not None and plan.mode is SpeculationMode.AUTO
        self.has_prediction = may_draft and bool(request.prediction_ids)
        self.stop_ids = frozenset(request.sampling.stop_token_ids)
        self.allowed = token_mask(request.sampling.allowed_token_ids)

    @classmethod
    def for_choice(cls, key: int, request: GenerationRequest, choice: ResumedChoice) -> Sequence:
        """Return a waiting sequence for one of `request.choices`."""
        tokens = compact(request.prompt_ids)
        tokens.extend(choice.output_ids)
        hashes, next_ids = list(request.block_hashes), choice.next_ids
        return cls(key, request, choice.choice, tokens, block_hashes=hashes, next_ids=next_ids)

    @property
    def output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Number of tokens that are not in the cache yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def remaining_tokens(self) -> int:
        """Number of tokens that may still be generated."""
        return self.most_tokens - len(self.token_ids)

    @property
    def likely_later_tokens(self) -> int:
        """Number of tokens after the next one that are likely enough to rely on.

        Outputs often end long before `max_tokens`, so an output of n tokens is assumed to have n
        more. If it ends now, its mean time per token is at most 1.5 times its target.
        """
        output_tokens = len(self.token_ids) - self.prompt_tokens
        return min(output_tokens, self.most_tokens - len(self.token_ids) - 1)

    @property
    def trial_is_used_up(self) -> bool:
        """Whether its drafts have cost more than they have brought, beyond a small allowance."""
        return self.lost_tokens > TRIAL_TOKENS + TRIAL_SHARE * self.output_tokens

    @property
    def tpot_s(self) -> float | None:
        """The TPOT target in seconds, no shorter than its client can take, or None without one."""
        target_s = self.request.service.tpot_s
        return None if target_s is None else max(target_s, self.client_tpot_s)

    def due_in_s(self, now_s: float) -> float | None:
        """Return the seconds until the next token is due, or None without a target."""
        tpot_s = self.tpot_s
        if self.first_token_s is None or tpot_s is None:
            return None
        tokens = 1 + self.output_tokens - self.first_output_tokens
        return due_in_s(tpot_s, now_s - self.first_token_s, tokens)

    def set_client_tpot(self, tpot_s: float, now_s: float) -> None:
        """Set the seconds in which the client can take a token, or 0 without a limit.

        Tokens are due at the new rate from now on. So the sequence is not late for the time in
        which its client was slow.
        """
        if tpot_s == self.client_tpot_s:
            return
        self.client_tpot_s = tpot_s
        self.next_decode_s = min(self.next_decode_s, now_s + tpot_s) if tpot_s else 0.0
        if self.first_token_s is not None:
            self.first_token_s, self.first_output_tokens = now_s, self.output_tokens

    def defer_decode(self, now_s: float) -> None:
        """Record that a token is decoded, before the next one by the time of its client.

        A sequence that was served late may make up for one token.
        """
        earliest_s = max(self.next_decode_s, now_s - self.client_tpot_s)
        self.next_decode_s = min(earliest_s, now_s) + self.client_tpot_s

    @property
    def stops_at_eos(self) -> bool:
        """Whether an end-of-sequence token ends the output. With a grammar, it always does."""
        return self.grammar is not None or not self.request.sampling.ignore_eos

    @property
    def may_stop(self) -> bool:
        """Whether its last token may end the output, after at least `min_tokens` tokens."""
        return self.output_tokens > self.request.sampling.min_tokens

    def hash_blocks(self, block_size: int) -> list[bytes]:
        """Return the hashes of all full blocks."""
        if len(self.block_hashes) < len(self.token_ids) // block_size:
            extend_chain(self.block_hashes, self.request.cache_owner, self.token_ids, block_size)
        return self.block_hashes

    def sharable_hashes(self, block_size: int) -> list[bytes]:
        """Return the hashes of the leading full blocks that may be taken from the cache.

        The last token itself is always computed, for its logits. Rows whose log probabilities are
        missing are computed too, also if their keys and values are cached.
        """
        end = len(self.token_ids) - 1
        if self.scored_rows < self.prompt_tokens - 1:
            end = self.scored_rows
        return self.hash_blocks(block_size)[: end // block_size]

    def begin_output(self, now_s: float, fed_tokens: int) -> Phases:
        """Record the first output token, and return the timing of the prompt.

        Args:
            fed_tokens: number of tokens fed in the step that produced it.
        """
        assert self.scheduled_s is not None, "a sequence with a token was scheduled"
        self.first_token_s, self.first_output_tokens = now_s, self.output_tokens
        self.chunks.append((now_s, fed_tokens))
        return Phases(self.queued_s, self.scheduled_s, tuple(self.chunks), now_s)

    def take_prompt_logprobs(self) -> PromptLogprobs | None:
        """Return the log probabilities of the prompt, once, or None without any."""
        taken, self.prompt_logprobs = joined(self.prompt_logprobs), []
        return taken

    def move_to(self, state: SequenceState) -> None:
        """Change the state.

        Raises:
            RuntimeError: `_TRANSITIONS` does not allow it.
        """
        if state not in _TRANSITIONS[self.state]:
            raise RuntimeError(f"sequence {self.key}: {self.state.name} cannot become {state.name}")
        self.state = state

    def count_draft(self, source: str, drafted: int, tokens: int) -> tuple[int, int]:
        """Count one step that verified a draft, after its tokens were cut at a stop string.

        The last token of a step counts as sampled by the target, also if the draft contained it. So
        each step adds its accepted tokens and one more, whatever ends the output.

        Args:
            source: the proposer.
            drafted: number of verified draft tokens, at least 1.
            tokens: number of tokens that the step added to the output, at least 1.

        Returns:
            The numbers of verified and of accepted draft tokens (`Delta.drafts`).
        """
        accepted = tokens - 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1
        if source == PREDICTION:
            self.accepted_prediction_tokens += accepted
            self.rejected_prediction_tokens += drafted - accepted
        return drafted, accepted

    def outcome(self) -> SpeculationOutcome:
        """Return the totals of speculation for this sequence."""
        return SpeculationOutcome(
            sum(self.histogram),
            self.drafted_tokens,
            self.accepted_tokens,
            tuple(self.histogram),
            tuple(self.revisions),
            self.accepted_prediction_tokens,
            self.rejected_prediction_tokens,
            self.saved_s,
        )
