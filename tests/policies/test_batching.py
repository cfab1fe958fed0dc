"""The number of prompt tokens that join a step."""

from __future__ import annotations

from statistics import NormalDist

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.policies.batching import (
    LATE_SHARE,
    LEAST_CHUNK,
    LEAST_STRETCH,
    STRETCH,
    FixedBudget,
    Slack,
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
    "spec", ["slack", "fixed:512", "fixed:2048", "prefill_first", "decode_first"]
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
    batch = BatchView(2 * sequences, 500 * sequences, sequences, most, known, within_s)
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
        Slack().prefill_tokens(BatchView(32, 16_000, 32, 1500, 0, within_s), COST)
        for within_s in (0.1, 0.03, 0.02, 0.008, 0.0)
    ]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] == 1500
    assert LEAST_CHUNK < chunks[-1] == chunks[-2] < chunks[-3]


def test_prompts_keep_their_share_under_an_impossible_target() -> None:
    """Prompts receive a third of the step and at least the minimum chunk."""
    tokens = Slack().prefill_tokens(BatchView(32, 16_000, 32, 1500, 0, 0.0), COST)
    own_s = COST.seconds(32, 16_000, 32)
    step_s = COST.seconds(32 + tokens, 16_000 + tokens, 33) + COST.pair_s * tokens**2 / 2
    assert 0.95 * LEAST_STRETCH * own_s < step_s <= LEAST_STRETCH * own_s
    drafted = BatchView(32 + 300, 16_000, 32, 1500, 0, 0.0)
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
    batch = BatchView(32, 16_000, 32, 100_000, 0, within_s, error)
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
    assert Slack().prefill_tokens(BatchView(0, 0, 0, 3000, 0, 1e-6), COST) == 3000


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
        ("slack:3", "takes no argument"),
        ("fast", "unknown batching policy 'fast'; known: decode_first, fixed:TOKENS"),
    ],
)
def test_unknown_policy_is_refused(spec: str, words: str) -> None:
    """The error names the requested policy and the known policies."""
    with pytest.raises(ValueError, match=words):
        batching_policy(spec)
