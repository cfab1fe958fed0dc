"""Dispatch: decide how a request may speculate, lease capacity, run it, give the lease back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Final

from backends.base import Backend
from backends.errors import RequestRejected
from backends.types import Delta, GenerationRequest, SamplingParams
from gateway.errors import InvalidRequest
from gateway.lifecycle import Lifecycle
from gateway.state.store import Store
from gateway.telemetry.logs import log
from policies.protocols import SpeculationPolicy
from policies.types import PROPOSER_MODES, RequestView, SpeculationMode, WorkerLoad

LEASE_S: Final = 30.0
"""A lease outlives this many seconds of silence from the node that holds it."""

HEARTBEAT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """What a client asked for, validated and tokenised; nothing is decided yet.

    Attributes:
        request_id: unique on this node.
        prompts: token ids, at least one prompt.
        sampling: as asked for; its `max_tokens` is filled in by the dispatcher.
        max_tokens: most tokens to generate per choice; None is all that fits.
        n: choices per prompt.
        mode, max_draft_tokens: the client's wishes about speculation.
    """

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    max_tokens: int | None
    n: int = 1
    mode: SpeculationMode = SpeculationMode.AUTO
    max_draft_tokens: int | None = None


class Dispatcher:
    """Runs jobs on this node's worker and knows how many are in flight."""

    def __init__(
        self,
        backend: Backend,
        policy: SpeculationPolicy,
        store: Store,
        lifecycle: Lifecycle,
        worker_id: str,
    ) -> None:
        """Serve one backend; it need not have started yet."""
        self._backend = backend
        self._policy = policy
        self._store = store
        self._lifecycle = lifecycle
        self._worker_id = worker_id
        self._leases: set[str] = set()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Client requests that were admitted and have not ended."""
        return self._in_flight

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a client request as in flight, from its arrival to its last byte.

        Raises:
            Unavailable: the node takes none now.
        """
        self._lifecycle.note_failure(self._backend.failure)
        self._lifecycle.require_ready()
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def drained(self) -> None:
        """Return once nothing is in flight."""
        await self._idle.wait()

    def decide(self, job: Job) -> list[GenerationRequest]:
        """Return one request per prompt, each with the decision how far it may speculate.

        Raises:
            InvalidRequest: the client asked for a proposer this worker does not have.
            RequestRejected: the job can never run here.
        """
        load = self._backend.load()
        if job.mode in PROPOSER_MODES and job.mode.value not in load.proposers:
            there = ", ".join(load.proposers) or "nothing"
            raise InvalidRequest(
                f"this worker cannot draft with {job.mode.value!r}; it can draft with: {there}",
                "speculation.mode",
            )
        return [self._request(job, index, load) for index in range(len(job.prompts))]

    def _request(self, job: Job, index: int, load: WorkerLoad) -> GenerationRequest:
        prompt = job.prompts[index]
        if job.max_tokens is not None:
            return self._checked(job, index, job.max_tokens, load)
        room = max(1, self._backend.card.max_model_len - len(prompt))
        try:
            return self._checked(job, index, room, load)
        except RequestRejected as error:
            limit = error.limit_tokens
            if limit is None or limit <= len(prompt):
                raise
            return self._checked(job, index, limit - len(prompt), load)

    def _checked(
        self, job: Job, index: int, max_tokens: int, load: WorkerLoad
    ) -> GenerationRequest:
        prompt = job.prompts[index]
        view = RequestView(
            len(prompt), max_tokens, job.sampling.temperature, job.mode, job.max_draft_tokens
        )
        request = GenerationRequest(
            f"{job.request_id}-{index}",
            prompt,
            replace(job.sampling, max_tokens=max_tokens),
            self._policy.decide(view, load),
            job.n,
        )
        self._backend.check(request)
        return request

    def run(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[Delta, None]:
        """Run the requests of one job together.

        Choice c of request r is numbered `r * n + c`. Close the generator to cancel them all.

        Raises:
            BackendFailed: the worker broke; no delta follows.
        """
        return self._leased(requests[0]) if len(requests) == 1 else self._merged(requests)

    async def heartbeat(self) -> None:
        """Publish the worker's load and renew leases, until cancelled. Survives errors."""
        while True:
            try:
                await self._store.publish(self._worker_id, self._backend.load())
                await self._store.renew(tuple(self._leases), LEASE_S)
            except Exception as error:  # noqa: BLE001 - a heartbeat that stops looks like death
                log(logging.ERROR, "heartbeat failed", error=error)
            await asyncio.sleep(HEARTBEAT_S)

    async def _leased(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        tokens = (len(request.prompt_ids) + request.sampling.max_tokens) * request.n
        lease = request.request_id
        self._leases.add(lease)
        try:
            await self._store.reserve(self._worker_id, lease, tokens, LEASE_S)
            async with aclosing(self._backend.generate(request)) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            self._leases.discard(lease)
            await self._store.release(lease)

    async def _merged(self, requests: Sequence[GenerationRequest]) -> AsyncGenerator[Delta, None]:
        # The queue is short: what waits for a slow reader waits, merged, in the backend's streams.
        queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(len(requests))
        tasks = [
            asyncio.create_task(self._pump(request, index * request.n, queue))
            for index, request in enumerate(requests)
        ]
        try:
            running = len(tasks)
            while running:
                news = await queue.get()
                if isinstance(news, Exception):
                    raise news
                if news is None:
                    running -= 1
                else:
                    yield news
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(
        self,
        request: GenerationRequest,
        first_choice: int,
        queue: asyncio.Queue[Delta | Exception | None],
    ) -> None:
        """Run one request into the queue; end with None, or with the exception it ended with."""
        try:
            async with aclosing(self._leased(request)) as deltas:
                async for delta in deltas:
                    await queue.put(replace(delta, choice=first_choice + delta.choice))
        except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
            await queue.put(error)
        else:
            await queue.put(None)
