"""Was a stream intact? Sans-I/O.

An intact stream gives every choice exactly one `finish_reason` and nothing behind it, the usage
once if it was asked for, then `[DONE]`, then nothing. Everything in it carries one id, which no
other stream of the run has, and belongs to a choice that was asked for; the usage allows for the
text that came. Everything else is a failure, however much text came before: a generator which
counts cut streams as successes measures nothing.

A repeated chunk cannot be told from a repetitive answer by its text. It is caught by counting: a
chunk with text stands for at least one token, so more such chunks than `completion_tokens` means
that some came twice (or that a proxy cuts tokens into pieces: then the usage belongs to another
stream than the one received). Where several tokens come per chunk, only `verify` can tell.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

DONE: Final = b"[DONE]"

ABORTS: Final = frozenset({"abort", "aborted", "cancel", "cancelled", "error", "timeout"})
"""Finish reasons by which servers tell, in the band, that they gave up (vLLM and SGLang: abort)."""


class Verdict(StrEnum):
    """What became of a request: `OK`, or the first thing that went wrong."""

    OK = "ok"
    NO_CONNECTION = "no_connection"
    """There was none, or it broke before an answer began."""
    TIMEOUT = "timeout"
    """The answer took longer than a request may."""
    STALLED = "stalled"
    """Text had come, then none for longer than a stream may pause."""
    HTTP_STATUS = "http_status"
    NO_STREAM = "no_stream"
    """The answer was no stream of server-sent events."""
    CUT = "cut"
    """The connection broke inside the answer."""
    ERROR_EVENT = "error_event"
    """The server told of an error inside the stream, as an event or as a finish reason."""
    MALFORMED = "malformed"
    CROSSED = "crossed"
    """Content of another request, or of a choice nobody asked for."""
    DUPLICATED = "duplicated"
    """More chunks with text than tokens, or the usage twice."""
    NO_FINISH_REASON = "no_finish_reason"
    AFTER_FINISH = "after_finish"
    NO_USAGE = "no_usage"
    BAD_USAGE = "bad_usage"
    """The usage contradicts itself or what was told before."""
    TOO_LONG = "too_long"
    """More tokens than were allowed."""
    NO_DONE = "no_done"
    AFTER_DONE = "after_done"
    INTERRUPTED = "interrupted"
    """The run was stopped while the request was open: nobody's fault, but no success either."""


class Content(NamedTuple):
    """What a chunk brought: characters of text, which may be 0, and tokens where it tells them."""

    characters: int
    tokens: int | None


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(Struct):
    function: _Function | None = None


class _Delta(Struct):
    role: Any = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(Struct):
    index: int
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(Struct):
    choices: list[_Choice] | None = None
    id: str | None = None
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    error: Any = None


_decoder: Final = Decoder(_Chunk)


