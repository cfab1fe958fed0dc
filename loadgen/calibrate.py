"""How much load can this generator hold honestly? Measured against the null server beside it.

Two ceilings, of one core: the highest rate of requests with an answer of one token, and the largest
number of open streams which bring a token every 20 ms. Held is a load whose run is valid by
`loadgen.health.Budget` and whose streams are all intact. The search doubles until a probe fails and
then halves the interval (as MLPerf's LoadGen finds its peak).

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
from rich.table import Table

from loadgen.audit import Verdict
from loadgen.client import open_session
from loadgen.driver import run_plan
from loadgen.health import judge_health
from loadgen.null_server import Pace, allow_many_connections
from loadgen.types import ClientHealth, Planned, Question, Run

PACE: Final = Pace(ttft_s=0.050, itl_s=0.020)
"""50 tokens a second: faster than reading, and what a small model gives one user."""

STREAM_TOKENS: Final = 100
"""A stream lasts 2 s: short enough for a probe of seconds to reach its number of open streams."""

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
        health: the generator's.
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
    """The probes in the order in which they were made, failed ones too."""

    rates: tuple[Probe, ...]
    streams: tuple[Probe, ...]

    @property
    def rate(self) -> Probe | None:
        """The probe with the highest rate that was held."""
        return max(_held(self.rates), key=lambda probe: probe.rate_rps, default=None)

    @property
    def stream(self) -> Probe | None:
        """The probe with the most open streams that was held."""
        return max(_held(self.streams), key=lambda probe: probe.open_streams, default=None)


async def calibrate(
    *, probe_s: float = 4.0, on_probe: Callable[[Probe], None] = lambda _: None
) -> CalibrationResult:
    """Find both ceilings; takes some twenty probes.

    Args:
        probe_s: how long each probe sends.
        on_probe: told of each probe.

    Raises:
        OSError: the null server cannot be started.
    """
    allow_many_connections()
    rates, streams = list[Probe](), list[Probe]()
    async with null_server(PACE) as url, open_session() as session:

        async def holds(probes: list[Probe], rate_rps: float, tokens: int) -> bool:
            probes.append(await probe(session, url, rate_rps, tokens, probe_s))
            on_probe(probes[-1])
            return not probes[-1].reasons

        length_s = _length_s(STREAM_TOKENS)
        await highest(lambda rate: holds(rates, rate, 1), 100)
        await highest(lambda n: holds(streams, n / length_s, STREAM_TOKENS), 100)
    return CalibrationResult(tuple(rates), tuple(streams))


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
    session: aiohttp.ClientSession, url: str, rate_rps: float, tokens: int, probe_s: float
) -> Probe:
    """Offer one load, evenly spaced, for `probe_s` or two lengths of a stream if that is more."""
    length_s = _length_s(tokens)
    requests = max(1, round(rate_rps * max(probe_s, 2 * length_s)))
    question = Question(_PROMPT, (), tokens, seed=0)
    plan = [Planned(i, i / rate_rps, question) for i in range(requests)]
    cpu_s = await _cpu_s(session, url)
    run = await run_plan(session, url, "null", plan)
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


def render(result: CalibrationResult) -> Table:
    """Return a table of the two ceilings, with what held them back."""
    table = Table(title="Ceiling of this generator (one core)", title_justify="left")
    for column in ("load", "requests/s", "open streams", "chunks/s", "p99 lag", "TTFT excess"):
        table.add_column(column, justify="left" if column == "load" else "right")
    table.add_column("CPU", justify="right")
    table.add_column("null server's", justify="right")
    table.add_column("held back by")
    searches = (
        ("1 token", result.rate, result.rates),
        (f"{STREAM_TOKENS} tokens, every {PACE.itl_s * 1e3:g} ms", result.stream, result.streams),
    )
    for name, best, probes in searches:
        if best is None:
            table.add_row(name, "none", "", "", "", "", "", "", "; ".join(probes[-1].reasons))
            continue
        beyond = [p for p in probes if p.reasons and p.rate_rps > best.rate_rps]
        cause = min(beyond, key=lambda p: p.rate_rps).reasons[0] if beyond else ""
        median_s, p99_s = best.ttft_excess_s
        table.add_row(
            name,
            f"{best.rate_rps:.0f}",
            f"{best.open_streams:.0f}",
            f"{best.chunks_per_s:.0f}",
            f"{best.health.p99_lag_s * 1e3:.1f} ms",
            f"{median_s * 1e3:.1f} ms, p99 {p99_s * 1e3:.1f} ms",
            f"{best.health.cpu_share:.0%}",
            f"{best.server_cpu_share:.0%}",
            cause,
        )
    return table


@asynccontextmanager
async def null_server(pace: Pace) -> AsyncGenerator[str, None]:
    """Run a null server as a process of its own; gives its address."""
    options = ["--ttft-ms", str(pace.ttft_s * 1e3), "--itl-ms", str(pace.itl_s * 1e3)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadgen.null_server", *options, stdout=PIPE
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


def _failures(run: Run) -> list[str]:
    failed = [record for record in run.records if record.verdict != Verdict.OK]
    if not failed:
        return []
    example = f"{failed[0].verdict}: {failed[0].detail}"
    return [f"{len(failed)} of {len(run.records)} streams failed, e.g. {example}"]


def _held(probes: Sequence[Probe]) -> list[Probe]:
    return [probe for probe in probes if not probe.reasons]


def _quantile(ascending: Sequence[float], share: float) -> float:
    return ascending[round(share * (len(ascending) - 1))] if ascending else float("nan")
