"""The truncation of conversations that exceed the context (`truncation: auto`)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from draftgate.gateway.http.requests.messages import ROLES
from draftgate.gateway.http.requests.schemas import Message


def drop_oldest_turns(
    messages: Sequence[Message], fits: Callable[[list[Message]], bool]
) -> list[Message]:
    """Return a conversation without the oldest turns that prevent it from fitting.

    A turn begins with a user's message, so calls stay together with their results. System messages
    and the last turn always stay.

    Args:
        messages: the whole conversation.
        fits: whether a conversation fits. The function calls it about log2(turns) times.
    """
    starts = [index for index, message in enumerate(messages) if message.role == "user"]

    def without(turns: int) -> list[Message]:
        begin = starts[turns] if turns else 0
        return [
            message
            for index, message in enumerate(messages)
            if index >= begin or ROLES.get(message.role) == "system"
        ]

    optional = range(max(len(starts) - 1, 0))
    return without(bisect_left(optional, True, key=lambda turns: fits(without(turns))))
