"""Tests of upstreams that list different models."""

from __future__ import annotations

import logging

import pytest

from draftgate.gateway.app import StartError
from tests.gateway.harness import client
from tests.gateway.upstreams import ScriptedUpstream, forwarding, upstream, whole


async def probe_all(gateway) -> None:
    for worker in gateway.node.fleet.workers:
        await worker.backend.probe()


async def send(http, count: int = 6, **body: object) -> set[int]:
    found = [await http.post("/v1/completions", json={"prompt": "x", **body}) for _ in range(count)]
    return {response.status_code for response in found}


def sent(*upstreams: ScriptedUpstream) -> list[int]:
    return [len(one.requests) for one in upstreams]


@pytest.mark.parametrize(
    ("a_lists", "b_lists"),
    [(("a",), ("b",)), (("a", "lora"), ("a",)), (("a",), ("a", "b")), (("a", "b"), ("b", "c"))],
)
async def test_different_lists_at_start_are_refused(
    a_lists: tuple[str, ...], b_lists: tuple[str, ...]
) -> None:
    """The start fails with one line that has the addresses and the models of both upstreams."""
    async with upstream(whole) as a, upstream(whole) as b:
        a.models, b.models = a_lists, b_lists
        with pytest.raises(StartError) as caught:
            async with forwarding(a, b):
                pass
    message = str(caught.value)
    assert f"{a.url} lists {', '.join(a_lists)}; {b.url} lists {', '.join(b_lists)}" in message
    assert "\n" not in message


async def test_equal_lists_may_have_any_order() -> None:
    """Upstreams with the same models in another order serve together."""
    async with upstream(whole) as a, upstream(whole) as b:
        a.models, b.models = ("x", "y"), ("y", "x")
        async with forwarding(a, b) as gateway, client(gateway) as http:
            assert await send(http, model="y") == {200}
            assert sent(a, b) == [3, 3]


@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
async def test_upstream_that_comes_up_with_another_model_gets_no_requests(
    first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """`/ready` and `/workers` say why the upstream gets none, also if the other one fails."""
    caplog.set_level(logging.INFO, "draftgate")
    async with upstream(whole) as late, upstream(whole) as usual:
        late.status, late.models = 503, ("another",)
        order = (late, usual) if first else (usual, late)
        async with forwarding(*order, log_level="info") as gateway, client(gateway) as http:
            await gateway.node.heartbeat.beat()
            late.status = 200
            await probe_all(gateway)
            assert await send(http) == await send(http, model="theirs") == {200}
            assert sent(late, usual) == [0, 12]
            await gateway.node.heartbeat.beat()
            (shown,) = (await http.get("/ready")).json()["workers"]
            assert "it lists another and lacks theirs" in shown["reason"]
            listed = (await http.get("/workers")).json()["workers"]
            assert sorted(worker["status"] for worker in listed) == ["failed", "ok"]
            usual.status = 500
            for _ in range(3):
                await probe_all(gateway)
            assert await send(http, 2) == {503}
            assert (await http.get("/ready")).status_code == 503
            assert sent(late)[0] == 0
            late.models, usual.status = ("theirs",), 200
            await probe_all(gateway)
            assert await send(http) == {200}
            assert sent(late)[0] == 3


async def test_exclusion_is_logged_with_address_and_lists(caplog: pytest.LogCaptureFixture) -> None:
    """One log line names the excluded upstream, its models and what it lacks."""
    caplog.set_level(logging.INFO, "draftgate")
    async with (
        upstream(whole) as a,
        upstream(whole) as b,
        forwarding(a, b, log_level="info") as gateway,
    ):
        await gateway.node.heartbeat.beat()
        b.models = ("another",)
        await probe_all(gateway)
        for _ in range(2):
            await gateway.node.heartbeat.beat()
    (line,) = [vars(one) for one in caplog.records if one.getMessage() == "worker failed"]
    assert b.url in str(line)
    assert "it lists another and lacks theirs" in str(line)


async def test_adapter_on_some_upstreams_excludes_none() -> None:
    """While one upstream has loaded an adapter, requests for it fail and others go to both."""
    async with (
        upstream(whole) as a,
        upstream(whole) as b,
        forwarding(a, b) as gateway,
        client(gateway) as http,
    ):
        a.models = ("theirs", "adapter")
        await probe_all(gateway)
        assert await send(http, model="theirs") == {200}
        assert sent(a, b) == [3, 3]
        response = await http.post("/v1/completions", json={"prompt": "x", "model": "adapter"})
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        b.models = ("adapter", "theirs")
        await probe_all(gateway)
        assert await send(http, model="adapter") == {200}
        assert sent(a, b) == [6, 6]
        assert await send(http, 2, model="unknown to all") == {200}


async def test_replacement_of_all_upstreams_is_followed() -> None:
    """During a rolling change of the model, each request goes to an upstream with the old model."""
    async with (
        upstream(whole) as a,
        upstream(whole) as b,
        forwarding(a, b) as gateway,
        client(gateway) as http,
    ):
        a.models = ("new",)
        await probe_all(gateway)
        assert await send(http) == {200}
        assert sent(a, b) == [0, 6]
        b.models = ("new",)
        await probe_all(gateway)
        assert await send(http) == {200}
        assert sent(a, b) == [3, 9]
        assert gateway.node.models[0].name == "new"


async def test_upstream_without_a_list_is_not_compared() -> None:
    """An upstream that lists no models serves with the others."""
    async with upstream(whole) as a, upstream(whole) as b:
        b.models = ()
        async with forwarding(a, b) as gateway, client(gateway) as http:
            assert await send(http) == {200}
            assert sent(a, b) == [3, 3]
