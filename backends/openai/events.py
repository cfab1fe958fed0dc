"""Incremental scan of server-sent events, which finds the ends of events and of the stream.

A few searches for literals suffice. The scan decodes only an event that looks like an error, and
the last `usage` object when its tokens are needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from draftgate.backends.base import TokenUsage
from draftgate.backends.types import SpeculationOutcome

EVENT_STREAM: Final = "text/event-stream"
"""The content type of a stream."""

MOST_EVENT_BYTES: Final = 4 << 20
"""Maximum size of an event in bytes. A longer event ends the stream, so that an endless event
cannot fill memory. A chunk with 20 alternatives for each of 500 tokens has 1 MB."""

# A line ends with CRLF, LF or CR, and an event ends with an empty line. Only the next byte shows
# whether a final CR is half of a CRLF.
_LINE_END: Final = rb"(?:\r\n|\n|\r(?=[^\n]))"
_DECIDED_LINE_END: Final = rb"(?:\r\n|\n|\r(?!\n))"
_BOUNDARY: Final = re.compile(rb"(?:\A|%s)%s+" % (_LINE_END, _LINE_END))
_EVENT: Final = re.compile(rb"%s|[^\r\n](?s:.)*?%s{2}" % (_DECIDED_LINE_END, _DECIDED_LINE_END))
_FINISH: Final = re.compile(rb'"finish_reason"\s*:\s*"')
_ABORT: Final = b'"abort"'
_ABORTED: Final = re.compile(rb'"finish_reason"\s*:\s*"abort"')
# Events of `/v1/responses` and of `/v1/messages`.
_NAMED_EVENT: Final = re.compile(
    rb"(?:\A|[\r\n])event: ?(?:response\.|(?:message|content_block)_|ping)"
)
_NAMED_DELTA: Final = re.compile(
    rb"(?:\A|[\r\n])event: ?(?:response\.[a-z_.]+\.|content_block_)delta(?=[\r\n])"
)
_NAMED_END: Final = re.compile(
    rb"(?:\A|[\r\n])event: ?(?:response\.(?:completed|incomplete)|message_stop)(?=[\r\n])"
)
_MESSAGE_START: Final = re.compile(rb"(?:\A|[\r\n])event: ?message_start(?=[\r\n])")
_RESPONSE_FAILED: Final = re.compile(rb"(?:\A|[\r\n])event: ?response\.failed(?=[\r\n])")
_USAGE: Final = re.compile(rb'"usage"\s*:\s*(?=\{)')
_DRAFTS: Final = re.compile(rb'"speculative_decoding"\s*:\s*(?=\{)')
_DONE: Final = b"data: [DONE]\n\n"
_json: Final = json.JSONDecoder()

_Count = Annotated[int, Meta(ge=0)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    """The usage of a chat or a completion, in which only these fields count."""

    prompt_tokens: _Count
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None
    input_tokens: None = None
    output_tokens: None = None
    cache_read_input_tokens: None = None
    cache_creation_input_tokens: None = None


class _Whole(msgspec.Struct):
    usage: _Usage


class _Drafts(msgspec.Struct):
    """The drafts of a request by vLLM's names, which Draftgate sends as well."""

    num_spec_steps: _Count
    num_draft_tokens: _Count
    num_accepted_draft_tokens: _Count
    acceptance_histogram: Annotated[list[_Count], Meta(max_length=1024)]


_whole: Final = msgspec.json.Decoder(_Whole)
_drafts: Final = msgspec.json.Decoder(_Drafts)


class StreamEnding(StrEnum):
    """The way in which a stream ended."""

    DONE = "done"
    """`[DONE]` after a finish reason, or the end of the bytes after the end of a response."""
    ERROR = "error"
    """An error event of the upstream."""
    UNFINISHED = "unfinished"
    """`[DONE]` before any choice had finished, or the end of a choice that the server aborted. The
    output was cut."""


