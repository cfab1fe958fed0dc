"""Measures how much load this generator can send before it misses its schedule.

The calibration measures two ceilings against the stub server, for one or several processes on a
core each. One is the highest rate of requests with a response of one token. The other is the
largest number of open streams with a token every 20 ms. A load is sustained if its run is valid
(`sending.health`) and all of its streams are intact. The search doubles the load until it fails and
then bisects, like the peak search of MLPerf's LoadGen.

The stub server is another process and needs a core of its own. Each probe reports its CPU share. If
that share is near 100 %, or the two processes share a core, the ceiling is a lower bound.
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
from draftgate.loadgen.measuring.metrics import percentile
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.sending.client import OpenAIClient, allow_many_connections, open_session
from draftgate.loadgen.sending.driver import run_plan
from draftgate.loadgen.sending.health import invalid_reasons
from draftgate.loadgen.sending.processes import run_in_processes
from draftgate.loadgen.sending.sender import SenderJob
from draftgate.loadgen.sending.stub_server import MODEL, TokenPace
from draftgate.loadgen.sending.target import ServerInfo, Target
from draftgate.loadgen.types import ClientHealth, LoadRun

PACE: Final = TokenPace(ttft_s=0.050, itl_s=0.020)
"""50 tokens per second, which is faster than reading and typical of a small model with one user."""

STREAM_TOKENS: Final = 100
"""Tokens of a stream. A stream of 2 s is short enough for a probe of a few seconds to reach its
number of open streams."""

TRIES: Final = 2
"""Attempts per load. A second attempt keeps a brief stall of the machine from counting as the
ceiling."""

PRECISION: Final = 0.1
"""Precision of the ceiling. Runs on one machine differ by about this share."""

FIRST_LOAD: Final = 100
"""The first load to try, in requests per second or open streams."""

_PROMPT: Final = "def fibonacci(n):\n" * 16


@dataclass(frozen=True, slots=True)
class CalibrationProbe:
    """One load, and whether it was sustained.

    Attributes:
        rate_rps: offered requests per second.
        open_streams: mean open streams in the middle of the probe (Little: rate x length).
        chunks_per_s: chunks with text per second at that number of streams.
        health: the health of the generator, for several processes the worst.
        ttft_excess_s: median and 99th percentile of the time to first token beyond the stub
            server's own, which this generator adds to every measurement at that load.
        server_cpu_share: the CPU share of the stub server.
        reasons: why the load was not sustained, empty for a sustained load.
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
    """All probes in order, including failed probes, and the number of sending processes."""

    rates: tuple[CalibrationProbe, ...]
    streams: tuple[CalibrationProbe, ...]
    processes: int = 1

    @property
    def rate(self) -> CalibrationProbe | None:
        """The sustained probe with the highest rate."""
        return _best(self.rates)

    @property
    def stream(self) -> CalibrationProbe | None:
        """The sustained probe with the most open streams."""
        return _best(self.streams)


async def find_ceilings(
    *,
    processes: int = 1,
    probe_s: float = 4.0,
    on_probe: Callable[[CalibrationProbe], None] = lambda _: None,
) -> CalibrationResult:
    """Find both ceilings, which takes about twenty probes.

    Args:
        processes: the number of sending processes.
        probe_s: how long each probe sends, in seconds.
        on_probe: called with each probe.

    Raises:
        OSError: the stub server cannot be started.
    """
    allow_many_connections()
    rates, streams = list[CalibrationProbe](), list[CalibrationProbe]()
    async with run_stub_server(PACE) as url, open_session() as session:

        async def sustained(probes: list[CalibrationProbe], rate_rps: float, tokens: int) -> bool:
            async def attempt() -> bool:
                probes.append(await probe(session, url, rate_rps, tokens, probe_s, processes))
                on_probe(probes[-1])
                return not probes[-1].reasons

            return await succeeds(attempt)

        length_s = _length_s(STREAM_TOKENS)
        await find_highest(lambda rate: sustained(rates, rate, 1))
        await find_highest(lambda n: sustained(streams, n / length_s, STREAM_TOKENS))
    return CalibrationResult(tuple(rates), tuple(streams), processes)


async def succeeds(attempt: Callable[[], Awaitable[bool]]) -> bool:
    """Return whether any of `TRIES` attempts succeeds."""
    for _ in range(TRIES):
        if await attempt():
            return True
    return False


