"""A comparison as `compare/1`."""

from __future__ import annotations

from math import isfinite
from typing import Any, Final

from draftgate.loadgen.compare.comparison import ERROR, Change, Comparison
from draftgate.loadgen.measuring.bootstrap import REPLICATES

FORMULAS: Final = {
    "interval": "change -+ t SE: SE over resamples of requests in blocks (stationary bootstrap), t"
    " of Student's law with n/block - 1 degrees of freedom; 95 % for each statistic by itself",
    "verdict": "worse: by more than its limit (without one, 0); better: by more than 0; Holm's"
    " correction over all that are judged",
}


def as_compare(comparison: Comparison) -> dict[str, Any]:
    """Return the `compare/1` of a comparison; ends of intervals that are not known are null."""
    return {
        "format": "compare/1",
        "valid": not comparison.invalid,
        "invalid_reasons": comparison.invalid,
        "regressed": comparison.regressed,
        "requests": list(comparison.requests),
        "paired": comparison.paired,
        "differing_settings": {name: list(both) for name, both in comparison.settings.items()},
        "changes": [_change(change) for change in comparison.changes],
        "family_wise_error": ERROR,
        "resamples": REPLICATES,
        "formulas": FORMULAS,
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "figure": change.key,
        "statistic": change.point or None,
        "a": change.a,
        "b": change.b,
        "change": change.change,
        "relative": change.relative,
        "interval": [end if isfinite(end) else None for end in change.interval],
        "p_worse": change.p_worse,
        "p_better": change.p_better,
        "block_requests": change.block,
        "threshold": None if change.limit is None else change.limit.in_words,
        "judged": change.judged,
        "verdict": change.verdict or None,
    }
