"""llama.cpp's server as a process, with a small random model.

It is `llama-server` on the path, or the file in `LLAMA_SERVER`. Build it from the source
distribution of `llama-cpp-python`, which contains llama.cpp (some ten minutes on two cores):

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

START_S = 30.0
SLOTS = 2
SLOT_TOKENS = 16_384
"""Context of each slot: more than it generates in some seconds, so that a client can leave."""


def find_server() -> Path | None:
    """Return the path of the server; None without it, or without the package for its model."""
    found = os.environ.get("LLAMA_SERVER") or shutil.which("llama-server")
    if not found or not Path(found).is_file() or importlib.util.find_spec("gguf") is None:
        return None
    return Path(found)


@dataclass
class LlamaServer:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]

    def metric(self, name: str) -> float:
        """Return one of its metrics, read without a gateway."""
        page = httpx.get(f"{self.url}/metrics").text
        (line,) = [line for line in page.splitlines() if line.startswith(f"llamacpp:{name} ")]
        return float(line.split()[1])

    def is_idle(self) -> bool:
        return self.metric("requests_processing") == self.metric("requests_deferred") == 0

    async def settled(self) -> None:
        """Wait until it is idle, polling rarely.

        Each answer delays its check for clients that have left (`backends.openai.monitor.POLL_S`).
        """
        async with asyncio.timeout(PATIENCE_S):
            while not self.is_idle():  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(POLL_S)


@contextmanager
def llama_server(model: Path, *options: str, port: int = 0) -> Iterator[LlamaServer]:
    """Serve a model with two slots on a free port; the server is killed at the end."""
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
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None, "it did not start"
        assert time.monotonic() < until_s, "it did not become ready"
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
