"""Logs, with one line per event and never the text of a prompt.

Every line that is logged during a request has the id and the trace of that request
(`AboutRequest`). Callers of `log` need not pass them.

The event loop formats and writes the lines of `FLUSH_S` seconds together. A warning or an error is
written at once, after the lines before it, and so is every line without an event loop. The last
lines are written when the process exits. They are lost if it is killed or crashes in C code.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Final, TextIO

from draftgate.policies.values import immutable

LOGGER: Final = "draftgate"
_FIELDS: Final = "draftgate_fields"
_LINE_BREAK: Final = ord("\n")

FLUSH_S: Final = 0.1
"""The longest time in seconds for which a line waits for others. (Chosen, not tuned.)"""

_OTHERS: Final = ("aiohttp", "asyncio", "opentelemetry")
"""Libraries whose warnings are also logged, such as the exporter of traces."""

_logger: Final = logging.getLogger(LOGGER)

is_logged: Final = _logger.isEnabledFor
"""Returns whether events of a level are logged."""

_REQUEST: Final[ContextVar[dict[str, object] | None]] = ContextVar("request", default=None)


@immutable
class Line:
    """An event with its fields and its error, if any."""

    level: int
    event: str
    fields: Mapping[str, object]
    created_s: float
    error: BaseException | None = None


class LineFormatter(logging.Formatter):
    """A formatter of lines such as `2026-01-31T12:00:00.123Z INFO request id=... status=200`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, followed by its traceback, if any."""
        return self.line(_line(record))

    def line(self, line: Line) -> str:
        """Return a line, followed by the traceback of its error, if any."""
        level, event, error = line.level, line.event, line.error
        parts = [_moment(line.created_s), logging.getLevelName(level), " ".join(event.split())]
        for key, value in line.fields.items():
            if value is None:
                continue
            kind = type(value)
            if kind is float:
                parts.append(f"{key}={value:.6g}")
            elif kind is int:
                parts.append(f"{key}={value}")
            else:
                parts.append(f"{key}={_quoted(str(value))}")
        text = " ".join(parts)
        return text if error is None else f"{text}\n{_traceback(error)}"


class JsonFormatter(LineFormatter):
    """A formatter of JSON such as `{"time": "...", "level": "INFO", "event": "request"}`."""

    def line(self, line: Line) -> str:
        """Return the object on one line, with the traceback of its error as `traceback`, if any."""
        shown = {
            **{key: _json_value(one) for key, one in line.fields.items() if one is not None},
            "time": _moment(line.created_s),
            "level": logging.getLevelName(line.level),
            "event": line.event,
        }
        if line.error is not None:
            shown["traceback"] = _traceback(line.error)
        return json.dumps(shown)


class LineHandler(logging.StreamHandler[TextIO]):
    """A handler that writes the lines of a moment together.

    Each event begins on a line of its own, also after the disk was full. A full disk or a full pipe
    may cut a line. The rest of it is lost, and the next line would continue the part.
    """

    def __init__(self, stream: TextIO, formatter: LineFormatter) -> None:
        super().__init__(stream)
        self.setFormatter(formatter)
        self._formatter = formatter
        self._cut = False
        self._waiting = deque[Line]()  # several threads may add and take lines
        self._timed: asyncio.AbstractEventLoop | None = None  # the loop that will flush
        try:
            self._descriptor: int | None = stream.fileno()
        except OSError:  # such as the streams of tests
            self._descriptor = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record of a library, as `add` does."""
        self.add(_line(record))

    def add(self, line: Line) -> None:
        """Write a line soon, or at once if it is a warning or no event loop runs in this thread."""
        self._waiting.append(line)
        loop: asyncio.AbstractEventLoop | None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            loop = None
        if loop is None or line.level >= logging.WARNING:
            self.flush()
        elif loop is not self._timed:
            self._timed = loop
            loop.call_later(FLUSH_S, self._due)

    def flush(self) -> None:
        """Write the lines that wait, or drop what cannot be written."""
        assert self.lock is not None
        with self.lock:
            waiting, line = self._waiting, self._formatter.line
            if waiting:
                lines = [line(waiting.popleft()) + "\n" for _ in range(len(waiting))]
                self._write("".join(lines))

    def _due(self) -> None:
        self._timed = None
        self.flush()

    def _write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the stream may be closed
            if self._descriptor is None:
                self.stream.write(text)
                return
            data = text.encode(errors="backslashreplace")
            self.stream.flush()
            rest = memoryview(b"\n" + data if self._cut else data)
            while rest:
                written = os.write(self._descriptor, rest)
                self._cut = rest[written - 1] != _LINE_BREAK
                rest = rest[written:]


