"""Tests of the number of reasoning tokens in the usage of chats and responses."""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, FinishReason
from draftgate.gateway.http.replies.reasoning_tokens import ReasoningTokens
from draftgate.gateway.http.requests.reasoning import CLOSED, Reasoning
from tests.gateway.harness import ScriptedBackend, client, events, running
from tests.gateway.tool_models import with_template

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HI = [{"role": "user", "content": "Time?"}]
THOUGHT = "<think>\nLet me see.\n</think>\n\nNoon."

Cuts = list[int]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(SHIPPED_MODEL)


def ids_of(text: str, tokens: Tokenizer) -> list[int]:
    return list(tokens.encode(text))


def count(ids: list[int], cuts: Cuts, reasoning: Reasoning = Reasoning.POSSIBLE) -> int:
    """Return the count of tokens that arrive in the parts between the cuts."""
    counter = ReasoningTokens(reasoning, tokenizer())
    ends = [*sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    for begin, end in zip([0, *ends], ends, strict=False):
        counter.add(ids[begin:end])
    return counter.count


CUTS = st.lists(st.integers(0, 60), max_size=20)
WORDS = st.text("aé <>/think\n☃", max_size=20)


@given(WORDS.filter(lambda text: CLOSED not in text), WORDS, CUTS)
def test_count_ends_with_the_marker_for_any_deltas(thought: str, rest: str, cuts: Cuts) -> None:
    """All tokens up to the one that completes the end marker are reasoning, however the tokens are
    divided into deltas."""
    ids = ids_of(f"\n<think>{thought}{CLOSED}{rest}", tokenizer())
    texts = [
        tokenizer().decode(ids[:length], skip_special_tokens=False) for length in range(len(ids))
    ]
    expected = next((n for n, text in enumerate(texts) if CLOSED in text), len(ids))
    assert count(ids, cuts) == expected
    assert count(ids, cuts, Reasoning.BEGUN) == expected


@given(WORDS.filter(lambda text: not text.lstrip().startswith("<think>")), CUTS)
def test_response_without_the_marker_has_no_reasoning_tokens(text: str, cuts: Cuts) -> None:
    """A response that does not begin with the marker has no reasoning tokens."""
    assert count(ids_of(text, tokenizer()), cuts) == 0


@given(WORDS, CUTS)
def test_unfinished_reasoning_counts_whole(thought: str, cuts: Cuts) -> None:
    """A response that ends inside the reasoning consists of reasoning tokens."""
    ids = ids_of("<think>" + thought.replace("/", ""), tokenizer())
    assert count(ids, cuts) == len(ids)


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("step", [1, 3, 100])
async def test_usage_has_the_reasoning_tokens(
    scripted: ScriptedBackend, tmp_path: Path, path: str, stream: bool, step: int
) -> None:
    """The usage of chats and responses has the reasoning tokens, and they are part of the output
    tokens."""
    scripted.tokenizer = Tokenizer(with_template(tmp_path / "qwen3", "qwen3"))
    scripted.kv_tokens = 1000
    ids = ids_of(THOUGHT, scripted.tokenizer)
    reasoning = len(ids_of(THOUGHT.partition("\n\nNoon.")[0], scripted.tokenizer))
    body: dict[str, Any] = {"messages": HI} if path == CHAT else {"input": HI}
    if stream and path == CHAT:
        body["stream_options"] = {"include_usage": True}
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        posted = asyncio.create_task(http.post(path, json={**body, "stream": stream}))
        request = await scripted.submitted.get()
        for begin in range(0, len(ids), step):
            part = ids[begin : begin + step]
            text = scripted.tokenizer.decode(part, skip_special_tokens=False)
            reason = FinishReason.STOP if begin + step >= len(ids) else None
            delta = Delta(0, tuple(part), text, (), reason)
            scripted.sinks.deliver([(request.request_id, delta)])
        response = await posted
    reply = events(response.text)[-2] if stream else response.json()
    usage = (reply["response"] if stream and path == RESPONSES else reply)["usage"]
    if path == CHAT:
        assert usage["completion_tokens"] == len(ids)
        assert usage["completion_tokens_details"]["reasoning_tokens"] == reasoning
    else:
        assert usage["output_tokens"] == len(ids)
        assert usage["output_tokens_details"] == {"reasoning_tokens": reasoning}
    assert 0 < reasoning < len(ids)
