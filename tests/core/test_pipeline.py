"""Overlapped steps give the same texts as sequential steps, and never overwrite a block too
early."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from draftgate.backends.core.pipeline import Pipeline
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.types import FinishReason, Pace, ResumedChoice, Task
from draftgate.policies.types import ANY_PROPOSER
from tests.core.fakes import FakeExecutor, hashed_token, request
from tests.core.pipeline_harness import LetterTokenizer, PipelineHarness
from tests.examples import examples

REQUESTS = st.lists(
    st.builds(
        dict,
        prompt=st.integers(1, 14),
        max_tokens=st.integers(0, 14),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        drafts=st.integers(0, 5),
        proposer=st.sampled_from(["ngram", "ngram", "draft_model", ANY_PROPOSER]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.5]),
        n=st.integers(1, 2),
        ignore_eos=st.booleans(),
        stop=st.lists(st.text("ABCDEF", min_size=1, max_size=2), max_size=3).map(tuple),
        task=st.sampled_from([Task.GENERATE, Task.GENERATE, Task.EMBED]),
    ),
    min_size=1,
    max_size=7,
)


@settings(max_examples=examples(300))
@given(
    parameters=REQUESTS,
    plain=st.booleans(),
    arrivals=st.lists(st.integers(0, 6), min_size=7, max_size=7),
    cancelled=st.dictionaries(st.integers(0, 6), st.integers(0, 12), max_size=2),
    num_blocks=st.integers(8, 20),
    policy=st.sampled_from(["off", "fixed:3", "auto"]),
    window=st.integers(1, 8),
)
def test_overlapped_steps_give_the_same_deltas(
    parameters, plain, arrivals, cancelled, num_blocks, policy, window
) -> None:
    """Every request that is not cancelled receives the same deltas with overlapped steps.

    No block leaks or is reused early. Lookups find drafts in half of the windows of each text.
    """
    requests = [request(**(each | {"drafts": 0} if plain else each)) for each in parameters]

    def deltas_by_choice(*, asynchronous: bool) -> dict:
        harness = PipelineHarness(
            asynchronous=asynchronous,
            num_blocks=num_blocks,
            policy=policy,
            finds=lambda key, place: (key + place // window) % 2 == 0,
        )
        for step_number in range(14):
            for index, each in enumerate(requests):
                if arrivals[index] == step_number:
                    harness.submit(each)
                if cancelled.get(index) == step_number:
                    harness.worker.cancel(each.request_id)
            harness.step()
        harness.run()
        return harness.deltas_by_choice()

    in_turn, overlapped = deltas_by_choice(asynchronous=False), deltas_by_choice(asynchronous=True)
    for index, each in enumerate(requests):
        # A request that is cancelled before it arrives runs to its end.
        was_cancelled = arrivals[index] <= cancelled.get(index, -1)
        for choice in range(0 if was_cancelled else each.n):
            key = each.request_id, choice
            assert overlapped[key] == in_turn[key]
            assert len(overlapped[key][3]) == 1


@settings(max_examples=examples(200))
@given(
    parameters=REQUESTS,
    plain=st.booleans(),
    asynchronous=st.booleans(),
    paces=st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 6), st.sampled_from(Pace)), max_size=12
    ),
    num_blocks=st.integers(8, 20),
    policy=st.sampled_from(["off", "fixed:3", "auto"]),
)
def test_pace_changes_do_not_change_text(
    parameters, plain, asynchronous, paces, num_blocks, policy
) -> None:
    """Sparing, pausing and resuming at any step leave the text unchanged."""
    requests = [request(**(each | {"drafts": 0} if plain else each)) for each in parameters]

    def deltas_by_choice(paces) -> dict:
        harness = PipelineHarness(asynchronous=asynchronous, num_blocks=num_blocks, policy=policy)
        for each in requests:
            harness.submit(each)
        for step_number in range(13):
            for when, index, pace in paces:
                if when == step_number and index < len(requests):
                    harness.worker.set_pace(requests[index].request_id, pace)
            harness.step()
        for each in requests:
            harness.worker.set_pace(each.request_id, Pace.FULL)
        harness.run()
        return harness.deltas_by_choice()

    assert deltas_by_choice(paces) == deltas_by_choice([])


def test_deltas_are_delivered_while_the_next_step_runs() -> None:
    """The worker delivers the deltas of a step after it launches the next step."""
    for drafts in (0, 2):
        harness = PipelineHarness(asynchronous=True, num_blocks=20, policy="fixed:2")
        harness.submit(request(max_tokens=7, drafts=drafts, ignore_eos=True))
        launched, launch = [], harness.device.launch
        harness.device.launch = lambda plan, previous=None, launched=launched, launch=launch: (
            launched.append(plan),
            launch(plan, previous),
        )[1]
        deltas_by_choice = []
        while harness.step():
            deltas_by_choice.append((len(launched), sum(map(len, harness.delivered.values()))))
        # No step follows the last step.
        assert deltas_by_choice[:-1] == [
            (step + 1, step) for step in range(len(deltas_by_choice) - 1)
        ]
        assert deltas_by_choice[-1] == (len(launched), len(launched))


def test_plain_decodes_are_planned_ahead() -> None:
    """Without drafts and penalties, the worker plans every step but the first ahead.

    The worker plans no step after the last token.
    """

    def count_steps(**of_request: object) -> tuple[int, int]:
        harness = PipelineHarness(asynchronous=True, num_blocks=20, policy="fixed:2")
        harness.submit(request(max_tokens=6, ignore_eos=True, **of_request))
        harness.run()
        return next(harness.device.steps), harness.device.overlapped

    assert count_steps() == (6, 5)
    assert count_steps(logprobs=2, logit_bias=((1, 1.0),), min_tokens=2) == (6, 5)
    assert count_steps(presence_penalty=0.5) == (6, 0)


def test_tokens_after_the_end_are_dropped() -> None:
    """Overlapped steps launch exactly one extra step, because they detect an end one step late."""
    first = Sequence.for_choice(0, request(), ResumedChoice(0, ()))
    stream = [hashed_token(first, first.prompt_tokens + place) for place in range(9)]
    end = stream.index(stream[2]) + 1
    text = LetterTokenizer().decode(stream[:end])
    for stop, eos, shown in ((text[-1], 0, text[:-1]), ("no", stream[2], text[:-1])):
        for asynchronous in (False, True):
            harness = PipelineHarness(
                asynchronous=asynchronous, num_blocks=20, policy="off", eos=eos
            )
            harness.submit(request(max_tokens=9, stop=(stop,)))
            harness.run()
            ((tokens, deltas_by_choice, _, reasons, *_),) = harness.deltas_by_choice().values()
            assert (tokens, deltas_by_choice, reasons) == (stream[:end], shown, [FinishReason.STOP])
            assert next(harness.device.steps) == end + asynchronous


class IdleWorker:
    """An idle worker that records the time of each planned step."""

    def __init__(self) -> None:
        self.asked_s: list[float | None] = []

    def plan(self, now_s: float | None = None) -> StepPlan | None:
        self.asked_s.append(now_s)
        return None


def test_steps_are_planned_at_the_time_of_the_clock() -> None:
    """The lateness of a sequence follows the clock, because step times omit drafting and gaps."""
    worker = IdleWorker()
    for launcher in (None, FakeExecutor()):
        Pipeline(worker, FakeExecutor(), lambda _: None, launcher, lambda: 42.0).step()
    assert worker.asked_s == [42.0, 42.0]
