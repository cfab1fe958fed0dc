"""Tests of errors with OpenAI's client: exceptions with OpenAI's fields."""

from __future__ import annotations

import openai
import pytest
from openai import AsyncOpenAI

from tests.gateway.clients import openai_client
from tests.gateway.conformance.asks import CHAT
from tests.gateway.harness import ScriptedBackend, running

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_client_raises_the_exception_of_each_error(api: AsyncOpenAI, model: str) -> None:
    """The client raises the exception class of each error with its code or parameter."""
    with pytest.raises(openai.NotFoundError) as missing:
        await api.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await api.completions.create(model=model, prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        await api.completions.create(model=model, prompt="x", max_tokens=10**6)
    assert long.value.code == "context_length_exceeded"
    assert "this model's maximum context length is" in long.value.message  # litellm's criterion


CASES = [
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 10**6}, "n", "invalid_value"),
    ({"seed": 1 << 64}, "seed", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"stop": ["a" * 17_000]}, "stop", "invalid_value"),
    ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format.type", "invalid_value"),
    ({"max_tokens": 10**6}, "max_tokens", "context_length_exceeded"),
    ({"extra_body": {"length_penalty": 2}}, "length_penalty", "unsupported_parameter"),
    ({"extra_body": {"speculation": {"mode": "x"}}}, "speculation.mode", "invalid_value"),
    ({"extra_headers": {"x-slo-ttft-ms": "soon"}}, "x-slo-ttft-ms", "invalid_value"),
    ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options",
     "invalid_value"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
async def test_bad_request_has_status_type_code_and_parameter(
    api: AsyncOpenAI, model: str, stream: bool, chat: bool
) -> None:
    """The server rejects a bad request with 400, a type, a code and a parameter before a stream."""
    for fields, param, code in CASES:
        request = {"model": model, "stream": stream, **fields}
        create = api.chat.completions.create if chat else api.completions.create
        request |= {"messages": CHAT} if chat else {"prompt": "x"}
        with pytest.raises(openai.BadRequestError) as bad:
            await create(**request)
        error = bad.value
        assert (error.param, error.code, error.type) == (param, code, "invalid_request_error")
        assert error.request_id
        assert error.message


async def test_choice_of_an_unknown_tool_is_rejected(api: AsyncOpenAI, model: str) -> None:
    """The server rejects a tool choice that names none of the tools."""
    choice = {"type": "function", "function": {"name": "g"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError) as bad:
        await api.chat.completions.create(
            model=model, messages=CHAT, tools=[tool], tool_choice=choice
        )
    assert (bad.value.param, bad.value.code) == ("tool_choice.function.name", "invalid_value")


async def test_request_id_of_the_client_is_returned(api: AsyncOpenAI, model: str) -> None:
    """The server returns the client's request id, or a generated id without one."""
    plain = await api.completions.create(model=model, prompt="x", max_tokens=1)
    assert plain._request_id
    named = await api.completions.create(
        model=model, prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine"}
    )
    assert named._request_id == "mine"


async def test_loading_node_responds_with_503_and_retry_after(api: AsyncOpenAI) -> None:
    """The client raises an internal server error with Retry-After while the node loads."""
    backend = ScriptedBackend()
    backend.gate.clear()
    async with (
        running(backends=[backend], start=False) as gateway,
        openai_client(gateway.url) as early,
    ):
        with pytest.raises(openai.InternalServerError) as unavailable:
            await early.completions.create(model="scripted", prompt="x")
    assert (unavailable.value.status_code, unavailable.value.code) == (503, "model_loading")
    assert int(unavailable.value.response.headers["retry-after"]) > 0


async def test_too_large_body_raises_the_clients_status_error(api: AsyncOpenAI) -> None:
    """The client raises a status error with code `body_too_large` for a large body."""
    async with (
        running(max_body_bytes=2000) as gateway,
        openai_client(gateway.url) as small,
    ):
        with pytest.raises(openai.APIStatusError) as large:
            await small.completions.create(model="draftgate-demo", prompt="x" * 3000)
    assert (large.value.status_code, large.value.code) == (413, "body_too_large")
