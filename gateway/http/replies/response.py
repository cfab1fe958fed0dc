"""Answers in the shape of responses.

A stream begins with `response.created` and `response.in_progress` before its first delta, tells of
items as they come, and ends with `response.completed`, `response.incomplete` or `response.failed`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

from msgspec import UNSET, UnsetType, structs

from draftgate.backends.types import Delta, FinishReason
from draftgate.gateway.errors import GatewayError
from draftgate.gateway.http.replies.rendering import Frame, WholeChoice, encode
from draftgate.gateway.http.replies.response_items import OutputItems
from draftgate.gateway.http.replies.response_shapes import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseEvent,
    ResponseFailure,
    ResponseReply,
    ResponseUsage,
)
from draftgate.gateway.http.replies.shapes import ResponseMetrics, Usage
from draftgate.gateway.http.requests.responses import ResponsesBody
from draftgate.gateway.http.requests.validation import Call


class ResponseRendering:
    """`/v1/responses`."""

    def __init__(self, frame: Frame, call: Call) -> None:
        self._frame = frame
        self._call = call
        self._sent = 0
        self._items = OutputItems(frame.request_id, call.tools, self._event)
        self._reason: FinishReason | None = None

    def response(
        self, choices: Sequence[WholeChoice], usage: Usage, metrics: ResponseMetrics
    ) -> bytes:
        """See `Rendering`."""
        (choice,) = choices
        self._reason = choice.finish_reason
        text = "".join(choice.texts)
        deque(chain(self._items.add(text), self._items.finish(self._status)), maxlen=0)
        return encode(self._ended(usage, metrics))

    def chunk(
        self,
        delta: Delta,
        usage: Usage | UnsetType = UNSET,
        metrics: ResponseMetrics | UnsetType = UNSET,
    ) -> bytes:
        """See `Rendering`."""
        self._reason = delta.finish_reason
        more = self._items.add(delta.text) if delta.text else ()
        return b"".join(chain(self._opening(), more))

    def ending(
        self, usage: Usage | UnsetType = UNSET, metrics: ResponseMetrics | UnsetType = UNSET
    ) -> bytes:
        """See `Rendering`."""
        events = [*self._opening(), *self._items.finish(self._status)]
        whole = self._ended(usage, metrics)
        return b"".join([*events, self._event(f"response.{self._status}", response=whole)])

    def failure(self, error: GatewayError) -> bytes:
        """See `Rendering`."""
        failed = self._reply("failed")
        failed.error = ResponseFailure("server_error", error.message)
        return b"".join([*self._opening(), self._event("response.failed", response=failed)])

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"

    def _opening(self) -> list[bytes]:
        """Return the events of the beginning, once."""
        if self._sent:
            return []
        begun = self._reply("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=begun) for kind in kinds]

    def _event(self, kind: str, **fields: Any) -> bytes:
        """Return a server-sent event under the name of its type. Items change: encode at once."""
        event = encode(ResponseEvent(kind, self._sent, **fields))
        self._sent += 1
        return b"event: " + kind.encode() + b"\ndata: " + event + b"\n\n"

    def _ended(
        self, usage: Usage | UnsetType, metrics: ResponseMetrics | UnsetType
    ) -> ResponseReply:
        whole = self._reply(self._status)
        if whole.status == "incomplete":
            whole.incomplete_details = IncompleteDetails("max_output_tokens")
        whole.usage = None if usage is UNSET else _usage(usage)
        whole.metrics = metrics
        return whole

    def _reply(self, status: str) -> ResponseReply:
        """Return the response as it is, with what it repeats of the request."""
        asked = self._call.asked
        assert isinstance(asked, ResponsesBody)
        sampling = self._call.job.sampling
        wanted = asked.text.format if asked.text is not None else None
        return ResponseReply(
            id=f"resp_{self._frame.request_id}",
            created_at=self._frame.created_s,
            model=self._frame.model,
            status=status,
            output=list(self._items.items),
            instructions=asked.instructions,
            max_output_tokens=asked.max_output_tokens,
            metadata=asked.metadata or {},
            parallel_tool_calls=asked.parallel_tool_calls is not False,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            text={"format": {"type": "text"} if wanted is None else wanted},
            tool_choice=asked.tool_choice or "auto",
            tools=[_tool(tool) for tool in asked.tools or ()],
            user=asked.user,
        )


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool as it was sent, with nothing left out."""
    return {"type": "function", **structs.asdict(tool)}


def _usage(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(),
        usage.total_tokens,
    )
