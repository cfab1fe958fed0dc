"""Tests of routing by what upstreams have cached: events, placements and sessions."""

from __future__ import annotations

import re
from typing import Any

import pytest
from aiohttp import web

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch.admission import Entry
from draftgate.policies.capacity import CapacityNeed
from draftgate.policies.types import ServiceLevel
from tests.gateway.event_publisher import CachingServer
from tests.gateway.harness import client, is_idle, post_raw, until
from tests.gateway.upstreams import (
    Clock,
    ScriptedUpstream,
    forwarding,
    held,
    refusal,
    upstream,
    whole,
)

TOKENIZER = {"tokenizer": str(SHIPPED_MODEL)}
PATH = "/v1/completions"
LENGTH = 200
FIRST, SECOND = ([start + number % 50 for number in range(LENGTH)] for start in (1, 100))


async def send(gateway: Listening, path: str = PATH, **request: Any) -> int:
    headers = request.pop("headers", {})
    async with client(gateway) as http:
        response = await http.post(path, json=request, headers=headers)
        return response.status_code


def report(gateway: Listening, index: int, server: CachingServer) -> None:
    """Deliver the events of a server, as its subscription does."""
    log = gateway.node.fleet.workers[index].backend._cache
    assert log.receive(*server.publish())


def engine() -> CachingServer:
    return CachingServer(block_tokens=16, most_blocks=1000)


def counts(*upstreams: ScriptedUpstream) -> list[int]:
    """Return the number of requests that each upstream got since the last call."""
    found = [len(one.requests) for one in upstreams]
    for one in upstreams:
        one.requests.clear()
    return found


async def test_prompt_goes_to_the_upstream_that_has_it_cached() -> None:
    """The events of upstreams decide, whatever was sent to them before."""
    async with upstream(whole) as a, upstream(whole) as b:
        a.settings = b.settings = TOKENIZER
        async with forwarding(a, b) as gateway:
            first, second = engine(), engine()
            first.compute(tuple(FIRST))
            second.compute(tuple(SECOND))
            for place, server in enumerate((first, second)):
                report(gateway, place, server)
            for _ in range(4):
                await send(gateway, prompt=FIRST)
                await send(gateway, prompt=[*SECOND, 7])
            assert counts(a, b) == [4, 4]
            assert [len(set(one.bodies)) for one in (a, b)] == [1, 1]
            # The servers exchange what they hold, although the placements say otherwise.
            for place, (server, prompt) in enumerate(((first, SECOND), (second, FIRST))):
                server.clear()
                server.compute(tuple(prompt))
                report(gateway, place, server)
            for _ in range(4):
                await send(gateway, prompt=FIRST)
            assert counts(a, b) == [0, 4]


async def test_predicted_tokens_are_counted() -> None:
    """The metric counts the tokens that the chosen upstream had cached by its events."""
    async with upstream(whole) as a, upstream(whole) as b:
        a.settings = b.settings = TOKENIZER
        async with forwarding(a, b) as gateway:
            server = engine()
            server.compute(tuple(FIRST))
            report(gateway, 1, server)
            await send(gateway, prompt=FIRST)
            await gateway.node.fleet.workers[1].backend.poll()
            async with client(gateway) as http:
                page = (await http.get("/metrics")).text
            assert re.search(r"draftgate_predicted_cached_tokens_total\{.*\} 192\.0", page)
            assert re.search(r"draftgate_upstream_cached_blocks\{.*\} 12\.0", page)


async def test_placements_decide_without_current_events() -> None:
    """While events may be missing, the gateway counts what it has sent to each upstream."""
    async with upstream(whole) as a, upstream(whole) as b:
        a.settings = b.settings = TOKENIZER
        async with forwarding(a, b) as gateway:
            server = engine()
            server.compute(tuple(SECOND))
            report(gateway, 0, server)
            gateway.node.fleet.workers[0].backend._cache.lose()
            await send(gateway, prompt=FIRST)
            first = counts(a, b)
            await send(gateway, prompt=[9, *FIRST])  # takes its turn at the other one
            counts(a, b)
            for _ in range(4):
                await send(gateway, prompt=[*FIRST, 7])
            assert counts(a, b) == [4 * count for count in first]


