"""Tests of resume details with workers whose steps the test decides."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from draftgate.backends.errors import BackendFailed
from draftgate.backends.token_ids import compact
from draftgate.backends.types import (
    Capabilities,
    Delta,
    FinishReason,
    GenerationRequest,
    ModelCard,
    Pace,
    ResumedChoice,
    SamplingParams,
    Task,
)
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.recovery import RECOVERY_S
from draftgate.gateway.state.commands import ListWorkers
from draftgate.policies.resilience.failover import Cause, GivenUp
from draftgate.policies.types import ServiceLevel
from tests.gateway.harness import ScriptedBackend
from tests.gateway.troubles import (
    Choice,
    Dispatched,
    RecordingWatch,
    dispatching,
    read_rest,
    run_job,
    run_scenario,
    texts,
)


def job(name: str = "r", n: int = 1, **fields: object) -> Job:
    return Job(name, (compact([1, 2, 3, 4, 5]),), SamplingParams(1, 0), 10, n, **fields)


async def settle() -> None:
    """Run the loop until no callback is ready."""
    for _ in range(20):
        await asyncio.sleep(0)


def serving(*backends: ScriptedBackend, **settings: object):
    """Start a dispatcher with the given workers."""
    return dispatching(lambda config: backends[config.device_index], len(backends), **settings)


async def send_job(
    dispatched: Dispatched,
    backend: ScriptedBackend,
    first_worker: Job,
    watch: RecordingWatch | None = None,
) -> tuple[asyncio.Task, GenerationRequest]:
    """Send a job to a worker and return its pending result and the submitted request."""
    result = asyncio.create_task(
        run_job(dispatched.dispatcher, first_worker, watch or RecordingWatch())
    )
    return result, await backend.submitted.get()


def test_only_unfinished_choices_are_resumed() -> None:
    """The resumed request contains the started and the untouched choice, but not the finished
    choice."""

    async def scenario() -> None:
        first_worker, second_worker = ScriptedBackend(), ScriptedBackend()
        async with serving(first_worker, second_worker, shared=True) as dispatched:
            result, request = await send_job(dispatched, first_worker, job(n=3))
            first_worker.emit(request, "it ends", last=True)
            first_worker.emit(request, "it goes ", choice=1)
            await settle()
            first_worker.emit(request, "on ", choice=1)
            first_worker.crash("device lost")
            resumed_request = await second_worker.submitted.get()
            assert resumed_request.resumed == (ResumedChoice(1, (0, 1, 0)), ResumedChoice(2, ()))
            same = replace(resumed_request, request_id=request.request_id, resumed=())
            assert same == replace(request, speculation=resumed_request.speculation)
            assert resumed_request.request_id != request.request_id
            worker = dispatched.fleet.workers[1]
            assert worker.reserved_tokens == resumed_request.most_tokens == 2 * (5 + 10)
            (view,) = [
                v
                for v in (await dispatched.store.call(ListWorkers())).workers
                if v.worker_id == "w-1"
            ]
            assert view.leased_tokens == resumed_request.most_tokens
            second_worker.emit(resumed_request, "begins late", last=True, choice=2)
            second_worker.emit(resumed_request, "to its end", last=True, choice=1)
            assert texts(await result) == ["it ends", "it goes on to its end", "begins late"]
            assert await dispatched.is_idle()

    run_scenario(scenario())


def test_a_request_without_output_starts_again() -> None:
    """The dispatcher sends a request without output again unchanged, even to workers that cannot
    resume."""

    async def scenario() -> None:
        first_worker, second_worker = ScriptedBackend(), ScriptedBackend()
        for backend in (first_worker, second_worker):
            backend.card = replace(backend.card, capabilities=Capabilities(resume=False))
        async with serving(first_worker, second_worker) as dispatched:
            result, _ = await send_job(dispatched, first_worker, job(n=2))
            first_worker.crash("device lost")
            again = await second_worker.submitted.get()
            assert (again.resumed, again.n) == ((), 2)
            for choice in range(2):
                second_worker.emit(again, "all", last=True, choice=choice)
            assert texts(await result) == ["all", "all"]

    run_scenario(scenario())


def test_a_stream_ends_if_workers_cannot_resume() -> None:
    """A stream with tokens ends with the worker's error if no worker can resume."""

    async def scenario() -> None:
        first_worker, second_worker, watch = ScriptedBackend(), ScriptedBackend(), RecordingWatch()
        for backend in (first_worker, second_worker):
            backend.card = replace(backend.card, capabilities=Capabilities(resume=False))
        async with serving(first_worker, second_worker) as dispatched:
            result, request = await send_job(dispatched, first_worker, job(), watch)
            first_worker.emit(request, "half")
            await settle()
            first_worker.crash("device lost")
            with pytest.raises(BackendFailed, match=r"^device lost$"):
                await result
            assert second_worker.submitted.empty()
        assert watch.losses == [(Cause.FAILED, GivenUp.UNABLE)]

    run_scenario(scenario())


