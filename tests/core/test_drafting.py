"""Drafting: the calls to proposers and the estimates learned from their drafts."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from draftgate.backends.core.draft_scores import DraftScores
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
    ProposerGate,
)
from draftgate.backends.core.sequence import Sequence
from draftgate.policies.costs.drafting_cost import DraftingCost
from draftgate.policies.types import ANY_PROPOSER
from tests.core.fakes import FakeProposer, hashed_token, request

WRONG, RIGHT = (lambda key, position: True), (lambda key, position: False)


class CountingProposer(FakeProposer):
    """A proposer that records the sequences of each call.

    Each further sequence of a call takes `further_s` per depth.
    """

    def __init__(self, is_wrong=RIGHT, *, further_s: float = 0.0, **options) -> None:
        super().__init__(is_wrong=is_wrong, **options)
        self.calls: list[list[int]] = []
        self.requested_keys: list[int] = []
        self._further_s = further_s

    def depth_s(self, sequences: int) -> float:
        return super().depth_s(sequences) + self._further_s * (sequences - 1)

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        self.calls.append([request.sequence.key for request in requests])
        self.requested_keys += self.calls[-1]
        return super().propose(requests)


def sequences(count: int, proposer: str = "ngram") -> list[Sequence]:
    generation = request(prompt=4, max_tokens=100_000, drafts=4, proposer=proposer)
    return [Sequence.for_choice(key, generation, generation.choices[0]) for key in range(count)]


def run(
    drafting: Drafting,
    batch: list[Sequence],
    terms: DraftTerms,
    steps: int,
    least_survival: float | None = None,
) -> None:
    """Run steps that compute no drafts, in which every sequence emits its true token.

    A slot is chosen if its survival exceeds `least_survival`, by default the price.
    """
    least = terms.price if least_survival is None else least_survival
    for _ in range(steps):
        offers = drafting.offers(batch, terms)
        chosen = [sum(s > least for s in offer.candidate.survivals) for offer in offers]
        drafting.observe_slots(offers, chosen, terms.price)
        drafting.compute(offers, [0] * len(offers), terms)
        for sequence in batch:
            token = hashed_token(sequence, len(sequence.token_ids))
            drafting.learn(sequence, (token,))
            sequence.token_ids.append(token)


def test_all_sequences_draft_if_any_slot_may_gain() -> None:
    """Each step requests a draft for each sequence if no minimum survival is set."""
    proposer = CountingProposer(WRONG)
    run(Drafting({"ngram": proposer}), sequences(3), DraftTerms(), 40)
    assert len(proposer.requested_keys) == 3 * 40


def test_sequences_with_wrong_drafts_draft_every_16_steps() -> None:
    """A sequence with only wrong drafts drafts in every 16th step, and other sequences in each
    step."""
    proposer = CountingProposer(lambda key, position: key > 0)
    drafting, batch = Drafting({"ngram": proposer}), sequences(4)
    terms = DraftTerms(least_survival=0.45)
    run(drafting, batch, terms, 400)
    proposer.requested_keys.clear()
    run(drafting, batch, terms, 10 * HOPELESS_STEPS)
    counts = [proposer.requested_keys.count(key) for key in range(4)]
    assert counts == [10 * HOPELESS_STEPS, 10, 10, 10]


def test_a_sequence_is_probed_if_no_slot_can_gain() -> None:
    """The scheduler makes a lookup every 64 steps to keep estimates current at a very high
    price."""
    proposer = CountingProposer()
    run(
        Drafting({"ngram": proposer}),
        sequences(5),
        DraftTerms(least_survival=1.0),
        10 * PROBE_STEPS,
    )
    assert proposer.requested_keys == [0] * 10


def test_probes_detect_that_drafts_became_correct() -> None:
    """All sequences draft again soon after good evidence follows a series of wrong drafts."""

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
    proposer.requested_keys.clear()
    run(drafting, batch, terms, 4 * PROBE_STEPS)
    assert proposer.requested_keys == [0] * 4
    proposer.good = True
    run(drafting, batch, terms, 48 * PROBE_STEPS)
    assert set(proposer.requested_keys) == set(range(8))


def test_no_offers_without_proposers() -> None:
    """A worker without proposers makes no offers and learns nothing."""
    drafting = Drafting({})
    run(drafting, sequences(3), DraftTerms(), 5)
    assert drafting.offers(sequences(2), DraftTerms()) == []
    assert drafting.acceptance == 0.5


def test_any_proposer_selects_the_best_offer() -> None:
    """Wrong lookups lose to cheap computed drafts, and correct lookups win.

    The scheduler always uses a named proposer.
    """
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
    """An unused computing proposer is offered after 8 steps, then at doubling intervals.

    Using the proposer resets the interval.
    """
    drafting, batch = (
        Drafting({"draft_model": CountingProposer(depth_s=1e-4)}),
        sequences(2, "draft_model"),
    )
    terms, offered = DraftTerms(least_survival=0.0, step_s=1e-2), []
    for step_number in range(8 * MOST_RESTING_STEPS):
        offers = drafting.offers(batch, terms)
        drafting.compute(offers, [0] * len(offers), terms)
        if offers:
            offered.append(step_number)
    waits = [after - before - 1 for before, after in pairwise(offered)]
    assert waits[:4] == [RESTING_STEPS, 2 * RESTING_STEPS, 4 * RESTING_STEPS, MOST_RESTING_STEPS]
    assert set(waits[4:]) == {MOST_RESTING_STEPS}
    while not (offers := drafting.offers(batch, terms)):
        drafting.compute(offers, [], terms)
    drafting.compute(offers, [1] * len(offers), terms)
    offered.clear()
    for step_number in range(RESTING_STEPS + 3):
        offers = drafting.offers(batch, terms)
        drafting.compute(offers, [0] * len(offers), terms)
        if offers:
            offered.append(step_number)
    assert offered == [0, RESTING_STEPS + 1]


def test_computed_drafts_without_gain_are_not_offered() -> None:
    """The scheduler does not offer a depth that takes longer than its tokens are worth."""
    drafting, batch = (
        Drafting({"draft_model": CountingProposer(depth_s=2e-2)}),
        sequences(2, "draft_model"),
    )
    terms = DraftTerms(least_survival=0.0, step_s=1e-2, tokens_per_s=200.0)
    assert drafting.offers(batch, terms) == []
    assert len(drafting.offers(batch, terms._replace(least_survival=None))) == 2


def test_exploration_stays_within_its_share_of_time() -> None:
    """Unused proposers draft within their share of the step time."""
    expensive, step_s = CountingProposer(depth_s=1e-3), 1e-2
    drafting, batch = Drafting({"draft_model": expensive}), sequences(3, "draft_model")
    steps = 2000
    run(drafting, batch, DraftTerms(step_s=step_s), steps)
    most = EXPLORED_SHARE * step_s * steps / 1e-3
    assert 0.8 * most <= len(expensive.calls) <= most


@pytest.mark.parametrize(("further_s", "explored"), [(0.0, 16), (2e-4, 6), (1.1e-3, 1)])
def test_exploration_drafts_for_as_many_sequences_as_double_its_cost(
    further_s: float, explored: int
) -> None:
    """A call drafts for the 16 oldest sequences or fewer, in at most twice the time of one."""
    proposer, step_s, steps = CountingProposer(depth_s=1e-3, further_s=further_s), 1e-2, 2000
    drafting = Drafting({"draft_model": proposer})
    run(drafting, sequences(20, "draft_model")[::-1], DraftTerms(step_s=step_s), steps)
    assert {tuple(call) for call in proposer.calls} == {tuple(range(explored))}
    most = EXPLORED_SHARE * step_s * steps / proposer.depth_s(explored)
    assert 0.8 * most <= len(proposer.calls) <= most


def test_exploration_skips_drafts_above_the_saved_limit() -> None:
    """A proposer whose token costs more than five steps never drafts."""
    expensive = CountingProposer(depth_s=1e-2 * MOST_SAVED_STEPS * 1.01)
    run(
        Drafting({"draft_model": expensive}),
        sequences(1, "draft_model"),
        DraftTerms(step_s=1e-2),
        5000,
    )
    assert expensive.requested_keys == []


def test_exploration_is_charged_for_overruns() -> None:
    """Exploration happens half as often if it takes twice its forecast."""
    counts = []
    for times in (1.0, 2.0):
        expensive, step_s = CountingProposer(depth_s=1e-3), 1e-2
        drafting, batch = Drafting({"draft_model": expensive}), sequences(2, "draft_model")
        for _ in range(4000):
            run(drafting, batch, DraftTerms(step_s=step_s), 1)
            drafting.observe_host_time(times * drafting.step_work.computed_s)
        counts.append(len(expensive.requested_keys))
    assert counts[1] == pytest.approx(counts[0] / 2, rel=0.05)


def mostly_wrong(key: int, position: int) -> bool:
    """Return whether the draft at a position is wrong, which is random for 19 of 20 positions."""
    return Random(key * 7919 + position).random() < 0.95


LOOKUP_COST = DraftingCost(look_up_s=2e-4, sequence_s=5e-5)
"""A lookup cost, in seconds: an eighth of the time per token of the steps in the tests."""
ASKED = DraftTerms(0.01, 0.1, 2e-3, 500.0, 1.0, LOOKUP_COST)


def test_lookups_without_gain_are_made_every_16_steps() -> None:
    """The scheduler makes a lookup in every 16th step after wrong drafts and in every step after
    correct drafts."""
    for is_wrong, expected in ((WRONG, 10), (RIGHT, 10 * HOPELESS_STEPS)):
        proposer = CountingProposer(is_wrong)
        drafting, batch = Drafting({"ngram": proposer}), sequences(1)
        run(drafting, batch, ASKED, 600)
        proposer.requested_keys.clear()
        run(drafting, batch, ASKED, 10 * HOPELESS_STEPS)
        assert len(proposer.requested_keys) == expected


def test_cheap_lookups_are_checked_more_often() -> None:
    """Lookups without gain receive 2% of the step time, so cheap lookups are more frequent."""
    proposer = CountingProposer(mostly_wrong)
    drafting, batch = Drafting({"ngram": proposer}), sequences(1)
    terms = ASKED._replace(drafting=DraftingCost(look_up_s=2e-5, sequence_s=5e-5))
    run(drafting, batch, terms, 600)
    proposer.requested_keys.clear()
    run(drafting, batch, terms, 160)
    assert len(proposer.requested_keys) == 160 // 2  # 70 us are 1.8% of two steps of 2 ms.


def test_lookups_pause_if_other_sequences_get_the_slots() -> None:
    """Correct drafts for which the step has no slot gain nothing."""
    proposer = CountingProposer(RIGHT)
    drafting, batch = Drafting({"ngram": proposer}), sequences(1)
    run(drafting, batch, ASKED, 600, least_survival=1.0)
    proposer.requested_keys.clear()
    run(drafting, batch, ASKED, 10 * HOPELESS_STEPS, least_survival=1.0)
    assert len(proposer.requested_keys) == 20  # 250 us are 1.6% of eight steps of 2 ms.


def test_lookups_of_a_step_share_its_fixed_cost() -> None:
    """Lookups without gain for one sequence pay for eight sequences that share the fixed cost."""
    counts = []
    for count in (1, 8):
        proposer = CountingProposer(lambda key, position: (position + key) % 8 > 1)
        drafting, batch = Drafting({"ngram": proposer}), sequences(count)
        cost = DraftingCost(look_up_s=1e-3, sequence_s=1e-6)
        terms = ASKED._replace(price=0.02, drafting=cost)
        run(drafting, batch, terms, 1200)
        proposer.requested_keys.clear()
        run(drafting, batch, terms, 10 * HOPELESS_STEPS)
        counts.append(len(proposer.requested_keys) / count)
    assert counts[0] <= 10
    assert counts[1] == 10 * HOPELESS_STEPS


def test_lookups_resume_when_a_text_starts_to_repeat() -> None:
    """Each step makes a lookup again soon after a lookup succeeds, even after 1,000 failures.

    The evidence that such drafts are good comes from another sequence.
    """
    proposer = CountingProposer(
        lambda key, position: key == 0 and position < 1000 and mostly_wrong(key, position)
    )
    drafting, batch = Drafting({"ngram": proposer}), sequences(2)
    run(drafting, batch, ASKED, 900)
    proposer.requested_keys.clear()
    run(drafting, batch, ASKED, 96)
    assert proposer.requested_keys.count(0) < 96 / 4
    run(drafting, batch, ASKED, 4 * HOPELESS_STEPS)
    proposer.requested_keys.clear()
    run(drafting, batch, ASKED, 100)
    assert proposer.requested_keys.count(0) == 100


def test_pause_of_lookups_ends_when_a_request_joins() -> None:
    """Another sequence in the same place of the batch may have better drafts."""
    (old, new), scores = sequences(2), DraftScores()
    gate = ProposerGate({"ngram": CountingProposer(RIGHT)}, scores)
    gate.begin_step([old], ASKED, may_skip=True)
    gate.skip_coming_steps([old], ASKED)
    assert gate.begin_step([old], ASKED, may_skip=True) == ()
    assert gate.begin_step([new], ASKED, may_skip=True) == [new]


def test_last_token_of_a_request_does_not_pause_lookups_of_the_next() -> None:
    """A sequence that may not draft is no reason to skip the next steps."""
    proposer = CountingProposer(RIGHT)
    drafting, (ending, other) = Drafting({"ngram": proposer}), sequences(2)
    ending.most_tokens = len(ending.token_ids) + 1
    run(drafting, [ending], ASKED, 1)
    assert proposer.requested_keys == []
    other.key = ending.key  # so that only the end of the first sequence could pause lookups
    run(drafting, [other], ASKED, 1)
    assert proposer.requested_keys == [ending.key]


@pytest.mark.parametrize("with_distribution", [False, True])
def test_evidence_of_sampled_tokens_counts_only_without_distributions(
    with_distribution: bool,
) -> None:
    """The probability of a sampled token changes no survival under rejection sampling."""
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
    """A proposer of single tokens with alternating strong and weak evidence."""

    def __init__(self, *, with_distribution: bool) -> None:
        super().__init__(depth_s=1e-4)
        self._distribution = object() if with_distribution else None
        self._turn = 0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        self._turn += 1
        evidence = 990 if self._turn % 2 else 10
        return [Draft((7,), evidence=evidence, distributions=self._distribution) for _ in requests]


def test_offers_list_the_best_tokens_of_a_tree_first() -> None:
    """Survivals never rise for any order of the proposer's tree."""
    tree = Draft((1, 2, 3, 4), (-1, -1, 1, 2), (0.1, 0.9, 1.0, 1.0), 32)

    class Tree(FakeProposer):
        def propose(self, requests):
            return [tree for _ in requests]

    (offer,) = Drafting({"ngram": Tree()}).offers(sequences(1), DraftTerms())
    survivals = offer.candidate.survivals
    assert list(survivals) == sorted(survivals, reverse=True)
    assert offer.draft.token_ids == (2, 3, 4, 1)
