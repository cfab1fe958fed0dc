"""Exact laws of tokens by double-precision arithmetic, and chi-square tests against them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from scipy import stats

ALPHA = 1e-3
"""Tests are deterministic; a right sampler fails a newly chosen seed once in a thousand times."""


def filtered_distribution(
    logits: Sequence[float],
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> list[float]:
    """Temperature, top-k, top-p and min-p as they read, renormalised after each."""
    best = max(logits)
    law = {t: math.exp((value - best) / temperature) for t, value in enumerate(logits)}

    def normalise(kept: list[int]) -> dict[int, float]:
        total = math.fsum(law[token] for token in kept)
        return {token: law[token] / total for token in kept}

    order = sorted(law, key=lambda token: (-law[token], token))
    law = normalise(order)
    law = normalise(order[: top_k or len(order)])
    if top_p < 1:
        length, reached = 0, 0.0
        while reached < top_p:
            reached += law[order[length]]
            length += 1
        law = normalise(order[:length])
    likeliest = max(law.values())
    law = normalise([token for token in law if law[token] >= min_p * likeliest])
    return [law.get(token, 0.0) for token in range(len(logits))]


def histogram(cells: torch.Tensor, num_cells: int) -> list[int]:
    """How often each cell occurs."""
    return torch.bincount(cells, minlength=num_cells).tolist()


def p_value(counts: Sequence[int], law: Sequence[float]) -> float:
    """The chi-square test of counts against a law; 0 if something impossible was counted.

    Cells in which fewer than 5 counts are expected, too few for the approximation, are merged.
    """
    total = sum(counts)
    observed, expected = [], []
    rest_observed, rest_expected = 0.0, 0.0
    for count, probability in zip(counts, law, strict=True):
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
    return float(stats.chisquare(observed, expected).pvalue)


def assert_follows(counts: Sequence[int], law: Sequence[float]) -> None:
    """Fail if the counts are unlikely under the law, or hit what has probability zero."""
    assert p_value(counts, law) > ALPHA