async def find_highest(sustained: Callable[[int], Awaitable[bool]]) -> int:
    """Return the highest sustained load, within `PRECISION`, or 0 if a load of 1 fails.

    The search doubles the load from `FIRST_LOAD` until it fails, then bisects.
    """
    low, high = 0, FIRST_LOAD
    while await sustained(high):
        low, high = high, 2 * high
    while high - low > max(1.0, PRECISION * low):
        middle = (low + high) // 2
        if await sustained(middle):
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
) -> CalibrationProbe:
    """Offer one load, evenly spaced, for `probe_s` or for two lengths of a stream if longer."""
    length_s = _length_s(tokens)
    load = Load(
        prompt=_PROMPT,
        arrival="constant",
        rate_rps=rate_rps,
        requests=max(1, round(rate_rps * max(probe_s, 2 * length_s))),
        max_tokens=tokens,
    )
    cpu_s = await _cpu_s(session, url)
    if processes > 1:
        job = SenderJob(load, Target(url, processes=processes), ServerInfo(MODEL))
        run = await run_in_processes(job)
    else:
        run = await run_plan(OpenAIClient(session, url, MODEL), make_plan(load).requests)
    server_cpu_s = await _cpu_s(session, url) - cpu_s
    assert run.health is not None
    excess = sorted(r.chunks[0].at_s - r.scheduled_s - PACE.ttft_s for r in run.records if r.chunks)
    excess = excess or [float("nan")]
    return CalibrationProbe(
        rate_rps,
        rate_rps * length_s,
        rate_rps * tokens,
        run.health,
        (percentile(excess, 0.5), percentile(excess, 0.99)),
        server_cpu_s / run.duration_s,
        (*invalid_reasons(run), *_failures(run)),
    )


def render_ceilings(result: CalibrationResult) -> RenderableType:
    """Return both ceilings and their limiting causes as text within 80 columns."""
    streamed = f"{STREAM_TOKENS} tokens, {PACE.itl_s * 1e3:g} ms apart"
    sending = "one process" if result.processes == 1 else f"{result.processes} processes"
    title = f"Ceilings of this generator ({sending})"
    table = Table("response of", title=title, title_justify="left", box=None)
    for name in ("1 token", streamed):
        table.add_column(name, justify="right")
    searches = (result.rates, result.rate), (result.streams, result.stream)
    columns = [_cells(best) for _, best in searches]
    for name in columns[0] | columns[1]:
        table.add_row(name, *(column.get(name, "none sustained") for column in columns))
    limits = [
        f"{name}: limited by {cause}"
        for name, (probes, best) in zip(("1 token", streamed), searches, strict=True)
        if (cause := _cause(probes, best))
    ]
    return Group(table, "", *limits)


def _cells(best: CalibrationProbe | None) -> dict[str, str]:
    """Return the column of the best probe, or empty cells if no probe was sustained."""
    if best is None:
        return {}
    median_s, p99_s = best.ttft_excess_s
    return {
        "requests/s": f"{best.rate_rps:.0f}",
        "open streams": f"{best.open_streams:.0f}",
        "chunks/s": f"{best.chunks_per_s:.0f}",
        "lag p99": f"{best.health.p99_lag_s * 1e3:.1f} ms",
        "TTFT excess, median": f"{median_s * 1e3:.1f} ms",
        "TTFT excess, p99": f"{p99_s * 1e3:.1f} ms",
        "CPU": f"{best.health.cpu_share:.0%}",
        "stub server's CPU": f"{best.server_cpu_share:.0%}",
    }


def _cause(probes: Sequence[CalibrationProbe], best: CalibrationProbe | None) -> str:
    """Return why the lowest load above the best probe failed, or nothing without such a load."""
    above = [p for p in probes if p.reasons and (best is None or p.rate_rps > best.rate_rps)]
    return "; ".join(min(above, key=lambda p: p.rate_rps).reasons) if above else ""


@asynccontextmanager
async def run_stub_server(pace: TokenPace) -> AsyncGenerator[str, None]:
    """Run a stub server in a separate process, and yield its address."""
    options = ["--ttft-ms", str(pace.ttft_s * 1e3), "--itl-ms", str(pace.itl_s * 1e3)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "draftgate.loadgen.sending.stub_server", *options, stdout=PIPE
    )
    assert process.stdout is not None
    try:
        url = (await process.stdout.readline()).decode().strip()
        if not url:
            raise OSError("the stub server did not start")
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


def _best(probes: Sequence[CalibrationProbe]) -> CalibrationProbe | None:
    sustained = (probe for probe in probes if not probe.reasons)
    return max(sustained, key=lambda probe: probe.rate_rps, default=None)
