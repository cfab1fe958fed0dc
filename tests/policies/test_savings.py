"""The bound on the time that drafts may cost, by the clock."""

from __future__ import annotations

import random
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from draftgate.policies.speculation.savings import (
    LOSS_SHARE,
    MOST_CREDIT_S,
    MOST_CREDIT_STEPS,
    DraftSavings,
)
from tests.examples import examples

WINDOW_S = 30.0

Step = tuple[float, float]
"""Tokens per sequence of a step with drafts, and its seconds in steps without drafts."""


def run(
    savings: DraftSavings,
    plain_s: float,
    drafted: Callable[[], Step],
    steps: int,
    predicted: float = 1.0,
) -> list[tuple[float, float]]:
    """Return the seconds and the tokens per sequence of each step of a worker.

    Args:
        plain_s: seconds of a step without drafts.
        drafted: returns the next step with drafts.
        predicted: ratio of the predicted seconds of a step without drafts to the true ones.
    """
    done = []
    for _ in range(steps):
        if savings.stops_drafts or savings.omits_drafts:
            savings.add_plain_step(predicted * plain_s, plain_s)
            done.append((plain_s, 1.0))
        else:
            tokens, times = drafted()
            savings.add_drafted_step(tokens, predicted * plain_s, times * plain_s)
            done.append((times * plain_s, tokens))
    return done


def worst_loss(done: list[tuple[float, float]], plain_s: float, window_s: float) -> float:
    """Return the largest share of any window of this length that drafts cost."""
    worst, first, seconds, tokens = 0.0, 0, 0.0, 0.0
    for step_s, emitted in done:
        seconds, tokens = seconds + step_s, tokens + emitted
        while seconds > window_s:
            worst = max(worst, 1.0 - tokens * plain_s / seconds)
            seconds, tokens = seconds - done[first][0], tokens - done[first][1]
            first += 1
    return worst


@given(
    plain_s=st.sampled_from([1e-3, 20e-3, 60e-3, 0.3]),
    drafts=st.lists(st.tuples(st.floats(1.0, 6.0), st.floats(1.0, 3.0)), min_size=1, max_size=40),
    predicted=st.sampled_from([0.7, 1.0, 1.4]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=examples(40), deadline=None)
def test_drafts_cost_at_most_five_percent_of_any_thirty_seconds(
    plain_s: float, drafts: list[Step], predicted: float, seed: int
) -> None:
    """Whatever drafts bring and cost, and however wrong the predicted step is, the loss of every
    window is bounded after the ratio of measured to predicted steps is known."""
    rng = random.Random(seed)
    savings = DraftSavings()
    for _ in range(200):
        savings.add_plain_step(predicted * plain_s, plain_s)
    steps = int(3 * WINDOW_S / plain_s) if plain_s >= 20e-3 else 20_000
    done = run(savings, plain_s, lambda: rng.choice(drafts), steps, predicted)
    window_s = min(WINDOW_S, steps * plain_s / 3)
    bound = LOSS_SHARE + (min(MOST_CREDIT_S, MOST_CREDIT_STEPS * plain_s) + 4 * plain_s) / window_s
    assert worst_loss(done, plain_s, window_s) <= bound + 1e-6
    if window_s >= WINDOW_S and plain_s <= 60e-3:
        assert bound < 0.05


def test_texts_that_turn_unpredictable_stop_drafts_and_predictable_ones_resume_them() -> None:
    """Useless drafts are stopped, tried again now and then, and resumed when they pay."""
    savings = DraftSavings()
    run(savings, 20e-3, lambda: (3.0, 1.2), 500)
    assert not savings.stops_drafts
    useless = run(savings, 20e-3, lambda: (1.0, 1.5), 3000)
    assert 0.02 < sum(step_s > 20e-3 for step_s, _ in useless) / 3000 < 0.1
    run(savings, 20e-3, lambda: (3.0, 1.2), 1000)
    useful = run(savings, 20e-3, lambda: (3.0, 1.2), 500)
    assert sum(tokens > 1.0 for _, tokens in useful) >= 490


@pytest.mark.parametrize(("tokens", "longest"), [(1.1, 20), (1.5, 110), (3.0, 420)])
def test_drafts_that_save_little_are_often_compared(tokens: float, longest: int) -> None:
    """A worker measures a step without drafts more often if drafts save less, because it then costs
    less."""
    savings = DraftSavings()
    run(savings, 20e-3, lambda: (tokens, 1.0), 3000)
    done = run(savings, 20e-3, lambda: (tokens, 1.0), 3000)
    plain = sum(emitted == 1.0 for _, emitted in done)
    assert longest / 1.4 < len(done) / plain < 1.1 * longest


def test_drafts_that_pay_on_average_are_hardly_ever_stopped() -> None:
    """Drafts of which six in ten fail, but which save half a step on average, keep running, and the
    steps without them cost less than 1% of the speed."""
    rng = random.Random(0)
    savings = DraftSavings()

    def drafted() -> Step:
        return (3.5, 1.5) if rng.random() < 0.4 else (1.0, 1.5)

    done = run(savings, 20e-3, drafted, 20_000)
    speed = sum(tokens for _, tokens in done) / sum(step_s for step_s, _ in done)
    assert speed * 20e-3 > 0.99 * 2.0 / 1.5


@pytest.mark.parametrize("predicted", [0.5, 2.0])
def test_a_wrong_prediction_of_plain_steps_is_corrected(predicted: float) -> None:
    """Some steps omit drafts, so that drafts that save a tenth continue, whatever the prediction,
    and drafts that cost a tenth stop."""
    for times, stops in ((0.9 * 2, False), (1.1 * 2, True)):
        savings = DraftSavings()
        done = run(savings, 20e-3, lambda times=times: (2.0, times), 5000, predicted)
        assert (sum(tokens == 1.0 for _, tokens in done[1000:]) > 1000) == stops


def test_a_single_disturbed_step_does_not_stop_drafts_that_pay() -> None:
    """A step that takes a thousand times as long counts as a step of four times the length."""
    savings = DraftSavings()
    run(savings, 20e-3, lambda: (3.0, 1.2), 500)
    savings.add_drafted_step(3.0, 20e-3, 20.0)
    assert not savings.stops_drafts


@pytest.mark.parametrize("predicted", [0.3, 3.0])
def test_a_new_worker_measures_steps_without_drafts_before_it_counts(predicted: float) -> None:
    """A wrong first prediction neither stops drafts that pay nor credits drafts that cost time."""
    for drafted, stops in (((3.0, 1.2), False), ((1.0, 2.0), True)):
        savings = DraftSavings()
        done = run(savings, 20e-3, lambda one=drafted: one, 40, predicted)
        assert savings.stops_drafts == stops
        assert sum(tokens == 1.0 and step_s == 20e-3 for step_s, tokens in done[:12]) == 4
