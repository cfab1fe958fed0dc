"""Tests of suspects: requests that may break workers and do not get the last worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from draftgate.backends.errors import BackendFailed
from draftgate.backends.token_ids import compact
from draftgate.backends.types import SamplingParams
from draftgate.gateway.dispatch.failover import RECOVERY_S
from draftgate.gateway.dispatch.job import Job
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


def job(name: str) -> Job:
    return Job(name, (PROMPT,), SamplingParams(1, 0), 10, 1)


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
        result = asyncio.create_task(run_job(dispatched.dispatcher, job("r"), watch))
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
