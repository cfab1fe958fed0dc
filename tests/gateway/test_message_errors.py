"""Tests of the errors and keys of `/v1/messages`, with Anthropic's client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from draftgate.gateway.app import Listening
from tests.gateway.clients import anthropic_client
from tests.gateway.harness import ScriptedBackend, client, running
from tests.gateway.tool_models import ANTHROPIC_TOOLS

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

PATH = "/v1/messages"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def node(qwen_node: Listening) -> Listening:
    """A node whose model has Qwen's template."""
    return qwen_node


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages: must be given"),
    ({"messages": []}, "messages: must be given"),
    ({"max_tokens": None}, "max_tokens: must be given"),
    ({"max_tokens": -2}, "max_tokens: must be at least -1"),
    ({"max_tokens": 10**9}, "not 1000"),
    ({"messages": [{"role": "king", "content": "x"}]},
     "messages[0].role: expected one of user, assistant, system, not 'king'"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]},
     "messages[0].content[0].type: expected one of text, thinking, tool_result"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]},
     "messages[0].content[0].text: is required"),
    ({"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]}]}]},
     "messages[0].content[0].content[0].type: expected one of text, not 'image'"),
    ({"messages": [*HI, {"role": "assistant", "content": [
        {"type": "tool_use", "id": "c", "name": "f", "input": {}}]}]},
     "messages[1].content: must not be part of a message to continue"),
    ({"stop_sequences": ["x" * 16385]}, "stop_sequences: must have at most 16384 characters"),
    ({"temperature": -1}, "temperature: must be"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name: must be"),
    ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]},
     "tools[0].input_schema: must be the schema of an object"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
     "tools[0].type: expected one of custom"),
    ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name: must be"),
    ({"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "other"}},
     "tool_choice.name: 'other' is not one of the tools"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: requires tools"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}},
     "thinking by this model's chat template is not supported"),
    ({"mcp_servers": [{"type": "url", "name": "x", "url": "http://x"}]},
     "mcp_servers is not supported"),
    ({"output_config": {"format": {"type": "json_schema", "schema": [1]}}},
     "output_config.format.schema"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_malformed_field_is_400_in_anthropics_form(
    http: httpx.AsyncClient, stream: bool
) -> None:
    """The server rejects malformed fields with an error in Anthropic's form, which names them."""
    wrong = []
    for fields, expected in BAD:
        body = {"messages": HI, "max_tokens": 5, "stream": stream, **fields}
        response = await http.post(PATH, json=body)
        error = response.json()
        told = error.get("error", {}).get("message", "")
        form = (error.get("type"), error.get("error", {}).get("type"), set(error["error"]))
        if form != ("error", "invalid_request_error", {"type", "message"}) or expected not in told:
            wrong.append((expected, response.status_code, error))
        assert response.status_code == 400, (fields, error)
    assert not wrong, "\n".join(map(str, wrong))


async def test_errors_become_the_clients_exceptions(
    anthropic_api: AsyncAnthropic, node: Listening
) -> None:
    """Anthropic's client raises its own exceptions, also below `/v1/messages`. Other paths keep
    OpenAI's form."""
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        await anthropic_api.messages.create(model="other", max_tokens=5, messages=HI)
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="messages: must be given"):
        await anthropic_api.messages.count_tokens(model="scripted", messages=[])
    async with client(node) as http:
        batches = await http.post("/v1/messages/batches", json={})
        assert (batches.status_code, batches.json()["error"]["type"]) == (404, "not_found_error")
        wrong_method = await http.get(PATH)
        assert (wrong_method.status_code, wrong_method.json()["type"]) == (405, "error")
        assert "code" in (await http.get("/v1/messages_of_mine")).json()["error"]


async def test_worker_failure_is_an_error_event(
    qwen: ScriptedBackend, anthropic_api: AsyncAnthropic
) -> None:
    """A stream ends with an `error` event when the worker fails, and later requests get 503."""
    import anthropic

    opening = asyncio.create_task(
        anthropic_api.messages.create(model="scripted", max_tokens=5, messages=HI, stream=True)
    )
    qwen.emit(await qwen.submitted.get(), "half")
    stream = aiter(await opening)
    while (await anext(stream)).type != "content_block_delta":
        pass
    qwen.crash("device lost")
    with pytest.raises(anthropic.APIStatusError, match="device lost") as failed:
        await anext(stream)
    assert failed.value.type == "overloaded_error"
    assert failed.value.body["request_id"] == failed.value.response.headers["request-id"]
    with pytest.raises(anthropic.InternalServerError) as refused:
        await anthropic_api.messages.create(model="scripted", max_tokens=5, messages=HI)
    assert refused.value.status_code == 503


async def test_both_forms_of_keys_are_accepted(scripted: ScriptedBackend, tmp_path: Path) -> None:
    """A node with keys accepts `x-api-key` and bearer tokens, and refuses others in Anthropic's
    form."""
    import anthropic

    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - {name: search, key: sk-search}\n")
    async with running(backends=[scripted], api_keys_file=str(keys)) as gateway:
        for credentials in ({"api_key": "sk-search"}, {"auth_token": "sk-search"}):
            api = anthropic.AsyncAnthropic(base_url=gateway.url, max_retries=0, **credentials)
            async with api:
                count = await api.messages.count_tokens(model="scripted", messages=HI)
                assert count.input_tokens > 0
                assert [model.id async for model in await api.models.list()] == ["scripted"]
        async with anthropic_client(gateway.url, "sk-no") as api:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await api.messages.create(model="scripted", max_tokens=5, messages=HI)
    assert refused.value.type == "authentication_error"
