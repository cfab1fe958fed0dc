"""Logs: one line per event, with the id of the request that it concerns. Never a prompt's text.

What is said within a request carries what is known of that request (`about_request`): its id, its
trace, later perhaps its tenant. Nobody who logs has to hand that on.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Final

from aiohttp.http_exceptions import HttpProcessingError

LOGGER: Final = "draftgate"
_FIELDS: Final = "draftgate_fields"

_OTHERS: Final = ("aiohttp", "asyncio", "opentelemetry")
"""Loggers of libraries whose warnings are lines of ours: an exporter without a collector, say."""

_REQUEST: Final[ContextVar[dict[str, object] | None]] = ContextVar("request", default=None)


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO request id=... status=200`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback, if there is one, follows on its own lines."""
        pairs = [f"{key}={_quoted(value)}" for key, value in _fields(record).items()]
        event = " ".join(record.getMessage().split())
        line = " ".join([_moment(record), record.levelname, event, *pairs])
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """`{"time": "...", "level": "INFO", "event": "request", "id": "...", "status": 200}`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object on one line; a traceback, if there is one, is its `traceback`."""
        told = {
            **{key: _plain(value) for key, value in _fields(record).items()},
            "time": _moment(record),
            "level": record.levelname,
            "event": record.getMessage(),
        }
        if record.exc_info:
            told["traceback"] = self.formatException(record.exc_info)
        return json.dumps(told)


FORMATTERS: Final = {"line": LineFormatter, "json": JsonFormatter}


def configure(level: str, form: str = "line") -> None:
    """Send our log lines of that level and above to stderr, in a form of `FORMATTERS`.

    Of libraries, warnings and worse.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(FORMATTERS[form]())
    for name in (LOGGER, *_OTHERS):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper() if name == LOGGER else logging.WARNING)
    logging.getLogger("aiohttp.server").filters = [_is_ours]


@contextmanager
def about_request(**fields: object) -> Iterator[None]:
    """Put the fields into every line that is logged in this context, and in tasks made there."""
    token = _REQUEST.set(fields)
    try:
        yield
    finally:
        _REQUEST.reset(token)


def add_about_request(**fields: object) -> None:
    """Put further fields into the lines of this request; nothing happens outside of one."""
    known = _REQUEST.get()
    if known is not None:
        known.update(fields)


def log(level: int, event: str, *, error: BaseException | None = None, **fields: object) -> None:
    """Log an event with its fields; fields that are None are left out."""
    logger = logging.getLogger(LOGGER)
    if logger.isEnabledFor(level):
        known = _REQUEST.get() or {}
        logger.log(level, event, extra={_FIELDS: {**known, **fields}}, exc_info=error)


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a line is not about bytes that are no HTTP.

    They get their 400; whoever finds the port could fill the log with tracebacks.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


def _fields(record: logging.LogRecord) -> dict[str, object]:
    found: dict[str, object] = getattr(record, _FIELDS, {})
    return {key: value for key, value in found.items() if value is not None}


def _moment(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _plain(value: object) -> object:
    """Return a value that JSON can hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if isinstance(value, str | int) else str(value)


def _quoted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text and not any(c.isspace() or c in '"=' or not c.isprintable() for c in text):
        return text
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
