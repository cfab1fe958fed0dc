"""The price of slots under `auto` applies to drafts from a prediction as to any lookup."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftgate.backends.core.draft_plan import DraftPlan, SpareCapacity
from draftgate.backends.core.drafting import Drafting
from draftgate.backends.core.drafts import NO_DRAFT, PREDICTION
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.sequence import Sequence
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import ANY_PROPOSER
from tests.core.fakes import FakeProposer, hashed_token, request

SLOTS = 4
STEPS = 160


def cost_of_slots(price: float) -> StepCost:
    """Return step costs at which each slot adds this share of a step with one token."""
    seconds = [1e-3 * (1 + price * slots) for slots in range(SLOTS + 1)]
    return StepCost(tuple(range(1, SLOTS + 2)), tuple(seconds))


def verified_tokens(source: str, price: float, wrong_every: int) -> list[int]:
    """Return the numbers of draft tokens in the steps of a request, after half of the steps.

    Args:
        source: the only proposer that finds drafts.
        price: the cost of a slot, as a share of a step.
        wrong_every: distance between two wrong draft tokens.
    """
    nothing = FakeProposer(finds=lambda key, position: False)
    proposers = {PREDICTION: nothing, "ngram": nothing}
    proposers[source] = FakeProposer(is_wrong=lambda key, at: at % wrong_every == 0)
    cost, drafting = cost_of_slots(price), Drafting(proposers)
    plan = DraftPlan(speculation_policy("auto"), drafting, KvBlocks(64, 16), cost)
    wanted = request(max_tokens=10_000, drafts=SLOTS, proposer=ANY_PROPOSER)
    wanted = replace(wanted, prediction_ids=(1,) if source == PREDICTION else ())
    sequence = Sequence.for_choice(0, wanted, wanted.choices[0])
    found = []
    for _ in range(STEPS):
        spare = SpareCapacity(SLOTS, blocks=64)
        draft = next((draft for _, draft in plan.plan([sequence], spare, cost, None)), NO_DRAFT)
        assert not draft or sequence.draft_source == source
        at = len(sequence.token_ids)
        true = [hashed_token(sequence, at + place) for place in range(len(draft) + 1)]
        emitted = true[: len(draft.accepted_places(true)) + 1]
        drafting.learn(sequence, tuple(emitted))
        sequence.token_ids.extend(emitted)
        found.append(len(draft))
    return found[STEPS // 2 :]


@pytest.mark.parametrize("source", [PREDICTION, "ngram"])
def test_right_prediction_is_verified_unless_slots_cost_more_than_tokens(source: str) -> None:
    """A right draft fills every slot at a low price, and gets none if a slot takes longer than a
    step."""
    never = 10**6
    assert set(verified_tokens(source, 0.05, never)) == {SLOTS}
    assert set(verified_tokens(source, 1.2, never)) == {0}


@pytest.mark.parametrize("source", [PREDICTION, "ngram"])
def test_wrong_prediction_is_dropped_at_a_price_that_a_right_one_pays(source: str) -> None:
    """A prediction whose drafts were wrong gets no slot at a price of 0.4, and a right one does."""
    assert set(verified_tokens(source, 0.4, 10**6)) == {SLOTS}
    assert set(verified_tokens(source, 0.4, 1)) == {0}


@pytest.mark.parametrize("price", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("wrong_every", [1, 2, 3, 5, 10**6])
def test_prediction_gets_the_slots_of_an_equally_good_ngram(price: float, wrong_every: int) -> None:
    """A prediction and an n-gram with the same drafts and outcomes get the same slots."""
    drafts = [verified_tokens(source, price, wrong_every) for source in (PREDICTION, "ngram")]
    assert drafts[0] == drafts[1]
