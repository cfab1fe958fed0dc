"""The next calls of sessions that clients have announced, which count as load of their workers.

An agent that calls a tool is back within seconds. Meanwhile its worker looks idle, and would get
other sessions, so that all of them would run on it later.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Final, NamedTuple

from draftgate.policies.routing.types import Candidate
from draftgate.policies.values import replace

MOST_PROMISES: Final = 1 << 14
"""Maximum number of announced calls. Further ones are ignored."""


class _Promise(NamedTuple):
    worker_id: str
    tokens: int
    until_s: float


class Promises:
    """The announced calls, each until it arrives or its time has passed."""

    def __init__(self) -> None:
        self._calls: dict[str, _Promise] = {}  # by session
        self._ends: list[tuple[float, str]] = []  # a heap of the times, also of calls that arrived
        self._loads: dict[str, tuple[int, int]] = {}  # sequences and tokens, by worker

    def __len__(self) -> int:
        """Return the number of announced calls, some of which may be late."""
        return len(self._calls)

    def put(self, session: str, worker_id: str, tokens: int, until_s: float) -> None:
        """Announce the next call of a session on a worker.

        Args:
            tokens: number of tokens of the session so far.
        """
        self.take(session)
        if len(self._calls) >= MOST_PROMISES:
            return
        self._calls[session] = _Promise(worker_id, tokens, until_s)
        self._count(worker_id, 1, tokens)
        if len(self._ends) > 2 * len(self._calls):
            self._ends = [(call.until_s, name) for name, call in self._calls.items()]
            heapq.heapify(self._ends)
        else:
            heapq.heappush(self._ends, (until_s, session))

    def take(self, session: str) -> None:
        """Forget the announced call of a session, if any, because it has arrived."""
        call = self._calls.pop(session, None)
        if call is not None:
            self._count(call.worker_id, -1, -call.tokens)

    def add_to(self, workers: Sequence[Candidate], now_s: float) -> tuple[Candidate, ...]:
        """Return workers whose load contains the announced calls."""
        while self._ends and self._ends[0][0] <= now_s:
            until_s, session = heapq.heappop(self._ends)
            call = self._calls.get(session)
            if call is not None and call.until_s == until_s:
                self.take(session)
        return tuple([_with(one, *self._loads.get(one.worker_id, (0, 0))) for one in workers])

    def _count(self, worker_id: str, sequences: int, tokens: int) -> None:
        present = self._loads.pop(worker_id, (0, 0))
        if present[0] + sequences:
            self._loads[worker_id] = present[0] + sequences, present[1] + tokens


def _with(worker: Candidate, sequences: int, tokens: int) -> Candidate:
    if not sequences:
        return worker
    sent_tokens = worker.sent_tokens + tokens
    return replace(worker, promised_sequences=sequences, sent_tokens=sent_tokens)
