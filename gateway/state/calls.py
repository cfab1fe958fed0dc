"""Bounded calls to a server that may be slow or unavailable, behind a circuit breaker.

No caller waits longer than the deadline, and none waits while the breaker is open. A call that
misses its deadline continues in the background, so that its connection stays in order and a late
success is noticed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from enum import Enum, auto
from functools import partial
from typing import Any, Final, TypeVar

from draftgate.gateway.state.store import StoreError
from draftgate.gateway.telemetry.logs import log
from draftgate.policies.resilience.breaker import Breaker, Patience

T = TypeVar("T")
Call = Callable[[], Coroutine[Any, Any, T]]

DEADLINE_S: Final = 0.02
"""Deadline of a call.

A round trip with a script takes less than a millisecond in a data centre, and a few more while the
server forks. A request can lose 20 ms unnoticed before its first token, which takes ten times as
long. (Chosen, not tuned; 2026-11-22.)"""

PATIENCE: Final = Patience(failures=3, timeouts_span_s=2.0, first_pause_s=0.5, longest_pause_s=5.0)
"""When the breaker opens, and how often it probes.

Two seconds of timeouts cost each request 20 ms. Opening without need costs all requests what other
gateways know. A probe is cheap, and a failover takes some seconds. (Chosen, not tuned;
2026-11-22.)"""

MOST_CALLS: Final = 64
"""Maximum calls in flight, including those that missed their deadline.

At a millisecond per call that is 64,000 calls a second, so only a stuck server reaches it. Further
calls fail at once."""

JITTER: Final = 0.5
"""Pauses are extended by a random share up to this, so that gateways do not return all at once."""

_STALL_S: Final = 0.005
"""A timer that fires this late shows that the event loop stalled: no callback may take 5 ms."""


class GuardedCalls:
    """Calls a server while it answers, and probes it in the background while it does not."""

    def __init__(
        self,
        probe: Call[object],
        back: Call[None],
        *,
        clock: Callable[[], float],
        uniform: Callable[[], float],
        patience: Patience = PATIENCE,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        """Start with a closed breaker.

        Args:
            probe: the call that tests whether the server is back.
            back: called once the server is back.
            clock: monotonic seconds.
            uniform: draws from [0, 1), for jitter.
        """
        self._probe = probe
        self._back = back
        self._clock = clock
        self._uniform = uniform
        self._first_pause_s = patience.first_pause_s
        self._deadline_s = deadline_s
        self._breaker = Breaker(patience)
        self._calls: set[asyncio.Task[Any]] = set()
        self._returning: asyncio.Task[None] | None = None

    @property
    def outage(self) -> str | None:
        """Why the breaker is open; None while it is closed."""
        return self._breaker.reason

    async def ask(self, call: Call[T], when_late: Callable[[], None] = lambda: None) -> T:
        """Return the answer to a call.

        Args:
            when_late: called if the call succeeds after its deadline.

        Raises:
            StoreError: the call failed, or did not finish in time.
        """
        if self.outage is not None:
            raise StoreError(self.outage)
        if len(self._calls) >= MOST_CALLS:
            raise StoreError("too many calls wait for the state store")
        return await self._ask(call, when_late)

    async def close(self) -> None:
        """Cancel all calls. Idempotent."""
        ending = [*self._calls, *([self._returning] if self._returning else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _ask(self, call: Call[T], when_late: Callable[[], None]) -> T:
        task = asyncio.create_task(call())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            end = await _wait_for_answer(task, self._deadline_s, self._clock)
        finally:
            if not task.done():
                task.add_done_callback(partial(_came_late, when_late))
        if end is _Wait.STALLED:
            raise StoreError("the event loop stalled")
        if end is _Wait.TIMED_OUT:
            reason = f"no answer within {self._deadline_s * 1e3:g} ms"
            self._failed(reason, timeout=True)
            raise StoreError(reason)
        try:
            answer = task.result()
        except StoreError as error:
            self._failed(str(error), timeout=False)
            raise
        self._breaker.succeeded()
        return answer

    def _failed(self, reason: str, *, timeout: bool) -> None:
        self._breaker.failed(reason, self._clock(), timeout=timeout)
        if self.outage is not None and self._returning is None:
            # In an empty context, so that log lines carry no request id.
            self._returning = asyncio.create_task(self._return(), context=Context())

    async def _return(self) -> None:
        """Wait until the server is back, then call `back`; repeat while the breaker opens again."""
        try:
            while self.outage is not None:
                await self._outlast()
                await self._back()
        finally:
            self._returning = None

    async def _outlast(self) -> None:
        """Probe until the server answers."""
        since_s = self._clock()
        log(logging.WARNING, "state store is out", reason=self.outage)
        while self.outage is not None:
            pause_s = self._breaker.remaining_s(self._clock()) or self._first_pause_s
            await asyncio.sleep(pause_s * (1 + JITTER * self._uniform()))
            with suppress(StoreError):
                await self._ask(self._probe, lambda: None)
        log(logging.INFO, "state store is back", after_s=round(self._clock() - since_s, 3))


def _came_late(when_late: Callable[[], None], task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is None:
        when_late()


class _Wait(Enum):
    """How a wait ended."""

    ANSWERED = auto()
    TIMED_OUT = auto()
    STALLED = auto()
    """The event loop stalled, so the answer may be unread in a socket."""


async def _wait_for_answer(
    call: asyncio.Task[Any], deadline_s: float, clock: Callable[[], float]
) -> _Wait:
    """Wait for a call without cancelling it, not even when the waiting task is cancelled.

    If the event loop stalls during the wait, the call gets its time again, once. A second stall is
    not the server's fault either.

    Args:
        clock: monotonic seconds, which advance while the event loop stalls.
    """
    for _ in range(2):
        begin_s = clock()
        await asyncio.wait({call}, timeout=deadline_s)
        if call.done():
            return _Wait.ANSWERED
        if clock() - begin_s < deadline_s + _STALL_S:
            return _Wait.TIMED_OUT
    return _Wait.STALLED
