"""The one scheduler: queues, KV blocks and policies in, a `StepPlan` out, a `StepResult` back.

Rules of this file: no clock, no randomness, no device. Decodes go first, least recently served
first, so more decodes than budget means taking turns. Draft slots come next, as many as the
policy allows; they never preempt, and leave half of the rest to prefills. Then prefill chunks, as
far as the batching policy lets decodes wait, and newcomers in order of arrival: a sequence which
cannot be admitted keeps those behind it waiting, so none starves; but one that shares a prefix with
a prefill under way lets others pass and takes the blocks when they are ready. When blocks run out,
the youngest sequence gives its own back and is computed again later (recompute), but for what is
still cached.

Who is sparing comes behind all others in each of these, for a bounded time, gets no drafts, and
goes first when blocks run out. Who is paused is in no step (`Queues`).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Final

from draftgate.backends.core.accounting import Accounting, Details, Emission, details_of
from draftgate.backends.core.batch_view import batch_view
from draftgate.backends.core.draft_plan import DraftPlan, Room
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.embedding import embedded, pooling_plan
from draftgate.backends.core.kv_blocks import KvBlocks, OutOfBlocks
from draftgate.backends.core.newcomers import first_blocks, prompt_tokens
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.core.queues import Queues
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.core.steps import PENDING, SequenceWork, StepPlan, StepResult
from draftgate.backends.types import FinishReason, Pace, StepTrace
from draftgate.policies.batching import Slack
from draftgate.policies.cost_fit import StepCostFit
from draftgate.policies.protocols import BatchingPolicy, SpeculationPolicy
from draftgate.policies.speed import SpeedMeter
from draftgate.policies.step_cost import StepCost
from draftgate.policies.types import WorkerLoad, WorkerSpeed


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


@dataclass(slots=True)
class _StepDraft:
    """The step under construction."""

    budget: int
    work: dict[int, SequenceWork] = field(default_factory=dict)  # by sequence key
    chunks: int = 0
    prompt_tokens: int = 0
    traces: Mapping[int, StepTrace] = field(default_factory=dict)

    def attach(self, key: int, draft: Draft) -> None:
        self.budget -= len(draft)
        self.work[key] = self.work[key]._replace(draft=draft)

    def planned(self) -> StepPlan:
        return StepPlan(tuple(self.work.values()), self.chunks, self.prompt_tokens, self.traces)


DEFAULT_BATCHING: Final[BatchingPolicy] = Slack()

_LEAST_RECENTLY_SERVED: Final = attrgetter("last_step", "key")

SPARING_STEPS: Final = 64
"""How many steps later a sparing sequence is taken to have been served than it was. So all others
come first as long as each of them is served within so many steps; beyond that it takes turns with
them. At steps of 10 to 30 ms a slow reader then waits for a token for 1 to 2 seconds, less than the
30 s after which the most impatient of usual proxies drops a silent connection."""


def _sparing_last(sequence: Sequence) -> tuple[int, int]:
    """Order decodes where some are sparing."""
    return sequence.last_step + SPARING_STEPS * (sequence.pace is Pace.SPARING), sequence.key


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
        self._drafts = DraftPlan(policy, proposers, blocks, cost)
        self._queues = Queues(blocks)
        self._accounting = Accounting(self._queues, self._drafts, config.eos_ids, self.finish)
        self._step = 0
        self._assumed: StepPlan | None = None  # planned behind, and not applied yet
        self._now_s = 0.0
        self._with_service = 0  # open sequences with a service level
        self._traced = 0  # open sequences whose steps are told
        self._embeddings = 0  # open sequences that are embedded
        self._told: set[int] = set()  # keys of those with more to tell than their next tokens
        self._speed = SpeedMeter(cost, config.max_step_tokens)
        self._decoding = 0, 0  # sequences and KV tokens of the last step that decoded
        self._rates: tuple[WorkerSpeed, float] | None = None  # and price, since the last step
        self._ran_s: float | None = None  # by the last step, if no prompts were fed

    def add(self, sequence: Sequence, now_s: float | None = None) -> None:
        """Queue a new sequence.

        Args:
            now_s: the time; None takes that of all steps so far.
        """
        sequence.queued_s = self._now_s if now_s is None else now_s
        self._with_service += sequence.has_service
        self._traced += sequence.request.traced
        self._embeddings += sequence.embeds
        self._queues.add(sequence)

    def pace(self, sequence: Sequence, pace: Pace) -> None:
        """Change how far a sequence goes on, from the next step on; no-op if it has ended."""
        if sequence.state is not SequenceState.FINISHED:
            self._queues.pace(sequence, pace)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and free its blocks at once; no-op if it has ended already."""
        if sequence.state is SequenceState.FINISHED:
            return
        self._queues.remove(sequence)
        sequence.finish_reason = reason
        self._with_service -= sequence.has_service
        self._traced -= sequence.request.traced
        self._embeddings -= sequence.embeds
        self._told.discard(sequence.key)
        self._drafts.drafting.forget(sequence)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Sequences in the batch, oldest admission first."""
        return tuple(self._queues.running)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        """Sequences in the queue, next first."""
        return tuple(self._queues.waiting)

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
        speed, price = self._rates or self._measured()
        return WorkerLoad(
            running=len(self._queues.running) - len(self._queues.leaving),
            waiting=len(self._queues.waiting),
            kv_blocks_free=self.blocks.num_free,
            kv_blocks_total=self.blocks.num_blocks,
            price=price if self._queues.running else 0.0,
            acceptance=self._drafts.drafting.acceptance,
            proposers=self._drafts.drafting.names,
            step_cost_error=self.cost_error,
            max_sequences=self.config.max_num_seqs,
            prompt_tokens=self._queues.prefill_tokens,
            step_tokens=self.config.max_step_tokens,
            kv_block_tokens=self.blocks.block_size,
            speed=speed,
            paused=len(self._queues.paused) + len(self._queues.leaving),
            steps=self._step,
        )

    def _measured(self) -> tuple[WorkerSpeed, float]:
        """Return speed and price, which change with steps only and are asked for by each request.

        Working them out is half of what `load` costs: 9 us (one core, Zen 4, 2026-11-21).
        """
        speed = self._speed.speed(self.cost, *self._decoding)
        self._rates = speed, self._drafts.price(self.cost)
        return self._rates

    def plan(self, now_s: float | None = None) -> StepPlan | None:
        """Return the next step, or None when there is nothing to do.

        The blocks it needs are allocated. At most `max_step_tokens` tokens.

        Args:
            now_s: the time, which says who is late; None takes that of all steps so far.
        """
        self._now_s = self._now_s if now_s is None else now_s
        self._rates = None
        self._queues.park()
        self._learn_drafting(self._speed.begin(self._now_s))
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
            self._speed.rest()
            return None
        plan = step.planned()
        return pooling_plan(plan) if self._embeddings else plan

    def plan_behind(self, plan: StepPlan, now_s: float | None = None) -> StepPlan | None:
        """Return the step behind one that was planned last and is not applied yet.

        It takes for granted that every sequence goes on with the token it is about to get, which is
        `PENDING`. Of a sequence that ends after all, `apply` drops what the step behind gives.

        Returns:
            None if the first step's result has to be known before: where a proposer, a grammar or a
            penalty looks at its tokens, where memory is so short that somebody might be preempted,
            where somebody was paused, or where there is nothing to do without it.
        """
        if self._queues.leaving:
            return None
        going_on = [w for w in plan.work if w.sequence.state is SequenceState.RUNNING]
        # A decode takes a block at most, and comes before all who take what is left.
        if self.blocks.num_free < len(self._queues.running) or not all(
            map(self._goes_on, going_on)
        ):
            return None
        self._assumed = plan
        for work in going_on:
            work.sequence.num_computed = work.confirmed_end
            if work.samples:
                work.sequence.token_ids.append(PENDING)
        return self.plan(now_s)

    def apply(
        self, plan: StepPlan, result: StepResult, now_s: float | None = None
    ) -> list[Emission]:
        """Account for a step: confirm tokens, give back rejected tails, end what has ended.

        Args:
            now_s: when it ended; None adds its seconds to the time.
        """
        emissions: list[Emission] = []
        assumed, self._assumed = plan is self._assumed, None
        self._now_s = self._now_s + result.step_s if now_s is None else now_s
        told = self._told
        for work, emitted, logprobs in zip(plan.work, result.emitted, result.logprobs, strict=True):
            sequence = work.sequence
            if sequence.state is not SequenceState.RUNNING:
                continue
            if not work.samples:
                self._accounting.fed(work, self._now_s)
                continue
            if assumed:
                sequence.token_ids.pop()  # here comes the token that was pending
            is_told = told and sequence.key in told  # before it may end
            kept = self._accounting.confirm(work, emitted)
            details = self._details(plan, work, kept) if is_told else None
            emissions.append((sequence, kept, logprobs[: len(kept)], details))
        emissions += [(each, (), (), None) for each in embedded(plan, result, self.finish)]
        self._learn_costs(plan, result)
        return emissions

    def _details(self, plan: StepPlan, work: SequenceWork, kept: tuple[int, ...]) -> Details:
        """Return what there is to tell of a sequence's first tokens, or of a traced one's any."""
        sequence = work.sequence
        if not sequence.request.traced:
            self._told.discard(sequence.key)
        return details_of(plan, work, kept, self._now_s)

    def _learn_costs(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from what a step took, and how far it came."""
        size = plan.size
        self._rates = None
        self._fit.observe(size, result.step_s)
        self._ran_s = None if plan.chunks else result.step_s
        decodes = size.sequences - plan.chunks
        drafted = size.tokens - plan.prompt_tokens > decodes
        accepted = sum(len(e) - 1 for e in result.emitted if len(e) > 1) if drafted else 0
        self._speed.ran(decodes, decodes + accepted, plan.prompt_tokens)
        if decodes:
            self._decoding = decodes, size.kv_tokens * decodes // size.sequences

    def _learn_drafting(self, whole_s: float | None) -> None:
        """Learn what the host took of the last step, which began so long before this one."""
        if whole_s is not None and self._ran_s is not None:
            self._drafts.took(self._ran_s, whole_s)
        self._ran_s = None

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
            for s in self._queues.running
            if len(s.token_ids) - s.num_computed == 1 and len(s.token_ids) < s.most_tokens
        ]
        decodes.sort(key=_sparing_last if self._queues.num_sparing else _LEAST_RECENTLY_SERVED)
        for sequence in decodes:
            if step.budget <= 0:
                break
            # An earlier decode may have preempted this one.
            if sequence.state is SequenceState.RUNNING and self._queues.make_room(
                sequence, step.work
            ):
                self._schedule(step, sequence, 1)

    def _plan_drafts(self, step: _StepDraft) -> None:
        """Add the drafts the policy allows. They preempt nobody, and keep no newcomer out."""
        decodes = [work.sequence for work in step.work.values()]
        if not decodes:
            return
        room = self._room_beside(decodes, step)
        now_s = self._now_s if self._with_service else None
        traced = self._traced > 0
        for sequence, draft in self._drafts.plan(decodes, room, self.cost, now_s, traced=traced):
            step.attach(sequence.key, draft)
        step.traces = self._drafts.traces

    def _room_beside(self, decodes: Many[Sequence], step: _StepDraft) -> Room:
        """Return what a step of these decodes has left for drafts and prompts."""
        newcomer_blocks = self._newcomer_blocks()
        blocks = self.blocks.num_free - newcomer_blocks
        if len(decodes) == len(self._queues.running) and not newcomer_blocks:
            return Room(step.budget, blocks)
        ready = sum(s.pending_tokens for s in self._queues.running if s.pending_tokens > 1)
        if newcomer_blocks:
            ready += prompt_tokens(self._queues.waiting, self.blocks, self._seats, step.budget)
        most = self._most_prefill_tokens(step)
        joining = min(ready, most)
        if not joining:
            return Room(step.budget, blocks)
        # Half of what is left is for prefills, so that drafts never hold them up.
        return Room(step.budget // 2, blocks, joining, most - joining)

    def _has_prefills(self) -> bool:
        """Return whether there are prompt tokens to be fed."""
        return bool(self._newcomer_blocks()) or any(
            s.pending_tokens > 1 for s in self._queues.running
        )

    def _limit_prefills(self, step: _StepDraft) -> None:
        """Leave of the step's budget what the batching policy gives to prompts."""
        if step.work and (self._queues.waiting or len(step.work) < len(self._queues.running)):
            step.budget = min(step.budget, self._most_prefill_tokens(step))

    def _most_prefill_tokens(self, step: _StepDraft) -> int:
        """Return how many prompt tokens may join the step as it is, if any wait."""
        now_s = self._now_s if self._with_service else None
        drafting_s = self._drafts.drafting_s  # that of the last step before this one's is known
        view = batch_view(
            *(step.work.values(), self._queues.running, step.budget, now_s, drafting_s),
            cost_error=self._fit.relative_error,
        )
        return self._batching.prefill_tokens(view, self.cost)

    def _newcomer_blocks(self) -> int:
        """Return the blocks of the sequence that comes in next; 0 if none can now."""
        return first_blocks(self._queues.waiting, self.blocks) if self._seats else 0

    @property
    def _seats(self) -> int:
        return self.config.max_num_seqs - len(self._queues.running)

    def _plan_prefills(self, step: _StepDraft) -> None:
        """Continue prefills with what is left of the budget, oldest first."""
        running = tuple(self._queues.running)
        if self._queues.num_sparing:
            running = tuple(sorted(running, key=attrgetter("pace")))
        for sequence in running:
            if step.budget <= 0:
                return
            unplanned = sequence.key not in step.work and sequence.state is SequenceState.RUNNING
            if (
                unplanned
                and sequence.pending_tokens > 1
                and self._queues.make_room(sequence, step.work)
            ):
                self._feed(step, sequence)

    def _admit(self, step: _StepDraft) -> None:
        """Admit waiting sequences in order while budget, batch and memory have room."""
        # No more than a batch is looked at: a burst with one prefix may be long.
        for sequence in tuple(islice(self._queues.waiting, self.config.max_num_seqs)):
            if step.budget <= 0 or not self._seats:
                return
            try:
                admitted = self._queues.admit(sequence)
            except OutOfBlocks:
                return
            if admitted:
                if sequence.scheduled_s is None:
                    sequence.scheduled_s = self._now_s
                    self._told.add(sequence.key)
                self._feed(step, sequence)

    def _feed(self, step: _StepDraft, sequence: Sequence) -> None:
        """Put as much of what a prefill has left into the step as fits."""
        tokens = min(sequence.pending_tokens, step.budget)
        step.chunks += 1
        step.prompt_tokens += tokens
        self._queues.feed(sequence, tokens)
        self._schedule(step, sequence, tokens)

    def _schedule(self, step: _StepDraft, sequence: Sequence, tokens: int) -> None:
        """Put the next `tokens` pending tokens of the sequence into the step."""
        start, known = sequence.num_computed, sequence.token_ids
        end = start + tokens
        fed = (known[start],) if tokens == 1 else tuple(known[start:end])
        sequence.last_step = self._step
        step.budget -= tokens
        step.work[sequence.key] = SequenceWork(sequence, start, fed, end == len(known))