class EventScan:
    """Scans a stream, whose bytes `feed` gets in any pieces.

    Attributes:
        ending: ending of the stream, or None while it continues. Nothing passes after the ending.
        outputs: number of data events that passed, without `[DONE]`. In streams of `/v1/responses`
            and `/v1/messages`, only deltas count.
        finished: number of finish reasons, and of ended responses and messages, that passed.
    """

    def __init__(self) -> None:
        self.ending: StreamEnding | None = None
        self.outputs = 0
        self.finished = 0
        self._ended_responses = 0
        self._held = b""
        self._usage = b""
        self._reported_drafts = b""
        self._input: TokenUsage | None = None  # of a stream of `/v1/messages`

    def feed(self, block: bytes) -> bytes:
        """Return the bytes of all events that are complete now, and keep an incomplete event.

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
        if b"[DONE]" in whole or b'"error"' in whole or _ABORT in whole:
            return self._up_to_ending(whole)
        self._observe(whole)
        return whole

    def close(self) -> None:
        """Note the end of the bytes.

        Many servers send no `[DONE]` after a response of `/v1/responses`, and none after a message.
        """
        if self.ending is None and self._ended_responses:
            self.ending = StreamEnding.DONE

    def usage(self) -> TokenUsage | None:
        """Return the tokens of the last `usage` object that passed, or None."""
        last = usage_in(self._usage)
        if last is None or last.prompt or self._input is None:
            return last
        return last._replace(prompt=self._input.prompt, cached=self._input.cached)

    def drafts(self) -> SpeculationOutcome | None:
        """Return the drafts that the server reports after a finish reason, or None."""
        return drafts_in(self._reported_drafts) if self._reported_drafts else None

    def _complete(self, block: bytes) -> bytes:
        if not self._held and block.endswith((b"\n\n", b"\r\n\r\n")):
            return block  # as servers usually write
        held = len(self._held)
        pending = self._held + block
        end = _last_boundary(pending, max(0, held - 3))
        self._held = pending[end:]
        return pending[:end]

    def _up_to_ending(self, whole: bytes) -> bytes:
        """Check the events, and return those up to the ending."""
        if b'"error"' not in whole and _ABORT not in whole and whole.count(b"[DONE]") == 1:
            # Servers usually send the ending in this form. To check each event takes far longer.
            begin = whole.find(_DONE)
            if begin == 0 or (begin > 0 and whole.endswith(b"\n\n", 0, begin)):
                self._observe(whole[:begin])
                return self._end(self._done(), whole, begin, begin + len(_DONE))
        begin = 0
        for match in _EVENT.finditer(whole):
            event, end = match[0], match.end()
            ending = self._ending_of(event)
            if ending is not None:
                return self._end(ending, whole, begin, end)
            self._observe(event)
            begin = end
        return whole

    def _end(self, ending: StreamEnding, whole: bytes, begin: int, end: int) -> bytes:
        """End the stream with the event between two places, and return the events that pass."""
        self.ending, self._held = ending, b""
        return whole[: begin if ending is StreamEnding.UNFINISHED else end]

    def _done(self) -> StreamEnding:
        return StreamEnding.DONE if self.finished else StreamEnding.UNFINISHED

    def _observe(self, events: bytes) -> None:
        self.outputs += events.startswith(b"data:")
        self.outputs += events.count(b"\ndata:") + events.count(b"\rdata:")
        self.finished += len(_FINISH.findall(events))
        if b"event:" in events:
            deltas, all_events = _NAMED_DELTA.findall(events), _NAMED_EVENT.findall(events)
            self.outputs += len(deltas) - len(all_events)
            ended = len(_NAMED_END.findall(events))
            self.finished += ended
            self._ended_responses += ended
            if _MESSAGE_START.search(events):
                self._observe_input(events)
        if b'"usage"' in events and _USAGE.search(events):
            self._usage = events
        if self.finished and b'"speculative_decoding"' in events:
            self._reported_drafts = events

    def _observe_input(self, events: bytes) -> None:
        """Note the input tokens, which some servers report only when a message begins."""
        for match in _EVENT.finditer(events):
            if _MESSAGE_START.search(match[0]):
                self._input = usage_in(match[0])

    def _ending_of(self, event: bytes) -> StreamEnding | None:
        data = b"\n".join(_data_lines(event))
        if data.strip() == b"[DONE]":
            return self._done()
        if b'"error"' in data and (_has_error(data) or _RESPONSE_FAILED.search(event)):
            return StreamEnding.ERROR
        return StreamEnding.UNFINISHED if is_aborted(data) else None


def is_aborted(data: bytes) -> bool:
    """Return whether a server aborted a choice of a response, as vLLM's engine does."""
    return _ABORT in data and _ABORTED.search(data) is not None


