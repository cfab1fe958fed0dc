"""Tests of `/v1/messages` and `/v1/responses` in front of servers that have only chats."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from bench.harness.processes import free_port, start, stop, wait_until_up
from draftgate.backends.errors import UpstreamFailed
from draftgate.backends.openai.events import EventScan, StreamEnding
from draftgate.backends.worker_config import UpstreamSettings
from draftgate.gateway.app import Listening
from draftgate.gateway.errors import ErrorFormat
from draftgate.gateway.http.replies.rendering import error_event
from draftgate.gateway.http.translation.chat_bodies import chat_body
from draftgate.gateway.http.translation.translations import (
    CONVERTED_INLINE_BYTES,
    ChatTranslation,
    MessageTranslation,
    ResponseTranslation,
)
from tests.gateway.clients import anthropic_client, openai_client
from tests.gateway.harness import client, events, running
from tests.gateway.tool_models import ANTHROPIC_TOOLS, NOW, WEATHER
from tests.gateway.upstreams import (
    DONE,
    Handler,
    ScriptedUpstream,
    cut_after,
    forwarding,
    refusal,
    stream_of,
    upstream,
)

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    MESSAGES: {"model": "theirs", "messages": HI, "max_tokens": 9},
    RESPONSES: {"model": "theirs", "input": "hi"},
}
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


def chunk(finish: str | None = None, **delta: Any) -> bytes:
    """Return a chunk of a chat."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: %s\n\n" % json.dumps({"id": "c", "model": "real", "choices": [choice]}).encode()


def call(index: int | None, arguments: str = "", **named: str) -> list[dict[str, Any]]:
    """Return a part of a call for a chunk."""
    function = {"arguments": arguments, **{k: v for k, v in named.items() if k == "name"}}
    part: dict[str, Any] = {"function": function}
    if index is not None:
        part["index"] = index
    if "id" in named:
        part |= {"id": named["id"], "type": "function"}
    return [part]


LAST = b"data: %s\n\n" % json.dumps({"model": "real", "choices": [], "usage": USAGE}).encode()
CHUNKS = (
    chunk(role="assistant", content=""),
    chunk(reasoning_content="Hm."),
    chunk(content="Well"),
    chunk(content=", \u2603."),
    chunk(tool_calls=call(0, id="call_a", name="weather")),
    chunk(tool_calls=call(0, '{"ci')),
    chunk(tool_calls=call(0, 'ty": "Rome"}')),
    chunk(tool_calls=call(1, "{}", id="call_b", name="now")),
    chunk("tool_calls"),
    LAST,
    DONE,
)
WHOLE = {
    "id": "c",
    "model": "real",
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "Well, \u2603.",
                "reasoning": "Hm.",
                "tool_calls": [
                    {
                        "id": "call_a",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                    },
                    {"id": "call_b", "function": {"name": "now", "arguments": "{}"}},
                ],
            },
            "finish_reason": "tool_calls",
        }
    ],
    "usage": USAGE,
}
NO_ENDPOINT = {
    "fastapi": (404, b'{"detail":"Not Found"}'),
    "llama.cpp": (
        404,
        b'{"error":{"code":404,"message":"File Not Found","type":"not_found_error"}}',
    ),
    "openai": (
        404,
        b'{"error":{"message":"Invalid URL (POST /v1/messages, /v1/responses)","type":"x"}}',
    ),
    "method": (405, b'{"detail":"Method Not Allowed"}'),
    "not implemented": (501, b""),
    "html": (404, b"<html>Not Found</html>"),
}


def only_chats(
    chats: Handler, missing: tuple[int, bytes] = NO_ENDPOINT["fastapi"], tokens: int | None = None
) -> Handler:
    """Return the handler of a server with chats, and with `/tokenize` if `tokens` is given."""
    status, body = missing

    async def handler(request: web.Request) -> web.StreamResponse:
        if request.path == CHAT:
            return await chats(request)
        if request.path == "/tokenize" and tokens is not None:
            return web.json_response({"count": tokens, "max_model_len": 99, "tokens": [1] * tokens})
        return await refusal(status, body)(request)

    return handler


async def answer(request: web.Request) -> web.StreamResponse:
    """Respond with a chat, whole or streamed as the request wants."""
    if json.loads(await request.read()).get("stream"):
        return await stream_of(*CHUNKS)(request)
    return web.json_response(WHOLE)


