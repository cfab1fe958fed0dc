"""Tests of upstreams with different weights behind a gateway."""

from __future__ import annotations

import pytest

from draftgate.gateway.config import ConfigError, effective_config
from tests.gateway.harness import client, post_raw, until
from tests.gateway.upstreams import (
    ScriptedUpstream,
    forwarding,
    held,
    refusal,
    upstream,
    whole,
)

PATH = "/v1/completions"
BODY = {"model": "theirs", "prompt": "x"}


def weighing(server: ScriptedUpstream, weight: float) -> ScriptedUpstream:
    server.settings = {"weight": weight}
    return server


async def test_requests_are_divided_by_weight() -> None:
    """Upstreams get requests in proportion to their weights, and a spare one gets none."""
    async with (
        upstream(whole) as a,
        upstream(whole) as b,
        upstream(whole) as spare,
        forwarding(weighing(a, 3), weighing(b, 1), weighing(spare, 0)) as gateway,
        client(gateway) as http,
    ):
        for _ in range(12):
            assert (await http.post(PATH, json=BODY)).status_code == 200
        assert [len(one.requests) for one in (a, b, spare)] == [9, 3, 0]


@pytest.mark.parametrize("status", [429, 503])
async def test_spare_upstream_gets_what_others_refuse(status: int) -> None:
    """A spare upstream gets the retry, and all requests during the pause of the others."""
    async with (
        upstream(refusal(status, Retry_After="30")) as a,
        upstream(whole) as spare,
        forwarding(a, weighing(spare, 0)) as gateway,
        client(gateway) as http,
    ):
        for _ in range(4):
            assert (await http.post(PATH, json=BODY)).status_code == 200
        assert [len(one.requests) for one in (a, spare)] == [1, 4]


async def test_spare_upstream_gets_what_exceeds_the_capacity() -> None:
    """A request goes to a spare upstream instead of waiting for the others."""
    async with (
        upstream(held()) as a,
        upstream(whole) as spare,
        forwarding(a, weighing(spare, 0), max_sequences=1) as gateway,
        client(gateway) as http,
    ):
        _, writer = await post_raw(gateway, PATH, BODY)
        await until(lambda: len(a.requests) == 1)
        assert (await http.post(PATH, json=BODY)).status_code == 200
        assert len(spare.requests) == 1
        writer.close()


async def test_upstreams_are_all_spare() -> None:
    """Spare upstreams without any other one share the requests."""
    async with (
        upstream(whole) as a,
        upstream(whole) as b,
        forwarding(weighing(a, 0), weighing(b, 0)) as gateway,
        client(gateway) as http,
    ):
        for _ in range(6):
            assert (await http.post(PATH, json=BODY)).status_code == 200
        assert [len(one.requests) for one in (a, b)] == [3, 3]


async def test_session_stays_although_it_is_the_turn_of_another() -> None:
    """The requests of a session stay on its upstream, and other requests take turns."""
    async with (
        upstream(whole) as a,
        upstream(whole) as b,
        forwarding(weighing(a, 1), weighing(b, 2)) as gateway,
        client(gateway) as http,
    ):
        long = {**BODY, "prompt": "x" * 4000}
        for _ in range(6):
            headers = {"x-session-id": "agent"}
            assert (await http.post(PATH, json=long, headers=headers)).status_code == 200
        assert sorted(len(one.requests) for one in (a, b)) == [0, 6]


@pytest.mark.parametrize("weight", [-1, "heavy"])
def test_invalid_weight_is_refused(weight: object) -> None:
    """The error of an invalid weight names the setting and the field."""
    with pytest.raises(ConfigError, match=r"--upstream: expected .*weight"):
        effective_config({"upstream": [{"url": "http://a", "weight": weight}]}, {})
