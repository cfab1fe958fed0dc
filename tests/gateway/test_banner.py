"""Tests of the banner, which a terminal shows once a node listens."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL, SHIPPED_MODEL_ID, SHIPPED_QUERIES_ID
from draftgate.gateway.banner import banner
from draftgate.gateway.cli.server import show_banner
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.logs import LOGGER, JsonFormatter
from draftgate.gateway.process import resident_bytes
from tests.gateway.harness import PATIENCE_S, client, running
from tests.gateway.test_cli import COMMAND
from tests.gateway.upstreams import forwarding, refusal, upstream


def example(shown: str) -> httpx.Request:
    """Return the request of the command in a banner."""
    words = shlex.split(shown.strip().splitlines()[-1])
    headers = [words[at + 1] for at, word in enumerate(words) if word == "-H"]
    body = words[words.index("-d") + 1]
    url = next(word for word in words if word.startswith("http"))
    return httpx.Request("POST", url, headers=dict(h.split(": ") for h in headers), content=body)


@pytest.mark.parametrize("keys", [False, True])
async def test_the_example_has_the_header_of_a_key(tmp_path: Path, *, keys: bool) -> None:
    """The example of a node works as it is, or with a key in place of KEY if the node needs one."""
    path = tmp_path / "keys.yaml"
    path.write_text("keys:\n  - {name: a, key: KEY}\n")
    settings = {"api_keys_file": str(path)} if keys else {}
    async with running(**settings) as gateway, client(gateway) as http:
        shown = banner(gateway)
        assert "is ready\n" in shown
        assert ("Authorization: Bearer KEY" in shown) is keys
        assert (await http.send(example(shown))).status_code == 200
        assert f"  chat         draftgate chat --url {gateway.url}" in shown
        assert (" --api-key KEY\n" in shown) is keys


@pytest.mark.parametrize(
    ("settings", "chats", "path"),
    [
        ({"backend": "sim"}, True, "/v1/chat/completions"),
        ({"backend": "engine"}, False, "/v1/completions"),
        ({"backend": "engine", "model": SHIPPED_MODEL_ID}, False, "/v1/completions"),
        ({"backend": "engine", "model": SHIPPED_QUERIES_ID}, False, "/v1/embeddings"),
    ],
)
async def test_the_banner_says_how_to_chat(
    settings: dict[str, str], path: str, *, chats: bool
) -> None:
    """The shipped model has a chat template but follows no instructions, so the banner of its node
    names a model that does. An example fits the model."""
    async with running(**settings, threads=1) as gateway:
        shown = banner(gateway)
    assert ("draftgate chat --url" in shown) is chats
    assert ("draftgate serve smollm2" in shown) is (path == "/v1/completions")
    assert example(shown).url.path == path


async def test_the_banner_says_that_a_node_is_not_ready() -> None:
    """The banner of a node says the same as `/ready`."""
    async with upstream(refusal(200)) as engine:
        engine.status = 500
        async with forwarding(engine) as gateway, client(gateway) as http:
            await gateway.node.fleet.workers[0].backend.probe()
            ready = await http.get("/ready")
            shown = banner(gateway)
            assert (ready.status_code == 200) is ("is ready\n" in shown)
            if ready.status_code != 200:
                assert f"is not ready: {ready.json()['reason']}\n" in shown
    async with forwarding(engine) as gateway, client(gateway) as http:
        ready = await http.get("/ready")
        assert ready.status_code == 503
        assert f"is not ready: {ready.json()['reason']}\n" in banner(gateway)


async def test_the_banner_shows_the_memory_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line has the weights, the KV cache and the total, which includes what is resident now."""
    monkeypatch.setattr("draftgate.gateway.banner.resident_bytes", lambda: 570_000_000)
    async with running(backend="sim") as gateway:
        assert "memory" not in banner(gateway)  # a simulated worker has no weights
        worker = gateway.node.fleet.workers[0]
        sizes = {"weight_bytes": 269_000_000, "kv_bytes": 2_150_000_000, "pool_tokens": 93_200}
        card = replace(worker.backend.card, **sizes)
        monkeypatch.setattr(type(worker.backend), "card", card)
        (line,) = [line.strip() for line in banner(gateway).splitlines() if "memory" in line]
    assert line == (
        "memory       0.27 GB of weights, up to 2.15 GB of KV cache (93,200 tokens), "
        "up to 2.72 GB in total"
    )


async def test_the_banner_distinguishes_several_models(tmp_path: Path) -> None:
    """The banner marks the model of requests that name none, and names that of the defaults."""
    other = tmp_path / "other"
    shutil.copytree(SHIPPED_MODEL, other)
    (other / "generation_config.json").write_text('{"temperature": 0.2}')
    async with running(models=(f"other={other}",)) as gateway:
        name, lines = gateway.node.models[0].name, banner(gateway).splitlines()
    models = [line.split(maxsplit=1)[1] for line in lines if line.startswith("  model")]
    assert [(one.split()[0], one.endswith(", the default")) for one in models] == [
        (name, True),
        ("other", False),
    ]
    (defaults,) = [line for line in lines if line.startswith("  defaults")]
    assert defaults.endswith("temperature 0.2 (other)")


def test_resident_memory_includes_descendants() -> None:
    """The memory of a process includes that of the processes that it started."""
    alone = resident_bytes()
    assert alone is not None
    code = "x = b'x' * (64 << 20); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        both = resident_bytes()
        assert both is not None
        assert both - alone > 60 << 20
        child.communicate(b"\n")


@pytest.mark.parametrize("form", ["line", "json"])
async def test_programs_that_read_json_get_the_address_in_the_log(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, form: str
) -> None:
    """With `--log-format json`, a line of the log has the address in place of the banner."""
    caplog.set_level(logging.INFO, logger=LOGGER)
    async with running(log_level="info") as gateway:
        show_banner(ServeConfig(log_format=form), gateway)
        url = gateway.url
    assert bool(capsys.readouterr().out) is (form == "line")
    logged = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    urls = [line["url"] for line in logged if line["event"] == "listening"]
    assert urls == ([url] if form == "json" else [])


@pytest.mark.parametrize("processes", [1, 2])
async def test_json_logs_name_the_port_that_the_system_chose(processes: int) -> None:
    """A program that starts a node with `--port 0` finds its address in the log."""
    words = ("serve", "--backend", "sim", "--port", "0", "--log-format", "json")
    node = await asyncio.create_subprocess_exec(
        *(*COMMAND, *words, "--processes", str(processes)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert node.stderr is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for line in node.stderr:
                if (logged := json.loads(line))["event"] == "listening":
                    break
            else:
                pytest.fail("the log names no address")
        async with httpx.AsyncClient(base_url=logged["url"], timeout=60) as http:
            assert (await http.get("/ready")).status_code == 200
    finally:
        if node.returncode is None:
            node.terminate()
        out, _ = await node.communicate()
    assert out == b"", "programs read no other output"
