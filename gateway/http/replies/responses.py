"""Responses of `/v1/responses`, with the events of their streams.

A stream begins with `response.created` and `response.in_progress`, before its first delta. It ends
with `response.completed`, `response.incomplete` or `response.failed`, and then with `[DONE]`, which
the Open Responses specification requires. The events between them report the output items:
reasoning, messages and function calls. At most one item is open at a time. A new item begins when
anything follows reasoning or a call, or when text precedes a call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from msgspec import UNSET, structs

from draftgate.backends.sampling_params import SamplingParams
from draftgate.backends.types import Delta, FinishReason, TokenLogprob
from draftgate.gateway.errors import GatewayError, TooMany
from draftgate.gateway.http.replies.logprobs import token_logprobs
from draftgate.gateway.http.replies.metric_shapes import OptionalMetrics, ResponseMetrics
from draftgate.gateway.http.replies.output import Output, OutputParser
from draftgate.gateway.http.replies.rendering import DONE, Choices, Rendering, encode, event
from draftgate.gateway.http.replies.response_shapes import (
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    MessageItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningReply,
    ReasoningText,
    ResponseEvent,
    ResponseFailure,
    ResponseReply,
    ResponseUsage,
)
from draftgate.gateway.http.replies.shapes import OptionalUsage, TokenLogprobReply, Usage
from draftgate.gateway.http.requests.reasoning import CLOSED
from draftgate.gateway.http.requests.responses import (
    ReasoningOptions,
    ResponsesBody,
    SchemaTextFormat,
    TextOptions,
)
from draftgate.gateway.http.requests.schemas import TextFormat
from draftgate.gateway.http.requests.validation import ParsedRequest
from draftgate.gateway.tools.parsing import Piece, call_id

SERVER_ERROR: Final = "server_error"
"""OpenAI's code of all responses that a failure of the server ended."""


