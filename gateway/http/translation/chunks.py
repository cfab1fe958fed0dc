"""The responses of chats, whole and in chunks, in the forms of all common servers."""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from draftgate.backends.errors import UpstreamFailed
from draftgate.backends.types import FinishReason
from draftgate.gateway.dispatch.upstreams.error_bodies import read_error
from draftgate.gateway.errors import GatewayError, UpstreamRejection
from draftgate.gateway.http.replies.metric_shapes import OptionalMetrics, ResponseMetrics
from draftgate.gateway.http.replies.output import Output
from draftgate.gateway.http.replies.shapes import (
    CompletionTokensDetails,
    OptionalUsage,
    PromptTokensDetails,
    Usage,
)
from draftgate.gateway.tools.parsing import Piece


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Part(Struct):
    """The message of a response, or a part of it in a chunk.

    The field `reasoning` is the newer name of vLLM.
    """

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(Struct):
    index: int = 0
    delta: _Part | None = None
    message: _Part | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _OutputDetails(Struct):
    reasoning_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _OutputDetails | None = None


class _Chat(Struct):
    choices: list[_Choice] | None = None
    model: str | None = None
    usage: _Usage | None = None
    metrics: Raw | UnsetType = UNSET
    error: Any = None


_chat: Final = msgspec.json.Decoder(_Chat)

_FINISHES: Final = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "tool_calls": FinishReason.STOP,
    "function_call": FinishReason.STOP,
    "content_filter": FinishReason.STOP,
}

_NO_METRICS: Final = (UNSET, Raw(b"null"))
"""The field `metrics` of servers without metrics. vLLM sends null."""

_STATUSES: Final = {"invalid_request_error": 400, "rate_limit_error": 429}
"""The HTTP statuses of errors within a stream, by their type. Others are failures."""


class Chunk(Struct):
    """What a chunk of a chat, or a whole chat, adds to the response.

    Attributes:
        model: the name of the model, or empty without one.
        is_filtered: whether a filter of the upstream has ended the output.
        metrics: the field `metrics` of Draftgate, which the client gets as it was received.
        error: the error that ends the stream in place of output, or None.
    """

    output: Output
    model: str
    finish: FinishReason | None
    stop_text: str
    is_filtered: bool
    usage: OptionalUsage
    metrics: OptionalMetrics
    error: GatewayError | None = None


class ChunkReader:
    """Reads the chunks of one chat, of which only the first choice counts."""

    def __init__(self) -> None:
        self._calls: list[tuple[int | None, str | None]] = []  # index and id of each call

    def read(self, data: bytes) -> Chunk:
        """Return the content of a chunk, or of a whole chat.

        Raises:
            UpstreamFailed: the data is no chat.
        """
        try:
            chat = _chat.decode(data)
        except (ValueError, RecursionError):
            raise UpstreamFailed("its response is not a chat") from None
        metrics: OptionalMetrics = UNSET
        if chat.metrics not in _NO_METRICS:
            metrics = cast("ResponseMetrics", chat.metrics)
        chunk = Chunk(("", []), chat.model or "", None, "", False, _usage(chat.usage), metrics)
        if chat.error is not None:
            chunk.error = _error(data)
            return chunk
        if chat.choices is None:
            raise UpstreamFailed("its response is not a chat")
        for choice in chat.choices:
            if choice.index == 0:
                self._read_choice(choice, chunk)
        return chunk

    def _read_choice(self, choice: _Choice, chunk: Chunk) -> None:
        reason = choice.finish_reason
        if reason is not None:
            if reason not in _FINISHES:
                raise UpstreamFailed(f"the output ended with the reason {reason[:40]!r}")
            chunk.finish, chunk.is_filtered = _FINISHES[reason], reason == "content_filter"
            chunk.stop_text = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        part = choice.delta or choice.message
        if part is None:
            return
        text = (part.content or "") + (part.refusal or "")
        pieces = [Piece("", content=text)] if text else []
        for call in part.tool_calls or ():
            self._read_call(call, pieces)
        chunk.output = part.reasoning_content or part.reasoning or "", pieces

    def _read_call(self, call: _Call, pieces: list[Piece]) -> None:
        """Add the pieces of a call, or of a part of it.

        Blocks and items of the other APIs follow one after the other, so parts of an earlier call
        have no place.
        """
        function = call.function or _Function()
        known, last = self._calls, self._calls[-1] if self._calls else (None, None)
        begins = not known or (
            all(call.index != index for index, _ in known)
            if call.index is not None
            else bool(function.name) and call.id != last[1]
        )
        if begins:
            if not function.name:
                raise UpstreamFailed("a call of a tool begins without a name")
            known.append((call.index, call.id))
            pieces.append(Piece("", name=function.name, call_id=call.id or ""))
        elif call.index is not None and call.index != last[0]:
            raise UpstreamFailed("the parts of several calls of tools alternate")
        if function.arguments:
            pieces.append(Piece("", arguments=function.arguments))


def _usage(sent: _Usage | None) -> OptionalUsage:
    if sent is None:
        return UNSET
    prompt, output = sent.prompt_tokens, sent.completion_tokens or 0
    cached = sent.prompt_tokens_details and sent.prompt_tokens_details.cached_tokens
    reasoning = sent.completion_tokens_details and sent.completion_tokens_details.reasoning_tokens
    details = PromptTokensDetails(cached or 0)
    return Usage(
        prompt, output, prompt + output, details, CompletionTokensDetails(0, 0, reasoning or 0)
    )


def _error(data: bytes) -> GatewayError:
    found = read_error(data)
    status = _STATUSES.get(found.kind or "", 502)
    message = found.message or "the upstream sent an error"
    return UpstreamRejection(message, status, kind=found.kind, param=found.param, code=found.code)
