"""The choice between pulling a prefix from another worker and computing it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from draftgate.policies.kv_transfer import (
    MEASURED_S,
    PRIOR_BYTES_PER_S,
    LinkSpeed,
    PullReason,
    PullView,
    decide_pull,
)
from draftgate.policies.types import WorkerLoad, WorkerSpeed

TOKEN_BYTES = 6144
SPEED = WorkerSpeed(step_s=3e-3, step_sequence_s=1e-3, step_token_s=1.2e-4, pair_s=1.2e-7)
IDLE = WorkerLoad(0, 0, 1, 1, 0.0, 0.5, (), step_tokens=512, speed=SPEED)


def view(tokens: int, bytes_per_s: float, **changes: object) -> PullView:
    given = PullView(tokens, 0, tokens * TOKEN_BYTES, 0, bytes_per_s, IDLE)
    return replace(given, **changes)


def step_by_step_s(seen: PullView) -> float:
    """Return the seconds of a prefill as the sum over its steps."""
    seconds, known, left = 0.0, seen.known_tokens, seen.tokens
    while left:
        chunk = min(left, seen.load.step_tokens)
        seconds += chunk * SPEED.step_token_s + seen.load.running * SPEED.step_sequence_s
        seconds += sum(known + place for place in range(chunk)) * SPEED.pair_s
        known, left = known + chunk, left - chunk
    return seconds


@given(
    steps=st.integers(1, 20),
    known=st.integers(0, 4000),
    running=st.integers(0, 64),
    bytes_per_s=st.floats(1e6, 1e11),
    queued=st.integers(0, 10**8),
)
def test_prefix_is_pulled_if_and_only_if_that_is_faster(
    steps: int, known: int, running: int, bytes_per_s: float, queued: int
) -> None:
    """The prediction equals the sum over the steps of the prefill, and the faster way wins."""
    load = structs.replace(IDLE, running=running)
    tokens = steps * 512
    seen = view(tokens, bytes_per_s, known_tokens=known, load=load, queued_bytes=queued)
    decision = decide_pull(seen)
    assert decision.compute_s == pytest.approx(step_by_step_s(seen), rel=1e-3)
    assert decision.pull_s > (queued + tokens * TOKEN_BYTES) / bytes_per_s
    assert decision.pulls == (decision.pull_s < decision.compute_s)
    assert decision.reason is (PullReason.FASTER if decision.pulls else PullReason.SLOWER)


def test_break_even_of_the_shipped_model() -> None:
    """A prefix of 8,000 tokens pays at 12 MB/s and not at 9, one of 1,000 at 40 and not at 25."""
    for tokens, slow, fast in ((8000, 9e6, 12e6), (1000, 25e6, 40e6)):
        assert not decide_pull(view(tokens, slow)).pulls
        assert decide_pull(view(tokens, fast)).pulls


def test_nothing_is_pulled_without_gain_or_knowledge() -> None:
    """No tokens, a few tokens, and a destination without known costs give no pull."""
    unknown = structs.replace(IDLE, speed=WorkerSpeed())
    assert decide_pull(view(0, 1e9)).reason is PullReason.NOTHING
    assert decide_pull(view(-32, 1e9)).reason is PullReason.NOTHING
    assert decide_pull(view(16, 1e12)).reason is PullReason.SLOWER
    assert decide_pull(view(8000, 1e9, load=unknown)).reason is PullReason.UNKNOWN_SPEED


def test_measured_bandwidth_replaces_the_prior_until_it_is_old() -> None:
    """The first transfer sets the bandwidth, later ones move it, and an old value is forgotten."""
    link = LinkSpeed()
    assert link.at(0.0) == PRIOR_BYTES_PER_S
    link = link.measured(50_000_000, 1.0, now_s=3.0)
    assert link.at(3.5) == 5e7
    link = link.measured(100_000_000, 1.0, now_s=4.0)
    assert link.at(4.5) == pytest.approx(6.5e7)
    assert link.at(4.0 + MEASURED_S) == PRIOR_BYTES_PER_S
    assert link.measured(10, 1.0, now_s=99.0).at(99.0) == 10.0
