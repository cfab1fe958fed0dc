"""Each fault of the mock server has its verdict, and intact streams have none."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from aiohttp import web

from draftgate.loadgen.checking.audit import ABORTS, StreamAudit, Verdict
from draftgate.loadgen.sending.client import (
    ClientTimeouts,
    OpenAIClient,
    StreamExchange,
    first_model,
    open_session,
    start_clock,
)
from draftgate.loadgen.types import ChatMessage, PlannedRequest, Slo, TextChunk
from tests.loadgen.mock_server import (
    EVENT_FAULTS,
    TRANSPORT_FAULTS,
    Mock,
    Script,
    events_of,
    question,
    serving,
    text_of,
)

TRACE = r"00-([0-9a-f]{32})-[0-9a-f]{16}-01"
"""The header `traceparent` of a sampled trace (W3C Trace Context)."""

EVENT_VERDICTS = {
    "truncated": Verdict.NO_FINISH_REASON,
    "no_finish_reason": Verdict.NO_FINISH_REASON,
    "no_usage": Verdict.NO_USAGE,
    "no_done": Verdict.NO_DONE,
    "done_twice": Verdict.AFTER_DONE,
    "text_after_done": Verdict.AFTER_DONE,
    "finish_twice": Verdict.AFTER_FINISH,
    "text_after_finish": Verdict.AFTER_FINISH,
    "chunk_twice": Verdict.DUPLICATED,
    "usage_twice": Verdict.DUPLICATED,
    "usage_shrinks": Verdict.BAD_USAGE,
    "usage_negative": Verdict.BAD_USAGE,
    "usage_no_sum": Verdict.BAD_USAGE,
    "too_long": Verdict.TOO_LONG,
    "foreign_id": Verdict.CROSSED,
    "foreign_choice": Verdict.CROSSED,
    "error_event": Verdict.ERROR_EVENT,
    "abort": Verdict.ERROR_EVENT,
    "not_json": Verdict.MALFORMED,
    "no_choices": Verdict.MALFORMED,
    "wrong_type": Verdict.MALFORMED,
}
TRANSPORT_VERDICTS = {
    "status": Verdict.HTTP_STATUS,
    "no_stream": Verdict.NO_STREAM,
    "hang_up": Verdict.NO_CONNECTION,
    "reset": Verdict.CUT,
    "cut": Verdict.CUT,
    "silent": Verdict.TIMEOUT,
    "stall": Verdict.STALLED,
}


def audited(events: list[str], **expected: object) -> StreamAudit:
    audit = StreamAudit(**{"max_tokens": 8} | expected)
    for event in events:
        audit.add(event.encode())
    audit.end()
    return audit


def audit_script(script: Script, *, chat: bool = False) -> StreamAudit:
    body = question(script, prompt=None, messages=(ChatMessage("user", "x"),)).body("mock")
    if not chat:
        body = question(script).body("mock")
    return audited(events_of(script, body, "answer"))


async def send_request(
    script: Script, timeouts: ClientTimeouts | None = None, mock: Mock | None = None
):
    async with serving(mock or Mock()) as url, open_session() as session:
        planned = PlannedRequest(0, None, question(script))
        timeouts = timeouts or ClientTimeouts(5.0, 5.0)
        return await OpenAIClient(session, url, "mock", timeouts).send_request(planned)


def test_the_tables_are_complete() -> None:
    """The tests cover every fault of the mock and every verdict."""
    assert set(EVENT_VERDICTS) == set(EVENT_FAULTS)
    assert {*TRANSPORT_VERDICTS, "same_id"} == set(TRANSPORT_FAULTS)
    earned = {*EVENT_VERDICTS.values(), *TRANSPORT_VERDICTS.values()}
    assert earned == set(Verdict) - {Verdict.OK, Verdict.INTERRUPTED}


@pytest.mark.parametrize("fault", EVENT_VERDICTS)
def test_every_fault_of_content_has_its_verdict(fault: str) -> None:
    """Missing, repeated, added or contradicting events fail with their cause."""
    audit = audit_script(Script(fault=fault))
    assert audit.verdict is EVENT_VERDICTS[fault], audit.detail
    assert audit.detail


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("per_chunk", [1, 3, 8])
@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("role", [False, True])
def test_intact_streams_are_ok(chat: bool, per_chunk: int, continuous: bool, role: bool) -> None:
    """The audit accepts chats, roles, several tokens per chunk and usage counts."""
    script = Script(per_chunk=per_chunk, continuous=continuous, role=role)
    audit = audit_script(script, chat=chat)
    assert audit.verdict is Verdict.OK, audit.detail
    assert audit.texts == ("".join(text_of(1, 8)),)
    assert audit.finish_reasons == ["length"]


@pytest.mark.parametrize("fault", TRANSPORT_VERDICTS)
async def test_every_fault_of_the_transport_has_its_verdict(fault: str) -> None:
    """The client distinguishes refusals, broken connections, silence and stalls."""
    timeouts = {"silent": ClientTimeouts(total_s=0.2), "stall": ClientTimeouts(5.0, stall_s=0.1)}
    record = await send_request(Script(fault=fault), timeouts.get(fault))
    assert record.verdict == TRANSPORT_VERDICTS[fault].value, record.detail
    assert record.detail


async def test_faults_of_content_are_found_over_the_network() -> None:
    """A truncated response that ended normally is not a success."""
    record = await send_request(Script(fault="truncated"))
    assert (record.verdict, record.status) == ("no_finish_reason", 200)
    assert len(record.chunks) == 5


async def test_an_unreachable_server_is_no_connection() -> None:
    """The verdict is `no_connection` without a server."""
    async with serving(Mock()) as url:
        pass
    async with open_session() as session:
        planned = PlannedRequest(0, None, question())
        record = await OpenAIClient(session, url, "mock", ClientTimeouts(5.0)).send_request(planned)
    assert (record.verdict, record.status) == ("no_connection", None)


def test_an_id_belongs_to_one_stream() -> None:
    """The audit rejects a stream with the id of another stream, but ignores an empty id."""
    events = events_of(Script(), question().body("mock"), "answer")
    ids: set[str] = set()
    assert audited(events, ids=ids).verdict is Verdict.OK
    assert audited(events, ids=ids).verdict is Verdict.CROSSED
    anonymous = events_of(Script(), question().body("mock"), "")
    assert [audited(anonymous, ids=ids).verdict for _ in range(2)] == [Verdict.OK] * 2


def test_repetition_is_not_duplication() -> None:
    """A response of a repeated word is intact if its tokens are counted."""
    body = question().body("mock")
    first, *rest = events_of(Script(), body, "answer")
    assert audited([first] * 7 + rest[-3:]).verdict is Verdict.OK
    assert audited([first] * 8 + rest[-3:]).verdict is Verdict.DUPLICATED


def test_every_choice_must_end() -> None:
    """Each of n choices has its own text and needs its own finish_reason."""

    def chunk(index: int, text: str, reason: str | None) -> str:
        return json.dumps({"choices": [{"index": index, "text": text, "finish_reason": reason}]})

    events = [chunk(1, "b", "stop"), chunk(0, "a", None)]
    audit = audited([*events, "[DONE]"], choices=2, wants_usage=False)
    assert audit.verdict is Verdict.NO_FINISH_REASON
    assert "[0]" in audit.detail
    audit = audited([*events, chunk(0, "", "stop"), "[DONE]"], choices=2, wants_usage=False)
    assert (audit.verdict, audit.texts) == (Verdict.OK, ("a", "b"))


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "hi"},
        {"reasoning_content": "hi"},
        {"reasoning": "hi"},
        {"tool_calls": [{"index": 0, "function": {"name": "h", "arguments": "i"}}]},
    ],
)
def test_content_reasoning_and_tool_calls_are_text(delta: dict) -> None:
    """All output of a model counts as text and as the first token, but a role does not."""
    audit = StreamAudit()
    choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    assert audit.add(json.dumps({"choices": [choice]}).encode()) is None
    brought = audit.add(json.dumps({"choices": [choice | {"delta": delta}]}).encode())
    assert brought is not None
    assert brought.characters == 2
    assert audit.texts == ("hi",)


@pytest.mark.parametrize(
    ("choice", "known"),
    [
        ({"text": ""}, True),
        ({"delta": {"content": ""}}, True),
        ({"delta": {"role": "assistant", "content": ""}}, False),
        ({"delta": {}, "finish_reason": "stop"}, False),
    ],
)
def test_an_empty_text_is_distinguished_from_no_text(choice: dict, known: bool) -> None:
    """The audit reports the empty text of a special token, but not a delta with only a role."""
    brought = StreamAudit().add(json.dumps({"choices": [{"index": 0, **choice}]}).encode())
    assert brought == ((0, None) if known else None)


def test_error_events_and_aborts_are_errors() -> None:
    """An error event and an abort as finish reason are errors."""
    audit = StreamAudit()
    audit.add(b'{"message": "the worker failed"}', "error")
    assert audit.verdict is Verdict.ERROR_EVENT
    assert "the worker failed" in audit.detail
    for reason in ABORTS:
        audit = StreamAudit()
        choice = {"index": 0, "text": "a", "finish_reason": reason}
        audit.add(json.dumps({"choices": [choice]}).encode())
        assert audit.verdict is Verdict.ERROR_EVENT


def test_drafts_of_llama_cpp_are_counted() -> None:
    """The server reports drafts in `timings` of the last chunk, and none if it drafted nothing."""
    *first, last = events_of(Script(), {"seed": 1}, "a")[:-1]
    usage = json.loads(last)
    del usage["metrics"]
    drafted = json.dumps(usage | {"timings": {"draft_n": 9, "draft_n_accepted": 4}})
    plain = json.dumps(usage | {"timings": {"predicted_n": 8}})
    assert audited([*first, plain, "[DONE]"]).metrics is None
    audit = audited([*first, drafted, "[DONE]"])
    assert audit.metrics == {
        "speculative_decoding": {"num_drafted_tokens": 9, "num_accepted_tokens": 4}
    }


def test_bad_utf8_is_malformed() -> None:
    """Invalid UTF-8 is a fault and not a replacement character."""
    audit = StreamAudit()
    audit.add(b'{"choices": [{"index": 0, "text": "\xff\xfe"}]}')
    assert audit.verdict is Verdict.MALFORMED


async def test_chunks_have_the_time_of_their_read() -> None:
    """Each chunk with text has the exact time at which the client read the chunk."""
    now = [10.0]
    body = question(prompt=None, messages=(ChatMessage("user", "x"),)).body("mock")
    events = events_of(Script(role=True, per_chunk=2, continuous=True), body, "answer")

    async def reads():
        for event in events:
            now[0] += 0.25
            yield f"data: {event}\n\n".encode()

    content = SimpleNamespace(iter_any=reads)
    response = SimpleNamespace(status=200, content_type="text/event-stream", content=content)
    planned = PlannedRequest(0, 9.0, question())
    client = OpenAIClient(None, "", "mock")
    exchange = StreamExchange(client, planned, lambda: now[0], 9.0, set())
    async with asyncio.timeout(60) as limit:
        await exchange._read(response, limit, asyncio.get_running_loop().time() + 5)
    record = exchange.record()
    lengths = [len("".join(text_of(1, 8)[i : i + 2])) for i in range(0, 8, 2)]
    expected = [TextChunk(10.5 + 0.25 * i, 2, length) for i, length in enumerate(lengths)]
    assert list(record.chunks) == expected
    assert (record.verdict, record.scheduled_s) == ("ok", 9.0)


async def test_the_client_reads_no_chunk_before_it_was_sent() -> None:
    """Each chunk arrives after the mock sent it and before the end."""
    mock = Mock()
    async with serving(mock) as url, open_session() as session:
        clock = start_clock()
        planned = PlannedRequest(0, None, question(Script(ttft_s=0.01, gap_s=0.005)))
        start_s = time.monotonic() - clock()
        client = OpenAIClient(session, url, "mock", ClientTimeouts(5.0))
        record = await client.send_request(planned, clock)
    sent_s = [at_s - start_s for at_s in mock.sent_s[1]]
    assert record.verdict == "ok"
    pairs = list(zip(sent_s, record.chunks, strict=False))
    assert len(pairs) == 8
    assert all(arrived.at_s > sent - 1e-4 for sent, arrived in pairs)
    assert record.scheduled_s < record.sent_s < record.chunks[0].at_s
    assert record.chunks[-1].at_s <= record.end_s
    assert 0 < record.connect_s < record.sent_s - record.scheduled_s


async def test_requests_are_sent_as_specified() -> None:
    """Path, body and headers carry the request, its extra fields, its SLO, the key and a trace."""
    mock = Mock()
    extra = (("speculation", {"mode": "off"}),)
    completion = question(seed=7, extra=extra, slo=Slo(0.5, 0.0205))
    chat = question(prompt=None, messages=(ChatMessage("system", "a"), ChatMessage("user", "b")))
    async with serving(mock) as url, open_session("secret") as session:
        assert await first_model(session, url) == "mock"
        for asking in (completion, chat):
            planned = PlannedRequest(0, None, asking)
            await OpenAIClient(session, url, "mock", ClientTimeouts(5.0)).send_request(planned)
    first, second = mock.bodies
    assert (first["prompt"], first["seed"], first["speculation"]) == ("x", 7, {"mode": "off"})
    assert first["stream_options"] == {"include_usage": True}
    roles = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert (second["messages"], "prompt" in second) == (roles, False)
    headers = mock.headers[0]
    assert (headers["x-slo-ttft-ms"], headers["x-slo-tpot-ms"]) == ("500", "20.5")
    assert headers["Authorization"] == "Bearer secret"
    assert "x-slo-ttft-ms" not in mock.headers[1]
    traces = [re.fullmatch(TRACE, one["traceparent"])[1] for one in mock.headers]
    assert len(set(traces)) == len(traces)


async def test_a_server_without_models_is_an_error() -> None:
    """A server that lists no models gives a single error instead of a failed run."""
    mock = Mock()

    async def no_models(request):
        return web.json_response({"data": []})

    mock._models = no_models
    async with serving(mock) as url, open_session() as session:
        with pytest.raises(ValueError, match="lists no models"):
            await first_model(session, url)


def test_responses_of_the_mock_depend_on_the_seed() -> None:
    """The mock's responses differ by seed, so that tests detect crossed texts."""
    one, two = (events_of(Script(), replace(question(), seed=s).body("mock"), "a") for s in (1, 2))
    assert one != two
