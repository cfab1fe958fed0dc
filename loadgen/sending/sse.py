"""An incremental parser of server-sent events. Performs no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_LINE_END: Final = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SseEvent:
    """An event: its joined data lines, not decoded, and its type."""

    data: bytes
    event: str = "message"


class SseParser:
    """Splits a stream of bytes into events, as the HTML standard defines them.

    The boundaries of chunks do not matter. The parser drops an event without its final blank line.
    """

    def __init__(self) -> None:
        self._rest = b""  # the incomplete last line
        self._after_cr = False  # whether a line feed now would belong to the previous line end
        self._first_line = True
        self._data: list[bytes] = []
        self._event = ""

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Return the events that this chunk completes."""
        if not chunk:
            return []
        if self._after_cr and chunk.startswith(b"\n"):
            chunk = chunk[1:]
        self._after_cr = chunk.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> SseEvent | None:
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._event = value.decode("utf-8", errors="replace")
        return None  # Comments, ids, retry times and unknown fields are ignored.

    def _dispatch(self) -> SseEvent | None:
        data, event = self._data, self._event
        self._data, self._event = [], ""
        return SseEvent(b"\n".join(data), event or "message") if data else None
