"""Drafting: which proposers are called, when, and what is learned from their drafts."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from draftgate.backends.core.drafting import Drafting
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest, DraftTerms
from draftgate.backends.core.proposer_gate import (
    EXPLORED_SHARE,
    HOPELESS_STEPS,
    MOST_RESTING_STEPS,
    MOST_SAVED_STEPS,
    PROBE_STEPS,
    RESTING_STEPS,
)
from draftgate.backends.core.sequence import Sequence
from draftgate.policies.costs.drafting_cost import DraftingCost
from draftgate.policies.types import ANY_PROPOSER
from tests.core.fakes import FakeProposer, hashed_token, request

WRONG, RIGHT = (lambda key, position: True), (lambda key, position: False)


class CountingProposer(FakeProposer):
    """Counts the requests for each sequence."""

    def __init__(self, is_wrong=RIGHT, **options) -> None:
        super().__init__(is_wrong=is_wrong, **options)
        self.asked: list[int] = []

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        self.asked += [request.sequence.key for request in requests]
        return super().propose(requests)


def sequences(count: int, proposer: str = "ngram") -> list[Sequence]:
    wanted = request(prompt=4, max_tokens=100_000, drafts=4, proposer=proposer)
    return [Sequence.for_choice(key, wanted, wanted.choices[0]) for key in range(count)]


def run(drafting: Drafting, batch: list[Sequence], terms: DraftTerms, steps: int) -> None:
    """Run steps in which nothing is verified: every sequence gets its true token."""
    for _ in range(steps):
        offers = drafting.offers(batch, terms)
        drafting.compute(offers, [0] * len(offers), terms)
        for sequence in batch:
            token = hashed_token(sequence, len(sequence.token_ids))
            drafting.learn(sequence, (token,))
            sequence.token_ids.append(token)


def test_all_sequences_are_asked_if_any_slot_may_pay() -> None:
    """Without a minimum survival, each step requests a draft for each sequence."""
    proposer = CountingProposer(WRONG)
    run(Drafting({"ngram": proposer}), sequences(3), DraftTerms(), 40)
    assert len(proposer.asked) == 3 * 40


def test_hopeless_sequences_are_asked_every_16_steps() -> None:
    """Sequences with only wrong drafts are tried once in 16 steps, the others in each step."""
    proposer = CountingProposer(lambda key, position: key > 0)
    drafting, batch = Drafting({"ngram": proposer}), sequences(4)
    terms = DraftTerms(least_survival=0.45)
    run(drafting, batch, terms, 400)
    proposer.asked.clear()
    run(drafting, batch, terms, 10 * HOPELESS_STEPS)
    counts = [proposer.asked.count(key) for key in range(4)]
    assert counts == [10 * HOPELESS_STEPS, 10, 10, 10]


def test_one_sequence_is_probed_if_no_slot_can_pay() -> None:
    """At a price above every survival, one lookup in 64 steps keeps the estimates current."""
    proposer = CountingProposer()
    run(
        Drafting({"ngram": proposer}),
        sequences(5),
        DraftTerms(least_survival=1.0),
        10 * PROBE_STEPS,
    )
    assert proposer.asked == [0] * 10


def test_probes_notice_that_drafts_became_right() -> None:
    """When good evidence appears after a series of wrong drafts, all sequences are soon tried
    again."""

    class Turning(CountingProposer):
        good = False

        def draft(self, sequence: Sequence, max_tokens: int) -> Draft:
            if self.good:
                return replace(super().draft(sequence, max_tokens), evidence=20)
            return Draft((-1,) * max_tokens, evidence=1)

    proposer = Turning()
    drafting, batch = Drafting({"ngram": proposer}), sequences(8)
    terms = DraftTerms(least_survival=0.9)
    run(drafting, batch, DraftTerms(), 128)
    proposer.asked.clear()
    run(drafting, batch, terms, 4 * PROBE_STEPS)
    assert proposer.asked == [0] * 4
    proposer.good = True
    run(drafting, batch, terms, 48 * PROBE_STEPS)
    assert set(proposer.asked) == set(range(8))


def test_no_offers_without_proposers() -> None:
    """A worker without proposers offers and learns nothing."""
    drafting = Drafting({})
    run(drafting, sequences(3), DraftTerms(), 5)
    assert drafting.offers(sequences(2), DraftTerms()) == []
    assert drafting.acceptance == 0.5


def test_any_proposer_selects_the_best_offer() -> None:
    """Wrong lookups lose to cheap computed drafts, and right ones win; a named proposer is always
    used."""
    terms = DraftTerms(price=0.1, step_s=1e-2)
    for look_up, expected in ((WRONG, "draft_model"), (RIGHT, "ngram")):
        proposers = {
            "ngram": CountingProposer(look_up),
            "draft_model": CountingProposer(depth_s=1e-4),
        }
        drafting, batch = Drafting(proposers), sequences(2, ANY_PROPOSER)
        for _ in range(100):
            offers = drafting.offers(batch, terms)
            drafting.compute(offers, [4] * len(offers), terms)
            for sequence in batch:
                drafting.learn(sequence, tuple(hashed_token(sequence, 4 + n) for n in range(4)))
        assert [offer.source for offer in drafting.offers(batch, terms)] == [expected] * 2
        wish = sequences(2, "ngram")[1]
        assert [offer.source for offer in drafting.offers([wish], terms)] == ["ngram"]


def test_unused_proposer_is_offered_less_often() -> None:
    """A computing proposer without slots is offered again after 8 steps, then at doubling
    intervals.

    Using it resets the interval.
    """
    drafting, batch = (
        Drafting({"draft_model": CountingProposer(depth_s=1e-4)}),
        sequences(2, "draft_model"),
    )
    terms, offered = DraftTerms(least_survival=0.0, step_s=1e-2), []
    for turn in range(8 * MOST_RESTING_STEPS):
        offers = drafting.offers(batch, terms)
        drafting.compute(offers, [0] * len(offers), terms)
        if offers:
            offered.append(turn)
    waits = [after - before - 1 for before, after in pairwise(offered)]
    assert waits[:4] == [RESTING_STEPS, 2 * RESTING_STEPS, 4 * RESTING_STEPS, MOST_RESTING_STEPS]
    assert set(waits[4:]) == {MOST_RESTING_STEPS}
    while not (offers := drafting.offers(batch, terms)):
        drafting.compute(offers, [], terms)
    drafting.compute(offers, [1] * len(offers), terms)
    offered.clear()
    for turn in range(RESTING_STEPS + 3):
        offers = drafting.offers(batch, terms)
        drafting.compute(offers, [0] * len(offers), terms)
        if offers:
            offered.append(turn)
    assert offered == [0, RESTING_STEPS + 1]


def test_computed_drafts_that_cannot_pay_are_not_offered() -> None:
    """A depth that takes longer than its tokens are worth is not offered."""
    drafting, batch = (
        Drafting({"draft_model": CountingProposer(depth_s=2e-2)}),
        sequences(2, "draft_model"),
    )
    terms = DraftTerms(least_survival=0.0, step_s=1e-2, tokens_per_s=200.0)
    assert drafting.offers(batch, terms) == []
    assert len(drafting.offers(batch, terms._replace(least_survival=None))) == 2


def test_exploration_stays_within_its_share_of_time() -> None:
    """Unused proposers do draft, but within their share of the step time."""
    expensive, step_s = CountingProposer(depth_s=1e-3), 1e-2
    drafting, batch = Drafting({"draft_model": expensive}), sequences(3, "draft_model")
    steps = 2000
    run(drafting, batch, DraftTerms(step_s=step_s), steps)
    most = EXPLORED_SHARE * step_s * steps / 1e-3
    assert 0.8 * most <= len(expensive.asked) <= most
    assert set(expensive.asked) == {0}


def test_exploration_skips_drafts_above_the_saved_limit() -> None:
    """A proposer whose token costs more than five steps never drafts."""
    expensive = CountingProposer(depth_s=1e-2 * MOST_SAVED_STEPS * 1.01)
    run(
        Drafting({"draft_model": expensive}),
        sequences(1, "draft_model"),
        DraftTerms(step_s=1e-2),
        5000,
    )
    assert expensive.asked == []


def test_exploration_is_charged_for_overruns() -> None:
    """If exploration takes twice its forecast, it happens half as often."""
    counts = []
    for times in (1.0, 2.0):
        expensive, step_s = CountingProposer(depth_s=1e-3), 1e-2
        drafting, batch = Drafting({"draft_model": expensive}), sequences(2, "draft_model")
        for _ in range(4000):
            run(drafting, batch, DraftTerms(step_s=step_s), 1)
            drafting.observe_host_time(times * drafting.step_work.computed_s)
        counts.append(len(expensive.asked))
    assert counts[1] == pytest.approx(counts[0] / 2, rel=0.05)


def mostly_wrong(key: int, position: int) -> bool:
    """Return whether the draft at a position is wrong, randomly for 19 of 20 positions."""
    return Random(key * 7919 + position).random() < 0.95


LOOKUP_COST = DraftingCost(look_up_s=2e-4, sequence_s=5e-5)
"""A lookup takes an eighth of the time that a token takes in the steps below."""
ASKED = DraftTerms(0.01, 0.1, 2e-3, 500.0, 1.0, LOOKUP_COST)


def test_lookups_that_do_not_pay_are_made_every_16_steps() -> None:
    """After wrong drafts one step in 16 makes a lookup; after right ones every step does."""
    for is_wrong, expected in ((WRONG, 10), (RIGHT, 10 * HOPELESS_STEPS)):
        proposer = CountingProposer(is_wrong)
        drafting, batch = Drafting({"ngram": proposer}), sequences(1)
        run(drafting, batch, ASKED, 600)
        proposer.asked.clear()
        run(drafting, batch, ASKED, 10 * HOPELESS_STEPS)
        assert len(proposer.asked) == expected


def test_cheap_lookups_are_checked_more_often() -> None:
    """Lookups that do not pay get 1% of the step time, so cheap ones are made more often."""
    proposer = CountingProposer(mostly_wrong)
    drafting, batch = Drafting({"ngram": proposer}), sequences(1)
    terms = ASKED._replace(drafting=DraftingCost(look_up_s=2e-5, sequence_s=5e-5))
    run(drafting, batch, terms, 600)
    proposer.asked.clear()
    run(drafting, batch, terms, 160)
    assert len(proposer.asked) == 160 // 4  # 70 us in four steps of 2 ms are 0.9%


def test_lookups_of_a_step_share_its_fixed_cost() -> None:
    """Lookups that do not pay for one sequence pay for eight, which share the fixed cost."""
    counts = []
    for count in (1, 8):
        proposer = CountingProposer(lambda key, position: (position + key) % 8 > 1)
        drafting, batch = Drafting({"ngram": proposer}), sequences(count)
        cost = DraftingCost(look_up_s=1e-3, sequence_s=1e-6)
        terms = ASKED._replace(price=0.02, drafting=cost)
        run(drafting, batch, terms, 1200)
        proposer.asked.clear()
        run(drafting, batch, terms, 10 * HOPELESS_STEPS)
        counts.append(len(proposer.asked) / count)
    assert counts[0] <= 10
    assert counts[1] == 10 * HOPELESS_STEPS


def test_a_text_that_starts_to_repeat_is_noticed() -> None:
    """After a thousand failed lookups, lookups soon happen in each step once they succeed.

    The evidence that such drafts are good comes from another sequence.
    """
    proposer = CountingProposer(
        lambda key, position: key == 0 and position < 1000 and mostly_wrong(key, position)
    )
    drafting, batch = Drafting({"ngram": proposer}), sequences(2)
    run(drafting, batch, ASKED, 900)
    proposer.asked.clear()
    run(drafting, batch, ASKED, 96)
    assert proposer.asked.count(0) < 96 / 4
    run(drafting, batch, ASKED, 4 * HOPELESS_STEPS)
    proposer.asked.clear()
    run(drafting, batch, ASKED, 100)
    assert proposer.asked.count(0) == 100


@pytest.mark.parametrize("with_distribution", [False, True])
def test_evidence_of_sampled_tokens_counts_only_without_distributions(
    with_distribution: bool,
) -> None:
    """With rejection sampling, a sampled token's own probability changes no survival."""
    drafting = Drafting({"draft_model": ConfidentProposer(with_distribution=with_distribution)})
    (sequence,) = sequences(1, "draft_model")
    for step in range(400):
        drafting.compute(drafting.offers([sequence], DraftTerms()), [1], DraftTerms())
        right = step % 2 == 0  # as often as the proposer predicts
        drafting.learn(sequence, (7 if right else 8,))
    survivals = []
    for _ in range(2):
        (offer,) = drafting.compute(drafting.offers([sequence], DraftTerms()), [1], DraftTerms())
        survivals.append(offer.candidate.survivals[0])
    assert (survivals[0] == survivals[1]) == with_distribution


class ConfidentProposer(FakeProposer):
    """Drafts one token, with strong and weak evidence in turn."""

    def __init__(self, *, with_distribution: bool) -> None:
        super().__init__(depth_s=1e-4)
        self._distribution = object() if with_distribution else None
        self._turn = 0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        self._turn += 1
        evidence = 990 if self._turn % 2 else 10
        return [Draft((7,), evidence=evidence, distributions=self._distribution) for _ in requests]


def test_offers_list_the_best_tokens_of_a_tree_first() -> None:
    """Survivals never rise, whatever the order in the proposer's tree."""
    tree = Draft((1, 2, 3, 4), (-1, -1, 1, 2), (0.1, 0.9, 1.0, 1.0), 32)

    class Tree(FakeProposer):
        def propose(self, requests):
            return [tree for _ in requests]

    (offer,) = Drafting({"ngram": Tree()}).offers(sequences(1), DraftTerms())
    survivals = offer.candidate.survivals
    assert list(survivals) == sorted(survivals, reverse=True)
    assert offer.draft.token_ids == (2, 3, 4, 1)
