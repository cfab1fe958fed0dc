"""Tests of the launcher's decisions with fake actors."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress

import pytest

from draftgate.gateway.launch import launcher as launching
from draftgate.gateway.launch.advice import PoolLimits
from draftgate.gateway.launch.launcher import PoolScaling, launch, show_status, stop
from draftgate.gateway.launch.messages import Restarting, WorkerGone, WorkerStatus
from draftgate.gateway.processes.messages import Notice
from tests.gateway.harness import until

JOINED = Notice("http://10.0.0.2:5", joined=True)


class FakeActor:
    """An actor whose replies the test decides."""

    def __init__(self, name: str, reply: Notice | type[Exception] | None = JOINED) -> None:
        self.name = name
        self.reply = reply  # None until Ray places the actor
        self.stops = 0
        self.stopped = asyncio.Event()
        self.stopped.set()
        self.code = 0
        self.ended = False

    async def status(self) -> WorkerStatus:
        if self.reply is None:
            await asyncio.Event().wait()
        if not isinstance(self.reply, Notice):
            raise self.reply("the actor is gone")
        return WorkerStatus("10.0.0.2", (), 1, restarted=False, notice=self.reply)

    async def stop(self) -> int:
        self.stops += 1
        if self.stops > 1:
            self.stopped.set()
        await self.stopped.wait()
        return self.code

    def end(self) -> None:
        self.ended = True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the launcher poll without a pause."""
    monkeypatch.setattr(launching, "POLL_S", 0.001)
    monkeypatch.setattr(launching, "STATUS_TIMEOUT_S", 0.05)


def send_signal(signal_number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), signal_number)


async def launch_until(
    lines: list[str], actors: list[FakeActor], act: Callable[[], None], *, once: str
) -> bool:
    """Launch workers, call `act` when a line contains this text, and return the outcome."""
    running = asyncio.create_task(launch(actors, lines.append, detached=False))
    await until(lambda: any(once in line for line in lines) or running.done())
    act()
    return await running


async def test_a_signal_drains_all_workers_and_succeeds() -> None:
    """The first signal stops each worker once and then ends its actor."""
    actors, lines = [FakeActor("p/0"), FakeActor("p/1")], list[str]()
    assert await launch_until(lines, actors, send_signal, once="all 2 workers have joined")
    assert [(actor.stops, actor.ended) for actor in actors] == [(1, True)] * 2
    last = {line.split()[0]: line.split()[1] for line in lines}
    assert (last["p/0"], last["p/1"]) == ("stopped", "stopped")


async def test_a_second_signal_does_not_wait_for_streams() -> None:
    """The second signal stops draining workers without waiting for their streams."""
    actors, lines = [FakeActor("p/0"), FakeActor("p/1")], list[str]()
    actors[0].stopped.clear()
    running = asyncio.create_task(launch(actors, lines.append, detached=False))
    await until(lambda: any("have joined" in line for line in lines))
    send_signal()
    await until(lambda: actors[0].stops == 1)
    assert not running.done()
    send_signal(signal.SIGINT)
    assert await running
    assert [actor.stops for actor in actors] == [2, 1]


async def test_a_worker_that_cannot_start_stops_all_others() -> None:
    """The launcher prints why a worker cannot start and stops all other workers."""
    bad, good = FakeActor("p/0", Notice(failure="no such model")), FakeActor("p/1")
    lines: list[str] = []
    assert not await launch([bad, good], lines.append, detached=False)
    assert any("(no such model)" in line for line in lines)
    assert (bad.ended, good.ended, good.stops) == (True, True, 1)


async def test_a_lost_worker_does_not_stop_the_others() -> None:
    """The launcher continues after a lost worker and fails when no worker is left."""
    actors, lines = [FakeActor("p/0"), FakeActor("p/1")], list[str]()
    running = asyncio.create_task(launch(actors, lines.append, detached=False))
    await until(lambda: any("have joined" in line for line in lines))
    actors[0].reply = WorkerGone
    await until(lambda: any(line.startswith("p/0") and "lost" in line for line in lines))
    await asyncio.sleep(0.01)
    assert not running.done()
    actors[1].reply = WorkerGone
    assert not await running