class ResponseRendering(Rendering):
    """The rendering for `/v1/responses`."""

    id_prefix = "resp_"

    def __init__(self, parsed: ParsedRequest, created_s: int) -> None:
        super().__init__(parsed, created_s)
        assert isinstance(parsed.body, ResponsesBody)
        self._writer = ResponseWriter(
            parsed.job.request_id, parsed.served.name, parsed.body, parsed.job.sampling, created_s
        )
        self._writer.stored = self.stored
        self._parser = OutputParser(parsed)
        self._undecided: list[TokenLogprob] = []  # of tokens that may belong to reasoning

    def response(self, choices: Choices, usage: Usage, metrics: ResponseMetrics) -> bytes:
        """Return the JSON of the whole response, as `Rendering.response` describes."""
        return encode(self._finished(choices, usage, metrics))

    def finish(self, choices: Choices, usage: Usage, metrics: ResponseMetrics) -> bytes:
        """Return the JSON of the response to store, as `Rendering.finish` describes."""
        return encode(self._finished(choices, usage, metrics))

    def chunk(
        self, delta: Delta, usage: OptionalUsage = UNSET, metrics: OptionalMetrics = UNSET
    ) -> bytes:
        """Return the events of a delta, as `Rendering.chunk` describes."""
        self._writer.begin()
        self._writer.note_end(delta.finish_reason, delta.stop_text)
        if delta.text or delta.logprobs:
            self._read(delta.text, delta.logprobs)
        return self._writer.take_events()

    def ending(self, usage: OptionalUsage = UNSET, metrics: OptionalMetrics = UNSET) -> bytes:
        """Return the events after the last delta, as `Rendering.ending` describes."""
        self._writer.begin()
        self._finished((), usage, metrics)
        return self._writer.end(usage, metrics)

    def failure(self, error: GatewayError, request_id: str) -> bytes:
        """Return the events of an error, as `Rendering.failure` describes."""
        self._writer.stored = self.stored = False
        return self._writer.fail(error, request_id)

    def _read(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        output = self._parser.add(text)
        entries = self._of_content(logprobs)
        # Requests with log probabilities have no tools.
        self._writer.add(output, token_logprobs(entries, self._parsed) if entries else None)

    def _of_content(self, entries: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        """Return the entries of content tokens, which follow the token that ends the reasoning."""
        decided = self._parser.is_after_reasoning
        if decided and not self._undecided:
            return entries
        self._undecided += entries
        if not decided:
            return []
        known, self._undecided = self._undecided, []
        end = self._parsed.served.tokenizer.vocabulary.get(CLOSED)
        ends = [index for index, entry in enumerate(known) if entry.token_id == end]
        return known[ends[0] + 1 :] if ends else known

    def _finished(
        self, choices: Choices, usage: OptionalUsage, metrics: OptionalMetrics
    ) -> ResponseReply:
        """Return the response in its final state, which does not change in later calls."""
        writer = self._writer
        if not writer.has_ended:
            for choice in choices:
                writer.note_end(choice.finish_reason, choice.stop_text)
                self._read("".join(choice.texts), choice.logprobs)
            writer.add(self._parser.finish(cut=writer.is_cut))
        writer.stored = self.stored
        return writer.finished(usage, metrics)


class ResponseWriter:
    """Implements `ReplyWriter` for a response in OpenAI's format of `/v1/responses`.

    Attributes:
        stored: whether the response is stored, or is to be stored at its end.
    """

    def __init__(
        self,
        request_id: str,
        model: str,
        body: ResponsesBody,
        sampling: SamplingParams,
        created_s: int,
    ) -> None:
        """Begin a response without items.

        Args:
            request_id: the id from which those of the response, its items and its calls are made.
            model: the name of the model.
            body, sampling: the request, of which the response repeats fields.
            created_s: Unix time in seconds.
        """
        self.model = model
        self.stored = False
        self._reason: FinishReason | None = None
        self._is_filtered = False
        self._request_id = request_id
        self._body = body
        self._sampling = sampling
        self._created_s = created_s
        self._final: ResponseReply | None = None
        self._items: list[Item] = []
        self._item_is_open = False
        self._events: list[bytes] = []  # not yet returned
        self._sent = 0

    @property
    def has_ended(self) -> bool:
        """Whether the response has its final state."""
        return self._final is not None

    @property
    def is_cut(self) -> bool:
        """Whether `max_output_tokens` cut the output short."""
        return self._reason is FinishReason.LENGTH

    def begin(self, usage: OptionalUsage = UNSET) -> None:
        """Add the first events, as `ReplyWriter.begin` describes."""
        if not self._sent:
            begun = self._reply("in_progress")
            self._emit("response.created", response=begun)
            self._emit("response.in_progress", response=begun)

    def note_end(
        self, reason: FinishReason | None, stop_text: str, *, is_filtered: bool = False
    ) -> None:
        """Note what has ended the output, as `ReplyWriter.note_end` describes."""
        self._reason, self._is_filtered = reason, is_filtered

    def add(self, output: Output, logprobs: list[TokenLogprobReply] | None = None) -> None:
        """Add output, which may begin and end items, as `ReplyWriter.add` describes.

        Args:
            logprobs: the log probabilities of the content, if the response has them and no calls.
        """
        reasoning, pieces = output
        self._add_reasoning(reasoning)
        if logprobs is not None:
            self._add_text("".join(piece.content for piece in pieces), logprobs)
            return
        for piece in pieces:
            if piece.content:
                self._add_text(piece.content, [])
            elif piece.name:
                self._begin_call(piece)
            elif piece.arguments:
                item = self._items[-1]
                assert isinstance(item, FunctionCallItem)
                item.arguments += piece.arguments
                self._emit_in_item("response.function_call_arguments.delta", delta=piece.arguments)

    def take_events(self) -> bytes:
        """Return the events that were not returned yet."""
        taken, self._events = b"".join(self._events), []
        return taken

    def end(self, usage: OptionalUsage, metrics: OptionalMetrics) -> bytes:
        """Finish the response, and return the last events, as `ReplyWriter.end` describes."""
        finished = self.finished(usage, metrics)
        self._emit(f"response.{self._status}", response=finished)
        return self.take_events() + DONE

    def whole(self, usage: OptionalUsage, metrics: OptionalMetrics) -> bytes:
        """Finish the response, and return its JSON, as `ReplyWriter.whole` describes."""
        return encode(self.finished(usage, metrics))

    def fail(self, error: GatewayError, request_id: str) -> bytes:
        """End the response with an error, as `ReplyWriter.fail` describes."""
        self.begin()
        failed = self._reply("failed")
        code = error.code if isinstance(error, TooMany) else SERVER_ERROR
        failed.error = ResponseFailure(code, error.message, error.type, **error.retry_field())
        self._emit("response.failed", response=failed)
        return self.take_events() + DONE

    def finished(self, usage: OptionalUsage, metrics: OptionalMetrics) -> ResponseReply:
        """Finish the items and return the response, which does not change in later calls."""
        if self._final is None:
            if not self._items:
                self._begin_message()
            self._close_item(self._status)
            self._final = whole = self._reply(self._status)
            if whole.status == "incomplete":
                why = "content_filter" if self._is_filtered else "max_output_tokens"
                whole.incomplete_details = IncompleteDetails(why)
            whole.usage = None if usage is UNSET else _usage(usage)
            whole.metrics = metrics
        self._final.store = self.stored
        return self._final

    @property
    def _status(self) -> str:
        return "incomplete" if self.is_cut or self._is_filtered else "completed"

    def _emit(self, kind: str, **fields: Any) -> None:
        """Add an event, encoded immediately because items change later."""
        self._events.append(event(encode(ResponseEvent(kind, self._sent, **fields)), kind))
        self._sent += 1

    def _emit_at_item(self, kind: str, **fields: Any) -> None:
        """Add an event about the last item."""
        self._emit(kind, output_index=len(self._items) - 1, **fields)

    def _emit_in_item(self, kind: str, **fields: Any) -> None:
        """Add an event about the content of the last item."""
        self._emit_at_item(kind, item_id=self._items[-1].id, **fields)

    def _add_reasoning(self, text: str) -> None:
        if not text:
            return
        item = self._items[-1] if self._item_is_open else None
        if not isinstance(item, ReasoningItem):
            item = ReasoningItem(self._item_id("rs"), "in_progress", [ReasoningText("")])
            self._begin_item(item, structs.replace(item, content=[]))
            self._emit_in_item("response.content_part.added", content_index=0, part=item.content[0])
        item.content[0].text += text
        self._emit_in_item("response.reasoning_text.delta", content_index=0, delta=text)

    def _add_text(self, text: str, logprobs: list[TokenLogprobReply]) -> None:
        item = self._items[-1] if self._item_is_open else None
        if not isinstance(item, MessageItem):
            item = self._begin_message()
        item.content[0].text += text
        item.content[0].logprobs += logprobs
        added = {"content_index": 0, "delta": text, "logprobs": logprobs}
        self._emit_in_item("response.output_text.delta", **added)

    def _begin_message(self) -> MessageItem:
        item = MessageItem(self._item_id("msg"), "in_progress", [OutputText("")])
        self._begin_item(item, structs.replace(item, content=[]))
        self._emit_in_item("response.content_part.added", content_index=0, part=item.content[0])
        return item

    def _begin_call(self, piece: Piece) -> None:
        calls = sum(isinstance(item, FunctionCallItem) for item in self._items)
        called = piece.call_id or call_id(f"{self._request_id}/0", calls)
        item = FunctionCallItem(self._item_id("fc"), "in_progress", called, piece.name, "")
        self._begin_item(item, item)

    def _begin_item(self, item: Item, shown: Item) -> None:
        self._close_item("completed")
        self._item_is_open = True
        self._items.append(item)
        self._emit_at_item("response.output_item.added", item=shown)

    def _close_item(self, status: str) -> None:
        if not self._item_is_open:
            return
        self._item_is_open = False
        item = self._items[-1]
        item.status = status
        if isinstance(item, MessageItem):
            part = item.content[0]
            done = {"content_index": 0, "text": part.text, "logprobs": part.logprobs}
            self._emit_in_item("response.output_text.done", **done)
            self._emit_in_item("response.content_part.done", content_index=0, part=part)
        elif isinstance(item, ReasoningItem):
            done = {"content_index": 0, "text": item.content[0].text}
            self._emit_in_item("response.reasoning_text.done", **done)
            self._emit_in_item("response.content_part.done", content_index=0, part=item.content[0])
        else:
            kind = "response.function_call_arguments.done"
            self._emit_in_item(kind, arguments=item.arguments, name=item.name)
        self._emit_at_item("response.output_item.done", item=item)

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id}_{len(self._items)}"

    def _reply(self, status: str) -> ResponseReply:
        """Return the response in its present state, which repeats fields of the request."""
        body, sampling = self._body, self._sampling
        return ResponseReply(
            id=f"{ResponseRendering.id_prefix}{self._request_id}",
            created_at=self._created_s,
            completed_at=int(time.time()) if status == "completed" else None,
            model=self.model,
            status=status,
            output=list(self._items),
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            top_logprobs=body.top_logprobs or 0,
            truncation=body.truncation or "disabled",
            reasoning=_reasoning(body.reasoning or ReasoningOptions()),
            text=_text(body.text or TextOptions()),
            tool_choice=body.tool_choice or "auto",
            tools=[{"type": "function", **structs.asdict(tool)} for tool in body.tools or ()],
            max_tool_calls=body.max_tool_calls,
            safety_identifier=body.safety_identifier,
            prompt_cache_key=body.prompt_cache_key,
            user=body.user,
            store=self.stored,
            previous_response_id=body.previous_response_id or None,
        )


def _text(options: TextOptions) -> dict[str, Any]:
    """Return the field `text` with the defaults of its fields."""
    wanted = options.format or TextFormat()
    if isinstance(wanted, SchemaTextFormat):
        wanted = structs.replace(wanted, strict=bool(wanted.strict))
    return {"format": wanted, "verbosity": options.verbosity or "medium"}


def _reasoning(options: ReasoningOptions) -> ReasoningReply:
    return ReasoningReply(options.effort, options.summary or options.generate_summary)


def _usage(usage: Usage) -> ResponseUsage:
    details = usage.completion_tokens_details
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(0 if details is UNSET else details.reasoning_tokens),
        usage.total_tokens,
    )
