"""Bounded calls to a server that may be slow or unavailable, with a circuit breaker.

No caller waits longer than the deadline, and no caller waits while the breaker is open. A call that
misses its deadline continues in the background, so that its connection stays in order. A late
success still counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from enum import Enum, auto
from functools import partial
from typing import Any, Final

from draftgate.gateway.logs import log
from draftgate.gateway.state.commands import StoreCommand, T
from draftgate.gateway.state.store import RemoteStore, StoreError
from draftgate.policies.resilience.breaker import Breaker, Patience

DEADLINE_S: Final = 0.02
"""Deadline of a call.

A round trip with a script takes less than a millisecond in a data centre, and a few milliseconds
while the server forks. A delay of 20 ms is a tenth of the usual time to first token. (Chosen, not
tuned, 2026-11-22.)"""

QUOTA_DEADLINE_S: Final = 0.5
"""Deadline of a call that reserves, renews or settles quotas.

It exceeds `DEADLINE_S`, because a wrong lease only delays sequences, but a wrong grant is not taken
back. It is half of the time after which the client closes a connection. (Chosen, not tuned,
2026-11-28.)"""

RESPONSE_DEADLINE_S: Final = 0.5
"""Deadline of a call for a stored response.

A response of 2 kB is stored in 0.2 ms, of 1 MB in 7 ms, and of 8 MB in 58 ms. The slowest of 30
calls took 190 ms. Only the client that stores or continues the response waits. (Redis 7.0 on the
same busy machine, AMD EPYC, 2026-11-23.)"""

PATIENCE: Final = Patience(failures=3, timeouts_span_s=2.0, first_pause_s=0.5, longest_pause_s=5.0)
"""The limits at which the breaker opens, and the pauses between its probes.

Two seconds of timeouts cost each request 20 ms. An unnecessary opening hides the data of other
gateways from all requests. A probe is cheap, and a failover takes some seconds. (Chosen, not tuned,
2026-11-22.)"""

MOST_CALLS: Final = 64
"""Maximum calls in flight, including those that missed their deadline.

