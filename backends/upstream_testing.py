"""Conformance checks for upstreams: for our own tests, and for those of third parties.

They need a server behind the upstream that generates at least a few tokens.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final

from draftgate.backends.base import Upstream, UpstreamCall
from draftgate.backends.errors import UpstreamUnreachable

PATIENCE_S: Final = 60.0
"""How long a check waits for what must happen; generous, since only failures wait that long."""

_HEADERS: Final = {"Content-Type": "application/json"}
_DONE: Final = b"data: [DONE]"


async def check_upstream(upstream: Upstream) -> None:
    """Start a fresh upstream, whose server is there, run every check on it, and stop it.

    Raises:
        AssertionError: the upstream breaks its contract. The message names the promise.
        TimeoutError: something that must happen did not within `PATIENCE_S`.
    """
    await upstream.start()
    try:
        assert upstream.failure is None, "an upstream whose server answers is well"
        assert upstream.pause is None, "an upstream that is well may be called"
        assert upstream.card.model_id, "an upstream that was reached knows its model"
        async with asyncio.timeout(PATIENCE_S):
            await check_whole_answers(upstream)
            await check_streams(upstream)
            await check_complaints(upstream)
            await check_leaving(upstream)
    finally:
        await upstream.stop()
    await check_stopped(upstream)


def make_call(upstream: Upstream, **fields: Any) -> UpstreamCall:
    """Return a completion's call, of eight tokens unless told otherwise."""
    body = {"model": upstream.card.model_id, "prompt": "def f(", "max_tokens": 8, **fields}
    return UpstreamCall("POST", "/v1/completions", _HEADERS, json.dumps(body).encode())


async def check_whole_answers(upstream: Upstream) -> None:
    """A whole answer is JSON, is no stream, and tells its usage."""
    async with upstream.forward(make_call(upstream)) as exchange:
        body = b"".join([block async for block in exchange.blocks()])
        assert (exchange.status, exchange.streaming) == (200, False), "an answer has its status"
        assert json.loads(body)["choices"], "the body comes whole"
        usage = exchange.usage()
        assert usage.prompt > 0, "the usage of a whole answer is read"
        assert usage.output > 0, "the usage of a whole answer is read"


async def check_streams(upstream: Upstream) -> None:
    """A stream comes in complete events, up to `[DONE]`, and counts as running until then."""
    async with upstream.forward(make_call(upstream, stream=True)) as exchange:
        assert exchange.streaming, "a stream of events is known by its head"
        assert upstream.load().running == 1, "what was sent counts as running"
        blocks = [block async for block in exchange.blocks()]
        assert all(block.endswith((b"\n\n", b"\r\n\r\n")) for block in blocks), (
            "only complete events pass"
        )
        assert blocks[-1].rstrip().endswith(_DONE), "a stream ends with [DONE]"
        assert exchange.outputs > 0, "events of output are counted"
        assert exchange.usage().output > 0, "without usage each event of output is a token"
        assert not exchange.error_sent, "a stream that ended rightly sent no error"
    assert upstream.load().running == 0, "what has ended counts no more"


async def check_complaints(upstream: Upstream) -> None:
    """What the server complains of is an answer as any other."""
    async with upstream.forward(make_call(upstream, temperature="hot")) as exchange:
        body = b"".join([block async for block in exchange.blocks()])
        assert 400 <= exchange.status < 500, "a complaint passes with its status"
        assert body, "a complaint passes with its body"
    assert upstream.failure is None, "a complaint is no failure"


async def check_leaving(upstream: Upstream) -> None:
    """A stream that is left early counts no more, and the next one is not disturbed."""
    async with upstream.forward(make_call(upstream, stream=True, max_tokens=64)) as exchange:
        blocks = exchange.blocks()
        await anext(blocks)
        await blocks.aclose()
    assert upstream.load().running == 0, "what was left counts no more"
    await check_streams(upstream)


async def check_stopped(upstream: Upstream) -> None:
    """One that was stopped takes nothing, and says why."""
    assert upstream.failure is not None, "a stopped upstream says that it is"
    try:
        async with upstream.forward(make_call(upstream)):
            pass
    except UpstreamUnreachable:
        return
    raise AssertionError("a stopped upstream takes no calls")
