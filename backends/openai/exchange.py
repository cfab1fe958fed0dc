"""A response of an upstream: its bytes, its ending, and the times of its output."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from draftgate.backends.base import CallTranslation, TokenUsage
from draftgate.backends.connection_errors import public_reason
from draftgate.backends.errors import UpstreamFailed
from draftgate.backends.openai.connection import Response
from draftgate.backends.openai.events import (
    EVENT_STREAM,
    EventScan,
    StreamEnding,
    drafts_in,
    usage_in,
    whole_usage,
)
from draftgate.backends.types import SpeculationOutcome

LAST_BYTES_S: Final = 0.25
"""Seconds to wait for the end of the body after `[DONE]`. Without it, the connection is closed."""

_KEPT_BYTES: Final = 16 << 10
"""Number of bytes kept from each end of a long response. One of them contains `usage`, which
follows the outputs of a model, and precedes the documents of a rerank request."""


def with_values(body: bytes, changed: Mapping[str, str | int]) -> bytes:
    """Return a JSON object with some values changed and all others as received.

    Raises:
        ValueError, RecursionError: the body is not a JSON object.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, **changed})


class HttpExchange:
    """Implements `Exchange` with a response.

    Attributes:
        scan: scan of the events, or None without a stream.
        first_s, last_s: times of the first and the last output of a stream, by the clock.
        translation: None, unless it is a `TranslatedExchange`.
    """

    translation: CallTranslation | None = None

    __slots__ = (
        "_clock", "_end", "_head", "_response", "_tail", "_usage", "body", "first_s", "headers",
        "last_s", "scan", "status", "streaming",
    )  # fmt: skip

    def __init__(
        self,
        response: Response,
        clock: Callable[[], float],
        end: Callable[[HttpExchange], None],
    ) -> None:
        """Use a response of which nothing has been read.

        Args:
            end: a function that is called once at the end.
        """
        self.status = response.status
        head = response.head
        self.headers = head.headers
        is_stream = head.content_type == EVENT_STREAM
        self.streaming = is_stream and response.status == 200
        self.scan = EventScan() if self.streaming else None
        self.body = None if self.streaming else response.body
        self.first_s: float | None = None
        self.last_s = 0.0
        self._response = response
        self._clock = clock
        self._end: Callable[[HttpExchange], None] | None = end
        self._head = b""
        self._tail = self.body or b""
        self._usage: TokenUsage | None = None  # of the blocks so far, once computed

    @property
    def outputs(self) -> int:
        """Number of events with output so far."""
        return 0 if self.scan is None else self.scan.outputs

    @property
    def error_sent(self) -> bool:
        """Whether the stream ended with an error event of the upstream."""
        return self.scan is not None and self.scan.ending is StreamEnding.ERROR

    def usage(self) -> TokenUsage:
        """Return the token counts so far."""
        if self._usage is None:
            if self.scan is not None:
                found = self.scan.usage()
            else:
                found = None if self.body is None else whole_usage(self.body)
                found = found or usage_in(self._tail) or usage_in(self._head)
            self._usage = found or TokenUsage(0, 0, self.outputs)
        return self._usage

    def drafts(self) -> SpeculationOutcome | None:
        """Return the drafts that the upstream reports, or None."""
        return drafts_in(self._tail) if self.scan is None else self.scan.drafts()

    async def read(self) -> bytes:
        """Return the next bytes of the body, or nothing at its end."""
        scan = self.scan
        try:
            while scan is None or scan.ending is None:
                block = await self._response.read_any()
                if not block:
                    break
                self._usage = None
                if scan is None:
                    self._head += block[: _KEPT_BYTES - len(self._head)]
                    self._tail = (self._tail + block)[-_KEPT_BYTES:]
                    return block
                passing = self._passing(scan, block)
                if passing:
                    return passing
        except OSError as error:
            raise UpstreamFailed(f"the response was interrupted: {public_reason(error)}") from error
        if scan is not None:
            scan.close()
            if scan.ending is None:
                raise UpstreamFailed("the stream ended without [DONE]")
            if scan.ending is StreamEnding.UNFINISHED:
                raise UpstreamFailed("the stream ended before its choices had finished")
        return b""

    async def finish(self) -> None:
        """Read the end of the body, so that the connection can be reused, and close."""
        try:
            if not self._response.is_complete and self.scan is not None and self.scan.ending:
                with suppress(OSError):  # TimeoutError is one
                    async with asyncio.timeout(LAST_BYTES_S):
                        await self._response.read_any()
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the rest of the response."""
        end, self._end = self._end, None
        if end is not None:
            if not self._response.is_complete:
                self._response.close()
            end(self)

    def _passing(self, scan: EventScan, block: bytes) -> bytes:
        try:
            passing = scan.feed(block)
        except ValueError as error:
            raise UpstreamFailed(str(error)) from error
        if scan.outputs:  # and not only comments
            self.last_s = self._clock()
            if self.first_s is None:
                self.first_s = self.last_s
        return passing


class TranslatedExchange(HttpExchange):
    """An exchange whose stream consists of the events of the client's API.

    The receiver of a whole response converts it.
    """

    __slots__ = ("_has_ended", "_translated")

    def __init__(
        self,
        response: Response,
        clock: Callable[[], float],
        end: Callable[[HttpExchange], None],
        translation: CallTranslation,
    ) -> None:
        """Use a response to a translated request, as `HttpExchange` does."""
        super().__init__(response, clock, end)
        self._translated = translation
        self._has_ended = False

    @property
    def translation(self) -> CallTranslation:  # type: ignore[override]
        """The translation of the request, which the upstream got."""
        return self._translated

    async def read(self) -> bytes:
        """Return the next bytes of the body, or nothing at its end."""
        while block := await super().read():
            if self.scan is None:
                return block
            if events := self._translated.read_events(block):
                return events
        if self.scan is None or self._has_ended:
            return b""
        self._has_ended = True
        return self._translated.end_events()
