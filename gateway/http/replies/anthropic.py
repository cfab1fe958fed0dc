"""Responses of `/v1/messages` in Anthropic's format, with the events of their streams.

A stream begins with `message_start`. The blocks of the message follow, one after the other, each
from `content_block_start` to `content_block_stop`. The stream ends with `message_delta` and
`message_stop`, or with `error`. A new block begins when the kind of output changes, and for every
call.
"""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from msgspec import UNSET

from draftgate.backends.types import Delta, FinishReason
from draftgate.gateway.errors import ErrorFormat, GatewayError
from draftgate.gateway.http.replies.anthropic_shapes import (
    Block,
    MessageEvent,
    MessageEventDelta,
    MessageReply,
    MessageUsage,
)
from draftgate.gateway.http.replies.metric_shapes import OptionalMetrics, ResponseMetrics
from draftgate.gateway.http.replies.output import Output, OutputParser
from draftgate.gateway.http.replies.rendering import (
    Choices,
    Rendering,
    WholeChoice,
    encode,
    error_event,
    event,
)
from draftgate.gateway.http.replies.shapes import OptionalUsage, Usage
from draftgate.gateway.http.requests.anthropic import (
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
    call_input,
)
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.tools.parsing import call_id

Written = TypeVar("Written", TextBlock, ThinkingBlock)


class MessageRendering(Rendering):
    """The rendering for `/v1/messages`."""

    id_prefix = "msg_"

    heartbeat: ClassVar[bytes] = event(encode(MessageEvent("ping")), "ping")

    def __init__(self, parsed: ParsedRequest, created_s: int) -> None:
        super().__init__(parsed, created_s)
        self._parser = OutputParser(parsed)
        self._writer = MessageWriter(parsed.job.request_id, parsed.served.name)

    def response(self, choices: Choices, usage: Usage, metrics: ResponseMetrics) -> bytes:
        """Return the JSON of the whole response, as `Rendering.response` describes."""
        for choice in choices:
            self._read("".join(choice.texts), choice)
        self._finish()
        return self._writer.whole(usage, metrics)

    def chunk(
        self, delta: Delta, usage: OptionalUsage = UNSET, metrics: OptionalMetrics = UNSET
    ) -> bytes:
        """Return the events of a delta, as `Rendering.chunk` describes."""
        self._writer.begin(usage)
        self._read(delta.text, delta)
        return self._writer.take_events()

    def ending(self, usage: OptionalUsage = UNSET, metrics: OptionalMetrics = UNSET) -> bytes:
        """Return the events after the last delta, as `Rendering.ending` describes."""
        self._writer.begin(usage)
        self._finish()
        return self._writer.end(usage, metrics)

    def failure(self, error: GatewayError, request_id: str) -> bytes:
        """Return the event of an error, as `Rendering.failure` describes."""
        return self._writer.fail(error, request_id)

    def _read(self, text: str, end: Delta | WholeChoice) -> None:
        self._writer.note_end(end.finish_reason, end.stop_text)
        self._writer.add(self._parser.add(text))

    def _finish(self) -> None:
        self._writer.add(self._parser.finish(cut=self._writer.is_cut))


