"""Calls to a server that may be slow or dead: bounded in time and number, and given up for a while.

A call that runs out of time goes on alone: the connection stays in order, and what it did after all
is heard of. Nobody waits longer than the deadline, and while the breaker is open nobody waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, Final, TypeVar

from draftgate.gateway.state.deadline import Wait, wait_for_answer
from draftgate.gateway.state.store import StoreError
from draftgate.gateway.telemetry.logs import log
from draftgate.policies.resilience.breaker import Breaker, Patience

T = TypeVar("T")
Call = Callable[[], Coroutine[Any, Any, T]]

DEADLINE_S: Final = 0.02
"""Of a call. A round trip within a data centre and a script take less than a millisecond, a fork of
the server some more; 20 ms is what a request can lose unnoticed before its first token, which takes
ten times as long. (Chosen, not tuned; 2026-11-22.)"""

PATIENCE: Final = Patience(failures=3, timeouts_span_s=2.0, first_pause_s=0.5, longest_pause_s=5.0)
"""With a server. Two seconds of timeouts cost each request 20 ms, a wrong verdict costs all of them
what other gateways know. A probe is cheap, and a failover takes some seconds. (Chosen, not tuned;
2026-11-22.)"""

MOST_CALLS: Final = 64
"""So many may be under way, those included that nobody waits for any more. At a millisecond a call
that is 64,000 a second, so only a stuck server has more; further ones get no answer at once."""

JITTER: Final = 0.5
"""A pause is longer by up to this share of it, so that gateways do not come back all at once."""


class GuardedCalls:
    """Asks a server as long as it answers, and looks in the background whether it is back."""

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
        """Begin with trust.

        Args:
            probe: a call that asks whether the server is back.
            back: is done once it is, beside what others ask again.
            clock: seconds that never go back.
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
        """Why nobody is asked now; None while the server answers."""
        return self._breaker.reason

    async def ask(self, call: Call[T], when_late: Callable[[], None] = lambda: None) -> T:
        """Return the answer to a call.

        Args:
            when_late: is called if the server has done it after nobody waited any more.

        Raises:
            StoreError: there is none, in time or at all.
        """
        if self.outage is not None:
            raise StoreError(self.outage)
        if len(self._calls) >= MOST_CALLS:
            raise StoreError("too many calls wait for the state store")
        return await self._ask(call, when_late)

    async def close(self) -> None:
        """End everything that is under way. Idempotent."""
        ending = [*self._calls, *([self._returning] if self._returning else [])]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    async def _ask(self, call: Call[T], when_late: Callable[[], None]) -> T:
        task = asyncio.create_task(call())
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            end = await wait_for_answer(task, self._deadline_s, self._clock)
        finally:
            if not task.done():
                task.add_done_callback(partial(_came_late, when_late))
        if end is Wait.HELD_UP:
            raise StoreError("the event loop was held up")
        if end is Wait.TIMED_OUT:
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
            # In no context: what is logged is about no request.
            self._returning = asyncio.create_task(self._return(), context=Context())

    async def _return(self) -> None:
        """Look whether the server is back, and do what is to be done then."""
        try:
            while self.outage is not None:
                await self._outlast()
                await self._back()
        finally:
            self._returning = None

    async def _outlast(self) -> None:
        """Ask again and again until the server answers."""
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
