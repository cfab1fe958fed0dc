"""Sends a plan: on its schedule whatever the server does, or in a closed loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import replace
from typing import Final, TypeAlias

import aiohttp

from draftgate.loadgen.planning.plan import Load, Plan
from draftgate.loadgen.sending.client import ClientTimeouts, HttpExchange
from draftgate.loadgen.sending.clock import Clock, start_clock
from draftgate.loadgen.sending.flows import whole
from draftgate.loadgen.sending.health import HealthMonitor, without_full_gc
from draftgate.loadgen.types import SINGLE, LoadRun, PlannedRequest, Record

TIMER_S: Final = 0.001
"""Resolution of the event loops' timers (epoll's and libuv's milliseconds): shorter sleeps would
only spin."""

Send: TypeAlias = Callable[[PlannedRequest, float], object]
"""Starts a request, given its instant, and returns at once."""


async def run_plan(  # noqa: PLR0913 - the keywords have defaults
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    plan: Iterable[PlannedRequest],
    *,
    concurrency: int | None = None,
    patience: ClientTimeouts | None = None,
    on_start: Callable[[PlannedRequest], None] = lambda _: None,
    on_record: Callable[[Record], None] = lambda _: None,
    start_clock: Callable[[], Clock] = start_clock,
) -> LoadRun:
    """Send all questions of the plan, wait for their answers, and return the run.

    Without `concurrency` the loop is open: each request starts at its instant `at_s`, however many
    are still open, since waiting for answers would hide what a user who comes then would suffer
    (coordinated omission). The schedule is absolute: a late start makes no later one late, and late
    requests start at once. With `concurrency` so many clients ask one request after the other.

    The plan is read as it is needed, the next request while the last ones are answered: make it
    beforehand (`list`) if making a question takes more than a millisecond.

    Cancelling (Ctrl-C under `asyncio.run`) stops the run: open requests are closed and recorded as
    `interrupted`, and the run so far is returned.

    Args:
        session: from `open_session`.
        url: the server's, without a path.
        patience: how long to wait for an answer.
        on_start: told of each question as it starts.
        on_record: told of each question when it is over, with all its requests.

    Raises:
        ExceptionGroup: of a ValueError: a request has an instant in a closed loop, or none in an
            open one.
    """
    clock = start_clock()
    run, ids, waits = LoadRun({}), set[str](), patience or ClientTimeouts()

    async def answer(planned: PlannedRequest, scheduled_s: float) -> None:
        """Send the requests of a question, each when the one before it is over."""
        hops = list[Record]()
        on_start(planned)
        try:
            due_s = scheduled_s
            while asked := planned.flow.next(planned.request, hops, clock() - scheduled_s):
                request = replace(planned, request=asked, flow=SINGLE)
                current = HttpExchange(request, clock, due_s, waits, ids)
                try:
                    await current.run(session, url, model)
                finally:
                    hops.append(current.record())
                due_s = hops[-1].end_s
        finally:
            if hops:
                run.records.append(whole(planned, hops))
                on_record(run.records[-1])

    with without_full_gc(), HealthMonitor(clock) as monitor:
        try:
            async with asyncio.TaskGroup() as tasks:
                if concurrency is None:
                    run.scheduled_duration_s = await send_on_schedule(
                        plan, lambda p, at_s: tasks.create_task(answer(p, at_s)), clock
                    )
                else:
                    requests = iter(plan)
                    for _ in range(concurrency):
                        tasks.create_task(_client(requests, answer, clock))
        except asyncio.CancelledError:
            run.interrupted = True
            if concurrency is None and run.scheduled_duration_s is None:
                run.scheduled_duration_s = clock()
            if (this := asyncio.current_task()) is not None:
                this.uncancel()
        run.duration_s = clock()
        run.health = monitor.health(run.records)
    return run


async def send_on_schedule(
    plan: Iterable[PlannedRequest],
    send: Send,
    clock: Clock,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> float:
    """Call `send` for each request at its instant, never before; return the last one's instant.

    Other tasks get their turn between any two requests, however late they are.

    Raises:
        ValueError: a request has no instant.
    """
    at_s = 0.0
    for planned in plan:
        if planned.at_s is None:
            raise ValueError(f"request {planned.index} of an open loop has no instant")
        at_s = planned.at_s
        while (wait_s := at_s - clock()) > 0:
            await sleep(max(wait_s, TIMER_S))
        send(planned, at_s)
        await sleep(0)
    return at_s


def requests_of(plan: Plan, load: Load) -> Iterable[PlannedRequest]:
    """Return a plan's requests; those of a closed loop end with the load's duration, if it has one.

    An open loop's schedule is as long as that already.
    """
    if plan.concurrency is None or load.duration_s is None:
        return plan.requests
    return until(plan.requests, load.duration_s)


def until(requests: Iterable[PlannedRequest], duration_s: float) -> Iterator[PlannedRequest]:
    """Yield requests until so much time has passed since the first was taken."""
    clock = start_clock()
    for planned in requests:
        if clock() >= duration_s:
            return
        yield planned


async def _client(
    requests: Iterator[PlannedRequest],
    answer: Callable[[PlannedRequest, float], Awaitable[None]],
    clock: Clock,
) -> None:
    """One client of a closed loop; all of them take their requests from the same plan."""
    for planned in requests:
        if planned.at_s is not None:
            raise ValueError(f"request {planned.index} of a closed loop has an instant")
        await answer(planned, clock())
