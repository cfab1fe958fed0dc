"""Conformance checks for the upstreams of this project and of third parties.

The checks need a server that generates at least a few tokens.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from draftgate.backends.base import Exchange, Upstream, UpstreamCall
from draftgate.backends.errors import UpstreamUnreachable

_PATIENCE_S: Final = 60.0
"""Timeout of the checks in seconds, which only failures reach."""

_HEADERS: Final = {"Content-Type": "application/json"}
_DONE: Final = b"data: [DONE]"


async def check_upstream(upstream: Upstream) -> None:
    """Start a fresh upstream with a running server, run every check on it, and stop it.

    Raises:
        AssertionError: the upstream breaks its contract. The message contains the details.
        TimeoutError: the checks took longer than `_PATIENCE_S`.
    """
    await upstream.start()
    try:
        assert upstream.failure is None, "an upstream with a running server must be healthy"
        assert upstream.pause is None, "a healthy upstream must not pause"
        assert upstream.card.model_id, "an upstream that was reached must know its model"
        async with asyncio.timeout(_PATIENCE_S):
            await check_whole_answers(upstream)
            await check_streams(upstream)
            await check_error_answers(upstream)
            await check_early_close(upstream)
    finally:
        await upstream.stop()
    await check_stopped(upstream)


def make_call(upstream: Upstream, **fields: Any) -> UpstreamCall:
    """Return a call for a completion, with eight tokens by default."""
    body = {"model": upstream.card.model_id, "prompt": "def f(", "max_tokens": 8, **fields}
    return UpstreamCall("POST", "/v1/completions", _HEADERS, json.dumps(body).encode())


async def check_whole_answers(upstream: Upstream) -> None:
    """Check that a complete response is JSON with usage."""
    exchange = await upstream.forward(make_call(upstream))
    body = await read_all(exchange)
    assert (exchange.status, exchange.streaming) == (200, False), (
        "a complete response must have status 200"
    )
    assert json.loads(body)["choices"], "the body must be complete"
    usage = exchange.usage()
    assert usage.prompt > 0, "the usage of a complete response must be read"
    assert usage.output > 0, "the usage of a complete response must be read"
    await exchange.finish()


async def check_streams(upstream: Upstream) -> None:
    """Check that a stream has complete events up to `[DONE]`, and counts as running until then."""
    exchange = await upstream.forward(make_call(upstream, stream=True))
    assert exchange.streaming, "a stream must be recognised by its head"
    assert upstream.load().running == 1, "a request that was sent counts as running"
    blocks = []
    while block := await exchange.read():
        blocks.append(block)
    assert all(block.endswith((b"\n\n", b"\r\n\r\n")) for block in blocks), (
        "only complete events may pass"
    )
    assert blocks[-1].rstrip().endswith(_DONE), "a stream must end with [DONE]"
    assert exchange.outputs > 0, "events with output must be counted"
    assert exchange.usage().output > 0, "each event must count as a token without usage"
    assert not exchange.error_sent, "a complete stream has sent no error"
    await exchange.finish()
    assert upstream.load().running == 0, "a request that has ended must not count"


async def check_error_answers(upstream: Upstream) -> None:
    """Check that the upstream forwards an error of the server."""
    exchange = await upstream.forward(make_call(upstream, temperature="hot"))
    assert 400 <= exchange.status < 500, "an error must pass with its status"
    assert await read_all(exchange), "an error must pass with its body"
    await exchange.finish()
    assert upstream.failure is None, "an error of the server is no failure"


async def check_early_close(upstream: Upstream) -> None:
    """Check that a stream no longer counts after an early close, and the next stream works."""
    exchange = await upstream.forward(make_call(upstream, stream=True, max_tokens=64))
    await exchange.read()
    exchange.close()
    assert upstream.load().running == 0, "a closed stream must not count"
    await check_streams(upstream)


async def check_stopped(upstream: Upstream) -> None:
    """Check that a stopped upstream takes no calls and reports the reason."""
    assert upstream.failure is not None, "a stopped upstream must have a failure"
    try:
        await upstream.forward(make_call(upstream))
    except UpstreamUnreachable:
        return
    raise AssertionError("a stopped upstream must take no calls")


async def read_all(exchange: Exchange) -> bytes:
    """Return the whole body of a response."""
    if exchange.body is not None:
        return exchange.body
    body = b""
    while block := await exchange.read():
        body += block
    return body
