"""A request that may break workers does not get the last one; in a pool it waits for another."""

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
from tests.gateway.troubles import Choice, Dispatched, Told, answer, dispatching, play, texts

PROMPT = compact([1, 2, 3])


def job(name: str) -> Job:
    return Job(name, (PROMPT,), SamplingParams(1, 0), 10, 1)


@dataclass
class Suspect:
    """A request that has lost two of three workers without any output."""

    there: Dispatched
    told: Told
    answering: asyncio.Task[list[Choice]]
    lost: list[ScriptedBackend]
    last: ScriptedBackend


async def submitted_to(backends: list[ScriptedBackend]) -> ScriptedBackend:
    """Return the worker that gets a request next."""
    waiting = {asyncio.ensure_future(one.submitted.get()): one for one in backends}
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    return waiting[done.pop()]


@asynccontextmanager
async def suspected() -> AsyncIterator[Suspect]:
    """Make a request a suspect."""
    backends = [ScriptedBackend() for _ in range(3)]
    async with dispatching(lambda config: backends[config.device_index], 3) as there:
        there.fleet.discovers = True
        told, lost = Told(), []
        answering = asyncio.create_task(answer(there.dispatcher, job("r"), told))
        for _ in range(2):
            lost.append(await submitted_to([one for one in backends if one not in lost]))
            lost[-1].crash("gone")
        (last,) = (one for one in backends if one not in lost)
        yield Suspect(there, told, answering, lost, last)


def test_a_suspect_waits_for_a_second_worker() -> None:
    """It continues once a second worker is available again."""

    async def scenario() -> None:
        async with suspected() as suspect:
            await asyncio.sleep(RECOVERY_S / 2)
            assert suspect.last.submitted.empty()
            suspect.lost[0].failure = None
            request = await suspect.last.submitted.get()
            suspect.last.emit(request, "after all", last=True)
            assert texts(await suspect.answering) == ["after all"]
            assert suspect.told.losses == []
            assert await suspect.there.is_idle()

    play(scenario())


def test_a_suspect_is_given_up_without_a_second_worker() -> None:
    """It ends with its own error after a while, and never ran on the last worker."""

    async def scenario() -> None:
        async with suspected() as suspect:
            begun_s = asyncio.get_running_loop().time()
            with pytest.raises(BackendFailed, match=r"lost 2 workers.* gone"):
                await suspect.answering
            waited_s = asyncio.get_running_loop().time() - begun_s
            assert waited_s == pytest.approx(RECOVERY_S)
            assert suspect.told.losses == [(Cause.FAILED, GivenUp.LAST_WORKER)]
            assert suspect.last.submitted.empty()
            assert await suspect.there.is_idle()

    play(scenario())
