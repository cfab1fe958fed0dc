"""The costs of two workers on a machine, as a profile for the simulator.

A worker measures its steps when it starts, and learns from the steps of its requests. Streams on a
running worker give the time of the host between two steps. The same requests on two workers at once
show whether a busy worker delays the other one. A worker copies KV blocks between its steps, at a
rate that is measured by itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from multiprocessing import get_context
from statistics import fmean, linear_regression, median
from typing import Any, Final

from msgspec import convert, to_builtins

from bench.gateway.moved_streams import Observed, job_of, run_job
from bench.harness.processes import on_core, pin, process_tree, two_cores
from bench.harness.provenance import commit, cpu_name
from draftgate.backends.checkpoints import SHIPPED_MODEL_ID
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.runner import Runner
from draftgate.backends.kv_transfer.exchange import ExportBlocks
from draftgate.backends.kv_transfer.format import KvFormat
from draftgate.backends.kv_transfer.transfer import Transfer, TransferEnd
from draftgate.backends.recorded_run import RecordedCost
from draftgate.backends.sim.kv_link import KvLink
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.cache import cache_directory
from draftgate.gateway.assembly import WaitingRules, loop_time_s
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.lab.simulate.cluster import ADMIT_ALL, running_dispatcher, send_jobs
from draftgate.loadgen.measuring.metrics import ttft_s
from draftgate.loadgen.types import PlannedRequest, Record, RequestSpec
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.types import SpeculationMode, SpeculationPlan

CONFIG: Final = WorkerConfig(
    speculation="off", threads=1, max_model_len=8192, kv_bytes=192 << 20, own_process=True
)
STREAM, PROMPT = (100, 120), (3000, 1)
"""Tokens of the prompt and of the output of the timed requests."""

BATCHES: Final = (1, 4, 12)
"""Numbers of streams on a worker."""

ROUNDS: Final = 5
PLAIN: Final = SpeculationPlan("bench", SpeculationMode.OFF, None, 0, "a benchmark")
_seeds = count(1 << 40)


@asynccontextmanager
async def running_workers(
    configs: Sequence[WorkerConfig], rules: WaitingRules = ADMIT_ALL
) -> AsyncIterator[Dispatcher]:
    """Run workers, each on its own core."""
    before = set(process_tree(os.getpid()))
    async with running_dispatcher(EngineBackend, configs, rules) as dispatcher:
        started = sorted(set(process_tree(os.getpid())) - before)
        for pid, core in zip(started, two_cores(), strict=False):
            if core is not None:
                pin(pid, core)
        yield dispatcher


@dataclass(frozen=True, slots=True)
class Steps:
    """Costs of a worker without a host.

    Attributes:
        token_bytes: bytes of the keys and values of a token.
        prompt_s: seconds of the steps of a prompt.
        copy_bytes_s: bytes per second at which the worker exports blocks.
    """

    token_bytes: int
    prompt_s: float
    copy_bytes_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of two workers that share this machine.

    Attributes:
        before: step costs that a worker measures when it starts.
        steps: further costs of a worker without a host.
        timed: seconds of requests to running workers, by kind.
        transfer_bytes_s: bytes per second between two idle workers.
    """

    before: StepCost
    steps: Steps
    timed: dict[str, Any]
    transfer_bytes_s: float

    def results(self, learned: StepCost) -> dict[str, Any]:
        """Return the profile, the link, and the times from which both are made.

        Args:
            learned: the costs that a worker has learned during the points.
        """
        context = STREAM[0] + STREAM[1] // 2
        beyond_s = [
            (batch, gap_s - self.before.seconds(batch, batch * context, batch))
            for batch, gap_s in self.timed["stream_s"]
        ]
        step_s, sequence_s = line_through(beyond_s)
        profile = {
            "format": "profile/2",
            "device": cpu_name(),
            "model": SHIPPED_MODEL_ID,
            "dtype": "float32",
            "source": f"measured: draftgate bench phases, commit {commit()}",
            "token_buckets": learned.token_buckets,
            "step_s": learned.step_s,
            "kv_token_s": learned.kv_token_s,
            "sequence_s": learned.sequence_s,
            "prefill_attention_s": learned.pair_s,
            "sample_s": learned.sample_s,
            "host": {"step_s": step_s, "sequence_s": sequence_s},
            "kv_token_bytes": self.steps.token_bytes,
            "kv_copy_bytes_s": self.steps.copy_bytes_s,
        }
        return {
            "profile": profile,
            "link": KvLink(self.transfer_bytes_s, 0.0)._asdict(),
            "step_cost_before": to_builtins(RecordedCost.from_cost(self.before)),
            "prompt_steps_s": self.steps.prompt_s,
            "timed": self.timed,
        }


async def measure_costs() -> Costs:
    """Measure a worker beside an idle and a busy one. The next workers start from its costs."""
    with on_core(two_cores().servers), ProcessPoolExecutor(1, get_context("spawn")) as child:
        steps = child.submit(measure_steps).result()
    before = learned_cost()
    async with running_workers([CONFIG]) as alone:
        await send(alone, [STREAM, PROMPT])  # the first steps allocate memory
        streams = [(batch, await stream_gap_s(alone, batch)) for batch in BATCHES]
        timed = {"stream_s": streams, "prompt_s": await prompt_s(alone, 1)}
        timed["chat_ttft_s"] = await prompt_s(alone, 1, (STREAM[0], 1))
    async with running_workers([CONFIG, CONFIG]) as both:
        await send(both, [STREAM, PROMPT] * 2)
        timed["both_streams_s"] = [(n, await stream_gap_s(both, 2 * n)) for n in BATCHES]
        timed["both_prompts_s"] = await prompt_s(both, 2)
        timed["prompt_beside_stream_s"] = await prompt_beside_stream(both)
        return Costs(before, steps, timed, await transfer_bytes_s(both))


