"""The one scheduler: queues, KV blocks and policies in, a `StepPlan` out, a `StepResult` back.

Rules of this file: no clock, no randomness, no device. Decodes go first, least recently served
first, so more decodes than budget means taking turns. Draft slots come next, as many as the
policy allows; they never preempt, and leave half of the rest to prefills. Then prefill chunks, as
far as the batching policy lets decodes wait, and newcomers in order of arrival: a sequence which
cannot be admitted keeps those behind it waiting, so none starves; but one that shares a prefix with
a prefill under way lets others pass and takes the blocks when they are ready. When blocks run out,
the youngest sequence gives its own back and is computed again later (recompute), but for what is
still cached.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Final

from backends.core.batch_view import batch_view
from backends.core.draft_plan import DraftPlan, Room
from backends.core.drafts import Draft, Proposer
from backends.core.embedding import embedded, pooling_plan
from backends.core.kv_blocks import KvBlocks, OutOfBlocks
from backends.core.newcomers import first_blocks, prompt_tokens
from backends.core.prefix_cache import PendingPrefixes
from backends.core.sequence import Sequence, SequenceState
from backends.core.steps import PENDING, SequenceWork, StepPlan, StepResult
from backends.types import FinishReason, TokenLogprob
from policies.batching import Slack
from policies.cost_fit import StepCostFit
from policies.protocols import BatchingPolicy, SpeculationPolicy
from policies.step_cost import StepCost
from policies.types import WorkerLoad


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of a batch.

    Attributes:
        max_num_seqs: most running sequences.
        max_step_tokens: most tokens of a step: decodes, draft slots and prefill chunks.
        eos_ids: tokens that end a sequence.
    """

    max_num_seqs: int
    max_step_tokens: int
    eos_ids: frozenset[int] = frozenset()


Emission = tuple[Sequence, tuple[int, ...], tuple[TokenLogprob, ...]]
"""Tokens a step added to a sequence, with their log probabilities if it asked."""


@dataclass(slots=True)
class _StepDraft:
    """The step under construction."""

    budget: int
    work: dict[int, SequenceWork] = field(default_factory=dict)  # by sequence key

    def attach(self, key: int, draft: Draft) -> None:
        self.budget -= len(draft)
        self.work[key] = self.work[key]._replace(draft=draft)


DEFAULT_BATCHING: Final[BatchingPolicy] = Slack()

_LEAST_RECENTLY_SERVED: Final = attrgetter("last_step", "key")


