"""Log probabilities of prompts: which rows steps score, and requests without output."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from draftgate.backends.core.steps import StepPlan
from draftgate.backends.errors import RequestRejected
from draftgate.backends.prompt_logprobs import PromptLogprobs, joined
from draftgate.backends.streams import UnreadDeltas
from draftgate.backends.types import Delta, FinishReason, ResumedChoice
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.costs.step_cost_fit import REFIT_STEPS
from tests.core.fakes import request
from tests.core.scheduler_harness import COST, SchedulerHarness
from tests.core.test_worker import WorkerHarness

PROMPT = tuple(range(1, 41))


def run(harness: SchedulerHarness) -> list[StepPlan]:
    """Run until all requests end and return the steps."""
    plans = []
    while (plan := harness.step()) is not None:
        plans.append(plan)
    harness.check_results()
    return plans


def positions(found: PromptLogprobs) -> list[float]:
    """Return the log probabilities, which the fake device sets to positions."""
    return [token.logprob for token in found.scored_tokens()]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("prompt", [1, 2, 16, 17, 33])
def test_every_token_but_the_first_is_scored_once(prompt: int, max_tokens: int) -> None:
    """Chunks score each token after the first once, and no row beyond the prompt."""
    harness = SchedulerHarness(num_blocks=16, max_step_tokens=16)
    harness.add(prompt=prompt, max_tokens=max_tokens, prompt_logprobs=0)
    plans = run(harness)
    assert sum(scored.rows for plan in plans for scored in plan.scored) == prompt - 1


def test_cached_prompt_is_computed_again() -> None:
    """A request for log probabilities computes all rows of a cached prompt, and others share it."""
    harness = SchedulerHarness(num_blocks=64)
    harness.add(prompt=PROMPT, max_tokens=1)
    run(harness)
    scored = harness.add(prompt=PROMPT, max_tokens=1, prompt_logprobs=0)
    run(harness)
    after = harness.add(prompt=PROMPT, max_tokens=1)
    run(harness)
    assert (scored.cached_tokens, after.cached_tokens) == (0, 36)


def test_only_the_first_choice_computes_the_prompt() -> None:
    """The other choices share the prompt's blocks, and only choice 0 scores rows."""
    harness = SchedulerHarness(num_blocks=64, max_step_tokens=64)
    choices = harness.add_choices(request(prompt=PROMPT, max_tokens=2, n=3, prompt_logprobs=0))
    plans = run(harness)
    assert [choice.cached_tokens for choice in choices] == [0, 36, 36]
    scored = {plan.work[one.place].sequence.choice for plan in plans for one in plan.scored}
    assert scored == {0}


def test_preempted_prompt_does_not_score_rows_again() -> None:
    """A preempted sequence shares its cached blocks, and scores only the missing rows."""
    harness = SchedulerHarness(
        num_blocks=12, max_num_seqs=4, max_step_tokens=4, batching="decode_first"
    )
    for _ in range(2):
        harness.add(prompt=3, max_tokens=20, ignore_eos=True)
    late = harness.add(prompt=32, max_tokens=0, prompt_logprobs=0)
    plans = run(harness)
    assert late.preemptions > 0
    assert sum(scored.rows for plan in plans for scored in plan.scored) == 31


