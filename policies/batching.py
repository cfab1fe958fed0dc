"""How many prompt tokens join a step's decodes and drafts.

Sarathi-Serve (Agrawal et al., arXiv 2403.02310): prompts are fed in chunks beside decodes, so that
no decode waits for a whole prefill. There a token budget is found once, by profiling against the
target; here each step has its own, from what the tightest decode can wait and what the step costs.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.types import BatchView

STRETCH: Final = 5.0
"""Without a target, a step with prefills may take so many times what its decodes alone take: the
strict target of Sarathi-Serve's evaluation."""

LATE_SHARE: Final = 0.5
"""Share of its target that a late decode waits for prompts all the same: it makes up for a token
with every other one. With none, one decode that was preempted for seconds stops all prompts until
it has caught up, and those behind them lose what it wins."""

MARGIN_ERRORS: Final = 3.82
"""Errors by which a step is planned to end before the target: the 99.5th percentile of a normal
error as a multiple of the median of its absolute values (2.576 / 0.6745). Of the hundredth of gaps
that P99 allows to be longer, half are left to stalls and preemptions; at the 99th percentile the
P99 of gaps lay at 0.98 to 1.00 of the target, and now and then beyond (`draftgate bench capacity`,
simulated, 2026-11-21)."""

LEAST_STRETCH: Final = 1.5
"""Prompts get a third of a step whatever was promised. With less, one request that asks for more
than the device can give stops all others: where half of the chats at 80% of what an h100-8b can
sustain had a target of 12 ms, these met it, and everybody waited 7 to 10 s for the first token;
with a third of each step, half of them met it, and first tokens took 0.1 to 0.4 s (`draftgate bench
classes`, simulated, 2026-11-21)."""

LEAST_CHUNK: Final = 32
"""Tokens of prompts that join a step all the same, where a third of it is less: two tiles of 16
rows."""


@dataclass(frozen=True, slots=True)
class Slack:
    """Fill what the tightest target leaves, up to the end of a stair of the step cost."""

    name: str = "slack"
    stalls_decodes: bool = False

    def prefill_tokens(self, batch: BatchView, cost: StepCost) -> int:
        """Return the most tokens with which the step still ends in time, rounded down to a stair.

        Alone, prompts take all there is: nobody waits.
        """
        most = batch.most_prefill_tokens
        if not batch.sequences or most <= 0:
            return most
        within_s = _within_s(batch, cost)
        if _seconds(batch, cost, most) <= within_s:
            return most
        edges = cost.edges_up_to(batch.tokens + most)
        chunks = [edge - batch.tokens for edge in edges if edge > batch.tokens]
        # The longer a chunk the longer the step, so the first one that is too long ends the search.
        fitting = bisect_right(chunks, within_s, key=lambda chunk: _seconds(batch, cost, chunk))
        longest = chunks[fitting - 1] if fitting else 0
        return min(max(longest, LEAST_CHUNK), most)


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """A step of so many tokens at most, decodes and drafts among them: Sarathi-Serve's own."""

    tokens: int
    stalls_decodes: bool = False

    def __post_init__(self) -> None:
        """Check the budget.

        Raises:
            ValueError: it is not positive.
        """
        if self.tokens < 1:
            raise ValueError(f"fixed:TOKENS needs 1 token or more, not {self.tokens}")

    @property
    def name(self) -> str:
        """`fixed:TOKENS`."""
        return f"fixed:{self.tokens}"

    def prefill_tokens(self, batch: BatchView, cost: StepCost) -> int:
        """Return what decodes and drafts leave of the budget: nothing if they exceed it."""
        del cost
        return max(0, min(self.tokens - batch.tokens, batch.most_prefill_tokens))


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Whole prompts by themselves, decodes wait: vLLM before chunked prefill, Orca's order."""

    name: str = "prefill_first"
    stalls_decodes: bool = True

    def prefill_tokens(self, batch: BatchView, cost: StepCost) -> int:
        """Return all there is room for."""
        del cost
        return max(0, batch.most_prefill_tokens)


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """No prompt before every decode has ended: batches of requests, FasterTransformer's order."""

    name: str = "decode_first"
    stalls_decodes: bool = False

    def prefill_tokens(self, batch: BatchView, cost: StepCost) -> int:
        """Return all there is room for where nobody decodes, else nothing."""
        del cost
        return 0 if batch.sequences else max(0, batch.most_prefill_tokens)


def _within_s(batch: BatchView, cost: StepCost) -> float:
    """Return the seconds that the step is planned to take at most."""
    own_s = cost.seconds(batch.sequences, batch.kv_tokens, batch.sequences)
    if batch.within_s is None:
        return STRETCH * own_s
    return max(batch.within_s / (1.0 + MARGIN_ERRORS * batch.cost_error), LEAST_STRETCH * own_s)


def patience_s(due_in_s: float, tpot_s: float) -> float:
    """Return the seconds a decode can wait for its next token.

    One that is ahead of its target does not wait longer for it: no gap is longer than the target.

    Args:
        due_in_s: seconds until the token is due; negative if it is late.
        tpot_s: its target.
    """
    return min(max(due_in_s, LATE_SHARE * tpot_s), tpot_s)


def _seconds(batch: BatchView, cost: StepCost, prefill_tokens: int) -> float:
    """Return the predicted seconds of the step with so many tokens of a prompt.

    They read what the prompt has, and attend to that and to each other.
    """
    read = batch.prompt_kv_tokens + prefill_tokens
    pairs = prefill_tokens * (batch.prompt_kv_tokens + prefill_tokens / 2)
    step_s = cost.seconds(
        batch.tokens + prefill_tokens, batch.kv_tokens + read, batch.sequences + 1
    )
    return step_s + cost.pair_s * pairs
