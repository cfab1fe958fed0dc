"""Tests of the study of long contexts."""

from __future__ import annotations

import pytest

from bench.simulation.long_context import (
    ACCEPTANCE,
    LONG,
    NGRAM,
    PUBLISHED,
    SPARSE,
    Study,
    acceptance,
    recorded,
)
from draftgate.backends.sim.profile import load_profile


def test_acceptance_is_interpolated_between_the_published_contexts() -> None:
    """Published contexts have their figures, and other contexts lie between their neighbours."""
    for context, chance in ACCEPTANCE:
        assert acceptance(context) == chance
    assert acceptance(512) == ACCEPTANCE[0][1]
    assert acceptance(24_576) == pytest.approx(0.815)
    assert acceptance(200_000) == ACCEPTANCE[-1][1]


def test_drawn_drafts_are_right_as_often_as_published() -> None:
    """The share of right first tokens of sparse drafts is the acceptance at the context."""
    texts = recorded({LONG: 16_384}, "math", seed=0).texts(LONG, 0.0)
    guesses = [text.guess(SPARSE, place) for text in texts for place in range(text.length)]
    assert sum(one.agreed > 0 for one in guesses) / len(guesses) == pytest.approx(0.82, abs=0.01)


def test_n_gram_drafts_are_those_of_the_recording() -> None:
    """Both tasks replay their n-gram drafts, and summaries have more right tokens."""

    def right(lookups: str) -> float:
        texts = recorded({LONG: 16_384}, lookups, seed=0).texts(LONG, 0.0)
        guesses = [text.guess(NGRAM, place) for text in texts for place in range(text.length)]
        return sum(one.agreed for one in guesses) / len(guesses)

    assert right("summary") > 1.5 * right("math")


def test_published_profiles_hold_their_batches() -> None:
    """The devices of the paper's cells exist, and have sparse self-speculation."""
    for one in PUBLISHED:
        profile = load_profile(one.profile)
        assert SPARSE in profile.draft
        assert profile.kv_token_bytes * one.context * one.batch < 8 * 80e9


@pytest.mark.long
def test_sparse_drafts_gain_more_with_longer_contexts() -> None:
    """Reading the KV of a long context takes the time of a step, which drafts share."""
    study = Study("a100x8-7b", "math", 0)
    short, long = (study.batch(32, context)["speed"] for context in (2048, 16_384))
    assert long[f"fixed:3 {SPARSE}"] > short[f"fixed:3 {SPARSE}"] + 0.1
