"""The price of a slot, and the duration of a step without its prompts."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.allocation import allocate
from draftgate.policies.speculation.price import (
    LEAST_S,
    few_slots_s,
    least_slot_price,
    prompts_s,
    rate,
    slot_price,
    slots_s,
    step_s,
)
from draftgate.policies.types import DraftCandidate, StepView
from tests.policies.costs import H100_8B, costs

small = st.integers(0, 800)
verifying = st.sampled_from([0.0, 5e-5, 1e-2])


def decodes(sequences: int, kv_tokens: int = 0, slot_budget: int = 64) -> StepView:
    return StepView(sequences, kv_tokens, sequences, slot_budget, ())


def beside_prompts(
    sequences: int, prefill_tokens: int, free_slots: int, kv_tokens: int = 0
) -> StepView:
    tokens = sequences + prefill_tokens
    return StepView(
        *(tokens, kv_tokens, sequences, 64, ()),
        prefill_tokens=prefill_tokens,
        free_slots=free_slots,
    )


@given(costs(), small, small, small)
def test_price_is_never_negative(cost, sequences, kv, prefill) -> None:
    """An idle worker has a price of 0."""
    assert slot_price(beside_prompts(sequences, prefill, 3, kv), cost) >= 0.0
    assert slot_price(beside_prompts(0, prefill, 3, kv), cost) == 0.0


def test_price_rises_with_the_batch() -> None:
    """A slot on an H100 is nearly free for one sequence and expensive in a full batch."""
    prices = [slot_price(decodes(n, n * 500), H100_8B) for n in (1, 8, 32, 64, 128, 256, 512)]
    assert prices == sorted(prices)
    assert prices[0] < 0.01
    assert prices[-1] > 0.4


def test_long_contexts_lower_the_price() -> None:
    """A slot costs about 0.013 with 32 requests of 32k tokens."""
    assert slot_price(decodes(32, 32 * 32_768), H100_8B) == pytest.approx(0.013, abs=0.003)


def test_attention_raises_the_price_of_slots_with_long_contexts() -> None:
    """The cost of a slot includes the mean number of KV tokens that the slot reads."""
    cost = StepCost((4, 8), (1.0, 1.4), pair_s=1e-3)
    assert slot_price(decodes(2, 4000), cost) > slot_price(decodes(2, 400), cost)


@given(costs(), st.integers(1, 64), small, st.floats(0, 100))
def test_price_is_the_rate_times_the_extra_seconds(cost, sequences, kv, accepted) -> None:
    """The price uses the extra time up to the next edge of the step cost."""
    step_s = cost.seconds(sequences, kv, sequences)
    assume(step_s > 1e-9)  # all devices are equal below
    edge = cost.next_edge(sequences)
    extra_s = cost.seconds(edge, kv, sequences, edge - sequences) - step_s
    expected = (sequences + accepted) / step_s * extra_s / (edge - sequences)
    assert slot_price(decodes(sequences, kv), cost, accepted) == pytest.approx(expected)


@given(costs(), st.integers(1, 64), small, verifying)
def test_fixed_time_of_verification_is_not_in_the_price(cost, sequences, kv, verify_s) -> None:
    """The price is the cost of one more slot, without the fixed time of verification."""
    step = decodes(sequences, kv)
    expensive = replace(step, verify_s=verify_s)
    assert slot_price(expensive, cost) == pytest.approx(slot_price(step, cost), rel=1e-6, abs=1e-6)


def test_price_counts_the_time_of_the_present_drafts() -> None:
    """The tokens that drafts add are divided by the time that the drafts take."""
    cost = StepCost(tuple(range(1, 257)), tuple(1e-3 + 1e-5 * n for n in range(1, 257)))
    drafted = slot_price(decodes(10), cost, accepted=15.0, slots=20, drafting_s=1e-3)
    assert drafted == pytest.approx((10 + 15) / (1e-3 + 30e-5 + 1e-3) * 1e-5)
    expensive = replace(decodes(10), verify_s=7e-4)
    verified = slot_price(expensive, cost, accepted=15.0, slots=20)
    assert verified == pytest.approx((10 + 15) / (1e-3 + 30e-5 + 7e-4) * 1e-5)


@given(
    *(costs(), st.integers(1, 24), st.integers(0, 60), st.integers(0, 40)),
    st.lists(st.lists(st.floats(0.0, 1.0), max_size=8), max_size=24),
)
def test_omitted_slots_are_worth_at_most_the_price(cost, sequences, prefill, free, drafts) -> None:
    """The best omitted slots have a mean survival up to the price, to the end of the next stair."""
    survivals = [tuple(sorted(draft, reverse=True)) for draft in drafts[:sequences]]
    step = replace(
        beside_prompts(sequences, prefill, free, 50 * sequences),
        slot_budget=1000,
        candidates=tuple(map(DraftCandidate, survivals)),
    )
    assume(step_s(step, cost) > 1e-6)
    lengths = allocate(step, cost)
    chosen = [v for draft, n in zip(survivals, lengths, strict=True) for v in draft[:n]]
    omitted = [v for draft, n in zip(survivals, lengths, strict=True) for v in draft[n:]]
    price = slot_price(step, cost, sum(chosen), len(chosen))
    fed = step.tokens + len(chosen) - min(max(len(chosen) - free, 0), prefill)
    more = cost.next_edge(fed) - fed
    best = sorted(omitted, reverse=True)[:more]
    assert sum(best) <= price * more * (1 + 1e-6) + 1e-9


def test_prompts_raise_the_price_of_slots() -> None:
    """The price triples when prompts take two thirds of the step."""
    cost = StepCost(tuple(range(1, 1025)), tuple(1e-5 * n for n in range(1, 1025)))
    alone = slot_price(decodes(100), cost)
    beside = slot_price(beside_prompts(100, 200, 1000), cost)
    assert alone == pytest.approx(1.0)
    assert beside == pytest.approx(1.0)
    floor = StepCost(tuple(range(1, 1025)), tuple(1e-3 + 1e-5 * n for n in range(1, 1025)))
    assert slot_price(beside_prompts(100, 400, 1000), floor) == pytest.approx(100 * 1e-5 / 2e-3)
    assert rate(beside_prompts(100, 400, 1000), floor) == pytest.approx(100 / 2e-3)


@given(
    *(costs(), st.integers(1, 40), st.integers(0, 60), st.integers(0, 40), st.integers(0, 120)),
    verifying,
)
def test_slots_use_spare_tokens_before_they_displace_prompts(
    cost, sequences, prefill, free, most, verify_s
) -> None:
    """Slots use spare tokens, then displace prompt tokens, then lengthen the step.

    The slot times exclude the prompts and include the fixed verification time once.
    """
    step = beside_prompts(sequences, prefill, free, 50 * sequences)
    step = replace(step, verify_s=verify_s)
    times_s = slots_s(step, cost, most)
    assert few_slots_s(step, cost, most) == pytest.approx(times_s)
    whole_s = cost.seconds(step.tokens, step.kv_tokens, sequences)
    for slots in range(most + 1):
        displaced = min(max(slots - free, 0), prefill)
        fed = step.tokens + slots - displaced
        expected = cost.seconds(fed, step.kv_tokens, sequences, slots)
        if prefill:
            share_s = max(whole_s / step.tokens, prompts_s(step, cost) / prefill)
            expected += displaced * share_s - prompts_s(step, cost)
        expected += verify_s if slots else 0.0
        assert times_s[slots] == pytest.approx(max(expected, 1e-9), rel=1e-6, abs=1e-12)
        assert step_s(step, cost, slots) == pytest.approx(times_s[slots], rel=1e-6, abs=1e-12)


@given(
    *(costs(), st.integers(1, 40), st.integers(0, 60), st.integers(0, 40), st.integers(1, 90)),
    verifying,
)
def test_least_price_is_that_of_the_cheapest_number_of_slots(
    cost, sequences, prefill, free, most, verify_s
) -> None:
    """For every number of slots, the average price of a slot is at least the least price."""
    step = replace(
        beside_prompts(sequences, prefill, free, 50 * sequences),
        slot_budget=most,
        verify_s=verify_s,
    )
    times_s = slots_s(step, cost, most)
    averages = [rate(step, cost) * (times_s[n] - times_s[0]) / n for n in range(1, most + 1)]
    floor = LEAST_S * rate(step, cost)  # the least time of steps
    expected = pytest.approx(max(min(averages), 0.0), rel=1e-6, abs=floor)
    assert least_slot_price(step, cost) == expected


@given(costs(), st.integers(1, 40), st.integers(0, 60), st.integers(0, 40))
def test_another_slot_never_shortens_a_step(cost, sequences, prefill, free) -> None:
    """A slot has a non-negative price even if it displaces prompts."""
    times_s = slots_s(beside_prompts(sequences, prefill, free, 50 * sequences), cost, 100)
    assert (times_s[1:] >= times_s[:-1] - 1e-12).all()
    assert least_slot_price(beside_prompts(sequences, prefill, free), cost) >= 0.0
