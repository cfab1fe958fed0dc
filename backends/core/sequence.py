"""One sequence: a request's tokens and KV state on a worker.

Every state and transition is in this file. `num_computed` says how many leading tokens have
their keys and values in the cache; what is left is *pending*. A decode is a sequence with one
pending token, a prefill one with more, and a preempted sequence one which starts again at 0.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from draftgate.backends.core.draft_pages import DraftTable
from draftgate.backends.core.grammar import Grammar
from draftgate.backends.core.prefix_cache import extend_chain
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
from draftgate.policies.survival import RequestRecord
from draftgate.policies.types import ANYTIME
from draftgate.policies.weights import next_due_s


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


TRANSITIONS: Final[dict[SequenceState, frozenset[SequenceState]]] = {
    # admitted to the batch; or cancelled in the queue
    SequenceState.WAITING: frozenset({SequenceState.RUNNING, SequenceState.FINISHED}),
    # preempted by recompute, or paused; or finished
    SequenceState.RUNNING: frozenset({SequenceState.WAITING, SequenceState.FINISHED}),
    SequenceState.FINISHED: frozenset(),
}


def no_blocks() -> array[int]:
    """Return an empty table of 64-bit block numbers."""
    return array("q")


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, KV pages and counters of one choice of a request.

    Attributes:
        key: unique on the worker and ascending with arrival.
        token_ids: prompt and output.
        num_computed: leading tokens whose keys and values are in the cache.
        block_table: KV blocks in order; block i holds tokens `i * block_size` and on. Leading ones
            may be shared with other sequences. An array, so that devices read it as it lies.
        block_hashes: chain over the full blocks of `token_ids` (`prefix_cache`).
        known_blocks: leading blocks of the table which are known by their hash.
        pace: how far it goes on; what is paused waits.
        prefill_tokens: pending tokens that are to be fed in chunks, or with its admission.
        most_tokens: tokens of prompt and output together at which it ends. Of an embedding one more
            than its prompt has, which it never gets: its last token alone is fed as a decode is.
        embeds: its prompt is to be embedded: it ends with that, and no token is drawn.
        embedding: what came of that (`Delta.embedding`).
        is_plain: nothing reads or changes its logits but the sampler.
        has_service: its request asked for a service level.
        cached_tokens: prompt tokens that needed no computing when the sequence first ran.
        draft_table: pages of a draft model's keys and values.
        grammar: what the output may say; None allows everything.
        draft_records: what its own drafts have shown, by source.
        weight: what a token of it is worth now (`policies.weights`).
        queued_s: when it came, by the worker's time.
        scheduled_s: when it first was in a step; None before.
        chunks: of its prompt, each with when its step ended and how many tokens it had.
        first_token_s: when it began to decode here, by the worker's time; None before.
        first_output_tokens: how many tokens of output it had then.
    """

    key: int
    request: GenerationRequest
    choice: int
    token_ids: TokenIds
    state: SequenceState = SequenceState.WAITING
    num_computed: int = 0
    block_table: array[int] = field(default_factory=no_blocks)
    block_hashes: list[bytes] = field(default_factory=list)
    known_blocks: int = 0
    cached_tokens: int = 0
    draft_table: DraftTable = field(default_factory=DraftTable)
    grammar: Grammar | None = None
    finish_reason: FinishReason | None = None
    preemptions: int = 0
    last_step: int = -1
    pace: Pace = Pace.FULL
    prefill_tokens: int = 0
    draft_records: dict[str, RequestRecord] = field(default_factory=dict)
    weight: float = 1.0
    queued_s: float = 0.0
    scheduled_s: float | None = None
    chunks: list[tuple[float, int]] = field(default_factory=list)
    first_token_s: float | None = None
    first_output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    embedding: bytes | None = None
    most_tokens: int = field(init=False)
    embeds: bool = field(init=False)
    is_plain: bool = field(init=False)
    has_service: bool = field(init=False)

    def __post_init__(self) -> None:
        """Look up what every step asks for."""
        request = self.request
        self.embeds = request.task is Task.EMBED
        self.most_tokens = len(request.prompt_ids) + (
            1 if self.embeds else request.sampling.max_tokens
        )
        self.is_plain = request.grammar is None and request.sampling.leaves_logits
        self.has_service = request.service != ANYTIME

    @classmethod
    def of(cls, key: int, request: GenerationRequest, choice: ResumedChoice) -> Sequence:
        """Return the waiting sequence for one of `request.choices`."""
        tokens = compact(request.prompt_ids)
        tokens.extend(choice.output_ids)
        return cls(key, request, choice.choice, tokens, block_hashes=list(request.block_hashes))

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Known tokens which are not in the cache yet."""
        return len(self.token_ids) - self.num_computed

    @property
    def remaining_tokens(self) -> int:
        """Tokens which may still be generated."""
        return self.most_tokens - len(self.token_ids)

    @property
    def next_due_s(self) -> float | None:
        """When its next token is due, by the worker's time; None without a target."""
        if self.first_token_s is None:
            return None
        tokens = 1 + self.output_tokens - self.first_output_tokens
        return next_due_s(self.request.service, self.first_token_s, tokens)

    @property
    def heeds_eos(self) -> bool:
        """Whether an end-of-sequence token ends it; under a grammar always."""
        return self.grammar is not None or not self.request.sampling.ignore_eos

    def hash_blocks(self, block_size: int) -> list[bytes]:
        """Return the hashes of all full blocks of the tokens there are."""
        extend_chain(self.block_hashes, self.request.tenant, self.token_ids, block_size)
        return self.block_hashes

    def sharable_hashes(self, block_size: int) -> list[bytes]:
        """Return the hashes of the blocks that may come from a cache: all before the last token.

        The last token is always computed, for its logits.
        """
        return self.hash_blocks(block_size)[: (len(self.token_ids) - 1) // block_size]

    def begin_output(self, now_s: float, fed_tokens: int) -> Phases:
        """Note that its first token is there; return how it came to it.

        Args:
            fed_tokens: of the step that brought it.
        """
        assert self.scheduled_s is not None, "it was in a step"
        self.first_token_s, self.first_output_tokens = now_s, self.output_tokens
        self.chunks.append((now_s, fed_tokens))
        return Phases(self.queued_s, self.scheduled_s, tuple(self.chunks), now_s)

    def move_to(self, state: SequenceState) -> None:
        """Change the state.

        Raises:
            RuntimeError: the table has no such transition.
        """
        if state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"sequence {self.key}: {self.state.name} cannot become {state.name}")
        self.state = state

    def count_draft(self, drafted: int, accepted: int) -> None:
        """Count one step that verified `drafted` > 0 draft tokens."""
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1

    def outcome(self) -> SpeculationOutcome:
        """Return what speculation did for this sequence so far."""
        return SpeculationOutcome(
            sum(self.histogram), self.drafted_tokens, self.accepted_tokens, tuple(self.histogram)
        )
