"""A week of a pool in virtual time, with random losses, pauses, restarts and clock steps."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from msgspec import structs

from draftgate.backends.peer.tokenizer import Tokenizers
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.token_ids import compact
from draftgate.backends.types import SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.run import Resume
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.state.commands import ListWorkers
from draftgate.gateway.state.values import FORGET_S
from draftgate.lab.sim.virtual_time import run_virtual
from tests.chaos.usage import open_files, resident_mb
from tests.chaos.virtual.nodes import (
    GatewayNode,
    SharedMemory,
    VirtualNode,
    WorkerNode,
    virtual_links,
)
from tests.gateway.troubles import Choice, dispatching, read_rest, run_job

HOUR_S = 3600.0
SETTLE_S = FORGET_S + 60.0
"""Time without load and faults at the end of each hour, after which nothing may remain. It includes
the time in which the store forgets a worker whose clock went back."""

CONFIG = WorkerConfig(profile="h100-8b", kv_bytes=600 << 20, speculation="auto")

LENGTHS = (4, 40, 160)
KINDS = tuple((prompt, tokens, n) for prompt in (24, 700) for tokens in LENGTHS for n in (1, 2))
"""Tokens of prompts and outputs, and choices, of the distinct requests."""

HOLD_S = (0.5, 20.0)
"""Shortest and longest fault, both shorter and longer than the silence that ends a link (3 s)."""


@dataclass
class Outcomes:
    """The results of a run.

    Attributes:
        requests: number of requests by outcome: intact, altered, failed, cancelled, lost (with
            its gateway) and refused (no worker was available at the arrival).
        faults, resumes: numbers by kind and by cause.
        details: descriptions of altered and failed requests.
        remains: what remained at the end of an hour.
        usage: memory in MB and open files of the process that simulates all nodes, after each hour.
    """

    requests: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    resumes: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)
    remains: list[str] = field(default_factory=list)
    usage: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Week:
    """The settings of a run.

    Attributes:
        rate_per_s: mean rate of requests.
        fault_every_s: mean pause between two faults.
    """

    hours: float = 168.0
    seed: int = 1
    workers: int = 3
    gateways: int = 2
    rate_per_s: float = 0.02
    fault_every_s: float = 90.0


def run_week(week: Week) -> dict[str, Any]:
    """Run a pool for virtual hours, and return the results."""
    begun_s = time.process_time()
    truths = [_undisturbed(make_job(kind)) for kind in range(len(KINDS))]
    outcomes = run_virtual(_Run(week, truths).run())
    return {
        "hours": week.hours,
        "seed": week.seed,
        "cpu_s": round(time.process_time() - begun_s, 1),
        **{name: dict(getattr(outcomes, name)) for name in ("requests", "faults", "resumes")},
        "details": outcomes.details,
        "remains": outcomes.remains,
        "usage_after_each_12_hours": [*outcomes.usage[:1], *outcomes.usage[11::12]],
    }


def make_job(kind: int, request_id: str = "r") -> Job:
    """Return a request of a kind."""
    prompt, tokens, n = KINDS[kind]
    ids = compact([7 + (index * 31 + kind) % 500 for index in range(prompt)])
    return Job(request_id, (ids,), SamplingParams(1, seed=kind), tokens, n)


def _undisturbed(job: Job) -> list[Choice]:
    async def scenario() -> list[Choice]:
        config = structs.replace(CONFIG, speculation="off")
        async with dispatching(SimBackend, 1, config=config) as dispatched:
            return await run_job(dispatched.dispatcher, job)

    return run_virtual(scenario())


class _Client:
    """A client, and the choices that it has read."""

    def __init__(self, run: _Run, kind: int, gateway: GatewayNode, number: int) -> None:
        self._run = run
        self.kind = kind
        self.gateway = gateway
        self.job = make_job(kind, f"r{number}")
        self.choices = [Choice() for _ in range(self.job.n)]

    def observe(self, event: object) -> None:
        """Count the continuations on another worker."""
        if isinstance(event, Resume):
            self._run.outcomes.resumes[event.cause.value] += 1

    async def read(self) -> None:
        dispatcher = self.gateway.dispatcher
        with dispatcher.counted():
            async with dispatcher.run(self.job, watch=self.observe) as run:
                await read_rest(run, self.choices)

    def begun(self, truth: Sequence[Choice]) -> bool:
        """Return whether everything that has arrived is the beginning of the expected choices."""
        return all(
            whole.text.startswith(choice.text)
            and whole.token_ids[: len(choice.token_ids)] == choice.token_ids
            for choice, whole in zip(self.choices, truth, strict=True)
        )


class _Run:
    def __init__(self, week: Week, truths: Sequence[list[Choice]]) -> None:
        self.outcomes = Outcomes()
        self._week = week
        self._truths = truths
        self._rng = Random(f"week/{week.seed}")
        self._nodes: dict[str, WorkerNode] = {}  # by URL
        self._gateways: dict[str, GatewayNode] = {}
        self._tokenizers = Tokenizers()
        self._sent = 0

    async def run(self) -> Outcomes:
        week = self._week
        self._memory = SharedMemory(week.workers + week.gateways)
        with virtual_links(self._nodes):
            for number in range(week.workers):
                await self._start_worker(f"w{number}", 0.0)
            for number in range(week.gateways):
                await self._start_gateway(f"g{number}")
            left_s = week.hours * HOUR_S
            while left_s > 0.0:
                await self._hour(min(left_s, HOUR_S))
                left_s -= HOUR_S
            for gateway in self._gateways.values():
                await gateway.kill()
            for node in self._nodes.values():
                await node.kill()
        return self.outcomes

    async def _hour(self, seconds: float) -> None:
        """Send requests and cause faults, and check that nothing remains afterwards."""
        end_s = loop_time_s() + seconds - SETTLE_S
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._send(end_s))
            tasks.create_task(self._disturb(end_s))
        await asyncio.sleep(SETTLE_S)
        await self._check()
        pid = os.getpid()
        self.outcomes.usage.append((round(resident_mb(pid), 1), open_files(pid)))

    async def _send(self, end_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            while loop_time_s() < end_s:
                await asyncio.sleep(self._rng.expovariate(self._week.rate_per_s))
                burst = self._rng.choice((1, 1, 1, 8))  # some requests have to queue
                for _ in range(burst):
                    tasks.create_task(self._client(self._rng.randrange(len(KINDS))))

    async def _client(self, kind: int) -> None:
        self._sent += 1
        ready = [g for g in self._gateways.values() if g.lifecycle.state is NodeState.READY]
        if not ready:
            self.outcomes.requests["refused"] += 1
            return
        client = _Client(self, kind, self._rng.choice(ready), self._sent)
        task = client.gateway.spawn(client.read())
        leaves_s = self._rng.uniform(0.0, 5.0) if self._rng.random() < 0.1 else None
        done, _ = await asyncio.wait({task}, timeout=leaves_s)
        if not done:
            task.cancel()
            await asyncio.wait({task})
        self.outcomes.requests[self._outcome(client, task)] += 1

    def _outcome(self, client: _Client, task: asyncio.Task[None]) -> str:
        truth = self._truths[client.kind]
        where = f"{client.job.request_id} at {client.gateway.name}, {loop_time_s():.1f} s"
        if not client.begun(truth):
            self.outcomes.details.append(f"{where}: altered")
            return "altered"
        if task.cancelled():
            return "lost" if client.gateway.is_gone else "cancelled"
        error = task.exception()
        if error is None:
            if client.choices == truth:
                return "intact"
            self.outcomes.details.append(f"{where}: incomplete")
            return "altered"
        if client.gateway.is_gone:
            return "lost"
        self.outcomes.details.append(f"{where}: {error!r}")
        return "failed"

    async def _disturb(self, end_s: float) -> None:
        faults = (
            (self._kill_worker, 3),
            (self._pause_worker, 3),
            (self._partition_worker, 3),
            (self._reset_worker, 2),
            (self._drain_worker, 3),
            (self._kill_gateway, 1),
            (self._drain_gateway, 1),
            (self._step_clock_of_store, 1),
            (self._flush_store, 1),
            (self._lose_store, 2),
        )
        kinds, weights = zip(*faults, strict=True)
        while True:
            await asyncio.sleep(self._rng.uniform(0.1, 1.9) * self._week.fault_every_s)
            await self._until_busy(end_s)
            if loop_time_s() >= end_s:
                return
            (fault,) = self._rng.choices(kinds, weights)
            self.outcomes.faults[fault.__name__.strip("_")] += 1
            await fault()

    async def _until_busy(self, end_s: float) -> None:
        """Wait until a request runs, because faults of idle nodes show little."""
        while loop_time_s() < end_s and not self._busy_workers():  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.25)
        await asyncio.sleep(self._rng.uniform(0.0, 0.25))

    def _busy_workers(self) -> list[WorkerNode]:
        return [node for node in self._nodes.values() if node.backend.load().running]

    async def _kill_worker(self) -> None:
        node = self._pick_worker()
        del self._nodes[node.url]
        await node.kill()
        await self._restart(node.name)

    async def _drain_worker(self) -> None:
        node = self._pick_worker()
        await node.drain(self._hold_s())
        del self._nodes[node.url]
        await self._restart(node.name)

    async def _restart(self, name: str) -> None:
        """Start a worker again, sometimes with a clock that went forward or back."""
        await asyncio.sleep(self._hold_s())
        step_s = self._rng.choice((0.0, 0.0, 0.0, 3600.0, -3600.0))
        self.outcomes.faults["clock_step"] += step_s != 0.0
        await self._start_worker(name, step_s)

    async def _pause_worker(self) -> None:
        await self._pick_worker().pause(self._hold_s())

    async def _partition_worker(self) -> None:
        node = self._pick_worker()
        node.freeze_wires()
        await asyncio.sleep(self._hold_s())
        node.thaw_wires()

    async def _reset_worker(self) -> None:
        self._pick_worker().reset_wires()

    async def _kill_gateway(self) -> None:
        gateway = self._rng.choice(list(self._gateways.values()))
        await gateway.kill()
        await asyncio.sleep(self._hold_s())
        await self._start_gateway(gateway.name)

    async def _drain_gateway(self) -> None:
        gateway = self._rng.choice(list(self._gateways.values()))
        await gateway.drain()
        await self._start_gateway(gateway.name)

    async def _step_clock_of_store(self) -> None:
        self._memory.clock_step_s += self._rng.choice((-20.0, -5.0, 5.0, 20.0, 3600.0))

    async def _flush_store(self) -> None:
        self._memory.forget()

    async def _lose_store(self) -> None:
        """Let the calls of some nodes fail or hang."""
        lost = [remote for remote in self._memory.remotes if self._rng.random() < 0.6]
        failing = self._rng.random() < 0.5
        for remote in lost:
            remote.failure, remote.delay_s = ("no route" if failing else None), 1.0
        await asyncio.sleep(self._hold_s())
        for remote in lost:
            if remote in self._memory.remotes:
                remote.failure, remote.delay_s = None, 0.0

    async def _start_worker(self, name: str, clock_step_s: float) -> None:
        node = WorkerNode(name, self._memory, CONFIG)
        await node.start(1.8e9 + loop_time_s() + clock_step_s)
        self._nodes[node.url] = node

    async def _start_gateway(self, name: str) -> None:
        gateway = GatewayNode(name, self._memory, CONFIG, self._nodes, self._tokenizers)
        await gateway.start()
        self._gateways[name] = gateway

    def _pick_worker(self) -> WorkerNode:
        return self._rng.choice(self._busy_workers() or list(self._nodes.values()))

    def _hold_s(self) -> float:
        return self._rng.uniform(*HOLD_S)

    async def _check(self) -> None:
        """Record what remains of any request, and workers that are not in use."""
        nodes: list[VirtualNode] = [*self._nodes.values(), *self._gateways.values()]
        found = [f"{node.name} is busy" for node in nodes if not node.is_idle]
        snapshot = await self._memory.inner.call(ListWorkers())
        found += [
            f"{view.report.worker_id} has leases or claims"
            for view in snapshot.workers
            if view.leased_tokens or view.claimed_tokens
        ]
        expected = {node.worker_id for node in self._nodes.values()}
        if expected != {view.report.worker_id for view in snapshot.workers}:
            found.append("the store does not list exactly the workers")
        found += [
            f"{gateway.name} does not use all workers"
            for gateway in self._gateways.values()
            if expected != {worker.worker_id for worker in gateway.fleet.open}
        ]
        self.outcomes.remains += [f"{loop_time_s() / HOUR_S:.0f} h: {one}" for one in found]
