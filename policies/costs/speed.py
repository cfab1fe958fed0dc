"""How fast a worker is now: what whoever waits for it may expect."""

from __future__ import annotations

from typing import Final

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.types import WorkerSpeed

LAST_STEPS: Final = 32
"""Steps that a mean looks back on: 0.3 to 1 second at steps of 10 to 30 ms. Prompts that come some
times a second are spread over it, and a batch that has filled up is known within its tenth token.
Chosen by that reasoning (2026-11-21), not tuned on a device."""

SEED_STEPS: Final = 2
"""Steps that a forecast counts for: it is out of the way after the first few that ran."""


class SpeedMeter:
    """Running means over the steps of a worker.

    A rate is the mean of its seconds by the mean of its tokens, not a mean of rates: a step that
    takes twice as long for twice the tokens changes nothing, and short steps count for little.

    Times are from the planning of a step to that of the next one while there is something to do, so
    they hold drafting and the host's own work, and nobody's idle time.
    """

    def __init__(self, cost: StepCost, step_tokens: int) -> None:
        """Begin with what a step is forecast to take: one decode, and a full step of a prompt."""
        self._step_tokens = step_tokens
        self._decodes = _Means(cost.seconds(1, 1, 1), 1.0)
        self._prompts = _Means(cost.seconds(step_tokens, step_tokens, 1), step_tokens)
        self._begun_s: float | None = None  # the last step was planned; None when idle
        self._last: tuple[int, int, int] | None = None  # what was accounted for since

    def begin(self, now_s: float) -> float | None:
        """Note that a step is planned now.

        Returns:
            The seconds since the last one was planned; None if that is not accounted for yet, or
            the worker was idle.
        """
        step_s = None
        if self._begun_s is not None and self._last is not None:
            decodes, tokens, prompt_tokens = self._last
            step_s = max(now_s - self._begun_s, 0.0)
            if decodes:
                self._decodes.observe(step_s, tokens / decodes)
            if prompt_tokens:
                self._prompts.observe(step_s, prompt_tokens)
        self._begun_s, self._last = now_s, None
        return step_s

    def rest(self) -> None:
        """Note that the step which was to begin has nothing to do: idle time is no step's."""
        self._begun_s = None

    def ran(self, decodes: int, tokens: int, prompt_tokens: int) -> None:
        """Account for a step.

        Args:
            decodes: sequences that decoded.
            tokens: that they got.
            prompt_tokens: that were fed beside them.
        """
        self._last = decodes, tokens, prompt_tokens

    def speed(self, cost: StepCost, sequences: int, kv_tokens: int) -> WorkerSpeed:
        """Return how fast the worker is.

        What one sequence more costs is the mean over as many as there are: costs are stairs, and
        where the next one alone ends says little.

        Args:
            sequences: that decode.
            kv_tokens: that they read in a step.
        """
        there, full = max(sequences, 1), self._step_tokens
        here_s = cost.seconds(there, kv_tokens, there)
        more_s = (cost.seconds(2 * there, 2 * kv_tokens, 2 * there) - here_s) / there
        return WorkerSpeed(
            self._decodes.rate_s,
            self._prompts.rate_s,
            more_s / self._decodes.tokens,
            cost.seconds(1, 0, 1),
            more_s,
            cost.seconds(full, full, 1) / full,
        )


class _Means:
    """Means of the seconds of steps and of their tokens, with the same weights."""

    def __init__(self, step_s: float, tokens: float) -> None:
        self.step_s = step_s
        self.tokens = tokens
        self._steps = SEED_STEPS

    def observe(self, step_s: float, tokens: float) -> None:
        """Take in a step: a plain mean of the first ones, then the older ones fade."""
        self._steps = min(self._steps + 1, LAST_STEPS)
        self.step_s += (step_s - self.step_s) / self._steps
        self.tokens += (tokens - self.tokens) / self._steps

    @property
    def rate_s(self) -> float:
        """Seconds for each token."""
        return self.step_s / self.tokens
