"""Tests of the errors of upstreams, in the forms of their web frameworks."""

from __future__ import annotations

import asyncio
import json

import anthropic
import openai
import pytest
from aiohttp import web

from draftgate.gateway.dispatch.upstreams.error_bodies import read_error
from draftgate.gateway.http import stream
from tests.gateway.clients import anthropic_client, openai_client
from tests.gateway.harness import client
from tests.gateway.upstreams import Handler, after, forwarding, refusal, upstream, whole

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/tokenize",
    "/detokenize",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
)
NAMELESS = (
    b'{"detail":"Not Found"}',
    b'{"detail":"Method Not Allowed"}',
    b'{"error":"Not Found"}',
    b"<html><h1>404 Not Found</h1></html>",
    b"404: Not Found",
    b"",
    b"[1]",
    b'"x"',
    b"\xff",
    b"[" * 100_000,
)
"""Bodies of servers that have no such endpoint."""

BODY = {"model": "theirs", "messages": [{"role": "user", "content": "x"}], "prompt": "x"}


def body_for(path: str, *, stream: bool = False) -> dict[str, object]:
    """Return a valid body for a path, whose request may be translated to a chat."""
    if "/messages" in path:
        most = {} if path.endswith("count_tokens") else {"max_tokens": 9}
        return {"model": "theirs", "messages": BODY["messages"], "stream": stream, **most}
    if "/responses" in path:
        return {"model": "theirs", "input": "x", "stream": stream}
    return {**BODY, "stream": stream}


def respond(status: int, body: bytes, content_type: str = "text/html") -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, body=body, headers={"Content-Type": content_type})

    return handler


