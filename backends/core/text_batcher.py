"""A worker without I/O whose texts each take one step as a whole, as encoders require.

An encoder has no KV cache, so a text cannot be split over steps. Texts of a batch class
(`BATCH_PRIORITY` or later) run in steps of their own, only while no other text waits. These steps
are bounded, so a text that arrives waits for at most one of them. Within a class, texts run by
priority, then in order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count

from draftgate.backends.core.accounting import Emission
from draftgate.backends.core.admission import Admission
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.core.steps import SequenceWork, StepPlan, StepResult
from draftgate.backends.core.urgency import urgency_of
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, FinishReason, GenerationRequest, Pace, Task
from draftgate.policies.costs.speed import SpeedMeter
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.costs.step_cost_fit import StepCostFit
from draftgate.policies.turns import StepUrgency
from draftgate.policies.types import BATCH_PRIORITY, WorkerLoad


@dataclass(frozen=True, slots=True)
class TextLimits:
    """The limits of a text worker.

    Attributes:
        max_text_tokens: the longest text.
        max_step_tokens: maximum tokens of a step. A longer text has a step of its own.
        batch_step_tokens: the same for texts of a batch class.
        max_sequences: maximum texts that the gateway should send at the same time. Texts take no
            memory before their step, and wait here by class, so the number may be large.
    """

    max_text_tokens: int
    max_step_tokens: int
    batch_step_tokens: int
    max_sequences: int


class TextBatcher:
    """The texts of a worker, and the plans of its steps. The object is not thread-safe.

    Attributes:
        tokenizer: the model's tokenizer.
        admission: checks whether a request can run on this worker.
    """

    def __init__(
        self, limits: TextLimits, tokenizer: Tokenizer, cost: StepCost, task: Task = Task.EMBED
    ) -> None:
        """Start empty.

        Args:
            task: the only task of the worker.
            cost: initial step costs, which measured steps refine.
        """
        self._limits = limits
        self.tokenizer = tokenizer
        longest = limits.max_text_tokens
        self.admission = Admission(tokenizer, longest, longest, tasks=(task,))
        self._fit = StepCostFit(cost)
        self._speed = SpeedMeter(cost, limits.max_step_tokens)
        self._keys = count()
        self._open: dict[str, Sequence] = {}
        self._waiting: list[tuple[int, int, Sequence]] = []  # a heap by priority and arrival
        self._running = 0  # texts of the step in progress
        self._waiting_tokens = {False: 0, True: 0}  # by whether they are batch work
        self._step = 0
        self._now_s = 0.0

    @property
    def cost(self) -> StepCost:
        """The step costs learned so far."""
        return self._fit.cost

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended."""
        return tuple(self._open)

    def submit(self, request: GenerationRequest, now_s: float | None = None) -> None:
        """Queue a text that `admission` accepted.

        Args:
            now_s: time of its arrival in seconds, or None for the sum of the step times.
        """
        (choice,) = request.choices
        sequence = Sequence.for_choice(next(self._keys), request, choice)
        sequence.queued_s = self._now_s if now_s is None else now_s
        self._open[request.request_id] = sequence
        self._waiting_tokens[_is_batch(sequence)] += sequence.prompt_tokens
        heappush(self._waiting, (request.service.priority, sequence.key, sequence))

    def cancel(self, request_id: str) -> None:
        """End a request, unless it has ended. A step in progress computes its text in vain."""
        sequence = self._open.pop(request_id, None)
        if sequence is None:
            return
        if sequence.state is SequenceState.WAITING:
            self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
            heapify(self._waiting)
            self._waiting_tokens[_is_batch(sequence)] -= sequence.prompt_tokens
        sequence.move_to(SequenceState.FINISHED)
        sequence.finish_reason = FinishReason.ABORT

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float = 0.0) -> None:
        """Ignore the pace, because a text has a single delta, which a slow reader cannot delay."""

    def load(self) -> WorkerLoad:
        """Return the load, without offline texts.

        Without KV blocks or a maximum step, the gateway counts texts alone.
        """
        offline = [text.prompt_tokens for _, _, text in self._waiting if text.offline]
        return WorkerLoad(
            running=self._running,
            waiting=len(self._waiting) - len(offline),
            kv_blocks_free=0,
            kv_blocks_total=0,
            price=0.0,
            acceptance=0.0,
            proposers=(),
            step_cost_error=self._fit.relative_error,
            max_sequences=self._limits.max_sequences,
            prompt_tokens=sum(self._waiting_tokens.values()) - sum(offline),
            speed=self._speed.speed(self.cost, 0, 0),
            steps=self._step,
            urgent=sum(each.request.service.priority < 0 for each in self._open.values()),
        )

    def urgency(self, now_s: float) -> StepUrgency | None:
        """Return the urgency of the next step, or None if no text waits."""
        if not self._waiting:
            return None
        first = self._waiting[0][2]
        tokens = min(self._waiting_tokens[_is_batch(first)], self._step_tokens(first))
        tokens = max(tokens, first.prompt_tokens)
        # Only the first text is in the step in any case.
        return urgency_of([first], now_s, self.cost.seconds(tokens))

    def interrupt(self) -> None:
        """Ignore that other workers may use the device, because no cost depends on the host."""

    def plan(self, now_s: float | None = None) -> StepPlan | None:
        """Return the next step, or None if the worker is idle.

        Args:
            now_s: present time in seconds, or None for the sum of the step times.
        """
        self._now_s = self._now_s if now_s is None else now_s
        self._speed.begin_step(self._now_s)
        self._step += 1
        texts = list(self._take())
        self._running = sum(not text.offline for text in texts)
        if not texts:
            self._speed.record_idle()
            return None
        work = tuple(SequenceWork(text, 0, tuple(text.token_ids), samples=False) for text in texts)
        tokens = sum(each.num_tokens for each in work)
        return StepPlan(work, len(work), tokens, pooled=tuple(range(len(work))))

    def _take(self) -> Iterable[Sequence]:
        """Remove the texts of the next step from the queue. They are of one class."""
        if not self._waiting:
            return
        first = self._waiting[0][2]
        tokens, budget = 0, self._step_tokens(first)
        while self._waiting:
            sequence = self._waiting[0][2]
            tokens += sequence.prompt_tokens
            if sequence.prompt_tokens < tokens and tokens > budget:
                return  # the first text always runs
            if _is_batch(sequence) is not _is_batch(first):
                return
            heappop(self._waiting)
            self._waiting_tokens[_is_batch(sequence)] -= sequence.prompt_tokens
            sequence.move_to(SequenceState.RUNNING)
            sequence.scheduled_s = self._now_s
            yield sequence

    def _step_tokens(self, first: Sequence) -> int:
        """Return the maximum tokens of a step with this first text, which may be longer."""
        limits = self._limits
        return limits.batch_step_tokens if _is_batch(first) else limits.max_step_tokens

    def plan_ahead(self, plan: StepPlan, now_s: float | None = None) -> StepPlan | None:
        """Return None, so that a text that arrives during a step can join the next one."""
        return None

    def apply(
        self, plan: StepPlan, result: StepResult, now_s: float | None = None
    ) -> list[Emission]:
        """Store the results of a step, except those of cancelled texts.

        Args:
            now_s: end of the step in seconds, or None to add its duration to the time.
        """
        assert result.pooled is not None
        self._now_s = self._now_s + result.step_s if now_s is None else now_s
        self._fit.add_step(plan.size, result.step_s)
        self._speed.record_step(0, 0, plan.prompt_tokens)
        self._running = 0
        emissions: list[Emission] = []
        for work, pooled in zip(plan.work, result.pooled, strict=True):
            sequence = work.sequence
            if sequence.state is SequenceState.RUNNING:
                sequence.move_to(SequenceState.FINISHED)
                sequence.pooled, sequence.finish_reason = pooled, FinishReason.STOP
                emissions.append((sequence, (), (), None, None))
        return emissions

    def render(self, emissions: list[Emission]) -> list[tuple[str, Delta]]:
        """Return the deltas of a step with their request ids."""
        deltas = []
        for sequence, *_ in emissions:
            request_id = sequence.request.request_id
            if self._open.pop(request_id, None) is not None:
                reason = sequence.finish_reason
                delta = Delta(0, (), "", finish_reason=reason, pooled=sequence.pooled)
                deltas.append((request_id, delta))
        return deltas


def _is_batch(sequence: Sequence) -> bool:
    return sequence.request.service.priority >= BATCH_PRIORITY
