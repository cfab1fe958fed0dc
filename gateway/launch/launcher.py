"""Follows the workers of a pool, says how they are, and drains them at the end. One event loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol

from draftgate.gateway.app import Signals, until_signal
from draftgate.gateway.launch.shown import OVER, State, line_of, state_of
from draftgate.gateway.launch.words import Restarting, WorkerGone, WorkerStatus

LOOK_S: Final = 1.0
"""Between two questions to a worker."""

ANSWER_S: Final = 5.0
"""How long a worker that runs may take to say how it is. Who does not answer has not been placed:
actors answer within milliseconds. (Chosen.)"""

LAST_S: Final = 15.0
"""How long workers may take to stop after the second signal; their processes are to take 10 s."""

FINE: Final = frozenset({0, -signal.SIGTERM})
"""Exit statuses of a worker that was asked to stop; the second one is from before it listened."""


class Actor(Protocol):
    """A worker's actor, as `gateway.launch.cluster` has it."""

    name: str

    async def status(self) -> WorkerStatus:
        """Return what it says.

        Raises:
            Restarting, WorkerGone: it has ended.
        """
        ...

    async def stop(self) -> int:
        """Drain it, or hurry it the second time; return the exit status of its process.

        Raises:
            Restarting, WorkerGone: there is none.
        """
        ...

    def end(self) -> None:
        """End it for good. Idempotent."""
        ...


class LaunchedWorker:
    """A worker as the launcher sees it."""

    def __init__(self, actor: Actor, show: Callable[[str], None]) -> None:
        """Begin without a word from it."""
        self.actor = actor
        self.state = State.WAITING
        self._show = show
        self._status: WorkerStatus | None = None
        self._shown = ""

    async def look(self) -> None:
        """Ask it how it is; returns once it has been placed."""
        try:
            status = await self.actor.status()
        except Restarting:
            self._note(State.RESTARTING)
        except WorkerGone as error:
            self._note(State.LOST, str(error))
        else:
            self._status = status
            self._note(state_of(status))

    async def stop(self) -> None:
        """Drain it if it serves, and end its actor; show what became of it."""
        if self.state not in {State.READY, State.JOINED}:
            self.end()
            return
        try:
            code = await self.actor.stop()
        except (Restarting, WorkerGone) as error:
            self._note(State.LOST, str(error))
        else:
            if code in FINE:
                self._note(State.STOPPED)
            else:
                self._note(State.LOST, f"exit status {code}")
        self.actor.end()

    async def hurry(self) -> None:
        """Let one that is being stopped wait for its streams no longer."""
        if self.state not in OVER:
            with suppress(Restarting, WorkerGone):
                await self.actor.stop()

    def end(self) -> None:
        """End its actor without draining."""
        self.actor.end()
        if self.state not in OVER:
            self._note(State.STOPPED)

    def _note(self, state: State, reason: str = "") -> None:
        self.state = state
        line = line_of(self.actor.name, state, self._status, reason)
        if line != self._shown:
            self._shown = line
            self._show(line)


class Launcher:
    """All workers of a pool. Its methods are called in turn, on one event loop."""

    def __init__(self, actors: Sequence[Actor], show: Callable[[str], None]) -> None:
        """Take the workers, wherever they are in their lives.

        Args:
            show: prints a line.
        """
        self.workers = [LaunchedWorker(actor, show) for actor in actors]
        self._looked = asyncio.Event()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Ask all again and again as long as this context lasts."""
        tasks = [asyncio.create_task(self._follow(worker)) for worker in self.workers]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def all_joined(self) -> bool:
        """Wait until every worker has joined, or one is over; return whether they have."""
        await self._until(lambda: self._are({State.JOINED}) or self._any_over())
        return not self._any_over()

    async def all_over(self) -> None:
        """Wait until there is no worker any more."""
        await self._until(lambda: self._are(OVER))

    async def look_once(self) -> None:
        """Ask all once; who has not been placed does not answer."""

        async def look(worker: LaunchedWorker) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await worker.look()

        await asyncio.gather(*map(look, self.workers))

    async def stop(self, hurry: asyncio.Event) -> bool:
        """Drain all side by side; return whether all ended as they should.

        Args:
            hurry: once set, open streams are waited for no longer.
        """
        tasks = {asyncio.create_task(worker.stop()) for worker in self.workers}
        hurried = asyncio.create_task(hurry.wait())
        stopped = asyncio.create_task(_all(tasks))
        await asyncio.wait({stopped, hurried}, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        if not stopped.done():
            tasks |= {asyncio.create_task(worker.hurry()) for worker in self.workers}
            await asyncio.wait({stopped}, timeout=LAST_S)
            for task in tasks:
                task.cancel()
            await _all(tasks)
        for worker in self.workers:
            worker.end()
        return self._are({State.STOPPED})

    async def _follow(self, worker: LaunchedWorker) -> None:
        while worker.state not in OVER:
            await worker.look()
            self._looked.set()
            await asyncio.sleep(LOOK_S)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._looked.clear()
            await self._looked.wait()

    def _are(self, states: frozenset[State] | set[State]) -> bool:
        return all(worker.state in states for worker in self.workers)

    def _any_over(self) -> bool:
        return any(worker.state in OVER for worker in self.workers)


async def _all(tasks: set[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)


async def launch(actors: Sequence[Actor], show: Callable[[str], None], *, detached: bool) -> bool:
    """Follow new workers until a signal, then drain them; return whether all went well.

    Detached ones are left to themselves as soon as all have joined. If one cannot start, the others
    are stopped, too: it was asked for by mistake.
    """
    signals = Signals()
    launcher = Launcher(actors, show)
    async with launcher.following():
        joined = False

        async def follow() -> None:
            nonlocal joined
            joined = await launcher.all_joined()
            if joined:
                show(f"all {len(actors)} have joined")
                if not detached:
                    await launcher.all_over()

        await until_signal(signals, follow())
    if detached and joined:
        return True
    asked = signals.first.is_set()
    return await launcher.stop(signals.second) and asked


async def stop(actors: Sequence[Actor], show: Callable[[str], None]) -> bool:
    """Drain workers that run; return whether all ended as they should."""
    signals = Signals()
    launcher = Launcher(actors, show)
    await launcher.look_once()
    return await launcher.stop(signals.first)


async def look(actors: Sequence[Actor], show: Callable[[str], None]) -> bool:
    """Show how workers are; return whether all have joined."""
    launcher = Launcher(actors, show)
    await launcher.look_once()
    for worker in launcher.workers:
        if worker.state is State.WAITING:
            show(line_of(worker.actor.name, worker.state, None))
    return all(worker.state is State.JOINED for worker in launcher.workers)