def data_of_each(events: bytes) -> Iterator[bytes]:
    """Return the data of each of complete events, which is empty for an event of comments."""
    for match in _EVENT.finditer(events):
        if not match[0].startswith((b"\r", b"\n")):  # an empty line between two events
            yield b"\n".join(_data_lines(match[0]))


def data_of_events(events: bytes, *, keeps_done: bool = False) -> Iterator[bytes]:
    """Return the data of each of complete events that have some.

    Args:
        keeps_done: whether `[DONE]` counts as data.
    """
    for data in map(bytes.strip, data_of_each(events)):
        if data and (keeps_done or data != b"[DONE]"):
            yield data


def last_event(events: bytes) -> bytes:
    """Return the last of complete events."""
    return [match[0] for match in _EVENT.finditer(events)][-1]


def whole_usage(body: bytes) -> TokenUsage | None:
    """Return the tokens of a chat or a completion, or None if `usage_in` has to search for them."""
    try:
        usage = _whole.decode(body).usage
    except (ValueError, RecursionError):
        return None
    details = usage.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens or 0
    return TokenUsage(usage.prompt_tokens, cached, usage.completion_tokens)


def usage_in(text: bytes) -> TokenUsage | None:
    """Return the tokens of the last `"usage": {...}` in JSON whose beginning may be missing.

    Text inside a string cannot match, because its quotation marks are escaped.
    """
    found, end = None, len(text)
    while found is None and (end := text.rfind(b'"usage"', 0, end)) >= 0:
        found = _USAGE.match(text, end)
    if found is None:
        return None
    try:
        value, _ = _json.raw_decode(text[found.end() :].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None
    prompt, output = "prompt", "completion"
    if "input_tokens" in value or "output_tokens" in value:
        prompt, output = "input", "output"
    elif "prompt_tokens" not in value and "completion_tokens" not in value:
        # The usage of a rerank request in Jina's format.
        return TokenUsage(_count(value.get("total_tokens")), 0, 0)
    details = value.get(f"{prompt}_tokens_details")
    cached = _count(details.get("cached_tokens")) if isinstance(details, dict) else 0
    read = stored = 0
    if "cache_read_input_tokens" in value or "cache_creation_input_tokens" in value:
        # Anthropic's input tokens include neither tokens from the cache nor those that it stores.
        read = _count(value.get("cache_read_input_tokens"))
        stored = _count(value.get("cache_creation_input_tokens"))
    return TokenUsage(
        _count(value.get(f"{prompt}_tokens")) + read + stored,
        cached + read,
        _count(value.get(f"{output}_tokens")),
    )


def drafts_in(text: bytes) -> SpeculationOutcome | None:
    """Return the drafts of the last `"speculative_decoding": {...}` in JSON, as `usage_in` does.

    vLLM sends them with the usage of a response (`--per-request-spec-decode-metrics summary`).
    """
    begin = text.rfind(b'"speculative_decoding"')
    found = _DRAFTS.match(text, begin) if begin >= 0 else None
    if found is None:
        return None
    rest = text[found.end() :].decode("utf-8", "replace")
    try:
        _, end = _json.raw_decode(rest)
        drafts = _drafts.decode(rest[:end])
    except (ValueError, RecursionError):
        return None
    return SpeculationOutcome(
        drafts.num_spec_steps,
        drafts.num_draft_tokens,
        drafts.num_accepted_draft_tokens,
        tuple(drafts.acceptance_histogram),
    )


def _last_boundary(pending: bytes, begin: int) -> int:
    """Return where the last complete event after `begin` ends, or 0."""
    if b"\r" not in pending:  # a search for literals is 50 times as fast as the pattern
        found = pending.rfind(b"\n\n", begin)
        return found + 2 if found >= 0 else len(pending) - len(pending.lstrip(b"\n"))
    ends = [match.end() for match in _BOUNDARY.finditer(pending, begin)]
    return ends[-1] if ends else 0


def _count(value: Any) -> int:
    return value if isinstance(value, int) and value > 0 else 0


def _data_lines(events: bytes) -> Iterator[bytes]:
    for line in re.split(rb"\r\n|\n|\r", events):
        if line.startswith(b"data:"):
            yield line[5:].removeprefix(b" ")


def _has_error(data: bytes) -> bool:
    """Return whether data is a JSON object with an `error`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("error") is not None
