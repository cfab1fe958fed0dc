"""Tests of failover over HTTP: the response has no gap, and the server reports the resume."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import ResumedChoice
from draftgate.gateway.app import Listening
from draftgate.gateway.http import stream
from tests.gateway.harness import ScriptedBackend, client, events, is_idle, running, until
from tests.gateway.tool_models import TOOLS, with_template

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x", "max_tokens": 100},
    CHAT: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 100},
    RESPONSES: {"input": "x", "max_output_tokens": 100},
}

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'

Pair = tuple[ScriptedBackend, ScriptedBackend]


@pytest.fixture
async def pair() -> Pair:
    """Two workers whose steps the test decides."""
    return ScriptedBackend(), ScriptedBackend()


@pytest.fixture
async def node(pair: Pair) -> AsyncIterator[Listening]:
    """A node with both workers."""
    async with running(backends=pair, log_level="info") as gateway:
        yield gateway


def send_request(
    http: httpx.AsyncClient, path: str, **fields: object
) -> asyncio.Task[httpx.Response]:
    """Send a request in the background."""
    return asyncio.create_task(http.post(path, json={**BODIES[path], **fields}))


async def fail_over(pair: Pair, first: str = "half an ", then: str = "answer") -> None:
    """Start a request on the first worker, fail the worker and finish on the second."""
    first_worker, second_worker = pair
    request = await first_worker.submitted.get()
    first_worker.emit(request, first)
    await asyncio.sleep(0)
    first_worker.crash("device lost")
    rest = await second_worker.submitted.get()
    assert rest.resumed == (ResumedChoice(0, tuple(range(len(first.split())))),)
    second_worker.emit(rest, then, last=True)


def text_of(path: str, body: dict[str, Any]) -> str:
    """Return the text of a whole response."""
    if path == RESPONSES:
        return body["output"][0]["content"][0]["text"]
    choice = body["choices"][0]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


def streamed_text(path: str, received: list[Any]) -> str:
    """Return the text of a stream's events."""
    *received, _ = received  # the last event is [DONE]
    if path == RESPONSES:
        return "".join(e["delta"] for e in received if e["type"] == "response.output_text.delta")
    choices = [choice for e in received for choice in e["choices"]]
    if path == COMPLETIONS:
        return "".join(choice["text"] for choice in choices)
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_resumed_response_is_gapless_and_reports_the_resume(
    node: Listening, http: httpx.AsyncClient, pair: Pair, path: str, stream: bool
) -> None:
    """The response to a resumed request combines the output of both workers and reports the
    resume."""
    options = {"stream_options": {"include_usage": True}} if stream and path != RESPONSES else {}
    sent = send_request(http, path, stream=stream, **options)
    await fail_over(pair)
    response = await sent
    assert response.status_code == 200
    if stream:
        received = events(response.text)
        assert streamed_text(path, received) == "half an answer"
        assert "error" not in response.text.replace('"error":null', "")
        assert response.text.count("[DONE]") == 1
        last = received[-2]["response"] if path == RESPONSES else received[-2]
    else:
        last = response.json()
        assert text_of(path, last) == "half an answer"
    output = "output_tokens" if path == RESPONSES else "completion_tokens"
    assert last["usage"][output] == 3
    ids = [worker.worker_id for worker in node.node.fleet.workers]
    assert last["metrics"]["worker_id"] == ids[1]
    assert last["metrics"]["resumes"] == [
        {
            "prompt": 0,
            "from_worker_id": ids[0],
            "to_worker_id": ids[1],
            "kept_tokens": 2,
            "same_numerics_class": True,
        }
    ]
    await until(lambda: node.node.in_flight == 0)


async def test_an_undisturbed_response_has_no_resumes(http: httpx.AsyncClient, pair: Pair) -> None:
    """The metrics of a response have no field `resumes` without a resume."""
    sent = send_request(http, COMPLETIONS)
    pair[0].emit(await pair[0].submitted.get(), "whole", last=True)
    assert "resumes" not in (await sent).json()["metrics"]