@dataclass(slots=True)
class StreamAudit:
    """Follows one stream of `/v1/completions` or `/v1/chat/completions`.

    Attributes:
        choices: how many were asked for.
        max_tokens: most tokens of a choice, if that was limited.
        wants_usage: whether `stream_options.include_usage` was set.
        ids: of all streams of the run so far; this stream adds its own.
        verdict: the first fault so far; final after `end`.
        detail: the fault in words.
        finish_reasons: by choice; None where none came.
        usage, metrics: what the server reported, if it did.
        stream_id: the id that its chunks carried last; empty if none did.
    """

    choices: int = 1
    max_tokens: int | None = None
    wants_usage: bool = True
    ids: set[str] = field(default_factory=set)
    verdict: Verdict = Verdict.OK
    detail: str = ""
    finish_reasons: list[str | None] = field(init=False)
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    stream_id: str = ""
    _parts: list[list[str]] = field(init=False)
    _tokens: int = 0  # as told last
    _text_chunks: int = 0
    _text_only: bool = True  # neither reasoning nor tool calls, whose parsers split tokens
    _usage_chunk: bool = False
    _done: bool = False

    def __post_init__(self) -> None:
        self.finish_reasons = [None] * self.choices
        self._parts = [[] for _ in range(self.choices)]

    @property
    def texts(self) -> tuple[str, ...]:
        """Text by choice: content, reasoning and tool arguments in the order in which they came."""
        return tuple(map("".join, self._parts))

    def add(self, data: bytes, event: str = "message") -> Content | None:
        """Take an event's data and type; return what it brought, None if that was no text."""
        if self._done:
            self.fault(Verdict.AFTER_DONE, f"after [DONE] came {_excerpt(data)}")
            return None
        if data == DONE:
            self._done = True
            return None
        try:
            chunk = _decoder.decode(data)
        except (DecodeError, UnicodeDecodeError) as error:
            self.fault(Verdict.MALFORMED, f"{error} in {_excerpt(data)}")
            return None
        if chunk.error is not None:
            self.fault(Verdict.ERROR_EVENT, _message(chunk.error))
        elif event == "error":
            self.fault(Verdict.ERROR_EVENT, _excerpt(data))
        elif chunk.choices is None:
            self.fault(Verdict.MALFORMED, f"no choices in {_excerpt(data)}")
        else:
            return self._chunk(chunk, chunk.choices)
        return None

    def end(self, *, cut: str | None = None) -> None:
        """Conclude: the connection ended, in order or with the error `cut`."""
        missing = [i for i, reason in enumerate(self.finish_reasons) if reason is None]
        if cut is not None:
            self.fault(Verdict.CUT, cut)
        if missing:
            self.fault(Verdict.NO_FINISH_REASON, f"choices without a finish_reason: {missing}")
        if self.wants_usage and self.usage is None:
            self.fault(Verdict.NO_USAGE, "usage was asked for and did not come")
        if not self._done:
            self.fault(Verdict.NO_DONE, "the stream ended without [DONE]")

    def fault(self, verdict: Verdict, detail: str) -> None:
        """Record a fault; the first one stands."""
        if self.verdict is Verdict.OK:
            self.verdict, self.detail = verdict, detail

    def _chunk(self, chunk: _Chunk, choices: list[_Choice]) -> Content | None:
        if chunk.id:
            self._check_id(chunk.id)
        characters = 0
        for choice in choices:
            characters += self._choice(choice)
        if chunk.metrics is not None:
            self.metrics = chunk.metrics
        tokens = None
        if chunk.usage is not None:
            tokens = self._count(chunk.usage, alone=not choices)
        if characters or (choices and _has_empty_text(choices[0])):
            return Content(characters, tokens)
        return None

    def _check_id(self, chunk_id: str) -> None:
        if chunk_id == self.stream_id:
            return
        if self.stream_id:
            self.fault(
                Verdict.CROSSED, f"a chunk of {chunk_id!r} in the stream of {self.stream_id!r}"
            )
        elif chunk_id in self.ids:
            self.fault(Verdict.CROSSED, f"another stream of the run has the id {chunk_id!r}")
        self.stream_id = chunk_id
        self.ids.add(chunk_id)

    def _choice(self, choice: _Choice) -> int:
        """Take one choice of a chunk; return its characters of text."""
        index, reason = choice.index, choice.finish_reason or None
        text = choice.text or ""
        if choice.delta is not None:
            text = self._delta(choice.delta)
        if not 0 <= index < self.choices:
            self.fault(Verdict.CROSSED, f"choice {index} of {self.choices}")
            return 0
        if (text or reason) and self.finish_reasons[index] is not None:
            self.fault(Verdict.AFTER_FINISH, f"choice {index} went on after its finish_reason")
        if reason is not None:
            self.finish_reasons[index] = reason
            if reason in ABORTS:
                self.fault(Verdict.ERROR_EVENT, f"finish_reason {reason!r}")
        if text:
            self._parts[index].append(text)
            self._text_chunks += 1
        return len(text)

    def _delta(self, delta: _Delta) -> str:
        text = delta.content or ""
        reasoning = delta.reasoning_content or delta.reasoning  # the same under two names
        if reasoning or delta.tool_calls:
            self._text_only = False
            functions = [c.function for c in delta.tool_calls or () if c.function is not None]
            called = [(f.name or "") + (f.arguments or "") for f in functions]
            text = "".join([reasoning or "", text, *called])
        return text

    def _count(self, usage: dict[str, Any], *, alone: bool) -> int | None:
        """Check a usage; return the tokens it counts beyond the last one.

        None where there is more than one choice: servers then count on by choice or over all.

        Args:
            alone: whether it came without choices, as the last usage does.
        """
        prompt, tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not (isinstance(prompt, int) and isinstance(tokens, int) and min(prompt, tokens) >= 0):
            self.fault(Verdict.BAD_USAGE, f"not counts of tokens: {usage}")
            return None
        total = usage.get("total_tokens", prompt + tokens)
        if not (isinstance(total, int) and total >= prompt + tokens):
            self.fault(Verdict.BAD_USAGE, f"a total below its parts: {usage}")
        if self._usage_chunk and alone:
            self.fault(Verdict.DUPLICATED, f"the usage came twice: {self.usage}, then {usage}")
        self.usage, self._usage_chunk = usage, self._usage_chunk or alone
        if not alone and self.choices > 1:
            return None
        brought, self._tokens = tokens - self._tokens, tokens
        if brought < 0:
            self.fault(Verdict.BAD_USAGE, f"{tokens} tokens after {tokens - brought}")
        if self._text_only and self._text_chunks > tokens:
            told = f"{self._text_chunks} chunks with text, but {tokens} tokens"
            self.fault(Verdict.DUPLICATED, told)
        if self.max_tokens is not None and tokens > self.max_tokens * self.choices:
            allowed = f"{self.max_tokens} for each of {self.choices}"
            self.fault(Verdict.TOO_LONG, f"{tokens} tokens, allowed were {allowed}")
        return brought


def _has_empty_text(choice: _Choice) -> bool:
    """Whether a choice without characters has a text: a special token has, a role has not."""
    delta = choice.delta
    return delta is None or (delta.content == "" and delta.role is None)


def _excerpt(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", errors="replace"))


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
