"""Tests of `/v1/completions` with OpenAI's client."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI
from openai.types import Completion

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer
from draftgate.gateway.app import Listening
from tests.gateway.conformance.asks import PROMPT
from tests.gateway.harness import client, events

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_same_seed_gives_the_same_text(api: AsyncOpenAI, model: str) -> None:
    """The same seed gives the same text with and without streaming and drafts."""
    request = {"model": model, "prompt": PROMPT, "max_tokens": 24, "seed": 11}
    whole = await api.completions.create(**request)
    plain = await api.completions.create(**request, extra_body={"speculation": {"mode": "off"}})
    stream = await api.completions.create(**request, stream=True)
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


async def test_choice_i_is_the_same_whatever_n_is(api: AsyncOpenAI, model: str) -> None:
    """The first choices are the same for any `n`, and the choices differ from each other."""
    request = {"model": model, "prompt": PROMPT, "max_tokens": 24, "seed": 7, "temperature": 1.0}
    three = [c.text for c in (await api.completions.create(**request, n=3)).choices]
    two = [c.text for c in (await api.completions.create(**request, n=2)).choices]
    assert len(set(three)) == 3
    assert three[:2] == two


async def test_choices_of_several_prompts_are_numbered_by_prompt(
    api: AsyncOpenAI, model: str
) -> None:
    """Choice c of prompt p has the index p * n + c and the same text as a single prompt."""
    request = {"model": model, "max_tokens": 8, "seed": 3, "n": 2}
    prompts = ["import os", "class A:", "x = 1"]
    both = await api.completions.create(**request, prompt=prompts)
    assert [c.index for c in both.choices] == list(range(6))
    alone = [await api.completions.create(**request, prompt=prompt) for prompt in prompts]
    assert [c.text for c in both.choices] == [c.text for single in alone for c in single.choices]
    stream = await api.completions.create(**request, prompt=prompts, stream=True)
    texts = dict.fromkeys(range(6), "")
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [c.text for c in both.choices]


async def test_prompt_of_token_ids_equals_its_text(api: AsyncOpenAI, model: str) -> None:
    """A prompt of token ids gives the same response as its text."""
    ids = Tokenizer(SHIPPED_MODEL).encode(PROMPT)
    request = {"model": model, "max_tokens": 8, "seed": 3}
    by_ids = await api.completions.create(**request, prompt=ids)
    by_text = await api.completions.create(**request, prompt=PROMPT)
    assert by_ids.choices[0].text == by_text.choices[0].text
    assert by_ids.usage.prompt_tokens == len(ids)


async def test_stop_string_is_found_across_tokens(api: AsyncOpenAI, model: str) -> None:
    """The server omits a stop string that spans tokens and the text after the stop string."""
    request = {"model": model, "prompt": PROMPT, "max_tokens": 40, "seed": 2}
    full = (await api.completions.create(**request)).choices[0].text
    stop = full[9:14]
    expected = full[: full.find(stop)]
    cut = (await api.completions.create(**request, stop=[stop, "never\x00"])).choices[0]
    assert (cut.text, cut.finish_reason) == (expected, "stop")
    stream = await api.completions.create(**request, stop=stop, stream=True)
    assert "".join([c.text async for chunk in stream for c in chunk.choices]) == expected


async def test_completion_logprobs_have_four_lists_of_equal_length(
    api: AsyncOpenAI, model: str
) -> None:
    """The log probabilities are lists of equal length, and each offset points at its token."""
    request = {"model": model, "prompt": PROMPT, "max_tokens": 6, "seed": 1, "logprobs": 2}
    response = await api.completions.create(**request)
    found = response.choices[0].logprobs
    assert len(found.tokens) == response.usage.completion_tokens
    assert len(found.token_logprobs) == len(found.top_logprobs) == len(found.tokens)
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(len(found.tokens))]
    assert all(token in top for token, top in zip(found.tokens, found.top_logprobs, strict=True))
    stream = await api.completions.create(**request, stream=True)
    chunks = [chunk.choices[0].logprobs async for chunk in stream if chunk.choices]
    assert [t for part in chunks for t in part.tokens] == found.tokens
    assert [o for part in chunks for o in part.text_offset] == found.text_offset


async def test_stop_string_is_ignored_before_min_tokens(api: AsyncOpenAI, model: str) -> None:
    """The server ignores a stop string before `min_tokens` tokens."""
    request = {"model": model, "prompt": PROMPT, "max_tokens": 40, "seed": 2}
    stop = (await api.completions.create(**request)).choices[0].text[:3]
    early = await api.completions.create(**request, stop=stop)
    late = await api.completions.create(**request, stop=stop, extra_body={"min_tokens": 30})
    assert early.usage.completion_tokens < 30 <= late.usage.completion_tokens


async def test_completions_and_chunks_satisfy_the_clients_strict_type(
    gateway: Listening, model: str
) -> None:
    """Whole completions and chunks satisfy the client's type in every field."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "n": 2, "logprobs": 2}
    async with client(gateway) as http:
        whole = await http.post("/v1/completions", json=body)
        stream = await http.post("/v1/completions", json={**body, "stream": True})
    *chunks, done = events(stream.text)
    assert done == "[DONE]"
    for reply in (whole.json(), *chunks):
        for choice in reply["choices"]:
            # OpenAI's type requires a finish reason, which only the last chunk of a choice has.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(reply)


