"""The watchdog abandons a worker that makes no progress, and only such a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
from msgspec import structs

from draftgate.backends.errors import BackendFailed
from draftgate.backends.types import GenerationRequest, Pace, Phases
from draftgate.gateway.dispatch.watchdog import CHECK_INTERVAL_S, Reading
from draftgate.policies.resilience.failover import Cause, GivenUp
from draftgate.policies.resilience.liveness import LEAST_PATIENCE_S, RETRY_S
from tests.gateway.harness import ScriptedBackend
from tests.gateway.test_failover import CONFIG, job, outcome
from tests.gateway.test_failover_details import asked, serving, settled
from tests.gateway.test_failover_details import job as short_job
from tests.gateway.troubles import (
    Choice,
    Look,
    Told,
    Trouble,
    answer,
    behind,
    dispatching,
    in_step,
    play,
    quick_starts,
    read,
    simulated,
    texts,
)

LATEST_S = LEAST_PATIENCE_S + 2.5 * CHECK_INTERVAL_S
"""Time by which a silence that starts just after a check has been detected."""

DECODING = Phases(0.0, 0.0, (), 0.0)


@pytest.fixture(autouse=True, scope="module")
def _quick() -> Iterator[None]:
    """Start workers quickly, because tests here start many."""
    with quick_starts():
        yield


def now_s() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("look", [in_step(0), in_step(6), behind(12)], ids=["first", "7th", "all"])
def test_streams_of_a_hung_worker_continue_elsewhere(look: Look) -> None:
    """Its stream continues elsewhere in time with the same text."""
    plain = outcome(job(n=2)).choices

    async def scenario() -> None:
        told = Told()
        async with dispatching(simulated({0: Trouble(hangs=look)}), 2, config=CONFIG) as there:
            assert await answer(there.dispatcher, job(n=2), told) == plain
            assert LEAST_PATIENCE_S < now_s() < LATEST_S + 1.0
            (resume,) = told.resumes
            assert resume.cause is Cause.STALLED
            assert [worker.hung for worker in there.fleet.workers] == [True, False]
            beside = Told()
            assert await answer(there.dispatcher, replace(job(), request_id="next"), beside)
            assert beside.workers == ["w-1"]
            assert await there.is_idle()

    play(scenario())


def test_a_worker_that_wakes_up_serves_again() -> None:
    """A single hung worker is waited for, and its stream continues with its next step."""
    plain = outcome(job()).choices

    async def scenario() -> None:
        told = Told()
        factory = simulated({0: Trouble(hangs=in_step(6), hung_s=3 * LEAST_PATIENCE_S)})
        async with dispatching(factory, 1, config=CONFIG) as there:
            answering = asyncio.create_task(answer(there.dispatcher, job(), told))
            await asyncio.sleep(LATEST_S)
            assert there.fleet.workers[0].hung
            assert len(there.dispatcher.queue) == 1
            assert await answering == plain
            assert not there.fleet.workers[0].hung
            assert 3 * LEAST_PATIENCE_S < now_s() < 3 * LEAST_PATIENCE_S + 3.0
            assert [resume.placed.worker.worker_id for resume in told.resumes] == ["w-0"]

    play(scenario())


def test_a_worker_that_hangs_for_good_ends_its_streams() -> None:
    """Without another worker the wait is bounded and ends with one error."""

    async def scenario() -> None:
        told = Told()
        factory = simulated({0: Trouble(hangs=in_step(6))})
        async with dispatching(factory, 1, config=CONFIG, timeout_s=20.0) as there:
            with pytest.raises(BackendFailed, match="completes no further step"):
                await answer(there.dispatcher, job(), told)
            assert now_s() < LATEST_S + 21.0
            assert there.dispatcher.admission.ledger.totals("").open == 0
        assert told.losses == [(Cause.STALLED, GivenUp.NO_WORKER)]

    play(scenario())


def test_a_slow_worker_is_not_hung() -> None:
    """Steps that take almost the patience each show progress."""
    slow = Trouble(hangs=lambda _plan: True, hung_s=LEAST_PATIENCE_S - 2 * CHECK_INTERVAL_S)

    async def scenario() -> None:
        told = Told()
        async with dispatching(simulated({0: slow}), 2, config=CONFIG) as there:
            await answer(there.dispatcher, job(), told)
            assert now_s() > 5 * LEAST_PATIENCE_S
            assert not told.resumes

    play(scenario())


def test_a_long_prompt_is_progress() -> None:
    """A prompt that is computed over many steps is progress."""
    one = job()
    one = replace(one, prompts=(one.prompts[0] * 50,))
    slow = Trouble(hangs=lambda plan: plan.chunks > 0, hung_s=LEAST_PATIENCE_S / 2)

    async def scenario() -> None:
        told = Told()
        config = structs.replace(CONFIG, max_step_tokens=16)
        async with dispatching(simulated({0: slow}), 2, config=config) as there:
            async with there.dispatcher.run(one, watch=told) as run:
                await anext(run.deltas)
            assert now_s() > 5 * LEAST_PATIENCE_S
            assert not told.resumes

    play(scenario())


class Talker:
    """A worker that completes a step per second and sends what the test wants."""

    def __init__(self) -> None:
        self.backend = ScriptedBackend()
        self.backend.steps = 0

    async def live(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self.backend.steps is not None:
                self.backend.steps += 1

    async def wait(self, seconds: float) -> None:
        """Advance time."""
        living = asyncio.create_task(self.live())
        await asyncio.sleep(seconds)
        living.cancel()

    def speak(self, request: GenerationRequest) -> None:
        """Let a request decode."""
        self.backend.emit(request, "half ", phases=DECODING)


def test_a_lost_stream_of_a_working_worker_continues_elsewhere() -> None:
    """A decoding stream without deltas is lost, although its worker makes steps."""

    async def scenario() -> None:
        talker, other, told = Talker(), ScriptedBackend(), Told()
        async with serving(talker.backend, other) as there:
            answering, request = await asked(there, talker.backend, short_job(), told)
            talker.speak(request)
            await talker.wait(LATEST_S)
            assert [resume.cause for resume in told.resumes] == [Cause.STALLED]
            other.emit(await other.submitted.get(), "whole", last=True)
            assert texts(await answering) == ["half whole"]
            assert not there.fleet.workers[0].hung
            assert talker.backend.abandoned.get_nowait() == request.request_id

    play(scenario())


@pytest.mark.parametrize("why", ["queued", "preempted", "sparing", "paused", "unknown"])
def test_requests_that_owe_no_output_are_left_alone(why: str) -> None:
    """Queued, preempted and paused requests, and workers without step counts, are not lost."""

    async def scenario() -> None:
        talker, other, told = Talker(), ScriptedBackend(), Told()
        async with (
            serving(talker.backend, other) as there,
            there.dispatcher.run(short_job(), watch=told) as run,
        ):
            choice = Choice()
            reading = asyncio.create_task(read(run, [choice]))
            request = await talker.backend.submitted.get()
            if why in {"preempted", "sparing", "paused"}:
                talker.speak(request)
                await settled()
            if why == "preempted":
                talker.backend.waiting = 1
            if why in {"sparing", "paused"}:
                run.set_pace(Pace.SPARING if why == "sparing" else Pace.PAUSED)
            if why == "unknown":
                talker.backend.steps = None
            if why == "paused":  # the worker is otherwise idle, so it makes no step
                await asyncio.sleep(100 * LEAST_PATIENCE_S)
            await talker.wait(100 * LEAST_PATIENCE_S)
            assert not told.resumes
            talker.backend.emit(request, "end", last=True)
            await reading
            assert choice.text.endswith("end")

    play(scenario())


def test_a_slow_client_is_not_silence() -> None:
    """The worker owes nothing while the client has an unread delta."""

    async def scenario() -> None:
        talker, other, told = Talker(), ScriptedBackend(), Told()
        async with (
            serving(talker.backend, other) as there,
            there.dispatcher.run(short_job(), watch=told) as run,
        ):
            reading = asyncio.ensure_future(anext(run.deltas))
            request = await talker.backend.submitted.get()
            talker.speak(request)
            await reading
            await talker.wait(100 * LEAST_PATIENCE_S)
            await asyncio.sleep(100 * LEAST_PATIENCE_S)  # without a step
            assert not there.fleet.workers[0].hung
            talker.backend.emit(request, "end", last=True)
            assert (await anext(run.deltas)).text == "end"
        assert not told.resumes

    play(scenario())


@pytest.mark.parametrize("order", ["before", "behind"])
def test_a_simultaneous_disconnect_wins(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simultaneous disconnect takes precedence over the watchdog."""
    leaving: list[asyncio.Task] = []
    interrupt = Reading.interrupt

    def interrupt_and_leave(self: Reading, reason: str) -> None:
        acts = [lambda: interrupt(self, reason), leaving[0].cancel]
        for act in acts if order == "behind" else reversed(acts):
            act()

    async def scenario() -> None:
        talker, other, told = Talker(), ScriptedBackend(), Told()
        async with serving(talker.backend, other) as there:
            answering, request = await asked(there, talker.backend, short_job(), told)
            leaving.append(answering)
            talker.speak(request)
            await talker.wait(LATEST_S)
            assert answering.cancelled()
            assert not told.resumes
            assert other.submitted.empty()
            assert await there.is_idle()

    monkeypatch.setattr(Reading, "interrupt", interrupt_and_leave)
    play(scenario())


