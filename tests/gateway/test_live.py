"""Tests of `/live`: samples of the node, values of the last minute and the files of the page."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.types import SpeculationOutcome
from draftgate.gateway.app import Listening
from draftgate.gateway.http.endpoints.page import WEB
from draftgate.gateway.telemetry.live import (
    KEPT,
    MOST_KEPT,
    WINDOW_S,
    ActivityMeter,
    Live,
    Recent,
    percentiles,
)
from draftgate.policies.types import WorkerLoad
from tests.gateway.harness import client, events, running, until

LOAD = WorkerLoad(3, 2, 6, 8, 0.2, 0.5, ("ngram",))


class Clock:
    """A clock that the test sets, in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def live_of(loads: Sequence[WorkerLoad | None], recent: Recent | None = None) -> Live:
    meter = ActivityMeter(recent or Recent(), lambda: 4)
    return Live(lambda: loads, lambda: [meter], Clock())


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_nearest_ranks(values: list[float]) -> None:
    """Each percentile is the smallest value of the list with at least its share at or below."""
    found = percentiles(values)
    assert found is not None
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert value in values
        assert sum(other <= value for other in values) >= share * len(values)
        assert sum(other < value for other in values) < share * len(values)


def test_old_values_are_dropped() -> None:
    """The window has no values, rather than zeros, a minute after the last value."""
    clock = Clock()
    recent = Recent(clock)
    recent.add_ttft(0.5)
    recent.add_ended(0.01, 10, SpeculationOutcome(2, 6, 4))
    assert recent.ttft_s() == [0.5]
    assert recent.steps() == (6, 6)  # 6 drafted in 10 - 4 steps
    clock.now_s = WINDOW_S + 0.1
    assert recent.ttft_s() == recent.tpot_s() == []
    assert recent.steps() == (0, 0)


def test_number_of_kept_values_is_bounded() -> None:
    """The window keeps only the latest `MOST_KEPT` values."""
    recent = Recent(Clock())
    for value in range(3 * MOST_KEPT):
        recent.add_ttft(value)
    assert recent.ttft_s() == list(range(2 * MOST_KEPT, 3 * MOST_KEPT))


async def test_counts_are_summed_and_prices_averaged_over_workers() -> None:
    """A sample contains the summed counts and the mean prices of all working workers."""
    other = WorkerLoad(1, 0, 2, 8, 0.4, 0.7, ("ngram",))
    live = live_of([LOAD, None, other])
    live.take()
    _, (data,) = await live.after(0)
    sample = json.loads(data)
    assert (sample["running"], sample["waiting"], sample["queued"]) == (4, 2, 4)
    assert sample["price"] == pytest.approx(0.3)
    assert sample["acceptance"] == pytest.approx(0.6)
    assert sample["kv_usage"] == 0.5
    assert sample["workers"] == 2


PLAIN = WorkerLoad(1, 0, 0, 0, 0.0, 0.0, ())
"""The load of a server without metrics."""


async def test_figures_without_reports_are_unknown() -> None:
    """A sample has neither KV usage nor figures of drafts if no worker reports them."""
    recent = Recent()
    recent.add_ended(0.01, 10, SpeculationOutcome())
    live = live_of([PLAIN], recent)
    live.take()
    _, (data,) = await live.after(0)
    sample = json.loads(data)
    unknown = {name for name, value in sample.items() if value is None}
    assert unknown == {"kv_usage", "price", "acceptance", "chosen_k", "ttft_s"}
    assert sample["running"] == 1


async def test_workers_without_drafts_do_not_change_the_price() -> None:
    """The price and the acceptance are means over the workers that draft."""
    live = live_of([LOAD, PLAIN])
    live.take()
    _, (data,) = await live.after(0)
    sample = json.loads(data)
    assert (sample["price"], sample["acceptance"]) == (LOAD.price, LOAD.acceptance)


async def test_rates_are_over_the_last_seconds() -> None:
    """The rates of tokens and requests cover the last five samples."""
    clock, recent = Clock(), Recent()
    meter = ActivityMeter(recent)
    live = Live(lambda: [LOAD], lambda: [meter], clock)
    for second in range(8):
        clock.now_s = float(second)
        recent.tokens += 10
        recent.add_ended(None, 10, SpeculationOutcome())
        live.take()
    _, samples = await live.after(0)
    assert [json.loads(data)["tokens_per_s"] for data in samples[-3:]] == [10.0] * 3
    assert json.loads(samples[-1])["requests_per_s"] == 1.0


