"""Tests of suspects: requests that may break workers and do not get the last worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from draftgate.backends.errors import BackendFailed, WorkerLeft
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.recovery import RECOVERY_S
from draftgate.policies.resilience.failover import Cause, GivenUp
from tests.gateway.harness import ScriptedBackend
from tests.gateway.troubles import (
    Choice,
    Dispatched,
    RecordingWatch,
    dispatching,
    run_job,
    run_scenario,
    texts,
)

PROMPT = compact([1, 2, 3])
FINGERPRINT = 7


def job(name: str, fingerprint: int = 0) -> Job:
    return Job(name, (PROMPT,), SamplingParams(1, 0), 10, 1, fingerprint=fingerprint)


@dataclass
class Suspect:
    """A request that has lost two of three workers without any output."""

    dispatched: Dispatched
    watch: RecordingWatch
    result: asyncio.Task[list[Choice]]
    lost: list[ScriptedBackend]
    last: ScriptedBackend


async def submitted_to(backends: list[ScriptedBackend]) -> ScriptedBackend:
    """Return the worker that receives the next request."""
    waiting = {asyncio.ensure_future(backend.submitted.get()): backend for backend in backends}
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    return waiting[done.pop()]


@asynccontextmanager
async def suspected() -> AsyncIterator[Suspect]:
    """Run a request that loses two of three workers."""
    backends = [ScriptedBackend() for _ in range(3)]
    async with dispatching(lambda config: backends[config.device_index], 3) as dispatched:
        dispatched.fleet.discovers = True
        watch, lost = RecordingWatch(), []
        suspect = job("r", FINGERPRINT)
        result = asyncio.create_task(run_job(dispatched.dispatcher, suspect, watch))
        for _ in range(2):
            lost.append(
                await submitted_to([backend for backend in backends if backend not in lost])
            )
            lost[-1].crash("gone")
        (last,) = (backend for backend in backends if backend not in lost)
        yield Suspect(dispatched, watch, result, lost, last)


def test_a_suspect_waits_for_a_second_worker() -> None:
    """A suspect continues when a second worker becomes available."""

    async def scenario() -> None:
        async with suspected() as suspect:
            await asyncio.sleep(RECOVERY_S / 2)
            assert suspect.last.submitted.empty()
            suspect.lost[0].failure = None
            request = await suspect.last.submitted.get()
            suspect.last.emit(request, "after all", last=True)
            assert texts(await suspect.result) == ["after all"]
            assert suspect.watch.losses == []
            assert await suspect.dispatched.is_idle()

    run_scenario(scenario())


def test_a_suspect_is_given_up_without_a_second_worker() -> None:
    """A suspect ends with its own error after `RECOVERY_S` and never runs on the last worker."""

    async def scenario() -> None:
        async with suspected() as suspect:
            begun_s = asyncio.get_running_loop().time()
            with pytest.raises(BackendFailed, match=r"lost 2 workers.* gone"):
                await suspect.result
            waited_s = asyncio.get_running_loop().time() - begun_s
            assert waited_s == pytest.approx(RECOVERY_S)
            assert suspect.watch.losses == [(Cause.FAILED, GivenUp.LAST_WORKER)]
            assert suspect.last.submitted.empty()
            assert await suspect.dispatched.is_idle()

    run_scenario(scenario())


def test_the_retry_of_a_suspect_does_not_get_the_last_worker() -> None:
    """A client that repeats the request does not get the last worker, and other clients do."""

    async def scenario() -> None:
        async with suspected() as suspect:
            with pytest.raises(BackendFailed):
                await suspect.result
            run, watch = suspect.dispatched.dispatcher, RecordingWatch()
            with pytest.raises(BackendFailed, match="only one worker is left"):
                await run_job(run, job("retry", FINGERPRINT), watch)
            assert watch.losses == [(Cause.FAILED, GivenUp.LAST_WORKER)]
            other = asyncio.create_task(run_job(run, job("other", FINGERPRINT + 1)))
            request = await suspect.last.submitted.get()
            assert request.request_id == "other-0"
            suspect.last.emit(request, "fine", last=True)
            assert texts(await other) == ["fine"]
            suspect.lost[0].failure = None
            again = asyncio.create_task(run_job(run, job("again", FINGERPRINT)))
            workers = (suspect.last, suspect.lost[0])
            await asyncio.sleep(0.01)
            (worker,) = (one for one in workers if not one.submitted.empty())
            worker.emit(worker.submitted.get_nowait(), "now", last=True)
            assert texts(await again) == ["now"]
            assert await suspect.dispatched.is_idle()

    run_scenario(scenario())


def test_a_suspect_in_the_queue_does_not_get_the_last_worker() -> None:
    """A worker that is lost while a suspect waits for capacity leaves the last one to others."""

    async def scenario() -> None:
        backends = [ScriptedBackend() for _ in range(4)]
        for backend in backends:
            backend.max_sequences = 1
        async with dispatching(lambda config: backends[config.device_index], 4) as dispatched:
            dispatched.fleet.discovers = True
            running: dict[str, tuple[ScriptedBackend, GenerationRequest, RecordingWatch]] = {}
            tasks: dict[str, asyncio.Task[list[Choice]]] = {}
            for name in ("suspect", "lost", "done"):
                watch = RecordingWatch()
                one = job(name, len(name))
                tasks[name] = asyncio.create_task(run_job(dispatched.dispatcher, one, watch))
                await asyncio.sleep(0.01)
                (worker,) = (one for one in backends if not one.submitted.empty())
                running[name] = worker, worker.submitted.get_nowait(), watch
            (free,) = (one for one in backends if all(one is not r[0] for r in running.values()))
            running["suspect"][0].crash("gone")
            await free.submitted.get()
            free.crash("gone")
            await asyncio.sleep(0.01)
            running["lost"][0].crash("gone")
            await asyncio.sleep(0.01)
            last, request, _ = running["done"]
            last.emit(request, "done", last=True)
            request = await last.submitted.get()
            assert request.request_id.startswith("lost")
            with pytest.raises(BackendFailed, match="only one worker is left"):
                await tasks["suspect"]
            assert running["suspect"][2].losses == [(Cause.FAILED, GivenUp.LAST_WORKER)]
            last.emit(request, "resumed", last=True)
            found = await asyncio.gather(tasks["done"], tasks["lost"])
            assert [texts(choices) for choices in found] == [["done"], ["resumed"]]
            assert await dispatched.is_idle()

    run_scenario(scenario())


def test_a_worker_that_leaves_is_not_to_blame() -> None:
    """A request may lose one worker, and any number that shut down in order after it."""

    async def scenario() -> None:
        backends = [ScriptedBackend() for _ in range(4)]
        async with dispatching(lambda config: backends[config.device_index], 4) as dispatched:
            watch, lost = RecordingWatch(), []
            result = asyncio.create_task(run_job(dispatched.dispatcher, job("r"), watch))
            for _ in range(3):
                one = await submitted_to([each for each in backends if each not in lost])
                one.crash("gone", WorkerLeft if lost else BackendFailed)
                lost.append(one)
            (last,) = (each for each in backends if each not in lost)
            last.emit(await last.submitted.get(), "after all", last=True)
            assert texts(await result) == ["after all"]
            assert watch.losses == []
            assert await dispatched.is_idle()

    run_scenario(scenario())
