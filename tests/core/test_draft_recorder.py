"""The draft recorder: equal columns for any partition of a text into steps."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import hypothesis.strategies as st
import pytest
from hypothesis import given

from draftgate.backends.core.draft_recorder import DraftRecorder
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.recording import SLOTS, Guess, Text
from draftgate.backends.token_ids import compact
from draftgate.backends.types import (
    Delta,
    FinishReason,
    GenerationRequest,
    GrammarKind,
    GrammarSpec,
    ResumedChoice,
    SamplingParams,
    Task,
)
from draftgate.policies.types import SpeculationMode, SpeculationPlan

PLAN = SpeculationPlan("test", SpeculationMode.OFF, None, 0, "a test")

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=60)
"""Texts of few different tokens, so that most positions have matches that disagree."""


def request(name: str = "r", prompt: tuple[int, ...] = (0, 1, 0, 2), n: int = 1):
    return GenerationRequest(name, compact(prompt), SamplingParams(100, 1), PLAN, n)


def steps_of(text: list[int], sizes: list[int]) -> list[list[int]]:
    """Split a text into steps of these sizes, and the rest into single tokens."""
    rest = iter(text)
    parts = [list(islice(rest, size)) for size in sizes]
    return [part for part in [*parts, *([token] for token in rest)] if part]


def record(recorder: DraftRecorder, name: str, steps: list[list[int]], choice: int = 0):
    """Deliver the steps, and return the recorded texts."""
    found: list[Text] = []
    for count, step in enumerate(steps, 1):
        reason = FinishReason.LENGTH if count == len(steps) else None
        delta = Delta(choice, tuple(step), "", finish_reason=reason)
        found += recorder.observe([(name, delta)])
    return found


def expected_guesses(prompt: tuple[int, ...], text: list[int]) -> list[Guess]:
    """Return the guesses of a new proposer at each position, one by one."""
    found = []
    for at in range(len(text)):
        sequence = Sequence(0, request(prompt=prompt), 0, compact((*prompt, *text[:at])))
        (draft,) = NgramProposer().propose([DraftRequest(sequence, SLOTS)])
        found.append(Guess.from_draft(draft, text[at : at + SLOTS]))
    return found


@given(tokens, st.lists(st.integers(1, 5), max_size=20), tokens)
def test_columns_do_not_depend_on_steps(text, sizes, prompt) -> None:
    """Any partition into steps records the drafts that a new proposer makes at each position."""
    recorder = DraftRecorder({"ngram": NgramProposer()})
    recorder.begin(request(prompt=tuple(prompt)))
    (recorded,) = record(recorder, "r", steps_of(text, sizes))
    guesses = [recorded.guess("ngram", at) for at in range(recorded.length)]
    assert guesses == expected_guesses(tuple(prompt), text)
    recorded.check()


@given(tokens, st.integers(0, SLOTS))
def test_first_tokens_of_a_guess_equal_those_of_the_draft(text, most) -> None:
    """A shortened guess has the right tokens of the shortened draft, also in a tree."""
    sequence = Sequence(0, request(), 0, compact(text))
    (draft,) = NgramProposer().propose([DraftRequest(sequence, SLOTS)])
    for follow in (text, text[::-1], [1, 0, 1], draft.token_ids):
        guess = Guess.from_draft(draft, follow).first(most)
        assert guess.right_places == draft.first(most).accepted_places(follow)
        assert guess.agreed == len(guess.right_places)


def test_requests_that_overlap_are_recorded_separately() -> None:
    """Texts keep the order of their arrival as index, whatever order they end in."""
    recorder = DraftRecorder({"ngram": NgramProposer()}, first_index=5)
    recorder.begin(request("slow"))
    recorder.begin(request("fast", (1, 1, 1)))
    both = [("slow", Delta(0, (0, 1), "")), ("fast", Delta(0, (1, 1), ""))]
    assert recorder.observe(both) == []
    (fast,) = record(recorder, "fast", [[1, 1]])
    (slow,) = record(recorder, "slow", [[0]])
    assert (slow.prompt, slow.length) == (5, 3)
    assert (fast.prompt, fast.length) == (6, 4)
    assert fast.guess("ngram", 0).agreed == 4
    assert [slow.guess("ngram", at) for at in range(3)] == expected_guesses((0, 1, 0, 2), [0, 1, 0])


def test_each_choice_is_a_text_and_a_resumed_choice_is_whole() -> None:
    """Two choices give two texts, and a resumed choice includes its earlier output."""
    recorder = DraftRecorder({"ngram": NgramProposer()})
    resumed = (ResumedChoice(0, (2, 2)), ResumedChoice(1, ()))
    recorder.begin(replace(request(n=2), resumed=resumed))
    (first,) = record(recorder, "r", [[2], [0]], choice=0)
    (second,) = record(recorder, "r", [[1]], choice=1)
    assert (first.length, second.length) == (4, 1)
    expected = expected_guesses((0, 1, 0, 2), [2, 2, 2, 0])
    assert [first.guess("ngram", at) for at in range(4)] == expected


def test_cancelled_request_leaves_no_state() -> None:
    """The recorder drops a cancelled request, and later deltas for its id record nothing."""
    proposer = NgramProposer()
    recorder = DraftRecorder({"ngram": proposer})
    recorder.begin(request())
    recorder.observe([("r", Delta(0, (1, 2), ""))])
    recorder.cancel("r")
    recorder.cancel("r")
    assert record(recorder, "r", [[1]]) == []
    assert not recorder._open
    assert not proposer._live


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_sampling_depends_on_the_id_alone(share: float) -> None:
    """Two recorders sample the same requests, about the chosen share of them."""
    one, other = DraftRecorder({}, share), DraftRecorder({}, share)
    ids = [f"request-{number}" for number in range(2000)]
    sampled = [name for name in ids if one.samples(request(name))]
    assert sampled == [name for name in ids if other.samples(request(name))]
    assert abs(len(sampled) - share * len(ids)) <= 100


class NoThrees:
    """A grammar without the token 3, in which 1, 1 follows every 0."""

    is_complete = True

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def accept(self, token_id: int) -> None:
        self.accepted.append(token_id)

    def legal(self, token_ids) -> int:
        return [*token_ids, 3].index(3)

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        return (1, 1) if self.accepted[-1:] == [0] else ()

    def masks(self, draft) -> list[bytes]:
        raise NotImplementedError


class Grammars:
    """Starts the grammar of any request."""

    def start(self, spec: GrammarSpec) -> NoThrees:
        return NoThrees()


def test_grammar_shortens_drafts_and_adds_forced_tokens() -> None:
    """A text with a grammar records legal drafts, and the forced tokens at their positions."""
    prompt, text = (0, 2, 3, 0, 2), [0, 1, 1, 2]
    recorder = DraftRecorder({"ngram": NgramProposer()}, grammars=Grammars())
    asked = replace(request(prompt=prompt), grammar=GrammarSpec(GrammarKind.REGEX, "a+"))
    recorder.begin(asked)
    recorder.begin(request("plain", prompt))
    (recorded,) = record(recorder, "r", [[0, 1], [1, 2]])
    (plain,) = record(recorder, "plain", [text])
    recorded.check()
    assert set(recorded.drafts) == {"ngram", "grammar"}
    forced = [recorded.guess("grammar", at) for at in range(4)]
    assert [(guess.proposed, guess.agreed) for guess in forced] == [(0, 0), (2, 2), (0, 0), (0, 0)]
    assert set(plain.drafts) == {"ngram"}
    assert plain.guess("ngram", 0).proposed > 0  # a draft that begins with 3
    assert recorded.guess("ngram", 0).proposed == 0


def test_grammars_and_embeddings_are_not_recorded() -> None:
    """A forced token is no proposer's draft, and an embedding has no output."""
    recorder = DraftRecorder({"ngram": NgramProposer()})
    assert not recorder.samples(replace(request(), grammar=GrammarSpec(GrammarKind.REGEX, "a+")))
    assert not recorder.samples(replace(request(), task=Task.EMBED))


@pytest.mark.parametrize(("chosen", "tenant"), [(False, ""), (True, "acme")])
def test_tenant_is_recorded_only_if_chosen(*, chosen: bool, tenant: str) -> None:
    """A text names the tenant of its request only with `tenants`."""
    recorder = DraftRecorder({"ngram": NgramProposer()}, tenants=chosen)
    recorder.begin(replace(request(), tenant="acme"))
    (text,) = record(recorder, "r", [[1, 2]])
    assert text.tenant == tenant
