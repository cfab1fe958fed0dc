"""Tests of streams that break off at one upstream, and continue on another one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.openai.continuation import JoinedStream, rest_of
from draftgate.backends.openai.events import EventScan, StreamEnding
from draftgate.backends.openai.stream_output import NotContinuable, read_output
from draftgate.backends.openai.upstream import OpenAIUpstream
from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch import watchdog
from draftgate.gateway.http.replies.metric_shapes import ResumeReply
from draftgate.policies.resilience.liveness import StreamSilence
from tests.gateway.continued_engines import (
    ERROR_EVENT,
    PIECES,
    PROMPT,
    PROMPT_TOKENS,
    TEXT,
    Engine,
    Fault,
    events_of,
    known_tokens,
)
from tests.gateway.harness import client, events, is_idle, until
from tests.gateway.upstreams import SSE, after, forwarding, stream_of, upstream
from tests.gateway.upstreams import cut_after as cut_stream

CHAT = "/v1/chat/completions"
TEXTS = "/v1/completions"
USAGE = {"include_usage": True}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": PROMPT}]},
    TEXTS: {"prompt": PROMPT, "max_tokens": 100},
}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """Return the body of a request for a stream."""
    return {"model": "theirs", "stream": True, "seed": 5, **BODIES[path], **fields}


@asynccontextmanager
async def two(
    first: Engine, second: Engine, **settings: Any
) -> AsyncIterator[tuple[Listening, httpx.AsyncClient]]:
    """Run a node with two upstreams, the first of which gets the first request."""
    async with upstream(first) as one, upstream(second) as other:
        one.settings, other.settings = {"name": "one"}, {"name": "other"}
        async with (
            forwarding(one, other, routing="round_robin", **settings) as gateway,
            client(gateway) as http,
        ):
            yield gateway, http


def shown_text(chunks: list[dict[str, Any]]) -> str:
    """Return the text of chunks."""
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(
        choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        for choice in choices
    )


def check_stream(text: str, path: str, *, usage: bool, output: int = len(PIECES)) -> Any:
    """Check that the client sees one undisturbed stream, and return its last chunk."""
    *chunks, done = events(text)
    assert done == "[DONE]"
    assert shown_text(chunks) == "".join(PIECES[:output])
    assert {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        ("a-1", 1, "theirs")
    }
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert reasons == ["stop" if output == len(PIECES) else "length"]
    roles = [choice for choice in choices if "role" in choice.get("delta", {})]
    assert len(roles) == (path == CHAT)
    if usage:
        counts = chunks[-1]["usage"]
        assert counts["prompt_tokens"] == PROMPT_TOKENS
        assert counts["completion_tokens"] == output
        assert counts["total_tokens"] == PROMPT_TOKENS + output
        assert counts["prompt_tokens_details"]["cached_tokens"] <= PROMPT_TOKENS
    return chunks[-1]


def cut_after(path: str, body: dict[str, Any], count: int) -> int:
    """Return the number of bytes of the first events of a stream."""
    return sum(map(len, events_of(path, body)[:count]))


def names(gateway: Listening) -> list[str]:
    """Return the ids of the upstreams."""
    return [worker.worker_id for worker in gateway.node.fleet.workers]


@pytest.mark.parametrize("path", [CHAT, TEXTS], ids=["chat", "text"])
@pytest.mark.parametrize("fault", [one for one in Fault if one is not Fault.STALL])
async def test_stream_of_a_failed_upstream_continues_on_another(fault: Fault, path: str) -> None:
    """The client sees one stream with one id, one usage and one ending, whatever the failure."""
    body = body_of(path, stream_options=USAGE)
    first, second = Engine("a", fault, cut_after(path, body, 5)), Engine("b")
    async with two(first, second) as (gateway, http):
        reply = await http.post(path, json=body)
        last = check_stream(reply.text, path, usage=True)
        source, sink = names(gateway)
        kept = 4 if path == CHAT else 5
        assert last["metrics"] == {
            "worker_id": sink,
            "resumes": [
                {
                    "prompt": 0,
                    "from_worker_id": source,
                    "to_worker_id": sink,
                    "kept_tokens": kept,
                    "same_numerics_class": False,
                }
            ],
        }
        assert set(last["metrics"]["resumes"][0]) == set(ResumeReply.__struct_fields__)
        (rest,) = second.bodies
        assert rest["seed"] == 5
        assert rest.get("max_tokens") == (None if path == CHAT else 100 - kept)
        metrics = (await http.get("/metrics")).text
        labels = 'cause="failed",model_name="theirs",outcome="other_class"'
        assert f"draftgate_resumes_total{{{labels}}} 1.0" in metrics
        assert 'retries_total{cause="lost",model_name="theirs",outcome="allowed"} 1.0' in metrics
        tokens = 'draftgate_generation_tokens_total{model_name="theirs"}'
        assert f"{tokens} {float(len(PIECES))}" in metrics
        moves = (await http.get("/workers")).json()["moves"]
        assert [(one["move"]["source"], one["move"]["sink"]) for one in moves] == [(source, sink)]
        assert is_idle(gateway.node)


@pytest.mark.parametrize("is_out", [False, True], ids=["open", "out"])
async def test_stalled_stream_continues_on_another_upstream(
    is_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream whose upstream sends nothing for the time of the setting continues elsewhere, and
    sooner if the probes of the upstream have failed meanwhile."""
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(watchdog, "UNREACHABLE_PATIENCE_S", 0.05)
    body = body_of(CHAT)
    first, second = Engine("a", Fault.STALL, cut_after(CHAT, body, 5)), Engine("b")
    stall_s = 3600.0 if is_out else 0.05
    async with two(first, second, upstream_stall_s=stall_s) as (gateway, http):
        if is_out:
            lost = gateway.node.fleet.workers[0].backend
            failure = property(lambda one: "out" if one is lost else None)
            monkeypatch.setattr(OpenAIUpstream, "failure", failure)
        last = check_stream((await http.post(CHAT, json=body)).text, CHAT, usage=False)
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["metrics"]["resumes"]
        metrics = (await http.get("/metrics")).text
        labels = 'cause="stalled",model_name="theirs",outcome="other_class"'
        assert f"draftgate_resumes_total{{{labels}}} 1.0" in metrics
        assert is_idle(gateway.node)


