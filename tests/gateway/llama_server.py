"""llama.cpp's server as a process with a small random model.

The tests run `llama-server` from the PATH, or the file that `LLAMA_SERVER` names. The source
distribution of `llama-cpp-python` contains llama.cpp. These commands build the server in about ten
minutes on two cores:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python
    tar xzf llama_cpp_python-*.tar.gz && cd llama_cpp_python-*/vendor/llama.cpp
    cmake -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_OPENSSL=OFF \\
        -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_BUILD_TESTS=OFF -DBUILD_SHARED_LIBS=OFF
    cmake --build build --target llama-server
    export LLAMA_SERVER=$PWD/build/bin/llama-server
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from draftgate.backends.openai.monitor import POLL_S
from tests.gateway.harness import PATIENCE_S

START_S = 60.0
SLOTS = 2
SLOT_TOKENS = 16_384
"""Context of each slot, in tokens. Filling it takes seconds, so a client can disconnect first."""


def find_server() -> Path | None:
    """Return the path of the server, or None if the server or the package `gguf` is missing."""
    found = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if not found or not Path(found).is_file() or importlib.util.find_spec("gguf") is None:
        return None
    return Path(found)


@dataclass
class LlamaServer:
    """A running llama.cpp server."""

    url: str
    process: subprocess.Popen[bytes]

    def metric(self, name: str) -> float:
        """Return the value of a metric from the server's own metrics page."""
        page = httpx.get(f"{self.url}/metrics", timeout=60).text
        (line,) = [line for line in page.splitlines() if line.startswith(f"llamacpp:{name} ")]
        return float(line.split()[1])

    def is_idle(self) -> bool:
        return self.metric("requests_processing") == self.metric("requests_deferred") == 0

    async def wait_idle(self) -> None:
        """Wait until the server is idle, polling every `POLL_S` seconds.

        Each response of the server delays its next check for disconnected clients, so polling is
        rare (`backends.openai.monitor.POLL_S`).
        """
        async with asyncio.timeout(PATIENCE_S):
            while not self.is_idle():  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(POLL_S)


@contextmanager
def llama_server(model: Path, *options: str, port: int = 0) -> Iterator[LlamaServer]:
    """Serve a model with two slots on a free port, and kill the server at the end."""
    server = find_server()
    assert server is not None
    port = port or _free_port()
    place = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--metrics"]
    size = ["--parallel", str(SLOTS), "--ctx-size", str(SLOTS * SLOT_TOKENS), "--threads", "1"]
    with subprocess.Popen(
        [str(server), *place, *size, "--no-warmup", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            _wait(f"http://127.0.0.1:{port}", process)
            yield LlamaServer(f"http://127.0.0.1:{port}", process)
        finally:
            process.kill()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None, "llama-server exited during its start"
        assert time.monotonic() < until_s, "llama-server did not become ready in time"
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
