"""`/live`: samples of the node, values of the last minute, and the files of the page."""

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
from draftgate.gateway.telemetry.live import KEPT, MOST_KEPT, WINDOW_S, Live, Recent, percentiles
from draftgate.policies.types import WorkerLoad
from tests.gateway.harness import client, events, running, until

LOAD = WorkerLoad(3, 2, 6, 8, 0.2, 0.5, ("ngram",))


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def live_of(loads: Sequence[WorkerLoad | None], recent: Recent | None = None) -> Live:
    return Live(lambda: loads, recent or Recent(), lambda: 4, Clock())


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_nearest_ranks(values: list[float]) -> None:
    """Each percentile is a value of the list with at least its share at or below it."""
    found = percentiles(values)
    assert found is not None
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert value in values
        assert sum(one <= value for one in values) >= share * len(values)
        assert sum(one < value for one in values) < share * len(values)


def test_old_values_are_dropped() -> None:
    """After a minute there is no value rather than a zero."""
    clock = Clock()
    recent = Recent(clock)
    recent.add_ttft(0.5)
    recent.add_ended(0.01, 10, SpeculationOutcome(2, 6, 4))
    assert recent.ttft_s().p99 == 0.5
    assert recent.chosen_k() == 1.0  # 6 drafted in 10 - 4 steps
    clock.now_s = WINDOW_S + 0.1
    assert recent.ttft_s() is recent.tpot_s() is recent.chosen_k() is None


def test_number_of_kept_values_is_bounded() -> None:
    """The latest values are kept."""
    recent = Recent(Clock())
    for value in range(3 * MOST_KEPT):
        recent.add_ttft(value)
    assert recent.ttft_s().p50 == 2 * MOST_KEPT + MOST_KEPT // 2 - 1


async def test_counts_are_summed_and_prices_averaged_over_workers() -> None:
    """Failed workers are left out."""
    other = WorkerLoad(1, 0, 2, 8, 0.4, 0.7, ())
    live = live_of([LOAD, None, other])
    live.take()
    _, (data,) = await live.after(0)
    sample = json.loads(data)
    assert (sample["running"], sample["waiting"], sample["queued"]) == (4, 2, 4)
    assert sample["price"] == pytest.approx(0.3)
    assert sample["acceptance"] == pytest.approx(0.6)
    assert sample["kv_usage"] == 0.5
    assert sample["workers"] == 2


async def test_rates_are_over_the_last_seconds() -> None:
    """Tokens and requests count over the last five samples."""
    clock, recent = Clock(), Recent()
    live = Live(lambda: [LOAD], recent, now_s=clock)
    for second in range(8):
        clock.now_s = float(second)
        recent.tokens += 10
        recent.add_ended(None, 10, SpeculationOutcome())
        live.take()
    _, samples = await live.after(0)
    assert [json.loads(data)["tokens_per_s"] for data in samples[-3:]] == [10.0] * 3
    assert json.loads(samples[-1])["requests_per_s"] == 1.0


async def test_reader_gets_kept_samples_then_each_new_one() -> None:
    """No sample is sent twice; a reader that fell behind gets those still kept."""
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
    """Waiting readers get an empty list."""
    live = live_of([LOAD])
    waiting = asyncio.ensure_future(live.after(0))
    await asyncio.sleep(0)
    live.close()
    assert await waiting == (0, [])


async def test_no_sample_is_taken_without_a_worker() -> None:
    """This holds for a node that loads, and for one whose workers have failed."""
    live = live_of([None])
    live.take()
    live.close()
    assert await live.after(0) == (0, [])


@pytest.mark.parametrize(("interval", "expected"), [(1, 4), (2, 2)])
async def test_stream_begins_with_the_kept_samples(interval: int, expected: int) -> None:
    """With an interval, only every Nth of them is sent."""
    async with running() as where, client(where) as http:
        live = where.node.live
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
    """The stream of samples ends in order."""
    async with running() as where, client(where) as http:
        request = http.build_request("GET", "/live")
        response = await http.send(request, stream=True)
        reading = asyncio.ensure_future(response.aread())
        where.node.live.close()
        await reading
    assert response.status_code == 200


@pytest.mark.parametrize("interval", ["0", "61", "x", "-1", "1.5", "9999999999"])
async def test_invalid_interval_is_refused_and_named(
    http: httpx.AsyncClient, interval: str
) -> None:
    """The error names the parameter."""
    response = await http.get("/live", params={"interval": interval})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "interval"


FILES = {path.name: path.read_bytes() for path in WEB.iterdir()}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg"}


@pytest.mark.parametrize("name", sorted(FILES))
async def test_page_files_have_type_policy_and_etag(http: httpx.AsyncClient, name: str) -> None:
    """The policy allows the node's own resources only."""
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
    """Names lead to the page's own files only."""
    assert (await http.get(f"/web/{name}")).status_code == 404


def test_page_has_no_foreign_addresses_and_no_inline_code() -> None:
    """This holds for every file of the page."""
    for path in WEB.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?:src|href|from|url\(|import\()\s*=?\s*[\"']?(?:https?:)?//", text)
        assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=|<style", text)
        assert "innerHTML" not in text


async def test_request_appears_in_the_next_sample(sim: Listening, http: httpx.AsyncClient) -> None:
    """The sample has its latencies, tokens and drafts."""
    live = sim.node.live
    live.take()
    answer = await http.post("/v1/completions", json={"prompt": "def f(", "max_tokens": 8})
    assert answer.status_code == 200
    live.take()
    _, samples = await live.after(0)
    sample = json.loads(samples[-1])
    assert sample["ttft_s"]["p50"] > 0
    assert sample["tpot_s"]["p99"] > 0
    assert sample["tokens_per_s"] > 0
    assert sample["chosen_k"] is not None