The limit is 64,000 calls a second at a millisecond per call, so only a hung server or a burst
reaches it. Further calls fail immediately, or wait for their turn."""

JITTER: Final = 0.5
"""Maximum random extension of pauses, as a share, so that gateways do not return together."""

_TOO_MANY: Final = "too many calls wait for the state store"

_STALL_S: Final = 0.005
"""Delay of a timer that shows a stall of the event loop, since no callback may take 5 ms."""


class GuardedCalls:
    """A caller of a remote store, with a circuit breaker.

    A background task probes the store during an outage.

    Attributes:
        on_recovery: a callback after the store has recovered.
    """

    def __init__(
        self,
        remote: RemoteStore,
        probe: StoreCommand[Any],
        *,
        purpose: str,
        clock: Callable[[], float],
        uniform: Callable[[], float],
        patience: Patience = PATIENCE,
        deadline_s: float = DEADLINE_S,
        takes_turns: bool = False,
    ) -> None:
        """Start with a closed breaker.

        Args:
            probe: the command that tests whether the store has recovered.
            purpose: the purpose of the calls, for log lines.
            clock: a monotonic clock, in seconds.
            uniform: a function that draws from [0, 1), for jitter.
            patience: the limits of the breaker.
            deadline_s: deadline of a call, in seconds.
            takes_turns: whether calls beyond `MOST_CALLS` wait for their turn. Otherwise they fail.
        """
        self.on_recovery: Callable[[], Awaitable[None]] = _do_nothing
        self._remote = remote
        self._probe = probe
        self._clock = clock
        self._uniform = uniform
        self._first_pause_s = patience.first_pause_s
        self._deadline_s = deadline_s
        self._purpose = purpose
        self._takes_turns = takes_turns
        self._turns = asyncio.Semaphore(MOST_CALLS)
        self._breaker = Breaker(patience)
        self._calls: set[asyncio.Task[Any]] = set()
        self._recovering: asyncio.Task[None] | None = None

    @property
    def outage(self) -> str | None:
        """The reason why the breaker is open, or None while it is closed."""
        return self._breaker.reason

    async def run(
        self, command: StoreCommand[T], when_late: Callable[[], None] = lambda: None
    ) -> T:
        """Return the result of a command.

        Args:
            when_late: a callback for a call that succeeds after its deadline.

        Raises:
            StoreError: the call failed, or did not finish in time.
        """
        if self.outage is not None:
            raise StoreError(self.outage)
        if self._takes_turns:
            return await self._run(self._in_turn(command, self._clock()), when_late)
        if len(self._calls) >= MOST_CALLS:
            raise StoreError(_TOO_MANY)
        return await self._run(self._remote.call(command), when_late)

    async def close(self) -> None:
        """Cancel all calls.

        The method is idempotent.
        """
        ending = [*self._calls, *([self._recovering] if self._recovering else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _in_turn(self, command: StoreCommand[T], begin_s: float) -> T:
        """Make a call once fewer than `MOST_CALLS` others are in flight.

        Raises:
            StoreError: the deadline passed before, so that the result is not needed.
        """
        async with self._turns:
            if self._clock() - begin_s > 2 * self._deadline_s:  # the wait may have been repeated
                raise StoreError(_TOO_MANY)
            return await self._remote.call(command)

    async def _run(self, call: Coroutine[Any, Any, T], when_late: Callable[[], None]) -> T:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        end = None
        try:
            end = await _wait_for_answer(task, self._deadline_s, self._clock)
        finally:
            # A cancelled caller reads no result, even if the call has ended at the same time.
            if end is not _Wait.ANSWERED:
                task.add_done_callback(partial(_on_late_result, when_late))
        if end is _Wait.STALLED:
            raise StoreError("the event loop stalled")
        if end is _Wait.TIMED_OUT:
            reason = f"no response within {self._deadline_s * 1e3:g} ms"
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
        if self.outage is not None and self._recovering is None:
            # An empty context keeps request ids out of the log lines.
            self._recovering = asyncio.create_task(self._recover(), context=Context())

    async def _recover(self) -> None:
        """Wait until the server has recovered, and then call `on_recovery`."""
        try:
            while self.outage is not None:
                await self._probe_until_up()
                await self.on_recovery()
        finally:
            self._recovering = None

    async def _probe_until_up(self) -> None:
        """Probe until the server responds."""
        since_s = self._clock()
        log(
            logging.WARNING, "state store is unavailable", reason=self.outage, purpose=self._purpose
        )
        while self.outage is not None:
            pause_s = self._breaker.remaining_s(self._clock()) or self._first_pause_s
            await asyncio.sleep(pause_s * (1 + JITTER * self._uniform()))
            with suppress(StoreError):
                await self._run(self._remote.call(self._probe), lambda: None)
        after_s = round(self._clock() - since_s, 3)
        log(logging.INFO, "state store recovered", after_s=after_s, purpose=self._purpose)


async def _do_nothing() -> None:
    """Do nothing after a recovery, because the store holds nothing for this gateway."""


def _on_late_result(when_late: Callable[[], None], task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is None:
        when_late()


class _Wait(Enum):
    """The outcome of a wait."""

    ANSWERED = auto()
    TIMED_OUT = auto()
    STALLED = auto()
    """The event loop stalled, so the response may be unread in a socket."""


async def _wait_for_answer(
    call: asyncio.Task[Any], deadline_s: float, clock: Callable[[], float]
) -> _Wait:
    """Wait for a call. The call continues even if the waiting task is cancelled.

    The wait is repeated once if the event loop stalls. A second stall is not the server's fault
    either.

    Args:
        clock: a monotonic clock in seconds, which advances while the event loop stalls.
    """
    for _ in range(2):
        begin_s = clock()
        await _wait(call, deadline_s)
        if call.done():
            return _Wait.ANSWERED
        if clock() - begin_s < deadline_s + _STALL_S:
            return _Wait.TIMED_OUT
    return _Wait.STALLED


async def _wait(call: asyncio.Task[Any], timeout_s: float) -> None:
    """Wait until a call has ended, or for `timeout_s`. `asyncio.wait` takes 6 us longer."""
    loop = asyncio.get_running_loop()
    end: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(timeout_s, _set, end)
    call.add_done_callback(partial(_set, end))
    try:
        await end
    finally:
        timer.cancel()


def _set(end: asyncio.Future[None], _: object = None) -> None:
    if not end.done():
        end.set_result(None)
