"""Student's distribution against its tables."""

from __future__ import annotations

import pytest
from scipy import stats

from draftgate.loadgen.measuring.confidence import student_quantile, student_tail


def test_student_quantiles_are_those_of_the_tables() -> None:
    """Within 1.2 % from 3 degrees of freedom on, never too small for an interval below that."""
    for freedom, expected in ((3, 3.1824), (9, 2.2622), (10, 2.2281), (19, 2.0930)):
        assert student_quantile(freedom) == pytest.approx(expected, rel=0.012)
    assert student_quantile(10, 0.95) == pytest.approx(1.812, rel=0.01)
    assert 4.3027 <= student_quantile(2) <= 4.3027 * 1.05


@pytest.mark.parametrize("freedom", [3.0, 10.0, 99.0])
def test_student_is_students(freedom: float) -> None:
    """p-values are within 3 % of Student's from 3 degrees of freedom on, and quantiles invert."""
    for t in (0.5, 1.0, 2.0, 3.0):
        assert student_tail(freedom, t) == pytest.approx(stats.t.sf(t, freedom), rel=0.03)
        assert student_tail(freedom, -t) == pytest.approx(1 - student_tail(freedom, t))
    quantile = student_quantile(freedom)
    assert student_tail(freedom, quantile) == pytest.approx(0.025)
