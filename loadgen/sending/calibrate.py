"""How much load can this generator hold honestly? Measured against the null server beside it.

Two ceilings, of one process or of several, each of which needs a core: the highest rate of requests
with an answer of one token, and the largest number of open streams which bring a token every 20 ms.
Held is a load whose run is valid by `loadgen.sending.health.Budget` and whose streams are all
intact. The search doubles until a load fails and then halves the interval (as MLPerf's LoadGen
finds its peak).

The null server is another process and needs a core of its own. Its CPU share is told with each
probe: where it is near 100 %, or the two share a core, the ceiling is a lower bound.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import aiohttp
from rich.console import Group, RenderableType
from rich.table import Table

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.sending.client import open_session
from draftgate.loadgen.sending.driver import run_plan
from draftgate.loadgen.sending.health import judge_health
from draftgate.loadgen.sending.processes.parent import run_in_processes
from draftgate.loadgen.sending.processes.wire import SenderJob
from draftgate.loadgen.sending.stub_server import Pace, allow_many_connections
from draftgate.loadgen.types import ClientHealth, LoadRun

PACE: Final = Pace(ttft_s=0.050, itl_s=0.020)
"""50 tokens a second: faster than reading, and what a small model gives one user."""

STREAM_TOKENS: Final = 100
"""A stream lasts 2 s: short enough for a probe of seconds to reach its number of open streams."""

TRIES: Final = 2
"""A load that fails is tried once more: a hiccup of the machine is no ceiling."""

PRECISION: Final = 0.1
"""Runs on one machine differ by about as much."""

_PROMPT: Final = "def fibonacci(n):\n" * 16


@dataclass(frozen=True, slots=True)
class Probe:
    """One load, and whether it was held.

    Attributes:
        rate_rps: requests per second offered.
        open_streams: mean number that are open in the middle of the probe (Little: rate x length).
        chunks_per_s: chunks with text per second at that number.
        health: the generator's; of several processes, the worst.
        ttft_excess_s: median and 99th percentile of the time to first token, beyond the null
            server's own: what this generator adds to every figure at that load.
        server_cpu_share: of the null server.
        reasons: why it was not held; empty if it was.
    """

    rate_rps: float
    open_streams: float
    chunks_per_s: float
    health: ClientHealth
    ttft_excess_s: tuple[float, float]
    server_cpu_share: float
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CalibrationResult:
    """The probes in the order in which they were made, failed ones too; how many processes sent."""

    rates: tuple[Probe, ...]
    streams: tuple[Probe, ...]
    processes: int = 1

    @property
    def rate(self) -> Probe | None:
        """The probe with the highest rate that was held."""
        return max(_held(self.rates), key=lambda probe: probe.rate_rps, default=None)

    @property
    def stream(self) -> Probe | None:
        """The probe with the most open streams that was held."""
        return max(_held(self.streams), key=lambda probe: probe.open_streams, default=None)


async def calibrate(
    *,
    processes: int = 1,
    probe_s: float = 4.0,
    on_probe: Callable[[Probe], None] = lambda _: None,
) -> CalibrationResult:
    """Find both ceilings; takes some twenty probes.

    Args:
        processes: how many send.
        probe_s: how long each probe sends.
        on_probe: told of each probe.

    Raises:
        OSError: the null server cannot be started.
    """
    allow_many_connections()
    rates, streams = list[Probe](), list[Probe]()
    async with null_server(PACE) as url, open_session() as session:

        async def holds(probes: list[Probe], rate_rps: float, tokens: int) -> bool:
            async def attempt() -> bool:
                probes.append(await probe(session, url, rate_rps, tokens, probe_s, processes))
                on_probe(probes[-1])
                return not probes[-1].reasons

            return await held_once(attempt)

        length_s = _length_s(STREAM_TOKENS)
        await highest(lambda rate: holds(rates, rate, 1), 100)
        await highest(lambda n: holds(streams, n / length_s, STREAM_TOKENS), 100)
    return CalibrationResult(tuple(rates), tuple(streams), processes)


async def held_once(attempt: Callable[[], Awaitable[bool]]) -> bool:
    """Return whether one of `TRIES` attempts holds."""
    for _ in range(TRIES):
        if await attempt():
            return True
    return False


async def highest(
    holds: Callable[[int], Awaitable[bool]], start: int, precision: float = PRECISION
) -> int:
    """Return the highest load that holds, to the given precision; 0 if not even 1 does.

    Doubles from `start` until one fails, then bisects.
    """
    low, high = 0, start
    while await holds(high):
        low, high = high, 2 * high
    while high - low > max(1.0, precision * low):
        middle = (low + high) // 2
        if await holds(middle):
            low = middle
        else:
            high = middle
    return low


async def probe(
    session: aiohttp.ClientSession,
    url: str,
    rate_rps: float,
    tokens: int,
    probe_s: float,
    processes: int = 1,
) -> Probe:
    """Offer one load, evenly spaced, for `probe_s` or two lengths of a stream if that is more."""
    length_s = _length_s(tokens)
    requests = max(1, round(rate_rps * max(probe_s, 2 * length_s)))
    load = Load(
        prompt=_PROMPT,
        arrival="constant",
        rate_rps=rate_rps,
        requests=requests,
        max_tokens=tokens,
    )
    cpu_s = await _cpu_s(session, url)
    if processes > 1:
        run = await run_in_processes(SenderJob(load, url, "null"), processes)
    else:
        run = await run_plan(session, url, "null", make_plan(load).requests)
    server_cpu_s = await _cpu_s(session, url) - cpu_s
    assert run.health is not None
    excess = sorted(r.chunks[0].at_s - r.scheduled_s - PACE.ttft_s for r in run.records if r.chunks)
    return Probe(
        rate_rps,
        rate_rps * length_s,
        rate_rps * tokens,
        run.health,
        (_quantile(excess, 0.5), _quantile(excess, 0.99)),
        server_cpu_s / run.duration_s,
        (*judge_health(run), *_failures(run)),
    )


def render(result: CalibrationResult) -> RenderableType:
    """Return the two ceilings as text within 80 columns, with what held them back."""
    streamed = f"{STREAM_TOKENS} tokens, {PACE.itl_s * 1e3:g} ms apart"
    sending = "one process" if result.processes == 1 else f"{result.processes} processes"
    title = f"Ceilings of this generator ({sending})"
    table = Table(title=title, title_justify="left", box=None)
    table.add_column("answers of")
    for name in ("1 token", streamed):
        table.add_column(name, justify="right")
    searches = (result.rates, result.rate), (result.streams, result.stream)
    columns = [_figures(best) for _, best in searches]
    for title in columns[0] | columns[1]:
        table.add_row(title, *(column.get(title, "none held") for column in columns))
    causes = [
        f"{name}: held back by: {cause}"
        for name, (probes, best) in zip(("1 token", streamed), searches, strict=True)
        if (cause := _cause(probes, best))
    ]
    return Group(table, "", *causes)


def _figures(best: Probe | None) -> dict[str, str]:
    """Return what a column says of the best probe that was held; nothing if there was none."""
    if best is None:
        return {}
    median_s, p99_s = best.ttft_excess_s
    return {
        "requests/s": f"{best.rate_rps:.0f}",
        "open streams": f"{best.open_streams:.0f}",
        "chunks/s": f"{best.chunks_per_s:.0f}",
        "p99 lag": f"{best.health.p99_lag_s * 1e3:.1f} ms",
        "TTFT excess, median": f"{median_s * 1e3:.1f} ms",
        "TTFT excess, p99": f"{p99_s * 1e3:.1f} ms",
        "CPU": f"{best.health.cpu_share:.0%}",
        "null server's CPU": f"{best.server_cpu_share:.0%}",
    }


def _cause(probes: Sequence[Probe], best: Probe | None) -> str:
    """Return why the lowest load above the best was not held; empty if none was tried."""
    above = [p for p in probes if p.reasons and (best is None or p.rate_rps > best.rate_rps)]
    return "; ".join(min(above, key=lambda p: p.rate_rps).reasons) if above else ""


@asynccontextmanager
async def null_server(pace: Pace) -> AsyncGenerator[str, None]:
    """Run a null server as a process of its own; gives its address."""
    options = ["--ttft-ms", str(pace.ttft_s * 1e3), "--itl-ms", str(pace.itl_s * 1e3)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "draftgate.loadgen.sending.stub_server", *options, stdout=PIPE
    )
    assert process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise OSError("the null server did not start")
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _cpu_s(session: aiohttp.ClientSession, url: str) -> float:
    async with session.get(f"{url}/cpu") as response:
        return float((await response.json())["cpu_s"])


def _length_s(tokens: int) -> float:
    return PACE.ttft_s + (tokens - 1) * PACE.itl_s


def _failures(run: LoadRun) -> list[str]:
    failed = [record for record in run.records if record.verdict != Verdict.OK]
    if not failed:
        return []
    example = f"{failed[0].verdict}: {failed[0].detail}"
    return [f"{len(failed)} of {len(run.records)} streams failed, e.g. {example}"]


def _held(probes: Sequence[Probe]) -> list[Probe]:
    return [probe for probe in probes if not probe.reasons]


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[round(share * (len(ascending) - 1))] if ascending else float("nan")
