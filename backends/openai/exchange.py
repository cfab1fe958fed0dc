"""A response of an upstream: its bytes, its ending, and the times of its output."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Final

from multidict import CIMultiDict

from draftgate.backends.base import TokenUsage
from draftgate.backends.connection_errors import public_reason
from draftgate.backends.errors import UpstreamFailed
from draftgate.backends.openai.connection import Response
from draftgate.backends.openai.events import EventScan, StreamEnding, usage_in

_KEPT_BYTES: Final = 16 << 10
"""Number of bytes kept from each end of a complete response. One of them contains `usage`, which
follows the outputs of a model, and precedes the documents of a rerank request."""

_NOT_PASSED_ON: Final = frozenset({
    # of the connection (RFC 9110, section 7.6.1), or set by the gateway itself
    "connection", "keep-alive", "proxy-authenticate", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "content-length", "date", "server",
    # the body is decoded
    "content-encoding",
    "set-cookie",
})  # fmt: skip


class HttpExchange:
    """Implements `Exchange` with a response.

    Attributes:
        scan: scan of the events, if the response is a stream.
        first_s, last_s: times of the first and the last output of a stream, by the clock.
    """

    def __init__(self, response: Response, clock: Callable[[], float]) -> None:
        """Use a response of which only the head has been read."""
        self.status = response.status
        self.headers: Mapping[str, str] = CIMultiDict(
            (name, value)
            for name, value in response.headers.items()
            if not _belongs_to_upstream(name.lower())
        )
        self.streaming = response.status == 200 and response.content_type == "text/event-stream"
        self.scan = EventScan()
        self.first_s: float | None = None
        self.last_s = 0.0
        self._response = response
        self._clock = clock
        self._head = self._tail = b""
        self._usage: TokenUsage | None = None  # of the blocks so far, once computed

    @property
    def outputs(self) -> int:
        """Number of events with output so far."""
        return self.scan.outputs

    @property
    def error_sent(self) -> bool:
        """Whether the stream ended with an error event of the upstream."""
        return self.scan.ending is StreamEnding.ERROR

    def usage(self) -> TokenUsage:
        """Return the token counts so far."""
        if self._usage is None:
            whole = usage_in(self._tail) or usage_in(self._head)
            found = self.scan.usage() if self.streaming else whole
            self._usage = found or TokenUsage(0, 0, self.scan.outputs)
        return self._usage

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """Yield the body as it arrives."""
        try:
            while block := await self._response.read_any():
                passing = self._passing(block)
                if passing:
                    yield passing
                if self.scan.ending is not None:
                    break
        except OSError as error:
            raise UpstreamFailed(f"the response was interrupted: {public_reason(error)}") from error
        self.scan.close()
        if self.streaming and self.scan.ending is None:
            raise UpstreamFailed("the stream ended without [DONE]")
        if self.scan.ending is StreamEnding.UNFINISHED:
            raise UpstreamFailed("the stream ended before any choice had finished")

    @property
    def has_rest(self) -> bool:
        """Whether the end of the body after `[DONE]` has not been read."""
        return self.scan.ending is not None and not self._response.is_complete

    async def finish(self) -> None:
        """Read the end of the body, so that the connection can be reused."""
        await self._response.read_any()

    def _passing(self, block: bytes) -> bytes:
        self._usage = None
        if not self.streaming:
            self._head += block[: _KEPT_BYTES - len(self._head)]
            self._tail = (self._tail + block)[-_KEPT_BYTES:]
            return block
        try:
            passing = self.scan.feed(block)
        except ValueError as error:
            raise UpstreamFailed(str(error)) from error
        if self.scan.outputs:  # and not only comments
            self.last_s = self._clock()
            if self.first_s is None:
                self.first_s = self.last_s
        return passing


def _belongs_to_upstream(name: str) -> bool:
    """Return whether a header of a response is not for the client of this node.

    The node decides itself which pages may read its responses.
    """
    return name in _NOT_PASSED_ON or name.startswith("access-control-")
