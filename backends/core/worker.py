"""A worker without I/O: requests in, steps out, deltas back.

Joins the scheduler with text streams. Whoever owns it (a thread with a device, a task with a
clock) calls `plan`, runs the step, and calls `complete`.
"""

from __future__ import annotations

from itertools import count

from draftgate.backends.core.accounting import Details, Emission
from draftgate.backends.core.admission import Admission
from draftgate.backends.core.detokenize import TextStream
from draftgate.backends.core.embedding import embedding_delta
from draftgate.backends.core.grammar import Grammar, Grammars
from draftgate.backends.core.scheduler import Scheduler
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, FinishReason, GenerationRequest, Pace, TokenLogprob
from draftgate.policies.types import WorkerLoad


class WorkerCore:
    """Requests and their choices on top of a scheduler. Not thread-safe: one owner.

    Attributes:
        tokenizer: that of the model.
        admission: what can run here.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        max_model_len: int,
        grammars: Grammars | None = None,
        *,
        embeds: bool = False,
    ) -> None:
        """Start empty.

        Args:
            scheduler: what it joins with text; nobody else may use it.
            tokenizer: may be read by anybody: it is immutable.
            max_model_len: most tokens of prompt and output together.
            grammars: compiles them; None where there are no logits to mask.
            embeds: whether there are hidden states to pool.
        """
        self._scheduler = scheduler
        self.tokenizer = tokenizer
        pool_tokens = scheduler.blocks.num_blocks * scheduler.blocks.block_size
        self.admission = Admission(tokenizer, max_model_len, pool_tokens, grammars, embeds=embeds)
        self._grammars = grammars
        self._keys = count()
        self._requests: dict[str, list[Sequence]] = {}  # open requests and their open choices
        self._texts: dict[int, TextStream] = {}  # by sequence key

    def submit(self, request: GenerationRequest, now_s: float | None = None) -> None:
        """Queue every choice of a request that `admission` accepted.

        Args:
            now_s: when it came; None takes the time of all steps so far.
        """
        sequences = [Sequence.of(next(self._keys), request, c) for c in request.choices]
        self._requests[request.request_id] = sequences
        for sequence in sequences:
            sequence.grammar = self._grammar(sequence)
            self._texts[sequence.key] = self._text_stream(sequence)
            self._scheduler.add(sequence, now_s)

    def _grammar(self, sequence: Sequence) -> Grammar | None:
        """Return the grammar of a sequence, as far as its output has come."""
        spec = sequence.request.grammar
        if spec is None or self._grammars is None:
            return None
        grammar = self._grammars.start(spec)
        for token in sequence.token_ids[sequence.prompt_tokens :]:
            grammar.accept(token)
        return grammar

    def _text_stream(self, sequence: Sequence) -> TextStream:
        """Return the text of a sequence, read up to where the client's side has it."""
        sampling, prompt = sequence.request.sampling, sequence.request.prompt_ids
        tokenizer = self.tokenizer
        alone = tokenizer.texts.__getitem__
        stream = TextStream(tokenizer.decode, sampling.stop, prompt, sampling.min_tokens, alone)
        stream.extend(sequence.token_ids[len(prompt) :])
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request and free its blocks at once; no-op if it has ended already."""
        for sequence in self._requests.pop(request_id, ()):
            self._close(sequence, FinishReason.ABORT)

    def pace(self, request_id: str, pace: Pace) -> None:
        """Change how far a request goes on, from the next step on; no-op if it is not open."""
        for sequence in self._requests.get(request_id, ()):
            self._scheduler.pace(sequence, pace)

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended."""
        return tuple(self._requests)

    def load(self) -> WorkerLoad:
        """Return the load."""
        return self._scheduler.load()

    def plan(self, now_s: float | None = None) -> StepPlan | None:
        """Return the next step, or None when there is nothing to do.

        Args:
            now_s: the time, which says who is late; None takes that of all steps so far.
        """
        return self._scheduler.plan(now_s)

    def plan_behind(self, plan: StepPlan, now_s: float | None = None) -> StepPlan | None:
        """Return the step behind one that is not applied yet; None if that has to come first."""
        return self._scheduler.plan_behind(plan, now_s)

    def complete(
        self, plan: StepPlan, result: StepResult, now_s: float | None = None
    ) -> list[tuple[str, Delta]]:
        """Account for a step and return the deltas it gives, with their request ids.

        Args:
            now_s: when it ended; None adds its seconds to the time.
        """
        return self.render(self.apply(plan, result, now_s))

    def apply(
        self, plan: StepPlan, result: StepResult, now_s: float | None = None
    ) -> list[Emission]:
        """Account for a step, as far as the next plan needs it; `render` is still to be called."""
        return self._scheduler.apply(plan, result, now_s)

    def render(self, emissions: list[Emission]) -> list[tuple[str, Delta]]:
        """Return the deltas of a step, with their request ids; what they end is freed at once.

        May be called while the next step is under way: what that one emits for a sequence which
        ends here at a stop string is dropped, and until it is applied nobody gets its blocks.
        Requests that were cancelled meanwhile get nothing.
        """
        return [
            (
                sequence.request.request_id,
                self._delta(sequence, token_ids, logprobs)
                if details is None
                else _detailed(self._delta(sequence, token_ids, logprobs), details),
            )
            for sequence, token_ids, logprobs, details in emissions
            if sequence.key in self._texts
        ]

    def _delta(
        self, sequence: Sequence, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> Delta:
        stream = self._texts[sequence.key]
        if sequence.finish_reason is None:  # as after most steps
            text, shown = stream.extend(token_ids)
            if not stream.stopped:
                return Delta(sequence.choice, token_ids, text, logprobs)
            self._stop(sequence)
        elif sequence.embedding is not None:
            self._forget(sequence)
            return embedding_delta(sequence)
        else:
            text, shown = self._last_text(sequence, token_ids, stream)
        token_ids, logprobs = token_ids[:shown], logprobs[:shown]
        self._forget(sequence)
        outcome, cached = sequence.outcome(), sequence.cached_tokens
        reason = sequence.finish_reason
        return Delta(sequence.choice, token_ids, text, logprobs, reason, outcome, cached)

    def _last_text(
        self, sequence: Sequence, tokens: tuple[int, ...], stream: TextStream
    ) -> tuple[str, int]:
        """Return the text of a sequence's last tokens, and how many stand before a stop string.

        Tokens accepted behind a stop string never were: without drafts they had not been made.
        """
        eos = sequence.finish_reason is FinishReason.STOP  # the last token, and not shown
        text, shown = stream.extend(tokens[:-1] if eos else tokens)
        if not stream.stopped:
            text, shown = text + stream.flush(), len(tokens)
        if stream.stopped:
            self._stop(sequence)
        elif eos and sequence.grammar is not None and not sequence.grammar.is_complete:
            sequence.finish_reason = FinishReason.LENGTH  # the grammar's own limits ended it
        return text, shown

    def _stop(self, sequence: Sequence) -> None:
        """End a sequence at a stop string, also if it reached its length in the same step."""
        self._scheduler.finish(sequence, FinishReason.STOP)
        sequence.finish_reason = FinishReason.STOP

    def _close(self, sequence: Sequence, reason: FinishReason) -> None:
        self._scheduler.finish(sequence, reason)
        self._texts.pop(sequence.key, None)

    def _forget(self, sequence: Sequence) -> None:
        """Drop a choice that has ended, and the request with its last choice."""
        self._texts.pop(sequence.key, None)
        request_id = sequence.request.request_id
        open_choices = self._requests.get(request_id, [])
        if sequence in open_choices:
            open_choices.remove(sequence)
        if not open_choices:
            self._requests.pop(request_id, None)


def _detailed(delta: Delta, details: Details) -> Delta:
    """Return a delta that tells what there is to tell; tokens behind a stop string never were."""
    step, shown = details.step, len(delta.token_ids)
    if step is None:
        return delta._replace(phases=details.phases)
    step = step._replace(tokens=shown, accepted=min(step.accepted, shown))
    return delta._replace(steps=(step,), phases=details.phases)
