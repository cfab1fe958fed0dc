"""Recording of a worker's run: the calls of its scheduler and the predictions of its proposers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace

import msgspec

from draftgate.backends.adapter_card import AdapterCard
from draftgate.backends.core.accounting import Emission
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.grammar import Grammars
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.core.recorded_blocks import RecordedKvBlocks
from draftgate.backends.core.scheduler import Scheduler
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.recorded_run import (
    Applied,
    Arrived,
    Call,
    Cancelled,
    Ended,
    Evicted,
    Paced,
    Planned,
    RecordedRequest,
    seconds_at,
    ticks_at,
)
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import FinishReason, GenerationRequest, Pace, Task


class RunRecorder:
    """Records the calls of a worker, until a request makes an exact replay impossible.

    Attributes:
        gap: why the run cannot be replayed, or an empty string.
        blocks: KV blocks of the worker.
    """

    def __init__(self, blocks: RecordedKvBlocks, recorded: Iterable[str]) -> None:
        """Start before the first call.

        Args:
            blocks: KV blocks of the worker.
            recorded: names of the proposers whose drafts the recording contains.
        """
        self.gap = ""
        self.computing: tuple[str, ...] = ()
        self.blocks = blocks
        self._recorded = frozenset(recorded)
        self._calls: list[bytes] = []
        self._origin: int | None = None
        self._predictions: list[float] = []
        self._silent: list[int] = []
        self._drafts = 0  # number of computed drafts of the present call
        self._open: dict[int, Sequence] = {}
        self._numbers: dict[bytes, int] = {}  # of KV blocks, by hash
        self._next_number = 0
        self._most_numbers = 0  # at which those that are not cached are dropped

    def watch(self, proposers: Mapping[str, Proposer]) -> dict[str, Proposer]:
        """Return the proposers of a scheduler, with recorded predictions."""
        self.computing = tuple(name for name, one in proposers.items() if one.depth_s(1) > 0.0)
        unwatched = self._recorded.difference(self.computing)
        return {
            name: one if name in unwatched else _WatchedProposer(name, one, self)
            for name, one in proposers.items()
        }

    def stop(self, gap: str) -> None:
        """Stop recording calls, because the run cannot be replayed for this reason."""
        self.gap = self.gap or gap
        self.blocks.records = False
        self._calls.clear()
        self._open.clear()
        self._numbers.clear()

    def take_calls(self) -> list[bytes]:
        """Return the encoded calls since the last time."""
        taken, self._calls = self._calls, []
        return taken

    def add_arrival(self, sequence: Sequence, ticks: int) -> None:
        """Record a request that joins the queue."""
        request = sequence.request
        if gap := _obstacle(request):
            self.stop(gap)
        if self.gap:
            return
        recorded = RecordedRequest(
            sequence.prompt_tokens,
            request.sampling.max_tokens,
            request.sampling.temperature,
            replace(request.speculation, reason=""),
            request.service,
            request.sampling.reads_output,
        )
        self._add(Arrived(self._since_start(ticks), recorded))
        self._open[sequence.key] = sequence
        self._number_blocks(sequence)

    def add_plan(self, ticks: int, plan: StepPlan | None, *, ahead: bool = False) -> None:
        """Record a planned step, or None if no step was planned."""
        if self.gap:
            return
        work = () if plan is None else rows_of(plan)
        predictions, silent = tuple(self._predictions), tuple(self._silent)
        self._add(Planned(self._since_start(ticks), work, predictions, silent, ahead))

    def begin_plan(self) -> None:
        """Begin a call that plans a step."""
        self._predictions.clear()
        self._silent.clear()
        self._drafts = 0

    def add_result(self, ticks: int, step_s: float, emissions: list[Emission]) -> None:
        """Record the result of a step."""
        if self.gap:
            return
        emitted = tuple(len(tokens) for _, tokens, *_ in emissions)
        self._add(Applied(self._since_start(ticks), float(step_s), emitted))
        for sequence, *_ in emissions:
            if sequence.finish_reason is not None:
                self._end(sequence)

    def add_cancel(self, sequence: Sequence) -> None:
        """Record that a client disconnects."""
        self._add(Cancelled(sequence.key))
        self._end(sequence)

    def end_all(self) -> None:
        """Record the end of the run."""
        for sequence in tuple(self._open.values()):
            self._end(sequence)

    def add_pace(self, sequence: Sequence, pace: Pace, tpot_s: float) -> None:
        """Record a new pace of a request."""
        self._add(Paced(sequence.key, pace, tpot_s))

    def add_prediction(self, name: str, seconds: float) -> float:
        """Record and return a prediction of a proposer, if it computes drafts."""
        if name in self.computing:
            self._predictions.append(float(seconds))
        return seconds

    def add_drafts(self, name: str, drafts: Many[Draft]) -> None:
        """Record which drafts a proposer did not make, if it computes them."""
        if name not in self._recorded and any(drafts):
            self.stop(f"{name} drafted, and its drafts are not recorded")
        if name not in self.computing:
            return
        self._silent += [self._drafts + at for at, draft in enumerate(drafts) if not draft]
        self._drafts += len(drafts)

    def _add(self, call: Call) -> None:
        if not self.gap:
            evicted = [Evicted(*eviction) for eviction in self.blocks.take_evictions()]
            self._calls += map(msgspec.json.encode, [*evicted, call])

    def _since_start(self, ticks: int) -> int:
        if self._origin is None:
            self._origin = ticks
        return ticks - self._origin

    def _end(self, sequence: Sequence) -> None:
        if self.gap:
            return
        runs: list[tuple[int, int]] = []
        for number in self._number_blocks(sequence):
            if runs and number == sum(runs[-1]):
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((number, 1))
        stopped = sequence.finish_reason is FinishReason.STOP
        self._add(Ended(sequence.key, sequence.output_tokens, stopped, tuple(runs)))
        self._open.pop(sequence.key, None)

    def _number_blocks(self, sequence: Sequence) -> list[int]:
        """Return the numbers of a sequence's full blocks, and drop those of other old blocks."""
        numbers = self._known_numbers(sequence)
        if len(self._numbers) > max(self._most_numbers, 2 * self.blocks.num_blocks):
            known = self._numbers.items()
            kept = {digest: n for digest, n in known if self.blocks.is_cached(digest)}
            # The blocks of open sequences may be computed and cached later.
            for waiting in self._open.values():
                hashes = waiting.hash_blocks(self.blocks.block_size)
                kept |= zip(hashes, self._known_numbers(waiting), strict=True)
            self._numbers, self._most_numbers = kept, 2 * len(kept)
        return numbers

    def _known_numbers(self, sequence: Sequence) -> list[int]:
        numbers = []
        for digest in sequence.hash_blocks(self.blocks.block_size):
            number = self._numbers.get(digest)
            if number is None:
                number = self._numbers[digest] = self._next_number
                self._next_number += 1
            numbers.append(number)
        return numbers


