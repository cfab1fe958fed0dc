"""Send live streams, and large requests in sequence while the streams run.

    python -m bench.edge.crowd URL KIND

The command prints the statuses of the large requests as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import aiohttp
import uvloop

MEGABYTE: Final = 1 << 20
STREAMS: Final = 16
TIMES: Final = 2
_SENTENCE: Final = "The quick brown fox jumps over the lazy dog, and {} more do. "
_NESTED_LISTS: Final = 100_000


def _text() -> str:
    sentences = (_SENTENCE.format(n) for n in range(MEGABYTE // len(_SENTENCE)))
    return "".join(sentences)[:MEGABYTE]


def _ids() -> list[int]:
    """Return token ids whose JSON takes about one megabyte."""
    return [1000 + n % 1000 for n in range(MEGABYTE // 6)]


def _schema() -> dict[str, Any]:
    properties = {f"field_{n}": {"type": "integer"} for n in range(2000)}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {
        "type": "object", "properties": properties}}}  # fmt: skip


def _completion(prompt: object, **more: object) -> tuple[str, dict[str, object]]:
    return "/v1/completions", {"model": "mock", "prompt": prompt, "max_tokens": 1, **more}


def _chat(content: str) -> tuple[str, dict[str, object]]:
    messages = [{"role": "user", "content": content}]
    return "/v1/chat/completions", {"model": "mock", "messages": messages, "max_tokens": 1}


KINDS: Final[dict[str, Callable[[], tuple[str, dict[str, object]] | None]]] = {
    "nothing": lambda: None,
    "chat, 1 MB": lambda: _chat(_text()),
    "completion, 1 MB of text": lambda: _completion(_text()),
    "completion, 1 MB of token ids": lambda: _completion(_ids()),
    "completion, 1 MB streamed": lambda: _completion(_text(), stream=True),
    "tokenize, 1 MB": lambda: ("/tokenize", {"model": "mock", "prompt": _text()}),
    "detokenize, 1 MB": lambda: ("/detokenize", {"model": "mock", "tokens": _ids()}),
    "schema of 2,000 fields": lambda: _completion("x", response_format=_schema()),
    "answer with 500 x 20 logprobs": lambda: _completion("x", max_tokens=500, logprobs=20),
    "body that is no JSON, 1 MB": lambda: ("/v1/completions", {"": [[[]]] * _NESTED_LISTS}),
}
"""Path and body of the large request, by kind of request."""


async def _stream(session: aiohttp.ClientSession) -> None:
    _, body = _completion("Say something.", stream=True)
    body["max_tokens"] = 8000
    async with session.post("/v1/completions", json=body) as response:
        async for _ in response.content.iter_any():
            pass


async def crowd(url: str, kind: str) -> list[int]:
    """Send the large request `TIMES` times while streams run, and return the statuses."""
    large_request = KINDS[kind]()
    statuses = []
    async with aiohttp.ClientSession(url) as session:
        streams = [asyncio.create_task(_stream(session)) for _ in range(STREAMS)]
        await asyncio.sleep(0.3)
        for _ in range(TIMES):
            if large_request is None:
                await asyncio.sleep(0.3)
                continue
            path, body = large_request
            data = json.dumps(body).encode()
            async with session.post(path, data=data) as response:
                await response.read()
                statuses.append(response.status)
        for stream in streams:
            stream.cancel()
            with suppress(asyncio.CancelledError):
                await stream
    return statuses


def main() -> None:
    """Run `crowd` with the URL and the kind from the command line."""
    print(json.dumps(uvloop.run(crowd(sys.argv[1], sys.argv[2]))))


if __name__ == "__main__":
    main()
