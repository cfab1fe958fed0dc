"""Tests of Anthropic's format of `/v1/models`, and of the ids of its requests."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from draftgate.gateway.app import Listening
from draftgate.gateway.errors import BodyTooLarge, ErrorFormat, GatewayError
from draftgate.gateway.http.replies.anthropic_models import UpstreamModel, model_page
from tests.gateway.clients import anthropic_client
from tests.gateway.harness import client, running
from tests.gateway.upstreams import forwarding, upstream

VERSION = {"anthropic-version": "2023-06-01"}
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


async def test_the_client_lists_and_retrieves_models(sim: Listening) -> None:
    """Anthropic's client lists the models and retrieves one of them."""
    async with client(sim) as http, anthropic_client(sim.url) as api:
        known = [model["id"] for model in (await http.get("/v1/models")).json()["data"]]
        listed = [model async for model in api.models.list()]
        assert [model.id for model in listed] == known
        one = await api.models.retrieve(known[0])
        assert one == listed[0]
        assert (one.type, one.display_name, one.created_at.year >= 1970) == ("model", one.id, True)


@pytest.mark.parametrize("headers", [VERSION, {"x-api-key": "sk"}])
async def test_the_headers_choose_the_format(
    http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    """The lists, models and errors of `/v1/models` have Anthropic's format for its clients only."""
    page = (await http.get("/v1/models", headers=headers)).json()
    assert set(page) == {"data", "has_more", "first_id", "last_id"}
    name = page["first_id"]
    assert (await http.get(f"/v1/models/{name}", headers=headers)).json() == page["data"][0]
    assert (await http.get(f"/v1/models/{name}")).json()["object"] == "model"
    missing = await http.get("/v1/models/none", headers=headers)
    error = missing.json()
    assert (missing.status_code, error["error"]["type"]) == (404, "not_found_error")
    assert error["request_id"] == missing.headers["request-id"] == missing.headers["x-request-id"]
    other = await http.get("/v1/models/none")
    assert "request-id" not in other.headers
    assert other.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ({}, "abcde", False),
        ({"after_id": "b"}, "cd", True),
        ({"after_id": "c"}, "de", False),
        ({"after_id": "e"}, "", False),
        ({"before_id": "d"}, "bc", True),
        ({"before_id": "c"}, "ab", False),
        ({"before_id": "a"}, "", False),
    ],
)
def test_pages_of_models(query: dict[str, str], ids: str, more: bool) -> None:
    """A page begins after `after_id` or ends before `before_id`, and tells whether more follow."""
    models = [UpstreamModel(name, 0) for name in "abcde"]
    page = model_page(models, query, 2 if query else 5)
    assert [model.id for model in page.data] == list(ids)
    assert page.has_more is more
    assert (page.first_id, page.last_id) == ((ids[0], ids[-1]) if ids else (None, None))


async def test_the_client_reads_all_pages(sim: Listening) -> None:
    """The client's iteration over pages ends, in either direction."""
    async with anthropic_client(sim.url) as api:
        names = [model.id async for model in api.models.list(limit=1)]
        assert names
        assert [model.id async for model in api.models.list(limit=1, before_id=names[0])] == []


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=1001", "limit=x", "after_id=none", "after_id=a&before_id=a"]
)
async def test_invalid_pages_are_refused(http: httpx.AsyncClient, query: str) -> None:
    """A page with an impossible limit or an unknown id is refused."""
    response = await http.get(f"/v1/models?{query}", headers=VERSION)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_models_of_an_upstream_have_anthropics_format() -> None:
    """The models of an upstream are converted for Anthropic's client, and only for it."""

    async with upstream() as engine, forwarding(engine) as gateway, client(gateway) as http:
        page = (await http.get("/v1/models", headers=VERSION)).json()
        assert page == {
            "data": [
                {
                    "id": "theirs",
                    "display_name": "theirs",
                    "created_at": "1970-01-01T00:00:05Z",
                    "max_input_tokens": 99,
                    "max_tokens": 99,
                    "type": "model",
                }
            ],
            "has_more": False,
            "first_id": "theirs",
            "last_id": "theirs",
        }
        assert (await http.get("/v1/models")).json()["object"] == "list"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/messages", HI, 200),
        ("/v1/messages", {**HI, "stream": True}, 200),
        ("/v1/messages", {}, 400),
        ("/v1/messages", b"{", 400),
        ("/v1/messages/", {**HI, "model": "none"}, 404),
        ("/v1/messages", b" " * (1 << 20), 413),
        ("/v1/messages/count_tokens", {"messages": HI["messages"]}, 200),
        ("/v1/messages/count_tokens", {}, 400),
        ("/v1/messages/batches", {}, 404),
    ],
)
async def test_responses_name_their_request(
    path: str, body: dict[str, Any] | bytes, status: int
) -> None:
    """Every response of `/v1/messages` has `request-id`, and every error has it in its body."""
    async with (
        running(max_body_bytes=1 << 16, speculation="off") as gateway,
        client(gateway) as http,
    ):
        sent = {"content": body} if isinstance(body, bytes) else {"json": body}
        response = await http.post(path, **sent, headers={"x-request-id": "mine"})
        assert response.headers["request-id"] == response.headers["x-request-id"] == "mine"
        again = await http.post(path, **sent)
        assert again.headers["request-id"] == again.headers["x-request-id"] != "mine"
        if response.status_code != 200:
            assert again.json()["request_id"] == again.headers["request-id"]
            assert response.json()["request_id"] == "mine"


async def test_errors_before_the_handler_name_their_request(tmp_path: Any) -> None:
    """Errors of keys, methods and headers name the request, too."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - {name: a, key: sk-a}\n")
    async with running(api_keys_file=str(keys)) as gateway, client(gateway) as http:
        for response in (
            await http.post("/v1/messages", json=HI),
            await http.get("/v1/messages", headers={"x-api-key": "sk-a"}),
            await http.post("/v1/messages", json=HI, headers={"Expect": "x", "x-api-key": "sk-a"}),
        ):
            assert response.status_code in {401, 405, 417}
            assert response.json()["request_id"] == response.headers["request-id"]


def test_every_status_has_a_type_and_the_request() -> None:
    """Each error class has one of Anthropic's types, and the id of the request."""
    pending, classes = [GatewayError], set[type[GatewayError]]()
    while pending:
        classes.add(found := pending.pop())
        pending += found.__subclasses__()
    types = {
        "invalid_request_error", "authentication_error", "permission_error", "not_found_error",
        "request_too_large", "rate_limit_error", "api_error", "overloaded_error",
    }  # fmt: skip
    assert BodyTooLarge in classes
    for kind in classes:
        if kind.body is not GatewayError.body:
            continue  # the bytes of an upstream
        error = kind.__new__(kind)
        GatewayError.__init__(error, "no")
        body = error.body(ErrorFormat.ANTHROPIC, "req")
        assert b'"request_id":"req"' in body
        assert any(f'"type":"{one}"'.encode() in body for one in types)