def test_a_healthy_worker_is_used_again_if_no_other_is_left() -> None:
    """The dispatcher prefers other workers after a broken connection, then uses the same worker
    again."""

    async def scenario() -> None:
        first_worker, second_worker = ScriptedBackend(), ScriptedBackend()
        async with serving(first_worker, second_worker) as dispatched:
            result, request = await send_job(dispatched, first_worker, job())
            other_result, busy = await send_job(dispatched, second_worker, job("beside"))
            first_worker.sinks.fail(
                "connection reset"
            )  # the connection fails, but the worker stays healthy
            again = await second_worker.submitted.get()
            second_worker.emit(busy, "done", last=True)
            await other_result
            second_worker.emit(again, "then ")
            second_worker.crash("device lost")
            third = await first_worker.submitted.get()
            assert len({request.request_id, again.request_id, third.request_id}) == 3
            first_worker.emit(third, "at last", last=True)
            assert texts(await result) == ["then at last"]

    run_scenario(scenario())


def test_workers_without_a_numerics_class_never_match() -> None:
    """Two workers without a numerics class do not count as the same class."""

    async def scenario() -> None:
        first_worker, second_worker, watch = ScriptedBackend(), ScriptedBackend(), RecordingWatch()
        for backend in (first_worker, second_worker):
            backend.card = replace(backend.card, numerics_class=None)
        async with serving(first_worker, second_worker) as dispatched:
            result, _ = await send_job(dispatched, first_worker, job(), watch)
            first_worker.crash("device lost")
            second_worker.emit(await second_worker.submitted.get(), "all", last=True)
            await result
        assert [resume.same_numerics_class for resume in watch.resumes] == [False]

    run_scenario(scenario())


def test_a_resumed_request_goes_to_the_head_of_the_queue() -> None:
    """A resumed request precedes all requests that wait for their first worker, even urgent
    ones."""

    async def scenario() -> None:
        first_worker, second_worker = ScriptedBackend(), ScriptedBackend()
        first_worker.max_sequences = second_worker.max_sequences = 1
        urgent = {"service": ServiceLevel(ttft_s=0.1, priority=-5)}
        async with serving(first_worker, second_worker) as dispatched:
            first, request = await send_job(dispatched, first_worker, job("a"))
            second, other_result = await send_job(dispatched, second_worker, job("b"))
            waiting = asyncio.create_task(run_job(dispatched.dispatcher, job("c", **urgent)))
            await settle()
            first_worker.emit(request, "half ")
            await settle()
            first_worker.crash("device lost")
            await settle()
            assert len(dispatched.dispatcher.queue) == 2
            second_worker.emit(other_result, "done", last=True)
            resumed_request = await second_worker.submitted.get()
            assert resumed_request.resumed == (ResumedChoice(0, (0,)),)
            second_worker.emit(resumed_request, "whole", last=True)
            second_worker.emit(await second_worker.submitted.get(), "late", last=True)
            assert [texts(await task) for task in (first, second, waiting)] == [
                ["half whole"],
                ["done"],
                ["late"],
            ]

    run_scenario(scenario())


