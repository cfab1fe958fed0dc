"""Application of a step's result to its sequences: tokens, ends, drafts and full blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from draftgate.backends.core.drafting import Drafting
from draftgate.backends.core.queues import Queues
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.core.steps import SequenceWork, StepPlan, StepResult
from draftgate.backends.prompt_logprobs import PromptLogprobs
from draftgate.backends.types import FinishReason, Phases, StepTrace, TokenLogprob


class StepDetails(NamedTuple):
    """The details of a step for one sequence, in addition to its tokens.

    Attributes:
        step: trace of the step, for a traced sequence.
        phases: timing of the prompt, with the first token.
        prompt_logprobs: log probabilities of the prompt, with the first token.
    """

    step: StepTrace | None
    phases: Phases | None
    prompt_logprobs: PromptLogprobs | None = None


class VerifiedDraft(NamedTuple):
    """A draft that a step verified.

    The draft has no number of accepted tokens, because a stop string may end the text before some
    of them (`Sequence.count_draft`).

    Attributes:
        source: the proposer.
        tokens: number of its tokens, at least 1.
    """

    source: str
    tokens: int


Emission = tuple[
    Sequence,
    tuple[int, ...],
    tuple[TokenLogprob, ...],
    VerifiedDraft | None,
    StepDetails | None,
]
"""The tokens that a step added to a sequence, their log probabilities if requested, the draft if
any, and optional details. A bare tuple, because every step creates one per sequence."""

_NO_DRAFTS: Final = StepTrace(0)


class Accounting:
    """Applies results to sequences, blocks and the record of drafts."""

    def __init__(
        self,
        queues: Queues,
        drafting: Drafting,
        eos_ids: frozenset[int],
        finish: Callable[[Sequence, FinishReason], None],
    ) -> None:
        """Store the collaborators.

        Args:
            finish: ends a sequence and frees its resources.
        """
        self._queues = queues
        self._blocks = queues.blocks
        self._drafting = drafting
        self._eos_ids = eos_ids
        self._finish = finish

    def confirm_chunk(self, work: SequenceWork, now_s: float) -> None:
        """Account for a prompt chunk without a sampled token."""
        work.sequence.num_computed = work.confirmed_end
        if work.sequence.first_token_s is None:
            work.sequence.chunks.append((now_s, len(work.token_ids)))
        self._share_full_blocks(work.sequence)
        self._queues.publish_pending(work.sequence)

    def confirm_tokens(self, work: SequenceWork, emitted: tuple[int, ...]) -> tuple[int, ...]:
        """Append the emitted tokens, settle the blocks, and return the tokens that are kept."""
        sequence = work.sequence
        kept = self._append(sequence, emitted)
        fed = len(work.token_ids)
        computed = sequence.num_computed = work.start + fed + len(emitted) - 1
        if (
            not computed % self._blocks.block_size
            or fed > 1
            or sequence.finish_reason is not None
            or work.draft.token_ids
        ):
            self._settle(sequence)
        return kept

    def learn_drafts(self, emissions: Iterable[Emission]) -> None:
        """Compare the drafts of the step with the tokens that followed."""
        if self._drafting.has_proposed:
            # Tokens after the end are not part of the text, and no recording contains them.
            for sequence, kept, *_ in emissions:
                self._drafting.learn(sequence, kept)

    def keep_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        """Keep the log probabilities of prompts until the first delta."""
        for scored, part in zip(plan.scored, result.prompt_logprobs, strict=True):
            plan.work[scored.place].sequence.prompt_logprobs.append(part)

    def finish_prompt(self, sequence: Sequence) -> Emission:
        """End a sequence that generates nothing, after the last chunk of its prompt."""
        self._finish(sequence, FinishReason.LENGTH)
        return sequence, (), (), None, StepDetails(None, None, sequence.take_prompt_logprobs())

    def finish_embeddings(self, plan: StepPlan, result: StepResult) -> Iterator[Emission]:
        """Set the embeddings of a step and end their sequences, except those that have left."""
        if result.pooled is None:
            return
        for place, pooled in zip(plan.pooled, result.pooled, strict=True):
            sequence = plan.work[place].sequence
            if sequence.state is SequenceState.RUNNING:
                sequence.pooled = pooled
                self._finish(sequence, FinishReason.STOP)
                yield sequence, (), (), None, None

    def _settle(self, sequence: Sequence) -> None:
        """Share full blocks, and return unneeded blocks to the pool."""
        self._queues.withdraw_pending(sequence)
        self._share_full_blocks(sequence)
        if sequence.finish_reason is None:
            # The next step feeds the last token, unless a step that was planned ahead has fed it
            # already.
            self._blocks.trim(sequence.block_table, len(sequence.token_ids))
        else:
            self._finish(sequence, sequence.finish_reason)

    def _share_full_blocks(self, sequence: Sequence) -> None:
        """Add blocks that are full of confirmed tokens to the prefix cache."""
        if sequence.num_computed // self._blocks.block_size <= sequence.known_blocks:
            return  # the usual case
        hashes = sequence.hash_blocks(self._blocks.block_size)
        # Tokens accepted after the end of the sequence are computed, but do not belong to the
        # sequence.
        full = min(sequence.num_computed // self._blocks.block_size, len(hashes))
        known = range(sequence.known_blocks, full)
        self._blocks.confirm(sequence.block_table, hashes, known)
        sequence.known_blocks = max(full, sequence.known_blocks)

    def _append(self, sequence: Sequence, emitted: tuple[int, ...]) -> tuple[int, ...]:
        """Append tokens up to the token that ends the sequence, and return them."""
        tokens, grammar = sequence.token_ids, sequence.grammar
        before, most = len(tokens), sequence.most_tokens
        for token in emitted:
            tokens.append(token)
            if (token in self._eos_ids and sequence.stops_at_eos) or (
                token in sequence.stop_ids and sequence.may_stop
            ):
                sequence.finish_reason = FinishReason.STOP
                break
            if len(tokens) >= most:
                sequence.finish_reason = FinishReason.LENGTH
                break
            if grammar is not None:
                grammar.accept(token)
        return emitted[: len(tokens) - before]


def verified_draft(work: SequenceWork) -> VerifiedDraft | None:
    """Return the draft of a sequence that a step verified, before the next step is planned."""
    # Tokens of another worker have no source, because they are no speculation.
    source = work.sequence.draft_source
    return VerifiedDraft(source, len(work.draft.token_ids)) if source else None


def count_draft(
    sequence: Sequence, draft: VerifiedDraft | None, tokens: int
) -> tuple[tuple[int, int], ...]:
    """Count the draft of a step that added `tokens` tokens, and return it for the step's delta.

    Call the function once for each emission, after its tokens were cut at a stop string. All
    numbers of accepted tokens come from this call.
    """
    return () if draft is None else (sequence.count_draft(*draft, tokens),)


def counted_step(step: StepTrace, tokens: int, drafts: tuple[tuple[int, int], ...]) -> StepTrace:
    """Return the trace of a step with its tokens and the result of `count_draft`."""
    return step._replace(tokens=tokens, accepted=sum([accepted for _, accepted in drafts]))


def step_details(plan: StepPlan, work: SequenceWork, now_s: float) -> StepDetails:
    """Return the details of a sequence after its tokens were accounted for.

    The trace of the step has no tokens yet, because a stop string may drop some of them.

    Args:
        work: the sequence's part of the step.
        now_s: end of the step in seconds.
    """
    sequence, phases, step, scores = work.sequence, None, None, None
    if sequence.first_token_s is None:
        phases = sequence.begin_output(now_s, len(work.token_ids))
        scores = sequence.take_prompt_logprobs()
    if sequence.request.traced:
        step = plan.traces.get(sequence.key, _NO_DRAFTS)
    return StepDetails(step, phases, scores)
