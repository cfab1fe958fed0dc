"""The details of a resume, with workers whose steps the test decides."""

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
from draftgate.policies.resilience.failover import Cause, GivenUp
from draftgate.policies.types import ServiceLevel
from tests.gateway.harness import ScriptedBackend
from tests.gateway.troubles import Choice, Dispatched, Told, answer, dispatching, play, read, texts


def job(name: str = "r", n: int = 1, **fields: object) -> Job:
    return Job(name, (compact([1, 2, 3, 4, 5]),), SamplingParams(1, 0), 10, n, **fields)


async def settled() -> None:
    """Run the loop until nothing more can happen now."""
    for _ in range(20):
        await asyncio.sleep(0)


def serving(*backends: ScriptedBackend, **settings: object):
    """A dispatcher of these workers."""
    return dispatching(lambda config: backends[config.device_index], len(backends), **settings)


async def asked(
    there: Dispatched, backend: ScriptedBackend, one: Job, watch: Told | None = None
) -> tuple[asyncio.Task, GenerationRequest]:
    """Send a job to this worker; return its pending answer and the submitted request."""
    answering = asyncio.create_task(answer(there.dispatcher, one, watch or Told()))
    return answering, await backend.submitted.get()


def test_only_unfinished_choices_are_resumed() -> None:
    """Of a finished, a started and an untouched choice, the resumed request has the last two, with
    their numbers."""

    async def scenario() -> None:
        one, other = ScriptedBackend(), ScriptedBackend()
        async with serving(one, other) as there:
            answering, request = await asked(there, one, job(n=3))
            one.emit(request, "it ends", last=True)
            one.emit(request, "it goes ", choice=1)
            await settled()
            one.emit(request, "on ", choice=1)
            one.crash("device lost")
            rest = await other.submitted.get()
            assert rest.resumed == (ResumedChoice(1, (0, 1, 0)), ResumedChoice(2, ()))
            same = replace(rest, request_id=request.request_id, resumed=())
            assert same == replace(request, speculation=rest.speculation)
            assert rest.request_id != request.request_id
            worker = there.fleet.workers[1]
            assert worker.reserved_tokens == rest.most_tokens == 2 * (5 + 10)
            (view,) = [v for v in (await there.store.snapshot()).workers if v.worker_id == "w-1"]
            assert view.leased_tokens == rest.most_tokens
            other.emit(rest, "begins late", last=True, choice=2)
            other.emit(rest, "to its end", last=True, choice=1)
            assert texts(await answering) == ["it ends", "it goes on to its end", "begins late"]
            assert await there.is_idle()

    play(scenario())


def test_a_request_without_output_starts_again() -> None:
    """A request without a token is sent again unchanged, also to workers that cannot resume."""

    async def scenario() -> None:
        one, other = ScriptedBackend(), ScriptedBackend()
        for backend in (one, other):
            backend.card = replace(backend.card, capabilities=Capabilities(resume=False))
        async with serving(one, other) as there:
            answering, _ = await asked(there, one, job(n=2))
            one.crash("device lost")
            again = await other.submitted.get()
            assert (again.resumed, again.n) == ((), 2)
            for choice in range(2):
                other.emit(again, "all", last=True, choice=choice)
            assert texts(await answering) == ["all", "all"]

    play(scenario())


def test_a_stream_ends_if_workers_cannot_resume() -> None:
    """On workers that cannot resume, a stream with tokens ends with its error."""

    async def scenario() -> None:
        one, other, told = ScriptedBackend(), ScriptedBackend(), Told()
        for backend in (one, other):
            backend.card = replace(backend.card, capabilities=Capabilities(resume=False))
        async with serving(one, other) as there:
            answering, request = await asked(there, one, job(), told)
            one.emit(request, "half")
            await settled()
            one.crash("device lost")
            with pytest.raises(BackendFailed, match=r"^device lost$"):
                await answering
            assert other.submitted.empty()
        assert told.losses == [(Cause.FAILED, GivenUp.UNABLE)]

    play(scenario())


def test_a_truncated_stream_is_resumed() -> None:
    """A stream that ends before its choices is resumed on another worker."""

    async def scenario() -> None:
        one, other, told = ScriptedBackend(), ScriptedBackend(), Told()

        async def short(request: GenerationRequest):
            yield Delta(0, (7, 8), "cut ")

        one.generate = short
        async with serving(one, other) as there:
            answering = asyncio.create_task(answer(there.dispatcher, job(), told))
            rest = await other.submitted.get()
            assert rest.resumed == (ResumedChoice(0, (7, 8)),)
            other.emit(rest, "off", last=True)
            assert texts(await answering) == ["cut off"]
            assert "before its choices had ended" in told.resumes[0].reason

    play(scenario())


def test_a_healthy_worker_is_used_again_if_no_other_is_left() -> None:
    """After a broken connection, other workers are preferred, then the same one is used again."""

    async def scenario() -> None:
        one, other = ScriptedBackend(), ScriptedBackend()
        async with serving(one, other) as there:
            answering, request = await asked(there, one, job())
            beside, busy = await asked(there, other, job("beside"))
            one.streams.fail("connection reset")  # the worker works, and is idle
            again = await other.submitted.get()
            other.emit(busy, "done", last=True)
            await beside
            other.emit(again, "then ")
            other.crash("device lost")
            third = await one.submitted.get()
            assert len({request.request_id, again.request_id, third.request_id}) == 3
            one.emit(third, "at last", last=True)
            assert texts(await answering) == ["then at last"]

    play(scenario())


