"""A worker without I/O, which turns requests into steps and steps into deltas.

The worker connects the scheduler with text streams. Its owner, a thread with a device or a task
with a clock, calls `plan`, runs the step, and calls `complete`.
"""

from __future__ import annotations

from functools import partial
from itertools import count

from draftgate.backends.adapter_card import AdapterCard
from draftgate.backends.core.accounting import (
    Emission,
    StepDetails,
    VerifiedDraft,
    count_draft,
    counted_step,
)
from draftgate.backends.core.admission import Admission
from draftgate.backends.core.detokenize import TextStream
from draftgate.backends.core.draft_scores import DraftScores
from draftgate.backends.core.grammar import Grammars
from draftgate.backends.core.scheduler import Scheduler
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import (
    Delta,
    FinishReason,
    GenerationRequest,
    Pace,
    Task,
    TokenLogprob,
)
from draftgate.policies.turns import StepUrgency
from draftgate.policies.types import WorkerLoad


class WorkerCore:
    """The requests of a worker and their choices, with a scheduler. The object is not thread-safe.

    Attributes:
        tokenizer: the model's tokenizer.
        admission: checks whether a request can run on this worker.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        max_model_len: int,
        grammars: Grammars | None = None,
        *,
        tasks: tuple[Task, ...] = (Task.GENERATE,),
        adapters: tuple[AdapterCard, ...] = (),
    ) -> None:
        """Start empty.

        Args:
            scheduler: scheduler that belongs to this worker alone.
            tokenizer: immutable tokenizer, which may be shared.
            max_model_len: maximum number of prompt and output tokens together.
            grammars: compiles grammars, or None if the worker has no logits to mask.
            tasks: tasks that the worker offers.
            adapters: adapters that requests may select.
        """
        self._scheduler = scheduler
        self.tokenizer = tokenizer
        pool_tokens = scheduler.blocks.num_blocks * scheduler.blocks.block_size
        self.admission = Admission(
            tokenizer, max_model_len, pool_tokens, grammars, tasks=tasks, adapters=adapters
        )
        self._grammars = grammars
        self._keys = count()
        self._requests: dict[str, list[Sequence]] = {}  # open requests and their open choices
        self._texts: dict[int, TextStream] = {}  # by sequence key

    def submit(
        self, request: GenerationRequest, now_s: float | None = None, adapter_slot: int = 0
    ) -> None:
        """Queue every choice of a request that `admission` accepted.

        Args:
            now_s: time of its arrival in seconds, or None for the sum of the step times.
            adapter_slot: slot of the request's adapter, which stays in the slot until the request
                ends, or 0 for none.
        """
        sequences = [Sequence.for_choice(next(self._keys), request, c) for c in request.choices]
        self._requests[request.request_id] = sequences
        for sequence in sequences:
            sequence.adapter_slot = adapter_slot
            self._prepare(sequence)
            self._scheduler.add(sequence, now_s)

    def _prepare(self, sequence: Sequence) -> None:
        """Create the grammar and the text stream of a sequence, including its resumed output."""
        request, sampling = sequence.request, sequence.request.sampling
        output_ids = sequence.token_ids[sequence.prompt_tokens :]
        if request.grammar is not None and self._grammars is not None:
            sequence.grammar = self._grammars.start(request.grammar)
            for token in output_ids:
                sequence.grammar.accept(token)
        decode, texts = self.tokenizer.decode, self.tokenizer.texts
        if not sampling.skip_special_tokens:
            decode = partial(decode, skip_special_tokens=False)
            texts = self.tokenizer.texts_with_special
        text = TextStream(
            decode,
            sampling.stop,
            request.prompt_ids,
            sampling.min_tokens,
            texts.__getitem__,
            include_stop=sampling.include_stop_str_in_output,
        )
        text.extend(output_ids)
        self._texts[sequence.key] = text

    def cancel(self, request_id: str) -> None:
        """End a request and free its blocks immediately, unless it has ended already."""
        for sequence in self._requests.pop(request_id, ()):
            self._scheduler.finish(sequence, FinishReason.ABORT)
            self._texts.pop(sequence.key, None)

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float = 0.0) -> None:
        """Change a request's pace from the next step on, as `Backend.set_pace`."""
        for sequence in self._requests.get(request_id, ()):
            self._scheduler.set_pace(sequence, pace, tpot_s)

    def is_open(self, request_id: str) -> bool:
        """Return whether a request has not ended."""
        return request_id in self._requests

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended."""
        return tuple(self._requests)

    @property
    def scores(self) -> DraftScores:
        """What the worker has learned about the acceptance of drafts."""
        return self._scheduler.scores

    def load(self) -> WorkerLoad:
        """Return the load."""
        return self._scheduler.load()

    def urgency(self, now_s: float) -> StepUrgency | None:
        """Return the urgency of the next step, which may still be empty, or None without work."""
        return self._scheduler.urgency(now_s)

    def interrupt(self) -> None:
        """Record that other workers may use the device before the next step."""
        self._scheduler.interrupt()

    def plan(self, now_s: float | None = None) -> StepPlan | None:
        """Return the next step, or None if the worker is idle.

        Args:
            now_s: present time in seconds, compared with deadlines, or None for the sum of the step
                times.
        """
        return self._scheduler.plan(now_s)

    def plan_ahead(self, plan: StepPlan, now_s: float | None = None) -> StepPlan | None:
        """Return the step after a step that is not applied yet, or None if that is impossible."""
        return self._scheduler.plan_ahead(plan, now_s)

    def complete(
        self, plan: StepPlan, result: StepResult, now_s: float | None = None
    ) -> list[tuple[str, Delta]]:
        """Account for a step and return its deltas with their request ids.

        Args:
            now_s: end of the step in seconds, or None to add its duration to the time.
        """
        return self.render(self.apply(plan, result, now_s))

    def apply(
        self, plan: StepPlan, result: StepResult, now_s: float | None = None
    ) -> list[Emission]:
        """Account for the parts of a step that the next plan needs, before `render`."""
        return self._scheduler.apply(plan, result, now_s)

    def render(self, emissions: list[Emission]) -> list[tuple[str, Delta]]:
        """Return the deltas of a step with their request ids, and free sequences that ended.

        The method may be called while the next step is in progress. If a sequence ends here at a
        stop string, its tokens of that step are dropped. Its blocks are not reused before the step
        is applied. Requests that were cancelled meanwhile get no deltas.
        """
        return [
            (sequence.request.request_id, self._delta(sequence, tokens, logprobs, draft, details))
            for sequence, tokens, logprobs, draft, details in emissions
            if sequence.key in self._texts
        ]

    def _delta(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        draft: VerifiedDraft | None,
        details: StepDetails | None,
    ) -> Delta:
        stream = self._texts[sequence.key]
        if sequence.finish_reason is None:  # the usual case
            if len(token_ids) == 1:
                text, shown = stream.add(token_ids[0]), 1
            else:
                text, shown = stream.extend(token_ids)
            if stream.stopped:
                self._stop(sequence)
            elif details is None:
                drafts = count_draft(sequence, draft, shown)
                return Delta(sequence.choice, token_ids, text, logprobs, drafts=drafts)
        elif sequence.pooled is not None:
            text, shown = "", 0
        else:
            text, shown = self._last_text(sequence, token_ids, stream)
        ended = sequence.finish_reason is not None
        if ended:
            self._forget(sequence)
        drafts = count_draft(sequence, draft, shown)  # before the outcome, which contains it
        step, phases, scores = details or (None, None, None)
        return Delta(
            sequence.choice,
            token_ids[:shown],
            text,
            logprobs[:shown],
            finish_reason=sequence.finish_reason,
            outcome=sequence.outcome() if ended and not sequence.embeds else None,
            cached_tokens=sequence.cached_tokens if ended else 0,
            steps=() if step is None else (counted_step(step, shown, drafts),),
            phases=phases,
            pooled=sequence.pooled,
            prompt_logprobs=scores,
            stop_text=stream.stop_text,
            drafts=drafts,
        )

    def _last_text(
        self, sequence: Sequence, tokens: tuple[int, ...], stream: TextStream
    ) -> tuple[str, int]:
        """Return the text of a sequence's last tokens, and how many tokens precede a stop string.

        Tokens accepted after a stop string are dropped, because they would not exist without
        drafts.
        """
        ended = sequence.finish_reason is FinishReason.STOP  # by the last token
        shows_end = sequence.request.sampling.include_stop_str_in_output
        text, shown = stream.extend(tokens if shows_end or not ended else tokens[:-1])
        if not stream.stopped:
            text, shown = text + stream.flush(), len(tokens)
        if stream.stopped:
            self._stop(sequence)
        elif ended and _is_cut(sequence, tokens[-1]):
            sequence.finish_reason = FinishReason.ABORT
        return text, shown

    def _stop(self, sequence: Sequence) -> None:
        """End a sequence at a stop string, even if it reached its length in the same step."""
        self._scheduler.finish(sequence, FinishReason.STOP)
        sequence.finish_reason = FinishReason.STOP

    def _forget(self, sequence: Sequence) -> None:
        """Drop a choice that has ended, and the request with its last choice."""
        self._texts.pop(sequence.key, None)
        request_id = sequence.request.request_id
        open_choices = self._requests.get(request_id, [])
        if sequence in open_choices:
            open_choices.remove(sequence)
        if not open_choices:
            self._requests.pop(request_id, None)


def _is_cut(sequence: Sequence, last: int) -> bool:
    """Return whether the last token ends an output whose grammar does not allow an end here.

    Masks allow such an end only where no token can follow: in a dead end of the grammar, or at a
    limit of its parser.
    """
    return sequence.grammar is not None and not sequence.grammar.legal((last,))
