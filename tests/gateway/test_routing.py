"""Tests of routing in a node: the inputs of the policy and the recorded decision."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.types import SamplingParams
from draftgate.gateway.config import ConfigError
from draftgate.gateway.config.reading import effective_config
from draftgate.gateway.dispatch.decisions import Decisions, read_decisions
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.kv_pulls import KvPulls
from draftgate.gateway.dispatch.routing import Router
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.telemetry.otel import OtelTracing
from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.registry import routing_policy
from draftgate.policies.routing.types import RouteView
from draftgate.policies.types import RequestView
from tests.gateway.harness import ScriptedBackend, client, placed, running
from tests.gateway.test_cli import draftgate

VIEW = RouteView(RequestView(10, 20, 1.0), 30, 20.0)
JOB = Job("r", (tuple(range(160)),), SamplingParams(1, 0), 5, tenant="a")


@pytest.fixture
async def pair() -> tuple[ScriptedBackend, ScriptedBackend]:
    """Two workers whose steps the test decides."""
    return ScriptedBackend(), ScriptedBackend()


class RecordingPolicy:
    """A policy that records its inputs and chooses the last worker."""

    name, reads_prompts = "recording", False

    def __init__(self) -> None:
        self.candidate_counts: list[int] = []
        self.placements: list[str] = []

    def route(self, request, candidates, draw):
        self.candidate_counts.append(len(candidates.workers))
        found = routing_policy("round_robin").route(request, candidates, draw)
        return replace(found, offers=found.offers[::-1])

    def placed(self, request, worker) -> None:
        self.placements.append(worker.worker_id)


def workers_with_usage(*backends: ScriptedBackend) -> list[tuple]:
    """Return workers for these backends with their usage."""
    workers = [FleetWorker(f"w-{index}", backend) for index, backend in enumerate(backends)]
    return [(worker, worker.usage) for worker in workers]


async def test_the_policy_routes_only_between_several_candidates(pair) -> None:
    """The router calls the policy only for several candidates and reports a single candidate to
    it."""
    policy = RecordingPolicy()
    router = Router(policy, Random(0).random, KvPulls(lambda: 0.0))
    workers = [worker for worker, _ in workers_with_usage(*pair)]

    def unread() -> RouteView:
        raise AssertionError("a node of one worker has nothing to decide")

    routed = router.choose(unread, workers_with_usage(pair[0]), workers[:1])
    assert (routed.worker.worker_id, routed.route) == ("w-0", None)
    routed = router.choose(lambda: VIEW, workers_with_usage(pair[0]), workers)
    assert (routed.worker.worker_id, routed.route) == ("w-0", None)
    assert (policy.candidate_counts, policy.placements) == ([], ["w-0"])
    routed = router.choose(lambda: VIEW, workers_with_usage(*pair), workers)
    assert routed.worker.worker_id == routed.route.worker_id == "w-1"
    assert (policy.candidate_counts, policy.placements) == ([2], ["w-0", "w-1"])


async def test_a_candidate_combines_load_and_sent_requests(pair) -> None:
    """A candidate combines the worker's reported load with the requests that the node sent."""
    worker = FleetWorker("w", pair[0])
    worker.reserve("a", CapacityNeed(2, 30, 100))
    found = worker.candidate(worker.usage)
    assert (found.tokens, found.usage.sequences, found.usage.unstarted_prompt_tokens) == (
        100,
        2,
        30,
    )
    assert (found.load, found.numerics_class) == (pair[0].load(), "test")
    assert (found.age_s, found.leased_tokens, found.own) == (0.0, 0, True)


@pytest.mark.parametrize("end", ["started", "release"])
async def test_memory_of_arriving_blocks_is_promised_until_the_first_token(pair, end: str) -> None:
    """A prompt that arrives as KV blocks takes memory but no steps, until it starts or ends."""
    worker = FleetWorker("w", pair[0])
    worker.reserve("a", CapacityNeed(1, 30, 100))
    worker.await_blocks("a")
    usage = worker.usage
    assert (usage.arriving_tokens, usage.unstarted_prompt_tokens, usage.started) == (30, 0, 0)
    getattr(worker, end)("a")
    assert worker.usage.arriving_tokens == 0


