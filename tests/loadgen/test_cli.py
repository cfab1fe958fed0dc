"""`python -m loadgen` against a small server in its own process' thread."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager

import pytest
from aiohttp import web
from typer.testing import CliRunner

from loadgen.cli import app
from loadgen.summary import distribution, percentile
from tests.loadgen.test_integrity import GOOD, application, streaming


@contextmanager
def serving(handler):
    """Serve in another thread, since the command runs its own event loop."""
    ready, stop = threading.Event(), asyncio.Event()
    address: list[tuple[str, asyncio.AbstractEventLoop]] = []

    async def main() -> None:
        runner = web.AppRunner(application(handler))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        address.append((url, asyncio.get_running_loop()))
        ready.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    ready.wait(10)
    url, loop = address[0]
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


def test_a_clean_run_prints_its_figures_and_writes_the_summary(tmp_path) -> None:
    """Exit code 0, a table with the drafts, and `summary/1` with null for what is unknown."""
    out = tmp_path / "summary.json"
    with serving(streaming(GOOD)) as url:
        options = ["--requests", "6", "--concurrency", "3", "--json", str(out)]
        result = CliRunner().invoke(app, [url, *options])
    assert result.exit_code == 0, result.output
    assert "6 of 6" in result.output
    assert "24 / 18 (75%)" in result.output
    summary = json.loads(out.read_text())
    assert (summary["requests"], summary["errors"]) == (6, {})
    assert summary["valid"] is summary["goodput_rps"] is summary["attainment"] is None
    assert summary["accepted_tokens_per_s"] > 0
    for name in ("ttft_s", "tpot_s", "latency_s"):
        assert set(summary[name]) == {"mean", "p50", "p90", "p99"}


def test_a_broken_stream_fails_the_run(tmp_path) -> None:
    """One stream without its end gives exit code 1, its cause, and no place among the completed."""
    seen = []

    async def handler(request):
        seen.append(1)
        return await streaming(GOOD[:-1] if len(seen) == 2 else GOOD)(request)

    out = tmp_path / "summary.json"
    with serving(handler) as url:
        result = CliRunner().invoke(app, [url, "--requests", "4", "--json", str(out)])
    assert result.exit_code == 1
    assert "3 of 4" in result.output
    assert "failed: no_done" in result.output
    assert json.loads(out.read_text())["errors"] == {"no_done": 1}


def test_no_server_is_explained() -> None:
    """Without a server the command says so in one line and exits with 2."""
    result = CliRunner().invoke(app, ["http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "cannot load" in result.output


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.0), (0.75, 2.5), (1.0, 3.0)])
def test_percentiles_interpolate(share: float, value: float) -> None:
    """A percentile lies between its neighbours; unknown values do not count."""
    assert percentile([1.0, 2.0, 3.0], share) == pytest.approx(value)
    assert distribution([None, 2.0])["p99"] == 2.0
    assert distribution([None]) is None
