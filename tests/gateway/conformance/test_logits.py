"""Tests of logit biases and penalties with OpenAI's client on both endpoints."""

from __future__ import annotations

import pytest
from openai import AsyncOpenAI

from draftgate.gateway.app import Listening
from tests.gateway.conformance.asks import CHAT, PROMPT

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
async def test_logit_bias_forces_or_bans_a_token(
    api: AsyncOpenAI, model: str, sampled: Listening, chat: bool
) -> None:
    """A bias of +100 forces a token and a bias of -100 bans it, greedy or sampled."""

    async def tokens(**fields: object) -> list[str]:
        if chat:
            request = {
                "model": model,
                "messages": CHAT,
                "max_tokens": 6,
                "logprobs": True,
                **fields,
            }
            response = await api.chat.completions.create(**request)
            return [entry.token for entry in response.choices[0].logprobs.content]
        request = {"model": model, "prompt": PROMPT, "max_tokens": 6, "logprobs": 0, **fields}
        return (await api.completions.create(**request)).choices[0].logprobs.tokens

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
async def test_penalties_stop_repetition_with_and_without_drafts(
    api: AsyncOpenAI, model: str, sampled: Listening, penalty: dict[str, float]
) -> None:
    """A penalty changes a repetitive greedy text in the same way with and without drafts."""
    request = {"model": model, "prompt": "x = 1\n" * 8, "max_tokens": 40, "temperature": 0}
    plain = (await api.completions.create(**request)).choices[0].text
    responses = [
        await api.completions.create(**request, extra_body={**penalty, **more})
        for more in ({}, {"speculation": {"mode": "off"}})
    ]
    assert responses[0].choices[0].text == responses[1].choices[0].text != plain
    assert responses[1].model_extra["metrics"]["speculative_decoding"]["num_drafted_tokens"] == 0
