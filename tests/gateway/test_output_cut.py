"""Outputs that their grammar ends early, and schemas of many types, over HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.engine.pydantic_types import pydantic_types
from tests.gateway.harness import client, events, needs_engine, running

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    needs_engine,
]

HI = [{"role": "user", "content": "Write JSON."}]
ENDLESS = {"type": "array", "items": {"type": "null"}, "minItems": 100_000}
"""The parser of this schema reaches a limit after the first token."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a node with the engine."""
    settings = {"backend": "engine", "kv_bytes": 32 << 20, "threads": 1}
    async with running(**settings) as listening, client(listening) as http:
        yield http


def formatted(schema: Any, **options: Any) -> dict[str, Any]:
    """Return a chat whose response has a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema, **options}}
    return {"messages": HI, "response_format": form, "max_tokens": 60}


def forced(schema: Any) -> dict[str, Any]:
    """Return a chat that must call a function whose argument `a` has a schema."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], **definitions}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    return {"messages": HI, "tools": [tool], "tool_choice": "required", "max_tokens": 60}


async def test_early_end_of_a_grammar_is_an_error(http: httpx.AsyncClient) -> None:
    """A whole response gets status 500 and a code, in all APIs, and never the reason `length`."""
    chat = formatted(ENDLESS)
    requests = {
        "/v1/chat/completions": chat,
        "/v1/completions": {"prompt": "x", "max_tokens": 60, "guided_json": ENDLESS},
        "/v1/responses": {"input": "x", "max_output_tokens": 60, "text": {"format": {
            "type": "json_schema", "name": "f", "schema": ENDLESS}}},
    }  # fmt: skip
    for path, body in requests.items():
        response = await http.post(path, json=body)
        assert response.status_code == 500, (path, response.text)
        error = response.json()["error"]
        assert error["code"] == "output_cut"
        assert "format allows no text after" in error["message"]


async def test_early_end_of_a_grammar_ends_a_stream_with_an_error_event(
    http: httpx.AsyncClient,
) -> None:
    """A stream sends what was generated and then the error, without a finish reason."""
    text = (
        await http.post("/v1/chat/completions", json={**formatted(ENDLESS), "stream": True})
    ).text
    assert "output_cut" in text
    chunks = [event for event in events(text) if isinstance(event, dict)]
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk.get("choices", ())]
    assert set(reasons) <= {None}
    assert any("error" in chunk for chunk in chunks)


async def test_worker_serves_on_after_an_early_end(http: httpx.AsyncClient) -> None:
    """The error blames no worker, so the next request gets its response at once."""
    await http.post("/v1/chat/completions", json=formatted(ENDLESS))
    response = await http.post("/v1/chat/completions", json=formatted({"const": "ok"}))
    assert response.json()["choices"][0]["message"]["content"] == '"ok"'


async def test_every_type_of_pydantic_is_accepted(http: httpx.AsyncClient) -> None:
    """The schema of every type works as response format, as forced tool and in vLLM's field."""
    wrong = []
    for name, adapter in pydantic_types().items():
        schema = adapter.json_schema()
        guided = {"messages": HI, "structured_outputs": {"json": schema}}
        for body in (formatted(schema), formatted(schema, strict=False), forced(schema), guided):
            response = await http.post("/v1/chat/completions", json={**body, "max_tokens": 2})
            if response.status_code != 200:
                wrong.append((name, response.text))
    assert wrong == []


async def test_refusal_of_a_tool_names_the_function_and_the_place(http: httpx.AsyncClient) -> None:
    """The error of a tool's schema shows the function and a JSON pointer, and no grammar."""
    response = await http.post("/v1/chat/completions", json=forced({"contains": {}}))
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert '"f"' in message
    assert "contains is not supported (at #/properties/a)" in message
    assert json.dumps({"contains": {}}) not in message
