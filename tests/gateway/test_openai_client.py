"""OpenAI's own client against a node: it must not notice that this is not OpenAI.

Every test runs against the simulator and against the engine with the shipped model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from backends.shipped import SHIPPED_MODEL
from gateway.app import Listening
from tests.gateway.harness import running

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = "def read_config(path):\n    with open("
CHAT = [{"role": "user", "content": "def add(a, b):"}]
ENGINE = pytest.param(
    "engine",
    marks=pytest.mark.skipif(
        importlib.util.find_spec("torch") is None
        or not (SHIPPED_MODEL / "model.safetensors").is_file(),
        reason="needs torch and the shipped model",
    ),
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["sim", ENGINE])
async def where(request: pytest.FixtureRequest) -> AsyncIterator[Listening]:
    """A node with either backend."""
    async with running(backend=request.param, kv_bytes=32 << 20, threads=1) as listening:
        yield listening


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(where: Listening) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client, pointed at the node."""
    async with AsyncOpenAI(base_url=f"{where.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def sampled(where: Listening) -> Listening:
    """The node, if its tokens are drawn from logits."""
    if where.node.config.backend == "sim":
        pytest.skip("the simulator has no logits")
    return where


@pytest.fixture
def model(where: Listening) -> str:
    """The name under which the model is served."""
    return where.node.served.name


async def test_models(api: AsyncOpenAI, model: str) -> None:
    """The model is listed, and can be looked up by its id."""
    listed = (await api.models.list()).data
    assert [entry.id for entry in listed] == [model]
    assert (await api.models.retrieve(model)).root == listed[0].root


async def test_a_completion_is_its_seed(api: AsyncOpenAI, model: str) -> None:
    """The same seed gives the same text, streamed or not, drafts or no drafts."""
    ask = {"model": model, "prompt": PROMPT, "max_tokens": 24, "seed": 11}
    whole = await api.completions.create(**ask)
    plain = await api.completions.create(**ask, extra_body={"speculation": {"mode": "off"}})
    stream = await api.completions.create(**ask, stream=True)
    text = "".join([c.text async for chunk in stream for c in chunk.choices])
    assert whole.choices[0].text == plain.choices[0].text == text
    assert whole.usage.completion_tokens <= 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    metrics = whole.model_extra["metrics"]
    assert metrics["seed"] == 11
    decoding = plain.model_extra["metrics"]["speculative_decoding"]
    assert (decoding["mode"], decoding["proposer"], decoding["num_drafted_tokens"]) == (
        "off", None, 0,
    )  # fmt: skip


async def test_without_a_seed_the_one_that_was_used_is_told(api: AsyncOpenAI, model: str) -> None:
    """Every answer can be repeated: the generated seed is in it, and a double can hold it."""
    ask = {"model": model, "messages": CHAT, "max_tokens": 12}
    first = await api.chat.completions.create(**ask)
    seed = first.model_extra["metrics"]["seed"]
    assert 0 <= seed < 1 << 53
    again = await api.chat.completions.create(**ask, seed=seed)
    assert again.choices[0].message.content == first.choices[0].message.content


async def test_choices_differ_and_each_is_its_own_replay(api: AsyncOpenAI, model: str) -> None:
    """The n choices of a request differ, and choice i is the same whatever n is."""
    ask = {"model": model, "prompt": PROMPT, "max_tokens": 24, "seed": 7, "temperature": 1.0}
    three = [c.text for c in (await api.completions.create(**ask, n=3)).choices]
    two = [c.text for c in (await api.completions.create(**ask, n=2)).choices]
    assert len(set(three)) == 3
    assert three[:2] == two


async def test_several_prompts_keep_their_order(api: AsyncOpenAI, model: str) -> None:
    """Choice c of prompt p has index p * n + c, and is what the prompt alone would give."""
    ask = {"model": model, "max_tokens": 8, "seed": 3, "n": 2}
    prompts = ["import os", "class A:", "x = 1"]
    both = await api.completions.create(**ask, prompt=prompts)
    assert [c.index for c in both.choices] == list(range(6))
    alone = [await api.completions.create(**ask, prompt=prompt) for prompt in prompts]
    assert [c.text for c in both.choices] == [c.text for one in alone for c in one.choices]
    stream = await api.completions.create(**ask, prompt=prompts, stream=True)
    texts = dict.fromkeys(range(6), "")
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [c.text for c in both.choices]


async def test_token_ids_are_a_prompt(api: AsyncOpenAI, model: str, where: Listening) -> None:
    """A prompt of token ids is the same as its text."""
    ids = where.node.served.tokenizer.encode(PROMPT)
    ask = {"model": model, "max_tokens": 8, "seed": 3}
    by_ids = await api.completions.create(**ask, prompt=ids)
    by_text = await api.completions.create(**ask, prompt=PROMPT)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.usage.prompt_tokens == len(ids)


async def test_a_chat_stream_ends_with_usage_and_metrics(api: AsyncOpenAI, model: str) -> None:
    """Chunks add up to the whole; finish reason, usage and metrics come once, usage last."""
    ask = {"model": model, "messages": CHAT, "max_tokens": 16, "seed": 5}
    whole = await api.chat.completions.create(**ask)
    stream = await api.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
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


async def test_without_usage_metrics_come_with_the_finish_reason(
    api: AsyncOpenAI, model: str
) -> None:
    """The last chunk of a stream has the metrics, also when no usage was asked for."""
    stream = await api.chat.completions.create(
        model=model, messages=CHAT, max_tokens=6, n=2, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert [("metrics" in c.model_extra) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices[0].finish_reason is not None


async def test_stop_strings_cut_across_tokens(api: AsyncOpenAI, model: str) -> None:
    """A stop text is found wherever it begins, and neither it nor what follows is ever sent."""
    ask = {"model": model, "prompt": PROMPT, "max_tokens": 40, "seed": 2}
    full = (await api.completions.create(**ask)).choices[0].text
    stop = full[9:14]
    expected = full[: full.find(stop)]
    cut = (await api.completions.create(**ask, stop=[stop, "never\x00"])).choices[0]
    assert (cut.text, cut.finish_reason) == (expected, "stop")
    stream = await api.completions.create(**ask, stop=stop, stream=True)
    assert "".join([c.text async for chunk in stream for c in chunk.choices]) == expected


async def test_chat_logprobs(api: AsyncOpenAI, model: str) -> None:
    """One entry per token, none above zero, as many alternatives as asked for at most."""
    answer = await api.chat.completions.create(
        model=model, messages=CHAT, max_tokens=5, seed=1, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) <= 3
        assert entry.bytes is None or bytes(entry.bytes).decode() == entry.token
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)


async def test_completion_logprobs(api: AsyncOpenAI, model: str) -> None:
    """Four lists of one length; offsets point at each token in the text; streamed alike."""
    ask = {"model": model, "prompt": PROMPT, "max_tokens": 6, "seed": 1, "logprobs": 2}
    answer = await api.completions.create(**ask)
    found = answer.choices[0].logprobs
    assert len(found.tokens) == answer.usage.completion_tokens
    assert len(found.token_logprobs) == len(found.top_logprobs) == len(found.tokens)
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    assert all(token in top for token, top in zip(found.tokens, found.top_logprobs, strict=True))
    stream = await api.completions.create(**ask, stream=True)
    chunks = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices]
    assert [t for part in chunks for t in part.tokens] == found.tokens
    assert [o for part in chunks for o in part.text_offset] == found.text_offset


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
async def test_a_bias_forces_a_token_and_bans_another(
    api: AsyncOpenAI, model: str, sampled: Listening, chat: bool
) -> None:
    """With +100 nothing else is said, with -100 the token never is; greedy or not."""

    async def tokens(**fields: object) -> list[str]:
        if chat:
            ask = {"model": model, "messages": CHAT, "max_tokens": 6, "logprobs": True, **fields}
            answer = await api.chat.completions.create(**ask)
            return [entry.token for entry in answer.choices[0].logprobs.content]
        ask = {"model": model, "prompt": PROMPT, "max_tokens": 6, "logprobs": 0, **fields}
        return (await api.completions.create(**ask)).choices[0].logprobs.tokens

    tokenizer = sampled.node.served.tokenizer
    for fields in ({"temperature": 0}, {"seed": 3, "temperature": 1.5, "top_p": 0.9}):
        (forced,) = tokenizer.encode("yield", add_special_tokens=False)
        assert await tokens(**fields, logit_bias={str(forced): 100}) == ["yield"] * 6
        plain = await tokens(**fields)
        (banned,) = tokenizer.encode(plain[0], add_special_tokens=False)
        assert plain[0] not in await tokens(**fields, logit_bias={str(banned): -100})


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"repetition_penalty": 1.8}],
    ids=lambda penalty: next(iter(penalty)),
)
async def test_penalties_change_the_greedy_text(
    api: AsyncOpenAI, model: str, sampled: Listening, penalty: dict[str, float]
) -> None:
    """A text that repeats itself stops doing so, in the same way with drafts and without."""
    ask = {"model": model, "prompt": "x = 1\n" * 8, "max_tokens": 40, "temperature": 0}
    plain = (await api.completions.create(**ask)).choices[0].text
    ways = [
        await api.completions.create(**ask, extra_body={**penalty, **more})
        for more in ({}, {"speculation": {"mode": "off"}})
    ]
    assert ways[0].choices[0].text == ways[1].choices[0].text != plain
    assert ways[1].model_extra["metrics"]["speculative_decoding"]["num_drafted_tokens"] == 0