class _WatchedProposer:
    """A proposer with a record of its predictions and drafts."""

    def __init__(self, name: str, proposer: Proposer, run: RunRecorder) -> None:
        self._name = name
        self._proposer = proposer
        self._run = run

    def depth_s(self, sequences: int) -> float:
        return self._run.add_prediction(self._name, self._proposer.depth_s(sequences))

    def catch_up_s(self, sequence: Sequence) -> float:
        return self._run.add_prediction(self._name, self._proposer.catch_up_s(sequence))

    def propose(self, requests: Many[DraftRequest]) -> Many[Draft]:
        drafts = self._proposer.propose(requests)
        self._run.add_drafts(self._name, drafts)
        return drafts

    def forget(self, sequence: Sequence) -> None:
        self._proposer.forget(sequence)


class RecordedWorkerCore(WorkerCore):
    """A worker that records its calls, whose times it rounds down to whole ticks."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        max_model_len: int,
        grammars: Grammars | None = None,
        *,
        tasks: tuple[Task, ...] = (Task.GENERATE,),
        adapters: tuple[AdapterCard, ...] = (),
        run: RunRecorder,
    ) -> None:
        super().__init__(
            scheduler, tokenizer, max_model_len, grammars, tasks=tasks, adapters=adapters
        )
        self._run = run

    def submit(
        self, request: GenerationRequest, now_s: float | None = None, adapter_slot: int = 0
    ) -> None:
        """See `WorkerCore`."""
        ticks = _ticks(now_s)
        super().submit(request, seconds_at(ticks), adapter_slot)
        for sequence in self._requests[request.request_id]:
            self._run.add_arrival(sequence, ticks)

    def cancel(self, request_id: str) -> None:
        """See `WorkerCore`."""
        for sequence in self._requests.get(request_id, ()):
            self._run.add_cancel(sequence)
        super().cancel(request_id)

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float = 0.0) -> None:
        """See `WorkerCore`."""
        for sequence in self._requests.get(request_id, ()):
            self._run.add_pace(sequence, pace, tpot_s)
        super().set_pace(request_id, pace, tpot_s)

    def interrupt(self) -> None:
        """See `WorkerCore`."""
        self._run.stop("another model used the device, and a recording contains one model")
        super().interrupt()

    def plan(self, now_s: float | None = None) -> StepPlan | None:
        """See `WorkerCore`."""
        ticks = _ticks(now_s)
        self._run.begin_plan()
        plan = super().plan(seconds_at(ticks))
        self._run.add_plan(ticks, plan)
        return plan

    def plan_ahead(self, plan: StepPlan, now_s: float | None = None) -> StepPlan | None:
        """See `WorkerCore`."""
        ticks = _ticks(now_s)
        self._run.begin_plan()
        following = super().plan_ahead(plan, seconds_at(ticks))
        self._run.add_plan(ticks, following, ahead=True)
        return following

    def apply(
        self, plan: StepPlan, result: StepResult, now_s: float | None = None
    ) -> list[Emission]:
        """See `WorkerCore`."""
        ticks = _ticks(now_s)
        emissions = super().apply(plan, result, seconds_at(ticks))
        self._run.add_result(ticks, result.step_s, emissions)
        return emissions


def rows_of(plan: StepPlan) -> tuple[tuple[int, int, int], ...]:
    """Return the request, the fed tokens and the draft tokens of each part of a step."""
    return tuple((work.sequence.key, len(work.token_ids), work.num_drafts) for work in plan.work)


def _ticks(now_s: float | None) -> int:
    assert now_s is not None, "a recorded worker has a clock"
    return ticks_at(now_s)


def _obstacle(request: GenerationRequest) -> str:
    """Return why a run with this request cannot be replayed, or an empty string."""
    if request.task is not Task.GENERATE:
        return "the worker computed an embedding, which a recording does not contain"
    if not request.sampling.max_tokens:
        return "a request generated nothing, and a recording contains only outputs"
    if request.sampling.prompt_logprobs is not None:
        return "a request computed a cached prompt again, for its log probabilities"
    if request.adapter:
        return "a request used a LoRA adapter, and a recording does not contain adapters"
    if request.grammar is not None:
        return "a request had a grammar, whose forced tokens replace drafts"
    if request.sampling.stop:
        return "a request had a stop text, and the recording contains no text to compare with it"
    if request.resumed or request.age_s:
        return "a request was resumed from another worker"
    return ""
