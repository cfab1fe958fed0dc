"""The gain of drafts in recorded texts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from draftgate.lab.plan.machines import recorded_drafts
from draftgate.lab.sim.recording import load_recording

LLAMA = load_recording("llama-3.1-8b")


@pytest.mark.parametrize("proposer", ["ngram", "draft_model"])
def test_lower_prices_draft_more_and_accept_more(proposer: str) -> None:
    """From price to price, the slots and the accepted tokens of a step never fall."""
    points = recorded_drafts(LLAMA, proposer, "code").points(100, 0.95)
    assert len(points) > 3
    for dear, cheap in pairwise(points):
        assert dear.slots <= cheap.slots
        assert dear.accepted <= cheap.accepted * 1.01
        assert dear.depth <= cheap.depth
    for point in points:
        assert point.accepted <= point.slots
        assert 1.0 <= point.least_tokens <= 1.0 + point.accepted


def test_steps_cover_the_texts() -> None:
    """With every draft token, a text has as many steps as tokens divided by tokens per step."""
    text = LLAMA.texts("code", 0.0)[0]
    position = steps = 0
    while position < text.length:
        position += 1 + text.guess("draft_model", position).agreed
        steps += 1
    (cheapest, *_) = reversed(recorded_drafts(LLAMA, "draft_model", "code").points(100, 0.95))
    assert 1.0 + cheapest.accepted == pytest.approx(text.length / steps, rel=0.5)


def test_few_requests_have_less_than_the_least_tokens() -> None:
    """A larger share of responses has fewer tokens per step, and short responses vary more."""
    drafts = recorded_drafts(LLAMA, "draft_model", "chat")
    most, some = drafts.points(100, 0.995)[-1], drafts.points(100, 0.5)[-1]
    assert most.least_tokens < some.least_tokens
    assert drafts.points(10, 0.95)[-1].least_tokens <= drafts.points(200, 0.95)[-1].least_tokens


def test_unknown_proposer_has_no_points() -> None:
    """A proposer that was not recorded gains nothing."""
    assert recorded_drafts(LLAMA, "sparse_self", "chat").points(100, 0.95) == ()
