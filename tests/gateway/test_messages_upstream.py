"""Tests of `/v1/messages` in front of upstreams."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from draftgate.gateway.app import Listening
from tests.gateway.clients import anthropic_client
from tests.gateway.harness import client, running
from tests.gateway.upstreams import Handler, cut_after, forwarding, refusal, stream_of, upstream
from tests.upstream_settings import at

PATH = "/v1/messages"
HI = [{"role": "user", "content": "def add(a, b):"}]
STREAM = {"model": "theirs", "messages": HI, "max_tokens": 9, "stream": True}
START = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","content":[],'
    b'"usage":{"input_tokens":5,"cache_read_input_tokens":2,"output_tokens":1}}}\n\n'
)
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":"a"}}\n\n'
)
END = (
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
    b'"usage":{"output_tokens":3}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
ERROR = (
    b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"x"}}\n\n'
)


async def test_messages_of_the_upstream_pass_whole_and_streamed(sim: Listening) -> None:
    """The client gets the same message through a gateway as from the upstream, whole and
    streamed, and its count of tokens."""
    from anthropic import APIStatusError

    fields = {"model": "draftgate-demo", "messages": HI, "max_tokens": 9, "extra_body": {"seed": 3}}
    texts, counts = set(), set()
    async with running(backend="openai", upstream=at(sim.url)) as gateway:
        for node in (sim, gateway):
            async with anthropic_client(node.url) as api:
                message = await api.messages.create(**fields)
                async with api.messages.stream(**fields) as stream:
                    texts |= {message.content[0].text, await stream.get_final_text()}
                counted = await api.messages.count_tokens(model="draftgate-demo", messages=HI)
                counts.add(counted.input_tokens)
                with pytest.raises(APIStatusError) as refused:
                    await api.messages.create(model="draftgate-demo", messages=[], max_tokens=9)
                assert refused.value.type == "invalid_request_error"
    assert (len(texts), len(counts)) == (1, 1)


async def test_stream_of_the_upstream_passes_unchanged_and_is_counted() -> None:
    """The events pass unchanged. Input tokens count as reported at the beginning, and output tokens
    as reported at the end. The upstream gets the headers of the API, but not the key."""
    blocks = (START, PING, DELTA, DELTA, END)
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "b", "x-api-key": "ours"}
    handler = stream_of(*blocks)
    async with upstream(handler) as engine, forwarding(engine) as gateway, client(gateway) as http:
        got = (await http.post(PATH, json=STREAM, headers=headers)).content
        metrics = (await http.get("/metrics")).text
    assert got == b"".join(blocks)
    for name, tokens in (("prompt", 7), ("cached_prompt", 2), ("generation", 3)):
        assert f'draftgate_{name}_tokens_total{{model_name="theirs"}} {tokens}.0' in metrics
    assert 'outcome="finished"} 1.0' in metrics
    (request,) = engine.requests
    assert request.headers["anthropic-version"] == "2023-06-01"
    assert request.headers["anthropic-beta"] == "b"
    assert "x-api-key" not in request.headers


@pytest.mark.parametrize(
    ("handler", "kind"),
    [
        (cut_after(START, DELTA), "api_error"),
        (stream_of(START, DELTA), "api_error"),
        (stream_of(START, DELTA, ERROR + END), "overloaded_error"),
    ],
    ids=["cut", "open", "error"],
)
async def test_broken_stream_ends_with_one_error_event(handler: Handler, kind: str) -> None:
    """A stream that breaks off, or has an error, ends with one error event in Anthropic's form."""
    async with upstream(handler) as engine, forwarding(engine) as gateway, client(gateway) as http:
        got = (await http.post(PATH, json=STREAM)).content
        assert got.startswith(START + DELTA + b"event: error\n")
        assert got.count(b"event: error\n") == 1
        assert f'"error":{{"type":"{kind}"'.encode() in got
        assert b"message_stop" not in got
        assert 'outcome="failed"} 1.0' in (await http.get("/metrics")).text


async def test_errors_of_the_gateway_and_of_the_upstream_have_anthropics_form() -> None:
    """An error of the gateway has Anthropic's form. One of the upstream passes as it is, but names
    the gateway's request. This also applies to a count of tokens."""
    sent = b'{"type":"error","error":{"type":"not_found_error","message":"theirs"}}'
    handler = refusal(404, sent)
    async with upstream(handler) as engine, forwarding(engine) as gateway, client(gateway) as http:
        for path, body in ((PATH, STREAM), (f"{PATH}/count_tokens", {"messages": HI})):
            response = await http.post(path, json=body)
            named = {**json.loads(sent), "request_id": response.headers["request-id"]}
            assert (response.status_code, response.json()) == (404, named)

    async def broken(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async with upstream(broken) as engine, forwarding(engine) as gateway, client(gateway) as http:
        response = await http.post(PATH, json=STREAM)
    assert (response.status_code, response.json()["error"]["type"]) == (502, "api_error")
