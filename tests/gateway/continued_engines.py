"""A model with one fixed text, and servers that stream it and break off anywhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from aiohttp import web

from tests.gateway.upstreams import SSE

PROMPT = "Tell me."
PROMPT_TOKENS = 7
PIECES = ("Bees", " are", "n't", " b\xf6", "rds", ".\n\n", "They", " \U0001f41d", "zz", " on", ".")
"""The tokens of the text that every server generates."""

TEXT = "".join(PIECES)


def known_tokens(text: str) -> int:
    """Return the number of tokens of the beginning of the text, without white space at its end."""
    found = [
        count
        for count in range(len(PIECES) + 1)
        if "".join(PIECES[:count]).rstrip() == text.rstrip()
    ]
    assert found, f"the text so far is not a beginning of the text: {text!r}"
    return found[-1] if text == "".join(PIECES[: found[-1]]) else found[0]


def begin_of(chat: bool, body: Mapping[str, Any]) -> int:
    """Return the tokens of the output that a request begins with."""
    if not chat:
        prompt = body["prompt"]
        if isinstance(prompt, list):
            assert prompt[:PROMPT_TOKENS] == list(range(PROMPT_TOKENS))
            return len(prompt) - PROMPT_TOKENS
        assert prompt.startswith(PROMPT)
        return known_tokens(prompt[len(PROMPT) :])
    last = body["messages"][-1]
    if last["role"] != "assistant":
        return 0
    assert body["continue_final_message"] is True
    assert body["add_generation_prompt"] is False
    # A template that removes white space at the end of a message.
    return known_tokens(last["content"].rstrip())


def events_of(path: str, body: Mapping[str, Any], name: str = "a") -> list[bytes]:
    """Return the events of a server's stream.

    Args:
        name: the name of the server, which its ids contain.
    """
    chat = path.endswith("/chat/completions")
    begin = begin_of(chat, body)
    most = body.get("max_tokens") or body.get("max_completion_tokens") or 1000
    end = min(len(PIECES), begin + most)
    head = {"id": f"{name}-1", "object": "chunk", "created": len(name), "model": "theirs"}
    options = body.get("stream_options") or {}

    def event(choices: Sequence[Any], output: int | None = None) -> bytes:
        found: dict[str, Any] = {**head, "choices": choices}
        if output is not None:
            prompt = PROMPT_TOKENS + begin
            found["usage"] = {
                "prompt_tokens": prompt,
                "completion_tokens": output,
                "total_tokens": prompt + output,
                "prompt_tokens_details": {"cached_tokens": 2 * begin},
            }
        return b"data: %s\n\n" % json.dumps(found, ensure_ascii=False).encode()

    found = []
    if chat:
        role = {"role": "assistant", "content": ""}
        found.append(event([{"index": 0, "delta": role, "finish_reason": None}]))
    for index in range(begin, end):
        piece = PIECES[index]
        choice: dict[str, Any] = {"index": 0, "logprobs": None}
        choice |= {"delta": {"content": piece}} if chat else {"text": piece}
        reason = "stop" if index + 1 == len(PIECES) else "length"
        choice["finish_reason"] = reason if index + 1 == end else None
        if body.get("return_token_ids"):
            choice["token_ids"] = [index]
            if index == begin:
                choice["prompt_token_ids"] = list(range(PROMPT_TOKENS + begin))
        count = index + 1 - begin if options.get("continuous_usage_stats") else None
        found.append(event([choice], count))
    if options.get("include_usage"):
        found.append(event([], end - begin))
    return [*found, b"data: [DONE]\n\n"]


class Fault(Enum):
    """What a server does after some bytes of a stream."""

    CLOSE = auto()
    """It closes the connection, without the end of the body."""
    END = auto()
    """It ends the body as if it were complete."""
    RESET = auto()
    """It resets the connection."""
    STALL = auto()
    """It sends nothing more."""
    ERROR_EVENT = auto()
    """It sends an error event, as vLLM does if its engine dies."""
    DONE = auto()
    """It sends `[DONE]`, although no choice has finished."""
    ABORT = auto()
    """It aborts the choice, as vLLM's engine does when it stops."""
    GARBAGE = auto()
    """It sends an event without an end that exceeds all bounds, in parts."""


ABORT_EVENT = (
    b'data: {"id":"a-1","choices":[{"index":0,"text":"x","delta":{"content":"x"},'
    b'"finish_reason":"abort"}]}\n\n'
)
ERROR_EVENT = (
    b'data: {"error":{"message":"EngineDeadError","type":"InternalServerError","code":500}}\n\n'
)


@dataclass
class Engine:
    """The handler of a server.

    Attributes:
        fault: what it does after `cut` bytes of its n-th stream, for n below `faults`.
        bodies: the bodies of its chats and completions.
    """

    name: str = "a"
    fault: Fault = Fault.CLOSE
    cut: int | None = None
    faults: int = 1
    status: int = 200
    counts: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    stalled: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.path == "/tokenize":
            if not self.counts:
                return web.json_response({"detail": "Not Found"}, status=404)
            tokens = list(range(known_tokens(body["prompt"])))
            return web.json_response({"count": len(tokens), "tokens": tokens})
        self.bodies.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        stream = b"".join(events_of(request.path, body, self.name))
        if self.cut is None or len(self.bodies) > self.faults:
            await response.write(stream)
            await response.write_eof()
            return response
        await response.write(stream[: self.cut])
        return await self._fail(request, response)

    async def _fail(self, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
        transport = request.transport
        assert transport is not None
        match self.fault:
            case Fault.CLOSE:
                transport.close()
            case Fault.RESET:
                await asyncio.sleep(0)
                transport.abort()
            case Fault.END:
                await response.write_eof()
            case Fault.ABORT:
                await response.write(ABORT_EVENT + b"data: [DONE]\n\n")
            case Fault.ERROR_EVENT:
                await response.write(ERROR_EVENT + b"data: [DONE]\n\n")
                await response.write_eof()
            case Fault.DONE:
                await response.write(b"data: [DONE]\n\n")
                await response.write_eof()
            case Fault.GARBAGE:
                for _ in range(6):
                    await response.write(b"x" * (1 << 20))
                await response.write_eof()
            case Fault.STALL:
                self.stalled.set()
                await asyncio.get_running_loop().create_future()
        return response
