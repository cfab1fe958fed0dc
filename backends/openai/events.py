"""What a stream of server-sent events says about itself, read from its bytes as they pass.

Nothing is decoded on the way: a few searches for literals find where events end, that a choice
finished, and how the stream ended. Only an event that looks like an error is decoded, to be sure,
and the last `usage` object, when somebody asks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, Final

from draftgate.backends.base import TokenUsage

MOST_EVENT_BYTES: Final = 4 << 20
"""Longer events end the stream: what has no end must not fill memory. A chunk with 20 alternatives
for each of 500 tokens has 1 MB."""

# A line ends with CRLF, LF or CR; an event with an empty line. Whether a CR at the end of what has
# come is half a CRLF, the next byte tells.
_LINE_END: Final = rb"(?:\r\n|\n|\r(?=[^\n]))"
_DECIDED_LINE_END: Final = rb"(?:\r\n|\n|\r(?!\n))"
_BOUNDARY: Final = re.compile(rb"(?:\A|%s)%s+" % (_LINE_END, _LINE_END))
_EVENT: Final = re.compile(rb"%s|[^\r\n](?s:.)*?%s{2}" % (_DECIDED_LINE_END, _DECIDED_LINE_END))
_NEWLINE: Final = ord("\n")
_FINISH: Final = re.compile(rb'"finish_reason"\s*:\s*"')
_USAGE: Final = re.compile(rb'"usage"\s*:\s*(?=\{)')


class StreamEnding(StrEnum):
    """How a stream ended in its own words."""

    DONE = "done"
    """`[DONE]`, behind a finish reason."""
    ERROR = "error"
    """An error event of the upstream's own."""
    UNFINISHED = "unfinished"
    """`[DONE]`, but no choice had finished: a cut that looks like an end."""


class EventScan:
    """Follows one stream; `feed` gets its bytes in any pieces and returns what may pass.

    Attributes:
        ending: how it ended; None while it goes on. Nothing passes behind it.
        outputs: data events that passed, but for `[DONE]`.
        finished: finish reasons that passed.
    """

    def __init__(self) -> None:
        """Begin before the first byte."""
        self.ending: StreamEnding | None = None
        self.outputs = 0
        self.finished = 0
        self._held = b""
        self._usage = b""

    def feed(self, block: bytes) -> bytes:
        """Return the events that are complete now, as they came; the rest waits for its end.

        Raises:
            ValueError: an event exceeds `MOST_EVENT_BYTES`.
        """
        if self.ending is not None:
            return b""
        whole = self._complete(block)
        if len(self._held) > MOST_EVENT_BYTES:
            raise ValueError(f"an event exceeds {MOST_EVENT_BYTES} bytes")
        if not whole:
            return b""
        if b"[DONE]" in whole or b'"error"' in whole:
            return self._up_to_ending(whole)
        self._observe(whole)
        return whole

    def usage(self) -> TokenUsage | None:
        """Return the tokens of the last `usage` object that passed, or None without one."""
        return usage_in(self._usage)

    def _complete(self, block: bytes) -> bytes:
        if not self._held and block.endswith((b"\n\n", b"\r\n\r\n")):
            return block  # which is how servers write
        held = len(self._held)
        pending = self._held + block
        end = _last_boundary(pending, max(0, held - 3))
        self._held = pending[end:]
        return pending[:end]

    def _up_to_ending(self, whole: bytes) -> bytes:
        """Look at each event; return those up to the one that ends the stream."""
        begin = 0
        for end in _event_ends(whole):
            event = whole[begin:end]
            ending = self._ending_of(event)
            if ending is not None:
                self.ending, self._held = ending, b""
                return whole[: begin if ending is StreamEnding.UNFINISHED else end]
            self._observe(event)
            begin = end
        return whole

    def _observe(self, events: bytes) -> None:
        self.outputs += sum(1 for _ in _data_lines(events)) if b"\r" in events else _lines(events)
        self.finished += len(_FINISH.findall(events))
        if b'"usage"' in events and _USAGE.search(events):
            self._usage = events

    def _ending_of(self, event: bytes) -> StreamEnding | None:
        data = b"\n".join(_data_lines(event))
        if data.strip() == b"[DONE]":
            return StreamEnding.DONE if self.finished else StreamEnding.UNFINISHED
        if b'"error"' in data and _has_error(data):
            return StreamEnding.ERROR
        return None


def usage_in(text: bytes) -> TokenUsage | None:
    """Return the tokens of the last `"usage": {...}` in JSON, whose beginning may be missing.

    A string cannot be mistaken for it: quotation marks inside of strings are escaped.
    """
    found = list(_USAGE.finditer(text))
    if not found:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(text[found[-1].end() :].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    details = value.get("prompt_tokens_details")
    return TokenUsage(
        _count(value.get("prompt_tokens")),
        _count(details.get("cached_tokens")) if isinstance(details, dict) else 0,
        _count(value.get("completion_tokens")),
    )


def _last_boundary(pending: bytes, begin: int) -> int:
    """Return where the last complete event ends, 0 without one; none ends before `begin`."""
    if b"\r" not in pending:  # a search for literals reads 50 times as fast as the pattern
        found = pending.rfind(b"\n\n", begin)
        return found + 2 if found >= 0 else len(pending) - len(pending.lstrip(b"\n"))
    ends = [match.end() for match in _BOUNDARY.finditer(pending, begin)]
    return ends[-1] if ends else 0


def _event_ends(whole: bytes) -> Iterator[int]:
    """Yield where each of some complete events ends, and each run of empty lines between them."""
    if b"\r" in whole:
        yield from (match.end() for match in _EVENT.finditer(whole))
        return
    end = 0
    while end < len(whole):
        if whole[end] == _NEWLINE:
            end += 1
        else:
            end = whole.index(b"\n\n", end) + 2
        yield end


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _lines(events: bytes) -> int:
    """Count the data lines of events whose lines end with LF."""
    return events.count(b"\ndata:") + events.startswith(b"data:")


def _data_lines(events: bytes) -> Iterator[bytes]:
    for line in re.split(rb"\r\n|\n|\r", events):
        if line.startswith(b"data:"):
            yield line[5:].removeprefix(b" ")


def _has_error(data: bytes) -> bool:
    """Whether it is an object with an error at its top."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("error") is not None
