"""Bodies of requests with a `Content-Encoding`, decoded in slices.

aiohttp can decode a body while it parses the request. It would then decode the bodies of requests
that are refused, and hold the event loop for gigabytes of output from a few megabytes of input. The
parser of a connection therefore decodes nothing. A handler that has admitted a request decodes its
body, up to the limit of a body.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import Final

from aiohttp import web
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy

from draftgate.gateway.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding

ENCODINGS: Final = ("gzip", "deflate")

SLICE_BYTES: Final = 64 << 10
"""Maximum input and output of one call of the decoder. A slice takes 0.1 to 0.3 ms, and no callback
may hold the event loop for longer than 5 ms. (AMD Zen 4, busy machine, 2026-11-28.)"""

MOST_MEMBERS: Final = 1024
"""Maximum gzip members of a body. An empty member has 20 bytes, and each takes a turn of the event
loop. Programs that compress in blocks write a member for 64 KiB or more. (Chosen, not tuned.)"""

DECODING: Final = web.AppKey("decoding", asyncio.Lock)
"""A lock that all bodies share, so that one turn of the event loop decodes one slice."""

Headers = CIMultiDict[str] | CIMultiDictProxy[str]


class BodyDecoder:
    """The decoder of one body. Each call of `decode` takes a short time."""

    def __init__(self, encoding: str) -> None:
        """Begin a body.

        Args:
            encoding: one of `ENCODINGS`.
        """
        self._encoding = encoding
        self._stream: zlib._Decompress | None = None
        self._members = 0
        self._input = memoryview(b"")
        self._may_have_output = False

    @property
    def pending(self) -> bool:
        """Whether `decode` has something to do."""
        return bool(self._input) or self._may_have_output

    def add(self, data: bytes) -> None:
        """Add encoded bytes, after all earlier ones have been decoded."""
        self._input = memoryview(data)

    def decode(self, most_bytes: int) -> bytes:
        """Decode the next slice, and return at most `most_bytes` and `SLICE_BYTES` bytes.

        Raises:
            InvalidRequest: the bytes do not have this encoding.
        """
        most = min(most_bytes, SLICE_BYTES)
        data = self._input[:SLICE_BYTES]
        stream = self._stream or self._next_stream(data)
        try:
            decoded = stream.decompress(data, most)
        except zlib.error:
            raise InvalidRequest(f"the body is not valid {self._encoding}") from None
        left = len(stream.unused_data if stream.eof else stream.unconsumed_tail)
        self._input = self._input[len(data) - left :]
        self._stream = None if stream.eof else stream
        self._may_have_output = not stream.eof and len(decoded) == most
        return decoded

    def finish(self) -> None:
        """Check that the body is complete.

        Raises:
            InvalidRequest: the body breaks off.
        """
        if self._stream is not None:
            raise InvalidRequest(f"the body breaks off before the end of its {self._encoding}")

    def _next_stream(self, data: memoryview) -> zlib._Decompress:
        """Return the decoder of the body, or of the next member of a gzip body.

        Raises:
            InvalidRequest: the body has too many members, or bytes after its end.
        """
        self._members += 1
        if self._encoding == "gzip":
            if self._members > MOST_MEMBERS:
                raise InvalidRequest(f"the body has more than {MOST_MEMBERS} gzip members")
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        if self._members > 1:
            raise InvalidRequest("the body has bytes after the end of its deflate")
        # Some clients omit zlib's header (RFC 9110, 8.4.1.2).
        has_header = data[0] & 0xF == 8
        return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


def body_encoding(headers: Headers) -> str | None:
    """Return the encoding of a body, or None if the body is sent as it is.

    Raises:
        UnsupportedEncoding: the encoding is unknown, or the body was encoded several times.
    """
    names = [
        name.strip().lower()
        for value in headers.getall("Content-Encoding", ())
        for name in value.split(",")
    ]
    encodings = [name for name in names if name not in {"", "identity"}]
    if not encodings:
        return None
    if len(encodings) > 1:
        raise UnsupportedEncoding("the body has several encodings; use one of them", ENCODINGS)
    encoding = "gzip" if encodings[0] == "x-gzip" else encodings[0]
    if encoding not in ENCODINGS:
        sent = f"the Content-Encoding {encodings[0]!r} is not supported"
        raise UnsupportedEncoding(f"{sent}; use {' or '.join(ENCODINGS)}", ENCODINGS)
    return encoding


async def read_decoded(
    content: StreamReader, encoding: str, most_bytes: int, turns: asyncio.Lock
) -> bytes:
    """Read and decode a body.

    Args:
        most_bytes: the maximum size of a body, encoded and decoded.
        turns: the lock of all bodies of the application.

    Raises:
        BodyTooLarge: the body exceeds the maximum. At most one byte more was decoded.
        InvalidRequest: the body does not have this encoding.
    """
    decoder, body, received = BodyDecoder(encoding), bytearray(), 0
    while data := await content.readany():
        received += len(data)
        if received > most_bytes:
            raise BodyTooLarge(most_bytes)
        decoder.add(data)
        while decoder.pending:
            async with turns:
                body += decoder.decode(most_bytes + 1 - len(body))
                await asyncio.sleep(0)
            if len(body) > most_bytes:
                raise BodyTooLarge(most_bytes)
    decoder.finish()
    return bytes(body)
