"""`GET /live`: the node's samples as server-sent events, the kept ones first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from aiohttp import web

from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.http.context import NODE, SLOW_READERS
from draftgate.gateway.http.replies.rendering import event
from draftgate.gateway.http.stream import EventStream

MOST_INTERVAL_S: Final = 60


async def live(request: web.Request) -> web.StreamResponse:
    """Send a sample (`gateway.telemetry.live.Sample`) each second, until the client leaves.

    With `?interval=N` one of N samples is sent, the kept ones too.

    Raises:
        InvalidRequest: the interval is not a whole number from 1 to `MOST_INTERVAL_S`.
    """
    interval = _interval(request.query.get("interval", "1"))
    samples, events = request.app[NODE].live, EventStream(request, request.app[SLOW_READERS])
    await events.write(b": live\n\n")
    number = 0
    while True:
        last, found = await samples.after(number)
        if not found:
            break
        first = last - len(found) + 1
        # Numbers, not places in the list, so that an interval goes on where the last write ended.
        due = [sample for at, sample in enumerate(found, first) if at % interval == 0]
        number = last
        if due:
            await events.write(b"".join(event(sample) for sample in due))
    await events.end()
    return events.response


async def sampling(app: web.Application) -> AsyncIterator[None]:
    """Take samples while the application runs."""
    task = asyncio.create_task(app[NODE].live.run())
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def end_streams(app: web.Application) -> None:
    """Let the open streams end: nobody waits for a page when the node stops."""
    app[NODE].live.close()


def _interval(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 4 and 1 <= int(text) <= MOST_INTERVAL_S:
        return int(text)
    raise InvalidRequest(
        f"interval: must be a whole number from 1 to {MOST_INTERVAL_S}, not {text!r}", "interval"
    )
