"""Plans of speculation policies for a request: caps, proposers and reasons."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec import structs

from draftgate.policies.speculation.auto import Auto
from draftgate.policies.speculation.baselines import Fixed
from draftgate.policies.speculation.draft_forecast import GOOD_DRAFT
from draftgate.policies.speculation.plan_reason import PlanCause
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS
from draftgate.policies.speculation.weights import weight
from draftgate.policies.types import (
    ANY_PROPOSER,
    UNTESTED,
    DraftCounts,
    RequestView,
    ServiceLevel,
    SpeculationMode,
    WorkerLoad,
)


def load(price: float = 0.1, acceptance: float = 0.7, proposers=("ngram",)) -> WorkerLoad:
    return WorkerLoad(3, 0, 50, 100, price, acceptance, proposers)


def test_auto_leaves_the_choice_of_several_proposers_open() -> None:
    """The plan names a proposer only if the client requests it or the worker has no other."""
    several = load(proposers=("ngram", "draft_model"))
    plan = Auto().decide(RequestView(1, 9, 0.0), several)
    assert plan.proposer == ANY_PROPOSER
    assert "ngram, draft_model" in plan.reason
    assert Auto().decide(RequestView(1, 9, 0.0), load()).proposer == "ngram"
    named = RequestView(1, 9, 0.0, SpeculationMode.NGRAM)
    assert Auto().decide(named, several).proposer == "ngram"
    assert Fixed(4).decide(RequestView(1, 9, 0.0), several).proposer == "ngram"


def test_auto_plans_for_a_request_by_the_price() -> None:
    """A higher price shortens the plan, and the reason compares price and survival."""
    prices = (0.0, 0.3, 0.6, 0.9, 0.99)
    plans = [Auto().decide(RequestView(1, 9, 0.0), load(price=p, acceptance=0.6)) for p in prices]
    good = 1 / (1 + (0.4 / 0.6) * math.exp(-GOOD_DRAFT))  # 0.917
    paying = [max(1, sum(good**n > p for n in range(1, 17))) for p in prices]
    assert [p.max_draft_tokens for p in plans] == paying == [16, 13, 5, 1, 1]
    assert [p.price for p in plans] == list(prices)
    assert "up to 16 draft tokens: slots are free at present" in plans[0].reason
    assert f"price 0.6 > survival {good**6:.3g} at slot 6 of a good draft" in plans[2].reason
    assert plans[2].reason.endswith("acceptance 0.60 of this worker at temperature 0, 3 running")
    assert plans[4].reason.startswith("up to 1 draft token: price 0.99 > survival 0.917 at slot 1")
    assert "but a better draft may be worth it" in plans[4].reason


def test_decision_uses_the_nearest_history() -> None:
    """A tenant's history outweighs that of all tenants, and both outweigh the worker's history."""
    here = load(price=0.6, acceptance=0.2)
    good, bad, little = DraftCounts(900, 100), DraftCounts(100, 900), DraftCounts(2, 0)
    caps, reasons = [], []
    for tenant, everybody in ((UNTESTED, UNTESTED), (little, bad), (UNTESTED, good), (bad, good)):
        view = RequestView(1, 9, 0.8, tenant_drafts=tenant, model_drafts=everybody)
        plan = Auto().decide(view, here)
        caps.append(plan.max_draft_tokens)
        reasons.append(plan.reason)
    assert caps[1] <= caps[0] < caps[2]
    assert caps[3] < caps[2]
    words = ["of this worker", "of all tenants", "of all tenants", "of this tenant"]
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))
    assert "at temperature 0.8" in reasons[0]


COUNTS = st.builds(DraftCounts, st.floats(0, 1e4), st.floats(0, 1e4))


VIEWS = st.builds(
    RequestView,
    st.just(100),
    st.just(50),
    st.sampled_from([0.0, 0.8]),
    repetition=st.none() | st.floats(0, 1),
    service=st.builds(
        ServiceLevel, tpot_s=st.none() | st.floats(1e-3, 1), priority=st.integers(-9, 9)
    ),
    tenant_drafts=COUNTS,
    model_drafts=COUNTS,
)


def cap_of(view: RequestView, price: float, acceptance: float) -> int:
    return Auto().decide(view, load(price, acceptance)).max_draft_tokens


@given(VIEWS, st.floats(0, 5), st.floats(0, 1), st.floats(0, 1), st.floats(0, 5))
def test_caps_are_monotone(view, price, acceptance, share, more) -> None:
    """Repetition, acceptance, targets and better classes never shorten a cap, and price never
    lengthens it."""
    cap = cap_of(view, price, acceptance)
    laxity_s = None if view.service.tpot_s is None else 0.0
    assert (0 if price >= weight(laxity_s, view.service) else 1) <= cap <= MAX_DRAFT_TOKENS
    assert cap_of(view, price + more, acceptance) <= cap
    agreed = structs.replace(view.tenant_drafts, accepted=view.tenant_drafts.accepted + 100 * more)
    assert cap_of(replace(view, tenant_drafts=agreed), price, acceptance) >= cap
    assert cap_of(view, price, min(acceptance + share, 1.0)) >= cap
    if view.repetition is not None:
        assert (
            cap_of(replace(view, repetition=max(share, view.repetition)), price, acceptance) >= cap
        )
    sooner = replace(view.service, tpot_s=0.01)
    assert cap_of(replace(view, service=sooner), price, acceptance) >= cap
    first = replace(view.service, priority=view.service.priority - 1)
    assert cap_of(replace(view, service=first), price, acceptance) >= cap


@pytest.mark.parametrize(
    ("price", "service", "cap"),
    [
        (0.0, ServiceLevel(), 16),
        (0.999, ServiceLevel(), 1),
        (1.0, ServiceLevel(), 0),
        (7.9, ServiceLevel(), 0),
        (7.9, ServiceLevel(tpot_s=0.01), 0),
        (3.9, ServiceLevel(tpot_s=0.01), 1),
        (0.6, ServiceLevel(priority=1), 0),
    ],
)
def test_auto_is_off_while_no_slot_can_be_worth_the_price(
    price: float, service: ServiceLevel, cap: int
) -> None:
    """A plan is off if the price of a slot is at least the highest weight of the request's tokens,
    unless the client names a proposer."""
    view, hot = RequestView(1, 9, 0.0, service=service), load(price=price, acceptance=0.6)
    plan = Auto().decide(view, hot)
    assert plan.max_draft_tokens == cap
    assert (plan.proposer is None) == (cap == 0)
    assert (plan.cause is PlanCause.PRICE_TOO_HIGH) == (cap == 0)
    assert ("the most that a draft slot can be worth" in plan.reason) == (cap == 0)
    named = Auto().decide(replace(view, mode=SpeculationMode.NGRAM), hot)
    assert (named.proposer, named.max_draft_tokens) == ("ngram", max(cap, 1))
    off = Auto().decide(replace(view, mode=SpeculationMode.OFF), hot)
    assert off.cause is PlanCause.REQUESTED_OFF


def test_auto_is_off_on_a_worker_whose_drafts_lose_time() -> None:
    """A plan is off, and says why, while drafts have cost the worker more time than they saved. A
    proposer that the client names is kept."""
    losing = structs.replace(load(price=0.1, acceptance=0.6), drafts_lose=True)
    plan = Auto().decide(RequestView(1, 9, 0.0), losing)
    assert (plan.proposer, plan.max_draft_tokens) == (None, 0)
    assert plan.reason == "drafts have cost this worker more time than they saved"
    assert plan.later_proposer is not None
    named = Auto().decide(RequestView(1, 9, 0.0, mode=SpeculationMode.NGRAM), losing)
    assert named.proposer == "ngram"


def test_tpot_target_raises_the_cap() -> None:
    """A request that may become late may use slots up to four times the price."""
    tight = RequestView(1, 9, 0.0, service=ServiceLevel(tpot_s=0.01))
    here = load(price=0.8, acceptance=0.5)
    usual = RequestView(1, 9, 0.0)
    plan, cheaper = Auto().decide(tight, here), Auto().decide(usual, load(0.8 / 4, 0.5))
    assert Auto().decide(usual, here).max_draft_tokens == 1
    assert plan.max_draft_tokens == cheaper.max_draft_tokens == 12
    assert "4 x survival" in plan.reason


def test_repetition_counts_only_for_ngram_drafts() -> None:
    """Repetition does not change the plan for a draft model."""
    view = RequestView(1, 9, 0.0, repetition=1.0)
    there = ("ngram", "draft_model")
    named = replace(view, mode=SpeculationMode.DRAFT_MODEL)
    assert "repetition 1.00" in Auto().decide(view, load(proposers=there)).reason
    assert "repetition" not in Auto().decide(named, load(proposers=there)).reason
    assert "repetition" not in Auto().decide(view, load(proposers=there[1:])).reason


def test_reason_names_the_clients_cap() -> None:
    """The reason names the client's cap when the cap shortens the plan."""
    plan = Auto().decide(RequestView(1, 9, 0.0, max_draft_tokens=2), load())
    assert plan.reason.startswith("up to 2 draft tokens, as asked for; acceptance")


