"""The response to a request during generation, which collects deltas and returns bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import UNSET, UnsetType

from draftgate.backends.types import Delta, SpeculationOutcome
from draftgate.gateway.dispatch.dispatcher import RunningJob
from draftgate.gateway.http.replies.metric_shapes import (
    PromptMetrics,
    ResponseMetrics,
    ResumeReply,
    RevisionReply,
    SpeculativeDecoding,
    flow_reply,
)
from draftgate.gateway.http.replies.reasoning_tokens import ReasoningTokens
from draftgate.gateway.http.replies.rendering import Choices, Rendering, TextFrame, WholeChoice
from draftgate.gateway.http.replies.shapes import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.offload import offload
from draftgate.gateway.telemetry.watch import RequestWatch
from draftgate.policies.speculation.revision import PlanRevision
from draftgate.policies.types import SpeculationPlan

StoreReply = Callable[[bytes], Awaitable[bool]]
"""A function that stores the JSON of a response, and returns whether the response is stored."""


_DETAILS: Final = slice(Delta._fields.index("logprobs"), Delta._fields.index("drafts"))
_ONLY_TEXT: Final = Delta(0, (), "")[_DETAILS]
"""The fields of a delta of nothing but tokens and text, as most deltas are."""

INLINE_CHOICES: Final = 64
"""Responses with more choices are rendered in a thread. 2048 choices take 150 ms (one core of a
busy Intel Xeon, 2026-11-28)."""


class Answer:
    """A response, streamed or whole.

    Attributes:
        run: the run of the job, set once the job is admitted.
    """

    def __init__(
        self,
        parsed: ParsedRequest,
        rendering: Rendering,
        watch: RequestWatch,
        store: StoreReply | None = None,
    ) -> None:
        self.parsed = parsed
        self.rendering = rendering
        self.watch = watch
        self.run: RunningJob
        self._store = store
        self._frames: dict[int, TextFrame] = {}  # by choice
        self._open_choices = parsed.job.n * len(parsed.job.prompts)
        self._reasoning: list[ReasoningTokens] = []  # by choice, if the model marks it
        if parsed.reasoning is not None:
            tokenizer = parsed.served.tokenizer
            self._reasoning = [
                ReasoningTokens(parsed.reasoning, tokenizer) for _ in range(parsed.job.n)
            ]

    @property
    def complete(self) -> bool:
        """Whether every choice has finished."""
        return self._open_choices == 0

    def observe(self, delta: Delta) -> None:
        """Record a delta.

        The caller must pass every delta, in order.
        """
        self.watch.observe(delta)
        if delta.finish_reason is not None:
            self._open_choices -= 1
        if self._reasoning:
            self._reasoning[delta.choice].add(delta.token_ids)

    def usage(self) -> Usage:
        """Return the token usage so far."""
        prompt, output = self.watch.prompt_tokens, self.watch.output_tokens
        details = PromptTokensDetails(self.watch.cached_tokens)
        if not self.parsed.job.prediction_ids and not self._reasoning:
            return Usage(prompt, output, prompt + output, details)
        outcome = self.watch.outcome
        described = CompletionTokensDetails(
            outcome.accepted_prediction_tokens,
            outcome.rejected_prediction_tokens,
            sum(choice.count for choice in self._reasoning),
        )
        return Usage(prompt, output, prompt + output, details, described)

    def metrics(self) -> ResponseMetrics:
        """Return the decisions and their outcomes, summed over the choices of each prompt."""
        holds = self.run.holds
        first = holds[0]
        prompts: list[PromptMetrics] | UnsetType = UNSET
        if len(holds) > 1:
            prompts = [
                PromptMetrics(
                    hold.worker.worker_id,
                    self._speculation(hold.request.speculation, hold.output.outcome),
                )
                for _, hold in sorted(holds.items())
            ]
        return ResponseMetrics(
            first.request.sampling.seed,
            first.numerics_class,
            first.worker.worker_id,
            self._speculation(first.request.speculation, self.watch.outcome),
            prompts,
            [ResumeReply(**one.shown()) for one in self.run.resumes] or UNSET,
            flow_reply(self.run.hop),
        )

    def _speculation(
        self, plan: SpeculationPlan, outcome: SpeculationOutcome
    ) -> SpeculativeDecoding:
        return speculation_reply(plan, outcome, self.run.path_reason)

    def events(self, delta: Delta) -> bytes:
        """Record a delta and return its events, usually one and sometimes none.

        The caller must pass every delta, in order.
        """
        if delta[_DETAILS] == _ONLY_TEXT:
            self.watch.observe_text(delta)
            if self._reasoning:
                self._reasoning[delta.choice].add(delta.token_ids)
            if not delta.text:
                return b""  # the worker holds the text back
            frame = self._frames.get(delta.choice)
            if frame is None:
                frame = self.rendering.text_frame(delta.choice)
                if frame is None:
                    return self.chunk(delta)
                self._frames[delta.choice] = frame
            return frame.event(delta.text)
        self.observe(delta)
        return self.chunk(delta)

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of an observed delta."""
        if not (delta.text or delta.finish_reason or delta.logprobs or delta.steps):
            return b""  # the worker holds the text back
        parsed, last = self.parsed, not self._open_choices
        usage = self.usage() if parsed.continuous_usage else UNSET
        metrics = self.metrics() if last and not parsed.include_usage else UNSET
        return self.rendering.chunk(delta, usage, metrics)

    async def ending(self) -> bytes:
        """Return the events after the last delta."""
        if not self.parsed.include_usage:
            return self.rendering.ending()
        await self._store_response(())
        # The last events of `/v1/responses` repeat the log probabilities of all tokens.
        return await self._render(self.rendering.ending)

    async def whole(self) -> bytes:
        """Collect all deltas of the run and return the JSON of the response.

        Raises:
            BackendFailed: the worker failed.
        """
        choices = [WholeChoice() for _ in range(self._open_choices)]

        def collect(delta: Delta) -> None:
            self.observe(delta)
            choices[delta.choice].append(delta)

        self.run.sink = collect
        await self.run.finished()
        await self._store_response(choices)
        return await self._render(self.rendering.response, choices)

    async def _store_response(self, choices: Choices) -> None:
        """Store the response, if the client wants it.

        The client may continue the response as soon as it has read the end. The response is
        therefore stored before.
        """
        if self._store is not None:
            reply = await self._render(self.rendering.finish, choices)
            self.rendering.stored = await self._store(reply)

    async def _render(self, render: Callable[..., bytes], *collected: Choices) -> bytes:
        """Return what the rendering makes of the whole output, in a thread if this takes long."""
        job, end = self.parsed.job, (self.usage(), self.metrics())
        sampling = job.sampling
        brief = sampling.logprobs is None and sampling.prompt_logprobs is None
        few = job.n * len(job.prompts) <= INLINE_CHOICES
        if brief and few and not job.traced:
            return render(*collected, *end)
        # Rendering 500 tokens with 20 alternatives each takes about 20 ms.
        return await offload(render, *collected, *end)


def speculation_reply(
    plan: SpeculationPlan, outcome: SpeculationOutcome, path_reason: str = ""
) -> SpeculativeDecoding:
    """Return the speculation plan of a prompt and its outcome.

    Args:
        path_reason: why the request follows the path to its client, or empty.
    """
    reason = f"{plan.reason}; {path_reason}" if path_reason else plan.reason
    steps, drafted = outcome.num_spec_steps, outcome.num_drafted_tokens
    accepted = outcome.num_accepted_tokens
    return SpeculativeDecoding(
        plan.policy,
        plan.mode,
        plan.proposer,
        plan.max_draft_tokens,
        plan.cause,
        reason,
        plan.price,
        steps,
        drafted,
        accepted,
        outcome.acceptance_histogram,
        round(outcome.saved_s, 6),
        drafted,
        accepted,
        1.0 + accepted / max(steps, 1),
        accepted / max(drafted, 1),
        [_revision_reply(one) for one in outcome.revisions] or UNSET,
    )


def _revision_reply(revision: PlanRevision) -> RevisionReply:
    drafting = "on" if revision.on else "off"
    return RevisionReply(drafting, revision.cause.value, revision.output_tokens, revision.reason)
