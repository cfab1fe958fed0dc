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
        fits: whether a conversation fits. The function tries the end of the conversation first, and
            never more than about twice of what fits, because tokenising a long text takes seconds.
    """
    starts = [index for index, message in enumerate(messages) if message.role == "user"]

    def last(turns: int) -> list[Message]:
        begin = starts[-turns] if turns < len(starts) else 0
        return [
            message
            for index, message in enumerate(messages)
            if index >= begin or ROLES.get(message.role) == "system"
        ]

    kept, most = 1, len(starts)
    while kept < most and fits(last(min(2 * kept, most))):
        kept = min(2 * kept, most)
    between = range(kept + 1, min(2 * kept, most))
    return last(kept + bisect_left(between, True, key=lambda turns: not fits(last(turns))))
