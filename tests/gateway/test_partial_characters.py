"""Tests of log probabilities of tokens that are parts of characters."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from draftgate.backends.types import Delta, FinishReason, SpeculationOutcome, TokenLogprob
from draftgate.gateway.http.replies.logprobs import top_by_name
from tests.gateway.harness import ScriptedBackend, client, events, needs_engine, running

TEXT = "x😀é日本 ok"

BODY = {"prompt": "é: ", "max_tokens": 60, "structured_outputs": {"choice": [TEXT]}, "logprobs": 2}

ENGINE = {"backend": "engine", "kv_bytes": 32 << 20, "threads": 1}


def merged(replies: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the text and log probabilities of each choice."""
    found: dict[int, dict[str, Any]] = {}
    for reply in replies:
        for choice in reply["choices"]:
            into = found.setdefault(choice["index"], {"text": ""})
            into["text"] += choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                into.setdefault(name, []).extend(values)
    return found


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[int, dict[str, Any]]:
    reply = await http.post("/v1/completions", json={**BODY, **fields})
    assert reply.status_code == 200, reply.text
    stream = fields.get("stream", False)
    return merged(events(reply.text)[:-1] if stream else [reply.json()])


@needs_engine
async def test_offsets_of_an_output_are_those_of_the_same_text_in_a_prompt() -> None:
    """Tokens of an output begin where the same tokens begin in an echoed prompt.

    This holds for whole and streamed responses, with echo, for several choices and prompts, and
    with stop strings.
    """
    async with running(**ENGINE) as listening, client(listening) as http:
        prompt = BODY["prompt"]
        echoed = await complete(http, prompt=TEXT, echo=True, max_tokens=0, structured_outputs=None)
        expected = echoed[0]["text_offset"]
        assert expected[-1] < len(TEXT)
        plain = await complete(http)
        assert plain[0]["text"] == TEXT
        begins = plain[0]["text_offset"][: len(expected)]
        assert begins == expected
        for stream in (False, True):
            for echo in (False, True):
                skipped = len(plain[0]["tokens"])
                n = 1 if stream and echo else 2
                found = await complete(http, stream=stream, echo=echo, n=n, prompt=[prompt] * 2)
                assert len(found) == 2 * n
                for choice in found.values():
                    begin = len(prompt) if echo else 0
                    own = [offset - begin for offset in choice["text_offset"][-skipped:]]
                    assert own == plain[0]["text_offset"]
            stopped = await complete(http, stream=stream, stop=["本"])
            assert stopped[0]["text"] == TEXT[: TEXT.index("本")]
            assert stopped[0]["text_offset"] == expected[: len(stopped[0]["tokens"])]


@needs_engine
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_bytes_of_a_chat_join_to_its_text(stream: bool) -> None:
    """The bytes of all tokens of a chat join to its text, also for parts of characters."""
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "structured_outputs": {"choice": [TEXT]},
        "max_tokens": 60,
        "logprobs": True,
        "top_logprobs": 5,
        "stream": stream,
    }
    async with running(**ENGINE) as listening, client(listening) as http:
        reply = await http.post("/v1/chat/completions", json=body)
    replies = events(reply.text)[:-1] if stream else [reply.json()]
    choices = [choice for one in replies for choice in one["choices"] if choice["logprobs"]]
    entries = [entry for choice in choices for entry in choice["logprobs"]["content"]]
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    end = entries[-1]["token"].encode()
    assert joined.removesuffix(end) == TEXT.encode()
    for entry in entries:
        assert all(isinstance(top["bytes"], list) for top in entry["top_logprobs"])


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_alternatives_that_are_parts_of_characters_keep_their_entries(stream: bool) -> None:
    """Each alternative of a completion has its own entry, with its bytes as its name."""
    backend = ScriptedBackend()
    tokenizer = backend.tokenizer
    ids = [
        token for token in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.token_text(token)
    ]
    top = tuple((token, -1.0 - place) for place, token in enumerate(ids[:5]))
    entry = TokenLogprob(ids[0], -1.0, top)
    last = Delta(0, (ids[0],), "\ufffd", (entry,), FinishReason.STOP, SpeculationOutcome())
    async with running(backends=[backend]) as gateway, client(gateway) as http:
        sent = {"prompt": "x", "logprobs": 5, "stream": stream}
        pending = asyncio.ensure_future(http.post("/v1/completions", json=sent))
        request = await backend.submitted.get()
        backend.sinks.deliver([(request.request_id, last)])
        reply = await pending
    found = merged(events(reply.text)[:-1] if stream else [reply.json()])[0]
    (alternatives,) = found["top_logprobs"]
    assert list(alternatives.values()) == [value for _, value in top]
    assert all(name.startswith("bytes:") and "\\x" in name for name in alternatives)
    assert found["tokens"] == [next(iter(alternatives))]


def test_token_with_the_name_of_a_likelier_one_is_named_by_its_id() -> None:
    """Of several tokens with one name, the likeliest keeps it, and no entry is lost."""
    top = ((5, -1.0), (6, -2.0), (7, -3.0))
    assert top_by_name(7, -3.0, top, lambda token: "ab"[token % 2]) == {
        "b": -1.0,
        "a": -2.0,
        "token_id:7": -3.0,
    }
    assert top_by_name(9, -9.0, top[:1], str) == {"5": -1.0, "9": -9.0}