async def test_prompt_of_another_tokenizer_is_not_looked_up(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """An upstream with another tokenizer has other tokens, so its events say nothing."""
    folder = tmp_path_factory.mktemp("model")
    for path in SHIPPED_MODEL.iterdir():
        (folder / path.name).symlink_to(path)
    async with upstream(whole) as a, upstream(whole) as b:
        a.settings, b.settings = TOKENIZER, {"tokenizer": str(folder)}
        async with forwarding(a, b) as gateway:
            server = engine()
            server.compute(tuple(FIRST))
            report(gateway, 1, server)
            await send(gateway, prompt=FIRST)
            await send(gateway, prompt=FIRST[1:])
            assert counts(a, b) == [1, 1]


async def test_exact_tokens_count_for_admission() -> None:
    """A prompt whose tokens are known counts with them, not with the size of its body."""
    async with upstream(held()) as a, upstream(held()) as b:
        a.settings = b.settings = TOKENIZER
        async with forwarding(a, b) as gateway:
            _, writer = await post_raw(gateway, PATH, {"prompt": FIRST, "max_tokens": 3})
            await until(lambda: bool(a.requests or b.requests))
            tokens = [worker.reserved_tokens for worker in gateway.node.fleet.workers]
            assert sorted(tokens) == [0, LENGTH + 3]
            writer.close()
            await until(lambda: is_idle(gateway.node))


def stated(session: str) -> dict[str, Any]:
    return {"headers": {"x-session-id": session}}


FORMS = {
    "header": lambda name: (PATH, {"prompt": "x" * 400, **stated(name)}),
    "cache key": lambda name: (PATH, {"prompt": "x" * 400, "prompt_cache_key": name}),
    "conversation": lambda name: (
        "/v1/messages",
        {"max_tokens": 5, "messages": [{"role": "user", "content": name + "x" * 400}]},
    ),
}


async def usage(request: web.Request) -> web.StreamResponse:
    """Respond with the tokens of a long prompt."""
    body = (
        b'{"id": "c", "choices": [{"text": "hi", "finish_reason": "stop"}], '
        b'"usage": {"prompt_tokens": 100, "completion_tokens": 2}}'
    )
    return web.Response(body=body, content_type="application/json")


@pytest.mark.parametrize("form", list(FORMS))
async def test_session_stays_on_its_upstream(form: str) -> None:
    """All requests of a session go to one upstream, and sessions are spread over both."""
    async with upstream(usage) as a, upstream(usage) as b, forwarding(a, b) as gateway:
        places = set[tuple[int, ...]]()
        for number in range(24):
            path, body = FORMS[form](f"session {number}")
            for _ in range(3):
                assert await send(gateway, path, **body) == 200
            places.add(tuple(counts(a, b)))
        assert places == {(0, 3), (3, 0)}


async def test_session_leaves_a_busy_upstream() -> None:
    """A session moves when the wait at its upstream costs more than its cached prefix."""
    async with upstream(usage) as a, upstream(usage) as b, forwarding(a, b) as gateway:
        body = {"prompt": "x" * 400, "max_tokens": 50}
        await send(gateway, **body, **stated("s"))
        first, other = (a, b) if a.requests else (b, a)
        counts(a, b)
        a.handler = b.handler = held()
        writers, places = [], []
        for number in range(1, 8):
            _, writer = await post_raw(gateway, PATH, body, "x-session-id: s\r\n")
            writers.append(writer)
            await until(lambda: len(a.requests) + len(b.requests) == number)  # noqa: B023
            places.append((len(first.requests), len(other.requests)))
        assert places[0] == (1, 0)
        assert places[-1][1] > 0
        for writer in writers:
            writer.close()
        await until(lambda: is_idle(gateway.node))


async def test_session_moves_when_its_upstream_is_lost() -> None:
    """A session continues on another upstream, and stays there when the first one returns."""
    clock = Clock()
    async with (
        upstream(usage) as a,
        upstream(usage) as b,
        forwarding(a, b, clock=clock) as gateway,
    ):
        body = {"prompt": "x" * 400, **stated("s")}
        await send(gateway, **body)
        first, other = (a, b) if a.requests else (b, a)
        counts(a, b)
        first.handler = refusal(503, b"{}", Retry_After="5")
        for _ in range(3):
            assert await send(gateway, **dict(body)) == 200
        assert counts(first, other) == [1, 3]
        first.handler = usage
        clock.now_s += 6
        for _ in range(5):
            await send(gateway, **dict(body))
        assert counts(first, other) == [0, 5]


@pytest.mark.parametrize("name", ["", "x" * 257])
async def test_invalid_session_is_refused(name: str) -> None:
    """A session id without characters, or with too many, is an error of the client."""
    async with upstream(usage) as a, upstream(usage) as b, forwarding(a, b) as gateway:
        assert await send(gateway, prompt="x", **stated(name)) == 400


async def test_blocks_of_the_history_are_those_of_the_prompt() -> None:
    """The history counts the memory of an upstream in its own blocks, whatever the upstream's."""
    page = (
        "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
        'vllm:cache_config_info{block_size="128",num_gpu_blocks="2"} 1\n'
    )
    async with upstream(whole) as a, upstream(whole) as b:
        a.settings = b.settings = TOKENIZER
        a.metrics = b.metrics = page
        async with forwarding(a, b) as gateway:
            history = gateway.node.models[0].forwarder.queue.router.history
            found = []
            for start in range(8):
                await send(gateway, prompt=[start + token for token in FIRST])
                found.append(len(history))
            # An entry has eight blocks of 16 tokens, so 256 tokens are two entries.
            assert found == [1, 2, 3, 4, 4, 4, 4, 4]


async def test_expected_output_replaces_the_usual_share() -> None:
    """The number that a client expects decides its place and its cost, within `max_tokens`."""
    async with upstream(usage) as a, forwarding(a) as gateway:
        admission = gateway.node.models[0].forwarder.admission
        for expected, tokens in ((None, 400.0), (7, 7.0), (10_000, 400.0)):
            service = ServiceLevel(expected_tokens=expected)
            entry = Entry("r", (CapacityNeed(1, 5, 405),), 400, service)
            view, _ = admission.outlook(entry)
            assert view.output_tokens == tokens


@pytest.mark.parametrize(("text", "status"), [("12", 200), ("-1", 400), ("many", 400)])
async def test_expected_output_must_be_a_number(text: str, status: int) -> None:
    """An expected output that is not a number of tokens is an error of the client."""
    async with upstream(usage) as a, forwarding(a) as gateway:
        headers = {"x-expected-output-tokens": text}
        assert await send(gateway, prompt="x", headers=headers) == status
