"""The output of a stream as its events describe it, read only if the stream breaks off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeGuard

import msgspec

from draftgate.backends.openai.events import data_of_events

_NAMES: Final = ("id", "object", "created", "model", "system_fingerprint")


class NotContinuable(Exception):
    """The rest of a stream cannot be requested. The message says why."""


class StreamOutput(NamedTuple):
    """The output that a client has.

    Attributes:
        names: the fields that all chunks of the stream share.
        text: the text.
        pieces: number of chunks with text.
        tokens: number of tokens of the text, or None if the chunks do not say.
        prompt_tokens: number of tokens of the prompt, or None if the chunks do not say.
        prompt_ids, ids: the tokens of prompt and text, or None if the chunks do not have them.
        has_finished: whether the client has the finish reason.
        has_usage: whether the client has the usage after it.
    """

    names: Mapping[str, Any]
    text: str = ""
    pieces: int = 0
    tokens: int | None = None
    prompt_tokens: int | None = None
    prompt_ids: Sequence[int] | None = None
    ids: Sequence[int] | None = None
    has_finished: bool = False
    has_usage: bool = False


def read_output(blocks: Sequence[bytes]) -> StreamOutput:
    """Return the output in complete events of one choice.

    Raises:
        NotContinuable: the events have more than text.
    """
    found = _OutputReader()
    for data in data_of_events(b"".join(blocks)):
        found.add(read_chunk(data))
    return found.output()


class _OutputReader:
    """Collects the output of the chunks of a stream."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {}
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._text_ids = 0  # those up to the last text
        self._last_ids = 0  # those of the chunk with the last text
        self._has_ids = True
        self._prompt_ids: Sequence[int] | None = None
        self._usage: Mapping[str, Any] = {}
        self._tokens: int | None = None  # as of the last text, by the usage of its chunk
        self._has_finished = self._has_usage = False

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Add a chunk."""
        self._names = self._names or {name: chunk[name] for name in _NAMES if name in chunk}
        usage, choices = chunk.get("usage") or {}, chunk.get("choices") or ()
        self._usage = usage or self._usage
        self._has_usage |= bool(usage) and not choices
        if len(choices) > 1 or any(choice.get("index") for choice in choices):
            raise NotContinuable("the stream has several choices")
        for choice in choices:
            self._prompt_ids = self._prompt_ids or _ids(chunk, choice, "prompt_token_ids")
            self._add_choice(choice, count_in(usage, "completion_tokens"))

    def _add_choice(self, choice: Mapping[str, Any], tokens: int | None) -> None:
        if choice.get("logprobs"):
            raise NotContinuable("the stream has log probabilities")
        text, ids = text_of(choice), choice.get("token_ids")
        self._ids += ids or ()
        self._has_finished |= choice.get("finish_reason") is not None
        if not text:
            return
        self._has_ids = self._has_ids and bool(ids)
        self._last_ids, self._text_ids = len(ids or ()), len(self._ids)
        self._texts.append(text)
        self._tokens = tokens

    def output(self) -> StreamOutput:
        """Return the output.

        A server holds the text of an incomplete character back. So the tokens after the last text
        do not count, and those of a chunk with several tokens may be ahead of its text.
        """
        ids = self._ids[: self._text_ids] if self._has_ids and self._texts else None
        return StreamOutput(
            self._names,
            "".join(self._texts),
            len(self._texts),
            self._tokens if ids is None else len(ids),
            count_in(self._usage, "prompt_tokens"),
            self._prompt_ids,
            ids if self._last_ids == 1 else None,
            self._has_finished,
            self._has_usage,
        )


def read_chunk(data: bytes) -> dict[str, Any]:
    """Return a chunk, whose choices and usage have the form of the API.

    Raises:
        NotContinuable: the data is something else.
    """
    chunk = read_object(data)
    choices, usage = chunk.get("choices") or [], chunk.get("usage") or {}
    if isinstance(choices, list) and isinstance(usage, dict) and all(map(_is_choice, choices)):
        return chunk
    raise NotContinuable("a chunk has an unknown form")


def _is_choice(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("delta") or {}, dict):
        return False
    ids = value.get("token_ids") or []
    return isinstance(ids, list) and all(map(is_count, ids))


def text_of(choice: Mapping[str, Any]) -> str:
    """Return the text of a choice.

    Raises:
        NotContinuable: the choice has other output.
    """
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return str(choice.get("text") or "")
    for name, value in delta.items():
        if value and name not in {"role", "content"}:
            raise NotContinuable(f"the stream has {name}")
    return str(delta.get("content") or "")


def _ids(chunk: Mapping[str, Any], choice: Mapping[str, Any], name: str) -> Sequence[int] | None:
    found = choice.get(name) or chunk.get(name)
    return found if isinstance(found, list) and all(map(is_count, found)) else None


def count_in(fields: Mapping[str, Any], name: str) -> int | None:
    """Return the count of a name, or None without one."""
    found = fields.get(name)
    return found if is_count(found) else None


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number of 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def read_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        NotContinuable: the data is something else.
    """
    try:
        found = msgspec.json.decode(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise NotContinuable("the stream or the request cannot be read")
    return found
