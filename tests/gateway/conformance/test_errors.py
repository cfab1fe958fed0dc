"""OpenAI's client against a node: Errors: the client's exceptions, with OpenAI's fields."""

from __future__ import annotations

import openai
import pytest
from openai import AsyncOpenAI

from tests.gateway.conformance.asks import CHAT
from tests.gateway.harness import ScriptedBackend, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_errors_become_the_clients_exceptions(api: AsyncOpenAI, model: str) -> None:
    """Status and body are such that the client raises the right class with the parameter."""
    with pytest.raises(openai.NotFoundError) as missing:
        await api.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await api.completions.create(model=model, prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await api.completions.create(model=model, prompt="x", max_tokens=10**6)
    assert long.value.code == "context_length_exceeded"


CASES = [
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"n": 99}, "n", "invalid_value"),
    ({"seed": -1}, "seed", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format.type", "invalid_value"),
    ({"max_tokens": 10**6}, "max_tokens", "context_length_exceeded"),
    ({"extra_body": {"stop_token_ids": [1]}}, "stop_token_ids", "unsupported_parameter"),
    ({"extra_body": {"speculation": {"mode": "x"}}}, "speculation.mode", "invalid_value"),
    ({"extra_headers": {"x-slo-ttft-ms": "soon"}}, "x-slo-ttft-ms", "invalid_value"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options",
     "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
async def test_a_bad_request_names_its_parameter(
    api: AsyncOpenAI, model: str, stream: bool, chat: bool
) -> None:
    """Status, type, code and parameter are there before a stream begins, on both endpoints."""
    for fields, param, code in CASES:
        ask = {"model": model, "stream": stream, **fields}
        create = api.chat.completions.create if chat else api.completions.create
        ask |= {"messages": CHAT} if chat else {"prompt": "x"}
        with pytest.raises(openai.BadRequestError) as bad:
            await create(**ask)
        error = bad.value
        assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
        assert error.request_id
        assert error.message


async def test_tools_that_the_model_does_not_know_are_an_error(
    api: AsyncOpenAI, model: str
) -> None:
    """The shipped model's template has no tools: they are refused, not ignored."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError) as bad:
        await api.chat.completions.create(model=model, messages=CHAT, tools=[tool])
    assert (bad.value.param, bad.value.code) == ("tools", "unsupported_parameter")


async def test_the_request_id_is_the_clients(api: AsyncOpenAI, model: str) -> None:
    """The client shows the id of an answer, and sends its own if it has one."""
    plain = await api.completions.create(model=model, prompt="x", max_tokens=1)
    assert plain._request_id
    named = await api.completions.create(
        model=model, prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert named._request_id == "mine"


async def test_a_node_that_loads_is_unavailable(api: AsyncOpenAI) -> None:
    """While the model loads, the client raises its 5xx, told when to come again."""
    backend = ScriptedBackend()
    backend.gate.clear()
    async with (
        running(backends=[backend], start=False) as where,
        AsyncOpenAI(base_url=f"{where.url}/v1", api_key="none", max_retries=0) as early,
    ):
        with pytest.raises(openai.InternalServerError) as unavailable:
            await early.completions.create(model="scripted", prompt="x")
    assert (unavailable.value.status_code, unavailable.value.code) == (503, "model_loading")
    assert int(unavailable.value.response.headers["retry-after"]) > 0


async def test_a_body_that_is_too_large_is_an_error_of_its_own(api: AsyncOpenAI) -> None:
    """413 raises what the client has for statuses without a class."""
    async with (
        running(max_body_bytes=2000) as where,
        AsyncOpenAI(base_url=f"{where.url}/v1", api_key="none", max_retries=0) as small,
    ):
        with pytest.raises(openai.APIStatusError) as large:
            await small.completions.create(model="draftgate-demo", prompt="x" * 3000)
    assert (large.value.status_code, large.value.code) == (413, "body_too_large")
