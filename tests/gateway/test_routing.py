"""Routing in a node: the inputs of the policy and the recorded decision."""

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


class Asked:
    """A policy that records its inputs and chooses the last worker."""

    name, reads_prompts = "asked", False

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.told: list[str] = []

    def route(self, request, candidates, draw):
        self.asked.append(len(candidates.workers))
        found = routing_policy("round_robin").route(request, candidates, draw)
        return replace(found, offers=found.offers[::-1])

    def placed(self, request, worker) -> None:
        self.told.append(worker.worker_id)


def there(*backends: ScriptedBackend) -> list[tuple]:
    """Workers with their usage."""
    workers = [FleetWorker(f"w-{index}", backend) for index, backend in enumerate(backends)]
    return [(worker, worker.usage) for worker in workers]


async def test_the_policy_is_asked_only_if_there_is_a_choice(pair) -> None:
    """A node with one worker does not ask; a single candidate is only reported; of several the
    policy chooses."""
    policy = Asked()
    router = Router(policy, Random(0).random)

    def unread() -> RouteView:
        raise AssertionError("a node of one worker has nothing to decide")

    routed = router.choose(unread, there(pair[0]), alone=True)
    assert (routed.worker.worker_id, routed.route) == ("w-0", None)
    routed = router.choose(lambda: VIEW, there(pair[0]), alone=False)
    assert (routed.worker.worker_id, routed.route) == ("w-0", None)
    assert (policy.asked, policy.told) == ([], ["w-0"])
    routed = router.choose(lambda: VIEW, there(*pair), alone=False)
    assert routed.worker.worker_id == routed.route.worker_id == "w-1"
    assert (policy.asked, policy.told) == ([2], ["w-0", "w-1"])


async def test_a_candidate_combines_load_and_sent_requests(pair) -> None:
    """A candidate has the current load, sequences, prompts without a token and reserved tokens."""
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
    """Several workers and a policy that reads prompts: hashes equal those of the worker."""
    async with running(backends=pair[:workers], routing=routing) as where:
        (found,) = await placed(where.node, JOB)
    hashes: list[bytes] = []
    extend_chain(hashes, "a", JOB.prompts[0], 16)
    assert found.request.block_hashes == tuple(hashes[:hashed])


async def test_a_prefix_returns_to_the_worker_that_cached_it(pair) -> None:
    """A long shared prefix goes to the same one of two idle workers; short prompts alternate."""
    long = replace(JOB, prompts=(tuple(range(256)),))
    async with running(backends=pair) as where:
        first = await placed(where.node, long)
        workers = {(await placed(where.node, long))[0].worker.worker_id for _ in range(3)}
        assert workers == {first[0].worker.worker_id}
        short = replace(JOB, prompts=((1, 2, 3),))
        turns = [(await placed(where.node, short))[0].worker.worker_id for _ in range(4)]
        assert len(set(turns)) == 2


async def test_decisions_and_spans_explain_the_choice(pair, tmp_path) -> None:
    """Policy, candidates, ages, scores and reason are in the record, over HTTP, in the file, in
    `explain` and in the `route` span."""
    exporter, path = InMemorySpanExporter(), tmp_path / "decisions.jsonl"
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    settings = {"devices": (0, 1), "tracing": tracing, "decisions_file": str(path)}
    async with running(**settings) as where, client(where) as http:
        await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
        listed = (await http.get("/decisions")).json()["decisions"][0]
        ids = sorted(worker.worker_id for worker in where.node.fleet.workers)
        await where.node.heartbeat.write_decisions()
    tracing.shutdown()
    assert listed["route"]["policy"] == "least_cost"
    assert listed["route"]["offers"][0]["worker_id"] == listed["worker_id"]
    assert [offer["age_s"] for offer in listed["route"]["offers"]] == [0.0, 0.0]
    (read,) = read_decisions(path)
    assert read.route.reason == listed["route"]["reason"]
    (span,) = [span for span in exporter.get_finished_spans() if span.name == "route"]
    told = dict(span.attributes)
    assert told["draftgate.routing.policy"] == "least_cost"
    assert sorted(told["draftgate.routing.candidates"]) == ids
    assert told["draftgate.routing.candidates"][0] == told["draftgate.worker_id"]
    assert told["draftgate.routing.load_ages_s"] == (0.0, 0.0)
    assert len(told["draftgate.routing.scores"]) == 2
    assert told["draftgate.routing.reason"] == read.route.reason
    assert told["draftgate.predicted_ttft_s"] == read.route.ttft_s > 0
    shown = draftgate("explain", str(path)).stdout
    assert f"routed by least_cost, {read.route.reason}" in shown


async def test_a_lone_worker_has_no_route(scripted: ScriptedBackend) -> None:
    """Without a choice, no route is recorded."""
    async with running(backends=[scripted]) as where:
        await placed(where.node, JOB)
        assert where.node.decisions.latest(1)[0].route is None
    assert Decisions(None, lambda: 0.0).latest(1) == []


def test_an_unknown_routing_policy_is_refused_at_once() -> None:
    """An unknown policy fails at start, and the message lists the names."""
    assert effective_config({"routing": "weighted:prefix=2,load=1"}, {}).config.routing
    with pytest.raises(ConfigError, match=r"--routing: unknown routing policy 'nearest'"):
        effective_config({"routing": "nearest"}, {})
