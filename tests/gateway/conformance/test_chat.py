"""Tests of `/v1/chat/completions` with OpenAI's client: streams, seeds and log probabilities."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from draftgate.gateway.app import Listening
from tests.gateway.conformance.asks import CHAT
from tests.gateway.harness import client, events

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_generated_seed_is_returned_and_fits_a_double(api: AsyncOpenAI, model: str) -> None:
    """The server returns the generated seed, and a request with this seed gives the same text."""
    request = {"model": model, "messages": CHAT, "max_tokens": 12}
    first = await api.chat.completions.create(**request)
    seed = first.model_extra["metrics"]["seed"]
    assert 0 <= seed < 1 << 53
    again = await api.chat.completions.create(**request, seed=seed)
    assert again.choices[0].message.content == first.choices[0].message.content


async def test_chat_stream_ends_with_usage_and_metrics(api: AsyncOpenAI, model: str) -> None:
    """The chunks of a stream add up to the whole response, and the last chunk has the usage."""
    request = {"model": model, "messages": CHAT, "max_tokens": 16, "seed": 5}
    whole = await api.chat.completions.create(**request)
    stream = await api.chat.completions.create(
        **request, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    *pieces, last = chunks
    assert pieces[0].choices[0].delta.role == "assistant"
    text = "".join(c.delta.content or "" for chunk in pieces for c in chunk.choices)
    assert text == whole.choices[0].message.content
    reasons = [c.finish_reason for chunk in pieces for c in chunk.choices if c.finish_reason]
    assert reasons == [whole.choices[0].finish_reason]
    assert last.choices == []
    assert last.usage == whole.usage
    assert [("metrics" in chunk.model_extra) for chunk in chunks] == [False] * len(pieces) + [True]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_metrics_are_in_the_last_chunk_without_usage(api: AsyncOpenAI, model: str) -> None:
    """The chunk with the finish reason contains the metrics if the client requests no usage."""
    stream = await api.chat.completions.create(
        model=model, messages=CHAT, max_tokens=6, n=2, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert [("metrics" in c.model_extra) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices[0].finish_reason is not None


async def test_chat_logprobs_have_one_entry_per_token(api: AsyncOpenAI, model: str) -> None:
    """The response has one entry of log probabilities per token with at most 3 alternatives."""
    response = await api.chat.completions.create(
        model=model, messages=CHAT, max_tokens=5, seed=1, logprobs=True, top_logprobs=3
    )
    entries = response.choices[0].logprobs.content
    assert len(entries) == response.usage.completion_tokens
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) <= 3
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)


async def test_chat_without_max_tokens_succeeds(api: AsyncOpenAI, model: str) -> None:
    """The server accepts a chat without `max_tokens`."""
    stream = await api.chat.completions.create(model=model, messages=CHAT, seed=1, stream=True)
    chunk = await anext(aiter(stream))
    assert chunk.choices[0].delta.content is not None
    await stream.close()


async def test_chat_responses_and_chunks_satisfy_the_clients_strict_types(
    api: AsyncOpenAI, model: str, gateway: Listening
) -> None:
    """Whole chats and chunks satisfy the client's types in every field."""
    body = {"model": model, "messages": CHAT, "max_tokens": 4, "n": 2, "logprobs": True,
            "top_logprobs": 2}  # fmt: skip
    async with client(gateway) as http:
        whole = await http.post("/v1/chat/completions", json=body)
        ChatCompletion.model_validate_json(whole.text)
        options = {"include_usage": True}
        stream = await http.post(
            "/v1/chat/completions", json={**body, "stream": True, "stream_options": options}
        )
    *chunks, done = events(stream.text)
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)


async def test_streamed_choices_equal_the_choices_of_the_whole_chat(
    api: AsyncOpenAI, model: str
) -> None:
    """Each streamed choice adds up to the same choice of the whole chat."""
    request = {"model": model, "messages": CHAT, "max_tokens": 10, "seed": 4, "n": 3,
           "logprobs": True, "top_logprobs": 1}  # fmt: skip
    whole = (await api.chat.completions.create(**request)).choices
    texts, tokens, reasons = ["", "", ""], [[], [], []], [None, None, None]
    async for chunk in await api.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += [e.token for e in choice.logprobs.content]
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole]
    assert tokens == [[e.token for e in choice.logprobs.content] for choice in whole]
    assert reasons == [choice.finish_reason for choice in whole]
    assert len(set(texts)) == 3


async def test_clients_accumulator_rebuilds_the_whole_response(
    api: AsyncOpenAI, model: str
) -> None:
    """The client's accumulator rebuilds the whole response from the chunks."""
    request = {"model": model, "messages": CHAT, "max_tokens": 40, "seed": 8,
           "extra_body": {"ignore_eos": True}}  # fmt: skip
    full = (await api.chat.completions.create(**request)).choices[0].message.content
    request["stop"] = full[12:15]  # the accumulator raises an error at the length limit
    whole = await api.chat.completions.create(**request)
    async with api.chat.completions.stream(**request) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason


async def test_stop_string_ends_a_chat_and_is_omitted(api: AsyncOpenAI, model: str) -> None:
    """The chat ends before a stop string."""
    request = {"model": model, "messages": CHAT, "max_tokens": 40, "seed": 2}
    full = (await api.chat.completions.create(**request)).choices[0].message.content
    stop = full[9:14]
    cut = (await api.chat.completions.create(**request, stop=stop)).choices[0]
    assert (cut.message.content, cut.finish_reason) == (full[: full.find(stop)], "stop")


async def test_equivalent_roles_and_content_parts_make_the_same_prompt(
    api: AsyncOpenAI, model: str
) -> None:
    """The role `developer` and content in parts give the same prompt as `system` and joined
    text."""
    request = {"model": model, "max_tokens": 1}
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    conversations = [
        [{"role": "system", "content": "x"}, {"role": "user", "content": "a b"}],
        [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}],
    ]
    usages = [
        (await api.chat.completions.create(**request, messages=m)).usage for m in conversations
    ]
    assert usages[0].prompt_tokens == usages[1].prompt_tokens


async def test_extensions_in_the_extra_body_take_effect(api: AsyncOpenAI, model: str) -> None:
    """The server applies fields and headers that OpenAI's API does not have."""
    extra = {"top_k": 1, "min_p": 0.0, "ignore_eos": True, "min_tokens": 6, "priority": -1,
             "speculation": {"mode": "ngram", "max_draft_tokens": 2}}  # fmt: skip
    response = await api.chat.completions.create(
        model=model, messages=CHAT, max_tokens=6, extra_body=extra,
        extra_headers={"x-slo-ttft-ms": "900", "x-slo-tpot-ms": "50"},
    )  # fmt: skip
    assert response.usage.completion_tokens == 6
    decided = response.model_extra["metrics"]["speculative_decoding"]
    assert (decided["mode"], decided["proposer"], decided["max_draft_tokens"]) == (
        "ngram", "ngram", 2,
    )  # fmt: skip
