"""The gain of drafts of a fixed length on an upstream."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from draftgate.policies.speculation.upstream_speculation import (
    KNEE_TOKENS,
    BatchShare,
    DraftMeans,
    drafts_pay,
    expected_accepted,
    fixed_draft_price,
    upstream_acceptance,
)

CHANCES = st.floats(0.01, 0.99)
LENGTHS = st.integers(1, 16)


@given(CHANCES, LENGTHS)
def test_chance_is_recovered_from_the_means(chance: float, drafted: int) -> None:
    """The acceptance probability is recovered from the means of any draft length."""
    brute = sum(chance**slot for slot in range(1, drafted + 1))
    assert expected_accepted(chance, drafted) == pytest.approx(brute)
    assert upstream_acceptance(DraftMeans(drafted, brute)) == pytest.approx(chance, abs=1e-6)


@given(LENGTHS)
def test_all_accepted_is_1_and_none_is_0(drafted: int) -> None:
    """The extreme acceptance probabilities are exact."""
    assert upstream_acceptance(DraftMeans(drafted, drafted)) == pytest.approx(1.0)
    assert upstream_acceptance(DraftMeans(drafted, 0.0)) == pytest.approx(0.0, abs=1e-6)


@given(CHANCES, LENGTHS)
def test_drafts_gain_on_an_idle_engine_and_never_on_a_full_engine(
    chance: float, drafted: int
) -> None:
    """Drafts pay when slots are free and never pay when slots cost their full share."""
    means = DraftMeans(drafted, expected_accepted(chance, drafted))
    assert drafts_pay(fixed_draft_price(0.0, means), means)
    assert not drafts_pay(fixed_draft_price(1.0, means), means)


@given(CHANCES, LENGTHS, st.integers(1, 2000), st.floats(1.0, 2000.0))
def test_drafts_pay_exactly_if_they_raise_throughput(
    chance: float, drafted: int, running: int, fixed_tokens: float
) -> None:
    """Drafts pay exactly if the last slot of each draft raises throughput."""
    accepted = expected_accepted(chance, drafted)
    means = DraftMeans(drafted, accepted)
    step = fixed_tokens + running * (1 + drafted)
    share = running * (1 + drafted) / step
    less = 1e-6
    rate = (1 + accepted) / step
    worth = accepted / drafted
    fewer = (1 + accepted - less * worth) / (step - less * running)
    assume(abs(rate - fewer) > 1e-12 * rate)
    assert drafts_pay(fixed_draft_price(share, means), means) == (rate > fewer)


def test_batch_share_is_learned_from_times() -> None:
    """Streams at several loads determine the line, which also fits other loads."""
    fixed_s, each_s = 0.020, 0.0005
    seen = BatchShare()
    for running in (4, 8, 16, 24, 32) * 10:
        seen.add_stream(fixed_s + each_s * running, running)
    for running in (1, 16, 64, 200):
        truth = each_s * running / (fixed_s + each_s * running)
        assert seen.share(running, 4.0) == pytest.approx(truth, rel=0.05)


def test_batch_share_without_times_is_that_of_the_reference_scale() -> None:
    """A batch of `KNEE_TOKENS` doubles the time of a step on the reference scale."""
    assert BatchShare().share(KNEE_TOKENS / 4, 4.0) == pytest.approx(0.5)
    same = BatchShare()
    for _ in range(20):
        same.add_stream(0.03, 10.0)  # a single load does not determine the slope
    assert same.share(10.0, 4.0) == pytest.approx(40 / (40 + KNEE_TOKENS))


@given(
    st.lists(st.tuples(st.floats(1e-4, 2.0), st.integers(1, 512)), max_size=60),
    st.integers(1, 1000),
    st.floats(1.0, 17.0),
)
def test_batch_share_stays_between_0_and_1(
    streams: list[tuple[float, int]], running: int, step_tokens: float
) -> None:
    """The share stays between 0 and 1 with noisy times and with times that fall with the load."""
    seen = BatchShare()
    for tpot_s, beside in streams:
        seen.add_stream(tpot_s, beside)
    assert 0.0 <= seen.share(running, step_tokens) <= 1.0
    assert seen.share(running, step_tokens) <= seen.share(running + 1, step_tokens) + 1e-9
