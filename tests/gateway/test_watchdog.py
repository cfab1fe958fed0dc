"""Tests of the watchdog, which abandons only workers that make no progress."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from msgspec import structs

from draftgate.backends.errors import BackendFailed
from draftgate.backends.types import GenerationRequest, Pace, Phases
from draftgate.gateway.dispatch.hold import Hold
from draftgate.gateway.dispatch.watchdog import CHECK_INTERVAL_S
from draftgate.policies.resilience.failover import Cause, GivenUp
from draftgate.policies.resilience.liveness import LEAST_PATIENCE_S, RETRY_S
from tests.gateway.harness import ScriptedBackend
from tests.gateway.test_failover import CONFIG, make_job, run_with_faults
from tests.gateway.test_failover_details import job as short_job
from tests.gateway.test_failover_details import send_job, serving, settle
from tests.gateway.troubles import (
    Choice,
    DeviceFault,
    RecordingWatch,
    StepCondition,
    after_tokens,
    dispatching,
    in_step,
    read_rest,
    run_job,
    run_scenario,
    simulated,
    texts,
)

LATEST_S = LEAST_PATIENCE_S + 2.5 * CHECK_INTERVAL_S
"""Latest time at which the watchdog detects a silence that starts after a check, in seconds."""

DECODING = Phases(0.0, 0.0, (), 0.0)


def now_s() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize(
    "condition", [in_step(0), in_step(6), after_tokens(12)], ids=["first", "7th", "all"]
)
def test_streams_of_a_hung_worker_continue_elsewhere(condition: StepCondition) -> None:
    """The stream of a hung worker continues on another worker in time with the same text."""
    plain = run_with_faults(make_job(n=2)).choices

    async def scenario() -> None:
        watch = RecordingWatch()
        async with dispatching(
            simulated({0: DeviceFault(hangs=condition)}), 2, config=CONFIG
        ) as dispatched:
            assert await run_job(dispatched.dispatcher, make_job(n=2), watch) == plain
            assert LEAST_PATIENCE_S < now_s() < LATEST_S + 1.0
            (resume,) = watch.resumes
            assert resume.cause is Cause.STALLED
            assert [worker.hung for worker in dispatched.fleet.workers] == [True, False]
            next_watch = RecordingWatch()
            assert await run_job(
                dispatched.dispatcher, replace(make_job(), request_id="next"), next_watch
            )
            assert next_watch.workers == ["w-1"]
            assert await dispatched.is_idle()

    run_scenario(scenario())


def test_a_hung_worker_that_recovers_serves_again() -> None:
    """The stream of a single hung worker waits and continues when the worker completes a step."""
    plain = run_with_faults(make_job()).choices

    async def scenario() -> None:
        watch = RecordingWatch()
        factory = simulated({0: DeviceFault(hangs=in_step(6), hung_s=3 * LEAST_PATIENCE_S)})
        async with dispatching(factory, 1, config=CONFIG) as dispatched:
            result = asyncio.create_task(run_job(dispatched.dispatcher, make_job(), watch))
            await asyncio.sleep(LATEST_S)
            assert dispatched.fleet.workers[0].hung
            assert len(dispatched.dispatcher.queue) == 1
            assert await result == plain
            assert not dispatched.fleet.workers[0].hung
            assert 3 * LEAST_PATIENCE_S < now_s() < 3 * LEAST_PATIENCE_S + 3.0
            assert [resume.sink for resume in watch.resumes] == ["w-0"]

    run_scenario(scenario())


def test_a_permanently_hung_worker_ends_its_streams() -> None:
    """The stream of a permanently hung worker ends with one error after the queue timeout."""

    async def scenario() -> None:
        watch = RecordingWatch()
        factory = simulated({0: DeviceFault(hangs=in_step(6))})
        async with dispatching(factory, 1, config=CONFIG, timeout_s=20.0) as dispatched:
            with pytest.raises(BackendFailed, match="completes no further step"):
                await run_job(dispatched.dispatcher, make_job(), watch)
            assert now_s() < LATEST_S + 21.0
            assert (await dispatched.totals()).open == 0
        assert watch.losses == [(Cause.STALLED, GivenUp.NO_WORKER)]

    run_scenario(scenario())


def test_a_slow_worker_is_not_hung() -> None:
    """The watchdog does not abandon a worker whose steps take slightly less than the patience."""
    slow = DeviceFault(hangs=lambda _plan: True, hung_s=LEAST_PATIENCE_S - 2 * CHECK_INTERVAL_S)

    async def scenario() -> None:
        watch = RecordingWatch()
        async with dispatching(simulated({0: slow}), 2, config=CONFIG) as dispatched:
            await run_job(dispatched.dispatcher, make_job(), watch)
            assert now_s() > 5 * LEAST_PATIENCE_S
            assert not watch.resumes

    run_scenario(scenario())


def test_a_long_prompt_is_progress() -> None:
    """The watchdog counts the chunks of a long prompt as progress."""
    one = make_job()
    one = replace(one, prompts=(one.prompts[0] * 50,))
    slow = DeviceFault(hangs=lambda plan: plan.chunks > 0, hung_s=LEAST_PATIENCE_S / 2)

    async def scenario() -> None:
        watch = RecordingWatch()
        config = structs.replace(CONFIG, max_step_tokens=16)
        async with dispatching(simulated({0: slow}), 2, config=config) as dispatched:
            async with dispatched.dispatcher.run(one, watch=watch) as run:
                await anext(run.deltas)
            assert now_s() > 5 * LEAST_PATIENCE_S
            assert not watch.resumes

    run_scenario(scenario())


class SteppingWorker:
    """A worker that completes a step per second and sends only the test's deltas."""

    def __init__(self) -> None:
        self.backend = ScriptedBackend()
        self.backend.steps = 0

    async def step_forever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self.backend.steps is not None:
                self.backend.steps += 1

    async def wait(self, seconds: float) -> None:
        """Advance the time while the worker completes steps."""
        stepping = asyncio.create_task(self.step_forever())
        await asyncio.sleep(seconds)
        stepping.cancel()

    def send_delta(self, request: GenerationRequest) -> None:
        """Deliver a delta of a decoding request."""
        self.backend.emit(request, "half ", phases=DECODING)


