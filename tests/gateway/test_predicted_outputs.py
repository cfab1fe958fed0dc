"""Tests of `prediction` over HTTP on the engine."""

from __future__ import annotations

from tests.gateway.harness import client, events, needs_engine, running

CHAT = "/v1/chat/completions"

pytestmark = needs_engine


async def test_prediction_is_drafted_and_counted() -> None:
    """The drafts of a right prediction are accepted, whole and streamed, and traced steps name
    their proposer."""
    body = {
        "messages": [{"role": "user", "content": "def add(a, b):"}],
        "max_tokens": 32,
        "temperature": 0.8,
        "seed": 3,
    }
    settings = {"backend": "engine", "kv_bytes": 32 << 20, "threads": 1, "speculation": "fixed:4"}
    async with running(**settings) as listening, client(listening) as http:
        plain = (await http.post(CHAT, json=body)).json()
        text = plain["choices"][0]["message"]["content"]
        body |= {"prediction": {"type": "content", "content": text}, "speculation": {"trace": True}}
        whole = (await http.post(CHAT, json=body)).json()
        streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
        streamed = events((await http.post(CHAT, json=streaming)).text)
        off = {**body, "speculation": {"mode": "off"}}
        without_drafts = (await http.post(CHAT, json=off)).json()
    texts = [one["choices"][0]["message"]["content"] for one in (whole, without_drafts)]
    assert texts == [text, text]
    assert "completion_tokens_details" not in plain["usage"]
    steps = whole["choices"][0]["steps"]
    accepted = sum(step["accepted"] for step in steps if step["proposer"] == "prediction")
    details = whole["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == accepted > 0
    assert streamed[-2]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    none = {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
        "reasoning_tokens": 0,
    }
    assert without_drafts["usage"]["completion_tokens_details"] == none
