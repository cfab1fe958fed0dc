"""One answer in the making: deltas in, figures and rendered pieces out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from backends.errors import BackendFailed
from backends.types import Delta, GenerationRequest
from gateway.dispatch import Dispatcher
from gateway.http.rendering import Rendering, WholeChoice
from gateway.http.replies import ResponseMetrics, SpeculativeDecoding, Usage
from gateway.http.validation import Call
from gateway.telemetry.watch import RequestWatch


class Answer:
    """What the streaming and the whole form of an answer have in common."""

    def __init__(
        self,
        call: Call,
        requests: Sequence[GenerationRequest],
        rendering: Rendering,
        watch: RequestWatch,
        numerics_class: str | None,
    ) -> None:
        """Begin before the first delta."""
        self.call = call
        self.rendering = rendering
        self.watch = watch
        self._requests = requests
        self._numerics_class = numerics_class
        self._open_choices = sum(request.n for request in requests)

    @property
    def complete(self) -> bool:
        """Whether every choice has finished."""
        return self._open_choices == 0

    def deltas(self, dispatcher: Dispatcher) -> AsyncGenerator[Delta, None]:
        """Run the requests; to be closed by the caller."""
        return dispatcher.run(self._requests)

    def observe(self, delta: Delta) -> None:
        """Take note of a delta; every one must pass here, in order."""
        self.watch.observe(delta)
        self._open_choices -= delta.finish_reason is not None

    def check_complete(self) -> None:
        """Return if every choice has finished.

        Raises:
            BackendFailed: the deltas ended before that.
        """
        if not self.complete:
            raise BackendFailed("the worker ended the stream too early")

    def usage(self) -> Usage:
        """Return the tokens so far."""
        prompt, output = self.watch.prompt_tokens, self.watch.output_tokens
        return Usage(prompt, output, prompt + output)

    def metrics(self) -> ResponseMetrics:
        """Return the decision and, all choices summed, what came of it."""
        first = self._requests[0]
        plan, outcome = first.speculation, self.watch.outcome
        return ResponseMetrics(
            first.sampling.seed,
            self._numerics_class,
            SpeculativeDecoding(
                plan.policy,
                plan.mode,
                plan.proposer,
                plan.max_draft_tokens,
                plan.reason,
                plan.price,
                outcome.num_spec_steps,
                outcome.num_drafted_tokens,
                outcome.num_accepted_tokens,
                outcome.acceptance_histogram,
            ),
        )

    async def whole(self, deltas: AsyncGenerator[Delta, None]) -> bytes:
        """Collect every delta and return the response's JSON.

        Raises:
            BackendFailed: the worker broke.
        """
        choices = [WholeChoice() for _ in range(self._open_choices)]
        async for delta in deltas:
            self.observe(delta)
            choices[delta.choice].add(delta)
        self.check_complete()
        if self.call.job.sampling.logprobs is None:
            return self.rendering.response(choices, self.usage(), self.metrics())
        # Spelling 500 tokens with 20 alternatives each takes some 20 ms, and the loop has 5.
        return await asyncio.to_thread(
            self.rendering.response, choices, self.usage(), self.metrics()
        )