def test_resumed_choice_is_not_scored_again() -> None:
    """A choice with delivered tokens has delivered the log probabilities of its prompt."""
    harness = SchedulerHarness(num_blocks=64)
    generation = request(prompt=PROMPT, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    sequence = harness.add_choices(generation)[0]
    run(harness)
    begun = ResumedChoice(0, tuple(harness.outputs[sequence.key][:1]))
    resumed = replace(generation, request_id="again", resumed=(begun,))
    harness.add_choices(resumed)
    plans = []
    while (plan := harness.step()) is not None:
        plans.append(plan)
    assert not any(plan.scored for plan in plans)


def test_steps_with_scored_rows_do_not_change_the_learned_cost() -> None:
    """The LM head of scored rows takes time, which is not part of the step cost."""

    def learned(prompt_logprobs: int | None) -> StepCost:
        harness = SchedulerHarness(num_blocks=64, max_step_tokens=16)
        for first in range(REFIT_STEPS):
            prompt = (first, *range(15))
            harness.add(prompt=prompt, max_tokens=1, prompt_logprobs=prompt_logprobs)
        run(harness)
        return harness.scheduler.cost

    assert learned(0) == COST
    assert learned(None) != COST


@pytest.mark.parametrize("drafts", [0, 3])
def test_first_delta_has_the_log_probabilities(drafts: int) -> None:
    """The first delta of choice 0 has the log probabilities of the prompt, and no other delta."""
    generation = request(
        PROMPT, max_tokens=5, drafts=drafts, n=2, ignore_eos=True, prompt_logprobs=0
    )
    deltas = WorkerHarness().run(generation)
    first, *others = deltas[generation.request_id, 0]
    assert positions(first.prompt_logprobs) == list(range(1, len(PROMPT)))
    others += deltas[generation.request_id, 1]
    assert all(delta.prompt_logprobs is None for delta in others)


@pytest.mark.parametrize("scored", [True, False])
def test_request_without_output_ends_with_its_prompt(scored: bool) -> None:
    """A request of 0 tokens has one delta without tokens, and may fill the context."""
    harness = WorkerHarness(max_model_len=len(PROMPT))
    generation = request(PROMPT, max_tokens=0, prompt_logprobs=0 if scored else None)
    (delta,) = harness.run_one(generation)
    assert (delta.token_ids, delta.text) == ((), "")
    assert delta.finish_reason is FinishReason.LENGTH
    assert delta.outcome is not None
    assert (delta.prompt_logprobs is not None) == scored
    with pytest.raises(RequestRejected, match=r"40 tokens, but 41 were requested \(41 in"):
        harness.worker.admission.check(request((*PROMPT, 1), max_tokens=0))


def test_merged_deltas_keep_the_log_probabilities() -> None:
    """A slow reader gets merged deltas with the log probabilities of the first."""
    unread, found = UnreadDeltas(), PromptLogprobs(0, b"1234", b"1234", b"", b"")
    unread.put(Delta(0, (5,), "a", prompt_logprobs=found))
    unread.put(Delta(0, (6,), "b"))
    merged = unread.pop()
    assert (merged.text, merged.prompt_logprobs) == ("ab", found)


@given(
    st.integers(0, 3).flatmap(
        lambda k: st.lists(
            st.lists(
                st.tuples(
                    st.floats(width=32, allow_nan=False),
                    st.integers(1, 1 << 20),
                    st.lists(
                        st.tuples(st.integers(0, 1 << 20), st.floats(width=32, allow_nan=False)),
                        min_size=k,
                        max_size=k,
                    ).map(tuple),
                ),
                max_size=4,
            ),
            min_size=1,
            max_size=3,
        ).map(lambda parts: (k, parts))
    )
)
def test_columns_keep_every_token(generated: tuple[int, list[list[tuple]]]) -> None:
    """Joined columns have the tokens of all parts in order, with exact values."""
    alternatives, parts = generated
    whole = joined([columns(alternatives, part) for part in parts])
    assert list(whole.scored_tokens()) == [token for part in parts for token in part]


def columns(alternatives: int, tokens: Many[tuple]) -> PromptLogprobs:
    """Return tokens as columns."""

    def packed(values: list, dtype: str) -> bytes:
        return np.array(values, dtype=dtype).tobytes()

    return PromptLogprobs(
        alternatives,
        packed([logprob for logprob, _, _ in tokens], "<f4"),
        packed([rank for _, rank, _ in tokens], "<i4"),
        packed([token for _, _, top in tokens for token, _ in top], "<i4"),
        packed([value for _, _, top in tokens for _, value in top], "<f4"),
    )


def test_prompt_without_parts_has_none() -> None:
    """A prompt of one token has no log probabilities."""
    assert joined([]) is None
