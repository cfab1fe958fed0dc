"""Failover over HTTP: the answer has no gap, and its origin is reported."""

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
ASKS: dict[str, dict[str, Any]] = {
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
    """A node of both."""
    async with running(backends=pair, log_level="info") as where:
        yield where


@pytest.fixture
async def http(node: Listening) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the node."""
    async with client(node) as opened:
        yield opened


def ask(http: httpx.AsyncClient, path: str, **fields: object) -> asyncio.Task[httpx.Response]:
    """Send a request in the background."""
    return asyncio.create_task(http.post(path, json={**ASKS[path], **fields}))


async def goes_on(pair: Pair, first: str = "half an ", then: str = "answer") -> None:
    """Start on the first worker, fail it, and continue on the second."""
    one, other = pair
    request = await one.submitted.get()
    one.emit(request, first)
    await asyncio.sleep(0)
    one.crash("device lost")
    rest = await other.submitted.get()
    assert rest.resumed == (ResumedChoice(0, tuple(range(len(first.split())))),)
    other.emit(rest, then, last=True)


def text_of(path: str, body: dict[str, Any]) -> str:
    """The text of a whole answer."""
    if path == RESPONSES:
        return body["output"][0]["content"][0]["text"]
    choice = body["choices"][0]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


def streamed(path: str, told: list[Any]) -> str:
    """The text of a stream's events."""
    if path == RESPONSES:
        return "".join(e["delta"] for e in told if e["type"] == "response.output_text.delta")
    choices = [choice for e in told[:-1] for choice in e["choices"]]
    if path == COMPLETIONS:
        return "".join(choice["text"] for choice in choices)
    return "".join(choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize("path", ASKS)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_resumed_answer_is_gapless_and_reports_the_resume(
    node: Listening, http: httpx.AsyncClient, pair: Pair, path: str, stream: bool
) -> None:
    """Text and usage combine both parts, there is one ending, and metrics report the resume."""
    options = {"stream_options": {"include_usage": True}} if stream and path != RESPONSES else {}
    asking = ask(http, path, stream=stream, **options)
    await goes_on(pair)
    answer = await asking
    assert answer.status_code == 200
    if stream:
        told = events(answer.text)
        assert streamed(path, told) == "half an answer"
        assert "error" not in answer.text.replace('"error":null', "")
        assert answer.text.count("[DONE]") == (path != RESPONSES)
        last = told[-1]["response"] if path == RESPONSES else told[-2]
    else:
        last = answer.json()
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
    await until(lambda: node.node.dispatcher.in_flight == 0)


async def test_an_undisturbed_answer_has_no_resumes(http: httpx.AsyncClient, pair: Pair) -> None:
    """The field `resumes` exists only after a resume."""
    asking = ask(http, COMPLETIONS)
    pair[0].emit(await pair[0].submitted.get(), "whole", last=True)
    assert "resumes" not in (await asking).json()["metrics"]


async def test_prompts_are_resumed_independently(
    node: Listening, http: httpx.AsyncClient, pair: Pair
) -> None:
    """Of two prompts on two workers, only the one that lost its worker is resumed."""
    one, other = pair
    asking = ask(http, COMPLETIONS, prompt=["x", "y"], stream=True)
    first, second = await one.submitted.get(), await other.submitted.get()
    one.emit(first, "a ")
    other.emit(second, "c ")
    await asyncio.sleep(0)
    one.crash("device lost")
    rest = await other.submitted.get()
    other.emit(rest, "b", last=True)
    other.emit(second, "d", last=True)
    told = events((await asking).text)
    texts = ["", ""]
    for choice in (choice for event in told[:-1] for choice in event["choices"]):
        texts[choice["index"]] += choice["text"]
    assert texts == ["a b", "c d"]
    metrics = told[-2]["metrics"]
    assert [resume["prompt"] for resume in metrics["resumes"]] == [0]
    assert [prompt["worker_id"] for prompt in metrics["prompts"]] == [
        node.node.fleet.workers[1].worker_id
    ] * 2


async def test_a_failure_before_the_first_token_is_invisible(
    http: httpx.AsyncClient, pair: Pair
) -> None:
    """A failure before the first token is a 503 with one worker and an answer with two."""
    one, other = pair
    asking = ask(http, COMPLETIONS)
    await one.submitted.get()
    one.crash("device lost")
    other.emit(await other.submitted.get(), "whole", last=True)
    assert (await asking).json()["choices"][0]["text"] == "whole"


async def test_losing_both_workers_gives_one_error_event(
    node: Listening, http: httpx.AsyncClient, pair: Pair
) -> None:
    """A stream without any worker left ends with one typed error, and later requests get 503."""
    one, other = pair
    asking = ask(http, COMPLETIONS, stream=True)
    one.emit(await one.submitted.get(), "half an ")
    await asyncio.sleep(0)
    one.crash("device lost")
    other.emit(await other.submitted.get(), "ans")
    await asyncio.sleep(0)
    other.crash("power lost")
    told = events((await asking).text)
    assert [event["choices"][0]["text"] for event in told[:-1]] == ["half an ", "ans"]
    assert told[-1]["error"]["code"] == "worker_failed"
    assert "power lost" in told[-1]["error"]["message"]
    assert (await ask(http, COMPLETIONS)).status_code == 503
    await until(lambda: is_idle(node.node))


async def test_metrics_and_log_report_a_resume(
    http: httpx.AsyncClient, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """Resumes are counted by cause and outcome, prompts once, and a log line names both workers."""
    pair[1].card = replace(pair[1].card, numerics_class="another")
    with caplog.at_level(logging.INFO, logger="draftgate"):
        asking = ask(http, COMPLETIONS)
        await goes_on(pair)
        assert (await asking).json()["metrics"]["numerics_class"] == "another"
    (line,) = [record for record in caplog.records if record.message == "resumed"]
    fields = line.draftgate_fields
    assert (fields["kept_tokens"], fields["same_numerics_class"]) == (2, False)
    assert fields["reason"] == "device lost"
    (line,) = [record for record in caplog.records if record.message == "request"]
    assert line.draftgate_fields["resumes"] == 1
    assert line.draftgate_fields["worker"].count(",") == 1
    figures = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families((await http.get("/metrics")).text)
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return figures[name, tuple(sorted({"model_name": "scripted", **labels}.items()))]

    assert value("draftgate_resumes_total", cause="failed", outcome="other_class") == 1
    prompt_tokens = len(pair[0].tokenizer.encode("x"))
    assert value("draftgate_prompt_tokens_total") == prompt_tokens
    assert value("draftgate_generation_tokens_total") == 3
    assert value("draftgate_request_prompt_tokens_count") == 1


async def test_a_waiting_stream_sends_comments(
    http: httpx.AsyncClient, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no worker has capacity for the rest, comments keep the connection alive."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.005)
    one, other = pair
    one.max_sequences = other.max_sequences = 1
    asking = ask(http, COMPLETIONS, stream=True)
    request = await one.submitted.get()
    beside = ask(http, COMPLETIONS)
    running_beside = await other.submitted.get()
    one.emit(request, "half an ")
    await asyncio.sleep(0)
    one.crash("device lost")
    await asyncio.sleep(0.1)
    other.emit(running_beside, "done", last=True)
    other.emit(await other.submitted.get(), "answer", last=True)
    lines = [line for line in (await asking).text.splitlines() if line]
    assert lines[0].startswith("data: ") or lines[0] == ": waiting"
    first = next(index for index, line in enumerate(lines) if "half an " in line)
    last = next(index for index, line in enumerate(lines) if "answer" in line)
    assert set(lines[first + 1 : last]) == {": waiting"}
    assert lines[-1] == "data: [DONE]"
    assert (await beside).status_code == 200


async def test_a_tool_call_survives_a_resume(pair: Pair, tmp_path: Path) -> None:
    """A tool call whose text two workers generated is parsed as one call."""
    for backend in pair:
        backend.tokenizer = Tokenizer(with_template(tmp_path / str(id(backend)), "qwen2_5"))
        backend.kv_tokens = 1000
    body = {**ASKS[CHAT], "tools": TOOLS}
    async with running(backends=pair) as where, client(where) as http:
        asking = asyncio.create_task(http.post(CHAT, json=body))
        await goes_on(pair, CALL[:33], CALL[33:])
        choice = (await asking).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris", "days": 2}


async def test_health_reports_hung_workers(node: Listening, http: httpx.AsyncClient) -> None:
    """`/health` names a hung worker, and `/ready` is 200 while another one works."""
    for hung, ready in ((1, 200), (2, 503)):
        node.node.fleet.workers[hung - 1].hung = True
        health = await http.get("/health")
        assert health.status_code == 200
        statuses = [worker["status"] for worker in health.json()["workers"]]
        assert statuses == ["hung"] * hung + ["ok"] * (2 - hung)
        assert (await http.get("/ready")).status_code == ready
    assert "no worker completes a step" in (await http.get("/ready")).json()["reason"]


async def test_the_first_token_is_timed_once(http: httpx.AsyncClient, pair: Pair) -> None:
    """The TTFT is that of the first token, whichever worker continues."""
    asking = ask(http, COMPLETIONS, stream=True)
    await goes_on(pair)
    await asking
    figures = (await http.get("/metrics")).text
    name = "draftgate_time_to_first_token_seconds_count"
    (line,) = [line for line in figures.splitlines() if line.startswith(name)]
    assert line.endswith(" 1.0")
