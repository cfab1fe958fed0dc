"""Exact token distributions in double precision, and chi-square tests of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import scipy
import torch

ALPHA = 1e-3
"""The significance level. A correct sampler fails for one of a thousand fixed seeds."""


def filtered_distribution(
    logits: Sequence[float],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[float]:
    """Apply temperature, top-k, top-p and min-p in this order, with renormalisation after each."""
    best = max(logits)
    share = {t: math.exp((value - best) / temperature) for t, value in enumerate(logits)}

    def normalise(kept: list[int]) -> dict[int, float]:
        total = math.fsum(share[token] for token in kept)
        return {token: share[token] / total for token in kept}

    order = sorted(share, key=lambda token: (-share[token], token))
    share = normalise(order)
    share = normalise(order[: top_k or len(order)])
    if top_p < 1:
        length, reached = 0, 0.0
        while reached < top_p:
            reached += share[order[length]]
            length += 1
        share = normalise(order[:length])
    likeliest = max(share.values())
    share = normalise([token for token in share if share[token] >= min_p * likeliest])
    return [share.get(token, 0.0) for token in range(len(logits))]


def histogram(cells: torch.Tensor, num_cells: int) -> list[int]:
    """Count how often each cell occurs."""
    return torch.bincount(cells, minlength=num_cells).tolist()


def p_value(counts: Sequence[int], distribution: Sequence[float]) -> float:
    """Return the chi-square p-value of counts, or 0 if an impossible cell was counted.

    The test merges cells with fewer than 5 expected counts, which are too few for the
    approximation.
    """
    total = sum(counts)
    observed, expected = [], []
    rest_observed, rest_expected = 0.0, 0.0
    for count, probability in zip(counts, distribution, strict=True):
        if probability == 0 and count:
            return 0.0
        if probability * total >= 5:
            observed.append(float(count))
            expected.append(probability * total)
        else:
            rest_observed += count
            rest_expected += probability * total
    if rest_expected >= 5:
        observed.append(rest_observed)
        expected.append(rest_expected)
    elif rest_expected > 0:
        smallest = expected.index(min(expected))
        observed[smallest] += rest_observed
        expected[smallest] += rest_expected
    if len(observed) == 1:
        return 1.0
    return float(scipy.stats.chisquare(observed, expected).pvalue)


def assert_follows(counts: Sequence[int], distribution: Sequence[float]) -> None:
    """Fail if the counts are unlikely or include a cell of probability zero."""
    assert p_value(counts, distribution) > ALPHA
