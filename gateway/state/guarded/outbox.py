"""Values that a remote store gets in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from typing import Generic, TypeVar

from draftgate.gateway.state.commands import StoreCommand
from draftgate.gateway.state.guarded.calls import GuardedCalls
from draftgate.gateway.state.store import StoreError

V = TypeVar("V")


class Outbox(Generic[V]):
    """Values by request, which a background task sends in batches, and again after a failure."""

    def __init__(
        self,
        calls: GuardedCalls,
        command: Callable[[tuple[V, ...]], StoreCommand[None]],
        at_once: int,
        clock: Callable[[], float],
    ) -> None:
        """Start empty.

        Args:
            command: the command that sends values.
            at_once: maximum number of values in a command.
            clock: a monotonic clock, in seconds.
        """
        self.writing = asyncio.Lock()  # held while a command runs
        self._calls = calls
        self._command = command
        self._at_once = at_once
        self._clock = clock
        self._pending: dict[str, tuple[V, float]] = {}  # with their expiry
        self._sending: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def get(self, request_id: str, otherwise: V) -> V:
        """Return the value of a request that has not been sent, or `otherwise`."""
        return self._pending.get(request_id, (otherwise, 0.0))[0]

    def put(self, request_id: str, value: V, ttl_s: float) -> None:
        """Send a value soon, which replaces that of its request.

        Args:
            ttl_s: the time after which the store needs no value, because it has forgotten the
                request.
        """
        now_s = self._clock()
        self._pending.pop(request_id, None)  # insert again, to keep the order by time
        self._pending[request_id] = value, now_s + ttl_s
        while next(iter(self._pending.values()))[1] <= now_s:
            del self._pending[next(iter(self._pending))]
        self.start()

    def drop(self, request_id: str) -> None:
        """Do not send the value of a request."""
        self._pending.pop(request_id, None)

    def start(self) -> None:
        """Send the values in the background, if the store responds."""
        if self._pending and self._sending is None and self._calls.outage is None:
            self._sending = asyncio.create_task(self._send())

    async def close(self) -> None:
        """Send the values, if the store responds."""
        self.start()
        if self._sending is not None:
            await self._sending

    async def _send(self) -> None:
        """Send all values in batches, until a call fails."""
        try:
            while self._pending:
                async with self.writing:
                    batch = dict(islice(self._pending.items(), self._at_once))
                    command = self._command(tuple([value for value, _ in batch.values()]))
                    sent = partial(self._on_sent, batch)
                    await self._calls.run(command, sent)
                    sent()
        except StoreError:
            return
        finally:
            self._sending = None

    def _on_sent(self, batch: Mapping[str, tuple[V, float]]) -> None:
        """Forget values that the store has, unless they are to be sent again."""
        for request_id, sent in batch.items():
            if self._pending.get(request_id) is sent:
                del self._pending[request_id]
