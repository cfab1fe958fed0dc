"""The number of prompt tokens that join a step."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.policies.batching import (
    LATE_SHARE,
    LEAST_CHUNK,
    LEAST_STRETCH,
    MOST_TARGETS,
    STRETCH,
    FixedBudget,
    Slack,
    longest_step_s,
    longest_wait_s,
)
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.protocols import BatchingPolicy
from draftgate.policies.registry import batching_policy
from draftgate.policies.testing import check_batching
from draftgate.policies.types import BatchView

STAIRS = tuple(range(16, 2049, 16))
DRAFTS = (0, 16, 64, 256)
COST = StepCost(STAIRS, tuple(5e-3 + 20e-6 * tokens for tokens in STAIRS), 40e-9, pair_s=1e-9)


@pytest.mark.parametrize(
    "spec", ["slack", "slack:1", "fixed:512", "fixed:2048", "prefill_first", "decode_first"]
)
def test_shipped_policy_keeps_its_contract(spec: str) -> None:
    """Every shipped policy is found by its name and keeps the contract of `BatchingPolicy`."""
    policy = batching_policy(spec)
    assert isinstance(policy, BatchingPolicy)
    assert policy.name == spec
    check_batching(policy)


@given(
    st.integers(1, 256),
    st.integers(0, 4096),
    st.integers(0, 8000),
    st.floats(1e-3, 0.1),
)
def test_step_ends_in_time_and_on_a_stair(sequences, most, known, within_s) -> None:
    """A step ends on a stair, and either meets its target or has the minimum number of prompt
    tokens."""
    batch = BatchView(2 * sequences, 500 * sequences, sequences, most, known, within_s, within_s)
    tokens = Slack().prefill_tokens(batch, COST)
    step_s = COST.seconds(
        batch.tokens + tokens, batch.kv_tokens + known + tokens, sequences + 1
    ) + COST.pair_s * tokens * (known + tokens / 2)
    own_s = COST.seconds(sequences, batch.kv_tokens, sequences)
    assert step_s <= max(within_s, LEAST_STRETCH * own_s) or tokens <= LEAST_CHUNK
    assert tokens in {most, LEAST_CHUNK} or (batch.tokens + tokens) % 16 == 0


def test_tighter_target_never_gives_a_longer_chunk() -> None:
    """A tighter target never makes the chunk longer, and the chunk is never below its minimum."""
    chunks = [
        Slack().prefill_tokens(BatchView(32, 16_000, 32, 1500, 0, within_s, 0.1), COST)
        for within_s in (0.1, 0.03, 0.02, 0.008, 0.0)
    ]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] == 1500
    assert LEAST_CHUNK < chunks[-1] == chunks[-2] < chunks[-3]


def test_prompts_keep_their_share_under_an_impossible_target() -> None:
    """Prompts receive a third of the step and at least the minimum chunk."""
    tokens = Slack().prefill_tokens(BatchView(32, 16_000, 32, 1500, 0, 0.0, 1e-3), COST)
    own_s = COST.seconds(32, 16_000, 32)
    step_s = COST.seconds(32 + tokens, 16_000 + tokens, 33) + COST.pair_s * tokens**2 / 2
    assert 0.95 * LEAST_STRETCH * own_s < step_s <= LEAST_STRETCH * own_s
    drafted = BatchView(32 + 300, 16_000, 32, 1500, 0, 0.0, 1e-3)
    assert Slack().prefill_tokens(drafted, COST) == LEAST_CHUNK


def test_step_without_a_target_is_stretched_five_times() -> None:
    """Without targets, a step with prompts takes at most five times as long as its decodes."""
    batch = BatchView(32, 16_000, 32, 100_000)
    tokens = Slack().prefill_tokens(batch, COST)
    step_s = COST.seconds(32 + tokens, 16_000 + tokens, 33) + COST.pair_s * tokens**2 / 2
    assert 0.9 * STRETCH < step_s / COST.seconds(32, 16_000, 32) <= STRETCH


def test_drafts_do_not_stretch_a_step() -> None:
    """Drafts shorten the chunk and do not lengthen a step without a target."""
    chunks = [Slack().prefill_tokens(BatchView(32 + n, 16_000, 32, 100_000), COST) for n in DRAFTS]
    assert chunks == sorted(chunks, reverse=True)
    for drafts, tokens in zip(DRAFTS, chunks, strict=True):
        # A shorter chunk reads less and has fewer pairs, so the step is no longer.
        step_s = COST.seconds(32 + drafts + tokens, 16_000 + tokens, 33) + COST.pair_s * (
            tokens**2 / 2
        )
        assert step_s <= STRETCH * COST.seconds(32, 16_000, 32)


def test_uncertain_forecasts_leave_a_margin() -> None:
    """With normal forecast errors, one step in 200 is late."""
    sigma, within_s = 0.04, 0.05
    error = sigma * NormalDist().inv_cdf(0.75)
    batch = BatchView(32, 16_000, 32, 100_000, 0, within_s, within_s, cost_error=error)
    tokens = Slack().prefill_tokens(batch, COST)
    step_s = COST.seconds(32 + tokens, 16_000 + tokens, 33) + COST.pair_s * tokens**2 / 2
    late = 1.0 - NormalDist(1.0, sigma).cdf(within_s / step_s)
    assert 0.0015 < late <= 0.00505


@given(st.floats(-10.0, 10.0), st.floats(1e-3, 1.0))
def test_decode_waits_between_half_and_all_of_its_target(due_in_s, tpot_s) -> None:
    """An early decode waits for at most its whole target, and a late decode waits for half of its
    target."""
    waits_s = longest_wait_s(due_in_s, tpot_s)
    assert LATE_SHARE * tpot_s <= waits_s <= tpot_s
    assert waits_s == due_in_s or due_in_s < LATE_SHARE * tpot_s or due_in_s > tpot_s


def test_prompt_without_decodes_takes_the_whole_step() -> None:
    """No target shortens a step without decodes."""
    assert Slack().prefill_tokens(BatchView(0, 0, 0, 3000, 0, 1e-6, 1e-6), COST) == 3000


SHARES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60)
"""How much of the longest step each step of a decode uses."""


def _times_s(shares: list[float], token_s: float, later: Callable[[int], int]) -> list[float]:
    """Return when each token arrives, with a target of 1 s per token, from the first token."""
    at_s = [0.0]
    for place, share in enumerate(shares, 1):
        most_s = longest_step_s(place - at_s[-1], 1.0, later(place), token_s)
        at_s.append(at_s[-1] + token_s + share * max(most_s - token_s, 0.0))
    return at_s


@given(SHARES, st.floats(0.01, 1.0))
def test_mean_target_is_met_whatever_the_steps_use(shares, token_s) -> None:
    """A decode of a known length meets its mean target, even if each step uses all of its time."""
    at_s = _times_s(shares, token_s, lambda place: len(shares) - place)
    assert at_s[-1] <= len(shares) * (1.0 + 1e-9)


@given(SHARES, st.floats(0.01, 1.0))
def test_output_that_ends_early_has_at_most_half_more_than_its_target(shares, token_s) -> None:
    """If an output of n tokens is taken for one of 2n, its mean is at most 1.5 times the target."""
    at_s = _times_s(shares, token_s, lambda place: place)
    most_s = 2.0 - max(token_s, LATE_SHARE)
    assert all(one_s <= place * most_s * (1.0 + 1e-9) for place, one_s in enumerate(at_s))


@given(st.floats(-10.0, 10.0), st.floats(1e-3, 1.0), st.integers(0, 99), st.floats(1e-3, 2.0))
def test_more_later_tokens_never_shorten_the_longest_step(due_in_s, tpot_s, later, token_s) -> None:
    """Later tokens only add time, and even a late decode waits for half of its target."""
    steps_s = [longest_step_s(due_in_s, tpot_s, n, token_s) for n in (0, later, later + 1)]
    assert steps_s == sorted(steps_s)
    assert steps_s[0] == max(due_in_s, LATE_SHARE * tpot_s)


def test_no_step_takes_more_targets_than_the_policy_allows() -> None:
    """However far ahead the decodes are, no planned gap is longer than `slack:TARGETS` allows."""
    for targets in (1.0, MOST_TARGETS, 4.0):
        batch = BatchView(32, 16_000, 32, 100_000, 0, 1e6, 0.05)
        tokens = Slack(targets).prefill_tokens(batch, COST)
        step_s = COST.seconds(32 + tokens, 16_000 + tokens, 33) + COST.pair_s * tokens**2 / 2
        assert 0.9 * targets * 0.05 < step_s <= targets * 0.05


def test_fixed_budget_includes_decodes_and_drafts() -> None:
    """Decodes and drafts leave prompts the rest of a fixed budget."""
    busy = BatchView(100, 5000, 50, 3000)
    assert FixedBudget(512).prefill_tokens(busy, COST) == 412
    assert FixedBudget(64).prefill_tokens(busy, COST) == 0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("fixed", "fixed:TOKENS needs a whole number"),
        ("fixed:0", "1 token or more"),
        ("slack:0", "slack:TARGETS needs a positive number"),
        ("slack:x", "slack:TARGETS needs a positive number"),
        ("fast", "unknown batching policy 'fast'; known: decode_first, fixed:TOKENS"),
    ],
)
def test_unknown_policy_is_refused(spec: str, words: str) -> None:
    """The error names the requested policy and the known policies."""
    with pytest.raises(ValueError, match=words):
        batching_policy(spec)
