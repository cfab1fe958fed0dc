"""Tests of the requests that connections read without aiohttp."""

from __future__ import annotations

import asyncio
import json
import re

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from draftgate.gateway.app import Listening
from draftgate.gateway.http.direct import HANDOVERS, MOST_HEADS, Expected, response_head
from tests.gateway.harness import client, running
from tests.gateway.test_connections import connect, is_closed, read_response

PATH = "/v1/completions"
BODY = json.dumps({"prompt": "x", "max_tokens": 1, "seed": 1}).encode()
MOST_BYTES = 1 << 16


def request(*headers: str, body: bytes = BODY, path: str = PATH) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join((*lines, "\r\n")).encode() + body


def chunked(body: bytes = BODY) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


async def handovers(gateway: Listening) -> dict[str, float]:
    """Return the number of handovers to aiohttp by reason."""
    async with client(gateway) as http:
        page = (await http.get("/metrics")).text
    found = re.findall(
        r"^draftgate_http_handovers_total\{.*reason=\"(\w+)\".*\} (\S+)$", page, re.MULTILINE
    )
    return {reason: float(value) for reason, value in found if float(value)}


# --- heads ----------------------------------------------------------------------------------------

TOKENS = st.text("abcXYZ-_!019", min_size=1, max_size=8)
VALUES = st.text(' \tabc,;="é0', max_size=12)
LINES = st.lists(st.tuples(TOKENS, VALUES), max_size=6)
ODD_LINES = st.sampled_from(
    [
        "Content-Length: 3",
        "content-length:2",
        "Content-Length: +3",
        "Content-Length: 3, 3",
        "CONTENT-LENGTH : 3",
        "Transfer-Encoding: chunked",
        "Host: other",
        "Host:",
        "no colon",
        " folded",
        "x: a\nContent-Length: 9",
        "x: a\rb",
        "x: \0",
    ]
)


@given(
    lines=LINES, odd=st.lists(ODD_LINES, max_size=2), length=st.integers(0, 99), again=st.booleans()
)
def test_accepted_heads_mean_what_another_parser_reads(
    lines: list[tuple[str, str]], odd: list[str], length: int, again: bool
) -> None:
    """A head that is accepted, for the first time or from memory, has the path, headers and length
    that h11 reads."""
    expected = Expected([PATH], MOST_BYTES)
    texts = [*(f"{name}: {value}" for name, value in lines), *odd]
    for size in (length, 99 - length) if again else (length,):
        first = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {size}\r\n"
        data = (first + "".join(f"{text}\r\n" for text in texts) + "\r\n").encode()
        found = expected.head(data)
        if not isinstance(found, tuple):
            continue
        head, end, body_bytes = found
        judge = h11.Connection(h11.SERVER)
        judge.receive_data(data)
        event = judge.next_event()
        assert isinstance(event, h11.Request)
        assert (event.target, end) == (PATH.encode(), len(data))
        sent = sorted(
            (name.lower().encode(), value.encode()) for name, value in head.headers.items()
        )
        read = [(name, value) for name, value in event.headers if name != b"content-length"]
        assert sorted(read) == [pair for pair in sent if pair[0] != b"content-length"] or again
        assert [value for name, value in event.headers if name == b"content-length"] == [
            str(body_bytes).encode()
        ]


def test_known_heads_are_bounded() -> None:
    """Heads that never repeat need bounded memory, and do not change what is read."""
    expected = Expected([PATH], MOST_BYTES)
    for number in range(3 * MOST_HEADS):
        found = expected.head(request(f"x-request-id: {number}"))
        assert isinstance(found, tuple)
        assert found[0].headers["x-request-id"] == str(number)
    assert len(expected._heads) <= MOST_HEADS


@pytest.mark.parametrize("line", ["a\r\nSet-Cookie: x", "a\nb", "a\rb"])
def test_headers_of_responses_are_single_lines(line: str) -> None:
    """A header of an upstream cannot begin another header of the response."""
    with pytest.raises(ValueError, match="end of a line"):
        response_head(200, CIMultiDict({"x": line}))


# --- connections ----------------------------------------------------------------------------------


async def test_ways_alternate_on_one_connection(sim: Listening) -> None:
    """Direct requests and those that aiohttp reads follow each other on one connection, in any
    order, and have the same responses."""
    reader, writer = await connect(sim)
    health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    replies = []
    for sent in (health, request(), chunked(), request(), health, request(), chunked()):
        writer.write(sent)
        status, headers, body = await read_response(reader)
        assert status == 200
        if sent is not health:
            reply = json.loads(body)
            replies.append((sorted(headers), sorted(reply), reply["choices"]))
    writer.close()
    assert all(reply == replies[0] for reply in replies)
    assert await handovers(sim) == {"transfer_encoding": 2}


