"""Functions that follow the workers of a pool, print their state, and drain them at the end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from draftgate.gateway.app import Signals, until_signal
from draftgate.gateway.launch.advice import READ_S, PoolLimits
from draftgate.gateway.launch.messages import Restarting, WorkerGone, WorkerStatus

POLL_S: Final = 1.0
"""Interval of reading a worker's status."""

STATUS_TIMEOUT_S: Final = 5.0
"""Timeout of a status. Actors respond within milliseconds, so an actor without a response has not
been placed. (Chosen, not tuned.)"""

STOP_TIMEOUT_S: Final = 15.0
"""Time for workers to stop after the second signal. Their processes take at most 10 s."""

CLEAN_STATUSES: Final = frozenset({0, -signal.SIGTERM})
"""Exit statuses of a stopped worker. A worker that did not listen yet has the second status."""


class State(StrEnum):
    """The state of a worker."""

    WAITING = "waits for Ray"
    LOADING = "loading"
    READY = "ready, not in the pool"
    JOINED = "joined"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"
    LOST = "lost"
    STOPPED = "stopped"


OVER: Final = frozenset({State.FAILED, State.LOST, State.STOPPED})
"""Final states."""


class WorkerActor(Protocol):
    """A worker's actor.

    The class `gateway.launch.cluster.Actor` implements the protocol on Ray.
    """

    name: str

    async def status(self) -> WorkerStatus:
        """Return the status of the worker.

        Raises:
            Restarting, WorkerGone: the actor has exited.
        """
        ...

    async def stop(self) -> int:
        """Drain the worker and return its exit status.

        A second call stops the worker immediately.

        Raises:
            Restarting, WorkerGone: the actor has exited.
        """
        ...

    def end(self) -> None:
        """End the actor without a restart.

        The method is idempotent.
        """
        ...


@dataclass(frozen=True, slots=True)
class PoolScaling:
    """The way in which the number of workers follows the advice of gateways.

    Attributes:
        limits: the fewest and the most workers.
        read: returns the advised number of workers, or None if it is unknown.
        add: starts a number of workers, or fewer if it cannot.
        interval_s: seconds between two reads.
    """

    limits: PoolLimits
    read: Callable[[], Awaitable[int | None]]
    add: Callable[[int], Sequence[WorkerActor]]
    interval_s: float = READ_S


