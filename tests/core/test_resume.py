"""Resuming a choice on another worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftgate.backends.errors import RequestRejected
from draftgate.backends.types import Delta, FinishReason, GenerationRequest, ResumedChoice
from tests.core.fakes import request, scripted
from tests.core.test_worker import WorkerHarness, encode, text_of, tokens_of


def resumed(generation: GenerationRequest, *choices: tuple[int, list[int]]) -> GenerationRequest:
    begun = tuple(ResumedChoice(choice, tuple(tokens)) for choice, tokens in choices)
    return replace(generation, request_id=f"{generation.request_id}-again", resumed=begun)


def output_after(deltas: list[Delta], tokens: int) -> tuple[str, list[int]]:
    """Return the text and tokens after the first `tokens` tokens, which must end a delta."""
    num_tokens = 0
    for index, delta in enumerate(deltas):
        if num_tokens == tokens:
            return text_of(deltas[index:]), tokens_of(deltas[index:])
        num_tokens += len(delta.token_ids)
    return "", []


@pytest.mark.parametrize("stop", [(), ("\n\n\n",), (" + 2",), ("é",)])
@pytest.mark.parametrize("drafts", [0, 3])
def test_resumed_choice_completes_the_undisturbed_text(stop, drafts) -> None:
    """For every cut, the texts of both runs add up to the text of a single run."""
    ids = encode("def f(x):  # café ☕☕\n    return x + 1\n\n\nclass C: pass")
    harness = WorkerHarness(scripted(*ids))
    plain = harness.run_one(request(max_tokens=len(ids), stop=stop))
    texts, total = text_of(plain), len(tokens_of(plain))
    for done in range(total):
        generation = request(max_tokens=len(ids), stop=stop, drafts=drafts)
        rest = harness.run_one(resumed(generation, (0, ids[:done])))
        expected_text, expected_tokens = output_after(plain, done)
        assert tokens_of(rest) == expected_tokens
        assert text_of(rest) == expected_text
        assert texts.endswith(text_of(rest))
        assert rest[-1].finish_reason is plain[-1].finish_reason


@pytest.mark.parametrize("right", range(7))
@pytest.mark.parametrize("stop", [(), (" + 2",), ("n x",)])
def test_tokens_of_another_worker_are_verified_in_the_first_step(stop, right) -> None:
    """A worker accepts the right tokens that it got from another worker in its first step, and
    continues with the text of a single run. They are not counted as speculation."""
    ids = encode("def f(x):  # café ☕☕\n    return x + 1\n\n\nclass C: pass")
    harness = WorkerHarness(scripted(*ids))
    generation = request(max_tokens=len(ids), stop=stop)
    plain, done = harness.run_one(generation), 4
    handed = (*ids[done : done + right], *[ids[0]] * 3)  # the last ones are wrong
    rest = resumed(generation, (0, ids[:done]))
    rest = replace(rest, resumed=(replace(rest.resumed[0], next_ids=handed),))
    deltas = harness.run_one(rest)
    expected_text, expected_tokens = output_after(plain, done)
    assert tokens_of(deltas) == expected_tokens
    assert text_of(deltas) == expected_text
    assert len(deltas[0].token_ids) == right + 1
    assert deltas[-1].outcome is not None
    assert deltas[-1].outcome.num_drafted_tokens == 0


def test_all_tokens_of_another_worker_but_the_last_may_be_known() -> None:
    """A worker that gets the whole rest of an output ends it in its first step."""
    ids = encode("def f(x): return x")
    harness = WorkerHarness(scripted(*ids))
    choice = ResumedChoice(0, tuple(ids[:2]), tuple(ids[2:]))
    (delta,) = harness.run_one(replace(request(max_tokens=len(ids)), resumed=(choice,)))
    assert list(delta.token_ids) == ids[2:]
    assert delta.finish_reason is FinishReason.LENGTH


def test_only_open_choices_are_resumed() -> None:
    """The two unfinished of three choices continue with their own indices."""
    generation = request(max_tokens=12, n=3, ignore_eos=True)
    harness = WorkerHarness(num_blocks=128)
    texts = [
        tokens_of(harness.run(generation)[generation.request_id, choice]) for choice in range(3)
    ]
    again = resumed(generation, (2, texts[2][:5]), (0, texts[0][:1]))
    deltas_of = harness.run(again)
    assert set(deltas_of) == {(again.request_id, 0), (again.request_id, 2)}
    assert all(len(tokens_of(deltas)) in {7, 11} for deltas in deltas_of.values())
    assert all(deltas[-1].finish_reason is FinishReason.LENGTH for deltas in deltas_of.values())


def test_complete_choices_cannot_be_resumed() -> None:
    """The worker rejects a choice with all its tokens, because only its end was lost."""
    generation = resumed(request(max_tokens=3), (0, [5, 6, 7]))
    with pytest.raises(RequestRejected, match="already has 3 tokens") as refused:
        WorkerHarness().worker.admission.check(generation)
    assert refused.value.param == "max_tokens"
