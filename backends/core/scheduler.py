"""The scheduler, which plans each step from queues, KV blocks and policies, and applies its result.

The scheduler has no clock, no randomness and no device. It fills a step in this order:

1. Decodes, least recently served first. They take turns if the budget is smaller than their number.
2. Draft slots, as many as the policy allows. They never preempt, and leave half of the remaining
   budget to prompts.
3. Prompt chunks, as far as the batching policy lets decodes wait.
4. New sequences in order of class and arrival (`Queues`). One that cannot be admitted blocks all
   later ones, so none starves. A sequence lets others pass while a prefill computes blocks that it
   can share. The chunks of documents to embed come after new sequences that precede them.

When blocks run out, the last sequence in this order releases its blocks and is recomputed later,
except for blocks that are still cached. Sparing sequences (those of slow readers) are last
everywhere for a bounded time, get no drafts, and are preempted first. While others run, they decode
no faster than their clients can take tokens. For paused and offline sequences, see `Queues`.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import ClassVar, Final

from draftgate.backends.core.accounting import Accounting, Emission, step_details, verified_draft
from draftgate.backends.core.draft_plan import DraftPlan, SpareCapacity
from draftgate.backends.core.drafting import Drafting
from draftgate.backends.core.kv_blocks import KvBlocks, OutOfBlocks
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.core.queues import LAST, Queues
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.core.steps import PENDING, StepBuilder, StepPlan, StepResult
from draftgate.backends.core.urgency import urgency_of
from draftgate.backends.types import FinishReason, Pace
from draftgate.policies.batching import Slack
from draftgate.policies.costs.speed import SpeedMeter
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.costs.step_cost_fit import StepCostFit
from draftgate.policies.protocols import BatchingPolicy, SpeculationPolicy
from draftgate.policies.speculation.revision import REVIEW_STEPS
from draftgate.policies.turns import StepUrgency
from draftgate.policies.types import WorkerLoad, WorkerSpeed


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a batch.

    Attributes:
        max_num_seqs: maximum number of running sequences.
        max_step_tokens: maximum number of tokens in a step: decodes, draft slots and prompt chunks.
        eos_ids: tokens that end a sequence.
    """

    max_num_seqs: int
    max_step_tokens: int
    eos_ids: frozenset[int] = frozenset()


DEFAULT_BATCHING: Final[BatchingPolicy] = Slack()


