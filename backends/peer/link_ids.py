"""Ids of requests on a connection to a peer."""

from __future__ import annotations

from itertools import count


class LinkIds:
    """Ids of the running requests on one connection, each of which is used once."""

    def __init__(self) -> None:
        self._next = count()
        self._id_of: dict[str, str] = {}
        self._request_of: dict[str, str] = {}

    def new_id(self, request_id: str) -> str:
        """Return a new id for a request without an id."""
        link_id = str(next(self._next))
        self._id_of[request_id] = link_id
        self._request_of[link_id] = request_id
        return link_id

    def id_of(self, request_id: str) -> str | None:
        """Return the id of a request, or None if it no longer runs."""
        return self._id_of.get(request_id)

    def request_of(self, link_id: str) -> str | None:
        """Return the request with this id, or None if it no longer runs."""
        return self._request_of.get(link_id)

    def forget(self, request_id: str) -> str | None:
        """Forget a request that no longer runs, and return its id."""
        link_id = self._id_of.pop(request_id, None)
        if link_id is not None:
            del self._request_of[link_id]
        return link_id
