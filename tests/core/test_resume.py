"""Resuming a choice that another worker has started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftgate.backends.errors import RequestRejected
from draftgate.backends.types import Delta, FinishReason, GenerationRequest, ResumedChoice
from tests.core.fakes import request, scripted
from tests.core.test_worker import WorkerHarness, encode, text_of, tokens_of


def resumed(one: GenerationRequest, *choices: tuple[int, list[int]]) -> GenerationRequest:
    begun = tuple(ResumedChoice(choice, tuple(tokens)) for choice, tokens in choices)
    return replace(one, request_id=f"{one.request_id}-again", resumed=begun)


def output_after(deltas: list[Delta], tokens: int) -> tuple[str, list[int]]:
    """Return the text and tokens that follow the first `tokens` tokens, which must end a delta."""
    seen = 0
    for index, delta in enumerate(deltas):
        if seen == tokens:
            return text_of(deltas[index:]), tokens_of(deltas[index:])
        seen += len(delta.token_ids)
    return "", []


@pytest.mark.parametrize("stop", [(), ("\n\n\n",), (" + 2",), ("é",)])
@pytest.mark.parametrize("drafts", [0, 3])
def test_resumed_choice_completes_the_undisturbed_text(stop, drafts) -> None:
    """At every cut, the texts of both runs add up to the text of an uninterrupted run."""
    ids = encode("def f(x):  # café ☕☕\n    return x + 1\n\n\nclass C: pass")
    harness = WorkerHarness(scripted(*ids))
    plain = harness.run_one(request(max_tokens=len(ids), stop=stop))
    whole, total = text_of(plain), len(tokens_of(plain))
    for done in range(total):
        one = request(max_tokens=len(ids), stop=stop, drafts=drafts)
        rest = harness.run_one(resumed(one, (0, ids[:done])))
        expected_text, expected_tokens = output_after(plain, done)
        assert tokens_of(rest) == expected_tokens
        assert text_of(rest) == expected_text
        assert whole.endswith(text_of(rest))
        assert rest[-1].finish_reason is plain[-1].finish_reason


def test_only_open_choices_are_resumed() -> None:
    """Of three choices, the two unfinished ones continue with their own indices."""
    one = request(max_tokens=12, n=3, ignore_eos=True)
    harness = WorkerHarness(num_blocks=128)
    whole = [tokens_of(harness.run(one)[one.request_id, choice]) for choice in range(3)]
    again = resumed(one, (2, whole[2][:5]), (0, whole[0][:1]))
    got = harness.run(again)
    assert set(got) == {(again.request_id, 0), (again.request_id, 2)}
    assert all(len(tokens_of(deltas)) in {7, 11} for deltas in got.values())
    assert all(deltas[-1].finish_reason is FinishReason.LENGTH for deltas in got.values())


def test_complete_choices_cannot_be_resumed() -> None:
    """A choice with all its tokens is rejected, because only its end was lost."""
    one = resumed(request(max_tokens=3), (0, [5, 6, 7]))
    with pytest.raises(RequestRejected, match="already has 3 tokens") as refused:
        WorkerHarness().worker.admission.check(one)
    assert refused.value.param == "max_tokens"
