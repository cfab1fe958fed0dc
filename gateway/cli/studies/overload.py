"""Overload: what is refused, when it is told to come back, and whether that was true.

    draftgate bench overload --json OUT

In virtual time, the gateway's own queue and admission before simulated workers. Requests come for a
minute at rates up to three times the one at which goodput peaks; whoever is refused comes back when
it was told to, until it is let in. Goodput counts requests whose first token came in time after the
attempt that was let in, and whose tokens did. The earliest instant at which a refused client could
have come is found in hindsight, by what requests really took (`earliest_s`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, median
from typing import Any, Final

from backends.base import WorkerConfig
from backends.sim.backend import SimBackend
from backends.sim.clock import run_virtual
from backends.sim.simulated import World
from gateway.admission import Bounds
from gateway.assembly import WaitingRules
from gateway.cli.simulate.cluster import started
from gateway.cli.simulate.prompts import job_of
from gateway.cli.studies.hindsight import Stay, starts_s
from gateway.cli.studies.record import provenance, study_parser, write_results
from gateway.dispatch import Dispatcher
from gateway.errors import TooMany
from gateway.job import Job
from loadgen.plan import Load, make_plan
from loadgen.types import Planned
from policies.types import ServiceLevel

OVERLOAD_S: Final = 60.0
WARM_SHARE: Final = 1 / 6
"""Goodput is counted from this share of the overload to its end."""

FACTORS: Final = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.3, 1.6, 2.0, 3.0)
"""Offered rates, as multiples of the nominal one."""

TIMES: Final = 3.0
"""What is called overload: so many times the rate at which goodput peaks."""

PATIENCE: Final = 40
"""Attempts after which a client gives up."""


@dataclass(slots=True)
class Client:
    """One client, and what became of it. Times are virtual seconds.

    Attributes:
        told: of each refusal, when, and after how many seconds to come back.
        came: of each return, when, and whether it was let in.
        first_s, end_s: of the attempt that was let in; None where it ended in an error.
    """

    planned: Planned
    arrived_s: float
    told: list[tuple[float, float]] = field(default_factory=list)
    came: list[tuple[float, bool]] = field(default_factory=list)
    admitted_s: float | None = None
    scheduled_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None
    tokens: int = 0

    def met(self, service: ServiceLevel) -> bool:
        """Return whether it was answered in time."""
        if self.admitted_s is None or self.first_s is None or self.end_s is None:
            return False
        gaps = self.tokens - 1
        tpot_s = (self.end_s - self.first_s) / gaps if gaps > 0 else 0.0
        in_time = service.ttft_s is None or self.first_s - self.admitted_s <= service.ttft_s
        return in_time and (service.tpot_s is None or tpot_s <= service.tpot_s)


@dataclass(frozen=True, slots=True)
class Overload:
    """What is simulated.

    Attributes:
        services: of the requests, by class; each gets one in turn.
        seconds: how long requests come.
    """

    config: WorkerConfig
    services: tuple[ServiceLevel, ...]
    workload: str = "chat"
    seed: int = 0
    workers: int = 1
    admission: str = "deadline"
    seconds: float = OVERLOAD_S

    def service(self, index: int) -> ServiceLevel:
        """Return the service level of a request."""
        return self.services[index % len(self.services)]

    def run(self, rate_rps: float) -> list[Client]:
        """Return the clients of a minute at a rate, in order of arrival, when all have ended."""
        load = Load(
            workload=self.workload, rate_rps=rate_rps, duration_s=self.seconds, seed=self.seed
        )
        plan = make_plan(load, max_model_len=self.config.max_model_len, lazily=True)
        return run_virtual(self._run(list(plan.requests)))

    async def _run(self, planned: Sequence[Planned]) -> list[Client]:
        world = World(self.seed)
        factory = partial(SimBackend, build=world.parts)
        rules = WaitingRules(admission=self.admission, bounds=Bounds(timeout_s=math.inf))
        async with started(factory, self.config, self.workers, "least-loaded", rules) as dispatcher:
            clients = [Client(one, one.at_s or 0.0) for one in planned]
            await asyncio.gather(*(self._live(dispatcher, one, world) for one in clients))
        return clients

    async def _live(self, dispatcher: Dispatcher, client: Client, world: World) -> None:
        """Come, and come back when told to, until let in."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(client.arrived_s - loop.time())
        index = client.planned.index
        job = replace(job_of(client.planned), service=self.service(index), fingerprint=index + 1)
        while len(client.told) < PATIENCE:
            now_s = loop.time()
            try:
                await self._ask(dispatcher, client, job, world)
            except TooMany as refusal:
                if client.told:
                    client.came.append((now_s, False))
                retry_s = refusal.retry_after_s or 1.0
                client.told.append((now_s, retry_s))
                await asyncio.sleep(retry_s)
            else:
                return

    async def _ask(self, dispatcher: Dispatcher, client: Client, job: Job, world: World) -> None:
        """Send the request once, and wait for its end if it is let in.

        Raises:
            TooMany: it is not.
        """
        now_s = asyncio.get_running_loop().time()
        with dispatcher.counted():
            async with dispatcher.run(job) as run:
                if client.told:
                    client.came.append((now_s, True))
                client.admitted_s = now_s
                async for _ in run.deltas:
                    pass
                came = world.ledger.take(run.requests[0].request_id)
        client.scheduled_s, client.first_s = came.scheduled_s, came.at_s[0]
        client.end_s, client.tokens = came.at_s[-1], sum(came.tokens)