def test_a_resumed_request_keeps_room_on_one_worker_only() -> None:
    """A worker keeps its room for a resumed request with two choices, while a newcomer uses the
    other worker."""

    async def scenario() -> None:
        workers = [ScriptedBackend() for _ in range(3)]
        for worker in workers:
            worker.max_sequences = 2
        async with serving(*workers) as dispatched:
            tasks, running = [], []
            for name, n in (("a", 2), ("b", 1), ("c", 1), ("d", 1), ("e", 1)):
                tasks.append(asyncio.create_task(run_job(dispatched.dispatcher, job(name, n=n))))
                await settle()
                (worker,) = (one for one in workers if not one.submitted.empty())
                running.append((worker, worker.submitted.get_nowait()))
            tasks.append(asyncio.create_task(run_job(dispatched.dispatcher, job("new"))))
            await settle()
            running[0][0].crash("device lost")
            await settle()
            views = (await dispatched.store.call(ListWorkers())).workers
            (claimed_id,) = (view.worker_id for view in views if view.claimed_tokens)
            claimed = workers[int(claimed_id.removeprefix("w-"))]
            (other,) = (one for one in workers if one not in (claimed, running[0][0]))

            async def end_one(backend: ScriptedBackend) -> None:
                at = next(n for n, (one, _) in enumerate(running) if one is backend)
                backend.emit(running.pop(at)[1], "done", last=True)
                await settle()

            await end_one(claimed)
            assert all(worker.submitted.empty() for worker in workers)
            await end_one(other)
            newcomer = other.submitted.get_nowait()
            assert newcomer.request_id == "new-0"
            await end_one(claimed)
            resumed_request = claimed.submitted.get_nowait()
            assert resumed_request.request_id == "a-0.1"
            other.emit(newcomer, "done", last=True)
            await end_one(other)
            for choice in range(2):
                claimed.emit(resumed_request, "done", last=True, choice=choice)
            assert len(await asyncio.gather(*tasks)) == len(tasks)
            assert await dispatched.is_idle()

    run_scenario(scenario())


def test_a_resume_without_capacity_ends_with_the_loss() -> None:
    """The error of a resume without capacity names the lost worker and the missing capacity."""

    async def scenario() -> None:
        first_worker, second_worker, watch = ScriptedBackend(), ScriptedBackend(), RecordingWatch()
        first_worker.max_sequences = second_worker.max_sequences = 1
        async with serving(first_worker, second_worker, timeout_s=5.0) as dispatched:
            result, _ = await send_job(dispatched, first_worker, job("a"), watch)
            other_result, request = await send_job(dispatched, second_worker, job("b"))
            first_worker.crash("device lost")
            with pytest.raises(BackendFailed, match=r"^device lost; afterwards: no worker had"):
                await result
            assert asyncio.get_running_loop().time() == pytest.approx(5.0)
            second_worker.emit(request, "done", last=True)
            await other_result
            assert await dispatched.is_idle()
        assert watch.losses == [(Cause.FAILED, GivenUp.NO_WORKER)]

    run_scenario(scenario())


def test_requests_survive_a_short_loss_of_all_workers_of_a_pool() -> None:
    """Requests in the queue and new requests wait until a lost worker returns."""

    async def scenario() -> None:
        worker = ScriptedBackend()
        worker.max_sequences = 1
        async with serving(worker) as dispatched:
            dispatched.fleet.discovers = True
            running, _ = await send_job(dispatched, worker, job("a"))
            waiting = asyncio.create_task(run_job(dispatched.dispatcher, job("b")))
            await asyncio.sleep(1.0)
            worker.crash("gone")
            await asyncio.sleep(RECOVERY_S / 2)
            new = asyncio.create_task(run_job(dispatched.dispatcher, job("c")))
            await asyncio.sleep(1.0)
            worker.failure = None
            for _ in range(3):
                worker.emit(await worker.submitted.get(), "done", last=True)
            assert texts(await running) == texts(await waiting) == texts(await new) == ["done"]
            assert await dispatched.is_idle()

    run_scenario(scenario())


@pytest.mark.parametrize(("is_pool", "wait_s"), [(True, RECOVERY_S), (False, 0.0)])
def test_a_new_request_without_a_worker_fails(is_pool: bool, wait_s: float) -> None:
    """In a pool, the request waits `RECOVERY_S` for a worker. Otherwise it fails at once, so that
    the client can try another gateway."""

    async def scenario() -> None:
        worker = ScriptedBackend()
        async with serving(worker) as dispatched:
            dispatched.fleet.discovers = is_pool
            worker.crash("gone")
            with pytest.raises(BackendFailed, match=r"^gone$"):
                await run_job(dispatched.dispatcher, job("a"))
            assert asyncio.get_running_loop().time() == pytest.approx(wait_s)

    run_scenario(scenario())


