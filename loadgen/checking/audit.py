"""Decides whether a response arrived intact. Performs no I/O.

Every choice of an intact stream has exactly one `finish_reason` and no text after it. A requested
usage arrives once, then `[DONE]`, then nothing. All chunks belong to a requested choice and carry
one id, which no other stream of the run has. The usage is consistent with the text. A stream that
breaks any of these rules is a failure, no matter how much text arrived. Counting truncated streams
as successes would overstate the server's capacity.

The text alone cannot distinguish a repeated chunk from a repetitive response, so the audit counts
chunks. A chunk with text carries at least one token. More such chunks than `completion_tokens`
therefore mean that a chunk arrived twice, or that a proxy splits tokens and the usage describes
another stream. If chunks carry several tokens, only `checking.lossless` finds a repetition.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

_DONE: Final = b"[DONE]"
FLOAT_BYTES: Final = 4

ABORTS: Final = frozenset({"abort", "aborted", "cancel", "cancelled", "error", "timeout"})
"""Finish reasons by which a server reports a failure (vLLM and SGLang send `abort`)."""


class Verdict(StrEnum):
    """The outcome of a request: `OK`, or the first fault."""

    OK = "ok"
    NO_CONNECTION = "no_connection"
    """The connection failed before the response began."""
    TIMEOUT = "timeout"
    """The whole response took too long."""
    STALLED = "stalled"
    """The stream paused too long after some text."""
    HTTP_STATUS = "http_status"
    NO_STREAM = "no_stream"
    """The response was not a stream of server-sent events."""
    CUT = "cut"
    """The connection broke during the response."""
    ERROR_EVENT = "error_event"
    """The stream reported an error, as an event or as a finish reason."""
    MALFORMED = "malformed"
    CROSSED = "crossed"
    """Content of another request, or of a choice that was not requested."""
    DUPLICATED = "duplicated"
    """More chunks with text than tokens, or a second usage."""
    NO_FINISH_REASON = "no_finish_reason"
    AFTER_FINISH = "after_finish"
    NO_USAGE = "no_usage"
    BAD_USAGE = "bad_usage"
    """The usage contradicts itself or an earlier usage."""
    TOO_LONG = "too_long"
    """More tokens than `max_tokens`."""
    NO_DONE = "no_done"
    AFTER_DONE = "after_done"
    INTERRUPTED = "interrupted"
    """The run stopped while the request was open. This is neither a fault nor a success."""


@dataclass(slots=True, kw_only=True)
class Audit:
    """What an audit records about any response.

    Attributes:
        verdict: the first fault so far.
        detail: a description of the fault.
        usage, metrics: as the server reported them, or None.
        finish_reasons: one per choice, None for a choice without a finish reason.
        stream_id: the last id in the chunks, or empty.
        vectors: embeddings as little-endian float32, by input. Only an intact response has them.
    """

    verdict: Verdict = Verdict.OK
    detail: str = ""
    usage: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None
    finish_reasons: list[str | None] = field(default_factory=list)
    stream_id: str = ""
    vectors: tuple[bytes, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of each choice."""
        return ()

    def fault(self, verdict: Verdict, detail: str) -> None:
        """Record a fault, unless an earlier fault is recorded already."""
        if self.verdict is Verdict.OK:
            self.verdict, self.detail, self.vectors = verdict, detail, ()


class Content(NamedTuple):
    """The characters (0 or more) of a chunk, and its tokens if the server counts them."""

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
    timings: dict[str, Any] | None = None
    error: Any = None


_decoder: Final = Decoder(_Chunk)


