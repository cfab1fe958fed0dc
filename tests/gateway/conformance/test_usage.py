"""Tests of `usage` with OpenAI's client, whole and streamed."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI

from draftgate.gateway.app import Listening
from tests.gateway.conformance.asks import CHAT, PROMPT

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_usage_reports_cached_prompt_tokens(
    api: AsyncOpenAI, model: str, stream: bool
) -> None:
    """The usage of a repeated prompt reports its cached tokens."""
    prompt = f"# seen before, {'streamed' if stream else 'whole'}\n" + "value = value + 1\n" * 20
    cached = []
    for _ in range(2):
        request = {"model": model, "prompt": prompt, "max_tokens": 2, "n": 2}
        if stream:
            options = {"include_usage": True}
            chunks = await api.completions.create(**request, stream=True, stream_options=options)
            usage = [chunk.usage async for chunk in chunks][-1]
        else:
            usage = (await api.completions.create(**request)).usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert 0 < cached[1] < usage.prompt_tokens


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
async def test_continuous_usage_grows_to_the_total(
    api: AsyncOpenAI, model: str, chat: bool
) -> None:
    """Each chunk has the usage so far if the client requests `continuous_usage_stats`."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = {"model": model, "max_tokens": 12, "seed": 1, "n": 2}
    if chat:
        request |= {"messages": CHAT}
        whole = (await api.chat.completions.create(**request)).usage
        stream = await api.chat.completions.create(**request, stream=True, stream_options=options)
    else:
        request |= {"prompt": PROMPT}
        whole = (await api.completions.create(**request)).usage
        stream = await api.completions.create(**request, stream=True, stream_options=options)
    usages = [chunk.usage async for chunk in stream]
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] > 0
    assert counts[-1] == counts[-2] == whole.completion_tokens
    assert {usage.prompt_tokens for usage in usages} == {whole.prompt_tokens}


async def test_chunks_have_no_usage_by_default(api: AsyncOpenAI, model: str) -> None:
    """The chunks of a stream have no usage by default."""
    stream = await api.completions.create(model=model, prompt="x", max_tokens=3, stream=True)
    assert [chunk.usage async for chunk in stream if chunk.usage is not None] == []


@pytest.mark.parametrize("parts", [False, True], ids=["text", "parts"])
async def test_usage_reports_prediction_tokens(
    api: AsyncOpenAI, model: str, gateway: Listening, parts: bool
) -> None:
    """Whole and streamed usage report accepted and rejected tokens of the prediction, and the text
    is that of a request without a prediction."""
    body = {"model": model, "messages": CHAT, "max_tokens": 40, "seed": 3, "temperature": 0}
    plain = await api.chat.completions.create(**body)
    text = plain.choices[0].message.content
    content = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    body |= {"prediction": {"type": "content", "content": content if parts else text}}
    whole = await api.chat.completions.create(**body)
    options = {"include_usage": True}
    stream = await api.chat.completions.create(**body, stream=True, stream_options=options)
    streamed = [chunk async for chunk in stream]
    pieces = [choice.delta.content or "" for chunk in streamed for choice in chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content == text
    assert plain.usage.completion_tokens_details is None
    for usage in (whole.usage, streamed[-1].usage):
        details = usage.completion_tokens_details
        assert details.rejected_prediction_tokens >= 0
        assert 0 <= details.accepted_prediction_tokens <= usage.completion_tokens
        if gateway.node.config.backend != "engine":  # simulated drafts do not depend on texts
            assert details.accepted_prediction_tokens == 0
