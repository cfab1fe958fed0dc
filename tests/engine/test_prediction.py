"""Predicted outputs: the place in a prediction, drafts from it, and losslessness."""

from __future__ import annotations

import random
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from bench.harness.prompts import held_out_prompts
from draftgate.backends.core.drafts import PREDICTION
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.engine.proposers.ngram_lookup import MAX_EVIDENCE
from draftgate.backends.engine.proposers.prediction import PredictionProposer
from draftgate.backends.engine.proposers.registry import proposer_names
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.policies.speculation.baselines import Fixed, Off
from draftgate.policies.types import ANY_PROPOSER, SpeculationMode, SpeculationPlan
from tests.engine.harness import Engine, Model, Outcome, RandomSlots, Setup, request, run

PROMPT = (900, 901, 902)
PLAN = SpeculationPlan("test", SpeculationMode.AUTO, ANY_PROPOSER, 16, "a test")
SLOTS = 8
LENGTH = 48


def predicted(prediction: tuple[int, ...], plan: SpeculationPlan = PLAN) -> Sequence:
    generation = GenerationRequest(
        "r", compact(PROMPT), SamplingParams(99, 0), plan, prediction_ids=prediction
    )
    return Sequence.for_choice(0, generation, generation.choices[0])


def drafts_along(prediction: tuple[int, ...], output: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the draft before each token of an output and after the last."""
    proposer, sequence, drafts = PredictionProposer(), predicted(prediction), []
    for token in (*output, None):
        (draft,) = proposer.propose([DraftRequest(sequence, SLOTS)])
        drafts.append(draft.token_ids)
        if token is not None:
            sequence.token_ids.append(token)
    return drafts


def test_output_that_equals_its_prediction_is_always_drafted() -> None:
    """The draft is the rest of the prediction, from the first token to the last."""
    text = tuple(range(30))
    expected = [text[at : at + SLOTS] for at in range(len(text) + 1)]
    assert drafts_along(text, text) == expected


@given(
    st.integers(5, 30), st.integers(0, 4), st.lists(st.integers(500, 520), max_size=6), st.data()
)
def test_drafts_continue_after_an_edit(
    at: int, removed: int, added: list[int], data: st.DataObject
) -> None:
    """One token after a replaced, inserted or removed part, the draft is the rest of the text."""
    text = tuple(range(60))
    output = (*text[:at], *added, *text[at + removed :])
    seen = at + len(added) + data.draw(st.integers(1, 12))
    drafts = drafts_along(text, output)
    assert drafts[seen] == output[seen : seen + SLOTS]


def test_repeated_lines_are_told_apart() -> None:
    """The place after many equal lines is exact, although the last tokens occur in each line."""
    line = (1, 2, 3, 4, 5)
    text = tuple(token for end in range(20) for token in (*line, 100 + end))
    assert drafts_along(text, text) == [text[at : at + SLOTS] for at in range(len(text) + 1)]


def test_evidence_grows_with_the_match() -> None:
    """The evidence is the number of tokens since the last difference, up to its bound."""
    proposer, sequence = PredictionProposer(), predicted(tuple(range(100)))
    found = []
    for token in range(50):
        (draft,) = proposer.propose([DraftRequest(sequence, 4)])
        found.append(draft.evidence)
        sequence.token_ids.append(token)
    assert found == [min(at, MAX_EVIDENCE) for at in range(50)]


def test_output_outside_its_prediction_has_no_draft() -> None:
    """A text without a token of the prediction gets no draft after its first token."""
    assert drafts_along((1, 2, 3), (7, 8, 9))[1:] == [(), (), ()]


def test_resumed_output_finds_its_place() -> None:
    """A sequence that resumes elsewhere continues after the tokens that it already has."""
    sequence = predicted(tuple(range(40)))
    sequence.token_ids.extend((*range(10), 777, *range(11, 20)))
    (draft,) = PredictionProposer().propose([DraftRequest(sequence, SLOTS)])
    assert draft.token_ids == tuple(range(20, 20 + SLOTS))


@pytest.mark.parametrize(
    ("mode", "proposer"), [(SpeculationMode.OFF, None), (SpeculationMode.NGRAM, "ngram")]
)
def test_mode_of_the_client_excludes_the_prediction(
    mode: SpeculationMode, proposer: str | None
) -> None:
    """A client that names a proposer or no drafts gets no drafts from its prediction."""
    plan = replace(PLAN, mode=mode, proposer=proposer)
    assert not predicted((1, 2, 3), plan).has_prediction
    assert predicted((1, 2, 3)).has_prediction
    assert not predicted(()).has_prediction


def test_workers_do_not_announce_the_proposer() -> None:
    """A request cannot name the proposer, and a worker does not report it in its load."""
    assert PREDICTION not in proposer_names("draft_model")


def only_predictions(_: Engine) -> dict[str, object]:
    return {PREDICTION: PredictionProposer()}


def proposers(_: Engine) -> dict[str, object]:
    return {"ngram": NgramProposer(), PREDICTION: PredictionProposer()}


def plain_outputs(model: Model, prompts: list[tuple[int, ...]], temperature: float) -> Outcome:
    requests = [
        request(str(i), prompt, Off(), max_tokens=LENGTH, temperature=temperature, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    return run(model, requests, Setup())


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.8])
def test_edited_predictions_never_change_the_text(shipped: Model, temperature: float) -> None:
    """Requests with right, edited and wrong predictions have the text of plain decoding."""
    rng, prompts = random.Random(3), held_out_prompts(shipped.tokenizer, 9)
    plain = plain_outputs(shipped, prompts, temperature)
    policy, requests = RandomSlots(rng), []
    for i, prompt in enumerate(prompts):
        text = plain.tokens[str(i), 0]
        for _ in range(4 * (i % 3)):
            at = rng.randrange(len(text))
            text = [*text[:at], rng.randrange(4096), *text[at + rng.randrange(3) :]]
        of = request(str(i), prompt, policy, max_tokens=LENGTH, temperature=temperature, seed=i)
        requests.append(replace(of, prediction_ids=tuple(text)))
    found = run(shipped, requests, Setup(policy, proposers, max_num_seqs=4, num_blocks=90))
    assert found.tokens == plain.tokens
    assert found.text == plain.text
    assert found.leaked_blocks == 0
    assert found.accepted > 0
    assert found.accepted_predictions > 0


def test_right_prediction_is_accepted_whole(shipped: Model) -> None:
    """With a right prediction, all tokens but one in nine come from it and none is rejected."""
    (prompt,) = held_out_prompts(shipped.tokenizer, 1, seed=5)
    plain = plain_outputs(shipped, [prompt], 0.8)
    of = request("0", prompt, Fixed(8), max_tokens=LENGTH, temperature=0.8, seed=0)
    right = replace(of, prediction_ids=tuple(plain.tokens["0", 0]))
    found = run(shipped, [right], Setup(Fixed(8), only_predictions))
    assert found.tokens == plain.tokens
    assert found.rejected_predictions == found.rejected == 0
    # The step of the prompt and each later step sample one token beyond the draft.
    assert found.accepted_predictions == found.accepted >= (LENGTH - 1) * 8 // 9


def test_wrong_prediction_is_counted_as_rejected(shipped: Model) -> None:
    """The drafts of a wrong prediction are rejected, and the text stays the same."""
    (prompt,) = held_out_prompts(shipped.tokenizer, 1, seed=6)
    plain = plain_outputs(shipped, [prompt], 0.0)
    text = plain.tokens["0", 0]
    wrong = tuple(token for each in text for token in (each, (each + 1) % 4096))
    of = request("0", prompt, Fixed(4), max_tokens=LENGTH, temperature=0.0)
    requests = [replace(of, prediction_ids=wrong)]
    found = run(shipped, requests, Setup(Fixed(4), only_predictions))
    assert found.tokens == plain.tokens
    assert found.rejected_predictions > 0