@dataclass(slots=True)
class StreamAudit(Audit):
    """Checks one stream of `/v1/completions` or `/v1/chat/completions`.

    Attributes:
        choices: the number of requested choices.
        max_tokens: the limit per choice, or None.
        wants_usage: whether `stream_options.include_usage` was set.
        ids: the ids of all streams of the run so far, to which this stream adds its own.
    """

    choices: int = 1
    max_tokens: int | None = None
    wants_usage: bool = True
    ids: set[str] = field(default_factory=set)
    _parts: list[list[str]] = field(init=False)
    _tokens: int = 0  # as last reported
    _text_chunks: int = 0
    _text_only: bool = True  # no reasoning or tool calls, whose parsers may split tokens
    _usage_chunk: bool = False
    _done: bool = False

    def __post_init__(self) -> None:
        self.finish_reasons = [None] * self.choices
        self._parts = [[] for _ in range(self.choices)]

    @property
    def texts(self) -> tuple[str, ...]:
        """The text of each choice: content, reasoning and tool arguments, in order of arrival."""
        return tuple(map("".join, self._parts))

    def add(self, data: bytes, event: str = "message") -> Content | None:
        """Check an event and return its content, or None if it carried no text."""
        if self._done:
            self.fault(Verdict.AFTER_DONE, f"after [DONE]: {_excerpt(data)}")
            return None
        if data == _DONE:
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
            return self._add_chunk(chunk, chunk.choices)
        return None

    def end(self, *, cut: str | None = None) -> None:
        """Finish the audit when the connection has ended, normally or with the error `cut`."""
        missing = [i for i, reason in enumerate(self.finish_reasons) if reason is None]
        if cut is not None:
            self.fault(Verdict.CUT, cut)
        if missing:
            self.fault(Verdict.NO_FINISH_REASON, f"choices without a finish_reason: {missing}")
        if self.wants_usage and self.usage is None:
            self.fault(Verdict.NO_USAGE, "the usage was requested and did not arrive")
        if not self._done:
            self.fault(Verdict.NO_DONE, "the stream ended without [DONE]")

    def _add_chunk(self, chunk: _Chunk, choices: list[_Choice]) -> Content | None:
        if chunk.id:
            self._check_id(chunk.id)
        characters = sum(map(self._add_choice, choices))
        if chunk.metrics is not None:
            self.metrics = chunk.metrics
        elif chunk.timings is not None and "draft_n" in chunk.timings:  # llama.cpp's server
            drafts = {
                "num_drafted_tokens": chunk.timings["draft_n"],
                "num_accepted_tokens": chunk.timings.get("draft_n_accepted"),
            }
            self.metrics = {"speculative_decoding": drafts}
        tokens = None
        if chunk.usage is not None:
            tokens = self._add_usage(chunk.usage, alone=not choices)
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

    def _add_choice(self, choice: _Choice) -> int:
        """Check one choice of a chunk and return the number of characters in its text."""
        index, reason = choice.index, choice.finish_reason or None
        text = choice.text or ""
        if choice.delta is not None:
            text = self._delta_text(choice.delta)
        if not 0 <= index < self.choices:
            self.fault(Verdict.CROSSED, f"choice {index} of {self.choices}")
            return 0
        if (text or reason) and self.finish_reasons[index] is not None:
            self.fault(Verdict.AFTER_FINISH, f"choice {index} continued after its finish_reason")
        if reason is not None:
            self.finish_reasons[index] = reason
            if reason in ABORTS:
                self.fault(Verdict.ERROR_EVENT, f"finish_reason {reason!r}")
        if text:
            self._parts[index].append(text)
            self._text_chunks += 1
        return len(text)

    def _delta_text(self, delta: _Delta) -> str:
        text = delta.content or ""
        reasoning = delta.reasoning_content or delta.reasoning  # Servers use either name.
        if reasoning or delta.tool_calls:
            self._text_only = False
            functions = [c.function for c in delta.tool_calls or () if c.function is not None]
            called = [(f.name or "") + (f.arguments or "") for f in functions]
            text = "".join([reasoning or "", text, *called])
        return text

    def _add_usage(self, usage: dict[str, Any], *, alone: bool) -> int | None:
        """Check a usage and return how many tokens it adds to the previous usage.

        Returns None for several choices, because servers count either per choice or over all
        choices.

        Args:
            alone: whether the chunk had no choices, as the final usage does.
        """
        prompt, tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
        if not (isinstance(prompt, int) and isinstance(tokens, int) and min(prompt, tokens) >= 0):
            self.fault(Verdict.BAD_USAGE, f"not token counts: {usage}")
            return None
        total = usage.get("total_tokens", prompt + tokens)
        if not (isinstance(total, int) and total >= prompt + tokens):
            self.fault(Verdict.BAD_USAGE, f"the total is below the sum of its parts: {usage}")
        if self._usage_chunk and alone:
            self.fault(Verdict.DUPLICATED, f"two usages: {self.usage}, then {usage}")
        self.usage, self._usage_chunk = usage, self._usage_chunk or alone
        if not alone and self.choices > 1:
            return None
        added, self._tokens = tokens - self._tokens, tokens
        if added < 0:
            self.fault(Verdict.BAD_USAGE, f"{tokens} tokens after {tokens - added}")
        if self._text_only and self._text_chunks > tokens:
            counted = f"{self._text_chunks} chunks with text, but {tokens} tokens"
            self.fault(Verdict.DUPLICATED, counted)
        if self.max_tokens is not None and tokens > self.max_tokens * self.choices:
            allowed = f"{self.max_tokens} for each of {self.choices}"
            self.fault(Verdict.TOO_LONG, f"{tokens} tokens, but the limit was {allowed}")
        return added


