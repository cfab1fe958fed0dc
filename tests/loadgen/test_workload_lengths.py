"""Tests of random lengths, token estimates, and texts cut to a number of tokens."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import scipy

from draftgate.loadgen.workloads.base import LengthDistribution, TokenEstimator, cut, zipf
from tests.loadgen.workload_requests import COUNTER, LEAST_P, WordCounter


def test_lengths_are_lognormal_and_clamped() -> None:
    """Half of the lengths are below the median, and all are within the limits."""
    lengths, rng = LengthDistribution(median=100, sigma=1.0, least=20, most=400), Random(1)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert min(drawn) == 20
    assert max(drawn) == 400
    assert sum(length <= 100 for length in drawn) / 4000 == pytest.approx(0.5, abs=0.03)
    within = sum(100 / 2.718 < length < 100 * 2.718 for length in drawn) / 4000
    assert within == pytest.approx(0.683, abs=0.03)


def test_zipf_ranks_follow_the_exponent() -> None:
    """The ranks have probabilities in proportion to rank^-s (chi-square)."""
    shares, rng = zipf(8, 0.8), Random(2)
    seen = Counter(shares.draw(rng) for _ in range(4000))
    weights = [rank**-0.8 for rank in range(1, 9)]
    expected = [4000 * weight / sum(weights) for weight in weights]
    assert scipy.stats.chisquare([seen[rank] for rank in range(8)], expected).pvalue > LEAST_P


def test_a_measured_estimator_is_right_for_the_sum_of_its_samples() -> None:
    """The ratio is all characters over all tokens, and the source has the number of texts."""
    counter = TokenEstimator.measured([("a" * 300, 100), ("b" * 100, 60)])
    assert counter.characters_per_token == pytest.approx(2.5)
    assert counter.count("c" * 400) == 160
    assert counter.source == "measured on 2 texts"
    assert TokenEstimator().source == "estimated, not measured"
    for nothing in ([], [("", 3)], [("abc", 0)]):
        with pytest.raises(ValueError, match="cannot be measured"):
            TokenEstimator.measured(nothing)
    with pytest.raises(ValueError, match="positive"):
        TokenEstimator(0.0)


@pytest.mark.parametrize("counter", [COUNTER, WordCounter()], ids=["ratio", "words"])
def test_a_cut_is_the_longest_prefix_that_fits(counter) -> None:
    """A cut has at most the given tokens, and another character would exceed the limit."""
    text = "one two  three four\nfive six seven " * 3
    for tokens in range(40):
        kept = cut(text, tokens, counter)
        assert text.startswith(kept)
        assert counter.count(kept) <= tokens
        assert kept == text or counter.count(text[: len(kept) + 1]) > tokens