@pytest.mark.parametrize(
    ("routing", "workers", "hashed"),
    [
        ("least_cost", 2, 10),
        ("prefix_affinity", 2, 10),
        ("least_loaded", 2, 0),
        ("least_cost", 1, 0),
    ],
)
async def test_prompts_are_hashed_if_the_policy_reads_them(pair, routing, workers, hashed) -> None:
    """The node hashes prompts like a worker, but only for several workers and policies that read
    prompts."""
    async with running(backends=pair[:workers], routing=routing) as gateway:
        (found,) = await placed(gateway.node, JOB)
    hashes: list[bytes] = []
    extend_chain(hashes, "a", JOB.prompts[0], 16)
    assert found.request.block_hashes == tuple(hashes[:hashed])


async def test_a_prefix_returns_to_the_worker_that_cached_it(pair) -> None:
    """A long shared prefix returns to the same idle worker, and short prompts alternate."""
    long = replace(JOB, prompts=(tuple(range(256)),))
    async with running(backends=pair) as gateway:
        first = await placed(gateway.node, long)
        workers = {(await placed(gateway.node, long))[0].worker.worker_id for _ in range(3)}
        assert workers == {first[0].worker.worker_id}
        short = replace(JOB, prompts=((1, 2, 3),))
        turns = [(await placed(gateway.node, short))[0].worker.worker_id for _ in range(4)]
        assert len(set(turns)) == 2


async def test_decisions_and_spans_explain_the_choice(pair, tmp_path) -> None:
    """The decision record and the `route` span contain the policy, the candidates and the
    reason."""
    exporter, path = InMemorySpanExporter(), tmp_path / "decisions.jsonl"
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    settings = {"devices": (0, 1), "tracing": tracing, "decisions_file": str(path)}
    async with running(**settings) as gateway, client(gateway) as http:
        await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
        listed = (await http.get("/decisions")).json()["decisions"][0]
        ids = sorted(worker.worker_id for worker in gateway.node.fleet.workers)
        await gateway.node.heartbeat.write_files()
    tracing.shutdown()
    assert listed["route"]["policy"] == "least_cost"
    assert listed["route"]["offers"][0]["worker_id"] == listed["worker_id"]
    assert [offer["age_s"] for offer in listed["route"]["offers"]] == [0.0, 0.0]
    (read,) = read_decisions(path)
    assert read.route.reason == listed["route"]["reason"]
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "route"]
    attributes = dict(span.attributes)
    assert attributes["draftgate.routing.policy"] == "least_cost"
    assert sorted(attributes["draftgate.routing.candidates"]) == ids
    assert attributes["draftgate.routing.candidates"][0] == attributes["draftgate.worker_id"]
    assert attributes["draftgate.routing.load_ages_s"] == (0.0, 0.0)
    assert len(attributes["draftgate.routing.scores"]) == 2
    assert attributes["draftgate.routing.reason"] == read.route.reason
    assert attributes["draftgate.predicted_ttft_s"] == read.route.ttft_s > 0
    shown = draftgate("explain", str(path)).stdout
    assert f"routed by least_cost, {read.route.reason}" in shown


async def test_a_lone_worker_has_no_route(scripted: ScriptedBackend) -> None:
    """A decision for a single worker has no route."""
    async with running(backends=[scripted]) as gateway:
        await placed(gateway.node, JOB)
        assert gateway.node.decisions.latest(1)[0].route is None
    assert Decisions(None, lambda: 0.0).latest(1) == []


def test_an_unknown_routing_policy_is_rejected_at_start() -> None:
    """The settings reject an unknown routing policy."""
    assert effective_config({"routing": "weighted:prefix=2,load=1"}, {}).config.routing
    with pytest.raises(ConfigError, match=r"--routing: unknown routing policy 'nearest'"):
        effective_config({"routing": "nearest"}, {})
