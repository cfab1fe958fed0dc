"""Logs, with one line per event and never the text of a prompt.

Every line that is logged during a request has the id and the trace of that request
(`AboutRequest`). Callers of `log` need not pass them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final, TextIO

LOGGER: Final = "draftgate"
_FIELDS: Final = "draftgate_fields"
_LINE_BREAK: Final = ord("\n")

_OTHERS: Final = ("aiohttp", "asyncio", "opentelemetry")
"""Libraries whose warnings are also logged, such as the exporter of traces."""

_logger: Final = logging.getLogger(LOGGER)

_REQUEST: Final[ContextVar[dict[str, object] | None]] = ContextVar("request", default=None)


class LineFormatter(logging.Formatter):
    """A formatter of lines such as `2026-01-31T12:00:00.123Z INFO request id=... status=200`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the traceback if the record has one."""
        pairs = [f"{key}={_quoted(value)}" for key, value in _fields(record).items()]
        event = " ".join(record.getMessage().split())
        line = " ".join([_moment(record), record.levelname, event, *pairs])
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """A formatter of JSON such as `{"time": "...", "level": "INFO", "event": "request"}`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object on one line, with the record's traceback as `traceback`, if any."""
        fields = {
            **{key: _plain(value) for key, value in _fields(record).items()},
            "time": _moment(record),
            "level": record.levelname,
            "event": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class LineHandler(logging.StreamHandler[TextIO]):
    """A handler that begins each event on a line of its own, also after the disk was full.

    A full disk or a full pipe may cut a line. The rest of it is lost, and the next line would
    continue the part.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._cut = False
        try:
            self._descriptor: int | None = stream.fileno()
        except OSError:  # such as the streams of tests
            self._descriptor = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or drop what cannot be written."""
        if self._descriptor is None:
            super().emit(record)
            return
        data = (self.format(record) + self.terminator).encode(errors="backslashreplace")
        with suppress(OSError, ValueError):  # the stream may be closed
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
    handler = LineHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[form]())
    for name in (LOGGER, *_OTHERS):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == LOGGER else logging.WARNING)
    # No line shows the thread or the process, which a record would otherwise look up.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False


class AboutRequest:
    """A context that adds fields to every line that its block and its tasks log."""

    def __init__(self, **fields: object) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        self._token = _REQUEST.set(self._fields)

    def __exit__(self, *_: object) -> None:
        _REQUEST.reset(self._token)


def add_about_request(**fields: object) -> None:
    """Add further fields to the lines of the current request, if any."""
    known = _REQUEST.get()
    if known is not None:
        known.update(fields)


def is_logged(level: int) -> bool:
    """Return whether events of a level are logged."""
    return _logger.isEnabledFor(level)


def log(level: int, event: str, *, error: BaseException | None = None, **fields: object) -> None:
    """Log an event with its fields, except fields that are None."""
    if _logger.isEnabledFor(level):
        known = _REQUEST.get() or {}
        raised = None if error is None else (type(error), error, error.__traceback__)
        # No line shows its caller, for which the logger would search the stack.
        record = logging.LogRecord(LOGGER, level, "", 0, event, (), raised)
        record.__dict__[_FIELDS] = {**known, **fields}
        _logger.handle(record)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found: dict[str, object] = getattr(record, _FIELDS, {})
    return {key: value for key, value in found.items() if value is not None}


def _moment(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _plain(value: object) -> object:
    """Return a value that JSON can represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, str | int) else str(value)


def _quoted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    # Spaces are the only printable whitespace.
    if text and text.isprintable() and not (" " in text or '"' in text or "=" in text):
        return text
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
