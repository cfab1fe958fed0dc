"""Tests of the dispatcher: defaults, unavailable options and leases."""

from __future__ import annotations

import asyncio
import gc
import weakref
from dataclasses import fields, replace
from typing import Any, cast

import pytest

from draftgate.backends.errors import RequestRejected
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.config.models import ModelPlan
from draftgate.gateway.dispatch.dispatcher import RunningJob
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import InvalidRequest
from draftgate.gateway.node import Node
from draftgate.gateway.state.commands import PublishReport
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.tracing import Tracing
from draftgate.policies.quotas import UNLIMITED, Quota
from draftgate.policies.types import SpeculationMode, SpeculationPlan
from tests.gateway.harness import JOIN, ScriptedBackend, leased, placed, scripted_fleet


async def started(scripted: ScriptedBackend, join: str | None = None) -> Node:
    """Return a started node without HTTP."""
    config = ServeConfig(speculation="fixed:4", join=join)
    fleet = scripted_fleet(config, [scripted])
    made = Node(config, [(ModelPlan(None, config), fleet)], MemoryStore(), Tracing())
    await made.start()
    return made


@pytest.fixture
async def node(scripted: ScriptedBackend) -> Node:
    """A started node without HTTP."""
    return await started(scripted)


def job(prompt_tokens: int = 10, **fields: object) -> Job:
    """Return a job with a single prompt."""
    values = {"max_tokens": 5, **fields}
    return Job("r", ((1,) * prompt_tokens,), SamplingParams(1, 0), **values)


async def test_without_max_tokens_the_context_is_filled(
    node: Node, scripted: ScriptedBackend
) -> None:
    """The default of `max_tokens` is the free part of the context or of the KV pool, whichever is
    smaller."""
    scripted.kv_tokens = 5000
    assert (await placed(node, job(max_tokens=None)))[0].request.sampling.max_tokens == 990
    scripted.kv_tokens = 500
    assert (await placed(node, job(max_tokens=None)))[0].request.sampling.max_tokens == 490


async def test_a_prompt_that_fills_the_context_is_rejected(node: Node) -> None:
    """The dispatcher rejects a prompt that fills the context or the KV pool."""
    with pytest.raises(RequestRejected):
        await placed(node, job(500, max_tokens=None))
    with pytest.raises(RequestRejected):
        await placed(node, job(2000, max_tokens=None))


async def test_the_plan_respects_the_clients_cap(node: Node) -> None:
    """The client's `max_draft_tokens` limits the draft length of the plan."""
    plan = (await placed(node, job(max_draft_tokens=2)))[0].request.speculation
    assert (plan.proposer, plan.max_draft_tokens) == ("ngram", 2)
    assert plan.reason


async def test_a_missing_proposer_is_rejected_with_the_available_proposers(node: Node) -> None:
    """The dispatcher rejects a request for a missing proposer and lists the available proposers."""
    with pytest.raises(InvalidRequest, match="can draft with: ngram") as caught:
        await placed(node, job(mode=SpeculationMode.DRAFT_MODEL))
    assert caught.value.param == "speculation.mode"


@pytest.mark.parametrize("quota", [UNLIMITED, Quota(60, 600)])
async def test_a_request_without_a_wait_is_sent_at_once(
    node: Node, scripted: ScriptedBackend, quota: Quota
) -> None:
    """A request that need not wait reaches its worker before the event loop runs anything else."""
    node.dispatcher.admission.quotas.change({"": quota})
    await node.heartbeat.beat()
    sent: list[int] = []
    asyncio.get_running_loop().call_soon(lambda: sent.append(scripted.submitted.qsize()))

    async def finish() -> None:
        scripted.emit(await scripted.submitted.get(), "x", last=True)

    async with node.dispatcher.run(job()) as run, asyncio.TaskGroup() as group:
        group.create_task(finish())
        assert [delta.text async for delta in run.deltas] == ["x"]
    assert sent == [1]


async def test_an_ended_run_is_freed_without_a_collection(
    node: Node, scripted: ScriptedBackend
) -> None:
    """Nothing that belongs to a run refers to it in a cycle after its end."""

    async def run_job() -> weakref.ref[RunningJob]:
        async with node.dispatcher.run(job()) as run, asyncio.TaskGroup() as group:
            texts: list[str] = []
            run.sink = lambda delta: texts.append(f"{delta.text} of {run.job.request_id}")
            group.create_task(finish())
            await run.finished()
            assert len(texts) == 1
            return weakref.ref(run)

    async def finish() -> None:
        scripted.emit(await scripted.submitted.get(), "x", last=True)

    gc.disable()
    try:
        ended = await run_job()
        assert ended() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("join", "tokens"), [(JOIN, 15), (None, 0)])
async def test_a_lease_lasts_as_long_as_its_request(
    scripted: ScriptedBackend, join: str | None, tokens: int
) -> None:
    """The dispatcher leases the prompt and output tokens exactly while the request runs, and
    nothing without a pool."""
    node = await started(scripted, join)
    await node.heartbeat.beat()
    async with node.dispatcher.run(job()) as run:
        reading = asyncio.ensure_future(anext(run.deltas))
        request = await scripted.submitted.get()
        assert await leased(node) == tokens
        scripted.emit(request, "x", last=True)
        await reading
    assert await leased(node) == 0


async def test_the_heartbeat_survives_a_store_error(
    node: Node, scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The heartbeat continues after a store error."""
    monkeypatch.setattr("draftgate.gateway.cluster.heartbeat.HEARTBEAT_S", 0.001)
    calls: list[str] = []
    published = asyncio.Event()

    def publish(command: PublishReport) -> bool:
        calls.append(command.report.worker_id)
        if len(calls) == 1:
            raise OSError("store is away")
        published.set()
        return True

    monkeypatch.setitem(node.store.handlers, PublishReport, publish)
    beating = asyncio.create_task(node.heartbeat.run())
    async with asyncio.timeout(60):
        await published.wait()
    beating.cancel()
    await asyncio.wait({beating})
    assert calls[:2] == [node.fleet.workers[0].worker_id] * 2


def test_a_plan_changes_no_other_field_of_a_request() -> None:
    """A request with a plan equals the request except for its plan."""
    values: dict[str, Any] = {one.name: object() for one in fields(GenerationRequest)}
    request, plan = GenerationRequest(**values), cast(SpeculationPlan, object())
    assert request.planned(plan) == replace(request, speculation=plan)
