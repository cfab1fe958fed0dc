"""Tests of `speculation.trace`, which describes each step of a response."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

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
                "1 of 2 draft tokens verified: survival 0.6 of slot 2 is above the price 0.29, "
                "but it was not verified; 0 accepted"
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
            (
                "1 of 1 draft tokens verified: survival 0.2 of slot 1 is below the price 0.3; "
                "1 accepted"
            ),
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
            backend.streams.deliver([(request.request_id, delta)])
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
