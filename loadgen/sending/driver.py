"""Sends a plan in an open loop, regardless of the server's pace, or in a closed loop."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.planning.plan import Load, Plan
from draftgate.loadgen.sending.client import Clock, OpenAIClient, StreamExchange, start_clock
from draftgate.loadgen.sending.health import monitor_health, without_full_gc
from draftgate.loadgen.types import SINGLE, LoadRun, PlannedRequest, Record, Single

TIMER_S: Final = 0.001
"""Resolution of the event loops' timers (milliseconds in epoll and libuv). Shorter sleeps would
only spin."""

Send: TypeAlias = Callable[[PlannedRequest, float], object]
"""Starts a request at its time and returns without waiting for the response."""


async def run_plan(
    client: OpenAIClient,
    plan: Iterable[PlannedRequest],
    *,
    concurrency: int | None = None,
    on_start: Callable[[PlannedRequest], None] = lambda _: None,
    on_record: Callable[[Record], None] = lambda _: None,
    start_clock: Callable[[], Clock] = start_clock,
) -> LoadRun:
    """Send all requests of a plan, wait for their responses, and return the run.

    The loop is open without `concurrency`: each request starts at its time `at_s`, regardless of
    the number of open requests. Waiting for responses would hide the delay of later users
    (coordinated omission). The schedule is absolute, so a late start delays no other request, and
    late requests start immediately. With `concurrency`, that many clients each send one request
    after another.

    The loop reads the plan while it sends requests. Pass a list if a request takes more than a
    millisecond to build.

    Cancelling (Ctrl-C under `asyncio.run`) stops the run. Open requests are closed and recorded as
    `interrupted`, and the function returns the run so far.

    Args:
        on_start: called with each planned request as it starts.
        on_record: called with the record of each planned request as it ends.

    Raises:
        ExceptionGroup: holds a ValueError if a request of a closed loop has a time, or a request
            of an open loop has none.
    """
    clock, run, ids = start_clock(), LoadRun({}), set[str]()

    async def answer(planned: PlannedRequest, scheduled_s: float) -> None:
        """Send the requests of a flow, each after the previous request has ended."""
        hops, due_s = list[Record](), scheduled_s
        flow_id = secrets.token_hex(8)  # A server may still remember the flows of earlier runs.
        on_start(planned)
        try:
            while spec := planned.flow.next(planned.request, hops, clock() - scheduled_s):
                if spec.flow_deadline_s is not None:
                    spec = replace(spec, flow_id=flow_id)
                hop = replace(planned, request=spec, flow=SINGLE)
                exchange = StreamExchange(client, hop, clock, due_s, ids)
                try:
                    await exchange.run()
                finally:
                    hops.append(exchange.record())
                due_s = hops[-1].end_s
        finally:
            if hops:
                run.records.append(merge_hops(planned, hops))
                on_record(run.records[-1])

    with without_full_gc(), monitor_health(clock) as health:
        try:
            async with asyncio.TaskGroup() as tasks:
                if concurrency is None:
                    run.scheduled_duration_s = await send_on_schedule(
                        plan, lambda p, at_s: tasks.create_task(answer(p, at_s)), clock
                    )
                else:
                    requests = iter(plan)
                    for _ in range(concurrency):
                        tasks.create_task(_run_client(requests, answer, clock))
        except asyncio.CancelledError:
            run.interrupted = True
            if concurrency is None and run.scheduled_duration_s is None:
                run.scheduled_duration_s = clock()
            resume_after_cancel()
        run.duration_s = clock()
        run.health = health(run.records)
    return run


def resume_after_cancel() -> None:
    """Let the current task continue after it caught its own cancellation."""
    if (task := asyncio.current_task()) is not None:
        task.uncancel()


async def send_on_schedule(
    plan: Iterable[PlannedRequest],
    send: Send,
    clock: Clock,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> float:
    """Call `send` for each request at its time, never before, and return the last time.

    Other tasks run between any two requests, even if the requests are late.

    Raises:
        ValueError: a request has no time.
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


def timed_requests(plan: Plan, load: Load) -> Iterator[PlannedRequest]:
    """Yield the requests of a plan until the duration of a closed loop has passed.

    The schedule of an open loop already ends at its duration.
    """
    clock = start_clock()
    limited = plan.concurrency is not None and load.duration_s is not None
    for planned in plan.requests:
        if limited and clock() >= (load.duration_s or 0.0):
            return
        yield planned


def merge_hops(planned: PlannedRequest, hops: Sequence[Record]) -> Record:
    """Return the record of a flow as its user saw it. A single request's record is unchanged.

    Text, usage and metrics are those of the last request. Latencies count from the time of the
    user's question, and the user's SLO applies. A failed request fails the flow, even if the flow
    found a way around the failure, because the response differs from a normal response.

    Args:
        hops: the records of one or more requests, in order.
    """
    if isinstance(planned.flow, Single):
        return hops[0]
    first, last = hops[0], hops[-1]
    fault = next((hop for hop in hops if hop.verdict != Verdict.OK), None)
    request = replace(last.planned.request, slo=planned.request.slo, hop="", facts=())
    return replace(
        last,
        # The record drops its flow, because a flow may hold a whole index of passages.
        planned=replace(planned, request=request, flow=SINGLE),
        scheduled_s=first.scheduled_s,
        sent_s=first.sent_s,
        connect_s=first.connect_s,
        verdict=Verdict.OK.value if fault is None else fault.verdict,
        detail="" if fault is None else f"{fault.planned.request.hop}: {fault.detail}",
        vectors=(),
        hops=tuple(replace(hop, vectors=()) for hop in hops),
    )


async def _run_client(
    requests: Iterator[PlannedRequest],
    answer: Callable[[PlannedRequest, float], Awaitable[None]],
    clock: Clock,
) -> None:
    """Run one client of a closed loop. All clients take their requests from the same plan."""
    for planned in requests:
        if planned.at_s is not None:
            raise ValueError(f"request {planned.index} of a closed loop has an instant")
        await answer(planned, clock())
