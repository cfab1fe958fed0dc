"""Tests of stopping a node: open streams end, new requests are refused, the exit is clean."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest

from draftgate.gateway.app import drain
from draftgate.gateway.lifecycle import Lifecycle, NodeState
from tests.gateway.harness import ScriptedBackend, client, events, running, until

COMMAND = [
    sys.executable, "-c", "from draftgate.gateway.cli import main; main()",
    "serve", "--backend", "sim", "--port", "0",
]  # fmt: skip
BODY = {"prompt": "x", "max_tokens": 100, "stream": True}

POISON = """
from draftgate.backends.sim.model import SimExecutor
execute = SimExecutor.execute
def breaks(self, plan):
    if any(work.sequence.output_tokens >= 200 for work in plan.work):
        raise RuntimeError("device lost")
    return execute(self, plan)
SimExecutor.execute = breaks
"""
"""Code that fails every simulated worker that reaches token 200 of a request."""


async def test_draining_finishes_open_streams_and_refuses_new_requests(
    scripted: ScriptedBackend,
) -> None:
    """A draining node finishes open streams and responds to new requests with 503 and
    Retry-After. Its responses announce that connections close."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        open_stream = asyncio.create_task(http.post("/v1/completions", json=BODY))
        request = await scripted.submitted.get()
        draining = asyncio.create_task(drain(gateway.node, 60))
        await until(lambda: gateway.node.state is NodeState.DRAINING)
        refused = await http.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert int(refused.headers["retry-after"]) > 0
        assert refused.headers["connection"] == "close"
        assert (await http.get("/ready")).status_code == 503
        alive = await http.get("/health")
        assert (alive.status_code, alive.headers["connection"]) == (200, "close")
        assert not draining.done()
        scripted.emit(request, "the end", last=True)
        assert events((await open_stream).text)[-1] == "[DONE]"
        assert await draining


async def test_draining_gives_up_after_its_timeout(scripted: ScriptedBackend) -> None:
    """A stream that never ends gets one error event after the drain timeout."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        open_stream = asyncio.create_task(http.post("/v1/completions", json=BODY))
        scripted.emit(await scripted.submitted.get(), "begun")
        assert not await drain(gateway.node, 0.05)
        await scripted.stop()
        assert events((await open_stream).text)[-1]["error"]["code"] == "worker_failed"


async def test_a_late_reader_is_still_in_flight(scripted: ScriptedBackend) -> None:
    """A draining node waits until the last byte of a whole response has been sent."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        whole = asyncio.create_task(http.post("/v1/completions", json={**BODY, "stream": False}))
        scripted.emit(await scripted.submitted.get(), "all", last=True)
        assert await drain(gateway.node, 60)
        assert (await whole).json()["choices"][0]["text"] == "all"


def test_states_follow_the_table() -> None:
    """A forbidden change of the node's state raises an error."""
    node = Lifecycle()
    node.move_to(NodeState.DRAINING)
    with pytest.raises(RuntimeError, match="draining cannot become ready"):
        node.move_to(NodeState.READY)


@pytest.fixture
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A real server process and its URL."""
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    url = ""
    while "/v1" not in url:
        url = process.stdout.readline()
        assert url, process.stderr.read()
    yield process, url[url.index("http") : url.index("/v1")]
    process.kill()
    process.communicate()


def _stream(url: str, max_tokens: int):
    body = json.dumps({**BODY, "max_tokens": max_tokens, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, method="POST")
    return urllib.request.urlopen(request, timeout=60)


def test_sigterm_lets_a_stream_end_and_exits_0(served: tuple[subprocess.Popen[str], str]) -> None:
    """The server finishes an open stream after SIGTERM and exits with status 0."""
    process, url = served
    with _stream(url, 600) as response:
        begun = response.readline().decode()
        process.send_signal(signal.SIGTERM)
        found = events(begun + response.read().decode())
    assert found[-1] == "[DONE]"
    assert found[-2]["choices"][0]["finish_reason"] == "length"
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in log
    assert "ending=finished" in log
    assert log.rstrip().endswith("stopped")


def test_a_second_signal_ends_open_streams(served: tuple[subprocess.Popen[str], str]) -> None:
    """A second signal ends the open stream with an error event and stops the server."""
    process, url = served
    with _stream(url, 8000) as response:
        begun = response.readline().decode()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        found = events(begun + response.read().decode())
    assert found[-1]["error"]["code"] == "worker_failed"
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_sigterm_while_loading_exits_0() -> None:
    """A loading node stops on SIGTERM with status 0 and without a traceback."""
    command = [*COMMAND[:4], "--port", "0", "--backend", "sim", "--config", "/dev/null"]
    slow = "import draftgate.gateway.app as l, time; f = l.backend_factory\n"
    slow += "def load(name):\n    print('loading', flush=True); time.sleep(0.3); return f(name)\n"
    command[2] = slow + "l.backend_factory = load\n" + command[2]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in log


def test_a_node_exits_with_its_last_worker() -> None:
    """A stream survives the first lost worker, and the node exits with status 1 after the
    second."""
    command = [*COMMAND, "--devices", "0,1"]
    command[2] = POISON + command[2]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        url = ""
        while "/v1" not in url:
            url = process.stdout.readline()
            assert url, process.stderr.read()
        with _stream(url[url.index("http") : url.index("/v1")], 600) as response:
            found = events(response.read().decode())
        _, log = process.communicate(timeout=60)
    assert len(found) > 20
    assert found[-1]["error"]["code"] == "worker_failed"
    assert "device lost" in found[-1]["error"]["message"]
    assert process.returncode == 1
    assert log.count(" resumed ") == 1
    assert log.rstrip().endswith("draftgate: the last worker failed: RuntimeError: device lost")
    assert "Traceback" not in log
