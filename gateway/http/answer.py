"""One answer in the making: deltas in, figures and rendered pieces out."""

from __future__ import annotations

from msgspec import UNSET

from draftgate.backends.types import Delta, SpeculationOutcome
from draftgate.gateway.dispatch.placement import Placement
from draftgate.gateway.dispatch.run import Resume, Run
from draftgate.gateway.http.replies.rendering import Rendering, WholeChoice
from draftgate.gateway.http.replies.shapes import (
    PromptMetrics,
    PromptTokensDetails,
    ResponseMetrics,
    ResumeReply,
    SpeculativeDecoding,
    Usage,
)
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.offload import offload
from draftgate.gateway.telemetry.watch import RequestWatch


class Answer:
    """What the streaming and the whole form of an answer have in common."""

    def __init__(self, parsed: ParsedRequest, rendering: Rendering, watch: RequestWatch) -> None:
        """Begin before the job is admitted; `run` is set once it is."""
        self.parsed = parsed
        self.rendering = rendering
        self.watch = watch
        self.run: Run
        prompts = len(parsed.job.prompts)
        self._outcomes = [SpeculationOutcome() for _ in range(prompts)]
        self._open_choices = parsed.job.n * prompts

    @property
    def complete(self) -> bool:
        """Whether every choice has finished."""
        return self._open_choices == 0

    def observe(self, delta: Delta) -> None:
        """Take note of a delta; every one must pass here, in order."""
        self.watch.observe(delta)
        self._open_choices -= delta.finish_reason is not None
        if delta.outcome is not None:
            self._outcomes[delta.choice // self.parsed.job.n] += delta.outcome

    def usage(self) -> Usage:
        """Return the tokens so far."""
        prompt, output = self.watch.prompt_tokens, self.watch.output_tokens
        details = PromptTokensDetails(self.watch.cached_tokens)
        return Usage(prompt, output, prompt + output, details)

    def metrics(self) -> ResponseMetrics:
        """Return the decisions and what came of them, a prompt's choices summed."""
        placed = self.run.placed
        first = placed[0]
        prompts = [
            PromptMetrics(one.worker.worker_id, speculation_reply(one, outcome))
            for one, outcome in zip(placed, self._outcomes, strict=True)
        ]
        return ResponseMetrics(
            first.request.sampling.seed,
            first.worker.backend.card.numerics_class,
            first.worker.worker_id,
            speculation_reply(first, self.watch.outcome),
            prompts if len(prompts) > 1 else UNSET,
            [_resume_reply(one) for one in self.run.resumes] or UNSET,
        )

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of a delta that was observed; often one, now and then none."""
        last = self.complete and not self.parsed.include_usage
        usage = self.usage() if self.parsed.continuous_usage else UNSET
        return self.rendering.chunk(delta, usage, self.metrics() if last else UNSET)

    def ending(self) -> bytes:
        """Return the events behind the last delta."""
        if not self.parsed.include_usage:
            return self.rendering.ending()
        return self.rendering.ending(self.usage(), self.metrics())

    async def whole(self) -> bytes:
        """Collect every delta of the run and return the response's JSON.

        Raises:
            BackendFailed: the worker broke.
        """
        choices = [WholeChoice() for _ in range(self._open_choices)]
        async for delta in self.run.deltas:
            self.observe(delta)
            choices[delta.choice].append(delta)
        if self.parsed.job.sampling.logprobs is None and not self.parsed.job.traced:
            return self.rendering.response(choices, self.usage(), self.metrics())
        # Spelling 500 tokens with 20 alternatives each takes some 20 ms, and the loop has 5.
        return await offload(self.rendering.response, choices, self.usage(), self.metrics())


def _resume_reply(resume: Resume) -> ResumeReply:
    """Return where a prompt was and where it went on."""
    return ResumeReply(
        resume.index,
        resume.lost.worker.worker_id,
        resume.placed.worker.worker_id,
        resume.kept_tokens,
        resume.same_numerics_class,
    )


def speculation_reply(placed: Placement, outcome: SpeculationOutcome) -> SpeculativeDecoding:
    """Return what was decided for a request, and what came of it."""
    plan = placed.request.speculation
    return SpeculativeDecoding(
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
    )