@pytest.mark.parametrize(
    ("request_view", "proposers", "reason"),
    [
        (RequestView(1, 9, 0.0, SpeculationMode.OFF), ("ngram",), "asked for no speculation"),
        (RequestView(1, 9, 0.0, max_draft_tokens=0), ("ngram",), "asked for no speculation"),
        (RequestView(1, 9, 0.0), (), "no proposer"),
        (RequestView(1, 9, 0.0, SpeculationMode.DRAFT_MODEL), ("ngram",), "'draft_model'"),
    ],
    ids=["off", "cap 0", "no proposer", "another proposer"],
)
def test_plan_without_speculation_says_why(request_view, proposers, reason) -> None:
    """The plan names the client or the worker as the reason for no speculation."""
    for policy in (Auto(), Fixed(4)):
        plan = policy.decide(request_view, load(proposers=proposers))
        assert plan.proposer is None
        assert reason in plan.reason


def test_plan_uses_the_proposer_that_the_client_names() -> None:
    """The plan uses the client's proposer instead of the worker's first proposer."""
    view = RequestView(1, 9, 0.0, SpeculationMode.DRAFT_MODEL, max_draft_tokens=2)
    plan = Auto().decide(view, load(proposers=("ngram", "draft_model")))
    assert (plan.proposer, plan.max_draft_tokens) == ("draft_model", 2)