def test_a_hung_worker_is_tried_again_after_a_while() -> None:
    """A hung worker without news is used again after a while."""

    async def scenario() -> None:
        one, other = ScriptedBackend(), ScriptedBackend()
        one.steps = other.steps = 0
        async with serving(one, other) as there:
            answering, _ = await asked(there, one, short_job())
            rest = await other.submitted.get()
            other.emit(rest, "whole", last=True)
            await answering
            worker = there.fleet.workers[0]
            assert worker.hung
            await asyncio.sleep(RETRY_S / 2)
            assert worker.hung
            await asyncio.sleep(RETRY_S)
            assert not worker.hung
            assert worker in there.fleet.open

    play(scenario())


def test_a_recovered_worker_is_not_hung() -> None:
    """A recovered worker is not hung, whatever was found before its failure."""

    async def scenario() -> None:
        one, other = ScriptedBackend(), ScriptedBackend()
        one.steps = other.steps = 0
        async with serving(one, other) as there:
            answering, _ = await asked(there, one, short_job())
            other.emit(await other.submitted.get(), "whole", last=True)
            await answering
            assert there.fleet.workers[0].hung
            one.crash("gone")
            await asyncio.sleep(2 * CHECK_INTERVAL_S)
            one.failure = None  # as a peer's worker may
            assert there.fleet.workers[0] in there.fleet.open

    play(scenario())