def test_workers_without_a_numerics_class_never_match() -> None:
    """Workers without a numerics class are never of the same class."""

    async def scenario() -> None:
        one, other, told = ScriptedBackend(), ScriptedBackend(), Told()
        for backend in (one, other):
            backend.card = replace(backend.card, numerics_class=None)
        async with serving(one, other) as there:
            answering, _ = await asked(there, one, job(), told)
            one.crash("device lost")
            other.emit(await other.submitted.get(), "all", last=True)
            await answering
        assert [resume.same_numerics_class for resume in told.resumes] == [False]

    play(scenario())


def test_a_resumed_request_goes_to_the_head_of_the_queue() -> None:
    """A resumed request precedes all requests that wait for their first worker, however urgent."""

    async def scenario() -> None:
        one, other = ScriptedBackend(), ScriptedBackend()
        one.max_sequences = other.max_sequences = 1
        urgent = {"service": ServiceLevel(ttft_s=0.1, priority=-5)}
        async with serving(one, other) as there:
            first, request = await asked(there, one, job("a"))
            second, beside = await asked(there, other, job("b"))
            waiting = asyncio.create_task(answer(there.dispatcher, job("c", **urgent)))
            await settled()
            one.emit(request, "half ")
            await settled()
            one.crash("device lost")
            await settled()
            assert len(there.dispatcher.queue) == 2
            other.emit(beside, "done", last=True)
            rest = await other.submitted.get()
            assert rest.resumed == (ResumedChoice(0, (0,)),)
            other.emit(rest, "whole", last=True)
            other.emit(await other.submitted.get(), "late", last=True)
            assert [texts(await task) for task in (first, second, waiting)] == [
                ["half whole"],
                ["done"],
                ["late"],
            ]

    play(scenario())


def test_a_resume_without_capacity_ends_with_the_loss() -> None:
    """The error names the lost worker and the missing capacity; it is not a 429."""

    async def scenario() -> None:
        one, other, told = ScriptedBackend(), ScriptedBackend(), Told()
        one.max_sequences = other.max_sequences = 1
        async with serving(one, other, timeout_s=5.0) as there:
            answering, _ = await asked(there, one, job("a"), told)
            beside, request = await asked(there, other, job("b"))
            one.crash("device lost")
            with pytest.raises(BackendFailed, match=r"^device lost; afterwards: no worker had"):
                await answering
            assert asyncio.get_running_loop().time() == pytest.approx(5.0)
            other.emit(request, "done", last=True)
            await beside
            assert await there.is_idle()
        assert told.losses == [(Cause.FAILED, GivenUp.NO_WORKER)]

    play(scenario())


def test_a_disconnect_between_two_workers_frees_everything() -> None:
    """A client that disconnects between two workers frees its place, quota and lease."""

    async def scenario() -> None:
        one, other = ScriptedBackend(), ScriptedBackend()
        one.max_sequences = other.max_sequences = 1
        async with serving(one, other) as there:
            leaving, request = await asked(there, one, job("a"))
            beside, running = await asked(there, other, job("b"))
            one.emit(request, "half ")
            await settled()
            one.crash("device lost")
            await settled()
            assert len(there.dispatcher.queue) == 1
            leaving.cancel()
            await asyncio.wait({leaving})
            other.emit(running, "done", last=True)
            await beside
            assert await there.is_idle()
            assert there.dispatcher.admission.ledger.totals("").open == 0
            assert other.submitted.empty()

    play(scenario())


def test_the_pace_of_a_slow_reader_is_kept() -> None:
    """The new worker gets the pace of a slow reader at once."""

    async def scenario() -> None:
        one, other = ScriptedBackend(), ScriptedBackend()
        async with serving(one, other) as there, there.dispatcher.run(job()) as run:
            choice = Choice()
            reading = asyncio.create_task(read(run, [choice]))
            await one.submitted.get()
            run.set_pace(Pace.SPARING)
            one.crash("device lost")
            rest = await other.submitted.get()
            await settled()
            assert other.paces == [(rest.request_id, Pace.SPARING)]
            other.emit(rest, "slowly", last=True)
            await reading
            assert choice.text == "slowly"

    play(scenario())


def test_an_embedding_starts_again() -> None:
    """It has no tokens and is computed again, as often as a request may be resumed."""

    async def scenario() -> None:
        backends = [ScriptedBackend() for _ in range(4)]
        state = b"\0\0\x80?" * 4
        for backend in backends:
            able = Capabilities(embeddings=True, embedding_size=4)
            backend.card = ModelCard("m", "m", 1000, "test", 1, able)
        async with serving(*backends) as there:
            one = replace(job(), max_tokens=0, sampling=SamplingParams(0, 0), task=Task.EMBED)
            async with there.dispatcher.run(one) as run:
                reading = asyncio.ensure_future(anext(run.deltas))
                for _ in range(2):
                    await settled()
                    (chosen,) = (backend for backend in backends if len(backend.streams))
                    chosen.crash("device lost")
                await settled()
                (chosen,) = (backend for backend in backends if len(backend.streams))
                request = await chosen.submitted.get()
                assert (request.task, request.resumed) == (Task.EMBED, ())
                done = Delta(0, (), "", finish_reason=FinishReason.STOP, embedding=state)
                chosen.streams.deliver([(request.request_id, done)])
                assert (await reading).embedding == state
                assert [delta async for delta in run.deltas] == []
            assert there.dispatcher.admission.ledger.totals("").settled == 5

    play(scenario())