@asynccontextmanager
async def in_front_of(
    handler: Handler, **settings: Any
) -> AsyncIterator[tuple[ScriptedUpstream, Listening, httpx.AsyncClient]]:
    """Run a server with this handler, and a node in front of it."""
    async with upstream(handler) as engine:
        engine.settings.update(settings)
        async with forwarding(engine) as gateway, client(gateway) as http:
            yield engine, gateway, http


@pytest.mark.parametrize("missing", NO_ENDPOINT.values(), ids=NO_ENDPOINT)
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_missing_endpoint_is_tried_once_and_then_translated(
    path: str, missing: tuple[int, bytes]
) -> None:
    """The first request finds that the endpoint is missing, and all requests succeed as chats,
    until the server may have restarted."""
    async with in_front_of(only_chats(answer, missing)) as (engine, gateway, http):
        for stream in (False, True, False):
            response = await http.post(path, json={**BODIES[path], "stream": stream})
            assert response.status_code == 200, response.text
        assert [one.path for one in engine.requests] == [path, CHAT, CHAT, CHAT]
        backend = gateway.node.fleet.workers[0].backend
        engine.status = 500
        await backend.probe()
        engine.status = 200
        await backend.probe()
        assert (await http.post(path, json=BODIES[path])).status_code == 200
        assert [one.path for one in engine.requests][4:] == [path, CHAT]


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, b'{"error":{"message":"the model is gone","type":"x","code":"model_not_found"}}'),
        (404, b'{"type":"error","error":{"type":"not_found_error","message":"/v1/messages"}}'),
        (400, b'{"error":{"message":"bad","type":"x"}}'),
    ],
)
async def test_errors_of_an_existing_endpoint_are_passed_on(status: int, body: bytes) -> None:
    """An error of the endpoint itself does not lead to a chat."""
    async with in_front_of(refusal(status, body)) as (engine, _, http):
        for _ in range(2):
            assert (await http.post(MESSAGES, json=BODIES[MESSAGES])).status_code == status
        assert {one.path for one in engine.requests} == {MESSAGES}


async def test_setting_decides_without_a_try() -> None:
    """With `chats_only`, the endpoint is never tried if true, and never translated if false."""
    async with in_front_of(only_chats(answer), chats_only=True) as (engine, _, http):
        assert (await http.post(MESSAGES, json=BODIES[MESSAGES])).status_code == 200
        assert [one.path for one in engine.requests] == [CHAT]
    async with in_front_of(only_chats(answer), chats_only=False) as (engine, _, http):
        assert (await http.post(MESSAGES, json=BODIES[MESSAGES])).status_code == 404
        assert [one.path for one in engine.requests] == [MESSAGES]


async def test_each_upstream_gets_the_form_that_it_has() -> None:
    """A request that one upstream refuses goes to another one, in the form that this one has."""

    async def native(request: web.Request) -> web.StreamResponse:
        assert request.path == MESSAGES
        return web.json_response({"type": "message", "content": []})

    for first, second in ((only_chats(refusal(503)), native), (refusal(503), only_chats(answer))):
        async with (
            upstream(first) as a,
            upstream(second) as b,
            forwarding(a, b) as gateway,
            client(gateway) as http,
        ):
            response = await http.post(MESSAGES, json=BODIES[MESSAGES])
            assert (response.status_code, response.json()["type"]) == (200, "message")


async def test_anthropics_client_reads_a_chat() -> None:
    """Anthropic's client gets reasoning, text, calls, usage and the stop reason, both ways."""
    fields: dict[str, Any] = {**BODIES[MESSAGES], "tools": ANTHROPIC_TOOLS}
    async with (
        in_front_of(only_chats(answer, tokens=5)) as (engine, gateway, _),
        anthropic_client(gateway.url) as api,
    ):
        async with api.messages.stream(**fields) as stream:
            streamed = await stream.get_final_message()
        whole = await api.messages.create(**fields)
        counted = await api.messages.count_tokens(model="theirs", messages=HI)
    for message in (streamed, whole):
        thinking, text, first, second = message.content
        assert (thinking.thinking, text.text) == ("Hm.", "Well, \u2603.")
        assert (first.id, first.name, first.input) == ("call_a", "weather", {"city": "Rome"})
        assert (second.id, second.name, second.input) == ("call_b", "now", {})
        assert (message.stop_reason, message.model) == ("tool_use", "real")
        usage = message.usage
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (5, 2)
        assert usage.output_tokens == 3
    assert counted.input_tokens == 5
    sent = json.loads(engine.bodies[1])
    assert sent["tools"][0]["function"]["name"] == "weather"
    assert sent["stream_options"] == {"include_usage": True}


