"""Tests that no output contains a secret: each secret is a marker, and all outputs are searched."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_origin

import httpx
import pytest
from aiohttp import web
from typer.testing import CliRunner

from draftgate.gateway.cli import app
from draftgate.gateway.config import settings
from draftgate.gateway.telemetry.trace_export import open_tracing
from tests.gateway.collector import collecting
from tests.gateway.upstreams import (
    DONE,
    LAST,
    TOKEN,
    USAGE,
    ScriptedUpstream,
    stream_of,
    upstream,
    whole,
)

MARK = "m4rk3r"
COMMAND = (sys.executable, "-m", "draftgate")
PATIENCE_S = 60.0

URLS = {
    "store": [
        f"redis://:{MARK}@127.0.0.1:1/0",
        f"redis+sentinel://u:{MARK}@127.0.0.1:1/s?sentinel_password={MARK}",
        f"redis://127.0.0.1:1?password={MARK}",
    ],
    "url": [f"http://u:{MARK}@127.0.0.1:1"],
    "urls": [f"http://u:{MARK}@127.0.0.1:1", f"https://{MARK}@127.0.0.1:1/p"],
    "collector": [f"http://u:{MARK}@127.0.0.1:1"],
}
INVALID = [
    f"u:{MARK}@host",
    f"http://u:{MARK}@h?token={MARK}",
    f"ftp://{MARK}@h",
    f"http://{MARK}@h:0",
]


def with_secrets() -> list[tuple[str, str]]:
    """Return each setting that may hold a secret, with values that hold the marker."""
    found = []
    for setting in settings():
        if setting.secret:
            found += [(setting.name, f"{MARK}-1"), (setting.name, f"{MARK}-1,{MARK}-2")]
        for url in (*URLS.get(setting.kind, ()), *(INVALID if setting.kind in URLS else ())):
            found.append((setting.name, url))
            if get_origin(setting.type) is tuple:
                found.append((setting.name, f"http://a:1,{url}"))
        if setting.kind == "variable":
            found.append((setting.name, f"sk-{MARK}"))
    return found


@pytest.mark.parametrize(("name", "value"), with_secrets())
def test_config_show_masks_every_secret_from_every_source(
    name: str, value: str, tmp_path: Path
) -> None:
    """`config show` prints no secret from a flag, a variable or YAML, also in its errors."""
    (setting,) = [one for one in settings() if one.name == name]
    file = tmp_path / "node.yaml"
    several = get_origin(setting.type) is tuple
    file.write_text(json.dumps({name: value.split(",") if several else value}))
    shown = ""
    for given, environ in (
        ([f"{setting.flag}={value}"], {}),
        (["--json"], {setting.variable: value}),
        (["--config", str(file)], {}),
        (["--json", "--config", str(file)], {}),
    ):
        result = CliRunner().invoke(app, ["config", "show", *given], env=environ)
        assert any(one in result.output for one in (name, setting.flag, setting.variable))
        shown += result.output
    assert MARK not in shown
    assert "********" in shown


@pytest.mark.parametrize(
    "content",
    [
        f"api_keys: [{MARK}\n",
        f"api_keys: {MARK}: x: y\n",
        f"upstream: 'http://u:{MARK}@h\n",
        f"api_keys:\n  - {MARK}\n - x\n",
        f"api_keys: {{a: {MARK}}}\n",
        f"api_keys: [[{MARK}]]\n",
        f"join: {{password: {MARK}}}\n",
        f"metrics_keys: !!python/object {MARK}\n",
        f"api_keys: \x07{MARK}\n",
    ],
)
def test_errors_about_the_settings_file_do_not_quote_it(content: str, tmp_path: Path) -> None:
    """A broken settings file is an error without its content."""
    file = tmp_path / "node.yaml"
    file.write_text(content)
    result = CliRunner().invoke(app, ["config", "show", "--config", str(file)])
    assert result.exit_code == 2
    assert str(file) in result.output
    assert MARK not in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["load", f"http://u:{MARK}@127.0.0.1:1", "--api-key", MARK, "--requests", "1"],
        ["load", f"u:{MARK}@127.0.0.1:1"],
        ["load", "search", f"http://u:{MARK}@127.0.0.1:1/v1/models"],
        ["load", "sweep", f"a=http://u:{MARK}@127.0.0.1:1", "--rates", "1"],
        ["load", "sweep", f"http://u:{MARK}@h", f"server-1=http://u:{MARK}@h", "--rates", "1"],
        ["explain", f"http://u:{MARK}@127.0.0.1:1", "--api-key", MARK],
        ["explain", f"u:{MARK}@127.0.0.1:1"],
        ["collect-env"],
        ["collect-env", "--json"],
    ],
)
def test_other_commands_print_no_secret(arguments: list[str]) -> None:
    """The errors of clients contain no key and no password of an address."""
    environ = {"OPENAI_API_KEY": MARK, "DRAFTGATE_API_KEYS": MARK, "PEER_SECRET": MARK}
    result = CliRunner().invoke(app, arguments, env=environ)
    assert result.output
    assert MARK not in result.output


@asynccontextmanager
async def served(
    arguments: tuple[str, ...], environ: Mapping[str, str], output: Path
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a node in a process whose output goes to a file."""
    with output.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, "serve", "--port", "0", "--log-level", "debug", *arguments),
            stdout=file,
            stderr=file,
            env={**os.environ, **environ},
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        async with asyncio.timeout(PATIENCE_S):
            await process.wait()


