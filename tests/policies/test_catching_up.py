"""Tests of the cost of catching up with a sequence."""

from __future__ import annotations

import pytest

from draftgate.policies.speculation.catching_up import FIRST_SHARE, CatchingUp, expected_tokens


def used(share: float) -> CatchingUp:
    """Return the cost after many offers, of which this share was chosen."""
    catching_up = CatchingUp()
    for step in range(1000):
        catching_up.add_offer(1)
        chosen = int((step + 1) * share) > int(step * share)
        catching_up.end_step([1] if chosen else [])
    return catching_up


def test_cost_is_spread_over_the_expected_drafts() -> None:
    """Half of 40 steps use the proposer at first, and each of them bears its part."""
    assert CatchingUp().step_s(1e-2, 100.0, 2.5) == pytest.approx(1e-2 / (FIRST_SHARE * 40.0))


def test_rarely_chosen_proposer_has_fewer_steps_to_share_the_cost() -> None:
    """A proposer that is chosen in a tenth of its offers pays ten times as much for a draft as one
    that is always chosen."""
    often, rarely = (used(share).step_s(1e-2, 400.0, 2.0) for share in (1.0, 0.1))
    assert rarely == pytest.approx(10.0 * often, rel=0.2)


def test_steps_without_offers_do_not_change_the_share() -> None:
    """Sequences that are not worth catching up with do not make later ones more expensive."""
    catching_up = used(0.5)
    before_s = catching_up.step_s(1e-2, 400.0, 2.0)
    for _ in range(1000):
        catching_up.end_step([])
    assert catching_up.step_s(1e-2, 400.0, 2.0) == before_s


def test_step_bears_at_most_the_whole_cost() -> None:
    """The last tokens of a sequence do not cost more than catching up."""
    assert used(0.0).step_s(1e-2, 3.0, 2.0) == 1e-2


def test_expected_remainder_grows_with_the_output_up_to_the_limit() -> None:
    """A sequence is expected to continue for as long as its output, plus 64 tokens."""
    assert expected_tokens(0, 1000) == 64
    assert expected_tokens(100, 1000) == 164
    assert expected_tokens(100, 30) == 30