async def test_min_tokens_put_the_end_off(api: AsyncOpenAI, model: str) -> None:
    """A stop text counts only behind that many tokens."""
    ask = {"model": model, "prompt": PROMPT, "max_tokens": 40, "seed": 2}
    stop = (await api.completions.create(**ask)).choices[0].text[:3]
    early = await api.completions.create(**ask, stop=stop)
    late = await api.completions.create(**ask, stop=stop, extra_body={"min_tokens": 30})
    assert early.usage.completion_tokens < 30 <= late.usage.completion_tokens


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_usage_tells_what_was_cached(api: AsyncOpenAI, model: str, stream: bool) -> None:
    """A prompt seen before is not computed again, and usage says how much of it was there."""
    prompt = f"# seen before, {'streamed' if stream else 'whole'}\n" + "value = value + 1\n" * 20
    cached = []
    for _ in range(2):
        ask = {"model": model, "prompt": prompt, "max_tokens": 2, "n": 2}
        if stream:
            options = {"include_usage": True}
            chunks = await api.completions.create(**ask, stream=True, stream_options=options)
            usage = [chunk.usage async for chunk in chunks][-1]
        else:
            usage = (await api.completions.create(**ask)).usage
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        cached.append(usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert 0 < cached[1] < usage.prompt_tokens


async def test_chat_without_max_tokens_never_fails(api: AsyncOpenAI, model: str) -> None:
    """The default is what is left of the context; a stop ends it early here."""
    stream = await api.chat.completions.create(model=model, messages=CHAT, seed=1, stream=True)
    chunk = await anext(aiter(stream))
    assert chunk.choices[0].delta.content is not None
    await stream.close()


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
