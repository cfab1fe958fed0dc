"""The numbers of accepted draft tokens, for all endings and proposers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.core.drafts import PREDICTION
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.pipeline import Pipeline
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.types import Delta, FinishReason, GenerationRequest, outcome_of
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import speculation_policy
from tests.core.fakes import FakeProposer, ForcingGrammar, hashed_token, request
from tests.core.pipeline_harness import FakeDevice, LetterTokenizer

PROMPT = 4

PROPOSERS = ("ngram", "draft_model", PREDICTION)


class Server:
    """A worker of three proposers on a fake device, and the deltas of each choice."""

    def __init__(self, *, asynchronous: bool, branches: float, wrong_every: int) -> None:
        device = FakeDevice()

        def proposer(depth_s: float) -> FakeProposer:
            return FakeProposer(
                is_wrong=lambda key, place: (key + place) % wrong_every == 0,
                depth_s=depth_s,
                branches=branches,
            )

        proposers = {PREDICTION: proposer(0.0), "ngram": proposer(0.0)}
        self.scheduler = Scheduler(
            SchedulerConfig(8, 64, frozenset({0})),
            KvBlocks(128, 4),
            speculation_policy("fixed:6"),
            {**proposers, "draft_model": proposer(1e-4)},
            StepCost((64,), (1e-3,)),
        )
        self.worker = WorkerCore(self.scheduler, LetterTokenizer(), 2000)
        self.deltas: dict[int, list[Delta]] = {}
        launcher = device if asynchronous else None
        self.pipeline = Pipeline(self.worker, device, self._deliver, launcher)

    def _deliver(self, batch: list[tuple[str, Delta]]) -> None:
        for _, delta in batch:
            self.deltas.setdefault(delta.choice, []).append(delta)

    def run(self, generation: GenerationRequest, *, grammar: bool, steps: int) -> None:
        """Run a request, and cancel it after a number of steps."""
        self.worker.submit(generation)
        if grammar:
            for sequence in self.scheduler.waiting:
                sequence.grammar = ForcingGrammar(sequence)
        for _ in range(steps):
            if not self.pipeline.step():
                return
        self.worker.cancel(generation.request_id)


def check_counts(deltas: list[Delta]) -> None:
    """Check that all numbers of accepted tokens of a choice agree with its tokens."""
    steps = [step for delta in deltas for step in delta.steps]
    assert [step.tokens for step in steps] == [len(delta.token_ids) for delta in deltas]
    assert sum(step.accepted + 1 for step in steps) == sum(len(one.token_ids) for one in deltas)
    assert all(0 <= step.accepted <= len(step.draft_ids) for step in steps)
    drafts = [draft for delta in deltas for draft in delta.drafts]
    drafted = [step for step in steps if step.draft_ids]
    assert drafts == [(len(step.draft_ids), step.accepted) for step in drafted]
    outcome = deltas[-1].outcome
    if outcome is None:  # cancelled
        return
    predicted = [step for step in drafted if step.proposer == PREDICTION]
    assert outcome.accepted_prediction_tokens == sum(step.accepted for step in predicted)
    verified = sum(len(step.draft_ids) for step in predicted)
    assert outcome.rejected_prediction_tokens + outcome.accepted_prediction_tokens == verified
    counted = replace(
        outcome,
        revisions=(),
        accepted_prediction_tokens=0,
        rejected_prediction_tokens=0,
        saved_s=0.0,
    )
    assert counted == outcome_of(drafts)


def true_text(choice: int) -> str:
    """Return the text of a choice of the first request without any ending."""

    def tokens() -> Iterator[int]:
        sequence: Any = type("", (), {"key": choice, "choice": choice})
        return (hashed_token(sequence, PROMPT + place) for place in range(60))

    return LetterTokenizer().decode(tokens())


@given(st.data())
def test_accepted_tokens_and_steps_add_up_to_completion_tokens(data: st.DataObject) -> None:
    """Each step adds its accepted tokens and one more, whatever ends the output.

    The endings are an end token, stop strings and stop tokens at any place of a draft,
    `max_tokens`, a grammar, and a cancelled request. Traces, deltas and outcomes agree.
    """
    server = Server(
        asynchronous=data.draw(st.booleans(), "asynchronous"),
        branches=data.draw(st.sampled_from([0.0, 0.5]), "branches"),
        wrong_every=data.draw(st.sampled_from([3, 11, 1000]), "wrong_every"),
    )
    n = data.draw(st.integers(1, 3), "n")
    begin, length = data.draw(st.integers(0, 40), "begin"), data.draw(st.integers(1, 3), "length")
    text = true_text(data.draw(st.integers(0, n - 1), "stopped choice"))[begin : begin + length]
    proposer = data.draw(st.sampled_from(PROPOSERS), "proposer")
    generation = request(
        prompt=PROMPT,
        max_tokens=data.draw(st.integers(1, 50), "max_tokens"),
        drafts=data.draw(st.integers(0, 6), "drafts"),
        n=n,
        proposer="ngram" if proposer == PREDICTION else proposer,
        stop=data.draw(st.sampled_from([(), (text,), (text, text[:1])]), "stop"),
        stop_token_ids=data.draw(st.sampled_from([(), (7,), (7, 31)]), "stop_token_ids"),
        ignore_eos=data.draw(st.booleans(), "ignore_eos"),
        min_tokens=data.draw(st.integers(0, 3), "min_tokens"),
    )
    if proposer == PREDICTION:
        generation = replace(generation, prediction_ids=(1, 2, 3))
    steps = data.draw(st.just(1000) | st.integers(1, 12), "steps")
    server.run(
        replace(generation, traced=True), grammar=data.draw(st.booleans(), "grammar"), steps=steps
    )
    for deltas in server.deltas.values():
        check_counts(deltas)
    if steps == 1000:
        assert len(server.deltas) == n
        assert all(deltas[-1].outcome is not None for deltas in server.deltas.values())


@pytest.mark.parametrize("branches", [0.0, 0.5])
@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("place", range(7))
def test_draft_tokens_after_a_stop_string_are_not_accepted(
    place: int, proposer: str, branches: float
) -> None:
    """A stop string at any place of a step ends its accepted tokens, as a stop token does."""
    found = []
    letter = true_text(0)[1 + place]
    for ending in ({"stop": (letter,)}, {"stop_token_ids": (ord(letter) - ord("A"),)}):
        server = Server(asynchronous=False, branches=branches, wrong_every=1000)
        generation = request(
            prompt=PROMPT,
            max_tokens=40,
            drafts=6,
            proposer="ngram" if proposer == PREDICTION else proposer,
            ignore_eos=True,
            **ending,
        )
        if proposer == PREDICTION:
            generation = replace(generation, prediction_ids=(1, 2, 3))
        server.run(replace(generation, traced=True), grammar=False, steps=1000)
        (deltas,) = server.deltas.values()
        check_counts(deltas)
        assert deltas[-1].finish_reason is FinishReason.STOP
        tokens = sum(len(delta.token_ids) for delta in deltas)
        assert tokens <= 2 + place
        found.append((tokens, deltas[-1].outcome))
    assert found[0] == found[1]