# --- figures ----------------------------------------------------------------------------------


def goodput_rps(overload: Overload, clients: Sequence[Client]) -> float:
    """Return the requests a second that were answered in time, while the overload lasted."""
    warm_s = WARM_SHARE * overload.seconds
    good = [
        client
        for client in clients
        if client.met(overload.service(client.planned.index))
        and warm_s <= (client.first_s or 0.0) < overload.seconds
    ]
    return len(good) / (overload.seconds - warm_s)


def most_running(clients: Sequence[Client]) -> int:
    """Return how many requests ran at once at most."""
    changes = sorted(
        change
        for client in clients
        if client.scheduled_s is not None and client.end_s is not None
        for change in ((client.scheduled_s, 1), (client.end_s, -1))
    )
    most = running = 0
    for _, change in changes:
        running += change
        most = max(most, running)
    return most


def earliest_s(overload: Overload, clients: Sequence[Client]) -> list[tuple[Client, float]]:
    """Return each client that was refused at first, and what it could have been told at least.

    In hindsight: one line, by what requests really took, before as many seats as were ever taken
    at once (`starts_s`). In it are all who were let in at once, and all who were booked and let in
    when they came. A client could have come so early that, behind those before it, it starts just
    within its target.
    """
    ones = [client for client in clients if client.told or client.admitted_s is not None]
    stays = [_stay(overload, client) for client in ones]
    starts = starts_s(stays, max(most_running(clients), 1))
    return [
        (client, max(start_s - stay.at_s - _allowed_s(overload, client), 0.0))
        for client, stay, start_s in zip(ones, stays, starts, strict=True)
        if client.told
    ]


def _stay(overload: Overload, client: Client) -> Stay:
    """Return a client's place in hindsight, with a service if it was let in in its turn."""
    in_turn = not client.told or (bool(client.came) and client.came[0][1])
    service_s = 0.0
    if in_turn and client.scheduled_s is not None and client.end_s is not None:
        service_s = client.end_s - client.scheduled_s
    at_s = client.told[0][0] if client.told else client.admitted_s or 0.0
    return Stay(at_s, overload.service(client.planned.index).priority, service_s)


def _allowed_s(overload: Overload, client: Client) -> float:
    return overload.service(client.planned.index).ttft_s or 0.0