async def test_openais_client_reads_a_chat() -> None:
    """OpenAI's client of responses gets reasoning, text, calls and usage, both ways."""
    tools = [{"type": "function", "strict": None, **one["function"]} for one in (WEATHER, NOW)]
    fields: dict[str, Any] = {**BODIES[RESPONSES], "tools": tools}
    async with (
        in_front_of(only_chats(answer)) as (_, gateway, _),
        openai_client(gateway.url) as api,
    ):
        async with api.responses.stream(**fields) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_response()
        whole = await api.responses.create(**fields)
    for response in (streamed, whole):
        assert response.output_text == "Well, \u2603."
        kinds = [item.type for item in response.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        calls = response.output[2:]
        assert [one.call_id for one in calls] == ["call_a", "call_b"]
        assert calls[0].arguments == '{"city": "Rome"}'
        usage = response.usage
        assert (usage.input_tokens, usage.output_tokens) == (7, 3)
        assert usage.input_tokens_details.cached_tokens == 2
        assert response.status == "completed"


def translated(kind: type[ChatTranslation], body: dict[str, Any]) -> ChatTranslation:
    """Return a translation that is ready for a response."""
    anthropic = kind is MessageTranslation
    wanted = ErrorFormat.ANTHROPIC if anthropic else ErrorFormat.OPENAI
    path = MESSAGES if anthropic else RESPONSES
    found = kind(path, json.dumps(body).encode(), "r", partial(error_event, wanted=wanted))
    found._encode("theirs", continuous_usage=False)
    return found


def events_of(kind: type[ChatTranslation], blocks: Sequence[bytes]) -> bytes:
    """Return the events of a client for a stream in some pieces."""
    path = MESSAGES if kind is MessageTranslation else RESPONSES
    scan, translation = EventScan(), translated(kind, BODIES[path])
    found = b"".join(translation.read_events(scan.feed(block)) for block in blocks)
    assert scan.ending is StreamEnding.DONE
    return found + translation.end_events()


STREAM = b"".join(CHUNKS)


@given(
    st.sampled_from([MessageTranslation, ResponseTranslation]),
    st.lists(st.integers(1, len(STREAM) - 1), max_size=40, unique=True),
    st.sampled_from([b"\n", b"\r\n"]),
    st.sampled_from([b"", b"id: 7\nevent: chunk\n", b": note\n"]),
)
def test_events_do_not_depend_on_the_pieces_of_a_stream(
    kind: type[ChatTranslation], places: list[int], line_end: bytes, fields: bytes
) -> None:
    """A stream in any pieces, with any line ends and further fields of events, gives the same."""
    stream = STREAM.replace(b"data:", fields + b"data:").replace(b"\n", line_end)
    cuts = [0, *sorted(place for place in places if place < len(stream)), len(stream)]
    pieces = [stream[a:b] for a, b in pairwise(cuts)]
    expected = events_of(kind, [STREAM])
    assert without_times(events_of(kind, pieces)) == without_times(expected)
    single = events_of(kind, [stream[i : i + 1] for i in range(len(stream))])
    assert without_times(single) == without_times(expected)


def without_times(stream: bytes) -> list[Any]:
    """Return the events of a stream without the time of its end."""
    found = events(stream.decode())
    for event in found:
        if isinstance(event, dict) and "response" in event:
            event["response"].pop("completed_at")
            event["response"].pop("created_at")
    return found


@pytest.mark.parametrize("kind", [MessageTranslation, ResponseTranslation])
@pytest.mark.parametrize(
    ("parts", "calls"),
    [
        ([call(0, "{}", id="a", name="now")], 1),
        ([call(0, id="a", name="now"), call(0, "{"), call(0, "}")], 1),
        ([call(0, "{", id="a", name="now"), call(0, "}", id="a", name="now")], 1),
        ([call(0, "{", id="a", name="now"), call(0, "}", id="")], 1),
        ([call(None, "{}", id="a", name="now"), call(None, "{}", id="b", name="now")], 2),
        ([call(0, "{}", id="a", name="now") + call(1, "{}", id="b", name="now")], 2),
        ([call(3, "{}", name="now"), call(7, "{}", name="now")], 2),
    ],
)
def test_calls_in_pieces_become_whole_calls(
    kind: type[ChatTranslation], parts: list[Any], calls: int
) -> None:
    """Calls are complete however a server divides them, with the ids of the server if it sends
    any."""
    blocks = [*(chunk(tool_calls=part) for part in parts), chunk("tool_calls"), DONE]
    found = without_times(events_of(kind, blocks))
    text = json.dumps(found)
    if kind is MessageTranslation:
        begun = [e["content_block"] for e in found if e["type"] == "content_block_start"]
        arguments = "".join(e["delta"].get("partial_json", "") for e in found if "delta" in e)
        ids = [block["id"] for block in begun]
    else:
        done = [e["item"] for e in found[:-1] if e["type"] == "response.output_item.done"]
        arguments = "".join(item["arguments"] for item in done)
        ids = [item["call_id"] for item in done]
    assert (arguments, len(set(ids))) == ("{}" * calls, calls), text
    sent = [part[0]["id"] for part in parts if part[0].get("id")]
    assert all(one in ids for one in sent)


@pytest.mark.parametrize(
    "blocks",
    [
        [chunk(tool_calls=call(0, "{}"))],
        [
            chunk(tool_calls=call(0, "{", id="a", name="now")),
            chunk(tool_calls=call(1, "{", id="b", name="now")),
            chunk(tool_calls=call(0, "}")),
        ],
        [b'data: {"id": 1}\n\n'],
        [b"data: nonsense\n\n"],
        [b'data: {"choices": [{"delta": {"content": 7}}]}\n\n'],
        [chunk("abort")],
    ],
    ids=["nameless", "alternating", "no chat", "no json", "type", "abort"],
)
def test_other_events_fail(blocks: list[bytes]) -> None:
    """An event that cannot be translated is a failure, and nothing of it is lost silently."""
    translation = translated(MessageTranslation, BODIES[MESSAGES])
    for block in blocks[:-1]:
        translation.read_events(block)
    with pytest.raises(UpstreamFailed):
        translation.read_events(blocks[-1])


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (cut_after(*CHUNKS[:3]), "api_error"),
        (stream_of(*CHUNKS[:3]), "api_error"),
        (stream_of(*CHUNKS[:3], DONE), "api_error"),
        (stream_of(*CHUNKS[:3], b"data: {}\n\n"), "api_error"),
        (
            stream_of(
                *CHUNKS[:3], b'data: {"error": {"message": "oops", "type": "rate_limit_error"}}\n\n'
            ),
            "rate_limit_error",
        ),
    ],
    ids=["cut", "open", "unfinished", "no chat", "error"],
)
async def test_broken_stream_ends_with_one_typed_error(path: str, end: Handler, kind: str) -> None:
    """A stream that breaks has one ending in the form of the API, after what has arrived."""
    async with in_front_of(only_chats(end)) as (_, _, http):
        got = await http.post(path, json={**BODIES[path], "stream": True})
        metrics = (await http.get("/metrics")).text
    found = [one for one in events(got.text) if one != "[DONE]"]
    if path == MESSAGES:
        assert found[-1]["type"] == "error"
        assert found[-1]["error"]["type"] == kind
        assert found[-1]["request_id"] == got.headers["request-id"]
        assert "message_stop" not in got.text
    else:
        assert found[-1]["type"] == "response.failed"
        assert [one["sequence_number"] for one in found] == list(range(len(found)))
        assert found[-1]["response"]["output"][0]["content"][0]["text"] == "Hm."
    assert "Well" in got.text
    assert 'outcome="failed"} 1.0' in metrics


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
@pytest.mark.parametrize(
    "body",
    [b"<html>", b"{}", b'{"choices": [{"message": {"content": "x"}, "finish_reason": null}]}'],
)
async def test_whole_response_that_is_no_chat_is_a_bad_gateway(path: str, body: bytes) -> None:
    """A response that is no finished chat is an error of the upstream, in the form of the API."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    async with in_front_of(only_chats(handler)) as (_, _, http):
        got = await http.post(path, json=BODIES[path])
    assert got.status_code == 502
    assert isinstance(got.json()["error"]["message"], str)
    assert ("type" in got.json()) == (path == MESSAGES)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"top_logprobs": 3}, "top_logprobs"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0].type"),
        (RESPONSES, {"input": [{"type": "computer_call"}]}, "input[0].type"),
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
async def test_feature_without_translation_is_refused_by_name(
    path: str, fields: dict[str, Any], param: str
) -> None:
    """A field that a chat cannot express gets status 400 with its name, and no chat is sent."""
    async with in_front_of(only_chats(answer), chats_only=True) as (engine, _, http):
        got = await http.post(path, json={**BODIES[path], **fields})
        assert got.status_code == 400, got.text
        assert param in got.json()["error"]["message"]
        assert not engine.requests
        assert (await http.post(path, json=BODIES[path])).status_code == 200


async def test_errors_name_the_parameters_of_the_client() -> None:
    """An error about a parameter of the chat names the parameter of the request."""
    body = b'{"error":{"message":"too large","type":"invalid_request_error","param":"max_tokens"}}'
    async with in_front_of(only_chats(refusal(400, body))) as (_, _, http):
        got = await http.post(RESPONSES, json={**BODIES[RESPONSES], "max_output_tokens": 9})
        assert (got.status_code, got.json()["error"]["param"]) == (400, "max_output_tokens")
        assert got.json()["error"]["message"] == "too large"
        got = await http.post(MESSAGES, json=BODIES[MESSAGES])
        assert got.status_code == 400
        assert got.json()["error"] == {"type": "invalid_request_error", "message": "too large"}


@pytest.mark.parametrize("path", [f"{MESSAGES}/count_tokens", f"{RESPONSES}/input_tokens"])
async def test_tokens_are_counted_by_servers_that_tokenise_chats(path: str) -> None:
    """Counts come from `/tokenize`. A server that does not count chats there gives status 501, and
    one without `/tokenize` an error with the client's endpoint."""
    body = {"model": "theirs", "messages": HI} if path.startswith(MESSAGES) else {"input": "hi"}
    async with in_front_of(only_chats(answer, tokens=5)) as (engine, _, http):
        got = await http.post(path, json=body)
        assert (got.status_code, got.json()["input_tokens"]) == (200, 5)
        sent = json.loads(engine.bodies[-1])
        assert sent == {"model": "theirs", "messages": HI}

    async def without_count(request: web.Request) -> web.StreamResponse:
        if request.path == "/tokenize":
            return web.json_response({"tokens": []})
        return await refusal(404)(request)

    async with in_front_of(without_count) as (_, _, http):
        assert (await http.post(path, json=body)).status_code == 501
    async with in_front_of(only_chats(answer)) as (_, _, http):
        got = await http.post(path, json=body)
        assert got.status_code == 404
        assert path in got.json()["error"]["message"]


