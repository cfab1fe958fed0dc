"""Tests of the numbers of draft tokens in responses, metrics and decisions."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from draftgate.backends.types import Delta, FinishReason, SpeculationOutcome
from tests.gateway.harness import (
    ScriptedBackend,
    client,
    events,
    needs_engine,
    post_raw,
    running,
    until,
)

CHAT = "/v1/chat/completions"

ENGINE = {
    "backend": "engine",
    "kv_bytes": 32 << 20,
    "threads": 1,
    "speculation": "fixed:6",
    "sparse_budget_tokens": 32,
}

BODY = {
    "messages": [{"role": "user", "content": "def add(a, b):"}],
    "max_tokens": 24,
    "temperature": 0.8,
    "seed": 3,
}


def check_response(body: dict[str, Any]) -> int:
    """Check the numbers of a traced response, and return its number of accepted tokens."""
    usage, decoding = body["usage"], body["metrics"]["speculative_decoding"]
    steps = [step for choice in body["choices"] for step in choice["steps"]]
    accepted = sum(step["accepted"] for step in steps)
    assert accepted + len(steps) == usage["completion_tokens"]
    assert sum(len(step["tokens"]) for step in steps) == usage["completion_tokens"]
    drafted = [step for step in steps if step["drafts"]]
    assert decoding["num_accepted_tokens"] == accepted
    assert decoding["num_spec_steps"] == len(drafted)
    assert decoding["num_drafted_tokens"] == sum(len(step["drafts"]) for step in drafted)
    histogram = decoding["acceptance_histogram"]
    assert histogram == [
        sum(step["accepted"] == count for step in drafted) for count in range(len(histogram))
    ]
    assert decoding["num_draft_tokens"] == decoding["num_drafted_tokens"]
    assert decoding["num_accepted_draft_tokens"] == accepted
    rate, length = decoding["draft_acceptance_rate"], decoding["mean_acceptance_length"]
    assert rate * decoding["num_draft_tokens"] == pytest.approx(accepted)
    assert (length - 1) * decoding["num_spec_steps"] == pytest.approx(accepted)
    predicted = [step for step in drafted if step["proposer"] == "prediction"]
    details = usage.get("completion_tokens_details", {"accepted_prediction_tokens": 0})
    assert details["accepted_prediction_tokens"] == sum(step["accepted"] for step in predicted)
    return accepted


async def tokens_of(http: httpx.AsyncClient, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    ids: list[int] = (await http.post("/tokenize", json=body)).json()["tokens"]
    return ids


async def counters(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the counters of drafts on the page of metrics."""
    text = (await http.get("/metrics")).text
    names = ("spec_steps", "drafted_tokens", "accepted_tokens")
    return {
        name: sum(
            float(value)
            for value in re.findall(rf"(?m)^draftgate_{name}_total(?:{{.*}})? (\S+)$", text)
        )
        for name in names
    }