def error_of(path: str, body: bytes) -> dict[str, object]:
    """Return the error in a body, which must have the form of the API of the path."""
    found = json.loads(body)
    error = found["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    if path.startswith("/v1/messages"):
        assert found["type"] == "error"
        assert error.keys() <= {"type", "message", "retry_after_s"}
    else:
        assert error.keys() >= {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("status", [404, 405, 501])
async def test_missing_endpoint_is_named_in_the_form_of_the_api(path: str, status: int) -> None:
    """Whatever a server without the endpoint answers, the error names it and keeps the status."""
    async with upstream() as engine, forwarding(engine) as gateway, client(gateway) as http:
        for sent in NAMELESS:
            text = sent.replace(b"Method Not Allowed", b"Not Found") if status == 404 else sent
            if status != 404 and b"Not Found" in text and text.startswith(b"{"):
                continue  # no server sends this text with another status
            engine.handler = respond(status, text)
            for streamed in (False, True):
                response = await http.post(path, json=body_for(path, stream=streamed))
                assert response.status_code == status
                assert response.headers["content-type"] == "application/json"
                message = error_of(path, response.content)["message"]
                assert message == f"the upstream does not support POST {path}" or (
                    text == b'{"detail":"Method Not Allowed"}' and status == 501
                )


@pytest.mark.parametrize(
    ("sent", "message", "param"),
    [
        (
            {"detail": [{"type": "missing", "loc": ["body", "messages"], "msg": "Field required"}]},
            "messages: Field required",
            "messages",
        ),
        (
            {
                "detail": [
                    {"loc": ["body", "messages", 0, "role"], "msg": "no role", "input": "k"},
                    {"loc": ["query", "n"], "msg": "too large"},
                ]
            },
            "messages[0].role: no role; query.n: too large",
            "messages[0].role",
        ),
        ({"detail": "The model does not exist"}, "The model does not exist", None),
        ({"detail": {"error": "broken"}}, "broken", None),
        ({"detail": [{"loc": "x"}, 5]}, "the upstream responded with status 422", None),
        ({"error": "input validation failed"}, "input validation failed", None),
        ({"message": "plain", "status": 422}, "plain", None),
        (
            {"object": "error", "message": "old", "type": "BadRequestError", "param": "n"},
            "old",
            "n",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/embeddings"])
async def test_other_forms_keep_their_message(
    path: str, sent: dict[str, object], message: str, param: str | None
) -> None:
    """The error has the message and the parameter of the upstream, in the form of the API."""
    handler = respond(422, json.dumps(sent).encode(), "application/json")
    async with upstream(handler) as engine, forwarding(engine) as gateway, client(gateway) as http:
        response = await http.post(path, json=body_for(path))
    assert response.status_code == 422
    error = error_of(path, response.content)
    assert error["message"] == message
    assert path == "/v1/messages" or error["param"] == param


async def test_errors_of_the_other_api_are_converted() -> None:
    """An error in OpenAI's form on a path of Anthropic's API has Anthropic's form."""
    body = b'{"error":{"message":"no such model","type":"NotFoundError","code":404}}'
    async with (
        upstream(refusal(404, body)) as engine,
        forwarding(engine) as gateway,
        client(gateway) as http,
    ):
        response = await http.post("/v1/messages", json=BODY)
        assert error_of("/v1/messages", response.content) == {
            "type": "not_found_error",
            "message": "no such model",
        }
        assert (await http.post("/v1/completions", json=BODY)).content == body


@pytest.mark.parametrize("status", [429, 500, 502, 503])
async def test_reasons_of_other_forms_are_kept_in_gateway_errors(status: int) -> None:
    """The error for a refusal or a broken upstream contains a reason in FastAPI's form."""
    async with (
        upstream(refusal(status, b'{"detail":"no memory"}')) as engine,
        forwarding(engine) as gateway,
        client(gateway) as http,
    ):
        response = await http.post("/v1/completions", json=BODY)
    assert "no memory" in error_of("/v1/completions", response.content)["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_error_after_comments_has_the_form_of_the_api(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream that began with comments ends with an event that names the missing endpoint."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.01)
    begun = asyncio.Event()
    handler = after(begun, respond(404, b'{"detail":"Not Found"}'))
    async with (
        upstream(handler) as engine,
        forwarding(engine) as gateway,
        client(gateway) as http,
        http.stream("POST", path, json=body_for(path, stream=True)) as response,
    ):
        received = b""
        async for piece in response.aiter_bytes():
            received += piece
            begun.set()
    (data,) = [line[6:] for line in received.splitlines() if line.startswith(b"data: {")]
    message = f"the upstream does not support POST {path}"
    assert error_of(path, data)["message"] == message


async def test_clients_raise_their_own_exceptions() -> None:
    """The clients of both APIs raise NotFoundError with the message, and do not retry."""
    handler = respond(404, b'{"detail":"Not Found"}', "application/json")
    async with upstream(handler) as engine, forwarding(engine) as gateway:
        async with openai_client(gateway.url) as api:
            with pytest.raises(openai.NotFoundError, match="does not support POST /v1/responses"):
                await api.responses.create(model="theirs", input="x")
        async with anthropic_client(gateway.url) as api:
            with pytest.raises(anthropic.NotFoundError, match="does not support POST /v1/"):
                await api.messages.create(
                    model="theirs", max_tokens=1, messages=[{"role": "user", "content": "x"}]
                )
        chats = "/v1/chat/completions"  # tried in place of the missing endpoints
        paths = [one.path for one in engine.requests]
        assert paths == ["/v1/responses", chats, "/v1/messages", chats]


@pytest.mark.parametrize(
    "body", [b'{"detail": {"x": [1]}}', b'{"error": 5}', b'{"error": {"message": 5}}', b"null"]
)
def test_any_json_can_be_read(body: bytes) -> None:
    """A body without a message gives an empty message."""
    assert read_error(body).message == ""


DENIED_PATHS = [*PATHS, "/rerank", "/score", "/v1/score"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("status", [401, 403, 407])
@pytest.mark.parametrize("path", DENIED_PATHS)
async def test_a_key_that_an_upstream_refuses_is_not_that_of_the_client(
    path: str, status: int, streamed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """If an upstream denies access, the client gets status 502 in the form of its API instead of a
    verdict on its own key. The error tells the operator what to check, without the upstream's
    words, which may quote the gateway's key. The log names the upstream."""
    body = b'{"error":{"message":"Incorrect API key provided: sk-o***n","type":"x"}}'
    handler = respond(status, body, "application/json")
    async with (
        upstream(handler) as engine,
        forwarding(engine, log_level="warning") as gateway,
        client(gateway) as http,
    ):
        response = await http.post(path, json=body_for(path, stream=streamed))
    assert response.status_code == 502
    message = error_of(path, response.content)["message"]
    assert f"status {status}" in message
    assert "--upstream-api-key-env" in message
    assert "sk-o" not in response.text
    assert "www-authenticate" not in response.headers
    (line,) = [one for one in caplog.records if one.message == "an upstream denies access"]
    assert line.draftgate_fields.items() >= {"upstream": engine.url, "status": status}.items()


async def test_a_client_does_not_take_a_denied_gateway_for_a_wrong_key() -> None:
    """The clients of both APIs raise the exception of a server's error, and not of a wrong key."""
    handler = respond(401, b'{"error":{"message":"no key","type":"x"}}', "application/json")
    async with upstream(handler) as engine, forwarding(engine) as gateway:
        async with openai_client(gateway.url) as api:
            with pytest.raises(openai.InternalServerError, match="denied this gateway access"):
                await api.completions.create(model="theirs", prompt="x")
        async with anthropic_client(gateway.url) as api:
            with pytest.raises(anthropic.InternalServerError, match="denied this gateway access"):
                await api.messages.create(
                    model="theirs", max_tokens=1, messages=[{"role": "user", "content": "x"}]
                )


async def test_another_upstream_answers_for_one_that_denies_access() -> None:
    """A request goes to another upstream, whose key may be right."""
    denied = respond(401, b"{}", "application/json")
    async with upstream(denied) as a, upstream(whole) as b, forwarding(a, b) as gateway:
        async with client(gateway) as http:
            for _ in range(4):
                response = await http.post("/v1/completions", json=BODY)
                assert response.status_code == 200
        assert len(b.requests) == 4
