"""Losslessness of plans that are revised at random while requests run on the real engine."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from bench.harness.prompts import held_out_prompts
from draftgate.backends.core import draft_plan, scheduler
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation import revision
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import ANY_PROPOSER, RequestView, SpeculationPlan, StepView
from tests.engine.harness import Model, RandomSlots, Setup, request, run
from tests.engine.shipped_proposers import every_proposer_and_a_hostile_one
from tests.examples import grid

REQUESTS = 12


@dataclass(frozen=True)
class RandomPrices(RandomSlots):
    """An adversarial policy whose price is random in each step, and whose plans start on or off."""

    def decide(self, request: RequestView, load: object) -> SpeculationPlan:
        on, off = (ANY_PROPOSER, 12), (None, 0)
        now, later = (on, off) if self.rng.random() < 0.5 else (off, on)
        return SpeculationPlan(
            *("random", request.mode, *now, "chaos"),
            later_proposer=later[0],
            later_draft_tokens=later[1],
        )

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        return self.rng.choice([0.0, 0.0, 5.0])


@pytest.mark.parametrize(
    ("seed", "temperature"),
    grid((1, 2, 3), (0.0, 0.8), quick=lambda *case: case in {(1, 0.0), (2, 0.8)}),
)
def test_random_revisions_never_change_the_text(
    shipped: Model, seed: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests whose drafting is switched on and off at random have the text of plain decoding."""
    monkeypatch.setattr(scheduler, "REVIEW_STEPS", 1)
    monkeypatch.setattr(draft_plan, "TERMS_STEPS", 1)
    monkeypatch.setattr(revision, "LEAST_ON_STEPS", 0)
    monkeypatch.setattr(revision, "OFF_REVIEWS", 1)
    prompts = held_out_prompts(shipped.tokenizer, REQUESTS)

    def requests(policy: RandomSlots | Off):
        return [
            request(str(i), prompt, policy, temperature=temperature, seed=i, max_tokens=64)
            for i, prompt in enumerate(prompts)
        ]

    policy = RandomPrices(random.Random(seed))
    setup = Setup(policy, every_proposer_and_a_hostile_one, max_num_seqs=6, num_blocks=90)
    revised = run(shipped, requests(policy), setup)
    plain = run(shipped, requests(Off()), Setup())
    assert revised.tokens == plain.tokens
    assert revised.text == plain.text
    assert revised.leaked_blocks == 0
    switched = [one.on for one in revised.revisions]
    assert min(switched.count(True), switched.count(False)) > REQUESTS
    assert revised.accepted > 0
    assert not plain.revisions
