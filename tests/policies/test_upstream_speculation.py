"""Whether drafts of a fixed length pay, from what can be seen of an engine."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from draftgate.policies.speculation.upstream_speculation import (
    KNEE_TOKENS,
    BatchShare,
    DraftMeans,
    acceptance_chance,
    drafts_pay,
    expected_accepted,
    fixed_draft_price,
)

CHANCES = st.floats(0.01, 0.99)
LENGTHS = st.integers(1, 16)


@given(CHANCES, LENGTHS)
def test_a_chance_is_found_back_from_the_means(chance: float, drafted: int) -> None:
    """What survives on average says how likely a token is, for each length of draft."""
    brute = sum(chance**slot for slot in range(1, drafted + 1))
    assert expected_accepted(chance, drafted) == pytest.approx(brute)
    assert acceptance_chance(DraftMeans(drafted, brute)) == pytest.approx(chance, abs=1e-6)


@given(LENGTHS)
def test_the_ends_are_certain(drafted: int) -> None:
    """All accepted is chance 1, none is chance 0."""
    assert acceptance_chance(DraftMeans(drafted, drafted)) == pytest.approx(1.0)
    assert acceptance_chance(DraftMeans(drafted, 0.0)) == pytest.approx(0.0, abs=1e-6)


@given(CHANCES, LENGTHS)
def test_drafts_pay_on_an_idle_engine_and_never_on_a_full_one(chance: float, drafted: int) -> None:
    """A step that costs the same with drafts earns by them; one all of arithmetic cannot."""
    means = DraftMeans(drafted, expected_accepted(chance, drafted))
    assert drafts_pay(fixed_draft_price(0.0, means), means)
    assert not drafts_pay(fixed_draft_price(1.0, means), means)


@given(CHANCES, LENGTHS, st.integers(1, 2000), st.floats(1.0, 2000.0))
def test_the_price_is_that_of_throughput(
    chance: float, drafted: int, running: int, fixed_tokens: float
) -> None:
    """Where the cost of steps is a line, drafts that do not pay make the engine slower by a token.

    At the margin: the last slot of each draft being verified or not changes tokens a second in the
    direction that the price says, for slots that are worth the mean one.
    """
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


def test_the_share_is_learned_from_times() -> None:
    """Streams at several loads show the line; what was not measured follows it."""
    fixed_s, each_s = 0.020, 0.0005
    seen = BatchShare()
    for running in (4, 8, 16, 24, 32) * 10:
        seen.add_stream(fixed_s + each_s * running, running)
    for running in (1, 16, 64, 200):
        truth = each_s * running / (fixed_s + each_s * running)
        assert seen.share(running, 4.0) == pytest.approx(truth, rel=0.05)


def test_without_times_the_reference_scale_counts() -> None:
    """A step of as many tokens as double it is half of the batch's."""
    assert BatchShare().share(KNEE_TOKENS / 4, 4.0) == pytest.approx(0.5)
    same = BatchShare()
    for _ in range(20):
        same.add_stream(0.03, 10.0)  # one load says nothing of another
    assert same.share(10.0, 4.0) == pytest.approx(40 / (40 + KNEE_TOKENS))


@given(
    st.lists(st.tuples(st.floats(1e-4, 2.0), st.integers(1, 512)), max_size=60),
    st.integers(1, 1000),
    st.floats(1.0, 17.0),
)
def test_whatever_is_measured_a_share_is_a_share(
    streams: list[tuple[float, int]], running: int, step_tokens: float
) -> None:
    """Noise, or times that fall with the load, never make a price below 0 or above that of all."""
    seen = BatchShare()
    for tpot_s, beside in streams:
        seen.add_stream(tpot_s, beside)
    assert 0.0 <= seen.share(running, step_tokens) <= 1.0
    assert seen.share(running, step_tokens) <= seen.share(running + 1, step_tokens) + 1e-9