def _retries(told: Sequence[tuple[Client, float]]) -> dict[str, Any]:
    """Return the medians of what clients were told, and of what was feasible."""
    if not told:
        return {"retry_after_s": None, "earliest_feasible_s": None, "retry_over_earliest": None}
    retry_s, feasible_s = median(c.told[0][1] for c, _ in told), median(f for _, f in told)
    return {
        "retry_after_s": {"p50": retry_s},
        "earliest_feasible_s": {"p50": feasible_s},
        "retry_over_earliest": retry_s / feasible_s if feasible_s else None,
    }


def figures(overload: Overload, rate_rps: float, clients: Sequence[Client]) -> dict[str, Any]:
    """Return what is told of one rate."""
    returns = [let_in for client in clients for _, let_in in client.came]
    first = [client.came[0][1] for client in clients if client.came]
    told = earliest_s(overload, clients)
    return {
        "rate_rps": rate_rps,
        "requests": len(clients),
        "goodput_rps": goodput_rps(overload, clients),
        "refused_at_first": sum(bool(client.told) for client in clients),
        "let_in_on_return": fmean(returns) if returns else None,
        "let_in_on_first_return": fmean(first) if first else None,
        **_retries(told),
        "classes": [
            _class(overload, clients, told, place) for place in range(len(overload.services))
        ],
    }


def _class(
    overload: Overload,
    clients: Sequence[Client],
    told: Sequence[tuple[Client, float]],
    place: int,
) -> dict[str, Any]:
    """Return what became of one class of requests."""
    service = overload.services[place]
    own = [c for c in clients if c.planned.index % len(overload.services) == place]
    returns = [let_in for client in own for _, let_in in client.came]
    ended = [c for c in own if c.end_s is not None]
    waits_s = sorted((c.first_s or 0.0) - c.arrived_s for c in ended)
    in_time = [c for c in own if c.first_s is not None and c.first_s < overload.seconds]
    return {
        "priority": service.priority,
        "ttft_target_s": service.ttft_s,
        "tpot_target_s": service.tpot_s,
        "requests": len(own),
        "answered": len(ended),
        "answered_during_overload": len(in_time),
        "let_in_on_return": fmean(returns) if returns else None,
        **_retries([one for one in told if one[0].planned.index % len(overload.services) == place]),
        "attainment_of_answered": fmean(c.met(service) for c in ended) if ended else None,
        "arrival_to_first_token_s": {
            "p50": median(waits_s) if waits_s else None,
            "max": waits_s[-1] if waits_s else None,
        },
    }


def measure(overload: Overload, nominal_rps: float) -> dict[str, Any]:
    """Return the figures of all rates, and of three times the one where goodput peaks."""
    rows = [
        figures(overload, rate, overload.run(rate))
        for rate in (factor * nominal_rps for factor in FACTORS)
    ]
    peak = max(rows, key=lambda row: row["goodput_rps"])
    rate = TIMES * peak["rate_rps"]
    over = figures(overload, rate, overload.run(rate))
    return {
        "rates": rows,
        "peak": {key: peak[key] for key in ("rate_rps", "goodput_rps")},
        "overload": {**over, "goodput_of_peak": over["goodput_rps"] / peak["goodput_rps"]},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print; for `draftgate bench overload`."""
    parser = study_parser("overload", __doc__)
    parser.add_argument("--rate", type=float, default=16.0, help="nominal requests a second")
    parser.add_argument("--workload", default="chat")
    parser.add_argument("--seats", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--tpot-ms", type=float, default=None)
    parser.add_argument("--priorities", default="0", help="of the classes, as -1,0,1")
    parser.add_argument("--admission", default="deadline")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    tpot_s = None if args.tpot_ms is None else args.tpot_ms / 1e3
    overload = Overload(
        WorkerConfig(profile=args.profile, max_num_seqs=args.seats, max_model_len=16_384),
        tuple(
            ServiceLevel(args.ttft_ms / 1e3, tpot_s, int(priority))
            for priority in args.priorities.split(",")
        ),
        args.workload,
        args.seed,
        args.workers,
        args.admission,
    )
    found = {**provenance("overload", arguments), **measure(overload, args.rate)}
    for row in (*found["rates"], found["overload"]):
        print(row)
    write_results(args, found, "Overload", ())


if __name__ == "__main__":
    main()
