"""The decoding of compressed bodies in slices, because a small body may become a huge one."""

from __future__ import annotations

import zlib
from typing import Any, Final

from draftgate.backends.connection_errors import ConnectionFailed

CODINGS: Final = frozenset({b"gzip", b"x-gzip", b"deflate"})
"""The codings that some upstreams use although `Accept-Encoding` does not allow them."""

_ANY_HEADER: Final = 32 + zlib.MAX_WBITS
_NO_HEADER: Final = -zlib.MAX_WBITS
_GZIP_HEADER: Final = b"\x1f\x8b"


class BodyDecoder:
    """Decodes a body as its reader takes it."""

    def __init__(self, coding: bytes) -> None:
        """Begin a body.

        Args:
            coding: one of `CODINGS`.
        """
        self._may_lack_header = coding == b"deflate"
        self._decoder: Any = zlib.decompressobj(_ANY_HEADER)
        self._held = b""
        self._has_begun = self._has_more = False

    @property
    def waits(self) -> bool:
        """Whether `take` may return further bytes now."""
        return self._held != b"" or self._has_more

    def add(self, block: bytes) -> None:
        """Receive bytes of the body."""
        self._held = self._held + block if self._held else block

    def take(self, most_bytes: int) -> bytes:
        """Decode received bytes, and return at most some of the decoded bytes.

        Raises:
            ConnectionFailed: the body is not compressed as its header says.
        """
        held, self._held = self._held, b""
        try:
            found = self._decompress(held, most_bytes)
        except zlib.error:
            raise ConnectionFailed("its response cannot be read (compression)") from None
        decoder = self._decoder
        self._has_begun = True
        self._has_more = len(found) == most_bytes  # the decoder itself may hold bytes back
        self._held = decoder.unconsumed_tail
        if decoder.eof and decoder.unused_data.startswith(_GZIP_HEADER):
            # A body may consist of several parts (RFC 1952, section 2.2).
            self._held, self._decoder = decoder.unused_data, zlib.decompressobj(_ANY_HEADER)
        return found

    def check_end(self) -> None:
        """Check that the body is complete.

        Raises:
            ConnectionFailed: its end is missing.
        """
        if self._has_begun and not self._decoder.eof:
            raise ConnectionFailed("the compressed body is incomplete")

    def _decompress(self, held: bytes, most_bytes: int) -> bytes:
        try:
            found: bytes = self._decoder.decompress(held, most_bytes)
        except zlib.error:
            if self._has_begun or not self._may_lack_header:
                raise
            # Some servers send `deflate` without the header of RFC 9110, section 8.4.1.2.
            self._decoder = zlib.decompressobj(_NO_HEADER)
            found = self._decoder.decompress(held, most_bytes)
        return found
