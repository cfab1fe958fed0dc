"""What a step did to its sequences: tokens, ends, drafts that failed, blocks that are full."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from draftgate.backends.core.draft_plan import DraftPlan
from draftgate.backends.core.queues import Queues
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.types import FinishReason, Phases, StepTrace, TokenLogprob


class Details(NamedTuple):
    """What there is to tell of a step beside its tokens.

    Attributes:
        step: what it did for a traced sequence.
        phases: how the sequence came to its first token, which is one of the step's.
    """

    step: StepTrace | None
    phases: Phases | None


Emission = tuple[Sequence, tuple[int, ...], tuple[TokenLogprob, ...], Details | None]
"""Tokens a step added to a sequence, with their log probabilities if it asked, and details of the
few who have any. A bare tuple: there is one for each sequence in each step."""

_NO_DRAFTS: Final = StepTrace(0)


class Accounting:
    """Accounts for the work of steps that ran."""

    def __init__(
        self,
        queues: Queues,
        drafts: DraftPlan,
        eos_ids: frozenset[int],
        finish: Callable[[Sequence, FinishReason], None],
    ) -> None:
        """Keep them; `finish` ends a sequence and frees what it has."""
        self._queues = queues
        self._blocks = queues.blocks
        self._drafts = drafts
        self._eos_ids = eos_ids
        self._finish = finish

    def fed(self, work: SequenceWork, now_s: float) -> None:
        """Account for a chunk of a prompt behind which nothing was sampled."""
        work.sequence.num_computed = work.confirmed_end
        if work.sequence.first_token_s is None:
            work.sequence.chunks.append((now_s, len(work.token_ids)))
        self._confirm_blocks(work.sequence)
        self._queues.goes_on_computing(work.sequence)

    def confirm(self, work: SequenceWork, emitted: tuple[int, ...]) -> tuple[int, ...]:
        """Append what was emitted to the sequence, and settle its blocks; return what it keeps."""
        sequence, accepted = work.sequence, len(emitted) - 1
        self._drafts.drafting.learn(sequence, emitted)
        kept = self._append(sequence, emitted)
        sequence.num_computed = work.start + len(work.token_ids) + accepted
        within_block = sequence.num_computed % self._blocks.block_size
        fed_one = len(work.token_ids) == 1 and not work.draft.token_ids
        if not (within_block and fed_one) or sequence.finish_reason is not None:
            self._settle(work, kept)
        return kept

    def _settle(self, work: SequenceWork, kept: tuple[int, ...]) -> None:
        """Account for drafts, share full blocks, give back those that are not needed."""
        sequence = work.sequence
        if work.num_drafts:
            # By what was kept: some executors end the walk with the sequence, others walk on.
            sequence.count_draft(work.num_drafts, len(work.draft.accepted_places(kept)))
        self._queues.prompt_is_computed(sequence)
        self._confirm_blocks(sequence)
        if sequence.finish_reason is None:
            # The last token is fed next, or has been: to a step planned behind this one.
            self._blocks.trim(sequence.block_table, len(sequence.token_ids))
        else:
            self._finish(sequence, sequence.finish_reason)

    def _confirm_blocks(self, sequence: Sequence) -> None:
        """Let others share the blocks that are full of confirmed tokens."""
        if sequence.num_computed // self._blocks.block_size <= sequence.known_blocks:
            return  # as after most steps
        hashes = sequence.hash_blocks(self._blocks.block_size)
        # What was accepted behind the end of the sequence is in the cache, but not in its tokens.
        full = min(sequence.num_computed // self._blocks.block_size, len(hashes))
        known = range(sequence.known_blocks, full)
        self._blocks.confirm(sequence.block_table, hashes, known)
        sequence.known_blocks = max(full, sequence.known_blocks)

    def _append(self, sequence: Sequence, emitted: tuple[int, ...]) -> tuple[int, ...]:
        """Append tokens to the sequence up to the one that ends it, and return them."""
        tokens, grammar = sequence.token_ids, sequence.grammar
        for count, token in enumerate(emitted, 1):
            tokens.append(token)
            if token in self._eos_ids and sequence.heeds_eos:
                sequence.finish_reason = FinishReason.STOP
                return emitted[:count]
            if len(tokens) >= sequence.most_tokens:
                sequence.finish_reason = FinishReason.LENGTH
                return emitted[:count]
            if grammar is not None:
                grammar.accept(token)
        return emitted


def details_of(plan: StepPlan, work: SequenceWork, kept: tuple[int, ...], now_s: float) -> Details:
    """Return what there is to tell of a sequence that has got tokens.

    Args:
        work: its part of the step, which is accounted for.
        kept: the tokens.
        now_s: when the step ended.
    """
    sequence, phases, step = work.sequence, None, None
    if sequence.first_token_s is None:
        phases = sequence.begin_output(now_s, len(work.token_ids))
    if sequence.request.traced:
        drafted = plan.traces.get(sequence.key, _NO_DRAFTS)
        accepted = len(work.draft.accepted_places(kept))
        step = drafted._replace(tokens=len(kept), accepted=accepted)
    return Details(step, phases)
