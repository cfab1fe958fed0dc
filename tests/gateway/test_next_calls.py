"""Tests of requests that announce the next call of their session."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.harness import client
from tests.gateway.upstreams import forwarding, upstream, whole

PATH = "/v1/completions"
BODY = {"model": "theirs", "prompt": "x"}


def headers(session: str, seconds: Any = 30) -> dict[str, str]:
    return {"x-session-id": session, "x-next-call-s": str(seconds)}


async def test_new_requests_leave_the_upstream_that_expects_calls() -> None:
    """While a session is away, requests without a session go to the other upstream, and the
    session returns to its own."""
    async with (
        upstream(whole) as a,
        upstream(whole) as b,
        forwarding(a, b) as gateway,
        client(gateway) as http,
    ):
        assert (await http.post(PATH, json=BODY, headers=headers("s"))).status_code == 200
        first, other = (a, b) if a.requests else (b, a)
        for _ in range(4):
            assert (await http.post(PATH, json=BODY)).status_code == 200
        assert (len(first.requests), len(other.requests)) == (1, 4)
        for name, value in headers("s").items():  # the upstream may be a Draftgate
            assert first.requests[0].headers[name] == value
        again = {"x-session-id": "s"}
        assert (await http.post(PATH, json=BODY, headers=again)).status_code == 200
        assert len(first.requests) == 2
        for _ in range(4):  # in turns, because nothing is announced any more
            assert (await http.post(PATH, json=BODY)).status_code == 200
        assert (len(first.requests), len(other.requests)) == (4, 6)


async def test_gateways_agree_on_the_upstream_of_a_new_session() -> None:
    """Two gateways with the same upstreams send the first request of a session to the same one."""
    async with (
        upstream(whole) as a,
        upstream(whole) as b,
        forwarding(a, b) as one,
        forwarding(a, b) as two,
        client(one) as http_one,
        client(two) as http_two,
    ):
        assert (await http_one.post(PATH, json=BODY)).status_code == 200  # its turns differ
        for number in range(8):
            sent = {"x-session-id": f"s-{number}"}
            before = len(a.requests), len(b.requests)
            for http in (http_one, http_two):
                assert (await http.post(PATH, json=BODY, headers=sent)).status_code == 200
            after = len(a.requests), len(b.requests)
            assert {now - then for now, then in zip(after, before, strict=True)} == {0, 2}


@pytest.mark.parametrize("text", ["0", "-1", "soon", "3601", ""])
async def test_time_of_the_next_call_must_be_valid(text: str) -> None:
    """A time that is not a positive number of at most an hour is an error of the client."""
    async with upstream(whole) as a, forwarding(a) as gateway, client(gateway) as http:
        response = await http.post(PATH, json=BODY, headers={"x-next-call-s": text})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "x-next-call-s"
        assert "at most 3600" in error["message"]