def test_waiting_requests_fail_if_no_worker_returns() -> None:
    """Requests in the queue fail with the outage after `RECOVERY_S` without a worker."""

    async def scenario() -> None:
        worker = ScriptedBackend()
        worker.max_sequences = 1
        async with serving(worker) as dispatched:
            dispatched.fleet.discovers = True
            await send_job(dispatched, worker, job("a"))
            waiting = asyncio.create_task(run_job(dispatched.dispatcher, job("b")))
            await asyncio.sleep(1.0)
            worker.crash("gone")
            with pytest.raises(BackendFailed, match=r"^gone$"):
                await waiting
            assert asyncio.get_running_loop().time() == pytest.approx(1.0 + RECOVERY_S)

    run_scenario(scenario())


def test_a_disconnect_between_two_workers_frees_everything() -> None:
    """A client that disconnects between two workers releases its place, quota and lease."""

    async def scenario() -> None:
        first_worker, second_worker = ScriptedBackend(), ScriptedBackend()
        first_worker.max_sequences = second_worker.max_sequences = 1
        async with serving(first_worker, second_worker) as dispatched:
            leaving, request = await send_job(dispatched, first_worker, job("a"))
            other_result, running = await send_job(dispatched, second_worker, job("b"))
            first_worker.emit(request, "half ")
            await settle()
            first_worker.crash("device lost")
            await settle()
            assert len(dispatched.dispatcher.queue) == 1
            leaving.cancel()
            await asyncio.wait({leaving})
            second_worker.emit(running, "done", last=True)
            await other_result
            assert await dispatched.is_idle()
            assert (await dispatched.totals()).open == 0
            assert second_worker.submitted.empty()

    run_scenario(scenario())


def test_the_pace_of_a_slow_reader_is_kept() -> None:
    """The new worker of a resumed request receives the pace of the slow reader."""

    async def scenario() -> None:
        first_worker, second_worker = ScriptedBackend(), ScriptedBackend()
        async with (
            serving(first_worker, second_worker) as dispatched,
            dispatched.dispatcher.run(job()) as run,
        ):
            choice = Choice()
            reading = asyncio.create_task(read_rest(run, [choice]))
            await first_worker.submitted.get()
            run.set_pace(Pace.SPARING)
            first_worker.crash("device lost")
            resumed_request = await second_worker.submitted.get()
            await settle()
            assert second_worker.paces == [(resumed_request.request_id, Pace.SPARING)]
            second_worker.emit(resumed_request, "slowly", last=True)
            await reading
            assert choice.text == "slowly"

    run_scenario(scenario())


def test_an_embedding_starts_again() -> None:
    """The dispatcher restarts an embedding as often as a request may resume."""

    async def scenario() -> None:
        backends = [ScriptedBackend() for _ in range(4)]
        state = b"\0\0\x80?" * 4
        for backend in backends:
            capabilities = Capabilities(tasks=(Task.GENERATE, Task.EMBED), embedding_size=4)
            backend.card = ModelCard("m", "m", 1000, "test", 1, capabilities)
        async with serving(*backends) as dispatched:
            first_worker = replace(
                job(), max_tokens=0, sampling=SamplingParams(0, 0), task=Task.EMBED
            )
            async with dispatched.dispatcher.run(first_worker) as run:
                reading = asyncio.ensure_future(anext(run.deltas))
                for _ in range(2):
                    await settle()
                    (chosen,) = (backend for backend in backends if len(backend.sinks))
                    chosen.crash("device lost")
                await settle()
                (chosen,) = (backend for backend in backends if len(backend.sinks))
                request = await chosen.submitted.get()
                assert (request.task, request.resumed) == (Task.EMBED, ())
                done = Delta(0, (), "", finish_reason=FinishReason.STOP, pooled=state)
                chosen.sinks.deliver([(request.request_id, done)])
                assert (await reading).pooled == state
                assert [delta async for delta in run.deltas] == []
            assert (await dispatched.totals()).settled == 5

    run_scenario(scenario())