class LaunchedWorker:
    """A worker with the state that the launcher last read and printed."""

    def __init__(self, actor: WorkerActor, show: Callable[[str], None]) -> None:
        self.actor = actor
        self.state = State.WAITING
        self._show = show
        self._status: WorkerStatus | None = None
        self._shown = ""
        self._draining: asyncio.Task[None] | None = None

    @property
    def runs(self) -> bool:
        """Whether the worker has neither ended nor begun to drain."""
        return self._draining is None and self.state not in OVER

    async def poll(self) -> None:
        """Read the status of the worker, after waiting until Ray has placed it."""
        status, reason = None, ""
        try:
            status = await self.actor.status()
            state = worker_state(status)
        except Restarting:
            state = State.RESTARTING
        except WorkerGone as error:
            state, reason = State.LOST, str(error)
        if self._draining is None:  # draining determines all further states
            self._status = status or self._status
            self._note(state, reason)

    def drain(self) -> asyncio.Task[None]:
        """Begin to drain the worker, unless it drains already, and return the task."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        return self._draining

    async def _drain(self) -> None:
        """Drain the worker if it serves, end its actor, and print the outcome."""
        if self.state not in {State.READY, State.JOINED}:
            self.end()
            return
        self._note(State.DRAINING)
        try:
            code = await self.actor.stop()
        except (Restarting, WorkerGone) as error:
            self._note(State.LOST, str(error))
        else:
            if code in CLEAN_STATUSES:
                self._note(State.STOPPED)
            else:
                self._note(State.LOST, f"exit status {code}")
        self.actor.end()

    async def hurry(self) -> None:
        """Stop waiting for the streams of a draining worker."""
        if self.state not in OVER:
            with suppress(Restarting, WorkerGone):
                await self.actor.stop()

    def end(self) -> None:
        """End the actor without draining."""
        self.actor.end()
        if self.state not in OVER:
            self._note(State.STOPPED)

    def _note(self, state: State, reason: str = "") -> None:
        self.state = state
        line = status_line(self.actor.name, state, self._status, reason)
        if line != self._shown:
            self._shown = line
            self._show(line)


class Launcher:
    """All workers of a pool.

    Call its methods one after another, on one event loop.
    """

    def __init__(self, actors: Sequence[WorkerActor], show: Callable[[str], None]) -> None:
        """Manage workers in any state.

        Args:
            show: a function that prints a line.
        """
        self.workers = [LaunchedWorker(actor, show) for actor in actors]
        self._show = show
        self._polled = asyncio.Event()
        self._following = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Read the status of all workers repeatedly until the block ends."""
        for worker in self.workers:
            self._begin_following(worker)
        try:
            yield
        finally:
            for task in self._following:
                task.cancel()
            await asyncio.gather(*self._following, return_exceptions=True)

    async def scale(self, scaling: PoolScaling) -> None:
        """Add and drain workers as advised, until cancelled."""
        while True:
            advised = await scaling.read()
            if advised is not None:
                self.resize(scaling.limits.clamp(advised), scaling.add)
            await asyncio.sleep(scaling.interval_s)

    def resize(self, wanted: int, add: Callable[[int], Sequence[WorkerActor]]) -> None:
        """Add workers, or drain the last ones, until a number of workers runs.

        Args:
            add: a function that starts a number of workers.
        """
        running = [worker for worker in self.workers if worker.runs]
        if wanted == len(running):
            return
        self._show(f"the gateways advise {wanted} workers instead of {len(running)}")
        for worker in running[wanted:]:
            worker.drain()
        for actor in add(wanted - len(running)) if wanted > len(running) else ():
            worker = LaunchedWorker(actor, self._show)
            self.workers.append(worker)
            self._begin_following(worker)

    def _begin_following(self, worker: LaunchedWorker) -> None:
        self._following.add(asyncio.create_task(self._follow(worker)))

    async def all_joined(self) -> bool:
        """Wait until all workers have joined, or a worker has ended.

        Returns:
            Whether all workers have joined.
        """
        await self._until(lambda: self._are({State.JOINED}) or self._any_over())
        return not self._any_over()

    async def all_over(self) -> None:
        """Wait until all workers have ended."""
        await self._until(lambda: self._are(OVER))

    async def poll_once(self) -> None:
        """Read the status of all workers once.

        Workers that Ray has not placed do not respond.
        """

        async def poll(worker: LaunchedWorker) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(STATUS_TIMEOUT_S):
                    await worker.poll()

        await asyncio.gather(*map(poll, self.workers))

    async def stop(self, hurry: asyncio.Event) -> bool:
        """Drain all workers concurrently, and return whether all stopped cleanly.

        Args:
            hurry: an event that ends the wait for open streams.
        """
        tasks = {worker.drain() for worker in self.workers}
        hurried = asyncio.create_task(hurry.wait())
        stopped = asyncio.create_task(_all(tasks))
        await asyncio.wait({stopped, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not stopped.done():
            tasks |= {asyncio.create_task(worker.hurry()) for worker in self.workers}
            await asyncio.wait({stopped}, timeout=STOP_TIMEOUT_S)
            for task in tasks:
                task.cancel()
            await _all(tasks)
        for worker in self.workers:
            worker.end()
        return self._are({State.STOPPED})

    async def _follow(self, worker: LaunchedWorker) -> None:
        while worker.runs:
            await worker.poll()
            self._polled.set()
            await asyncio.sleep(POLL_S)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._polled.clear()
            await self._polled.wait()

    def _are(self, states: frozenset[State] | set[State]) -> bool:
        return all(worker.state in states for worker in self.workers)

    def _any_over(self) -> bool:
        return any(worker.state in OVER for worker in self.workers)


async def _all(tasks: set[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


async def launch(
    actors: Sequence[WorkerActor],
    show: Callable[[str], None],
    *,
    detached: bool,
    scaling: PoolScaling | None = None,
) -> bool:
    """Follow new workers until a signal and drain them, and return whether all succeeded.

    Detached workers keep running once all workers have joined. If a worker cannot start, all
    other workers stop.

    Args:
        scaling: determines the number of workers once all have joined, or None to keep it.
    """
    signals = Signals()
    launcher = Launcher(actors, show)
    async with launcher.following():
        joined = False

        async def follow() -> None:
            nonlocal joined
            joined = await launcher.all_joined()
            if joined:
                show(f"all {len(actors)} workers have joined")
                if scaling is not None:
                    await launcher.scale(scaling)
                elif not detached:
                    await launcher.all_over()

        await until_signal(signals, follow())
    if detached and joined:
        return True
    was_requested = signals.first.is_set()
    return await launcher.stop(signals.second) and was_requested


async def stop(actors: Sequence[WorkerActor], show: Callable[[str], None]) -> bool:
    """Drain running workers, and return whether all stopped cleanly."""
    signals = Signals()
    launcher = Launcher(actors, show)
    await launcher.poll_once()
    return await launcher.stop(signals.first)


async def show_status(actors: Sequence[WorkerActor], show: Callable[[str], None]) -> bool:
    """Print the state of workers, and return whether all have joined."""
    launcher = Launcher(actors, show)
    await launcher.poll_once()
    for worker in launcher.workers:
        if worker.state is State.WAITING:
            show(status_line(worker.actor.name, worker.state, None))
    return all(worker.state is State.JOINED for worker in launcher.workers)


def worker_state(status: WorkerStatus) -> State:
    """Return the state of a worker from its status."""
    notice = status.notice
    if notice.failure and not status.restarted:
        return State.FAILED
    if not notice.url:
        return State.LOADING
    return State.JOINED if notice.joined else State.READY


def status_line(name: str, state: State, status: WorkerStatus | None, reason: str = "") -> str:
    """Return the printed line about a worker.

    Args:
        status: the last status of the worker, or None before the first.
        reason: the reason why the worker ended. A failure in `status` takes precedence.
    """
    words = [f"{name:12} {state.value:22}"]
    if status is not None:
        reason = status.notice.failure or reason
        words.append(status.notice.url or status.host)
        if status.gpus:
            words.append("GPU " + ",".join(status.gpus))
        if status.restarted and state not in OVER:
            words.append("(restarted)")
    if reason and state in OVER:
        words.append(f"({reason})")
    return " ".join(words).rstrip()