async def test_greedy_settings_give_the_same_text_for_all_seeds(
    api: AsyncOpenAI, model: str, sampled: Listening
) -> None:
    """Temperature 0, `top_k` 1, a tiny `top_p` and `min_p` 1 give the same greedy text."""
    request = {"model": model, "prompt": PROMPT, "max_tokens": 16}
    responses = [
        await api.completions.create(**request, temperature=0, seed=1),
        await api.completions.create(**request, temperature=0, seed=2),
        await api.completions.create(**request, top_p=1e-9, seed=3),
        await api.completions.create(**request, seed=4, extra_body={"top_k": 1}),
        await api.completions.create(**request, seed=5, extra_body={"min_p": 1.0}),
    ]
    assert len({response.choices[0].text for response in responses}) == 1


async def test_echo_has_the_prompt_and_its_log_probabilities(api: AsyncOpenAI, model: str) -> None:
    """Echoed completions begin with the prompt, with and without output, on every backend."""
    request = {"model": model, "prompt": PROMPT, "echo": True, "logprobs": 1, "seed": 1}
    silent = await api.completions.create(**request, max_tokens=0)
    response = await api.completions.create(
        **request, max_tokens=4, extra_body={"prompt_logprobs": 1}
    )
    (choice,), prompt_tokens = response.choices, response.usage.prompt_tokens
    assert silent.choices[0].text == PROMPT
    assert silent.usage.completion_tokens == 0
    assert choice.text.startswith(PROMPT)
    assert len(choice.text) > len(PROMPT)
    assert len(choice.logprobs.tokens) == prompt_tokens + 4
    assert choice.logprobs.tokens[:prompt_tokens] == silent.choices[0].logprobs.tokens
    logprobs = choice.logprobs.token_logprobs[:prompt_tokens]
    assert logprobs == silent.choices[0].logprobs.token_logprobs
    assert logprobs[0] is None
    assert len(choice.model_extra["prompt_logprobs"]) == prompt_tokens


async def test_stop_tokens_and_token_ids_work_with_every_backend(
    api: AsyncOpenAI, model: str
) -> None:
    """A stop token ends the output where it first occurs, also at an upstream."""
    request = {"model": model, "prompt": PROMPT, "max_tokens": 12, "seed": 3}
    fields = {"return_token_ids": True}
    plain = await api.completions.create(**request, extra_body=fields)
    ids = plain.choices[0].model_extra["token_ids"]
    fields["stop_token_ids"] = [ids[5]]
    ended = await api.completions.create(**request, extra_body=fields)
    assert ended.choices[0].model_extra["token_ids"] == ids[: ids.index(ids[5]) + 1]
    assert ended.choices[0].finish_reason == "stop"
