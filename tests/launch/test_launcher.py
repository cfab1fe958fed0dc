"""The launcher's decisions, with actors that the test plays; `test_cluster.py` has real ones."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress

import pytest

from draftgate.gateway.launch import launcher as launching
from draftgate.gateway.launch.launcher import launch, look, stop
from draftgate.gateway.launch.messages import Notice, Restarting, WorkerGone, WorkerStatus
from tests.gateway.harness import until

JOINED = Notice("http://10.0.0.2:5", joined=True)


class PlayedActor:
    """An actor whose every word the test decides."""

    def __init__(self, name: str, said: Notice | type[Exception] | None = JOINED) -> None:
        self.name = name
        self.said = said  # None: it has not been placed
        self.stops = 0
        self.stopped = asyncio.Event()
        self.stopped.set()
        self.code = 0
        self.ended = False

    async def status(self) -> WorkerStatus:
        if self.said is None:
            await asyncio.Event().wait()
        if not isinstance(self.said, Notice):
            raise self.said("it is gone")
        return WorkerStatus("10.0.0.2", (), 1, again=False, notice=self.said)

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
    """Looks follow each other at once."""
    monkeypatch.setattr(launching, "LOOK_S", 0.001)
    monkeypatch.setattr(launching, "ANSWER_S", 0.05)


def send(signal_number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), signal_number)


async def during(
    lines: list[str], actors: list[PlayedActor], act: Callable[[], None], *, once: str
) -> bool:
    """Launch, do something when a line with that text has been shown, and return the outcome."""
    running = asyncio.create_task(launch(actors, lines.append, detached=False))
    await until(lambda: any(once in line for line in lines) or running.done())
    act()
    return await running


async def test_a_signal_drains_all_and_that_is_a_success() -> None:
    """Each is asked to stop once, then its actor is ended."""
    actors, lines = [PlayedActor("p/0"), PlayedActor("p/1")], list[str]()
    assert await during(lines, actors, send, once="all 2 workers have joined")
    assert [(actor.stops, actor.ended) for actor in actors] == [(1, True)] * 2
    assert [line.split()[1] for line in lines[-2:]] == ["stopped"] * 2


async def test_a_second_signal_does_not_wait_for_streams() -> None:
    """Who still drains is told again."""
    actors, lines = [PlayedActor("p/0"), PlayedActor("p/1")], list[str]()
    actors[0].stopped.clear()
    running = asyncio.create_task(launch(actors, lines.append, detached=False))
    await until(lambda: any("have joined" in line for line in lines))
    send()
    await until(lambda: actors[0].stops == 1)
    assert not running.done()
    send(signal.SIGINT)
    assert await running
    assert [actor.stops for actor in actors] == [2, 1]


async def test_one_that_cannot_start_stops_all() -> None:
    """It was asked for by mistake: the reason is shown, and nothing is left running."""
    bad, good = PlayedActor("p/0", Notice(failure="no such model")), PlayedActor("p/1")
    lines: list[str] = []
    assert not await launch([bad, good], lines.append, detached=False)
    assert any("(no such model)" in line for line in lines)
    assert (bad.ended, good.ended, good.stops) == (True, True, 1)


async def test_one_that_is_lost_later_leaves_the_others_serving() -> None:
    """Only when none is left the launcher gives up."""
    actors, lines = [PlayedActor("p/0"), PlayedActor("p/1")], list[str]()
    running = asyncio.create_task(launch(actors, lines.append, detached=False))
    await until(lambda: any("have joined" in line for line in lines))
    actors[0].said = WorkerGone
    await until(lambda: any(line.startswith("p/0") and "lost" in line for line in lines))
    await asyncio.sleep(0.01)
    assert not running.done()
    actors[1].said = WorkerGone
    assert not await running


async def test_a_restart_is_shown_and_survived() -> None:
    """A worker that Ray starts again joins again; the launcher goes on."""
    actor, lines = PlayedActor("p/0"), list[str]()

    def restart() -> None:
        actor.said = Restarting

    running = asyncio.create_task(launch([actor], lines.append, detached=False))
    await until(lambda: any("have joined" in line for line in lines))
    restart()
    await until(lambda: "restarting" in lines[-1])
    actor.said = JOINED
    await until(lambda: "joined" in lines[-1])
    send()
    assert await running


@pytest.mark.parametrize("said", [None, Notice()])
async def test_who_does_not_serve_yet_is_ended_without_a_word(said: Notice | None) -> None:
    """A call to an actor without a machine would wait for ever; who loads has no streams."""
    actor = PlayedActor("p/0", said)
    running = asyncio.create_task(launch([actor], [].append, detached=False))
    await asyncio.sleep(0.01)
    send()
    assert await running
    assert (actor.stops, actor.ended) == (0, True)


async def test_detached_workers_are_left_when_all_have_joined() -> None:
    """The launcher returns, and touches none of them."""
    actor = PlayedActor("p/0")
    assert await launch([actor], [].append, detached=True)
    assert (actor.stops, actor.ended) == (0, False)


async def test_a_bad_exit_status_is_no_success() -> None:
    """A worker that breaks while it drains is told, and so is the shell."""
    actor, lines = PlayedActor("p/0"), list[str]()
    actor.code = 1
    assert not await stop([actor], lines.append)
    assert "(exit status 1)" in lines[-1]


async def test_status_shows_who_waits_and_is_true_only_of_a_whole_pool() -> None:
    """Who has not been placed does not answer, and is shown all the same."""
    lines: list[str] = []
    assert await look([PlayedActor("p/0")], lines.append)
    assert not await look([PlayedActor("p/0"), PlayedActor("p/1", None)], lines.append)
    assert lines[-1].split(maxsplit=1) == ["p/1", "waits for Ray"]


@pytest.fixture(autouse=True)
async def no_handlers_left() -> object:
    """The loop's handlers of signals end with the test."""
    yield
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(ValueError):
            loop.remove_signal_handler(number)