class Scheduler:
    """Decides the work of each step. Calls of `plan` and `apply` alternate.

    Attributes:
        scores: survival estimates of drafts.
    """

    drafting_class: ClassVar[type[Drafting]] = Drafting
    cost_class: ClassVar[type[StepCostFit]] = StepCostFit

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: KvBlocks,
        policy: SpeculationPolicy,
        proposers: Mapping[str, Proposer],
        cost: StepCost,
        batching: BatchingPolicy = DEFAULT_BATCHING,
    ) -> None:
        """Start empty.

        Args:
            proposers: proposers, cheapest first.
            cost: initial step costs, which measured steps refine.
        """
        self.config, self.blocks = config, blocks
        self._batching = batching
        self._fit = self.cost_class(cost)
        self._drafting = self.drafting_class(proposers)
        self.scores = self._drafting.scores
        self._drafts = DraftPlan(policy, self._drafting, blocks, cost)
        self._queues = Queues(blocks)
        self._accounting = Accounting(self._queues, self._drafting, config.eos_ids, self.finish)
        self._step, self._now_s = 0, 0.0
        self._assumed: StepPlan | None = None  # another step was planned ahead of its result
        self._with_service = self._traced = 0  # open sequences with a service level, traced ones
        self._detailed: set[int] = set()  # keys of sequences whose next tokens need details
        self._speed = SpeedMeter(cost, config.max_step_tokens)
        self._decoding = 0, 0  # sequences and KV tokens of the last step that decoded
        self._measured: tuple[WorkerSpeed, float] | None = None  # speed and price, see `load`
        self._load: WorkerLoad | None = None  # since the last change
        self._load_free = 0  # number of free blocks at that time

    def add(self, sequence: Sequence, now_s: float | None = None) -> None:
        """Queue a new sequence.

        Args:
            now_s: present time in seconds, or None for the sum of the step times.
        """
        sequence.queued_s, self._load = self._now_s if now_s is None else now_s, None
        self._with_service += sequence.has_service
        self._traced += sequence.request.traced
        self._queues.add(sequence)

    def set_pace(self, sequence: Sequence, pace: Pace, tpot_s: float = 0.0) -> None:
        """Change a sequence's pace from the next step on, unless it has ended.

        Args:
            tpot_s: seconds in which the client of a sparing sequence can take a token, or 0 if
                unknown.
        """
        if sequence.state is not SequenceState.FINISHED:
            self._load = None
            self._queues.set_pace(sequence, pace)
            sequence.set_client_tpot(tpot_s if pace is Pace.SPARING else 0.0, self._now_s)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence and free its blocks immediately, unless it has ended already."""
        if sequence.state is SequenceState.FINISHED:
            return
        self._load = None
        self._queues.remove(sequence, self._now_s)
        sequence.finish_reason = reason
        self._with_service -= sequence.has_service
        self._traced -= sequence.request.traced
        self._detailed.discard(sequence.key)
        self._drafting.forget(sequence)

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
        """The step costs learned so far."""
        return self._fit.cost

    @property
    def cost_error(self) -> float:
        """Running median of |measured / predicted - 1| over step times."""
        return self._fit.relative_error

    def load(self) -> WorkerLoad:
        """Return the worker's load."""
        # Each request reads the load several times between two changes. A transfer changes blocks.
        if self._load is None or self._load_free != self.blocks.num_free:
            self._load, self._load_free = self._current_load(), self.blocks.num_free
        return self._load

    def _current_load(self) -> WorkerLoad:
        if self._measured is None:
            cost = self._fit.cost
            self._measured = self._speed.speed(cost, *self._decoding), self._drafts.price(cost)
        (speed, price), queues = self._measured, self._queues
        running, waiting, blocks_free = queues.online_load
        return WorkerLoad(
            running=running,
            waiting=waiting,
            kv_blocks_free=blocks_free,
            kv_blocks_total=self.blocks.num_blocks,
            price=price if running + len(queues.leaving) else 0.0,
            acceptance=self._drafting.acceptance,
            proposers=self._drafting.names,
            step_cost_error=self._fit.relative_error,
            max_sequences=self.config.max_num_seqs,
            prompt_tokens=queues.prefill_tokens - queues.offline_tokens,
            step_tokens=self.config.max_step_tokens,
            kv_block_tokens=self.blocks.block_size,
            speed=speed,
            paused=len(queues.paused) + len(queues.leaving),
            steps=self._step,
            head_tokens=queues.head_tokens,
            urgent=queues.num_urgent,
            drafts_lose=self._drafts.saved_time.drafts_lose,
        )

    def urgency(self, now_s: float) -> StepUrgency | None:
        """Return the urgency of the next step, which may still be empty, or None without work."""
        running, waiting = self._queues.running, self._queues.waiting
        if not (running or waiting):
            return None
        tokens = min(len(running) + self._queues.prefill_tokens, self.config.max_step_tokens)
        step_s = self.cost.seconds(tokens, self._decoding[1], len(running))
        if not self._with_service:
            return StepUrgency(step_s=step_s)
        return urgency_of((*running, *waiting), now_s, step_s)

    def interrupt(self) -> None:
        """Record that other workers may use the device before the next step."""
        self._drafts.saved_time.interrupt()

    def plan(self, now_s: float | None = None) -> StepPlan | None:
        """Return the next step, with blocks allocated, or None if the worker is idle.

        Args:
            now_s: present time in seconds, compared with deadlines, or None for the sum of the step
                times.
        """
        self._now_s = self._now_s if now_s is None else now_s
        self.blocks.expire_holds(self._now_s)
        self._queues.park()
        self._learn_host_time()
        plan = self._fill_step()
        if plan is None:
            self._speed.record_idle()
        return plan

    def _fill_step(self, *, ahead: bool = False) -> StepPlan | None:
        """Return the next step, or None without work.

        Args:
            ahead: whether the previous step has not ended, so its tokens are unknown.
        """
        self._measured = self._load = None
        self._step += 1  # counts without work, too, because an idle worker does not hang
        if not (self._queues.running or self._queues.waiting):
            return None
        step = StepBuilder(self._step, self.config.max_step_tokens)
        with_offline = not self._queues.offline_waits()  # before prompts are fed
        stalled = self._batching.stalls_decodes and self._has_prefills()
        if self._queues.running and not stalled:
            self._plan_decodes(step)
            self._plan_drafts(step, ahead=ahead)
        self._limit_prefills(step)
        self._plan_prefills(step)
        self._admit(step, with_offline=with_offline)
        if not step.work and self._queues.running:  # stalled decodes, or slow clients
            self._plan_decodes(step, early=True)
        return step.build() if step.work else None

    def plan_ahead(self, plan: StepPlan, now_s: float | None = None) -> StepPlan | None:
        """Return the step after a step that was planned last and is not applied yet.

        The scheduler assumes that every sequence continues with its next token, `PENDING`. If a
        sequence ends instead, `apply` drops its tokens of the next step. The new step has no
        drafts, because they would follow unknown tokens. If the running step was planned ahead too,
        its lookups run now. So a draft that pays is verified at most one step late.

        Returns:
            None if the result must be known first: the step verifies drafts, a draft pays, a
            grammar, a penalty or a bad word reads its tokens, or a sequence may be preempted or
            paused. None also if the worker has no other work.
        """
        self._drafts.plans_ahead = True
        if self._queues.must_park:
            return None
        continuing = [w for w in plan.work if w.sequence.state is SequenceState.RUNNING]
        # A decode takes one block at most, and precedes all other work that takes blocks. So no
        # decode is preempted if each running sequence has a free block.
        if self.blocks.num_free < len(self._queues.running) or not all(
            work.continues_blindly for work in continuing
        ):
            return None
        if self._drafts.draft_pays(self.cost):
            return None
        self._assumed = plan
        for work in continuing:
            work.sequence.num_computed = work.confirmed_end
            if work.samples:
                work.sequence.token_ids.append(PENDING)
        self._now_s = self._now_s if now_s is None else now_s
        return self._fill_step(ahead=True)

    def apply(
        self, plan: StepPlan, result: StepResult, now_s: float | None = None
    ) -> list[Emission]:
        """Account for a step: confirm tokens, remove rejected drafts, finish sequences.

        Args:
            now_s: end of the step in seconds, or None to add its duration to the time.
        """
        emissions: list[Emission] = []
        assumed, self._assumed = plan is self._assumed, None
        self._now_s = self._now_s + result.step_s if now_s is None else now_s
        if plan.scored:
            self._accounting.keep_prompt_logprobs(plan, result)
        running = SequenceState.RUNNING
        for work, emitted, logprobs in zip(plan.work, result.emitted, result.logprobs, strict=True):
            sequence = work.sequence
            if sequence.state is not running:
                continue
            if not work.samples:
                self._accounting.confirm_chunk(work, self._now_s)
                if sequence.ends_with_prompt and not (sequence.embeds or sequence.pending_tokens):
                    emissions.append(self._accounting.finish_prompt(sequence))
                continue
            if assumed:
                sequence.token_ids.pop()  # the pending token, which is known now
            detailed = sequence.key in self._detailed  # checked before the sequence may end
            kept = self._accounting.confirm_tokens(work, emitted)
            details = step_details(plan, work, self._now_s) if detailed else None
            if detailed and not sequence.request.traced:
                self._detailed.discard(sequence.key)
            draft = verified_draft(work) if work.draft.token_ids else None
            emissions.append((sequence, kept, logprobs and logprobs[: len(kept)], draft, details))
        self._accounting.learn_drafts(emissions)
        emissions += self._accounting.finish_embeddings(plan, result)
        self._learn_costs(plan, result)
        if assumed:
            self._learn_host_time()  # the device begins the step that was planned ahead
        return emissions

    def _learn_costs(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step's duration and its number of tokens."""
        size = plan.size
        self._drafts.record_step(plan, result, self._fit.cost)
        self._measured = self._load = None
        if not plan.scored:  # the LM head of scored rows takes time that the cost does not contain
            self._fit.add_step(size, result.step_s)
        decodes = size.sequences - plan.chunks
        accepted = sum(map(len, result.accepted))
        self._speed.record_step(decodes, decodes + accepted, plan.prompt_tokens)
        if decodes:
            self._decoding = decodes, size.kv_tokens * decodes // size.sequences

    def _learn_host_time(self) -> None:
        """Learn the host's share of the last step, which ends as the next step begins."""
        self._drafts.observe_time(self._speed.begin_step(self._now_s), self._fit.cost)

    def _plan_decodes(self, step: StepBuilder, *, early: bool = False) -> None:
        """Feed one token to every decode, starting with the longest wait (`Queues.decodes`)."""
        running, block_size = SequenceState.RUNNING, self.blocks.block_size
        for sequence in self._queues.decodes(None if early else self._now_s):
            if step.budget <= 0:
                break
            # An earlier decode may have preempted this sequence.
            if sequence.state is running and (
                len(sequence.token_ids) <= len(sequence.block_table) * block_size
                or self._queues.extend_or_preempt(sequence, step.work)
            ):
                step.add(sequence, 1)
                if sequence.client_tpot_s:
                    sequence.defer_decode(self._now_s)

    def _plan_drafts(self, step: StepBuilder, *, ahead: bool) -> None:
        """Add the drafts that the policy allows, without delaying or preempting other sequences.

        Args:
            ahead: whether to plan without drafts, because the last tokens are unknown.
        """
        decodes = [work.sequence for work in step.work.values()]
        if not decodes:
            return
        spare = self._spare_capacity(decodes, step)
        now_s = self._now_s if self._with_service else None
        traced = self._traced > 0
        for sequence, draft in self._drafts.plan(
            decodes, spare, self._fit.cost, now_s, traced=traced, ahead=ahead
        ):
            step.attach_draft(sequence.key, draft)
        step.traces = self._drafts.traces
        self._drafts.review(decodes, self._now_s, due=not self._step % REVIEW_STEPS)

    def _spare_capacity(self, decodes: Many[Sequence], step: StepBuilder) -> SpareCapacity:
        """Return the capacity that a step of these decodes leaves for drafts and prompts."""
        next_blocks = self._next_blocks()
        blocks = self.blocks.num_free - next_blocks
        if len(decodes) == len(self._queues.running) and not next_blocks:
            return SpareCapacity(step.budget, blocks)
        ready = sum([n for s in self._queues.running if (n := s.pending_tokens) > 1])
        if next_blocks:
            ready += self._queues.waiting_prompt_tokens(self._free_sequences, step.budget)
        most = self._most_prefill_tokens(step)
        joining = min(ready, most)
        if not joining:
            return SpareCapacity(step.budget, blocks)
        # Half of the remaining budget is for prompts, so that drafts never block them.
        return SpareCapacity(step.budget // 2, blocks, joining, most - joining)

    def _has_prefills(self) -> bool:
        """Return whether a sequence has prompt tokens to feed."""
        return bool(self._next_blocks()) or any(s.pending_tokens > 1 for s in self._queues.running)

    def _limit_prefills(self, step: StepBuilder) -> None:
        """Reduce the budget to the tokens that the batching policy grants to prompts."""
        if step.work and (self._queues.waiting or len(step.work) < len(self._queues.running)):
            step.budget = min(step.budget, self._most_prefill_tokens(step))

    def _most_prefill_tokens(self, step: StepBuilder) -> int:
        """Return how many prompt tokens may join the step in its present state."""
        now_s = self._now_s if self._with_service else None
        # Before this step's drafts are planned, `drafting_s` is the value of the last step.
        drafting_s, error = self._drafts.drafting_s, self._fit.relative_error
        view = step.view(self._queues.running, now_s, self.cost, drafting_s, error)
        return self._batching.prefill_tokens(view, self.cost)

    def _next_blocks(self) -> int:
        """Return how many blocks the next sequence needs, or 0 if no sequence can be admitted."""
        return self._queues.next_blocks() if self._free_sequences else 0

    @property
    def _free_sequences(self) -> int:
        return self.config.max_num_seqs - len(self._queues.running)

    def _plan_prefills(self, step: StepBuilder) -> None:
        """Continue prefills until the budget is used."""
        if len(step.work) == len(self._queues.running):
            return  # the usual case: all running sequences decode in this step
        for sequence in self._queues.prefills():
            if sequence.is_document:
                self._admit(step, with_offline=False, before=sequence.order)
            if step.budget <= 0:
                return
            # A sequence earlier in this loop may have preempted this sequence.
            unplanned = sequence.key not in step.work and sequence.state is SequenceState.RUNNING
            unfinished = unplanned and sequence.pending_tokens > 1
            if unfinished and self._queues.extend_or_preempt(sequence, step.work):
                self._feed(step, sequence)

    def _admit(
        self, step: StepBuilder, *, with_offline: bool, before: tuple[float, int] = LAST
    ) -> None:
        """Admit waiting sequences up to a place in the order while the limits allow it."""
        # Consider at most one batch, because many sequences may wait for the same prefix.
        for sequence in self._queues.next(self.config.max_num_seqs, with_offline=with_offline):
            if step.budget <= 0 or not self._free_sequences or sequence.order > before:
                return
            try:
                admitted = self._queues.admit(sequence)
            except OutOfBlocks:
                return
            if admitted:
                if sequence.scheduled_s is None:
                    sequence.scheduled_s = self._now_s
                    self._detailed.add(sequence.key)
                self._feed(step, sequence)

    def _feed(self, step: StepBuilder, sequence: Sequence) -> None:
        self._queues.note_fed(sequence, step.add_chunk(sequence))
        if sequence.next_ids and step.work[sequence.key].samples:
            step.attach_next(sequence.key, self._drafts.take_next(sequence, step.budget))
