"""A worker without I/O: requests in, steps out, deltas back.

Joins the scheduler with text streams. Whoever owns it (a thread with a device, a task with a
clock) calls `plan`, runs the step, and calls `complete`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

from backends.core.detokenize import TextStream
from backends.core.grammar import Grammar, Grammars
from backends.core.scheduler import Emission, Scheduler
from backends.core.sequence import Sequence
from backends.core.steps import StepPlan, StepResult
from backends.errors import RequestRejected
from backends.tokenizer import Tokenizer
from backends.types import Delta, FinishReason, GenerationRequest
from policies.types import WorkerLoad


class Worker:
    """Requests and their choices on top of a scheduler. Not thread-safe: one owner."""

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        max_model_len: int,
        grammars: Grammars | None = None,
    ) -> None:
        """Start empty.

        Args:
            scheduler: what it joins with text; nobody else may use it.
            tokenizer: may be read by anybody: it is immutable.
            max_model_len: most tokens of prompt and output together.
            grammars: compiles them; None where there are no logits to mask.
        """
        self._scheduler = scheduler
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._grammars = grammars
        self._keys = count()
        self._requests: dict[str, list[Sequence]] = {}  # open requests and their open choices
        self._texts: dict[int, TextStream] = {}  # by sequence key

    def check(self, request: GenerationRequest) -> None:
        """Return if the request can run here. May be called in any thread.

        The first check of a grammar compiles it, which takes long.

        Raises:
            RequestRejected: the prompt is empty, prompt and output exceed the context or the whole
                KV pool, or the grammar cannot be compiled.
        """
        prompt, output = len(request.prompt_ids), request.sampling.max_tokens
        if not prompt:
            raise RequestRejected("the prompt has no tokens", param="prompt")
        pool = self._scheduler.blocks.num_blocks * self._scheduler.blocks.block_size
        for limit, what in ((self._max_model_len, "context"), (pool, "KV pool")):
            if prompt + output > limit:
                raise RequestRejected(
                    f"the {what} holds {limit} tokens, but the prompt has {prompt} and "
                    f"{output} more were asked for",
                    param="prompt" if prompt >= limit else "max_tokens",
                    limit_tokens=limit,
                )
        for choice in request.choices:
            if len(choice.output_ids) >= output:
                raise RequestRejected(
                    f"choice {choice.choice} has {len(choice.output_ids)} tokens already, "
                    f"and {output} were asked for",
                    param="max_tokens",
                )
        vocab = self.tokenizer.vocab_size
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab:
            raise RequestRejected(f"token ids must be between 0 and {vocab - 1}", param="prompt")
        if any(not 0 <= token < vocab for token, _ in request.sampling.logit_bias):
            raise RequestRejected(
                f"token ids must be between 0 and {vocab - 1}", param="logit_bias"
            )
        self._check_grammar(request)

    def _check_grammar(self, request: GenerationRequest) -> None:
        if request.grammar is None:
            return
        if self._grammars is None:
            raise RequestRejected(
                "this worker has no logits to hold to a format", param="response_format"
            )
        grammar = self._grammars.start(request.grammar)
        for choice in request.choices:
            if grammar.legal(choice.output_ids) < len(choice.output_ids):
                raise RequestRejected(
                    f"choice {choice.choice} has tokens already that the format does not allow",
                    param="response_format",
                )

    def submit(self, request: GenerationRequest) -> None:
        """Queue every choice of a request that `check` accepted."""
        sequences = [Sequence.of(next(self._keys), request, c) for c in request.choices]
        self._requests[request.request_id] = sequences
        for sequence in sequences:
            sequence.grammar = self._grammar(sequence)
            self._texts[sequence.key] = self._text_stream(sequence)
            self._scheduler.add(sequence)

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
        stream = TextStream(self.tokenizer.decode, sampling.stop, prompt, sampling.min_tokens)
        for token in sequence.token_ids[len(prompt) :]:
            stream.add(token)
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request and free its blocks at once; no-op if it has ended already."""
        for sequence in self._requests.pop(request_id, ()):
            self._close(sequence, FinishReason.ABORT)

    @property
    def open_requests(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended."""
        return tuple(self._requests)

    def load(self) -> WorkerLoad:
        """Return the load."""
        return self._scheduler.load()

    def plan(self) -> StepPlan | None:
        """Return the next step, or None when there is nothing to do."""
        return self._scheduler.plan()

    def plan_behind(self, plan: StepPlan) -> StepPlan | None:
        """Return the step behind one that is not applied yet; None if that has to come first."""
        return self._scheduler.plan_behind(plan)

    def complete(self, plan: StepPlan, result: StepResult) -> list[tuple[str, Delta]]:
        """Account for a step and return the deltas it gives, with their request ids."""
        return self.render(self.apply(plan, result))

    def apply(self, plan: StepPlan, result: StepResult) -> list[Emission]:
        """Account for a step, as far as the next plan needs it; `render` is still to be called."""
        return self._scheduler.apply(plan, result)

    def render(self, emissions: list[Emission]) -> list[tuple[str, Delta]]:
        """Return the deltas of a step, with their request ids; what they end is freed at once.

        May be called while the next step is under way: what that one emits for a sequence which
        ends here at a stop string is dropped, and until it is applied nobody gets its blocks.
        Requests that were cancelled meanwhile get nothing.
        """
        return list(self._deltas(emissions))

    def _deltas(self, emissions: list[Emission]) -> Iterator[tuple[str, Delta]]:
        for emission in emissions:
            if emission.sequence.key in self._texts:
                yield emission.sequence.request.request_id, self._delta(emission)

    def _delta(self, emission: Emission) -> Delta:
        sequence = emission.sequence
        text, num_tokens = self._show(emission, self._texts[sequence.key])
        reason = sequence.finish_reason
        if reason is not None:
            self._forget(sequence)
        return Delta(
            sequence.choice,
            emission.token_ids[:num_tokens],
            text,
            emission.logprobs[:num_tokens],
            reason,
            sequence.outcome() if reason else None,
            sequence.cached_tokens if reason else 0,
        )

    def _show(self, emission: Emission, stream: TextStream) -> tuple[str, int]:
        """Return the text of an emission, and how many of its tokens stand before a stop.

        Tokens accepted behind a stop string never were: without drafts they had not been made.
        """
        sequence, tokens = emission.sequence, emission.token_ids
        eos = sequence.finish_reason is FinishReason.STOP  # the last token, and not shown
        text = ""
        for index, token in enumerate(tokens[:-1] if eos else tokens):
            text += stream.add(token)
            if stream.stopped:
                self._stop(sequence)
                return text, index + 1
        if sequence.finish_reason is not None:
            text += stream.flush()
            if stream.stopped:
                self._stop(sequence)
            elif eos and sequence.grammar is not None and not sequence.grammar.is_complete:
                sequence.finish_reason = FinishReason.LENGTH  # the grammar's own limits ended it
        return text, len(tokens)

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
