"""One part of a run: a fresh pool, load and faults for some minutes, and the checks of the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftgate.loadgen.sending.client import open_session
from tests.chaos.authority import Authority
from tests.chaos.checker import Outcome, Truths
from tests.chaos.clients import ChaosClients
from tests.chaos.faults import LANES
from tests.chaos.injection import Injection
from tests.chaos.leftovers import Sampler, until_clean
from tests.chaos.pool import Size, chaos_pool
from tests.chaos.requests import DistinctRequest, distinct_requests
from tests.cluster.results import latencies


@dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Attributes:
        seed: seed of the requests, their times and the faults.
        part_s: duration of the load of a part, in seconds.
        rate_rps: mean rate of requests.
        size: the numbers of nodes.
        faults: whether anything fails. Without faults, processes live long enough to show whether
            their memory grows.
        old: the source tree of another version, or None to upgrade to the same version.
    """

    seed: int = 1
    part_s: float = 600.0
    rate_rps: float = 3.0
    size: Size = field(default_factory=Size)
    faults: bool = True
    old: Path | None = None

    @property
    def trees(self) -> tuple[Path | None, ...]:
        """The source trees of the versions."""
        return (None,) if self.old is None else (None, self.old)

    def to_json(self) -> dict[str, Any]:
        """Return what determines the run."""
        names = ("seed", "part_s", "rate_rps", "faults")
        return {name: getattr(self, name) for name in names} | asdict(self.size)


async def run_part(settings: Settings, number: int, folder: Path) -> dict[str, Any]:
    """Run a part with random faults, and return its results.

    Args:
        number: number of the part, which selects other times and faults.
        folder: the folder of the expected texts.
    """
    requests, logs = distinct_requests(settings.seed), log_folder(folder, number)
    authority, pool_seed = Authority(logs / "authority"), settings.seed + number
    async with (
        chaos_pool(logs, settings.size, pool_seed, settings.trees, authority=authority) as pool,
        open_session(tls=authority.client_context) as session,
    ):
        clients = ChaosClients(session, pool, Truths(folder / "truths.json"))
        await clients.learn(requests)

        async def disturb(injection: Injection, over: asyncio.Event) -> None:
            async with asyncio.TaskGroup() as lanes:
                for lane in LANES if settings.faults else ():
                    lanes.create_task(injection.run_lane(lane, settings.seed, number, over))
                await asyncio.sleep(settings.part_s)
                over.set()

        return await run_load(settings, number, clients, requests, disturb)


def log_folder(folder: Path, number: int) -> Path:
    """Return a new folder for the logs of a part."""
    logs = (folder / f"logs-{number:03}").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    return logs


async def run_load(
    settings: Settings,
    number: int,
    clients: ChaosClients,
    requests: Sequence[DistinctRequest],
    disturb: Callable[[Injection, asyncio.Event], Awaitable[None]],
) -> dict[str, Any]:
    """Send requests while a pool is disturbed, wait until nothing remains, and return the results.

    Args:
        disturb: causes faults, and sets the event when no more requests shall be sent.
    """
    injection, over = Injection(clients.pool, clients.clock, clients.deaths), asyncio.Event()
    sampler, begun_s = Sampler(clients.pool), clients.clock()
    sampling = asyncio.create_task(sampler.run())
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                clients.send(requests, settings.rate_rps, f"{settings.seed}/{number}", over)
            )
            await disturb(injection, over)
        remains = await until_clean(clients.pool)
    finally:
        sampling.cancel()
    return results_of(settings, number, clients, injection, sampler, remains, begun_s)


def results_of(
    settings: Settings,
    number: int,
    clients: ChaosClients,
    injection: Injection,
    sampler: Sampler,
    remains: dict[str, Any],
    begun_s: float,
) -> dict[str, Any]:
    """Return the results of a part by name."""
    return {
        "settings": settings.to_json(),
        "part": number,
        "seconds": round(clients.clock() - begun_s, 1),
        "outcomes": {outcome.value: clients.outcomes[outcome.value] for outcome in Outcome},
        "kinds": dict(sorted(clients.kinds.items())),
        "lost_with_server": clients.lost,
        "refusals": clients.refusals,
        "resumes": dict(clients.resumes),
        "details": clients.details,
        "faults": [[round(at_s - begun_s, 2), *rest] for at_s, *rest in injection.events],
        "failures": injection.failures,
        "remains": remains,
        "latencies": latencies(clients.records),
        "processes": sampler.to_json(),
    }
