"""Function calls of one choice, in the shapes of chat completions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from draftgate.backends.types import FinishReason
from draftgate.gateway.http.replies.shapes import (
    ChatMessage,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from draftgate.gateway.http.requests.tools import OfferedTools
from draftgate.gateway.http.tools.parsing import CallParser, Piece

ID_CHARACTERS: Final = 9
"""Of a call's id: Mistral's templates take no other, and the others do not mind."""


@dataclass(slots=True)
class Read:
    """What a piece of text adds: content, and pieces of calls."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


class ChoiceCalls:
    """Reads the text of one choice."""

    def __init__(self, tools: OfferedTools, seed: str) -> None:
        """Begin. The `seed` of the calls' ids is the request's and the choice's own."""
        self._parser = CallParser(tools.dialect, tools.names, several=tools.several)
        self._seed = seed
        self._count = 0

    def add(self, text: str, *, last: bool) -> Read:
        """Return what is certain with more of the text."""
        pieces = self._parser.add(text)
        return self._collected([*pieces, *self._parser.finish()] if last else pieces)

    def whole(self, text: str) -> ChatMessage:
        """Return the message of the whole text."""
        read = self.add(text, last=True)
        if not read.calls:
            return ChatMessage(read.content)
        calls = [
            ToolCall(str(call.id), FunctionCall(str(call.function.name), call.function.arguments))
            for call in read.calls
        ]
        return ChatMessage(read.content or None, tool_calls=calls)

    def reason(self, reason: FinishReason | None) -> str | None:
        """Return why the choice ended: an end behind calls is one of its own."""
        return "tool_calls" if reason is FinishReason.STOP and self._count else reason

    def _collected(self, pieces: Iterable[Piece]) -> Read:
        """Return pieces as one: a delta has one entry for each call that it continues."""
        read = Read()
        for piece in pieces:
            read.content += piece.content
            if piece.name:
                started = FunctionCallDelta("", piece.name)
                called = call_id(self._seed, self._count)
                read.calls.append(ToolCallDelta(self._count, started, called, "function"))
                self._count += 1
            elif piece.arguments:
                self._current(read).function.arguments += piece.arguments
        return read

    def _current(self, read: Read) -> ToolCallDelta:
        """Return this delta's entry of the call that began last."""
        index = self._count - 1
        if not read.calls or read.calls[-1].index != index:
            read.calls.append(ToolCallDelta(index, FunctionCallDelta("")))
        return read.calls[-1]


def call_id(seed: str, index: int) -> str:
    """Return the id of a choice's call."""
    return hashlib.sha256(f"{seed}/{index}".encode()).hexdigest()[:ID_CHARACTERS]