def learned_cost() -> StepCost:
    """Return the costs that the last worker has left in the cache of start-up measurements."""
    (entry,) = cache_directory().glob("startup-*.json")
    content = json.loads(entry.read_text(encoding="utf-8"))["content"]
    return convert(content["costs"], RecordedCost).cost


def measure_steps() -> Steps:
    """Load a worker in this process, and return its costs."""
    engine = load_engine(CONFIG)
    form, worker, exchange = engine.served.card.kv_format, engine.worker, engine.exchange
    assert isinstance(worker, WorkerCore)
    assert isinstance(engine.executor, Runner)
    assert form is not None
    assert exchange is not None
    prompts_s, rates = list[float](), list[float]()
    for seed in range(ROUNDS):
        prompt_ids = job_of(PROMPT[0], seed, 1).prompts[0]
        sampling = SamplingParams(PROMPT[1], seed, ignore_eos=True)
        request = GenerationRequest(str(seed), prompt_ids, sampling, PLAIN)
        worker.submit(request)
        steps = [step.result.step_s for step in run_until_idle(worker, engine.executor)]
        prompts_s.append(sum(steps))
        hashes = hashes_of(request, form)
        began_s = time.perf_counter()
        chunks = [exchange.run(ExportBlocks((one,)), 0.0) for one in hashes]
        rates.append(len(chunks) * form.block_bytes / (time.perf_counter() - began_s))
    return Steps(form.token_bytes, median(prompts_s), median(rates))


def hashes_of(request: GenerationRequest, form: KvFormat) -> list[bytes]:
    """Return the hashes of the full blocks of a prompt."""
    hashes = list[bytes]()
    extend_chain(hashes, request.cache_owner, request.prompt_ids, form.block_tokens)
    return hashes


async def transfer_bytes_s(dispatcher: Dispatcher) -> float:
    """Return the median bytes per second between two idle workers."""
    rates = list[float]()
    for _ in range(ROUNDS):
        seen = [Observed(), Observed()]
        jobs = [job_of(PROMPT[0], next(_seeds), PROMPT[1]) for _ in seen]
        await asyncio.gather(*(run_job(dispatcher, *each) for each in zip(jobs, seen, strict=True)))
        source, sink = (one.worker for one in seen)
        run = seen[0].run
        assert source is not None
        assert sink is not None
        assert run is not None
        assert source.kv_format is not None
        hashes = hashes_of(run.holds[0].request, source.kv_format)
        began_s = loop_time_s()
        transfer = Transfer(source.kv, sink.kv, hashes)
        assert await transfer.run() is TransferEnd.COMPLETE
        num_bytes = transfer.blocks * source.kv_format.block_bytes
        rates.append(num_bytes / (loop_time_s() - began_s))
    return median(rates)


async def send(dispatcher: Dispatcher, shapes: Sequence[tuple[int, int]]) -> list[Record]:
    """Send requests of these prompt and output tokens at once, and return their records."""
    jobs = [job_of(tokens, next(_seeds), output) for tokens, output in shapes]
    planned = [
        PlannedRequest(index, 0.0, RequestSpec("", (), output, 0))
        for index, (_, output) in enumerate(shapes)
    ]
    records = await send_jobs(dispatcher, planned, lambda one: jobs[one.index])
    return sorted(records, key=lambda record: record.planned.index)


async def stream_gap_s(dispatcher: Dispatcher, streams: int) -> float:
    """Return the median seconds between two tokens of simultaneous streams."""
    records = await send(dispatcher, [STREAM] * streams)
    return median(
        after_s - before_s
        for record in records
        for before_s, after_s in pairwise([chunk.at_s for chunk in record.chunks])
    )


async def prompt_s(dispatcher: Dispatcher, prompts: int, shape: tuple[int, int] = PROMPT) -> float:
    """Return the median TTFT of prompts that arrive at once, of which each worker gets one."""
    rounds = [await send(dispatcher, [shape] * prompts) for _ in range(ROUNDS)]
    return median(ttft_s(record) or 0.0 for records in rounds for record in records)


async def prompt_beside_stream(dispatcher: Dispatcher) -> dict[str, float]:
    """Return the TTFT of a prompt beside a stream on another worker, and the stream's gap."""
    found = list[tuple[float, float]]()
    for _ in range(ROUNDS):
        stream, prompt = await send(dispatcher, [(STREAM[0], 3 * STREAM[1]), PROMPT])
        assert stream.metrics is not None
        assert prompt.metrics is not None
        assert stream.metrics["worker_id"] != prompt.metrics["worker_id"]
        times_s = [chunk.at_s for chunk in stream.chunks if chunk.at_s < prompt.end_s]
        gap_s = median(after_s - before_s for before_s, after_s in pairwise(times_s))
        found.append((ttft_s(prompt) or 0.0, gap_s))
    prompts_s, gaps_s = zip(*found, strict=True)
    return {"prompt_s": median(prompts_s), "stream_s": median(gaps_s)}


def line_through(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return constant and slope of the least-squares line, with negative values set to 0."""
    xs, ys = zip(*points, strict=True)
    slope = max(0.0, linear_regression(xs, ys).slope)
    return max(0.0, fmean(ys) - slope * fmean(xs)), slope
