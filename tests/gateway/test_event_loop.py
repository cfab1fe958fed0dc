"""Tests that long work runs in threads beside the event loop."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from asyncio.events import Handle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.edge.hold import CONTEXT, KV_BYTES, STEP_TOKENS, long_model
from bench.edge.targets import paced_profile
from draftgate.backends import grammar
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import (
    Delta,
    FinishReason,
    GrammarKind,
    GrammarSpec,
    SpeculationOutcome,
    TokenLogprob,
)
from draftgate.gateway.dispatch import placement
from draftgate.gateway.http import generation
from draftgate.gateway.http.endpoints import models
from draftgate.gateway.http.generation import INLINE_BODY_BYTES
from draftgate.gateway.http.replies import rendering
from draftgate.gateway.http.requests import forwarded, validation
from tests.gateway.harness import ScriptedBackend, client, post_raw, running
from tests.gateway.upstreams import forwarding, refusal, upstream, whole

MEGABYTE = 1 << 20
TEXT = ("def f(x):\n    return x + 1\n" * (MEGABYTE // 26))[:MEGABYTE]
LONG = MEGABYTE // 8
"""Least size of work that counts as large, in characters, bytes or tokens."""


class ThreadWatch:
    """Records the size of the work of wrapped functions and the threads that run the functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.loop = threading.get_ident()
        self.large: list[tuple[str, int]] = []

    def wrap(self, owner: Any, name: str, size: Callable[..., int]) -> None:
        """Record the large calls of a function.

        Args:
            owner: the object or module that owns the function.
            name: the name of the function.
            size: returns the size of a call from its arguments and, last, its result.
        """
        wrapped = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            result = wrapped(*args, **kwargs)
            if size(*args, result) >= LONG:
                self.large.append((name, threading.get_ident()))
            return result

        self._monkeypatch.setattr(owner, name, watched)

    def names(self) -> set[str]:
        """Return the functions that did large work, and assert that none ran in the loop's
        thread."""
        assert self.loop not in {thread for _, thread in self.large}, self.large
        return {name for name, _ in self.large}


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> ThreadWatch:
    """A watch of all functions between a body and its response that may take long."""
    found = ThreadWatch(monkeypatch)
    largest = lambda *values: max(map(_size, values))  # noqa: E731 - as short as its meaning
    for owner, name in (
        (validation, "decode"),
        (validation, "_encoded"),
        (validation, "chat_prompt"),
        (validation, "_ids"),
        (models, "decode"),
        (models, "encode"),
        (rendering, "encode"),
        (Tokenizer, "encode"),
        (Tokenizer, "decode"),
        (Tokenizer, "render_chat"),
    ):
        found.wrap(owner, name, largest)
    return found


CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 1}
IDS = [1000 + n % 1000 for n in range(MEGABYTE // 6)]


@pytest.mark.parametrize(
    ("path", "body", "large_work"),
    [
        ("/v1/chat/completions", CHAT, {"decode", "render_chat", "encode"}),
        ("/v1/chat/completions", {**CHAT, "stream": True}, {"decode", "render_chat", "encode"}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 1}, {"decode", "_encoded", "encode"}),
        ("/v1/completions", {"prompt": IDS, "max_tokens": 1}, {"decode", "_ids"}),
        ("/tokenize", {"prompt": TEXT}, {"decode", "encode"}),
        ("/tokenize", {"messages": CHAT["messages"]}, {"decode", "render_chat", "encode"}),
        ("/detokenize", {"tokens": IDS}, {"decode"}),
    ],
)
async def test_megabyte_body_is_processed_in_other_threads(
    watch: ThreadWatch, tmp_path: Path, path, body, large_work
) -> None:
    """The server parses, tokenises and renders a body of a megabyte in other threads."""
    settings = {"model": str(long_model(tmp_path)), "profile": str(paced_profile(tmp_path))}
    config = {**settings, "max_model_len": CONTEXT, "kv_bytes": KV_BYTES}
    async with running(**config, max_step_tokens=STEP_TOKENS) as gateway, client(gateway) as http:
        response = await http.post(path, json=body)
    assert response.status_code == 200
    assert large_work <= watch.names()


class CallCount:
    """Counts the Python and C functions that each callback of this thread's loop calls.

    Attributes:
        most: the number of calls of the longest callback.
        last: the function in which the longest callback reached its highest count.
    """

    def __init__(self) -> None:
        self.most = self._calls = 0
        self.last = ""

    @contextmanager
    def counting(self) -> Iterator[None]:
        before = sys.getprofile()
        sys.setprofile(self._count_call)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _count_call(self, frame: Any, event: str, _argument: Any) -> None:
        if frame.f_code is Handle._run.__code__ and event in {"call", "return"}:
            self._calls = 0
        elif event in {"call", "c_call"}:
            self._calls += 1
            if self._calls > self.most:
                self.most, self.last = self._calls, frame.f_code.co_qualname


MOST_CALLS = 5_000
"""Limit of the calls in one callback. At about 0.2 us per call, the limit is one millisecond.

A step that computes 512 blocks makes 1,700 calls. Hashing and freeing each block separately made
220,000 calls.
"""

STREAMS = 8


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 1}),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 1, "stream": True}),
        ("/v1/completions", {"prompt": IDS, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 200, "logprobs": 20}),
        ("/tokenize", {"prompt": TEXT}),
        ("/detokenize", {"tokens": IDS}),
    ],
)
async def test_megabyte_body_makes_no_long_callback_during_streams(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    """A request of a megabyte keeps each callback of the loop short while streams run.

    The test sends each request twice, because the second request uses the prefix cache. The number
    of calls does not depend on the machine, so the test counts calls. The other tests of this
    module check the work within single calls of C functions.
    """
    call_count = CallCount()
    settings = {"model": str(long_model(tmp_path)), "profile": str(paced_profile(tmp_path))}
    config = {**settings, "max_model_len": CONTEXT, "kv_bytes": KV_BYTES, "speculation": "off"}
    live = {"prompt": "a", "max_tokens": 10_000, "stream": True}
    async with running(**config, max_step_tokens=STEP_TOKENS) as gateway, client(gateway) as http:
        streams = [await post_raw(gateway, "/v1/completions", live) for _ in range(STREAMS)]
        for reader, _ in streams:
            await reader.readuntil(b"data:")
        with call_count.counting():
            for _ in range(2):
                response = await http.post(path, json=body)
                assert response.status_code == 200
        for _, writer in streams:
            writer.close()
    assert call_count.most < MOST_CALLS, call_count.last


async def test_small_bodies_are_parsed_in_the_loop(
    monkeypatch: pytest.MonkeyPatch, http: httpx.AsyncClient
) -> None:
    """The server parses a small body in the loop's thread, because a thread would add latency."""
    seen: list[int] = []
    decode = validation.decode

    def watched(*args: Any) -> Any:
        seen.append(threading.get_ident())
        return decode(*args)

    monkeypatch.setattr(validation, "decode", watched)
    for size in (10, INLINE_BODY_BYTES):
        await http.post("/v1/completions", json={"prompt": "a b " * (size // 4), "max_tokens": 1})
    assert seen[0] == threading.get_ident() != seen[1]


async def test_long_prompts_are_checked_and_hashed_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server checks and hashes a long prompt in a thread, and hashes each block once."""
    found = ThreadWatch(monkeypatch)
    found.wrap(placement, "extend_chain", lambda *values: len(values[2]))
    found.wrap(generation, "fingerprint", lambda _tenant, body, _result: len(body))
    backend = ScriptedBackend()
    backend.check = lambda _request: None
    found.wrap(backend, "check", lambda request, _result: len(request.prompt_ids))
    async with running(backends=[backend]) as gateway, client(gateway) as http:
        body = {"prompt": IDS, "max_tokens": 1}
        response = asyncio.create_task(http.post("/v1/completions", json=body))
        request = await backend.submitted.get()
        backend.emit(request, "a", last=True)
        assert (await response).status_code == 200
    assert found.names() == {"check", "extend_chain", "fingerprint"}
    assert len(request.block_hashes) == len(IDS) // backend.load().kv_block_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_with_many_logprobs_are_rendered_in_a_thread(
    monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The server renders a response with 500 tokens and 20 alternatives per token in a thread."""
    found = ThreadWatch(monkeypatch)
    found.wrap(rendering, "encode", lambda *values: LONG * (_size(values[-1]) > 100_000))
    backend = ScriptedBackend()
    top = tuple((token, -1.0) for token in range(20))
    logprobs = tuple(TokenLogprob(token, -1.0, top) for token in range(500))
    delta = Delta(0, tuple(range(500)), "a", logprobs, FinishReason.LENGTH, SpeculationOutcome())
    async with running(backends=[backend]) as gateway, client(gateway) as http:
        body = {"prompt": "a", "max_tokens": 400, "logprobs": 20, "stream": stream}
        response = asyncio.create_task(http.post("/v1/completions", json=body))
        request = await backend.submitted.get()
        backend.sinks.deliver([(request.request_id, delta)])
        assert len((await response).content) > 100_000
    assert found.names() == {"encode"}


async def test_grammars_are_compiled_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server compiles a schema with hundreds of fields in a thread."""
    pytest.importorskip("llguidance")
    found = ThreadWatch(monkeypatch)
    found.wrap(grammar.LlGrammars, "_compile", lambda *_: LONG)
    backend = ScriptedBackend()
    grammars = grammar.LlGrammars(backend.tokenizer, [0])
    checked = backend.check

    def check(request):
        checked(request)
        assert request.grammar == GrammarSpec(GrammarKind.JSON_SCHEMA, request.grammar.text)
        grammars.start(request.grammar)

    backend.check = check
    schema = {"type": "object", "properties": {f"f{n}": {"type": "integer"} for n in range(500)}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    async with running(backends=[backend]) as gateway, client(gateway) as http:
        body = {"prompt": "a", "stream": True, "response_format": response_format}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            backend.emit(await backend.submitted.get(), "{}", last=True)
            await response.aread()
    assert found.names() == {"_compile"}


async def test_alias_in_a_large_body_is_replaced_once_and_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A body of a megabyte is written once for all attempts, with the model's name at upstreams."""
    found = ThreadWatch(monkeypatch)
    found.wrap(forwarded, "with_values", lambda *values: max(map(_size, values)))
    async with upstream(refusal(503)) as a, upstream(whole) as b:
        for one in (a, b):
            one.settings["aliases"] = {"chat": "theirs"}
        async with forwarding(a, b) as gateway, client(gateway) as http:
            for _ in range(2):
                response = await http.post(
                    "/v1/completions", json={"model": "chat", "prompt": TEXT}
                )
                assert response.status_code == 200
    assert len(a.bodies) == 1
    assert len(b.bodies) == 2
    assert {json.loads(body)["model"] for body in (*a.bodies, *b.bodies)} == {"theirs"}
    assert found.names() == {"with_values"}
    assert len(found.large) == 2
