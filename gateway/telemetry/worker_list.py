"""The workers of the pool with the requests that run on them, and the latest moves between them.

The page shows them as lanes. Each process of a node knows the requests that it dispatched. Requests
of other gateways appear only in the loads of the workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import islice
from typing import Final

import msgspec

from draftgate.gateway.dispatch.decisions import KEPT_MOVES, Decisions, RecentMove
from draftgate.gateway.dispatch.moves import Moves
from draftgate.gateway.fleet import FleetWorker
from draftgate.policies.types import Role

MOST_STREAMS: Final = 64
"""Maximum streams of a worker that a process lists, so that a list of 16 workers has at most about
150 KB. A lane of the page has no room for more."""


class RunningStream(msgspec.Struct, frozen=True):
    """A prompt that runs on a worker.

    Attributes:
        request_id: the id of the response.
        prompt: index of the prompt in its request.
        tokens: number of tokens of prompt and output, of all choices that run.
        sequences: number of choices that run.
        moving: whether a move of the prompt is under way.
    """

    request_id: str
    prompt: int
    tenant: str
    worker_id: str
    tokens: int
    sequences: int
    moving: bool


class ProcessStreams(msgspec.Struct, frozen=True):
    """The streams and the latest moves of one process."""

    running: list[RunningStream] = []
    moves: list[RecentMove] = []


class ListedWorker(msgspec.Struct, frozen=True):
    """A worker of the pool, with the requests of all gateways.

    Attributes:
        status: `ok`, `loading`, `hung` or `failed`, as in `/health`, or `leaving`.
        running, waiting: sequences in its batch and in its queue, or 0 unless it runs.
        kv_usage: share of its KV blocks in use, 0 to 1, or None if unknown.
        role: phase of requests that it prefers: `any`, `prefill` or `decode`.
        model: name of its model.
    """

    worker_id: str
    status: str
    running: int
    waiting: int
    kv_usage: float | None
    role: Role = Role.ANY
    model: str = ""


class WorkerList(msgspec.Struct):
    """The response of `/workers`.

    Attributes:
        at_s: Unix time.
        streams: the streams of this node, at most `MOST_STREAMS` of each process and worker. Those
            that have run longest are first.
        moves: the latest moves of these streams, newest first.
    """

    at_s: float
    workers: list[ListedWorker]
    streams: list[RunningStream]
    moves: list[RecentMove]


def process_streams(moves: Iterable[Moves], decisions: Decisions) -> ProcessStreams:
    """Return the streams and the latest moves of this process.

    Args:
        moves: the moves of each model.
    """
    return ProcessStreams([one for each in moves for one in _running(each)], list(decisions.moves))


def _running(moves: Moves) -> Iterator[RunningStream]:
    for worker, streams in moves.streams.items():
        for stream in islice(streams, MOST_STREAMS):
            job = stream.run.job
            yield RunningStream(
                job.request_id,
                stream.index,
                job.tenant,
                worker.worker_id,
                stream.tokens,
                len(stream.output.lengths),
                moves.is_moving(stream),
            )


def listed_worker(worker: FleetWorker, model: str) -> ListedWorker:
    """Return the state of a worker of a model."""
    status = worker.status
    if status in {"failed", "loading"}:
        return ListedWorker(worker.worker_id, status, 0, 0, None, worker.role, model)
    if status == "ok" and worker.leaving:
        status = "leaving"
    load = worker.backend.load()
    blocks = load.kv_blocks_total
    usage = 1 - load.kv_blocks_free / blocks if blocks else None
    return ListedWorker(
        worker.worker_id, status, load.running, load.waiting, usage, worker.role, model
    )


def worker_list(
    at_s: float,
    workers: Iterable[tuple[FleetWorker, str]],
    processes: Sequence[ProcessStreams],
    tenant: str | None,
) -> WorkerList:
    """Return the workers, streams and moves that a tenant may see.

    Args:
        at_s: the Unix time.
        workers: the workers, and the names of their models.
        processes: the streams of each process of the node.
        tenant: the tenant whose streams are listed, or None for all tenants.
    """
    moves = (one for process in processes for one in process.moves)
    return WorkerList(
        at_s,
        [listed_worker(*one) for one in workers],
        [one for process in processes for one in process.running if tenant in {None, one.tenant}],
        nlargest(
            KEPT_MOVES,
            (one for one in moves if tenant in {None, one.tenant}),
            key=lambda one: one.move.ended_s,
        ),
    )