async def test_many_pipelined_errors_do_not_begin_in_each_other(sim: Listening) -> None:
    """Requests that end in the call that delivers them are answered in order, however many."""
    reader, writer = await connect(sim)
    sent = [request(f"X-Request-ID: r-{number}", body=b"[") for number in range(1500)]
    writer.write(b"".join([*sent, request("X-Request-ID: last")]))
    for number in range(1500):
        status, headers, _ = await read_response(reader)
        assert (status, headers["x-request-id"]) == (400, f"r-{number}")
    status, headers, _ = await read_response(reader)
    assert (status, headers["x-request-id"]) == (200, "last")
    writer.close()


@pytest.mark.parametrize("together", [True, False])
async def test_pipelined_requests_get_their_responses_in_order(
    sim: Listening, together: bool
) -> None:
    """Requests that arrive before the response to an earlier one are answered in order."""
    wanted = [{"prompt": "x " * count, "max_tokens": 1} for count in range(1, 6)]
    sent = [request(body=json.dumps(body).encode()) for body in wanted]
    sent[2] = chunked(json.dumps(wanted[2]).encode())
    reader, writer = await connect(sim)
    for part in [b"".join(sent)] if together else sent:
        writer.write(part)
        await asyncio.sleep(0)
    prompts = [json.loads((await read_response(reader))[2])["usage"]["prompt_tokens"] for _ in sent]
    writer.close()
    assert prompts == sorted(prompts)
    assert len(set(prompts)) == len(prompts)


async def test_requests_arrive_in_any_parts(sim: Listening) -> None:
    """The boundaries of packets do not change the response."""
    data = request("Accept: */*")
    reader, writer = await connect(sim)
    choices = []
    for cut in range(1, len(data), 7):
        writer.write(data[:cut])
        await asyncio.sleep(0.001)
        writer.write(data[cut:])
        status, _, body = await read_response(reader)
        assert status == 200
        choices.append(json.loads(body)["choices"])
    writer.close()
    assert all(choice == choices[0] for choice in choices)


UNUSUAL = {
    "transfer_encoding": (chunked(), 200),
    "content_encoding": (request("Content-Encoding: br"), 415),
    "expect": (request("Expect: 200-ok"), 417),
    "upgrade": (request("Connection: upgrade", "Upgrade: other"), 200),
    "browser": (request("Origin: http://evil.example"), 403),
    "connection": (request("Connection: close"), 200),
    "head": (request("Content-Length: 12"), 400),
    "body": (request(body=b" " * (1 << 20) + BODY), 200),
}


@pytest.mark.parametrize("reason", UNUSUAL)
async def test_aiohttp_answers_unusual_requests(sim: Listening, reason: str) -> None:
    """Requests of direct endpoints in an unusual form are aiohttp's, and a metric counts why."""
    sent, expected = UNUSUAL[reason]
    reader, writer = await connect(sim)
    writer.write(sent)
    status, headers, _ = await read_response(reader)
    assert status == expected
    assert headers["x-request-id"]
    writer.close()
    assert await handovers(sim) == {reason: 1}
    assert reason in HANDOVERS


async def test_every_connection_header_counts(sim: Listening) -> None:
    """A second `Connection` header that closes the connection is obeyed."""
    reader, writer = await connect(sim)
    writer.write(request("Connection: keep-alive", "Connection: close"))
    status, headers, _ = await read_response(reader)
    assert (status, headers["connection"]) == (200, "close")
    assert await is_closed(reader)
    writer.close()


async def test_slow_requests_are_handed_over(
    sim: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request whose body takes long is aiohttp's, which limits the time for it."""
    monkeypatch.setattr("draftgate.gateway.http.connections.KEPT_S", 0.01)
    data = request()
    reader, writer = await connect(sim)
    writer.write(data[:-3])
    while await handovers(sim) != {"slow": 1}:  # noqa: ASYNC110 - the test has no event to wait for
        await asyncio.sleep(0.01)
    writer.write(data[-3:])
    assert (await read_response(reader))[0] == 200
    writer.write(data)
    assert (await read_response(reader))[0] == 200
    writer.close()


async def test_refused_requests_do_not_end_the_connection(sim: Listening) -> None:
    """Errors of the handlers leave the connection open, as with aiohttp."""
    reader, writer = await connect(sim)
    for body, expected in ((b"{", 400), (BODY, 200), (b'{"prompt": 3.5}', 400), (BODY, 200)):
        writer.write(request(body=body))
        status, headers, _ = await read_response(reader)
        assert status == expected
        assert headers["content-type"] == "application/json"
    writer.close()


async def test_idle_connection_closes_after_a_direct_request() -> None:
    """The time for the next request begins with the response to a direct request."""
    async with running(keepalive_timeout_s=0.1) as gateway:
        reader, writer = await connect(gateway)
        writer.write(request())
        assert (await read_response(reader))[0] == 200
        assert await is_closed(reader)
        writer.close()


async def test_query_reaches_the_upstream_and_the_handler(sim: Listening) -> None:
    """A query does not change the endpoint, so that beta versions of clients are direct, too."""
    reader, writer = await connect(sim)
    writer.write(request(path=f"{PATH}?beta=true"))
    assert (await read_response(reader))[0] == 200
    writer.close()
    assert await handovers(sim) == {}