def _has_empty_text(choice: _Choice) -> bool:
    """Whether a choice has an empty text, as a special token has, rather than only a role."""
    delta = choice.delta
    return delta is None or (delta.content == "" and delta.role is None)


def _excerpt(data: bytes) -> str:
    return repr(data[:80].decode("utf-8", errors="replace"))


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


class _Vector(Struct):
    index: int
    embedding: str | list[float]


class _Reply(Struct):
    data: list[_Vector] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None


_reply_decoder: Final = Decoder(_Reply)


@dataclass(slots=True)
class VectorAudit(Audit):
    """Checks one response of `/v1/embeddings`.

    Every input has exactly one vector. All vectors are finite and of one length, and the usage
    counts tokens.

    Attributes:
        inputs: the number of texts sent.
    """

    inputs: int

    def add(self, body: bytes) -> None:
        """Check the body of the response."""
        try:
            reply = _reply_decoder.decode(body)
            if reply.error is not None or reply.data is None:
                raise ValueError(f"expected `data`, got {body[:80]!r}")
            places = sorted(vector.index for vector in reply.data)
            if len(set(places)) < len(places):
                self.fault(Verdict.DUPLICATED, f"an input has two vectors: {places}")
            elif places != list(range(self.inputs)):
                self.fault(Verdict.MALFORMED, f"{self.inputs} inputs, vectors {places}")
            else:
                in_order = sorted(reply.data, key=lambda vector: vector.index)
                self.vectors = _checked([_packed(vector.embedding) for vector in in_order])
        except (DecodeError, UnicodeDecodeError, ValueError, OverflowError) as error:
            self.fault(Verdict.MALFORMED, str(error))
        else:
            self._check_usage(reply.usage)

    def _check_usage(self, usage: dict[str, Any] | None) -> None:
        self.usage = usage
        if usage is None:
            self.fault(Verdict.NO_USAGE, "the response has no usage")
            return
        tokens = usage.get("prompt_tokens")
        if not isinstance(tokens, int) or tokens < self.inputs:
            self.fault(Verdict.BAD_USAGE, f"{self.inputs} inputs, but the usage is {usage}")


def _packed(embedding: str | list[float]) -> bytes:
    """Return the bytes of a vector, from base64 or from a list of numbers."""
    if isinstance(embedding, list):
        return struct.pack(f"<{len(embedding)}f", *embedding)
    try:
        return base64.b64decode(embedding, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from None


def _checked(vectors: list[bytes]) -> tuple[bytes, ...]:
    """Return the vectors as bytes.

    Raises:
        ValueError: a vector is empty, differs in length from the others, or is not finite.
    """
    sizes = {len(vector) for vector in vectors}
    if len(sizes) > 1 or 0 in sizes or any(size % FLOAT_BYTES for size in sizes):
        raise ValueError(f"vectors of different or invalid sizes: {sorted(sizes)} bytes")
    for vector in vectors:
        if not all(map(math.isfinite, struct.unpack(f"<{len(vector) // FLOAT_BYTES}f", vector))):
            raise ValueError("a vector is not finite")
    return tuple(vectors)