def test_a_lost_stream_of_a_working_worker_continues_elsewhere() -> None:
    """A decoding stream without deltas continues elsewhere although its worker completes steps."""

    async def scenario() -> None:
        worker, other, watch = SteppingWorker(), ScriptedBackend(), RecordingWatch()
        async with serving(worker.backend, other) as dispatched:
            result, request = await send_job(dispatched, worker.backend, short_job(), watch)
            worker.send_delta(request)
            await worker.wait(LATEST_S)
            assert [resume.cause for resume in watch.resumes] == [Cause.STALLED]
            other.emit(await other.submitted.get(), "whole", last=True)
            assert texts(await result) == ["half whole"]
            assert not dispatched.fleet.workers[0].hung
            assert worker.backend.abandoned.get_nowait() == request.request_id

    run_scenario(scenario())


@pytest.mark.parametrize("why", ["queued", "preempted", "sparing", "paused", "unknown"])
def test_requests_without_expected_output_are_not_abandoned(why: str) -> None:
    """The watchdog ignores queued, preempted and paused requests and workers without step
    counts."""

    async def scenario() -> None:
        worker, other, watch = SteppingWorker(), ScriptedBackend(), RecordingWatch()
        async with (
            serving(worker.backend, other) as dispatched,
            dispatched.dispatcher.run(short_job(), watch=watch) as run,
        ):
            choice = Choice()
            reading = asyncio.create_task(read_rest(run, [choice]))
            request = await worker.backend.submitted.get()
            if why in {"preempted", "sparing", "paused"}:
                worker.send_delta(request)
                await settle()
            if why == "preempted":
                worker.backend.waiting = 1
            if why in {"sparing", "paused"}:
                run.set_pace(Pace.SPARING if why == "sparing" else Pace.PAUSED)
            if why == "unknown":
                worker.backend.steps = None
            if why == "paused":  # an idle worker completes no steps
                await asyncio.sleep(100 * LEAST_PATIENCE_S)
            await worker.wait(100 * LEAST_PATIENCE_S)
            assert not watch.resumes
            worker.backend.emit(request, "end", last=True)
            await reading
            assert choice.text.endswith("end")

    run_scenario(scenario())


