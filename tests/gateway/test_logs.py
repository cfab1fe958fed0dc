"""Tests of logs: one line per event with the request's id and none of its text."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftgate.gateway.logs import (
    FLUSH_S,
    AboutRequest,
    JsonFormatter,
    LineFormatter,
    add_about_request,
    configure,
    flush,
    log,
)
from draftgate.gateway.telemetry.otel import OtelTracing
from tests.gateway.harness import ScriptedBackend, client, port_of, running

BODY = {"prompt": "private prompt", "max_tokens": 20, "seed": 1}


async def test_log_line_has_the_request_and_not_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server logs one line per request with its id and metrics, but without its text."""
    logger = logging.getLogger("draftgate")
    with caplog.at_level(logging.INFO, logger="draftgate"):
        async with running() as gateway, client(gateway) as http:
            headers = {"x-request-id": "id with space"}
            response = await http.post("/v1/completions", json=BODY, headers=headers)
            worker = gateway.node.fleet.workers[0].worker_id
    assert logger.name == "draftgate"
    lines = [LineFormatter().format(record) for record in caplog.records]
    (line,) = [line for line in lines if " request " in line]
    for part in (
        'id="id with space"',
        "status=200",
        f"worker={worker}",
        "ending=finished",
        "output_tokens=20",
    ):
        assert part in line
    assert "private prompt" not in line
    assert response.json()["choices"][0]["text"] not in line
    assert "\n" not in line


async def test_refusal_is_logged_without_its_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server logs the parameter and the type of an error, but not the message."""
    body = {"messages": [{"role": "private prompt", "content": "x"}]}
    with caplog.at_level(logging.INFO, logger="draftgate"):
        async with running() as gateway, client(gateway) as http:
            response = await http.post("/v1/chat/completions", json=body)
    assert "private prompt" in response.json()["error"]["message"]
    (line,) = [r for r in caplog.records if r.getMessage() == "request"]
    assert "private prompt" not in LineFormatter().format(line)
    assert line.draftgate_fields["param"] == "messages[0].role"
    assert line.draftgate_fields["error_type"] == "InvalidRequest"


def record_of(fields: dict[str, object], error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, None)
    record = logging.LogRecord("draftgate", logging.INFO, "", 0, "event", None, info)
    record.draftgate_fields = fields
    return record


def test_every_value_with_whitespace_is_quoted() -> None:
    """A text with any whitespace is quoted, so that a line has one meaning."""
    spaces = [chr(code) for code in range(0x110000) if chr(code).isspace()]
    for space in spaces:
        line = LineFormatter().format(record_of({"field": f"a{space}b"}))
        assert line.rpartition("field=")[2].startswith('"a')


def test_values_cannot_forge_a_second_line() -> None:
    """The formatter escapes quotes and line breaks in values."""
    record = record_of({"a": 'x"\ny', "b": None, "c": 1.5})
    assert LineFormatter().format(record).endswith(r'INFO event a="x\"\ny" c=1.5')


def test_json_line_is_one_object() -> None:
    """The JSON formatter writes any value and any traceback as one line of valid JSON."""
    fields = {"a": 'x"\ny\udc80', "b": None, "c": math.inf, "d": 1.5, "e": KeyError("k"), "f": True}
    line = JsonFormatter().format(record_of(fields, ValueError("two\nlines")))
    assert "\n" not in line
    parsed = json.loads(line)
    assert (parsed["level"], parsed["event"]) == ("INFO", "event")
    assert parsed["time"].endswith("Z")
    assert "ValueError: two\nlines" in parsed["traceback"]
    assert {key: parsed.get(key) for key in "abcdef"} == {
        "a": 'x"\ny\udc80', "b": None, "c": "inf", "d": 1.5, "e": "'k'", "f": True,
    }  # fmt: skip


@pytest.fixture
def restored_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the logging configuration after a test."""
    for name in ("draftgate", "aiohttp", "asyncio", "opentelemetry"):
        logger = logging.getLogger(name)
        for attribute in ("handlers", "propagate", "level"):
            monkeypatch.setattr(logger, attribute, getattr(logger, attribute))


@pytest.mark.usefixtures("restored_loggers")
@pytest.mark.parametrize("form", ["line", "json"])
def test_log_format_applies_to_libraries_too(capsys: pytest.CaptureFixture[str], form: str) -> None:
    """The setting `--log-format` applies to the log lines of libraries too."""
    configure("error", "line")
    configure("info", form)
    log(logging.INFO, "hello", a=1)
    logging.getLogger("opentelemetry.exporter").warning("no\ncollector")
    logging.getLogger("aiohttp.server").info("unheard")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    if form == "json":
        assert [json.loads(line)["event"] for line in lines] == ["hello", "no\ncollector"]
    else:
        assert lines[0].endswith("INFO hello a=1")
        assert lines[1].endswith("WARNING no collector")


