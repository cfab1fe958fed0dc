"""Bodies of requests with a `Content-Encoding`, decoded in slices.

aiohttp can decode a body while it parses the request. It would then decode the bodies of requests
that are refused, and hold the event loop for gigabytes of output from a few megabytes of input. The
parser of a connection therefore decodes nothing. A handler that has admitted a request decodes its
body, up to the limit of a body.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web
from aiohttp.streams import StreamReader
from multidict import CIMultiDict, CIMultiDictProxy

from draftgate.compressed import ENCODINGS, BodyDecoder, CompressionError
from draftgate.gateway.errors import BodyTooLarge, InvalidRequest, UnsupportedEncoding

DECODING: Final = web.AppKey("decoding", asyncio.Lock)
"""A lock that all bodies share, so that one turn of the event loop decodes one slice."""

Headers = CIMultiDict[str] | CIMultiDictProxy[str]


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
    try:
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
    except CompressionError as error:
        raise InvalidRequest(str(error)) from None
    return bytes(body)
