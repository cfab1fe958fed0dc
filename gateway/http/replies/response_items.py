"""The output items of a response in the making, and the events that tell of them.

States of an item: *open* (its events: added, deltas), *done* (its events: done). One is open at a
time; another one begins when text becomes a call, or a call another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from draftgate.gateway.http.replies.calls import call_id
from draftgate.gateway.http.replies.response_shapes import (
    FunctionCallItem,
    MessageItem,
    OutputText,
)
from draftgate.gateway.http.requests.tools import OfferedTools
from draftgate.gateway.http.tools.parsing import CallParser, Piece

Event = Callable[..., bytes]


class OutputItems:
    """Reads the text of an answer and keeps its items."""

    def __init__(self, request_id: str, tools: OfferedTools | None, event: Event) -> None:
        """Begin without an item.

        Args:
            request_id: unique; the items' ids are made of it.
            tools: what may be called; None, and all is text.
            event: encodes an event of its type and fields.
        """
        self.items: list[MessageItem | FunctionCallItem] = []
        self._request_id = request_id
        self._event = event
        self._parser = None
        if tools is not None:
            self._parser = CallParser(tools.dialect, tools.names, several=tools.several)
        self._open = False

    def add(self, text: str) -> Iterator[bytes]:
        """Yield the events of more text."""
        yield from self._told(self._parser.add(text) if self._parser else [Piece(text, text)])

    def finish(self, status: str) -> Iterator[bytes]:
        """Yield the events of the end; the last item gets its status."""
        if self._parser is not None:
            yield from self._told(self._parser.finish())
        if not self.items:  # an answer has a message, though it may be empty
            yield from self._begin(MessageItem(self._id("msg"), "in_progress", [OutputText("")]))
        yield from self._close(status)

    def _told(self, pieces: list[Piece]) -> Iterator[bytes]:
        for piece in pieces:
            if piece.content:
                yield from self._say(piece.content)
            elif piece.name:
                yield from self._call(piece.name)
            elif piece.arguments:
                yield from self._argue(piece.arguments)

    def _say(self, text: str) -> Iterator[bytes]:
        item = self.items[-1] if self._open else None
        if not isinstance(item, MessageItem):
            item = MessageItem(self._id("msg"), "in_progress", [OutputText("")])
            yield from self._begin(item)
        item.content[0].text += text
        yield self._at_text("response.output_text.delta", delta=text, logprobs=[])

    def _call(self, name: str) -> Iterator[bytes]:
        called = call_id(f"{self._request_id}/0", self._calls)
        item = FunctionCallItem(self._id("fc"), "in_progress", called, name, "")
        yield from self._begin(item)

    def _argue(self, arguments: str) -> Iterator[bytes]:
        item = self.items[-1]
        assert isinstance(item, FunctionCallItem)
        item.arguments += arguments
        yield self._at_item("response.function_call_arguments.delta", delta=arguments)

    def _begin(self, item: MessageItem | FunctionCallItem) -> Iterator[bytes]:
        yield from self._close("completed")
        self._open = True
        self.items.append(item)
        index = len(self.items) - 1
        if isinstance(item, FunctionCallItem):
            yield self._event("response.output_item.added", output_index=index, item=item)
            return
        empty = MessageItem(item.id, item.status, [])
        yield self._event("response.output_item.added", output_index=index, item=empty)
        yield self._at_text("response.content_part.added", part=item.content[0])

    def _close(self, status: str) -> Iterator[bytes]:
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item.status = status
        if isinstance(item, MessageItem):
            part = item.content[0]
            yield self._at_text("response.output_text.done", text=part.text, logprobs=[])
            yield self._at_text("response.content_part.done", part=part)
        else:
            kind = "response.function_call_arguments.done"
            yield self._at_item(kind, arguments=item.arguments, name=item.name)
        index = len(self.items) - 1
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _at_item(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the last item."""
        index = len(self.items) - 1
        return self._event(kind, output_index=index, item_id=self.items[-1].id, **fields)

    def _at_text(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the text of the last item."""
        return self._at_item(kind, content_index=0, **fields)

    @property
    def _calls(self) -> int:
        return sum(isinstance(item, FunctionCallItem) for item in self.items)

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._request_id}_{len(self.items)}"