async def test_prompts_are_resumed_independently(
    node: Listening, http: httpx.AsyncClient, pair: Pair
) -> None:
    """The server resumes only the prompt that lost its worker."""
    first_worker, second_worker = pair
    sent = send_request(http, COMPLETIONS, prompt=["x", "y"], stream=True)
    first, second = await first_worker.submitted.get(), await second_worker.submitted.get()
    first_worker.emit(first, "a ")
    second_worker.emit(second, "c ")
    await asyncio.sleep(0)
    first_worker.crash("device lost")
    rest = await second_worker.submitted.get()
    second_worker.emit(rest, "b", last=True)
    second_worker.emit(second, "d", last=True)
    received = events((await sent).text)
    texts = ["", ""]
    for choice in (choice for event in received[:-1] for choice in event["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == ["a b", "c d"]
    metrics = received[-2]["metrics"]
    assert [resume["prompt"] for resume in metrics["resumes"]] == [0]
    assert [prompt["worker_id"] for prompt in metrics["prompts"]] == [
        node.node.fleet.workers[1].worker_id
    ] * 2


async def test_a_failure_before_the_first_token_is_invisible(
    http: httpx.AsyncClient, pair: Pair
) -> None:
    """The client receives the whole text if a worker fails before the first token."""
    first_worker, second_worker = pair
    sent = send_request(http, COMPLETIONS)
    await first_worker.submitted.get()
    first_worker.crash("device lost")
    second_worker.emit(await second_worker.submitted.get(), "whole", last=True)
    assert (await sent).json()["choices"][0]["text"] == "whole"


async def test_losing_both_workers_gives_one_error_event(
    node: Listening, http: httpx.AsyncClient, pair: Pair
) -> None:
    """A stream that loses both workers ends with one error event, and later requests get 503."""
    first_worker, second_worker = pair
    sent = send_request(http, COMPLETIONS, stream=True)
    first_worker.emit(await first_worker.submitted.get(), "half an ")
    await asyncio.sleep(0)
    first_worker.crash("device lost")
    second_worker.emit(await second_worker.submitted.get(), "ans")
    await asyncio.sleep(0)
    second_worker.crash("power lost")
    received = events((await sent).text)
    assert [event["choices"][0]["text"] for event in received[:-1]] == ["half an ", "ans"]
    assert received[-1]["error"]["code"] == "worker_failed"
    assert "power lost" in received[-1]["error"]["message"]
    assert (await send_request(http, COMPLETIONS)).status_code == 503
    await until(lambda: is_idle(node.node))


async def test_metrics_and_log_report_a_resume(
    http: httpx.AsyncClient, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """The metrics count a resume by cause and outcome, and a log line contains the details."""
    pair[1].card = replace(pair[1].card, numerics_class="another")
    with caplog.at_level(logging.INFO, logger="draftgate"):
        sent = send_request(http, COMPLETIONS)
        await fail_over(pair)
        assert (await sent).json()["metrics"]["numerics_class"] == "another"
    (line,) = [record for record in caplog.records if record.message == "resumed"]
    fields = line.draftgate_fields
    assert (fields["kept_tokens"], fields["same_numerics_class"]) == (2, False)
    assert fields["reason"] == "device lost"
    (line,) = [record for record in caplog.records if record.message == "request"]
    assert line.draftgate_fields["resumes"] == 1
    assert line.draftgate_fields["worker"].count(",") == 1
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families((await http.get("/metrics")).text)
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return samples[name, tuple(sorted({"model_name": "scripted", **labels}.items()))]

    assert value("draftgate_resumes_total", cause="failed", outcome="other_class") == 1
    prompt_tokens = len(pair[0].tokenizer.encode("x"))
    assert value("draftgate_prompt_tokens_total") == prompt_tokens
    assert value("draftgate_generation_tokens_total") == 3
    assert value("draftgate_request_prompt_tokens_count") == 1


async def test_a_waiting_stream_sends_comments(
    http: httpx.AsyncClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server sends comments while a resumed stream waits for capacity."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.005)
    first_worker, second_worker = pair
    first_worker.max_sequences = second_worker.max_sequences = 1
    sent = send_request(http, COMPLETIONS, stream=True)
    request = await first_worker.submitted.get()
    other_response = send_request(http, COMPLETIONS)
    other_request = await second_worker.submitted.get()
    first_worker.emit(request, "half an ")
    await asyncio.sleep(0)
    first_worker.crash("device lost")
    await asyncio.sleep(0.1)
    second_worker.emit(other_request, "done", last=True)
    second_worker.emit(await second_worker.submitted.get(), "answer", last=True)
    lines = [line for line in (await sent).text.splitlines() if line]
    assert lines[0].startswith("data: ") or lines[0] == ": waiting"
    first = next(index for index, line in enumerate(lines) if "half an " in line)
    last = next(index for index, line in enumerate(lines) if "answer" in line)
    assert set(lines[first + 1 : last]) == {": waiting"}
    assert lines[-1] == "data: [DONE]"
    assert (await other_response).status_code == 200


async def test_a_tool_call_survives_a_resume(pair: Pair, tmp_path: Path) -> None:
    """The server parses a tool call from two workers as one call."""
    for backend in pair:
        backend.tokenizer = Tokenizer(with_template(tmp_path / str(id(backend)), "qwen2_5"))
        backend.kv_tokens = 1000
    body = {**BODIES[CHAT], "tools": TOOLS}
    async with running(backends=pair) as gateway, client(gateway) as http:
        sent = asyncio.create_task(http.post(CHAT, json=body))
        await fail_over(pair, CALL[:33], CALL[33:])
        choice = (await sent).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "days": 2}


async def test_health_reports_hung_workers(node: Listening, http: httpx.AsyncClient) -> None:
    """The path `/health` reports hung workers, and `/ready` is 200 while a worker responds."""
    for hung, ready in ((1, 200), (2, 503)):
        node.node.fleet.workers[hung - 1].hung = True
        health = await http.get("/health")
        assert health.status_code == 200
        statuses = [worker["status"] for worker in health.json()["workers"]]
        assert statuses == ["hung"] * hung + ["ok"] * (2 - hung)
        assert (await http.get("/ready")).status_code == ready
    assert "no worker completes a step" in (await http.get("/ready")).json()["reason"]


async def test_the_first_token_is_timed_once(http: httpx.AsyncClient, pair: Pair) -> None:
    """The server records one TTFT for a resumed request."""
    sent = send_request(http, COMPLETIONS, stream=True)
    await fail_over(pair)
    await sent
    samples = (await http.get("/metrics")).text
    name = "draftgate_time_to_first_token_seconds_count"
    counts = [line.split()[-1] for line in samples.splitlines() if line.startswith(name)]
    assert sum(map(float, counts)) == 1