@pytest.mark.parametrize("reason", ["request", "alone"])
async def test_stalled_stream_waits_if_nothing_can_continue_it(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upstream that only pauses still ends the streams that no other one can continue."""
    monkeypatch.setattr(watchdog, "CHECK_INTERVAL_S", 0.01)
    body = body_of(CHAT, **({"stop": ["x"]} if reason == "request" else {}))
    parts = [b"".join(events_of(CHAT, body)[:5]), b"".join(events_of(CHAT, body)[5:])]
    resumes = asyncio.Event()

    async def pauses(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(parts[0])
        await resumes.wait()
        await response.write(parts[1])
        await response.write_eof()
        return response

    checks = 0

    async with two(pauses, Engine("b"), upstream_stall_s=0.02) as (gateway, http):  # type: ignore[arg-type]
        if reason == "alone":
            gateway.node.fleet.workers[1].drained = True
        silence = StreamSilence.check

        def check(self: StreamSilence, *args: Any, **named: Any) -> bool:
            nonlocal checks
            lost = silence(self, *args, **named)
            checks += 1
            if checks == 10:
                resumes.set()
            return lost

        monkeypatch.setattr(StreamSilence, "check", check)
        reply = asyncio.create_task(http.post(CHAT, json=body))
        if reason == "request":  # which is no longer checked once it is known
            await until(lambda: checks >= 2)
            resumes.set()
        last = check_stream((await reply).text, CHAT, usage=False)
        assert "metrics" not in last


FIELDS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    (CHAT, {"n": 2}),
    (CHAT, {"logprobs": True}),
    (TEXTS, {"logprobs": 0}),
    (TEXTS, {"best_of": 2}),
    (TEXTS, {"echo": True}),
    (TEXTS, {"suffix": "x"}),
    (TEXTS, {"max_tokens": None}),
    (TEXTS, {"prompt": [PROMPT, PROMPT]}),
    (TEXTS, {"prompt": [0, 1, 2, 3, 4, 5, 6]}),
    (CHAT, {"response_format": {"type": "json_object"}}),
    (CHAT, {"structured_outputs": {"regex": "x"}}),
    (CHAT, {"guided_regex": "x"}),
    (CHAT, {"grammar": "x"}),
    (CHAT, {"stop": ["x"]}),
    (CHAT, {"frequency_penalty": 0.5}),
    (CHAT, {"some_new_field": 1}),
    (
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}],
                }
            ]
        },
    ),
    (CHAT, {"messages": [{"role": "assistant", "content": ""}]}),
]


@pytest.mark.parametrize(("path", "fields"), FIELDS, ids=lambda one: str(one)[:40])
async def test_requests_whose_rest_is_not_trusted_end_with_an_error(
    path: str, fields: dict[str, Any]
) -> None:
    """A stream that would not be what it had been ends with one typed error, as without others."""
    body = body_of(path, **fields)
    handler = cut_stream(b"".join(events_of(path, body_of(path))[:4]))
    second = Engine("b")
    async with two(handler, second) as (gateway, http):  # type: ignore[arg-type]
        *_, error = events((await http.post(path, json=body)).text)
        assert error["error"]["code"] == "upstream_failed"
        assert second.bodies == []
        metrics = (await http.get("/metrics")).text
        labels = 'cause="failed",model_name="theirs",outcome="unable"'
        assert f"draftgate_resumes_total{{{labels}}} 1.0" in metrics
        assert is_idle(gateway.node)


@pytest.mark.parametrize(
    "delta", [{"tool_calls": [{"index": 0}]}, {"reasoning_content": "hm"}, {"refusal": "no"}]
)
async def test_streams_with_more_than_text_are_not_continued(delta: dict[str, Any]) -> None:
    """Tool calls and reasoning in flight end with an error, whatever the request asked for."""
    chunk = {"id": "a-1", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    handler = cut_stream(b"data: %s\n\n" % json.dumps(chunk).encode())
    async with two(handler, Engine("b")) as (_, http):  # type: ignore[arg-type]
        *_, error = events((await http.post(CHAT, json=body_of(CHAT))).text)
        assert error["error"]["code"] == "upstream_failed"


async def test_error_event_of_a_lost_upstream_passes_if_nothing_continues() -> None:
    """A client whose stream cannot continue gets the error event that the upstream has sent."""
    body = body_of(CHAT, n=2)
    handler = stream_of(events_of(CHAT, body_of(CHAT))[0], ERROR_EVENT)
    async with two(handler, Engine("b")) as (_, http):  # type: ignore[arg-type]
        text = (await http.post(CHAT, json=body)).text
        assert text.endswith(ERROR_EVENT.decode())
        assert text.count("error") == ERROR_EVENT.count(b"error")


async def test_error_event_about_the_request_is_no_loss() -> None:
    """An error with a status of the 400s says that any upstream would refuse the request."""
    event = ERROR_EVENT.replace(b"500", b"400")
    handler = stream_of(events_of(CHAT, body_of(CHAT))[0], event)
    second = Engine("b")
    async with two(handler, second) as (_, http):  # type: ignore[arg-type]
        assert (await http.post(CHAT, json=body_of(CHAT))).text.endswith(event.decode())
        assert second.bodies == []


async def test_number_of_continuations_is_bounded() -> None:
    """A stream that loses one upstream after another ends with an error after `--max-resumes`."""
    body = body_of(TEXTS)
    first = Engine("a", Fault.CLOSE, cut_after(TEXTS, body, 2), faults=9)
    second = Engine("b", Fault.CLOSE, cut_after(TEXTS, body, 2), faults=9)
    async with two(first, second, max_resumes=1) as (gateway, http):
        *chunks, error = events((await http.post(TEXTS, json=body)).text)
        assert shown_text(chunks) == "".join(PIECES[:4])
        assert error["error"]["code"] == "upstream_failed"
        metrics = (await http.get("/metrics")).text
        labels = 'cause="failed",model_name="theirs",outcome="exhausted"'
        assert f"draftgate_resumes_total{{{labels}}} 1.0" in metrics
        assert is_idle(gateway.node)


async def test_stream_continues_several_times() -> None:
    """A stream that loses two upstreams is still one stream, and names both losses."""
    body = body_of(TEXTS, stream_options=USAGE)
    first = Engine("a", Fault.CLOSE, cut_after(TEXTS, body, 2), faults=2)
    second = Engine("b", Fault.CLOSE, cut_after(TEXTS, body, 2))
    async with two(first, second, max_resumes=4) as (gateway, http):
        last = check_stream((await http.post(TEXTS, json=body)).text, TEXTS, usage=True)
        kept = [resume["kept_tokens"] for resume in last["metrics"]["resumes"]]
        assert kept == [2, 4, 6]
        assert is_idle(gateway.node)


async def test_retry_budget_limits_continuations() -> None:
    """A stream ends with an error if the retry budget of upstreams is used up."""
    body = body_of(CHAT)
    first, second = Engine("a", Fault.CLOSE, cut_after(CHAT, body, 3)), Engine("b")
    none = {"upstream_retry_share": 0.0, "upstream_retries_per_s": 0.0}
    async with two(first, second, **none) as (_, http):
        *_, error = events((await http.post(CHAT, json=body)).text)
        assert error["error"]["code"] == "upstream_failed"
        metrics = (await http.get("/metrics")).text
        assert 'cause="failed",model_name="theirs",outcome="budget"} 1.0' in metrics
        assert second.bodies == []


@pytest.mark.parametrize("kept_bytes", [0, 500])
async def test_long_streams_are_not_kept(kept_bytes: int) -> None:
    """A stream that exceeds the bytes that are kept ends with an error."""
    body = body_of(CHAT)
    first, second = Engine("a", Fault.CLOSE, cut_after(CHAT, body, 8)), Engine("b")
    async with two(first, second, upstream_kept_bytes=kept_bytes) as (_, http):
        *_, error = events((await http.post(CHAT, json=body)).text)
        assert error["error"]["code"] == "upstream_failed"
        assert second.bodies == []


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_rest_that_no_upstream_accepts_ends_with_an_error(status: int) -> None:
    """A stream ends with one typed error if the other upstream refuses the rest."""
    body = body_of(CHAT)
    first, second = Engine("a", Fault.CLOSE, cut_after(CHAT, body, 5)), Engine("b", status=status)
    async with two(first, second) as (gateway, http):
        *chunks, error = events((await http.post(CHAT, json=body)).text)
        assert shown_text(chunks) == "".join(PIECES[:4])
        assert error["error"]["code"] == "upstream_failed"
        assert is_idle(gateway.node)


@pytest.mark.parametrize("counts", [True, False], ids=["counted", "one-per-chunk"])
@pytest.mark.parametrize("known", ["nothing", "usage", "ids"])
async def test_rest_has_the_remaining_tokens(known: str, counts: bool) -> None:
    """The limit of the output holds for the whole stream, by whatever the tokens are known."""
    fields: dict[str, Any] = {"max_tokens": 8, "min_tokens": 6}
    if known == "usage":
        fields["stream_options"] = {**USAGE, "continuous_usage_stats": True}
    if known == "ids":
        fields["return_token_ids"] = True
    body = body_of(TEXTS, **fields)
    first, second = Engine("a", Fault.CLOSE, cut_after(TEXTS, body, 3)), Engine("b")
    second.counts = counts
    async with two(first, second) as (_, http):
        text = (await http.post(TEXTS, json=body)).text
        check_stream(text, TEXTS, usage=known == "usage", output=8)
        assert (second.bodies[0]["max_tokens"], second.bodies[0]["min_tokens"]) == (5, 3)
        chunks = events(text)[:-1]
        if known == "usage":
            counted = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counted == [1, 2, 3, 4, 5, 6, 7, 8, 8]
        if known == "ids":
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            assert [one for choice in choices for one in choice["token_ids"]] == list(range(8))
            assert sum("prompt_token_ids" in choice for choice in choices) == 1
            assert second.bodies[0]["prompt"] == [*range(PROMPT_TOKENS), 0, 1, 2]


async def test_prompt_of_tokens_continues_with_the_tokens_of_the_output() -> None:
    """A completion of tokens continues if the server returned those of its output."""
    prompt = list(range(PROMPT_TOKENS))
    body = body_of(TEXTS, prompt=prompt, return_token_ids=True)
    first, second = Engine("a", Fault.CLOSE, cut_after(TEXTS, body, 3)), Engine("b")
    async with two(first, second) as (_, http):
        check_stream((await http.post(TEXTS, json=body)).text, TEXTS, usage=False)
        assert second.bodies[0]["prompt"] == [*prompt, 0, 1, 2]


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("path", [CHAT, TEXTS], ids=["chat", "text"])
async def test_stream_that_breaks_off_after_its_output_ends_without_another_upstream(
    path: str, usage: bool
) -> None:
    """A client that has the finish reason gets the usage and `[DONE]`, computed here."""
    body = body_of(path, **({"stream_options": USAGE} if usage else {}))
    count = len(PIECES) + (path == CHAT)
    first, second = Engine("a", Fault.CLOSE, cut_after(path, body, count)), Engine("b")
    async with two(first, second) as (gateway, http):
        *chunks, done = events((await http.post(path, json=body)).text)
        assert done == "[DONE]"
        assert shown_text(chunks) == TEXT
        assert ("usage" in chunks[-1]) is usage
        if usage:
            assert chunks[-1]["usage"]["completion_tokens"] == count
        assert second.bodies == []
        assert is_idle(gateway.node)


async def test_stream_at_its_limit_ends_without_another_upstream() -> None:
    """A stream whose output has its maximum length gets its finish reason here."""
    body = body_of(TEXTS, max_tokens=3, stream_options=USAGE)
    cut = b"".join(events_of(TEXTS, body)[:3]).replace(b'"length"', b"null")
    second = Engine("b")
    async with two(cut_stream(cut), second) as (gateway, http):  # type: ignore[arg-type]
        check_stream((await http.post(TEXTS, json=body)).text, TEXTS, usage=False, output=3)
        assert second.bodies == []
        assert is_idle(gateway.node)


async def test_client_continues_a_message_of_its_own() -> None:
    """The text so far is added to a last message that the client wants continued."""
    begin = {"role": "assistant", "content": "".join(PIECES[:2])}
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    body = body_of(CHAT, messages=[begin], **fields)
    first, second = Engine("a", Fault.CLOSE, cut_after(CHAT, body, 4)), Engine("b")
    async with two(first, second) as (_, http):
        *chunks, _ = events((await http.post(CHAT, json=body)).text)
        assert shown_text(chunks) == "".join(PIECES[2:])
        assert second.bodies[0]["messages"] == [
            {"role": "assistant", "content": "".join(PIECES[:5])}
        ]


async def test_queued_rest_precedes_new_requests() -> None:
    """The rest of a stream waits for the capacity of the other upstream, ahead of new requests."""
    body = body_of(CHAT)
    gate, second = asyncio.Event(), Engine("b")
    first = Engine("a", Fault.CLOSE, cut_after(CHAT, body, 5))
    busy = after(gate, second)
    async with two(first, busy, max_sequences=1) as (gateway, http):  # type: ignore[arg-type]
        gateway.node.fleet.workers[0].drained = True
        blocking = asyncio.create_task(http.post(CHAT, json=body_of(CHAT, user="blocking")))
        await until(lambda: gateway.node.in_flight == 1)
        gateway.node.fleet.workers[0].drained = False
        lost = asyncio.create_task(http.post(CHAT, json=body_of(CHAT, user="lost")))
        queue = gateway.node.models[0].dispatcher.queue
        gateway.node.fleet.workers[0].drained = False
        await until(lambda: first.bodies and len(queue) == 1)
        gateway.node.fleet.workers[0].drained = True
        new = asyncio.create_task(http.post(CHAT, json=body_of(CHAT, user="new")))
        await until(lambda: len(queue) == 2)
        gate.set()
        for reply in (blocking, lost, new):
            assert events((await reply).text)[-1] == "[DONE]"
        assert [one["user"] for one in second.bodies] == ["blocking", "lost", "new"]
        assert is_idle(gateway.node)


async def test_log_line_names_both_upstreams(caplog: pytest.LogCaptureFixture) -> None:
    """The log line of a continued request names its upstreams and the number of continuations."""
    body = body_of(CHAT)
    first, second = Engine("a", Fault.CLOSE, cut_after(CHAT, body, 5)), Engine("b")
    async with two(first, second) as (gateway, http):
        with caplog.at_level(logging.INFO, logger="draftgate"):
            await http.post(CHAT, json=body)
        (line,) = [one for one in caplog.records if one.getMessage() == "request"]
        fields = line.__dict__["draftgate_fields"]
        assert fields["worker"] == ",".join(names(gateway))
        assert fields["resumes"] == 1


WANTED = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 15),
        "stream_options": st.sampled_from([USAGE, {**USAGE, "continuous_usage_stats": True}]),
        "return_token_ids": st.just(True),
    },
)


@given(st.sampled_from([CHAT, TEXTS]), WANTED, st.data())
def test_cut_at_any_byte_gives_the_same_stream(
    path: str, fields: dict[str, Any], data: st.DataObject
) -> None:
    """Text, usage and ending are those of an undisturbed stream, wherever its bytes end."""
    body = body_of(path, **fields)
    whole = events_of(path, body)
    stream = b"".join(whole)
    cut = data.draw(st.integers(0, len(stream) - 1))
    scan = EventScan()
    passed = scan.feed(stream[:cut])
    if scan.ending is StreamEnding.DONE:
        return
    output = read_output([passed])
    rest = rest_of(json.dumps(body).encode(), output, is_chat=path == CHAT)
    tokens = known_tokens(rest.text) if output.tokens is None else output.tokens
    joined = JoinedStream(rest, tokens, {"worker_id": "b"}, output.prompt_tokens or PROMPT_TOKENS)
    if output.has_finished or rest.is_complete(tokens):
        shown = passed + joined.closing()
    else:
        following = json.loads(rest.request(tokens))
        shown = passed + b"".join(map(joined.convert, events_of(path, following, "other")))
    *chunks, done = events(shown.decode())
    *expected, _ = events(stream.decode())
    assert done == "[DONE]"
    assert shown_text(chunks) == shown_text(expected)
    assert shown.count(b'finish_reason":"') + shown.count(b'finish_reason": "') == 1
    if output.names:
        assert {chunk["id"] for chunk in chunks} == {"a-1"}
    if "stream_options" in fields:
        first, last = chunks[-1]["usage"], expected[-1]["usage"]
        assert {**first, "prompt_tokens_details": 0} == {**last, "prompt_tokens_details": 0}


NAMES = st.sampled_from(
    [
        *("choices", "usage", "delta", "text", "token_ids", "content", "index", "metrics", "id"),
        *("finish_reason", "logprobs", "prompt_token_ids", "prompt_tokens", "completion_tokens"),
        *("prompt_tokens_details", "cached_tokens", "error", "role", "created"),
    ]
)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 3) | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=2),
    max_leaves=4,
)
NAMED = st.dictionaries(NAMES, ODD, max_size=4)
CHUNKS = st.dictionaries(NAMES, ODD | NAMED | st.lists(NAMED | ODD, max_size=2), max_size=5)


@given(st.binary(max_size=40) | CHUNKS.map(lambda chunk: json.dumps(chunk).encode()))
def test_chunks_of_any_form_are_read_or_refused(data: bytes) -> None:
    """A broken upstream cannot raise anything but the refusal to continue."""
    with suppress(NotContinuable):
        output = read_output([b"data: %s\n\n" % data.replace(b"\n", b" ").replace(b"\r", b"")])
        with suppress(NotContinuable):
            rest_of(data, output, is_chat=True)
        rest = rest_of(json.dumps(body_of(TEXTS)).encode(), output, is_chat=False)
        joined = JoinedStream(rest, 0, {}, 0)
        joined.convert(b"data: %s\n\n" % data.replace(b"\n", b" ").replace(b"\r", b""))


@pytest.mark.parametrize("counts", [True, False], ids=["tokenize", "chunks"])
@pytest.mark.parametrize("path", [CHAT, TEXTS], ids=["chat", "text"])
async def test_rest_has_the_name_that_the_next_upstream_has_for_the_model(
    path: str, counts: bool
) -> None:
    """The rest of a stream of an alias goes to the model that the alias stands for there."""
    body = body_of(path, model="alias", stream_options=USAGE)
    first = Engine("a", cut=cut_after(path, body, 5))
    second = Engine("b", counts=counts)
    async with upstream(first) as one, upstream(second) as other:
        one.models, other.models = ("theirs",), ("another",)
        one.settings = {"name": "one", "aliases": {"alias": "theirs"}}
        other.settings = {"name": "other", "aliases": {"alias": "another"}}
        async with (
            forwarding(one, other, routing="round_robin") as gateway,
            client(gateway) as http,
        ):
            reply = await http.post(path, json=body)
            check_stream(reply.text, path, usage=counts)
        assert [sent["model"] for sent in (*first.bodies, *second.bodies)] == ["theirs", "another"]
        (rest,) = second.bodies
        begun = rest["messages"][-1]["content"] if path == CHAT else rest["prompt"]
        assert PIECES[0] in begun
        assert {json.loads(sent)["model"] for sent in other.bodies} == {"another"}
