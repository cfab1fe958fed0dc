"""Policies that choose how many prompt tokens join the decodes and drafts of a step.

Chunked prefill (Sarathi-Serve: Agrawal et al., arXiv 2403.02310) computes prompts in chunks
together with decodes, so no decode waits for a whole prefill. Sarathi-Serve profiles one token
budget that meets the target. Here each step has its own budget. It follows from the time that the
tightest decode can wait over the rest of its output, and from the cost of the step.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import inf
from typing import Final

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.types import BatchView

STRETCH: Final = 5.0
"""Maximum duration of a step with prompts, as a multiple of the time of its decodes, without a
target. This is the strict target of Sarathi-Serve's evaluation."""

LATE_SHARE: Final = 0.5
"""Share of its target that even a late decode waits for prompts, which lets it gain one token on
its target in every second step. Without this share, a decode that was preempted for seconds
would stop all prompts until it has caught up."""

MARGIN_ERRORS: Final = 3.82
"""Margin between a step and its target, in median errors. It is the 99.5th percentile of a normal
error over the median of its absolute values (2.576 / 0.6745). P99 allows one longer gap in a
hundred, and half of these are left to stalls and preemptions. With the 99th percentile, the P99
of gaps was 0.98 to 1.00 of the target, and sometimes more (simulated,
bench/results/scheduling.md, 2026-11-21)."""

LEAST_STRETCH: Final = 1.5
"""Duration that a step with prompts may always have, as a multiple of the time of its decodes. It
leaves prompts at least a third of the step, whatever the targets. Otherwise one request with a
target that the device cannot meet stops all prompts. At 80% of the capacity of an h100-8b, half
of the chats had a target of 12 ms. They met it, and all requests waited 7 to 10 s for the first
token. With a third of each step for prompts, half of these chats met the target. First tokens
took 0.1 to 0.4 s (`bench/results/classes.json`, simulated, 2026-11-21)."""

MOST_TARGETS: Final = 2.0
"""Longest step with prompts, in TPOT targets, which bounds the gap that a client sees. Eight H100
with Llama-2-70B met both targets of 13.8%, 98.1%, 99.0% and 99.2% of the requests with 1, 2, 4 and
any number of targets at 23 requests/s (`draftgate bench splitwise`, simulated, 2026-11-30)."""

LEAST_CHUNK: Final = 32
"""Minimum number of prompt tokens in a step with prompts: two tiles of 16 rows."""


@dataclass(frozen=True, slots=True)
class Slack:
    """`slack[:TARGETS]`: use the time that the tightest target leaves, up to the end of a stair.

    Attributes:
        most_targets: longest step with prompts, in multiples of the tightest TPOT target. With 1,
            no planned gap between two tokens is longer than the target.

    Raises:
        ValueError: `most_targets` is not positive.
    """

    most_targets: float = MOST_TARGETS
    stalls_decodes: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.most_targets < inf:
            raise ValueError(f"slack:TARGETS needs a positive number, not {self.most_targets:g}")

    @property
    def name(self) -> str:
        usual = self.most_targets == MOST_TARGETS
        return "slack" if usual else f"slack:{self.most_targets:g}"

    def prefill_tokens(self, batch: BatchView, cost: StepCost) -> int:
        most = batch.most_prefill_tokens
        if not batch.sequences or most <= 0:
            return most
        within_s = self._within_s(batch, cost)
        if _seconds(batch, cost, most) <= within_s:
            return most
        edges = cost.edges_up_to(batch.tokens + most)
        chunks = [edge - batch.tokens for edge in edges if edge > batch.tokens]
        # Step times rise with the chunk, so bisection finds the longest chunk in time.
        fitting = bisect_right(chunks, within_s, key=lambda chunk: _seconds(batch, cost, chunk))
        longest = chunks[fitting - 1] if fitting else 0
        return min(max(longest, LEAST_CHUNK), most)

    def _within_s(self, batch: BatchView, cost: StepCost) -> float:
        """Return the longest time in seconds for which the step may be planned."""
        own_s = cost.seconds(batch.sequences, batch.kv_tokens, batch.sequences)
        if batch.within_s is None or batch.tpot_s is None:
            return STRETCH * own_s
        within_s = min(batch.within_s, self.most_targets * batch.tpot_s) - batch.drafting_s
        return max(within_s / (1.0 + MARGIN_ERRORS * batch.cost_error), LEAST_STRETCH * own_s)


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """`fixed:TOKENS`: a token budget for the whole step, as in Sarathi-Serve.

    Raises:
        ValueError: the budget is not positive.
    """

    tokens: int
    stalls_decodes: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"fixed:TOKENS needs 1 token or more, not {self.tokens}")

    @property
    def name(self) -> str:
        return f"fixed:{self.tokens}"

    def prefill_tokens(self, batch: BatchView, cost: StepCost) -> int:
        del cost
        return max(0, min(self.tokens - batch.tokens, batch.most_prefill_tokens))


def longest_step_s(due_in_s: float, tpot_s: float, later_tokens: int, token_s: float) -> float:
    """Return the longest step after which a decode can still meet its TPOT target.

    The target is a mean over the request, so the decode may use all the time that it is ahead of
    its target, and the time by which its later tokens can be faster than the target. Even if later
    steps have prompts for half of the target, it then ends in time. A late decode waits for half
    of its target.

    Args:
        due_in_s: seconds until the next token is due, negative if the token is late.
        tpot_s: TPOT target of the sequence, in seconds.
        later_tokens: tokens after the next one that may make up for this step.
        token_s: seconds of a step without prompts.
    """
    late_s = LATE_SHARE * tpot_s
    pace_s = max(late_s, token_s)
    if pace_s < tpot_s:
        due_in_s += later_tokens * (tpot_s - pace_s)
    return max(late_s, due_in_s)


def longest_wait_s(due_in_s: float, tpot_s: float) -> float:
    """Return the seconds that a decode can wait for its next token, at most its TPOT target.

    Args:
        due_in_s: seconds until the token is due, negative if the token is late.
        tpot_s: TPOT target of the sequence, in seconds.
    """
    return min(max(due_in_s, LATE_SHARE * tpot_s), tpot_s)


def _seconds(batch: BatchView, cost: StepCost, prefill_tokens: int) -> float:
    """Return the predicted seconds of the step with `prefill_tokens` more prompt tokens.

    Prompt tokens attend to the cached tokens of the prompt and to each other.
    """
    read = batch.prompt_kv_tokens + prefill_tokens
    pairs = prefill_tokens * (batch.prompt_kv_tokens + prefill_tokens / 2)
    step_s = cost.seconds(
        batch.tokens + prefill_tokens, batch.kv_tokens + read, batch.sequences + 1
    )
    return step_s + cost.pair_s * pairs
