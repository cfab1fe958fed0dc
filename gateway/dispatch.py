"""Dispatch: choose a worker, decide how far to speculate there, lease capacity, run, release."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Final

from backends.errors import BackendFailed, RequestRejected
from backends.types import (
    Delta,
    GenerationRequest,
    GrammarSpec,
    SamplingParams,
    SpeculationOutcome,
    Task,
)
from gateway.decisions import Decisions
from gateway.errors import InvalidRequest
from gateway.fleet import Choose, Fleet, FleetWorker, least_reserved
from gateway.lifecycle import Lifecycle
from gateway.state.store import Store
from gateway.telemetry.logs import log
from policies.acceptance_history import AcceptanceHistory
from policies.protocols import SpeculationPolicy
from policies.types import (
    ANYTIME,
    PROPOSER_MODES,
    RequestView,
    ServiceLevel,
    SpeculationMode,
    SpeculationPlan,
    WorkerLoad,
)

LEASE_S: Final = 30.0
"""A lease outlives this many seconds of silence from the node that holds it."""

HEARTBEAT_S: Final = 1.0

NOTHING_TO_DRAFT: Final = SpeculationPlan(
    "none", SpeculationMode.OFF, None, 0, "a prompt that is embedded has no output"
)


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
        grammar: what every choice must be; None leaves it to the model.
        service: how soon its tokens are wanted, and how much they matter.
        tenant: whose it is; "" while nobody is told from others.
        repetitions: of each prompt (`policies.repetition`); empty where ids stand for no text.
        task: whether to continue the prompts, or to embed them: then there are no tokens to
            generate (`max_tokens` 0), and nothing is decided about drafts.
    """

    request_id: str
    prompts: tuple[tuple[int, ...], ...]
    sampling: SamplingParams
    max_tokens: int | None
    n: int = 1
    mode: SpeculationMode = SpeculationMode.AUTO
    max_draft_tokens: int | None = None
    grammar: GrammarSpec | None = None
    service: ServiceLevel = ANYTIME
    tenant: str = ""
    repetitions: tuple[float | None, ...] = ()
    task: Task = Task.GENERATE


@dataclass(frozen=True, slots=True)
class Placement:
    """A request with the decision how far it may speculate, and the worker it goes to.

    Attributes:
        view, load: what the decision was made from.
    """

    request: GenerationRequest
    worker: FleetWorker
    view: RequestView
    load: WorkerLoad

    @property
    def tokens(self) -> int:
        """Tokens of prompt and output that all choices take at most."""
        request = self.request
        return (len(request.prompt_ids) + request.sampling.max_tokens) * request.n


