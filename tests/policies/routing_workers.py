"""Workers and requests for tests of routing policies."""

from __future__ import annotations

from random import Random

from draftgate.policies.capacity import WorkerUsage
from draftgate.policies.protocols import RoutingPolicy
from draftgate.policies.routing.types import Candidate, Candidates, Route, RouteView
from draftgate.policies.types import (
    RequestView,
    WorkerLoad,
    WorkerSpeed,
)

SPEED = WorkerSpeed(0.02, 1e-4, 1e-4, 0.01, 1e-4, 2e-5)
REQUEST = RouteView(RequestView(1000, 200, 0.8), 1200, 200.0)


def load(**fields: object) -> WorkerLoad:
    """Return the load of an idle worker with 64 sequences and memory for 16,000 tokens."""
    limits = {
        "kv_blocks_free": 1000,
        "kv_blocks_total": 1000,
        "max_sequences": 64,
        "speed": SPEED,
    }
    values = {"running": 0, "waiting": 0, "price": 0.0, "acceptance": 0.6, "proposers": ("ngram",)}
    return WorkerLoad(**{**values, **limits, **fields})


def worker(number: int, sent_tokens: int = 0, **fields: object) -> Candidate:
    """Return a worker of this process that received `sent_tokens` tokens."""
    report = load(**fields)
    usage = WorkerUsage(report, report.running + report.waiting, report.running)
    return Candidate(f"w-{number}", usage, sent_tokens)


def workers_with_tokens(*tokens: int, **fields: object) -> Candidates:
    """Return workers that received these numbers of tokens."""
    return Candidates(tuple(worker(n, sent, **fields) for n, sent in enumerate(tokens)))


def decide(
    policy: RoutingPolicy, candidates: Candidates, request: RouteView = REQUEST, seed: int = 0
) -> Route:
    """Return the route for a request without recording the placement."""
    return policy.route(request, candidates, Random(seed).random)


def place(
    policy: RoutingPolicy, candidates: Candidates, request: RouteView = REQUEST, seed: int = 0
) -> int:
    """Return the index of the chosen worker and record the placement in the policy."""
    route = decide(policy, candidates, request, seed)
    place = [candidate.worker_id for candidate in candidates.workers].index(route.worker_id)
    policy.placed(request, candidates.workers[place])
    return place


def chain(tenant: str, blocks: int) -> tuple[bytes, ...]:
    """Return the block hashes of a tenant's prompt, shared with its prompts of other lengths."""
    return tuple(f"{tenant}/{block}".encode() for block in range(blocks))


def prompt(tenant: str, blocks: int) -> RouteView:
    """Return a request with a prompt of `blocks` KV blocks."""
    tokens = 16 * blocks
    view = RequestView(tokens, 100, 0.8)
    return RouteView(view, tokens + 100, 100.0, 1, tenant, chain(tenant, blocks))
