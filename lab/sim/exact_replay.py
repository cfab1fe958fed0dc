"""Exact replay of a recorded run with the production scheduler.

The replay makes the recorded calls at the recorded times. Drafts, predictions and step times are
those of the recording. The policies therefore read the same values as in the live run, and decide
the same. Every step and every result is compared with the recorded one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from draftgate.backends.core.accounting import count_draft, counted_step
from draftgate.backends.core.drafts import NO_DRAFT, Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.recorded_blocks import CountedKvBlocks
from draftgate.backends.core.run_recorder import rows_of
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.recorded_run import (
    Applied,
    Arrived,
    Call,
    Cancelled,
    Paced,
    Planned,
    seconds_at,
)
from draftgate.backends.sim.model import SimExecutor, simulated_draft
from draftgate.backends.types import (
    FinishReason,
    GenerationRequest,
    ResumedChoice,
    SamplingParams,
    SpeculationOutcome,
    StepTrace,
)
from draftgate.lab.sim.recorded_run import (
    EOS,
    RecordedRun,
    RunAcceptance,
    RunTokens,
    request_id,
)
from draftgate.policies.registry import batching_policy, speculation_policy


class ReplayDiffers(ValueError):
    """The replay made another step than the live run. The message names both."""


@dataclass(slots=True)
class ReplayedRequest:
    """A request of an exact replay.

    Attributes:
        steps: its decoding steps. The ids of drafted tokens are not those of the live run.
        outcome: result of speculation, or None if the request has not ended.
    """

    steps: list[StepTrace] = field(default_factory=list)
    outcome: SpeculationOutcome | None = None


@dataclass(frozen=True, slots=True)
class ExactReplay:
    """The result of an exact replay.

    Attributes:
        requests: by number, in order of arrival.
        steps: number of steps.
    """

    requests: tuple[ReplayedRequest, ...]
    steps: int

    @property
    def drafted_tokens(self) -> int:
        """Number of verified draft tokens."""
        return sum(len(step.draft_ids) for one in self.requests for step in one.steps)

    @property
    def accepted_tokens(self) -> int:
        """Number of accepted draft tokens."""
        return sum(step.accepted for one in self.requests for step in one.steps)


def replay_exactly(run: RecordedRun) -> ExactReplay:
    """Replay a run with the policy of its worker.

    Raises:
        ReplayDiffers: a step or its result differs from the live run.
        ValueError: the policy is unknown, or the recording lacks a text.
    """
    replay = _Replay(run)
    for call in run.calls:
        replay.make(call)
    return ExactReplay(tuple(replay.requests), replay.steps)


@dataclass(slots=True)
class _PresentCall:
    """The recorded answers of computing proposers during a call.

    Attributes:
        predictions: predicted seconds that were not asked for yet.
        silent: indices of the drafts that were not made.
        drafts: number of drafts so far.
    """

    predictions: deque[float]
    silent: frozenset[int] = frozenset()
    drafts: int = 0

    def predict(self) -> float:
        """Return the next prediction."""
        if not self.predictions:
            raise ReplayDiffers("the replay asks for more predictions than the live run")
        return self.predictions.popleft()

    def is_silent(self) -> bool:
        """Return whether the proposer did not make the next draft."""
        self.drafts += 1
        return self.drafts - 1 in self.silent


class _Replay:
    """A scheduler with recorded drafts, predictions and times."""

    def __init__(self, run: RecordedRun) -> None:
        worker = run.worker
        self.requests: list[ReplayedRequest] = []
        self.steps = 0
        self._run = run
        self._tokens = RunTokens(run, run.stopped)
        self._acceptance = RunAcceptance(run)
        self._device = _MeasuredDevice()
        self._executor = SimExecutor(self._tokens, self._device)
        # The scheduler asks once which proposers compute their drafts.
        self.present = _PresentCall(deque([1.0] * len(worker.computing)))
        self._scheduler = Scheduler(
            SchedulerConfig(worker.max_num_seqs, worker.max_step_tokens, frozenset({EOS})),
            ReplayedKvBlocks(worker.blocks, worker.block_tokens, run.evictions),
            speculation_policy(worker.speculation),
            {
                name: _ReplayedProposer(name, self, computes=name in worker.computing)
                for name in worker.proposers
            },
            worker.cost.cost,
            batching_policy(worker.batching),
        )
        self._sequences: list[Sequence] = []
        self._under_way: deque[StepPlan] = deque()

    def make(self, call: Call) -> None:
        """Make a call, and compare its result."""
        if isinstance(call, Planned):
            self._plan(call)
        elif isinstance(call, Applied):
            self._apply(call)
        elif isinstance(call, Arrived):
            self._submit(call)
        elif isinstance(call, Cancelled):
            self._scheduler.finish(self._sequences[call.request], FinishReason.ABORT)
        elif isinstance(call, Paced):
            self._scheduler.set_pace(self._sequences[call.request], call.pace, call.tpot_s)

    def draft(self, name: str, request: DraftRequest) -> Draft:
        """Return the recorded draft of a proposer."""
        guess = self._acceptance.guess(name, request.sequence, request.max_tokens)
        return simulated_draft(guess, request.sequence, self._tokens)

    def _submit(self, call: Arrived) -> None:
        number, recorded = len(self._sequences), call.request
        sampling = SamplingParams(
            recorded.max_tokens,
            seed=0,
            temperature=recorded.temperature,
            # Any penalty has the same effect on the steps.
            presence_penalty=float(recorded.counts_tokens),
        )
        request = GenerationRequest(
            request_id("recorded", number),
            self._tokens.prompt_ids(number),
            sampling,
            recorded.plan,
            service=recorded.service,
            traced=True,
        )
        sequence = Sequence.for_choice(number, request, ResumedChoice(0, ()))
        self._sequences.append(sequence)
        self.requests.append(ReplayedRequest())
        self._scheduler.add(sequence, seconds_at(call.ticks))

    def _plan(self, call: Planned) -> None:
        self.present.predictions = deque(call.predictions)
        self.present.silent = frozenset(call.silent)
        self.present.drafts = 0
        now_s = seconds_at(call.ticks)
        if call.ahead:
            plan = self._scheduler.plan_ahead(self._under_way[-1], now_s)
        else:
            plan = self._scheduler.plan(now_s)
        work = () if plan is None else rows_of(plan)
        if work != call.work or self.present.predictions:
            raise ReplayDiffers(
                f"step {self.steps + 1} of the replay has the parts {work}, and that of the live "
                f"run has {call.work} (request, fed tokens, draft tokens)"
            )
        if plan is not None:
            self._under_way.append(plan)
            self.steps += 1

    def _apply(self, call: Applied) -> None:
        plan, self._device.measured_s = self._under_way.popleft(), call.step_s
        result = self._executor.execute(plan)
        emissions = self._scheduler.apply(plan, result, seconds_at(call.ticks))
        emitted = tuple(len(tokens) for _, tokens, *_ in emissions)
        for sequence, tokens, _, draft, details in emissions:
            if sequence.output_tokens > self._run.length(sequence.key):
                raise ValueError(
                    f"the recording lacks the end of request {sequence.key}, because the server "
                    "was killed before the request ended"
                )
            request = self.requests[sequence.key]
            drafts = count_draft(sequence, draft, len(tokens))
            if details is not None and details.step is not None:
                request.steps.append(counted_step(details.step, len(tokens), drafts))
            if sequence.finish_reason is not None:
                request.outcome = sequence.outcome()
        if emitted != call.emitted:
            raise ReplayDiffers(
                f"step {self.steps} of the replay adds {emitted} tokens, and that of the live run "
                f"adds {call.emitted}"
            )


class _ReplayedProposer:
    """A proposer with recorded drafts and predictions."""

    def __init__(self, name: str, replay: _Replay, *, computes: bool) -> None:
        self._name = name
        self._replay = replay
        self._computes = computes

    def depth_s(self, sequences: int) -> float:
        return self._replay.present.predict() if self._computes else 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        return self._replay.present.predict() if self._computes else 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        return [
            NO_DRAFT
            if self._computes and self._replay.present.is_silent()
            else self._replay.draft(self._name, request)
            for request in requests
        ]

    def forget(self, sequence: Sequence) -> None:
        """Do nothing, because the proposer has no state."""


class _MeasuredDevice:
    """A device whose steps take the measured seconds; see `device_model.DeviceModel`."""

    launches_ahead = False
    measured_s = 0.0

    def draft(self, proposer: str, sequences: int, depth: int) -> float:
        return 0.0

    def step_s(self, plan: StepPlan, emitted: Many[tuple[int, ...]]) -> float:
        return self.measured_s

    def pop_host_s(self, sequences: int) -> float:
        return 0.0


class ReplayedKvBlocks(CountedKvBlocks):
    """KV blocks with the evictions of a live worker."""

    def __init__(
        self, num_blocks: int, block_size: int, evictions: Iterable[tuple[int, int]]
    ) -> None:
        """Start with every block free.

        Args:
            evictions: operation and number of blocks of each eviction.
        """
        super().__init__(num_blocks, block_size)
        self._evictions = deque(evictions)

    def _begin(self, *, may_evict: bool = False) -> None:
        super()._begin()
        # A block that was lent after an operation was evicted before the next operation.
        last = self._operations - (not may_evict)
        while self._evictions and self._evictions[0][0] <= last:
            _, count = self._evictions.popleft()
            self._free.give_back(self._cache.evict(count))
