"""Tests of the reasons of plans: rendered words, cause, figures and plan never contradict."""

from __future__ import annotations

import operator
import re

from hypothesis import given
from hypothesis import strategies as st
from msgspec import json

from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.plan_reason import PlanCause, compare, render_reason
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS
from draftgate.policies.types import (
    ANY_PROPOSER,
    DraftCounts,
    RequestView,
    ServiceLevel,
    SpeculationMode,
    SpeculationPlan,
    WorkerLoad,
)

SIGNS = {"<": operator.lt, "=": operator.eq, ">": operator.gt}
NUMBER = r"(\d[\d.]*(?:e[+-]\d+)?)"
COUNTS = st.builds(DraftCounts, st.floats(0, 1e4), st.floats(0, 1e4))
PRICES = st.sampled_from([0.0, 1e-9, 0.5, 1.0, 2.0, 4.0, 7.9]) | st.floats(0, 8)
VIEWS = st.builds(
    RequestView,
    st.just(100),
    st.just(50),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from(SpeculationMode),
    st.sampled_from([None, 0, 1, 3, 99]),
    st.builds(
        ServiceLevel, tpot_s=st.sampled_from([None, 0.01]), priority=st.sampled_from([-9, 0, 1])
    ),
    st.none() | st.floats(0, 1),
    COUNTS,
    COUNTS,
)
LOADS = st.builds(
    WorkerLoad,
    st.integers(0, 300),
    st.integers(0, 9),
    st.just(5),
    st.just(10),
    PRICES,
    st.floats(0, 1),
    st.sampled_from([(), ("ngram",), ("draft_model",), ("ngram", "draft_model")]),
)
NAMES = st.sampled_from(["auto", "off", "fixed:4", "smartspec", "adaptive_verification"])


@given(st.floats(0, 9), st.floats(0, 9))
def test_compared_texts_keep_the_order_of_their_values(left: float, right: float) -> None:
    """The texts of two compared values have the same order as the values."""
    first, sign, second = compare(left, right)
    assert SIGNS[sign](float(first), float(second))
    assert SIGNS[sign](left, right)


@given(VIEWS, LOADS)
def test_reason_of_auto_agrees_with_its_figures_and_plan(
    view: RequestView, load: WorkerLoad
) -> None:
    """The cap in a reason is the plan's cap, and its comparison is true and explains the cap."""
    plan = speculation_policy("auto").decide(view, load)
    assert plan.reason == render_reason(plan.cause, plan.figures, plan.max_draft_tokens)
    length = re.match(r"up to (\d+) draft tokens?\b", plan.reason)
    assert int(length[1] if length else 0) == plan.max_draft_tokens
    if plan.cause is PlanCause.PRICE_TOO_HIGH:
        check_off(plan, view)
    elif plan.cause in {PlanCause.PRICE, PlanCause.LONGEST_DRAFT}:
        check_cap(plan)
    elif plan.cause is PlanCause.CLIENT_CAP:
        assert plan.max_draft_tokens == view.max_draft_tokens
    else:
        assert plan.proposer is None
    assert (plan.proposer == ANY_PROPOSER) == ("whichever pays most" in plan.reason)


def check_off(plan: SpeculationPlan, view: RequestView) -> None:
    """Check that a plan is off because a slot can at most be worth its price."""
    price, sign, most = re.search(
        rf"price {NUMBER} ([=>]) {NUMBER}, the most", plan.reason
    ).groups()
    assert SIGNS[sign](float(price), float(most))
    assert (plan.proposer, view.mode) == (None, SpeculationMode.AUTO)
    assert plan.price >= plan.figures.weight


def check_cap(plan: SpeculationPlan) -> None:
    """Check that a cap ends at the first slot that is not worth the price."""
    longest = plan.cause is PlanCause.LONGEST_DRAFT
    assert longest == (plan.max_draft_tokens == MAX_DRAFT_TOKENS)
    if not plan.price:
        assert "slots are free at present" in plan.reason
        return
    compared = re.search(rf"price {NUMBER} ([<=>]) (?:survival )?{NUMBER}", plan.reason)
    price, sign, worth = compared.groups()
    assert SIGNS[sign](float(price), float(worth))
    slot = int(re.search(r"at slot (\d+) of a good draft", plan.reason)[1])
    if longest:
        assert (sign, slot) == ("<", MAX_DRAFT_TOKENS)
    else:
        assert sign in {"=", ">"}
        assert slot == plan.max_draft_tokens + 1 or (slot, plan.max_draft_tokens) == (1, 1)
        assert (slot == 1) == ("a better draft may be worth it" in plan.reason)


@given(NAMES, VIEWS, LOADS)
def test_cause_and_figures_of_a_plan_are_readable_as_json(
    name: str, view: RequestView, load: WorkerLoad
) -> None:
    """A plan in JSON has its cause as a word, and equals the plan after decoding."""
    plan = speculation_policy(name).decide(view, load)
    assert plan.reason == render_reason(plan.cause, plan.figures, plan.max_draft_tokens)
    text = json.encode(plan)
    assert f'"cause":"{plan.cause.value}"'.encode() in text
    assert json.decode(text, type=SpeculationPlan) == plan
