"""Tests of the served model's profile: the terms added to the device's step table."""

from __future__ import annotations

import pytest

from bench.engine.serving_profile import line_through


def test_the_line_meets_exact_points_and_never_falls() -> None:
    """The fit recovers constant and slope, and noise never makes them negative."""
    assert line_through([(1, 3.0), (4, 6.0), (16, 18.0)]) == pytest.approx((2.0, 1.0))
    constant, slope = line_through([(1, 5.0), (16, 1.0)])
    assert slope == 0.0
    assert constant == pytest.approx(3.0)
    assert line_through([(1, 0.0), (2, 4.0)])[0] == 0.0