async def test_a_restarted_worker_joins_again() -> None:
    """The launcher continues when Ray restarts a worker, which joins the pool again."""
    actor, lines = FakeActor("p/0"), list[str]()

    def restart() -> None:
        actor.reply = Restarting

    running = asyncio.create_task(launch([actor], lines.append, detached=False))
    await until(lambda: any("have joined" in line for line in lines))
    restart()
    await until(lambda: "restarting" in lines[-1])
    actor.reply = JOINED
    await until(lambda: "joined" in lines[-1])
    send_signal()
    assert await running


@pytest.mark.parametrize("reply", [None, Notice()])
async def test_a_worker_that_does_not_serve_yet_is_ended_without_draining(
    reply: Notice | None,
) -> None:
    """The launcher ends waiting and loading workers without draining."""
    actor = FakeActor("p/0", reply)
    running = asyncio.create_task(launch([actor], [].append, detached=False))
    await asyncio.sleep(0.01)
    send_signal()
    assert await running
    assert (actor.stops, actor.ended) == (0, True)


class Advice:
    """Advice that the test decides, and the workers that are added as a result."""

    def __init__(self, fewest: int, most: int) -> None:
        self.workers: int | None = None
        self.added: list[FakeActor] = []
        self.scaling = PoolScaling(PoolLimits(fewest, most), self.read, self.add, interval_s=0.0)

    async def read(self) -> int | None:
        return self.workers

    def add(self, number: int) -> list[FakeActor]:
        new = [FakeActor(f"p/new-{len(self.added) + one}") for one in range(number)]
        self.added += new
        return new


async def test_workers_follow_the_advice_within_their_limits() -> None:
    """The launcher adds workers up to the maximum and drains the last ones down to the minimum. A
    worker that drains does not count, and is not drained again at the end."""
    first, advice, lines = FakeActor("p/0"), Advice(1, 3), list[str]()
    running = asyncio.create_task(
        launch([first], lines.append, detached=False, scaling=advice.scaling)
    )
    await until(lambda: any("have joined" in line for line in lines))
    assert not advice.added  # nothing is known yet
    advice.workers = 9
    await until(lambda: sum("joined" in line and "p/new" in line for line in lines) == 2)
    one, other = advice.added
    other.stopped.clear()
    advice.workers = 0
    await until(lambda: other.stops == 1 and one.ended)
    await until(lambda: any(line.startswith("p/new-0") and "stopped" in line for line in lines))
    assert len(advice.added) == 2
    other.stopped.set()
    send_signal()
    assert await running
    assert [actor.stops for actor in (first, one, other)] == [1, 1, 1]
    assert [actor.ended for actor in (first, one, other)] == [True] * 3


async def test_a_lost_worker_is_replaced() -> None:
    """A worker that Ray has given up is replaced, because it no longer counts."""
    first, second, advice = FakeActor("p/0"), FakeActor("p/1"), Advice(2, 4)
    lines = list[str]()
    running = asyncio.create_task(
        launch([first, second], lines.append, detached=False, scaling=advice.scaling)
    )
    await until(lambda: any("have joined" in line for line in lines))
    advice.workers = 1
    second.reply = WorkerGone
    await until(lambda: any(line.startswith("p/new-0") and "joined" in line for line in lines))
    send_signal()
    assert not await running  # a worker was lost
    assert [actor.stops for actor in (first, *advice.added)] == [1, 1]


async def test_the_launcher_leaves_detached_workers_running() -> None:
    """The launcher exits without stopping detached workers."""
    actor = FakeActor("p/0")
    assert await launch([actor], [].append, detached=True)
    assert (actor.stops, actor.ended) == (0, False)


async def test_a_failure_while_draining_fails_the_command() -> None:
    """The command prints the failure of a draining worker and fails."""
    actor, lines = FakeActor("p/0"), list[str]()
    actor.code = 1
    assert not await stop([actor], lines.append)
    assert "(exit status 1)" in lines[-1]


async def test_status_lists_unplaced_workers_and_fails_for_an_incomplete_pool() -> None:
    """The status command lists unplaced workers and fails for an incomplete pool."""
    lines: list[str] = []
    assert await show_status([FakeActor("p/0")], lines.append)
    assert not await show_status([FakeActor("p/0"), FakeActor("p/1", None)], lines.append)
    assert lines[-1].split(maxsplit=1) == ["p/1", "waits for Ray"]


@pytest.fixture(autouse=True)
async def removed_handlers() -> object:
    """Remove the signal handlers of the loop after the test."""
    yield
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(ValueError):
            loop.remove_signal_handler(number)
