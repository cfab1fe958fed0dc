"""The present speed of a worker, from which the gateway predicts latencies."""

from __future__ import annotations

import math
from typing import Final

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.types import WorkerSpeed

LAST_STEPS: Final = 32
"""Number of steps in a running mean: 0.3 to 1 second at steps of 10 to 30 ms. That averages over
prompts that arrive several times a second, and detects a full batch within ten tokens. Chosen by
that reasoning (2026-11-21), not tuned on a device."""

SEED_STEPS: Final = 2
"""Weight of the initial forecast, in steps. The first few measured steps replace it."""

SHARE_S: Final = 10.0
"""Time constant of the share of prompts in seconds. It averages over the prompts of a burst, and
follows the load of a minute. (Chosen, not tuned, 2026-11-24.)"""


class SpeedMeter:
    """Running means over the steps of a worker.

    A rate is the mean of the seconds over the mean of the tokens, not a mean of rates. A step that
    takes twice as long for twice the tokens therefore changes nothing, and short steps count
    little.

    A step's time extends from its planning to the planning of the next step. It includes drafting
    and the work of the host, but no idle time.
    """

    def __init__(self, cost: StepCost, step_tokens: int) -> None:
        self._step_tokens = step_tokens
        self._decodes = _Means(cost.seconds(1, 1, 1), 1.0)
        self._prompts = _Means(cost.seconds(step_tokens, step_tokens, 1), step_tokens)
        self._begun_s: float | None = None  # time of the last planning, None when idle
        self._last: tuple[int, int, int] | None = None  # work recorded since then
        self._prompt_share = 0.0
        self._shared_s: float | None = None  # time of its last update
        self._fixed_s = cost, 0.0, 0.0  # see `_fixed`

    def begin_step(self, now_s: float) -> float | None:
        """Record that the planning of a step begins.

        Returns:
            The seconds since the previous planning. None if `record_step` has not recorded that
            step yet, or the worker was idle.
        """
        step_s, prompts_s = None, 0.0
        if self._begun_s is not None and self._last is not None:
            decodes, tokens, prompt_tokens = self._last
            step_s = max(now_s - self._begun_s, 0.0)
            if decodes:
                self._decodes.add_step(step_s, tokens / decodes)
            if prompt_tokens:
                self._prompts.add_step(step_s, prompt_tokens)
                prompts_s = step_s * prompt_tokens / (prompt_tokens + decodes)
        self._add_prompts(prompts_s, now_s)
        self._begun_s, self._last = now_s, None
        return step_s

    def _add_prompts(self, prompts_s: float, now_s: float) -> None:
        """Add the seconds of prompts since the last call to their share."""
        passed_s = 0.0 if self._shared_s is None else now_s - self._shared_s
        if passed_s > 0.0:
            weight = 1.0 - math.exp(-passed_s / SHARE_S)
            self._prompt_share += weight * (prompts_s / passed_s - self._prompt_share)
        self._shared_s = now_s

    def record_idle(self) -> None:
        """Record that the worker is idle, because idle time belongs to no step."""
        self._begun_s = None

    def record_step(self, decodes: int, tokens: int, prompt_tokens: int) -> None:
        """Record the work of a step.

        Args:
            decodes: number of sequences that decoded.
            tokens: number of tokens that these sequences got.
            prompt_tokens: number of prompt tokens in the same step.
        """
        self._last = decodes, tokens, prompt_tokens

    def speed(self, cost: StepCost, sequences: int, kv_tokens: int) -> WorkerSpeed:
        """Return the present speed of the worker.

        Args:
            sequences: number of decoding sequences.
            kv_tokens: KV tokens that they read in a step.
        """
        decodes, full = max(sequences, 1), self._step_tokens
        alone_s, full_s = self._fixed(cost)
        step_s = cost.seconds(decodes, kv_tokens, decodes)
        # The cost of an additional sequence is the mean over a doubled batch. Costs are a
        # staircase, and the next sequence alone may not reach the next stair.
        more_s = (cost.seconds(2 * decodes, 2 * kv_tokens, 2 * decodes) - step_s) / decodes
        return WorkerSpeed(
            self._decodes.rate_s,
            self._prompts.rate_s,
            more_s / self._decodes.tokens,
            alone_s,
            more_s,
            full_s / full,
            cost.pair_s,
            min(self._prompt_share, 1.0),
        )

    def _fixed(self, cost: StepCost) -> tuple[float, float]:
        """Return the seconds of the smallest step and of a full one, which depend on costs only."""
        before, alone_s, full_s = self._fixed_s
        if before is not cost or not full_s:
            full = self._step_tokens
            alone_s, full_s = cost.seconds(1, 0, 1), cost.seconds(full, full, 1)
            self._fixed_s = cost, alone_s, full_s
        return alone_s, full_s


class _Means:
    """Running means of the seconds and the tokens of steps, with the same weights."""

    def __init__(self, step_s: float, tokens: float) -> None:
        self.step_s = step_s
        self.tokens = tokens
        self._steps = SEED_STEPS

    def add_step(self, step_s: float, tokens: float) -> None:
        """Add a step to a plain mean at first, and to a decaying mean later."""
        self._steps = min(self._steps + 1, LAST_STEPS)
        self.step_s += (step_s - self.step_s) / self._steps
        self.tokens += (tokens - self.tokens) / self._steps

    @property
    def rate_s(self) -> float:
        """Seconds per token."""
        return self.step_s / self.tokens