FORMATTERS: Final = {"line": LineFormatter, "json": JsonFormatter}


def configure(level: str, form: str = "line") -> None:
    """Log to stderr.

    Libraries log only warnings and errors.

    Args:
        level: minimum level of Draftgate's own lines.
        form: one of the `FORMATTERS`.
    """
    handler = LineHandler(sys.stderr, FORMATTERS[form]())
    for name in (LOGGER, *_OTHERS):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == LOGGER else logging.WARNING)


class AboutRequest:
    """A context that adds fields to every line that its block and its tasks log."""

    def __init__(self, **fields: object) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        self._token = _REQUEST.set(self._fields)

    def __exit__(self, *_: object) -> None:
        _REQUEST.reset(self._token)


def log_about_request(**fields: object) -> None:
    """Add fields to every line that the present context logs, which has only one request."""
    _REQUEST.set(fields)


def add_about_request(**fields: object) -> None:
    """Add further fields to the lines of the current request, if any."""
    known = _REQUEST.get()
    if known is not None:
        known.update(fields)


def flush() -> None:
    """Write the lines that wait for others, such as before other output."""
    for handler in _logger.handlers:
        handler.flush()


def log(level: int, event: str, *, error: BaseException | None = None, **fields: object) -> None:
    """Log an event with its fields, except fields that are None."""
    if is_logged(level):
        log_fields(level, event, fields, error)


def log_fields(
    level: int, event: str, fields: Mapping[str, object], error: BaseException | None = None
) -> None:
    """Log an event of a level that `is_logged`, as `log` does."""
    if known := _REQUEST.get():
        fields = {**known, **fields}
    handlers = _logger.handlers
    if handlers and type(handler := handlers[0]) is LineHandler:
        # A record of the logging module would cost more than the line.
        handler.add(Line(level, event, fields, time.time(), error))
        return
    info = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord(LOGGER, level, "", 0, event, (), info)
    record.__dict__[_FIELDS] = fields
    _logger.handle(record)


def _line(record: logging.LogRecord) -> Line:
    fields, error = getattr(record, _FIELDS, {}), record.exc_info and record.exc_info[1]
    return Line(record.levelno, record.getMessage(), fields, record.created, error)


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip("\n")


def _moment(at_s: float) -> str:
    seconds, milliseconds = divmod(int(at_s * 1000), 1000)
    return f"{_second(seconds)}.{milliseconds:03d}Z"


@lru_cache(maxsize=4)
def _second(at_s: int) -> str:
    """Return a second in UTC, which the lines of the second share."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at_s))


def _json_value(value: object) -> object:
    """Return a value that JSON can represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, str | int) else str(value)


@lru_cache(maxsize=256)  # most lines have the same endpoints, workers and tenants
def _quoted(text: str) -> str:
    """Return a value, with quotes if it needs them."""
    if _is_plain(text):
        return text
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'


def _is_plain(text: str) -> bool:
    """Return whether a text needs no quotes."""
    # Spaces are the only printable whitespace.
    printable = text != "" and text.isprintable()
    return printable and not (" " in text or '"' in text or "=" in text)
