"""Upstreams with different models, aliases, keys and headers."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from draftgate.gateway.app import StartError
from tests.gateway.harness import client
from tests.gateway.upstreams import ScriptedUpstream, forwarding, upstream, whole

PATH = "/v1/completions"


async def probe_all(gateway) -> None:
    for worker in gateway.node.fleet.workers:
        await worker.backend.probe()


async def send(http, count: int = 6, **body: object) -> set[int]:
    found = [await http.post(PATH, json={"prompt": "x", **body}) for _ in range(count)]
    return {response.status_code for response in found}


def sent(*upstreams: ScriptedUpstream) -> list[int]:
    return [len(one.requests) for one in upstreams]


async def test_requests_reach_only_upstreams_with_their_model() -> None:
    """Two upstreams share a model, and each has one of its own."""
    async with upstream(whole) as a, upstream(whole) as b:
        a.models, b.models = ("shared", "a-only"), ("shared", "b-only")
        async with forwarding(a, b) as gateway, client(gateway) as http:
            assert await send(http, model="a-only") == {200}
            assert sent(a, b) == [6, 0]
            assert await send(http, model="b-only") == {200}
            assert sent(a, b) == [6, 6]
            assert await send(http, model="shared") == {200}
            assert sent(a, b) == [9, 9]


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions", "/v1/embeddings", "/tokenize"])
async def test_a_model_that_no_upstream_lists_is_not_found(path: str) -> None:
    """The error has the names of the models, and no upstream gets the request."""
    async with upstream(whole) as a, upstream(whole) as b:
        a.models, b.models = ("x",), ("y", "z")
        async with forwarding(a, b) as gateway, client(gateway) as http:
            response = await http.post(path, json={"prompt": "q", "model": "w"})
            assert response.status_code == 404
            error = response.json()["error"]
            assert error["code"] == "model_not_found"
            assert all(name in error["message"] for name in ("'w'", "x", "y", "z"))
            assert sent(a, b) == [0, 0]


async def test_an_unknown_model_is_not_found_unless_a_server_that_is_down_may_have_it() -> None:
    """An upstream that has never sent its list may have any model, or those of its settings. The
    error says so. The list of an upstream that fails later stays known."""
    async with upstream(whole) as a, AsyncExitStack() as stack:
        a.models = ("x",)
        b = await stack.enter_async_context(upstream(whole))
        await stack.aclose()  # it is down from the start
        for only, status in ((), 503), (("y",), 404):
            b.settings["models"] = only
            async with forwarding(a, b) as gateway, client(gateway) as http:
                refused = await http.post(PATH, json={"prompt": "q", "model": "w"})
                assert refused.status_code == status
                if status == 503:
                    assert "'w', and another one is down" in refused.json()["error"]["message"]
                assert await send(http, model="x") == {200}
        b = await stack.enter_async_context(upstream(whole))
        async with forwarding(a, b) as gateway, client(gateway) as http:
            await stack.aclose()
            await probe_all(gateway)
            assert await send(http, model="w") == {404}


async def test_models_are_listed_together() -> None:
    """`/v1/models` is the union, in the formats of OpenAI and Anthropic, with aliases."""
    async with upstream(whole) as a, upstream(whole) as b:
        a.models, b.models = ("x", "shared"), ("shared", "y")
        b.settings["aliases"] = {"chat": "y", "dangling": "gone"}
        async with forwarding(a, b) as gateway, client(gateway) as http:
            listed = (await http.get("/v1/models")).json()
            assert [one["id"] for one in listed["data"]] == ["x", "shared", "y", "chat"]
            assert listed["data"][3]["parent"] == "y"
            page = await http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
            assert [one["id"] for one in page.json()["data"]] == ["x", "shared", "y", "chat"]
            assert (await http.get("/v1/models/chat")).json()["max_model_len"] == 99
            missing = await http.get("/v1/models/w")
            assert (missing.status_code, missing.json()["error"]["code"]) == (
                404,
                "model_not_found",
            )


async def test_an_alias_becomes_the_name_of_the_chosen_upstream() -> None:
    """An alias may stand for other models elsewhere. The rest of the body is as received."""
    async with upstream(whole) as a, upstream(whole) as b:
        a.models, b.models = ("meta/llama",), ("llama-8b", "other")
        a.settings["aliases"], b.settings["aliases"] = {"chat": "meta/llama"}, {"chat": "llama-8b"}
        async with forwarding(a, b) as gateway, client(gateway) as http:
            body = b'{"prompt":"x", "model":"chat","big":12345678901234567890, "seed" : 7}'
            for _ in range(4):
                assert (await http.post(PATH, content=body)).status_code == 200
            assert [json.loads(one)["model"] for one in a.bodies] == ["meta/llama"] * 2
            assert [json.loads(one)["model"] for one in b.bodies] == ["llama-8b"] * 2
            assert all(b"12345678901234567890" in one for one in (*a.bodies, *b.bodies))
            assert await send(http, 1, model="other") == {200}
            assert json.loads(b.bodies[-1]) == {"prompt": "x", "model": "other"}


async def test_settings_can_limit_the_models_of_an_upstream() -> None:
    """Clients can use only the models that the settings name."""
    async with upstream(whole) as a:
        a.models, a.settings["models"] = ("big", "small", "tiny"), ("small", "tiny")
        async with forwarding(a) as gateway, client(gateway) as http:
            assert await send(http, 1, model="big") == {404}
            assert await send(http, 1, model="small") == {200}
            assert gateway.node.models[0].name == "small"


async def test_a_new_list_is_followed() -> None:
    """A model that is loaded or removed gets or loses requests after the next probe."""
    async with (
        upstream(whole) as a,
        upstream(whole) as b,
        forwarding(a, b) as gateway,
        client(gateway) as http,
    ):
        a.models = ("theirs", "adapter")
        assert await send(http, model="adapter") == {404}
        await probe_all(gateway)
        assert await send(http, model="adapter") == {200}
        assert sent(a, b) == [6, 0]
        a.models = ("new",)
        await probe_all(gateway)
        assert await send(http, model="adapter") == {404}
        assert await send(http, model="theirs") == {200}
        assert sent(a, b) == [6, 6]


async def test_an_outage_concerns_only_the_models_of_the_upstream() -> None:
    """Requests for its models get status 503, and others succeed."""
    async with upstream(whole) as a, upstream(whole) as b:
        a.models, b.models = ("x",), ("y",)
        async with forwarding(a, b) as gateway, client(gateway) as http:
            a.status = 503
            for _ in range(3):
                await probe_all(gateway)
            response = await http.post(PATH, json={"prompt": "q", "model": "x"})
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert await send(http, model="y") == {200}
            assert sent(a, b) == [0, 6]
            a.status = 200
            await probe_all(gateway)
            assert await send(http, model="x") == {200}


async def test_a_full_upstream_holds_back_only_requests_for_its_models() -> None:
    """A request overtakes earlier ones that wait for another model."""
    release = asyncio.Event()

    async def slow(request):
        await release.wait()
        return await whole(request)

    async with upstream(slow) as a, upstream(whole) as b:
        a.models, b.models = ("x",), ("y",)
        async with forwarding(a, b, max_sequences=1) as gateway, client(gateway) as http:
            waiting = [asyncio.create_task(send(http, 1, model="x")) for _ in range(3)]
            await a.arrived.get()
            assert await send(http, model="y") == {200}
            assert sent(a, b) == [1, 6]
            release.set()
            assert await asyncio.gather(*waiting) == [{200}] * 3


async def test_upstream_without_a_list_gets_requests_for_any_model() -> None:
    """An upstream that lists no models serves with the others."""
    async with upstream(whole) as a, upstream(whole) as b:
        b.models = ()
        async with forwarding(a, b) as gateway, client(gateway) as http:
            assert await send(http) == {200}
            assert sent(a, b) == [3, 3]
            assert await send(http, model="unlisted") == {200}
            assert sent(a, b) == [3, 9]


async def test_each_upstream_gets_its_own_key_and_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys come from a variable or a file, and the response names the upstream."""
    monkeypatch.setenv("THEIR_KEY", "from-variable")
    (tmp_path / "key").write_text("from-file\n")
    async with upstream(whole) as a, upstream(whole) as b:
        a.models, b.models = ("x",), ("y",)
        a.settings |= {"name": "one", "api_key_env": "THEIR_KEY", "headers": {"X-Team": "search"}}
        b.settings |= {"name": "two", "api_key_file": str(tmp_path / "key")}
        async with forwarding(a, b) as gateway, client(gateway) as http:
            for name in ("x", "y"):
                await http.post(PATH, json={"prompt": "q", "model": name})
            assert a.requests[0].headers["authorization"] == "Bearer from-variable"
            assert a.requests[0].headers["x-team"] == "search"
            assert b.requests[0].headers["authorization"] == "Bearer from-file"
            assert "x-team" not in b.requests[0].headers


async def test_a_key_that_cannot_be_read_fails_the_start(tmp_path: Path) -> None:
    """The message names the upstream and the reason."""
    (tmp_path / "empty").write_text("\n")
    async with upstream(whole) as a:
        for wrong, why in (
            ({"api_key_env": "NOT_SET"}, "the variable NOT_SET is not set"),
            ({"api_key_file": str(tmp_path / "none")}, "No such file"),
            ({"api_key_file": str(tmp_path / "empty")}, "the key file .* is empty"),
        ):
            a.settings = {"name": "one", **wrong}
            with pytest.raises((StartError, ValueError), match=f"--upstream one=.*{why}"):
                async with forwarding(a):
                    pass
