"""Tests of the queueing formulas, against simulated queues in virtual time."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from draftgate.lab.planning.queueing import highest_rate_rps, mean_ttft_s, mean_wait_s

PROMPT_S = 0.08
REQUESTS = 1_000_000


def _ends(at_s: np.ndarray, service_s: float) -> np.ndarray:
    """Return the times at which a server with one line finishes requests that arrive in order."""
    busy_s = np.arange(len(at_s)) * service_s
    return np.maximum.accumulate(at_s - busy_s) + busy_s + service_s


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_formula_agrees_with_a_simulated_queue(load: float) -> None:
    """The mean time to first token is that of a million simulated requests, within 2%."""
    rate_rps = load / PROMPT_S
    gaps = np.random.default_rng(0).exponential(1.0 / rate_rps, REQUESTS)
    arrived_s = np.cumsum(gaps)
    expected_s = float((_ends(arrived_s, PROMPT_S) - arrived_s).mean())
    assert mean_ttft_s(rate_rps, PROMPT_S) == pytest.approx(expected_s, rel=0.02)


@given(rate=st.floats(0.01, 10.0))
def test_form_is_that_of_the_paper(rate: float) -> None:
    """The mean time to first token has the closed form of DistServe."""
    d, load = PROMPT_S, rate * PROMPT_S
    assert mean_ttft_s(rate, d) == pytest.approx(d + load * d / (2 * (1 - load)))


@given(prompt=st.floats(0.01, 1.0), share=st.floats(0.1, 1.0), limit=st.floats(0.02, 5.0))
def test_highest_rate_reaches_the_limit(prompt: float, share: float, limit: float) -> None:
    """At the highest rate, the mean time is the limit. It is 0 if no rate is within the limit."""
    service_s = share * prompt
    rate_rps = highest_rate_rps(limit, prompt, service_s)
    if limit <= prompt:
        assert rate_rps == 0.0
    else:
        assert prompt + mean_wait_s(rate_rps, service_s) == pytest.approx(limit, rel=1e-6)


def test_overloaded_queue_has_no_mean_wait() -> None:
    """A queue at a load of 1 grows without bound, and without a limit its rate is below that."""
    assert mean_wait_s(2.0, 0.5) == math.inf
    assert highest_rate_rps(math.inf, 1.0, 0.5) == 2.0
