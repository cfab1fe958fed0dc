"""Logs: one line per event, `key=value`, with the request's id. Never the text of a prompt."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from typing import Final

LOGGER: Final = "draftgate"
_FIELDS: Final = "draftgate_fields"


class LineFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO request id=... status=200`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; a traceback, if there is one, follows on its own lines."""
        moment = datetime.fromtimestamp(record.created, UTC)
        stamp = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields: dict[str, object] = getattr(record, _FIELDS, {})
        pairs = [f"{key}={_quoted(value)}" for key, value in fields.items() if value is not None]
        line = " ".join([stamp, record.levelname, record.getMessage(), *pairs])
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(level: str) -> None:
    """Send our log lines of that level and above to stderr. Idempotent."""
    logger = logging.getLogger(LOGGER)
    logger.setLevel(level.upper())
    logger.propagate = False
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(LineFormatter())
        logger.addHandler(handler)


def log(level: int, event: str, *, error: BaseException | None = None, **fields: object) -> None:
    """Log an event with its fields; fields that are None are left out."""
    logger = logging.getLogger(LOGGER)
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={_FIELDS: fields}, exc_info=error)


def _quoted(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text and not any(c.isspace() or c in '"=' or not c.isprintable() for c in text):
        return text
    return '"' + text.encode("unicode_escape").decode().replace('"', '\\"') + '"'