def test_a_slow_client_is_not_silence() -> None:
    """A stream whose client reads nothing is not lost while its worker sends tokens."""

    async def scenario() -> None:
        worker, other, watch = SteppingWorker(), ScriptedBackend(), RecordingWatch()
        async with (
            serving(worker.backend, other) as dispatched,
            dispatched.dispatcher.run(short_job(), watch=watch) as run,
        ):
            reading = asyncio.ensure_future(anext(run.deltas))
            request = await worker.backend.submitted.get()
            worker.send_delta(request)
            await reading
            for _ in range(100):
                await worker.wait(LEAST_PATIENCE_S / 2)
                worker.send_delta(request)
            assert not dispatched.fleet.workers[0].hung
            assert run.unread_tokens == 100
            worker.backend.emit(request, "end", last=True)
            assert (await anext(run.deltas)).text == "half " * 100 + "end"
        assert not watch.resumes

    run_scenario(scenario())


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_simultaneous_disconnect_wins(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simultaneous disconnect takes precedence over the watchdog."""
    leaving: list[asyncio.Task] = []
    fail = Hold.fail

    def fail_and_disconnect(self: Hold, error: Exception) -> None:
        acts = [lambda: fail(self, error), leaving[0].cancel]
        for act in acts if order == "after" else reversed(acts):
            act()

    async def scenario() -> None:
        worker, other, watch = SteppingWorker(), ScriptedBackend(), RecordingWatch()
        async with serving(worker.backend, other) as dispatched:
            result, request = await send_job(dispatched, worker.backend, short_job(), watch)
            leaving.append(result)
            worker.send_delta(request)
            await worker.wait(LATEST_S)
            assert result.cancelled()
            assert not watch.resumes
            assert other.submitted.empty()
            assert await dispatched.is_idle()

    monkeypatch.setattr(Hold, "fail", fail_and_disconnect)
    run_scenario(scenario())


def test_a_hung_worker_is_used_again_after_the_retry_time() -> None:
    """The dispatcher uses a hung worker again after `RETRY_S`."""

    async def scenario() -> None:
        one, other = ScriptedBackend(), ScriptedBackend()
        one.steps = other.steps = 0
        async with serving(one, other) as dispatched:
            result, _ = await send_job(dispatched, one, short_job())
            rest = await other.submitted.get()
            other.emit(rest, "whole", last=True)
            await result
            worker = dispatched.fleet.workers[0]
            assert worker.hung
            await asyncio.sleep(RETRY_S / 2)
            assert worker.hung
            await asyncio.sleep(RETRY_S)
            assert not worker.hung
            assert worker in dispatched.fleet.open

    run_scenario(scenario())


def test_a_recovered_worker_is_not_hung() -> None:
    """A worker that recovers from a failure is not hung, even if it was hung before the failure."""

    async def scenario() -> None:
        one, other = ScriptedBackend(), ScriptedBackend()
        one.steps = other.steps = 0
        async with serving(one, other) as dispatched:
            result, _ = await send_job(dispatched, one, short_job())
            other.emit(await other.submitted.get(), "whole", last=True)
            await result
            assert dispatched.fleet.workers[0].hung
            one.crash("gone")
            await asyncio.sleep(2 * CHECK_INTERVAL_S)
            one.failure = None  # the worker of a peer may recover
            assert dispatched.fleet.workers[0] in dispatched.fleet.open

    run_scenario(scenario())
