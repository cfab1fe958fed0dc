"""Bodies with a `Content-Encoding`, decoded in slices, because a small body may be a huge one."""

from __future__ import annotations

import zlib
from typing import Final

ENCODINGS: Final = ("gzip", "deflate")

SLICE_BYTES: Final = 64 << 10
"""Maximum input and output of one call of the decoder. A slice takes 0.1 to 0.3 ms, and no callback
may hold the event loop for longer than 5 ms. (AMD Zen 4, busy machine, 2026-11-28.)"""

MOST_MEMBERS: Final = 1024
"""Maximum gzip members of a body. An empty member has 20 bytes, and each takes a turn of the event
loop. Programs that compress in blocks write a member for 64 KiB or more. (Chosen, not tuned.)"""

_GZIP_MAGIC: Final = b"\x1f\x8b"


class CompressionError(ValueError):
    """A body that does not have its encoding. The message is about "the body"."""


class BodyDecoder:
    """The decoder of one body. Each call of `decode` takes a short time."""

    def __init__(self, encoding: str, *, lenient: bool = False) -> None:
        """Begin a body.

        Args:
            encoding: one of `ENCODINGS`.
            lenient: whether a body may have any number of members, and bytes after its end.
        """
        self._encoding = encoding
        self._lenient = lenient
        self._stream: zlib._Decompress | None = None
        self._members = 0
        self._input = memoryview(b"")
        self._may_have_output = False

    @property
    def pending(self) -> bool:
        """Whether `decode` has something to do."""
        return bool(self._input) or self._may_have_output

    def add(self, data: bytes) -> None:
        """Add encoded bytes."""
        self._input = memoryview(bytes(self._input) + data if self._input else data)

    def decode(self, most_bytes: int) -> bytes:
        """Decode the next slice, and return at most `most_bytes` and `SLICE_BYTES` bytes.

        Raises:
            CompressionError: the bytes do not have this encoding.
        """
        most = min(most_bytes, SLICE_BYTES)
        data = self._input[:SLICE_BYTES]
        stream = self._stream or self._next_stream(data)
        if stream is None:
            self._input = memoryview(b"")
            return b""
        try:
            decoded = stream.decompress(data, most)
        except zlib.error:
            raise CompressionError(f"the body is not valid {self._encoding}") from None
        left = len(stream.unused_data if stream.eof else stream.unconsumed_tail)
        self._input = self._input[len(data) - left :]
        self._stream = None if stream.eof else stream
        self._may_have_output = not stream.eof and len(decoded) == most
        return decoded

    def finish(self) -> None:
        """Check that the body is complete. An empty body is.

        Raises:
            CompressionError: the body breaks off.
        """
        if self._stream is not None:
            raise CompressionError(f"the body breaks off before the end of its {self._encoding}")

    def _next_stream(self, data: memoryview) -> zlib._Decompress | None:
        """Return the decoder of the body, or of the next member of a gzip body.

        Returns:
            None if the bytes follow the end of the body, and are to be ignored.

        Raises:
            CompressionError: the body has too many members, or bytes after its end.
        """
        self._members += 1
        if self._encoding == "gzip":
            if self._members > 1 and self._lenient and data[:2] != _GZIP_MAGIC[: len(data)]:
                return None
            if self._members > MOST_MEMBERS and not self._lenient:
                raise CompressionError(f"the body has more than {MOST_MEMBERS} gzip members")
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        if self._members > 1:
            if self._lenient:
                return None
            raise CompressionError("the body has bytes after the end of its deflate")
        # Some programs omit zlib's header (RFC 9110, 8.4.1.2).
        has_header = data[0] & 0xF == 8
        return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)