@pytest.mark.usefixtures("restored_loggers")
@pytest.mark.parametrize("room", [0, 1, 30, 1000])
@pytest.mark.parametrize("form", ["line", "json"])
def test_a_line_cut_by_a_full_disk_spoils_no_other_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, room: int
) -> None:
    """While the disk is full, lines are lost. The first line afterwards begins a line, and no line
    is empty."""
    write, left = os.write, 10_000

    def write_some(descriptor: int, data: memoryview) -> int:
        nonlocal left
        if not left:
            raise OSError(28, "No space left on device")
        written = write(descriptor, data[:left])
        left -= written
        return written

    with (tmp_path / "log").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(os, "write", write_some)
        configure("info", form)
        log(logging.INFO, "before")
        left = room
        for _ in range(300):
            log(logging.INFO, "lost")
        left = 10_000
        log(logging.INFO, "after")
        log(logging.INFO, "later")
    lines = (tmp_path / "log").read_text().splitlines()
    assert [event_of(line, form) for line in (lines[0], *lines[-2:])] == [
        "before",
        "after",
        "later",
    ]
    assert len([line for line in lines if event_of(line, form) is None]) <= 1
    assert "" not in lines


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[str]]]:
    """The events of each write to a log file."""
    writes: list[list[str]] = []
    write = os.write

    def record(descriptor: int, data: memoryview) -> int:
        lines = bytes(data).decode().splitlines()
        writes.append([str(event_of(line, "line")) for line in lines])
        return write(descriptor, data)

    with (tmp_path / "log").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(os, "write", record)
        configure("info")
        yield writes


@pytest.mark.usefixtures("restored_loggers")
async def test_lines_of_a_moment_are_written_together(written: list[list[str]]) -> None:
    """Lines wait for others for at most `FLUSH_S` seconds."""
    log(logging.INFO, "first")
    log(logging.INFO, "second")
    assert written == []
    await asyncio.sleep(2 * FLUSH_S)
    assert written == [["first", "second"]]
    log(logging.INFO, "third")
    flush()
    assert written[1:] == [["third"]]


@pytest.mark.usefixtures("restored_loggers")
@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
async def test_a_warning_is_written_at_once_after_earlier_lines(
    written: list[list[str]], level: int
) -> None:
    """A warning or an error waits for no other line, and keeps the order."""
    log(logging.INFO, "before")
    logging.getLogger("aiohttp.server").log(level, "worse")
    assert written == [["before", "worse"]]


@pytest.mark.usefixtures("restored_loggers")
def test_lines_of_a_closed_event_loop_are_written_with_the_next_line(
    written: list[list[str]],
) -> None:
    """A line that waits when its event loop ends is not lost, and later loops write theirs."""

    async def say(event: str) -> None:
        log(logging.INFO, event)

    asyncio.run(say("first"))
    asyncio.run(say("second"))
    assert written == []
    log(logging.INFO, "third")
    assert written == [["first", "second", "third"]]


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "raise ValueError('unexpected')"])
def test_lines_that_wait_are_written_when_the_process_exits(end: str) -> None:
    """The last lines of a process are written, also after an unexpected error."""
    script = f"""
import asyncio, logging
from draftgate.gateway.logs import configure, log
configure("info")
async def main():
    log(logging.INFO, "last")
    {end}
asyncio.run(main())
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "INFO last" in found.stderr


def event_of(line: str, form: str) -> str | None:
    """Return the event of a line, or None for a part of a line."""
    pattern = r"\S+Z [A-Z]+ (\w{4,6})" if form == "line" else r'\{.*"event": "(\w+)"\}'
    found = re.fullmatch(pattern, line)
    return None if found is None else found[1]


@pytest.mark.usefixtures("restored_loggers")
async def test_malformed_http_is_not_logged(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The server responds with 400 to malformed HTTP and logs nothing."""
    async with running() as gateway:
        configure("info")
        for sent in (b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: -5\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port_of(gateway))
            writer.write(sent)
            assert (await reader.readline()).split()[1] == b"400"
            writer.close()
    assert capsys.readouterr().err == ""


async def test_log_lines_of_a_request_have_its_id(caplog: pytest.LogCaptureFixture) -> None:
    """Each log line of a request and its tasks contains the request's id."""

    async def request(name: str) -> None:
        with AboutRequest(id=name):
            add_about_request(tenant=name.upper())
            await asyncio.create_task(line())

    async def line() -> None:
        await asyncio.sleep(0)
        log(logging.INFO, "event")

    with caplog.at_level(logging.INFO, logger="draftgate"):
        await asyncio.gather(request("a"), request("b"))
        add_about_request(tenant="nobody")
        log(logging.INFO, "event")
    parsed = [record.draftgate_fields for record in caplog.records]
    assert parsed == [{"id": "a", "tenant": "A"}, {"id": "b", "tenant": "B"}, {}]


async def test_log_lines_of_a_traced_request_have_the_trace_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log lines of a traced request contain its trace id, even the line of an internal
    error."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    broken = ScriptedBackend()
    broken.check = None  # type: ignore[assignment]  # calling it is an error of ours
    with caplog.at_level(logging.INFO, logger="draftgate"):
        async with running(backends=[broken], tracing=tracing) as gateway, client(gateway) as http:
            response = await http.post(
                "/v1/completions", json=BODY, headers={"x-request-id": "mine"}
            )
    assert response.status_code == 500
    (span,) = (span for span in exporter.get_finished_spans() if span.parent is None)
    lines = {record.getMessage(): record.draftgate_fields for record in caplog.records}
    for event in ("request", "internal error"):
        assert lines[event]["id"] == "mine"
        assert lines[event]["trace"] == f"{span.context.trace_id:032x}"
    tracing.shutdown()
