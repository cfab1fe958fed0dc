"""Clients in an overload, which retry as requested until they are admitted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Final

from bench.simulation.gateways import running_gateways
from draftgate.backends.sim.assembly import SimEnvironment
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.virtual_time import run_virtual
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules
from draftgate.gateway.cli.simulate.cluster import SimulatedCluster
from draftgate.gateway.cli.simulate.conversion import job_of
from draftgate.gateway.dispatch.admission import Bounds
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.errors import TooMany
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.types import PlannedRequest
from draftgate.policies.types import ServiceLevel

OVERLOAD_S: Final = 60.0

MAX_ATTEMPTS: Final = 40
"""Number of attempts after which a client gives up."""


@dataclass(slots=True)
class Client:
    """A client and its outcome, with times in virtual seconds.

    Attributes:
        refusals: time of each refusal, and the requested delay of the retry.
        retries: time of each retry, and whether it was admitted.
        first_s, end_s: first token and end of the admitted attempt, or None after an error.
    """

    planned: PlannedRequest
    arrived_s: float
    refusals: list[tuple[float, float]] = field(default_factory=list)
    retries: list[tuple[float, bool]] = field(default_factory=list)
    admitted_s: float | None = None
    scheduled_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None
    tokens: int = 0

    def met(self, service: ServiceLevel) -> bool:
        """Return whether the client's request met its targets."""
        if self.admitted_s is None or self.first_s is None or self.end_s is None:
            return False
        gaps = self.tokens - 1
        tpot_s = (self.end_s - self.first_s) / gaps if gaps > 0 else 0.0
        in_time = service.ttft_s is None or self.first_s - self.admitted_s <= service.ttft_s
        return in_time and (service.tpot_s is None or tpot_s <= service.tpot_s)


@dataclass(frozen=True, slots=True)
class Overload:
    """The simulated overload.

    Attributes:
        services: service levels by class, which requests get in turn.
        seconds: duration of the arrivals, in seconds.
        text_file: the source of the prompts, or None for Python's standard library.
        gateways: number of gateways in front of the workers. Each attempt of a client goes to a
            random one.
    """

    config: WorkerConfig
    services: tuple[ServiceLevel, ...]
    workload: str = "chat"
    seed: int = 0
    workers: int = 1
    admission: str = "deadline"
    seconds: float = OVERLOAD_S
    text_file: Path | None = None
    gateways: int = 1

    def service(self, index: int) -> ServiceLevel:
        """Return the service level of a request by its index."""
        return self.services[index % len(self.services)]

    def run(self, rate_rps: float) -> list[Client]:
        """Send requests at a rate for a minute, and return the clients in order of arrival."""
        load = Load(
            workload=self.workload,
            rate_rps=rate_rps,
            duration_s=self.seconds,
            seed=self.seed,
            text_file=self.text_file,
        )
        plan = make_plan(load, max_model_len=self.config.max_model_len, lazily=True)
        return run_virtual(self._run(list(plan.requests)))

    async def _run(self, planned: Sequence[PlannedRequest]) -> list[Client]:
        environment = SimEnvironment(self.seed)
        factory = partial(SimBackend, build=environment.build_worker)
        rules = WaitingRules(admission=self.admission, bounds=Bounds(timeout_s=math.inf))
        configs = SimulatedCluster(self.config, self.workers, environment).configs
        async with running_gateways(factory, configs, rules, self.gateways) as dispatchers:
            clients = [Client(one, one.at_s or 0.0) for one in planned]
            await asyncio.gather(*(self._live(dispatchers, one, environment) for one in clients))
        return clients

    async def _live(
        self, dispatchers: Sequence[Dispatcher], client: Client, environment: SimEnvironment
    ) -> None:
        """Send the request, and retry as requested until it is admitted."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(client.arrived_s - loop.time())
        index = client.planned.index
        choose = Random(f"gateway/{self.seed}/{index}").choice
        job = replace(job_of(client.planned), service=self.service(index), fingerprint=index + 1)
        while len(client.refusals) < MAX_ATTEMPTS:
            now_s = loop.time()
            try:
                await self._send_request(choose(dispatchers), client, job, environment)
            except TooMany as refusal:
                if client.refusals:
                    client.retries.append((now_s, False))
                retry_s = refusal.retry_after_s or 1.0
                client.refusals.append((now_s, retry_s))
                await asyncio.sleep(retry_s)
            else:
                return

    async def _send_request(
        self, dispatcher: Dispatcher, client: Client, job: Job, environment: SimEnvironment
    ) -> None:
        """Send the request once, and wait for its end if it is admitted.

        Raises:
            TooMany: the request was refused.
        """
        now_s = asyncio.get_running_loop().time()
        with dispatcher.counted():
            async with dispatcher.run(job) as run:
                if client.refusals:
                    client.retries.append((now_s, True))
                client.admitted_s = now_s
                async for _ in run.deltas:
                    pass
                timing = environment.log.pop(run.requests[0].request_id)
        client.scheduled_s, client.first_s = timing.scheduled_s, timing.at_s[0]
        client.end_s, client.tokens = timing.at_s[-1], sum(timing.tokens)
