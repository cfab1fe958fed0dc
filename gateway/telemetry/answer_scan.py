"""What the bytes of an upstream's response say about it, for its span."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

_FINISH: Final = re.compile(rb'"(?:finish_reason|stop_reason)"\s*:\s*"([a-z_]+)"')
_ENDED: Final = re.compile(rb"(?:\A|[\r\n])event: ?response\.(completed|incomplete)(?=[\r\n])")
_DATA: Final = re.compile(rb"(?:\A|[\r\n])data: ?(\{[^\r\n]*)")


class AnswerScan:
    """Finds the fields of a response in the API of chats, of completions, of responses or messages.

    Attributes:
        response_id, model: its id and its model, or None if the bytes so far have none.
        finish_reasons: the finish reason of each choice that has ended.
    """

    def __init__(self) -> None:
        self.response_id: str | None = None
        self.model: str | None = None
        self.finish_reasons: list[str] = []

    def read_events(self, events: bytes) -> None:
        """Read complete events of a stream."""
        if self.response_id is None and (data := _DATA.search(events)) is not None:
            self._read_names(_decoded(data[1]))
        for pattern in (_FINISH, _ENDED):
            self.finish_reasons += [reason.decode() for reason in pattern.findall(events)]

    def read_whole(self, body: bytes) -> None:
        """Read a response that is not a stream."""
        found = _decoded(body)
        self._read_names(found)
        self.finish_reasons += _reasons(found)

    def _read_names(self, found: dict[str, Any]) -> None:
        # The first event of a stream has the whole response, or the whole message.
        for one in (found, found.get("response"), found.get("message")):
            if isinstance(one, dict) and isinstance(one.get("id"), str):
                self.response_id = one["id"]
                model = one.get("model")
                self.model = model if isinstance(model, str) else None
                return


def _decoded(text: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _reasons(found: dict[str, Any]) -> Iterator[str]:
    choices = found.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and isinstance(choice.get("finish_reason"), str):
            yield choice["finish_reason"]
    if isinstance(found.get("stop_reason"), str):
        yield found["stop_reason"]
    if found.get("object") == "response" and isinstance(found.get("status"), str):
        yield found["status"]
