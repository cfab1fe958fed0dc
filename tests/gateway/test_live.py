"""`/live`: samples of the node, figures of the last minute, and the page's files."""

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
    """Seconds, as a test says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def live_of(loads: Sequence[WorkerLoad | None], recent: Recent | None = None) -> Live:
    return Live(lambda: loads, recent or Recent(), lambda: 4, Clock())


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_nearest_ranks(values: list[float]) -> None:
    """Each is a value of the list, with at least its share of the values at or below it."""
    found = percentiles(values)
    assert found is not None
    for share, value in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert value in values
        assert sum(one <= value for one in values) >= share * len(values)
        assert sum(one < value for one in values) < share * len(values)


def test_what_is_older_than_the_window_is_forgotten() -> None:
    """A figure counts for a minute, and then there is none rather than a zero."""
    clock = Clock()
    recent = Recent(clock)
    recent.add_ttft(0.5)
    recent.add_ended(0.01, 10, SpeculationOutcome(2, 6, 4))
    assert recent.ttft_s().p99 == 0.5
    assert recent.chosen_k() == 1.0  # 6 drafted in 10 - 4 steps
    clock.now_s = WINDOW_S + 0.1
    assert recent.ttft_s() is recent.tpot_s() is recent.chosen_k() is None


def test_a_busy_minute_takes_bounded_memory() -> None:
    """Of more values than are kept, the latest are."""
    recent = Recent(Clock())
    for value in range(3 * MOST_KEPT):
        recent.add_ttft(value)
    assert recent.ttft_s().p50 == 2 * MOST_KEPT + MOST_KEPT // 2 - 1


async def test_workers_are_summed_or_averaged() -> None:
    """Counts and blocks of all workers that are well add up; price and acceptance are means."""
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


async def test_rates_are_of_the_last_seconds() -> None:
    """Tokens and requests count from five samples ago on."""
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


async def test_a_reader_gets_what_is_kept_and_then_each_new_sample() -> None:
    """Nothing comes twice; a reader that fell far behind gets what is still there."""
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
    """Whoever waits is told that nothing follows."""
    live = live_of([LOAD])
    waiting = asyncio.ensure_future(live.after(0))
    await asyncio.sleep(0)
    live.close()
    assert await waiting == (0, [])


async def test_without_a_worker_there_is_no_sample() -> None:
    """A node that loads, or whose workers are all broken, has no figures to draw."""
    live = live_of([None])
    live.take()
    live.close()
    assert await live.after(0) == (0, [])


@pytest.mark.parametrize(("interval", "expected"), [(1, 4), (2, 2)])
async def test_the_stream_begins_with_the_kept_samples(interval: int, expected: int) -> None:
    """A page that opens has lines at once; with an interval, one of so many samples."""
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


async def test_an_open_page_does_not_hold_up_the_stop() -> None:
    """When the node stops, the stream of samples ends in order, not by being cut."""
    async with running() as where, client(where) as http:
        request = http.build_request("GET", "/live")
        response = await http.send(request, stream=True)
        reading = asyncio.ensure_future(response.aread())
        where.node.live.close()
        await reading
    assert response.status_code == 200


@pytest.mark.parametrize("interval", ["0", "61", "x", "-1", "1.5", "9999999999"])
async def test_a_bad_interval_is_refused(http: httpx.AsyncClient, interval: str) -> None:
    """The parameter is named."""
    response = await http.get("/live", params={"interval": interval})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "interval"


FILES = {path.name: path.read_bytes() for path in WEB.iterdir()}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg"}


@pytest.mark.parametrize("name", sorted(FILES))
async def test_every_file_of_the_page_is_served(http: httpx.AsyncClient, name: str) -> None:
    """With its type, a policy that allows our own only, and a tag that saves the second copy."""
    url = "/" if name == "index.html" else f"/web/{name}"
    response = await http.get(url)
    assert response.status_code == 200
    assert response.content == FILES[name]
    assert response.headers["content-type"].startswith(TYPES[Path(name).suffix])
    assert "default-src 'self'" in response.headers["content-security-policy"]
    again = await http.get(url, headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["missing.js", "..%2Fapp.py", "%2e%2e%2fapp.py", "app.py", "."])
async def test_nothing_else_is_served(http: httpx.AsyncClient, name: str) -> None:
    """Names lead to the page's own files and nowhere else."""
    assert (await http.get(f"/web/{name}")).status_code == 404


def test_the_page_names_nothing_beyond_its_node() -> None:
    """No file holds an address of another host, an inline script, or an inline style."""
    for path in WEB.iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?:src|href|from|url\(|import\()\s*=?\s*[\"']?(?:https?:)?//", text)
        assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=|<style", text)
        assert "innerHTML" not in text


async def test_a_request_moves_the_figures(sim: Listening, http: httpx.AsyncClient) -> None:
    """After a request the next sample has its times, its tokens and its drafts."""
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
