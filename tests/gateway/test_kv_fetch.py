"""Resuming with KV: a prompt that changes its worker takes its blocks along."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from msgspec import structs
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftgate.backends.delta_reader import GeneratedDeltas
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.kv_transfer.transfer import TransferEnd
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.kv_link import LOCAL_LINK, KvLink
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.token_ids import compact
from draftgate.backends.types import Delta, GenerationRequest, ModelCard, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.kv_pulls import KvFetch
from draftgate.gateway.telemetry.otel import OtelTracing
from draftgate.lab.sim.virtual_time import loop_time_s
from draftgate.policies.kv_transfer import PullReason
from tests.gateway.harness import client, eventually, needs_engine, running
from tests.gateway.troubles import (
    NEVER_S,
    ChangedDeltas,
    Choice,
    RecordingWatch,
    dispatching,
    first_deltas,
    lose_first_stream,
    run_job,
    run_scenario,
)

CPU = load_profile("cpu-demo")
CONFIG = WorkerConfig(kv_bytes=1000 * 16 * CPU.kv_token_bytes, speculation="off")
BLOCK_BYTES = 16 * CPU.kv_token_bytes


class CutsOff(ChangedDeltas):
    """A worker that ends its first stream after some deltas, and lives on."""

    cut_after = 0

    def changed(
        self, request: GenerationRequest, deltas: GeneratedDeltas
    ) -> AsyncGenerator[Delta, None]:
        return first_deltas(deltas, self.cut_after)


class CutOff(CutsOff, SimBackend):
    """A simulated worker that ends its first stream."""


class CutOffEngine(CutsOff, EngineBackend):
    """An engine that ends its first stream."""


class OwnFormat(CutOff):
    """A worker of a numerics class of its own, with which no other worker exchanges blocks."""

    @property
    def card(self) -> ModelCard:
        card = super().card
        own = structs.replace(card.kv_format, numerics_class=f"own {id(self)}")
        return replace(card, kv_format=own)


class Silent(CutOff):
    """A worker that never says what it holds."""

    async def held_blocks(self, hashes: Any) -> int:
        await asyncio.sleep(NEVER_S)
        return await super().held_blocks(hashes)


class Damaging(CutOff):
    """A worker whose third chunk is damaged on the way."""

    async def pull_blocks(
        self, hashes: Any, *, urgent: bool = False
    ) -> AsyncGenerator[KvChunk, None]:
        number = 0
        async with aclosing(super().pull_blocks(hashes, urgent=urgent)) as chunks:
            async for chunk in chunks:
                number += 1
                wrong = tuple(one + 1 for one in chunk.checksums)
                yield structs.replace(chunk, checksums=wrong) if number == 3 else chunk


class Dying(CutOff):
    """A worker that stops after its second chunk."""

    async def pull_blocks(
        self, hashes: Any, *, urgent: bool = False
    ) -> AsyncGenerator[KvChunk, None]:
        number = 0
        async with aclosing(super().pull_blocks(hashes, urgent=urgent)) as chunks:
            async for chunk in chunks:
                yield chunk
                number += 1
                if number == 2:
                    await self.stop()


@dataclass
class Outcome:
    """The results of a job that lost its stream on the first worker."""

    choices: list[Choice]
    watch: RecordingWatch
    gap_s: float
    cached_tokens: int

    @property
    def fetch(self) -> KvFetch:
        (fetch,) = self.watch.fetches
        return fetch


def make_job(tokens: int, n: int = 1, output_tokens: int = 60) -> Job:
    prompt = compact([7 + index * 31 % 500 for index in range(tokens)])
    return Job("r", (prompt,), SamplingParams(1, seed=7), output_tokens, n, tenant="t")


def resume(
    job: Job, kind: type[CutOff] = CutOff, link: KvLink = LOCAL_LINK, cut_after: int = 40
) -> Outcome:
    """Run a job on two simulated workers, the first of which ends the stream."""
    return run_scenario(resumed(job, partial(kind, link=link), CONFIG, cut_after))


async def resumed(
    job: Job, factory: Callable[[WorkerConfig], Any], config: WorkerConfig, cut_after: int
) -> Outcome:
    async with dispatching(factory, 2, config=config) as dispatched:
        backends = [worker.backend for worker in dispatched.fleet.workers]
        for backend in backends:
            backend.cut_after = cut_after
        watch, times, cached = RecordingWatch(), [], 0
        choices = [Choice() for _ in range(job.n)]
        async with dispatched.dispatcher.run(job, watch=watch) as run:
            async for delta in run.deltas:
                for backend in backends:
                    backend.cut_after = 0  # only the first stream is cut
                times.append(loop_time_s())
                choices[delta.choice].append(delta)
                cached = max(cached, delta.cached_tokens)
        await eventually(dispatched.is_idle)
        gap_s = max(b - a for a, b in pairwise(times))
        return Outcome(choices, watch, gap_s, cached)


def undisturbed(job: Job) -> list[Choice]:
    async def scenario() -> list[Choice]:
        async with dispatching(SimBackend, 1, config=CONFIG) as dispatched:
            return await run_job(dispatched.dispatcher, job)

    return run_scenario(scenario())


def test_resumed_prompt_computes_only_its_last_block() -> None:
    """The new worker pulls all full blocks of prompt and output, and the text stays the same."""
    job = make_job(2000)
    outcome = resume(job)
    assert outcome.choices == undisturbed(job)
    (change,) = outcome.watch.resumes
    fetch = outcome.fetch
    assert fetch.source == change.source
    assert fetch.sink == change.sink
    assert fetch.decision.reason is PullReason.FASTER
    assert fetch.end is TransferEnd.COMPLETE
    assert fetch.blocks == (2000 + change.kept_tokens - 1) // 16
    assert fetch.num_bytes == fetch.blocks * BLOCK_BYTES
    assert outcome.cached_tokens == 2000
    assert outcome.gap_s < fetch.seconds + 0.05
    assert fetch.seconds == pytest.approx(fetch.decision.pull_s, rel=0.9)


def test_pull_shortens_the_gap() -> None:
    """The gap with a pull is a small part of the gap of a worker that computes the prompt."""
    job = make_job(4000)
    pulled, computed = resume(job), resume(job, OwnFormat)
    assert pulled.choices == computed.choices
    assert not computed.watch.fetches
    assert computed.gap_s > 10 * pulled.gap_s


def test_short_prompt_is_computed() -> None:
    """A prompt below the break-even is computed although its old worker holds its blocks."""
    outcome = resume(make_job(24), cut_after=3)
    assert outcome.choices == undisturbed(make_job(24))
    assert outcome.fetch.decision.reason is PullReason.SLOWER
    assert outcome.fetch.blocks == 0


def test_slow_link_costs_at_most_the_time_of_computing() -> None:
    """A transfer over a link that is slower than expected ends when computing would have ended. Its
    blocks are used."""
    job = make_job(2000)
    outcome = resume(job, link=KvLink(BLOCK_BYTES * 4 / 0.06, 0.0))
    fetch = outcome.fetch
    assert outcome.choices == undisturbed(job)
    assert fetch.end is TransferEnd.LATE
    assert fetch.seconds == pytest.approx(fetch.decision.compute_s)
    assert 0 < fetch.blocks < 125
    assert outcome.cached_tokens == fetch.blocks * 16


@pytest.mark.parametrize(
    ("kind", "end"), [(Damaging, "damaged"), (Dying, "failed"), (Silent, None)], ids=str
)
def test_faults_of_the_source_change_no_text(kind: type[CutOff], end: str | None) -> None:
    """After a damaged block, the death of the source, or its silence, the worker computes the
    rest."""
    job = make_job(2000)
    outcome = resume(job, kind)
    assert outcome.choices == undisturbed(job)
    assert outcome.fetch.end == end
    assert outcome.cached_tokens == outcome.fetch.blocks * 16


def test_all_choices_take_their_blocks_along() -> None:
    """Each choice pulls its own output, and the prompt is pulled once."""
    job = make_job(1000, n=2)
    outcome = resume(job, cut_after=100)
    assert outcome.choices == undisturbed(job)
    first, second = outcome.watch.fetches
    assert first.blocks >= 62
    assert second.known_blocks >= 62


@needs_engine
@pytest.mark.usefixtures("_always_pulls")
@pytest.mark.parametrize(
    "own_process",
    [False, pytest.param(True, marks=pytest.mark.long)],
    ids=["thread", "process"],
)
async def test_engines_resume_on_transferred_blocks(own_process: bool) -> None:
    """An engine that gets a stream of another engine computes one block, and the text stays the
    same."""
    config = WorkerConfig(threads=1, kv_bytes=16 << 20, max_model_len=1024, own_process=own_process)
    job = make_job(800, output_tokens=200)
    outcome = await resumed(job, CutOffEngine, config, cut_after=2)  # a delta may have many tokens
    async with dispatching(EngineBackend, 1, config=config) as dispatched:
        assert outcome.choices == await run_job(dispatched.dispatcher, job)
    (change,) = outcome.watch.resumes
    assert outcome.fetch.end is TransferEnd.COMPLETE
    assert outcome.fetch.blocks == (800 + change.kept_tokens - 1) // 16
    assert outcome.cached_tokens == 800


@pytest.mark.usefixtures("_always_pulls")
async def test_trace_and_metrics_describe_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace of a resumed request has a span `kv.transfer`, and metrics count its bytes."""
    lose_first_stream(monkeypatch, after_deltas=5)
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    async with running(tracing=tracing, devices=(0, 1)) as gateway, client(gateway) as http:
        body = {"prompt": list(make_job(1600).prompts[0]), "max_tokens": 20, "seed": 1}
        response = (await http.post("/v1/completions", json=body)).json()
        page = (await http.get("/metrics")).text
    tracing.shutdown()
    (resumed,) = response["metrics"]["resumes"]
    (span,) = (one for one in exporter.get_finished_spans() if one.name == "kv.transfer")
    found = dict(span.attributes)
    assert found["draftgate.kv.reason"] == "faster"
    assert found["draftgate.kv.end"] == "complete"
    assert found["draftgate.kv.blocks"] == (1600 + resumed["kept_tokens"] - 1) // 16
    assert found["draftgate.kv.bytes"] == found["draftgate.kv.blocks"] * BLOCK_BYTES
    assert found["draftgate.kv.chunks"] > 1
    assert 0 < found["draftgate.kv.predicted_pull_s"] < found["draftgate.kv.predicted_compute_s"]
    lines = [line for line in page.splitlines() if line.startswith("draftgate_kv_fetch")]
    counted = Counter[str]()
    for line in lines:
        name, _, value = line.rpartition(" ")
        counted[name.partition("{")[0]] += float(value)
    assert counted["draftgate_kv_fetched_bytes_total"] == found["draftgate.kv.bytes"]
    assert counted["draftgate_kv_fetches_total"] == 1