class Scheduler:
    """Decides what every step computes. `plan` and `apply` alternate."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: KvBlocks,
        policy: SpeculationPolicy,
        proposers: Mapping[str, Proposer],
        cost: StepCost,
        batching: BatchingPolicy = DEFAULT_BATCHING,
    ) -> None:
        """Start empty. `proposers` are ordered, cheapest first; `cost` is where steps teach on."""
        self.config = config
        self.blocks = blocks
        self._batching = batching
        self._fit = StepCostFit(cost)
        self._drafts = DraftPlan(policy, proposers, blocks)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._pending = PendingPrefixes()
        self._step = 0
        self._assumed: StepPlan | None = None  # planned behind, and not applied yet
        self._now_s = 0.0
        self._with_service = 0  # open sequences with a service level
        self._embeddings = 0  # open sequences that are embedded

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._with_service += sequence.has_service
        self._embeddings += sequence.embeds
        self._waiting.append(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and free its blocks at once; no-op if it has ended already."""
        if sequence.state is SequenceState.FINISHED:
            return
        if sequence.state is SequenceState.RUNNING:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        sequence.move_to(SequenceState.FINISHED)
        sequence.finish_reason = reason
        self._with_service -= sequence.has_service
        self._embeddings -= sequence.embeds
        self._give_back(sequence)
        self._drafts.drafting.forget(sequence)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences in the batch, oldest admission first."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences in the queue, next first."""
        return tuple(self._waiting)

    @property
    def cost(self) -> StepCost:
        """What steps cost, as far as those that ran have taught."""
        return self._fit.cost

    @property
    def cost_error(self) -> float:
        """Running median of |measured / predicted - 1| over step times."""
        return self._fit.relative_error

    def load(self) -> WorkerLoad:
        """Return the worker's load."""
        return WorkerLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            kv_blocks_free=self.blocks.num_free,
            kv_blocks_total=self.blocks.num_blocks,
            price=self._drafts.price(self.cost) if self._running else 0.0,
            acceptance=self._drafts.drafting.acceptance,
            proposers=self._drafts.drafting.names,
            step_cost_error=self.cost_error,
        )

    def plan(self, now_s: float | None = None) -> StepPlan | None:
        """Return the next step, or None when there is nothing to do.

        The blocks it needs are allocated. At most `max_step_tokens` tokens.

        Args:
            now_s: the time, which says who is late; None takes that of all steps so far.
        """
        self._now_s = self._now_s if now_s is None else now_s
        self._step += 1
        step = _StepDraft(self.config.max_step_tokens)
        stalled = self._batching.stalls_decodes and self._has_prefills()
        if not stalled:
            self._plan_decodes(step)
            self._plan_drafts(step)
        self._limit_prefills(step)
        self._plan_prefills(step)
        self._admit(step)
        if stalled and not step.work:
            self._plan_decodes(step)
        if not step.work:
            return None
        work = tuple(step.work.values())
        return pooling_plan(work) if self._embeddings else StepPlan(work)

    def plan_behind(self, plan: StepPlan, now_s: float | None = None) -> StepPlan | None:
        """Return the step behind one that was planned last and is not applied yet.

        It takes for granted that every sequence goes on with the token it is about to get, which is
        `PENDING`. Of a sequence that ends after all, `apply` drops what the step behind gives.

        Returns:
            None if the first step's result has to be known before: where a proposer, a grammar or a
            penalty looks at its tokens, where memory is so short that somebody might be preempted,
            or where there is nothing to do without it.
        """
        going_on = [w for w in plan.work if w.sequence.state is SequenceState.RUNNING]
        # A decode takes a block at most, and comes before all who take what is left.
        if self.blocks.num_free < len(self._running) or not all(map(self._goes_on, going_on)):
            return None
        self._assumed = plan
        for work in going_on:
            work.sequence.num_computed = work.confirmed_end
            if work.samples:
                work.sequence.token_ids.append(PENDING)
        return self.plan(now_s)

    def apply(self, plan: StepPlan, result: StepResult) -> list[Emission]:
        """Account for a step: confirm tokens, give back rejected tails, end what has ended."""
        emissions: list[Emission] = []
        assumed, self._assumed = plan is self._assumed, None
        for work, emitted, logprobs in zip(plan.work, result.emitted, result.logprobs, strict=True):
            sequence = work.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue
            if not work.samples:
                sequence.num_computed = work.confirmed_end
                self._confirm_blocks(sequence)
                continue
            if assumed:
                sequence.token_ids.pop()  # here comes the token that was pending
            kept = self._confirm(work, emitted)
            emissions.append((sequence, kept, logprobs[: len(kept)]))
        emissions += [(each, (), ()) for each in embedded(plan, result, self.finish)]
        self._now_s += result.step_s
        if self._with_service:
            for sequence, _, _ in emissions:
                sequence.note_first_token(self._now_s)
        self._fit.observe(plan.size, result.step_s)
        return emissions

    def _goes_on(self, work: SequenceWork) -> bool:
        """Return whether a step can be planned behind this work whatever token it draws.

        Work of such a sequence has no draft: only proposers and grammars make any.
        """
        sequence = work.sequence
        looked_at = sequence.grammar is not None or sequence.request.sampling.counts_tokens
        return not looked_at and not self._drafts.drafting.may_draft(sequence)

    # --- planning -----------------------------------------------------------------------------

    def _plan_decodes(self, step: _StepDraft) -> None:
        """Give every decode its one token, those first that waited longest."""
        # None remaining: the last token is pending.
        decodes = [
            s
            for s in self._running
            if len(s.token_ids) - s.num_computed == 1 and len(s.token_ids) < s.most_tokens
        ]
        decodes.sort(key=_LEAST_RECENTLY_SERVED)
        for sequence in decodes:
            if step.budget <= 0:
                break
            # An earlier decode may have preempted this one.
            if sequence.state is SequenceState.RUNNING and self._make_room(sequence, step):
                self._schedule(step, sequence, 1)

    def _plan_drafts(self, step: _StepDraft) -> None:
        """Add the drafts the policy allows. They preempt nobody, and keep no newcomer out."""
        decodes = [work.sequence for work in step.work.values()]
        if not decodes:
            return
        room = self._room_beside(decodes, step)
        now_s = self._now_s if self._with_service else None
        for sequence, draft in self._drafts.plan(decodes, room, self.cost, now_s):
            step.attach(sequence.key, draft)

    def _room_beside(self, decodes: Many[Sequence], step: _StepDraft) -> Room:
        """Return what a step of these decodes has left for drafts and prompts."""
        newcomer_blocks = self._newcomer_blocks()
        blocks = self.blocks.num_free - newcomer_blocks
        if len(decodes) == len(self._running) and not newcomer_blocks:
            return Room(step.budget, blocks)
        ready = sum(s.pending_tokens for s in self._running if s.pending_tokens > 1)
        if newcomer_blocks:
            ready += prompt_tokens(self._waiting, self.blocks, self._seats, step.budget)
        most = self._most_prefill_tokens(step)
        joining = min(ready, most)
        if not joining:
            return Room(step.budget, blocks)
        # Half of what is left is for prefills, so that drafts never hold them up.
        return Room(step.budget // 2, blocks, joining, most - joining)

    def _has_prefills(self) -> bool:
        """Return whether there are prompt tokens to be fed."""
        return bool(self._newcomer_blocks()) or any(s.pending_tokens > 1 for s in self._running)

    def _limit_prefills(self, step: _StepDraft) -> None:
        """Leave of the step's budget what the batching policy gives to prompts."""
        if step.work and (self._waiting or len(step.work) < len(self._running)):
            step.budget = min(step.budget, self._most_prefill_tokens(step))

    def _most_prefill_tokens(self, step: _StepDraft) -> int:
        """Return how many prompt tokens may join the step as it is, if any wait."""
        now_s = self._now_s if self._with_service else None
        drafting_s = self._drafts.drafting_s  # that of the last step before this one's is known
        view = batch_view(
            *(step.work.values(), self._running, step.budget, now_s, drafting_s),
            cost_error=self._fit.relative_error,
        )
        return self._batching.prefill_tokens(view, self.cost)

    def _newcomer_blocks(self) -> int:
        """Return the blocks of the sequence that comes in next; 0 if none can now."""
        return first_blocks(self._waiting, self.blocks) if self._seats else 0

    @property
    def _seats(self) -> int:
        return self.config.max_num_seqs - len(self._running)

    def _plan_prefills(self, step: _StepDraft) -> None:
        """Continue prefills with what is left of the budget, oldest first."""
        for sequence in tuple(self._running):
            if step.budget <= 0:
                return
            unplanned = sequence.key not in step.work and sequence.state is SequenceState.RUNNING
            if unplanned and sequence.pending_tokens > 1 and self._make_room(sequence, step):
                self._schedule(step, sequence, min(sequence.pending_tokens, step.budget))

    def _admit(self, step: _StepDraft) -> None:
        """Admit waiting sequences in order while budget, batch and memory have room."""
        # No more than a batch is looked at: a burst with one prefix may be long.
        for sequence in tuple(islice(self._waiting, self.config.max_num_seqs)):
            if step.budget <= 0 or not self._seats:
                return
            hashes = sequence.sharable_hashes(self.blocks.block_size)
            if self._prefix_is_pending(hashes):
                continue  # soon it is there to be shared
            try:
                shared = self.blocks.admit(sequence.block_table, hashes, len(sequence.token_ids))
            except OutOfBlocks:
                return
            self._run(sequence, shared)
            self._pending.add(sequence.key, hashes[shared:])
            self._schedule(step, sequence, min(sequence.pending_tokens, step.budget))

    def _prefix_is_pending(self, hashes: list[bytes]) -> bool:
        """Return whether a running prefill is computing the first block that is not cached."""
        cached = self.blocks.num_cached(hashes)
        return cached < len(hashes) and hashes[cached] in self._pending

    def _run(self, sequence: Sequence, shared_blocks: int) -> None:
        """Make a waiting sequence run, `shared_blocks` of whose keys and values are there."""
        self._waiting.remove(sequence)
        sequence.move_to(SequenceState.RUNNING)
        self._running.append(sequence)
        sequence.known_blocks = shared_blocks
        sequence.num_computed = shared_blocks * self.blocks.block_size
        if sequence.last_step < 0:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_tokens)

    def _schedule(self, step: _StepDraft, sequence: Sequence, tokens: int) -> None:
        """Put the next `tokens` pending tokens of the sequence into the step."""
        start, known = sequence.num_computed, sequence.token_ids
        end = start + tokens
        fed = (known[start],) if tokens == 1 else tuple(known[start:end])
        sequence.last_step = self._step
        step.budget -= tokens
        step.work[sequence.key] = SequenceWork(sequence, start, fed, end == len(known))

    def _make_room(self, sequence: Sequence, step: _StepDraft) -> bool:
        """Give the sequence blocks for all its tokens, preempting the youngest if need be.

        Returns False if it had to be preempted itself: whatever else runs is in this step.
        """
        if len(sequence.token_ids) <= len(sequence.block_table) * self.blocks.block_size:
            return True
        while True:
            try:
                self.blocks.extend(sequence.block_table, len(sequence.token_ids))
            except OutOfBlocks:
                victim = self._victim(step)
                self._preempt(victim)
                if victim is sequence:
                    return False
            else:
                return True

    def _victim(self, step: _StepDraft) -> Sequence:
        """Return the youngest running sequence that is not part of this step yet."""
        return max((s for s in self._running if s.key not in step.work), key=lambda s: s.key)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks; it is computed anew, ahead of all that never ran."""
        self._running.remove(sequence)
        self._give_back(sequence)
        sequence.move_to(SequenceState.WAITING)
        sequence.num_computed = 0
        sequence.preemptions += 1
        # The queue is in order of arrival, so it stands behind older ones preempted before.
        at = bisect_left(self._waiting, sequence.key, key=lambda waiting: waiting.key)
        self._waiting.insert(at, sequence)

    def _give_back(self, sequence: Sequence) -> None:
        """Free the sequence's blocks; those with a known prefix stay cached."""
        self._pending.drop(sequence.key)
        self.blocks.release(sequence.block_table)

    # --- accounting ---------------------------------------------------------------------------

    def _confirm(self, work: SequenceWork, emitted: tuple[int, ...]) -> tuple[int, ...]:
        """Append what was emitted to the sequence, and settle its blocks; return what it keeps."""
        sequence, accepted = work.sequence, len(emitted) - 1
        self._drafts.drafting.learn(sequence, emitted)
        kept = self._append(sequence, emitted)
        sequence.num_computed = work.start + len(work.token_ids) + accepted
        within_block = sequence.num_computed % self.blocks.block_size
        fed_one = len(work.token_ids) == 1 and not work.draft.token_ids
        if not (within_block and fed_one) or sequence.finish_reason is not None:
            self._settle(work, kept)
        return kept

    def _settle(self, work: SequenceWork, kept: tuple[int, ...]) -> None:
        """Account for drafts, share full blocks, give back those that are not needed."""
        sequence = work.sequence
        if work.num_drafts:
            # By what was kept: some executors end the walk with the sequence, others walk on.
            sequence.count_draft(work.num_drafts, len(work.draft.walk(kept)))
        self._pending.drop(sequence.key)  # the prompt is computed
        self._confirm_blocks(sequence)
        if sequence.finish_reason is None:
            # The last token is fed next, or has been: to a step planned behind this one.
            self.blocks.trim(sequence.block_table, len(sequence.token_ids))
        else:
            self.finish(sequence, sequence.finish_reason)

    def _confirm_blocks(self, sequence: Sequence) -> None:
        """Let others share the blocks that are full of confirmed tokens."""
        if sequence.num_computed // self.blocks.block_size <= sequence.known_blocks:
            return  # as after most steps
        hashes = sequence.hash_blocks(self.blocks.block_size)
        # What was accepted behind the end of the sequence is in the cache, but not in its tokens.
        full = min(sequence.num_computed // self.blocks.block_size, len(hashes))
        known = range(sequence.known_blocks, full)
        self.blocks.confirm(sequence.block_table, hashes, known)
        sequence.known_blocks = max(full, sequence.known_blocks)

    def _append(self, sequence: Sequence, emitted: tuple[int, ...]) -> tuple[int, ...]:
        """Append tokens to the sequence up to the one that ends it, and return them."""
        tokens, grammar = sequence.token_ids, sequence.grammar
        for count, token in enumerate(emitted, 1):
            tokens.append(token)
            if token in self.config.eos_ids and sequence.heeds_eos:
                sequence.finish_reason = FinishReason.STOP
                return emitted[:count]
            if len(tokens) >= sequence.most_tokens:
                sequence.finish_reason = FinishReason.LENGTH
                return emitted[:count]
            if grammar is not None:
                grammar.accept(token)
        return emitted