async def decided(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the sums of all decisions, with the names of `counters`."""
    found = (await http.get("/decisions", params={"limit": 1000})).json()["decisions"]
    outcomes = [one["outcome"] for one in found if one["outcome"] is not None]
    names = ("spec_steps", "drafted_tokens", "accepted_tokens")
    return {name: sum(one[name] for one in outcomes) for name in names}


@needs_engine
async def test_accepted_tokens_and_steps_are_the_completion_tokens() -> None:
    """With the shipped model, each step adds its accepted draft tokens and one more token.

    The test combines each ending with each proposer, and with several choices. Usage, metrics,
    steps, counters and decisions agree.
    """
    total = 0
    async with running(**ENGINE) as listening, client(listening) as http:
        plain = (await http.post(CHAT, json=BODY)).json()
        text = plain["choices"][0]["message"]["content"]
        ids = await tokens_of(http, text)
        endings: list[dict[str, Any]] = [{}, {"max_tokens": 9}]
        endings += [{"stop": [text[place : place + 2]]} for place in range(8, 30, 3)]
        endings += [{"stop_token_ids": [ids[place]]} for place in (3, 6)]
        endings += [{"structured_outputs": {"regex": "return [a-z]{4} \\+ [a-z]{2,9}"}}]
        endings += [{"stop": ["rn "], "n": 3}, {"stop_token_ids": [ids[5]], "n": 3}]
        modes: list[dict[str, Any]] = [
            {"speculation": {"mode": mode, "trace": True}}
            for mode in ("ngram", "draft_model", "sparse_self", "off")
        ]
        modes.append(
            {
                "speculation": {"trace": True},
                "prediction": {"type": "content", "content": text},
            }
        )
        bodies = [{**BODY, **mode, **ending} for mode in modes for ending in endings]
        replies = await asyncio.gather(*(http.post(CHAT, json=body) for body in bodies))
        for body, reply in zip(bodies, replies, strict=True):
            assert reply.status_code == 200, reply.text
            accepted = check_response(reply.json())
            assert not accepted or body["speculation"].get("mode") != "off" or "regex" in str(body)
            total += accepted
        found = await counters(http)
        assert (
            found["accepted_tokens"] - total
            == (plain["metrics"]["speculative_decoding"]["num_accepted_tokens"])
        )
        assert found == await decided(http)


@needs_engine
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_predicted_tokens_after_a_stop_string_are_not_accepted(stream: bool, n: int) -> None:
    """A response that stops inside its own prediction accepts no token after the stop."""
    settings = {**ENGINE, "speculation": "auto"}
    async with running(**settings) as listening, client(listening) as http:
        # Without earlier outputs, the prediction is the only source of these tokens.
        body = {**BODY, "temperature": 0, "n": n, "speculation": {"corpus": False}}
        text = (await http.post(CHAT, json=body)).json()["choices"][0]["message"]["content"]
        body |= {
            "prediction": {"type": "content", "content": text},
            "stop": [text[8:12]],
            "stream": stream,
            "stream_options": {"include_usage": True} if stream else None,
        }
        reply = await http.post(CHAT, json=body)
        last = events(reply.text)[-2] if stream else reply.json()
    tokens = last["usage"]["completion_tokens"]
    accepted = last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert tokens < n * 8
    assert 0 < accepted < tokens
    decoding = last["metrics"]["speculative_decoding"]
    assert decoding["num_accepted_tokens"] == accepted


async def test_response_without_drafts_has_the_names_of_vllm() -> None:
    """Without drafts, the mean length is 1 and the rate is 0, as in vLLM."""
    body = {"prompt": "x", "speculation": {"mode": "off"}, "max_tokens": 4}
    async with running() as listening, client(listening) as http:
        reply = (await http.post("/v1/completions", json=body)).json()
    decoding = reply["metrics"]["speculative_decoding"]
    assert decoding["mean_acceptance_length"] == 1.0
    assert decoding["draft_acceptance_rate"] == 0.0
    assert decoding["num_draft_tokens"] == decoding["num_accepted_draft_tokens"] == 0


async def test_drafts_of_a_cancelled_request_are_counted() -> None:
    """Metrics and decisions count the drafts of the output before a client disconnected."""
    backend = ScriptedBackend()
    async with running(backends=[backend]) as gateway, client(gateway) as http:
        body = {"prompt": "x", "n": 2, "stream": True}
        reader, writer = await post_raw(gateway, "/v1/completions", body)
        request = await backend.submitted.get()
        outcome = SpeculationOutcome(1, 4, 1, (0, 1))
        ended = Delta(0, (1, 2), "end", (), FinishReason.STOP, outcome, drafts=((4, 1),))
        for delta in (
            Delta(0, (1, 2, 3), "a", drafts=((4, 2),)),
            Delta(1, (1,), "b", drafts=((5, 0),)),
            Delta(1, (4, 5, 6, 7), "c", drafts=((3, 3),)),
            ended._replace(outcome=outcome + SpeculationOutcome(1, 4, 2, (0, 0, 1))),
        ):
            backend.sinks.deliver([(request.request_id, delta)])
            await reader.readuntil(f'"text":"{delta.text}"'.encode())
        writer.close()
        await backend.abandoned.get()
        await until(lambda: gateway.node.in_flight == 0)
        expected = {"spec_steps": 4, "drafted_tokens": 16, "accepted_tokens": 6}
        assert await counters(http) == expected
        assert await decided(http) == expected
