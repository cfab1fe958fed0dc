"""Tests of `speculation.trace`, which describes each step of a response."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.types import Delta, FinishReason, SpeculationOutcome, StepTrace
from draftgate.gateway.http.replies.steps import describe_step
from tests.gateway.harness import ScriptedBackend, client, events, running

ENDPOINTS = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (StepTrace(1), "no draft tokens"),
        (StepTrace(1, None, 0, (), 0, (), 0.5), "no draft tokens at the price 0.5"),
        (
            StepTrace(3, "ngram", 5, (1, 2, 3), 2, (0.9, 0.6, 0.4, 0.21), 0.29),
            (
                "3 of 5 draft tokens verified: survival 0.21 of slot 4 is below the price 0.29; "
                "2 accepted"
            ),
        ),
        (
            StepTrace(3, "ngram", 5, (1, 2, 3), 2, (0.9, 0.6, 0.4), 0.29),
            "3 of 5 draft tokens verified at the price 0.29; 2 accepted",
        ),
        (
            StepTrace(1, "ngram", 2, (1,), 0, (0.9, 0.6), 0.29),
            (
                "1 of 2 draft tokens verified: slot 2 with survival 0.6 exceeds the limit of this "
                "step; 0 accepted"
            ),
        ),
        (
            StepTrace(1, "draft_model", 2, (), 0, (0.1,), 0.29),
            (
                "0 of 2 draft tokens verified: survival 0.1 of slot 1 is below the price 0.29; "
                "0 accepted"
            ),
        ),
        (
            StepTrace(3, "ngram", 2, (1, 2), 2, (0.9, 0.6), 0.3),
            (
                "2 of 2 draft tokens verified: survival 0.6 of slot 2 is above the price 0.3; "
                "2 accepted"
            ),
        ),
        (
            StepTrace(2, "ngram", 1, (1,), 1, (0.2,), 0.3),
            "1 of 1 draft tokens verified; 1 accepted",
        ),
        (
            StepTrace(3, "ngram", 3, (1, 2, 3), 2, (0.9, 0.6, 0.2), 0.45),
            (
                "3 of 3 draft tokens verified: together they are worth 1.7 tokens and cost 1.35; "
                "2 accepted"
            ),
        ),
        (
            StepTrace(2, "ngram", 1, (1,), 1, (0.2,), 0.0),
            "1 of 1 draft tokens verified: slots are free at present; 1 accepted",
        ),
        (
            StepTrace(4, "grammar", 3, (1, 2, 3), 3, (1.0, 1.0, 1.0), 0.3),
            "the grammar allows no other tokens: 3 forced, 3 accepted",
        ),
    ],
)
def test_step_description_states_the_deciding_survival_and_price(
    step: StepTrace, words: str
) -> None:
    """The description of a step states the verified and accepted tokens and the deciding
    survival."""
    assert describe_step(step) == words


SURVIVALS = st.lists(st.floats(0, 1), max_size=5).map(lambda each: sorted(each, reverse=True))


@given(SURVIVALS, st.integers(0, 5), st.integers(1, 5), st.floats(0, 8) | st.just(0.0))
def test_step_description_never_contradicts_its_figures(
    survivals: list[float], verified: int, offered: int, price: float
) -> None:
    """A description names a survival above the price only for verified slots, a survival below the
    price only for other slots, and a gain of all slots only if they gain."""
    verified = min(verified, offered)
    trace = StepTrace(1, "ngram", offered, (7,) * verified, 0, tuple(survivals), price)
    words = describe_step(trace)
    assert words.startswith(f"{verified} of {offered} draft tokens verified")
    compared = re.search(r"survival (\S+) of slot (\d+) is (below|above) the price (\S+);", words)
    if compared:
        survival, slot, side, mean = compared.groups()
        assert (float(survival) > float(mean)) == (side == "above")
        assert (int(slot) <= verified) == (side == "above")
    together = re.search(r"together they are worth (\S+) tokens and cost (\S+);", words)
    if together:
        assert verified == offered
        assert float(together[1]) >= float(together[2])


def steps_of(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return choice["steps"]


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("stream", [True, False])
async def test_traced_response_has_every_step(path: str, stream: bool) -> None:
    """A traced response contains every step with tokens and drafts as texts, even without text."""
    backend = ScriptedBackend()
    a, b, c = backend.tokenizer.encode("def f")[0], *backend.tokenizer.encode(" g(")[:2]
    text = [backend.tokenizer.token_text(token) for token in (a, b, c)]
    drafted = StepTrace(2, "ngram", 3, (a, c), 1, (0.9, 0.5), 0.25)
    body = {**ENDPOINTS[path], "stream": stream, "speculation": {"trace": True}}
    async with running(backends=[backend]) as gateway, client(gateway) as http:
        pending = asyncio.ensure_future(http.post(path, json=body))
        request = await backend.submitted.get()
        held_back = Delta(0, (a, b), "", steps=(drafted,))
        outcome = SpeculationOutcome()
        last = Delta(0, (c,), "".join(text), (), FinishReason.STOP, outcome, steps=(StepTrace(1),))
        for delta in (held_back, last):
            backend.sinks.deliver([(request.request_id, delta)])
        response = await pending
        responses = events(response.text)[:-1] if stream else [response.json()]
    assert request.traced
    steps = [step for body in responses for step in steps_of(body["choices"][0])]
    assert [step["tokens"] for step in steps] == [text[:2], text[2:]]
    assert steps[0] | {"tokens": []} == {
        "tokens": [],
        "proposer": "ngram",
        "offered": 3,
        "drafts": [text[0], text[2]],
        "accepted": 1,
        "survivals": [0.9, 0.5],
        "price": 0.25,
        "reason": describe_step(drafted),
    }


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_steps_are_absent_without_trace(path: str) -> None:
    """A response without tracing has no field `steps`."""
    backend = ScriptedBackend()
    body = {**ENDPOINTS[path], "stream": True, "speculation": {"trace": False}}
    async with running(backends=[backend]) as gateway, client(gateway) as http:
        pending = asyncio.ensure_future(http.post(path, json=body))
        request = await backend.submitted.get()
        backend.emit(request, "x", last=True)
        response = await pending
    assert not request.traced
    assert '"steps"' not in response.text