async def test_reader_gets_kept_samples_then_each_new_sample() -> None:
    """A reader receives the kept samples first and then each new sample once."""
    live = live_of([LOAD])
    for _ in range(KEPT + 5):
        live.take()
    number, found = await live.after(0)
    assert (number, len(found)) == (KEPT + 5, KEPT)
    waiting = asyncio.ensure_future(live.after(number))
    await asyncio.sleep(0)
    assert not waiting.done()
    live.take()
    assert (await waiting)[0] == number + 1
    assert len(waiting.result()[1]) == 1


async def test_readers_end_with_the_node() -> None:
    """A waiting reader gets an empty list when the node closes."""
    live = live_of([LOAD])
    waiting = asyncio.ensure_future(live.after(0))
    await asyncio.sleep(0)
    live.close()
    assert await waiting == (0, [])


async def test_no_sample_is_taken_without_a_worker() -> None:
    """A node without a working worker takes no samples."""
    live = live_of([None])
    live.take()
    live.close()
    assert await live.after(0) == (0, [])


@pytest.mark.parametrize(("interval", "expected"), [(1, 4), (2, 2)])
async def test_stream_begins_with_the_kept_samples(interval: int, expected: int) -> None:
    """The stream of `/live` begins with every Nth of the kept samples."""
    async with running() as gateway, client(gateway) as http:
        live = gateway.node.live
        await until(lambda: live._taken >= 1)
        while live._taken < 4:
            live.take()
        async with http.stream("GET", f"/live?interval={interval}") as response:
            text = ""
            async for piece in response.aiter_text():
                text += piece
                if len(events(text)) >= expected and text.endswith("\n\n"):
                    break
    samples = events(text)
    assert len(samples) >= expected
    assert samples == sorted(samples, key=lambda sample: sample["at_s"])


async def test_open_page_does_not_delay_the_shutdown() -> None:
    """The stream of samples ends normally when the node closes."""
    async with running() as gateway, client(gateway) as http:
        request = http.build_request("GET", "/live")
        response = await http.send(request, stream=True)
        reading = asyncio.ensure_future(response.aread())
        gateway.node.live.close()
        await reading
    assert response.status_code == 200


@pytest.mark.parametrize("interval", ["0", "61", "x", "-1", "1.5", "9999999999"])
async def test_invalid_interval_is_rejected_and_named(
    http: httpx.AsyncClient, interval: str
) -> None:
    """The server rejects an invalid interval with 400 and names the parameter."""
    response = await http.get("/live", params={"interval": interval})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "interval"


FILES = {path.name: path.read_bytes() for path in WEB.iterdir()}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg"}


@pytest.mark.parametrize("name", sorted(FILES))
async def test_page_files_have_type_policy_and_etag(http: httpx.AsyncClient, name: str) -> None:
    """The server sends each page file with its type, a content policy and an ETag."""
    url = "/" if name == "index.html" else f"/web/{name}"
    response = await http.get(url)
    assert response.status_code == 200
    assert response.content == FILES[name]
    assert response.headers["content-type"].startswith(TYPES[Path(name).suffix])
    assert "default-src 'self'" in response.headers["content-security-policy"]
    again = await http.get(url, headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["missing.js", "..%2Fapp.py", "%2e%2e%2fapp.py", "app.py", "."])
async def test_other_names_below_web_are_404(http: httpx.AsyncClient, name: str) -> None:
    """The server responds with 404 to every name below `/web/` that is not a page file."""
    assert (await http.get(f"/web/{name}")).status_code == 404


def test_page_has_no_foreign_addresses_and_no_inline_code() -> None:
    """No file of the pages loads from foreign addresses, or has inline scripts or styles. Links for
    the user may lead elsewhere."""
    for path in WEB.iterdir():
        text = path.read_text(encoding="utf-8").replace('<a href="https://', "<a ")
        assert not re.search(r"(?:src|href|from|url\(|import\()\s*=?\s*[\"']?(?:https?:)?//", text)
        assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=|<style", text)
        assert "innerHTML" not in text


async def test_request_appears_in_the_next_sample(sim: Listening, http: httpx.AsyncClient) -> None:
    """The next sample contains the latencies, tokens and drafts of a request."""
    node = sim.node
    node.take_sample()
    response = await http.post("/v1/completions", json={"prompt": "def f(", "max_tokens": 8})
    assert response.status_code == 200
    node.take_sample()
    _, samples = await node.live.after(0)
    sample = json.loads(samples[-1])
    assert sample["ttft_s"]["p50"] > 0
    assert sample["tpot_s"]["p99"] > 0
    assert sample["tokens_per_s"] > 0
    assert sample["chosen_k"] is not None