async def test_large_request_is_translated_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large body is translated beside the event loop, with the alias replaced in the chat."""
    import threading

    from draftgate.gateway.http.translation import translations

    threads: list[int] = []

    def watched(*args: Any, **named: Any) -> bytes:
        threads.append(threading.get_ident())
        return chat_body(*args, **named)

    monkeypatch.setattr(translations, "chat_body", watched)
    large = [{"role": "user", "content": "x" * CONVERTED_INLINE_BYTES}]
    async with in_front_of(only_chats(answer), aliases={"chat": "theirs"}) as (engine, _, http):
        for messages in (HI, large):
            body = {**BODIES[MESSAGES], "model": "chat", "messages": messages}
            assert (await http.post(MESSAGES, json=body)).status_code == 200
        assert json.loads(engine.bodies[-1]) == {
            "model": "theirs",
            "messages": large,
            "max_tokens": 9,
        }
    assert threads[0] == threading.get_ident() != threads[1]


async def test_comments_of_a_silent_upstream_become_pings() -> None:
    """A comment tells that the upstream works, which Anthropic's clients see as a ping."""
    handler = only_chats(stream_of(CHUNKS[0], b": waiting\n\n", *CHUNKS[2:4], chunk("stop"), DONE))
    async with in_front_of(handler) as (_, _, http):
        got = await http.post(MESSAGES, json={**BODIES[MESSAGES], "stream": True})
    kinds = [one["type"] for one in events(got.text)]
    assert kinds[:2] == ["message_start", "ping"]
    assert kinds[-1] == "message_stop"