class MessageWriter:
    """Implements `ReplyWriter` for a message in Anthropic's format."""

    def __init__(self, request_id: str, model: str) -> None:
        """Begin a message without blocks.

        Args:
            request_id: the id from which those of the message and of its calls are made.
            model: the name of the model.
        """
        self.model = model
        self._request_id = request_id
        self._blocks: list[Block] = []
        self._block_is_open = False
        self._arguments = ""  # of the last call
        self._finish_reason: FinishReason | None = None
        self._stop_text = ""
        self._is_filtered = False
        self._has_begun = False
        self._events: list[bytes] = []  # not yet returned

    @property
    def is_cut(self) -> bool:
        """Whether `max_tokens` cut the output short."""
        return self._finish_reason is FinishReason.LENGTH

    def begin(self, usage: OptionalUsage) -> None:
        """Add the first event, as `ReplyWriter.begin` describes."""
        if not self._has_begun:
            self._has_begun = True
            self._emit("message_start", message=self._reply(usage))

    def note_end(
        self, reason: FinishReason | None, stop_text: str, *, is_filtered: bool = False
    ) -> None:
        """Note what has ended the output, as `ReplyWriter.note_end` describes."""
        self._finish_reason, self._stop_text = reason, stop_text
        self._is_filtered = is_filtered

    def add(self, output: Output) -> None:
        """Add output, which may begin and end blocks, as `ReplyWriter.add` describes."""
        reasoning, pieces = output
        if reasoning:
            self._add_thinking(reasoning)
        for piece in pieces:
            if piece.content:
                self._add_text(piece.content)
            elif piece.name:
                calls = sum(isinstance(block, ToolUseBlock) for block in self._blocks)
                called = piece.call_id or call_id(f"{self._request_id}/0", calls)
                self._begin_block(ToolUseBlock(called, piece.name, {}))
                self._arguments = ""
            elif piece.arguments:
                self._arguments += piece.arguments
                self._emit_delta("input_json_delta", partial_json=piece.arguments)

    def take_events(self) -> bytes:
        """Return the events that were not returned yet."""
        taken, self._events = b"".join(self._events), []
        return taken

    def end(self, usage: OptionalUsage, metrics: OptionalMetrics) -> bytes:
        """End the last block, and return the last events, as `ReplyWriter.end` describes."""
        self._close_block()
        stop = MessageEventDelta(
            stop_reason=self._stop_reason, stop_sequence=self._stop_text or None
        )
        self._emit("message_delta", delta=stop, usage=_usage(usage), metrics=metrics)
        self._emit("message_stop")
        return self.take_events()

    def whole(self, usage: OptionalUsage, metrics: OptionalMetrics) -> bytes:
        """End the last block, and return the message, as `ReplyWriter.whole` describes."""
        self._close_block()
        reply = self._reply(usage)
        reply.stop_reason, reply.stop_sequence = self._stop_reason, self._stop_text or None
        reply.metrics = metrics
        return encode(reply)

    def fail(self, error: GatewayError, request_id: str) -> bytes:
        """Return the event of an error, as `ReplyWriter.fail` describes."""
        return error_event(error, request_id, ErrorFormat.ANTHROPIC)

    @property
    def _stop_reason(self) -> str:
        if self._is_filtered:
            return "refusal"
        if self._stop_text:
            return "stop_sequence"
        if self._finish_reason is FinishReason.LENGTH:
            return "max_tokens"
        called = any(isinstance(block, ToolUseBlock) for block in self._blocks)
        return "tool_use" if called else "end_turn"

    def _reply(self, usage: OptionalUsage) -> MessageReply:
        name = f"{MessageRendering.id_prefix}{self._request_id}"
        return MessageReply(name, self.model, self._blocks, None, None, _usage(usage))

    def _emit(self, kind: str, **fields: Any) -> None:
        """Add an event, encoded immediately because blocks change later."""
        self._events.append(event(encode(MessageEvent(kind, **fields)), kind))

    def _emit_in_block(self, kind: str, **fields: Any) -> None:
        """Add an event about the last block."""
        self._emit(f"content_block_{kind}", index=len(self._blocks) - 1, **fields)

    def _emit_delta(self, kind: str, **fields: str) -> None:
        """Add an event about the content of the last block."""
        self._emit_in_block("delta", delta=MessageEventDelta(kind, **fields))

    def _add_thinking(self, thinking: str) -> None:
        self._open(ThinkingBlock).thinking += thinking
        self._emit_delta("thinking_delta", thinking=thinking)

    def _add_text(self, text: str) -> None:
        self._open(TextBlock).text += text
        self._emit_delta("text_delta", text=text)

    def _open(self, kind: type[Written]) -> Written:
        """Return the open block if it has this kind, or else begin one."""
        block = self._blocks[-1] if self._block_is_open else None
        if not isinstance(block, kind):
            block = kind("")
            self._begin_block(block)
        return block

    def _begin_block(self, block: Block) -> None:
        self._close_block()
        self._block_is_open = True
        self._blocks.append(block)
        self._emit_in_block("start", content_block=block)

    def _close_block(self) -> None:
        if not self._block_is_open:
            return
        self._block_is_open = False
        block = self._blocks[-1]
        if isinstance(block, ToolUseBlock):
            block.input = call_input(self._arguments)
        elif isinstance(block, ThinkingBlock):
            self._emit_delta("signature_delta", signature=block.signature)
        self._emit_in_block("stop")


def _usage(usage: OptionalUsage) -> MessageUsage:
    if usage is UNSET:
        return MessageUsage(0, 0, 0)
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)
