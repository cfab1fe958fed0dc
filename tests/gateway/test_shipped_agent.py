"""Tests of agents with the shipped model, whose template takes tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import jsonschema
import pytest
import pytest_asyncio

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer
from tests.gateway.harness import client, events, needs_engine, running
from tests.gateway.tool_models import TOOLS, WEATHER

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "weather = "}]
SCHEMA = {
    "type": "object",
    "properties": {"degrees": {"type": "integer", "minimum": 0, "maximum": 40}},
    "required": ["degrees"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA}}
TOKENIZER = Tokenizer(SHIPPED_MODEL)
ENGINE = pytest.param(
    {"backend": "engine", "kv_bytes": 32 << 20, "threads": 1},
    marks=needs_engine,
    id="engine",
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=[pytest.param({"backend": "sim"}, id="sim"), ENGINE]
)
async def http(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a node with the shipped model."""
    async with running(**request.param) as listening, client(listening) as http:
        yield http


async def chat(http: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """Return the choices of a response."""
    body = {"messages": HI, "max_tokens": 200, "tools": TOOLS, **fields}
    response = await http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


async def test_agent_calls_a_function_and_continues(http: httpx.AsyncClient) -> None:
    """An agent gets a call, sends its result back, and gets a response."""
    named = {"type": "function", "function": {"name": "weather"}}
    (choice,) = await chat(http, tool_choice=named)
    (call,) = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    jsonschema.validate(arguments, WEATHER["function"]["parameters"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees\nand rain"}
    history = [*HI, choice["message"], result]
    (choice,) = await chat(http, messages=history, tool_choice="none", max_tokens=8)
    assert choice["message"]["content"]
    tokens = (await http.post("/tokenize", json={"messages": history, "tools": TOOLS})).json()
    prompt = TOKENIZER.decode(tokens["tokens"])
    assert "# Result: 12 degrees\n# and rain\n" in prompt
    assert f'"arguments": {json.dumps(arguments)}}}\n</tool_call>' in prompt
    assert '# {"name": "weather", "description": "Returns the weather."' in prompt


async def test_response_is_a_call_or_has_the_format(http: httpx.AsyncClient) -> None:
    """With tools and a format, a response is a call or content of the format, also streamed."""
    kinds = set()
    for seed in range(6):
        fields = {"response_format": FORMAT, "n": 4, "seed": seed, "temperature": 1.5}
        choices = await chat(http, **fields)
        for choice in choices:
            calls = choice["message"].get("tool_calls", [])
            kinds.add(bool(calls))
            if choice["finish_reason"] == "tool_calls":
                assert choice["message"]["content"] is None
            elif choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        body = {"messages": HI, "max_tokens": 200, "tools": TOOLS, **fields, "stream": True}
        found = events((await http.post(CHAT, json=body)).text)
        for choice in choices:
            deltas = [
                one["choices"][0]["delta"]
                for one in found
                if one != "[DONE]" and one["choices"][0]["index"] == choice["index"]
            ]
            content = "".join(one.get("content", "") for one in deltas)
            assert content == (choice["message"]["content"] or "")
    assert kinds == {True, False}