class Dispatcher:
    """Runs jobs on this node's workers and knows how many are in flight."""

    def __init__(
        self,
        fleet: Fleet,
        policy: SpeculationPolicy,
        store: Store,
        lifecycle: Lifecycle,
        decisions: Decisions,
        choose: Choose = least_reserved,
    ) -> None:
        """Serve a fleet; it need not have started yet. `choose` picks each request's worker."""
        self._decisions = decisions
        self._fleet = fleet
        self._policy = policy
        self._store = store
        self._lifecycle = lifecycle
        self._choose = choose
        self._history = AcceptanceHistory()
        self._leases: set[str] = set()
        self._lost: set[str] = set()  # workers that broke, as far as the heartbeat has told
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
        self._lifecycle.note_failure(self._fleet.failure)
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

    async def prepare(self, job: Job) -> None:
        """Let the workers compile a job's grammar, in threads: `decide` finds it compiled.

        Raises:
            InvalidRequest, RequestRejected: as `decide`.
        """
        if job.grammar is None:
            return
        for worker in self._fleet.serving:
            await asyncio.to_thread(self._place, job, 0, worker)

    def decide(self, job: Job) -> list[Placement]:
        """Return for each prompt where it goes, and how far it may speculate there.

        Nothing is reserved before `run`: call it without waiting in between.

        Raises:
            InvalidRequest: the client asked for a proposer this worker does not have, or for more
                tokens at least than at most.
            RequestRejected: the job can never run here.
            BackendFailed: no worker is left.
        """
        workers = self._fleet.serving
        if not workers:
            raise BackendFailed(self._fleet.failure or "there is no worker")
        reserved = [worker.reserved_tokens for worker in workers]
        placements = []
        for index in range(len(job.prompts)):
            chosen = self._choose(reserved)
            placement = self._place(job, index, workers[chosen])
            reserved[chosen] += placement.tokens
            placements.append(placement)
        for placed in placements if job.task is Task.GENERATE else ():
            plan, worker_id = placed.request.speculation, placed.worker.worker_id
            self._decisions.record(job.request_id, worker_id, placed.view, placed.load, plan)
        return placements

    def _place(self, job: Job, index: int, worker: FleetWorker) -> Placement:
        prompt = job.prompts[index]
        if job.max_tokens is not None:
            return self._checked(job, index, job.max_tokens, worker)
        room = max(1, worker.backend.card.max_model_len - len(prompt))
        try:
            return self._checked(job, index, room, worker)
        except RequestRejected as error:
            limit = error.limit_tokens
            if limit is None or limit <= len(prompt):
                raise
            return self._checked(job, index, limit - len(prompt), worker)

    def _checked(self, job: Job, index: int, max_tokens: int, worker: FleetWorker) -> Placement:
        prompt, load = job.prompts[index], worker.backend.load()
        _check_proposer(job.mode, load)
        if job.sampling.min_tokens > max_tokens:
            raise InvalidRequest(
                f"min_tokens: must be at most the {max_tokens} tokens that may be generated, "
                f"not {job.sampling.min_tokens}",
                "min_tokens",
            )
        view = self._view(job, index, max_tokens, worker)
        request = GenerationRequest(
            f"{job.request_id}-{index}",
            prompt,
            replace(job.sampling, max_tokens=max_tokens),
            self._policy.decide(view, load) if job.task is Task.GENERATE else NOTHING_TO_DRAFT,
            job.n,
            job.tenant,
            job.grammar,
            service=job.service,
            task=job.task,
        )
        worker.backend.check(request)
        return Placement(request, worker, view, load)

    def _view(self, job: Job, index: int, max_tokens: int, worker: FleetWorker) -> RequestView:
        """Return what the policy may know of one prompt of a job."""
        temperature, model = job.sampling.temperature, worker.backend.card.model_id
        of_tenant, of_model = self._history.of(job.tenant, model, greedy=temperature == 0)
        return RequestView(
            len(job.prompts[index]),
            max_tokens,
            temperature,
            job.mode,
            job.max_draft_tokens,
            job.service,
            job.repetitions[index] if job.repetitions else None,
            of_tenant,
            of_model,
        )

    @asynccontextmanager
    async def run(
        self, placements: Sequence[Placement]
    ) -> AsyncIterator[AsyncGenerator[Delta, None]]:
        """Run the requests of one job together; leaving the context cancels what still runs.

        Choice c of request r is numbered `r * n + c`. The deltas end with `BackendFailed` if a
        worker broke. Tokens are reserved on entering, before anything waits: the next decision
        sees them.
        """
        for placed in placements:
            placed.worker.reserve(placed.request.request_id, placed.tokens)
        stream = self._leased(placements[0]) if len(placements) == 1 else self._merged(placements)
        try:
            async with aclosing(stream) as deltas:
                yield deltas
        finally:
            for placed in placements:  # a stream that was never read has released nothing
                placed.worker.release(placed.request.request_id)

    async def heartbeat(self) -> None:
        """Publish the workers' loads, renew leases, write decisions, until cancelled.

        Survives errors.
        """
        while True:
            try:
                await self._beat()
                await self.write_decisions()
            except Exception as error:  # noqa: BLE001 - a heartbeat that stops looks like death
                log(logging.ERROR, "heartbeat failed", error=error)
            await asyncio.sleep(HEARTBEAT_S)

    async def write_decisions(self) -> None:
        """Write what was decided to the file, if there is one. Survives errors."""
        if not self._decisions.unwritten:
            return
        try:
            await asyncio.to_thread(self._decisions.write)
        except OSError as error:
            log(logging.ERROR, "decisions cannot be written", error=error)

    async def _beat(self) -> None:
        for worker in self._fleet.workers:
            worker_id, failure = worker.worker_id, worker.backend.failure
            if failure is None:
                await self._store.publish(worker_id, worker.backend.load())
            elif worker_id not in self._lost:
                self._lost.add(worker_id)
                log(logging.ERROR, "worker failed", worker=worker_id, reason=failure)
                await self._store.withdraw(worker_id)
        await self._store.renew(tuple(self._leases), LEASE_S)

    async def _leased(self, placed: Placement) -> AsyncGenerator[Delta, None]:
        request, worker = placed.request, placed.worker
        lease = request.request_id
        self._leases.add(lease)
        try:
            await self._store.reserve(worker.worker_id, lease, placed.tokens, LEASE_S)
            async with aclosing(worker.backend.generate(request)) as deltas:
                async for delta in deltas:
                    if delta.outcome is not None:
                        self._learn(placed, delta.outcome)
                    yield delta
        finally:
            worker.release(lease)
            self._leases.discard(lease)
            await self._store.release(lease)

    def _learn(self, placed: Placement, outcome: SpeculationOutcome) -> None:
        """Remember how a choice's drafts fared; what a grammar forces tells nothing of others."""
        request = placed.request
        if request.grammar is None:
            self._history.learn(
                request.tenant,
                placed.worker.backend.card.model_id,
                greedy=request.sampling.temperature == 0,
                drafted=outcome.num_drafted_tokens,
                histogram=outcome.acceptance_histogram,
            )

    async def _merged(self, placements: Sequence[Placement]) -> AsyncGenerator[Delta, None]:
        # The queue is short: what waits for a slow reader waits, merged, in the backend's streams.
        queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(len(placements))
        tasks = [
            asyncio.create_task(self._pump(placed, index * placed.request.n, queue))
            for index, placed in enumerate(placements)
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
        placed: Placement,
        first_choice: int,
        queue: asyncio.Queue[Delta | Exception | None],
    ) -> None:
        """Run one request into the queue; end with None, or with the exception it ended with."""
        try:
            async with aclosing(self._leased(placed)) as deltas:
                async for delta in deltas:
                    await queue.put(delta._replace(choice=first_choice + delta.choice))
        except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
            await queue.put(error)
        else:
            await queue.put(None)


def _check_proposer(mode: SpeculationMode, load: WorkerLoad) -> None:
    """Return if a worker can draft as the client wishes.

    Raises:
        InvalidRequest: it cannot; the message says with what it can.
    """
    if mode in PROPOSER_MODES and mode.value not in load.proposers:
        there = ", ".join(load.proposers) or "nothing"
        raise InvalidRequest(
            f"this worker cannot draft with {mode.value!r}; it can draft with: {there}",
            "speculation.mode",
        )
