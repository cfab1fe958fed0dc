"""Sessions: the worker on which each client's conversation was last, and how long it was there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, NamedTuple

from draftgate.policies.routing.types import CachedPrefix

MOST_SESSIONS: Final = 1 << 16
"""Maximum number of sessions, 20 MB. The least recently used session is forgotten first."""

SESSION_S: Final = 900.0
"""Seconds after which a session without requests is forgotten. By then, other requests have usually
evicted its prefix from the cache. (Chosen, not tuned, 2026-11-29.)"""


class _Place(NamedTuple):
    worker_id: str
    tokens: int
    until_s: float


class Sessions:
    """The last worker of each session, in bounded memory.

    A session does not bind its requests to a worker. Routing counts the tokens of the conversation
    as cached on its last worker, so that the session moves if that costs less than the wait.
    """

    def __init__(self, most: int = MOST_SESSIONS, lasts_s: float = SESSION_S) -> None:
        """Create a table for a maximum number of sessions, each of which lasts for some seconds."""
        self._most = most
        self._lasts_s = lasts_s
        self._places = OrderedDict[str, _Place]()  # the most recently used session is last

    def __len__(self) -> int:
        """Return the number of sessions, including those that have expired since `record`."""
        return len(self._places)

    def cached(self, session: str, prompt_tokens: int, now_s: float) -> Mapping[str, CachedPrefix]:
        """Return what the session's last worker probably has cached, by its id.

        Args:
            session: the id of the session, which includes its tenant.
            prompt_tokens: number of tokens of the next prompt.
        """
        place = self._places.get(session)
        if place is None or place.until_s <= now_s:
            return {}
        return {place.worker_id: CachedPrefix(max(min(place.tokens, prompt_tokens - 1), 0))}

    def worker(self, session: str, now_s: float) -> str:
        """Return the id of the session's last worker, or an empty text if it is unknown."""
        place = self._places.get(session)
        return "" if place is None or place.until_s <= now_s else place.worker_id

    def record(
        self, session: str, worker_id: str, tokens: int, now_s: float, next_call_s: float = 0.0
    ) -> None:
        """Record the worker of a session's request.

        Args:
            tokens: number of tokens of the prompt, and of the output once it is complete.
            next_call_s: least time for which the session is kept, in seconds.
        """
        places = self._places
        places[session] = _Place(worker_id, tokens, now_s + max(self._lasts_s, next_call_s))
        places.move_to_end(session)
        while len(places) > self._most:
            places.popitem(last=False)
        # Nearly all sessions last equally long, so the first ones expire first.
        while places and next(iter(places.values())).until_s <= now_s:
            places.popitem(last=False)