@pytest.mark.parametrize(
    ("finish", "stop", "reasons"),
    [
        ("stop", None, ("end_turn", "completed")),
        ("stop", "then", ("stop_sequence", "completed")),
        ("stop", 7, ("end_turn", "completed")),
        ("length", None, ("max_tokens", "incomplete")),
        ("content_filter", None, ("refusal", "incomplete")),
    ],
)
async def test_finish_reasons_are_translated(
    finish: str, stop: str | int | None, reasons: tuple[str, str]
) -> None:
    """Each finish reason of a chat has an equivalent, whole and streamed."""
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": finish, "stop_reason": stop}
    last = b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode()
    for path, reason in zip((MESSAGES, RESPONSES), reasons, strict=True):
        async with in_front_of(only_chats(stream_of(last, DONE))) as (_, _, http):
            got = events((await http.post(path, json={**BODIES[path], "stream": True})).text)
        if path == MESSAGES:
            assert got[-2]["delta"]["stop_reason"] == reason
        else:
            assert got[-2]["response"]["status"] == reason
            why = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(finish)
            assert (got[-2]["response"]["incomplete_details"] or {}).get("reason") == why


REAL = Path(os.environ.get("REAL_MODELS", ""))
VLLM = REAL / "vllm" / "bin" / "vllm"
PARIS = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
REAL_REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (MESSAGES, {"messages": PARIS, "max_tokens": 12, "system": "Be brief."}),
    (MESSAGES, {"messages": PARIS, "max_tokens": 12, "stop_sequences": ["Paris"]}),
    (MESSAGES, {"messages": PARIS, "max_tokens": 3}),
    (
        MESSAGES,
        {
            "messages": PARIS,
            "max_tokens": 30,
            "tools": [{"name": "find", "input_schema": CITY}],
            "tool_choice": {"type": "tool", "name": "find"},
        },
    ),
    (RESPONSES, {"input": PARIS[0]["content"], "max_output_tokens": 12}),
    (RESPONSES, {"input": PARIS, "instructions": "Be brief.", "max_output_tokens": 12}),
]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM server with SmolLM2."""
    port = free_port()
    command = [str(VLLM), "serve", str(REAL / "smollm2"), "--served-model-name", "smollm2"]
    command += ["--port", str(port), "--host", "127.0.0.1", "--dtype", "float32"]
    command += ["--max-model-len", "1024", "--enforce-eager"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    process = start(command, None, tmp_path_factory.mktemp("vllm") / "log", variables)
    try:
        wait_until_up(process, f"http://127.0.0.1:{port}/health", None, 600.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        stop(process)


def output_of(path: str, got: httpx.Response) -> Any:
    """Return what a response of vLLM or its translation says, whole or streamed."""
    assert got.status_code == 200, got.text
    if path == MESSAGES:
        if not got.headers["content-type"].startswith("text/event-stream"):
            found = got.json()
            blocks = [(b["type"], b.get("text"), b.get("input")) for b in found["content"]]
            return blocks, found["stop_reason"], found["usage"]["output_tokens"]
        found = events(got.text)
        deltas = [one["delta"] for one in found if one["type"] == "content_block_delta"]
        (end,) = (one for one in found if one["type"] == "message_delta")
        return deltas, end["delta"]["stop_reason"], end["usage"]["output_tokens"]
    if not got.headers["content-type"].startswith("text/event-stream"):
        found = got.json()
    else:
        found = events(got.text.replace("data: [DONE]", ""))[-1]["response"]
    texts = [part["text"] for item in found["output"] for part in item.get("content") or ()]
    return texts, found["status"], found["usage"]["output_tokens"]


@pytest.mark.skipif(not VLLM.exists(), reason="needs vLLM and SmolLM2 in REAL_MODELS")
async def test_translated_responses_of_vllm_equal_its_own(vllm: str) -> None:
    """A greedy request has the same output from vLLM's endpoint and from its chats: the same
    blocks, deltas, stop reason and usage, also for a call of a tool."""
    nodes = [
        running(backend="openai", upstream=(UpstreamSettings(url=vllm, chats_only=only),))
        for only in (False, True)
    ]
    async with nodes[0] as native, nodes[1] as chats, client(native) as a, client(chats) as b:
        for path, fields in REAL_REQUESTS:
            for stream in (False, True):
                body = {**fields, "model": "smollm2", "temperature": 0, "stream": stream}
                own, translated = [await http.post(path, json=body) for http in (a, b)]
                assert output_of(path, translated) == output_of(path, own)
        counted = {"model": "smollm2", "messages": PARIS}
        counts = [await http.post(f"{MESSAGES}/count_tokens", json=counted) for http in (a, b)]
        assert len({one.json()["input_tokens"] for one in counts}) == 1
