"""Numbers of the requests on a connection, each used once."""

from __future__ import annotations

from itertools import count


class Numbers:
    """Which number stands for which request that runs."""

    def __init__(self) -> None:
        """Begin with none."""
        self._next = count()
        self._number_of: dict[str, int] = {}
        self._request_of: dict[int, str] = {}

    def give(self, request_id: str) -> int:
        """Return a new number for a request that has none."""
        number = next(self._next)
        self._number_of[request_id] = number
        self._request_of[number] = request_id
        return number

    def of(self, request_id: str) -> int | None:
        """Return the number of a request; None if it has none any more."""
        return self._number_of.get(request_id)

    def request_id(self, number: int) -> str | None:
        """Return the request that a number stands for; None if it is over."""
        return self._request_of.get(number)

    def forget(self, request_id: str) -> int | None:
        """Let a request have none any more; return the one it had."""
        number = self._number_of.pop(request_id, None)
        if number is not None:
            del self._request_of[number]
        return number