async def address(process: asyncio.subprocess.Process, output: Path) -> str:
    """Return the address of a node once its banner or its log contains it."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            text = await asyncio.to_thread(output.read_text)
            found = re.search(r'live page +(\S+)/\n|"url": "(\S+)".*"listening"', text)
            if found is not None:
                return found[1] or found[2]
            assert process.returncode is None, text
            await asyncio.sleep(0.02)


async def handle(request: web.Request) -> web.StreamResponse:
    """Stream, respond whole, or fail, as the prompt of the request says."""
    body = await request.json()
    if body["prompt"] == "cut":
        assert request.transport is not None
        request.transport.abort()
    return await (stream_of(TOKEN, LAST, USAGE, DONE) if body.get("stream") else whole)(request)


@pytest.mark.parametrize("log_format", ["line", "json"])
async def test_node_shows_no_secret_anywhere(log_format: str, tmp_path: Path) -> None:
    """Banner, logs, endpoints, pages, spans, decisions and audit log contain no secret, while
    requests succeed and fail, the store is unreachable, and one upstream does not respond."""
    output, keys = tmp_path / "output", tmp_path / "keys.yaml"
    decisions, audit = tmp_path / "decisions.jsonl", tmp_path / "audit.jsonl"
    keys.write_text(f"keys: [{{name: team, key: {MARK}-team, role: operator}}]\n")
    async with upstream(handle) as engine, collecting() as collector:
        upstreams = f"{with_user(engine)},http://u:{MARK}@127.0.0.1:1"
        environ = {
            "DRAFTGATE_API_KEYS": f"{MARK}-key",
            "DRAFTGATE_METRICS_KEYS": f"{MARK}-metrics",
            "DRAFTGATE_UPSTREAM": upstreams,
            "DRAFTGATE_JOIN": f"redis://u:{MARK}@127.0.0.1:1/0?password={MARK}",
            "DRAFTGATE_PEER_SECRET_ENV": "PEER_SECRET",
            "PEER_SECRET": f"{MARK}{'x' * 32}",
            "DRAFTGATE_OTLP_ENDPOINT": collector.url.replace("://", f"://u:{MARK}@"),
            "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {MARK}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        arguments = (
            *("--backend", "openai", "--log-format", log_format, "--api-keys-file", str(keys)),
            *("--decisions-file", str(decisions), "--audit-file", str(audit)),
        )
        async with served(arguments, environ, output) as process:
            shown = await responses(await address(process, output))
        everything = shown + output.read_text() + audit.read_text()
        everything += decisions.read_text() if decisions.exists() else ""
        everything += str([(one.span, one.resource) for one in collector.spans])
    assert collector.spans
    assert "127.0.0.1:1" in everything, "the outputs name the address of the dead upstream"
    assert f'"{MARK}' not in keys.name
    assert MARK not in everything
    (header,) = {request.headers["Authorization"] for request in engine.requests}
    assert header.startswith("Basic "), "the credentials of the address are sent to the upstream"


def with_user(engine: ScriptedUpstream) -> str:
    """Return the address of an upstream with a user and a password."""
    return engine.url.replace("://", f"://user:{MARK}@")


async def responses(url: str) -> str:
    """Return all that clients can read, for good and bad requests with and without keys."""
    shown = ""
    key = {"Authorization": f"Bearer {MARK}-team"}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        for fields in ({}, {"stream": True}, {"prompt": "cut"}, {"model": "unknown"}):
            body = {"prompt": "x", "max_tokens": 2, **fields}
            for headers in (key, {}, {"Authorization": f"Bearer {MARK}-unknown"}):
                response = await http.post("/v1/completions", json=body, headers=headers)
                shown += f"{response.headers}{response.text}"
        paths = ("/", "/health", "/ready", "/version", "/metrics", "/workers", "/decisions")
        for path in (*paths, "/openapi.json", "/v1/models", "/nowhere"):
            response = await http.get(path, headers=key)
            shown += f"{response.headers}{response.text}"
        async with http.stream("GET", "/live", headers=key) as live:
            shown += await anext(live.aiter_text())
    return shown


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        (("--backend", "openai"), {"DRAFTGATE_UPSTREAM": f"http://u:{MARK}@127.0.0.1:0"}),
        (
            ("--backend", "sim", "--no-worker"),
            {"DRAFTGATE_UPSTREAM": f"http://u:{MARK}@127.0.0.1:1"},
        ),
        (("--backend", "peer"), {"DRAFTGATE_UPSTREAM": f"http://u:{MARK}@127.0.0.1:1"}),
        (("--backend", "sim"), {"DRAFTGATE_ADVERTISE": f"http://u:{MARK}@127.0.0.1:1"}),
        (
            ("--backend", "openai", "--upstream-speculates", f"http://u:{MARK}@127.0.0.1:2"),
            {"DRAFTGATE_UPSTREAM": f"http://u:{MARK}@127.0.0.1:1"},
        ),
        (
            ("--backend", "openai", "--upstream-api-key-env", "KEY"),
            {"DRAFTGATE_UPSTREAM": f"http://u:{MARK}@127.0.0.1:1", "KEY": MARK},
        ),
        (("--backend", "sim"), {"OTEL_EXPORTER_OTLP_ENDPOINT": f"u:{MARK}@127.0.0.1:4318"}),
    ],
)
async def test_errors_at_start_contain_no_secret(
    arguments: tuple[str, ...], environ: dict[str, str], tmp_path: Path
) -> None:
    """A node that cannot start prints one line without the secret."""
    output = tmp_path / "output"
    async with served(arguments, environ, output) as process, asyncio.timeout(PATIENCE_S):
        assert await process.wait() in {1, 2}
    text = output.read_text()
    assert text.splitlines()[-1].startswith("draftgate: ")
    assert MARK not in text


@pytest.mark.parametrize("header", [f"authorization: Bearer {MARK}", MARK, f"a=b,x {MARK}=y"])
def test_warning_about_a_trace_header_does_not_quote_it(
    header: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A header for traces that cannot be read is named by its variable, without its value."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", header)
    open_tracing("http://127.0.0.1:1", {}).shutdown()
    assert "OTEL_EXPORTER_OTLP_HEADERS" in caplog.text
    assert MARK not in caplog.text
