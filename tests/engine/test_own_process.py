"""An engine in its own process: the backend contract, and failures of the process."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from draftgate.backends.delta_reader import generate
from draftgate.backends.engine import process
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.errors import BackendFailed, CheckpointError
from draftgate.backends.testing import check_backend, collect, make_request
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, GrammarKind, GrammarSpec, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import ServiceLevel, SpeculationMode, SpeculationPlan
from tests.processes import child_pids

CONFIG = WorkerConfig(max_model_len=512, kv_bytes=4 << 20, threads=1, own_process=True)


async def test_engine_process_passes_the_backend_conformance_suite() -> None:
    """The engine passes the suite across the socket, and its process ends afterwards."""
    before = child_pids()
    await check_backend(EngineBackend(CONFIG))
    assert child_pids() == before


async def test_texts_equal_those_of_an_engine_in_this_process() -> None:
    """Both engines give the same texts with and without a grammar."""
    own, separate = EngineBackend(structs.replace(CONFIG, own_process=False)), EngineBackend(CONFIG)
    await asyncio.gather(own.start(), separate.start())
    try:
        assert own.card.numerics_class == separate.card.numerics_class
        for index, grammar in enumerate([None, GrammarSpec(GrammarKind.REGEX, "(ab|ba){3,9}")]):
            for seed in range(3):
                generation = make_request(own, n=2, max_tokens=24, seed=seed)
                generation = replace(generation, grammar=grammar, request_id=f"{index}-{seed}")
                separate.check(generation)
                assert await collect(separate, generation) == await collect(own, generation)
    finally:
        await asyncio.gather(own.stop(), separate.stop())


async def test_service_level_and_cost_error_cross_the_socket() -> None:
    """The engine's process runs a request with a service level, and reports a finite cost error."""
    backend = EngineBackend(CONFIG)
    await backend.start()
    try:
        generation = make_request(backend, max_tokens=24)
        expected = await collect(backend, generation)
        served = replace(generation, request_id="s", service=ServiceLevel(1.0, 0.01, -1))
        assert await collect(backend, served) == expected
        assert 0.0 < backend.load().step_cost_error < math.inf
    finally:
        await backend.stop()


async def test_killed_process_ends_every_stream_with_an_error() -> None:
    """A killed process fails open streams and later requests, and the backend gives the reason."""
    before = child_pids()
    backend = EngineBackend(CONFIG)
    await backend.start()
    try:
        (child,) = child_pids() - before
        async with aclosing(generate(backend, make_request(backend, max_tokens=400))) as stream:
            await anext(stream)
            os.kill(child, signal.SIGKILL)
            with pytest.raises(BackendFailed, match="status -9"):
                async for _ in stream:
                    pass
        assert "status -9" in str(backend.failure)
        with pytest.raises(BackendFailed, match="status -9"):
            generate(backend, make_request(backend))
    finally:
        await backend.stop()


class UnresponsiveProcess:
    """A process that keeps its end of the socket open and reads nothing."""

    def __init__(self, end: socket.socket, _shared: object) -> None:
        self._end = end.dup()

    def wait(self, _timeout_s: float | None = None) -> int:
        self._end.close()
        return 0


def test_submitting_a_large_prompt_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop queues a prompt larger than the socket buffer without blocking."""
    monkeypatch.setattr(process, "_spawn", UnresponsiveProcess)
    host = process.EngineProcess(CONFIG, EngineBackend(CONFIG))
    host.start()
    plan = SpeculationPlan("off", SpeculationMode.OFF, None, 0, "a test")
    generation = GenerationRequest("a", compact(range(300_000)), SamplingParams(1, 0), plan)
    submitting = threading.Thread(target=host.submit, args=(generation,), daemon=True)
    submitting.start()
    submitting.join(60)
    assert not submitting.is_alive()
    host.stop()
    host.join()


async def test_missing_checkpoint_fails_the_start(tmp_path: Path) -> None:
    """`start` raises the error of the loader."""
    backend = EngineBackend(structs.replace(CONFIG, model=str(tmp_path / "nowhere")))
    with pytest.raises(CheckpointError, match="nowhere"):
        await backend.start()
    await backend.stop()


async def test_invalid_setting_fails_the_start() -> None:
    """The error names the setting."""
    backend = EngineBackend(structs.replace(CONFIG, kv_bytes=1))
    with pytest.raises(ValueError, match="kv_bytes"):
        await backend.start()
    await backend.stop()


async def test_engine_can_be_stopped_while_it_loads() -> None:
    """Stopping ends the process immediately, and `start` raises an error."""
    backend = EngineBackend(CONFIG)
    starting = asyncio.create_task(backend.start())
    while backend.progress == 0.0:  # noqa: ASYNC110 - another process's
        await asyncio.sleep(0.01)
    await backend.stop()
    with pytest.raises(BackendFailed, match="stopped"):
        async with asyncio.timeout(60):
            await starting


def test_gateway_process_does_not_import_torch() -> None:
    """Only the process of the engine imports torch."""
    code = "import sys, draftgate.backends.engine.backend; print('torch' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "False"


async def test_signals_for_the_gateway_do_not_end_the_engine() -> None:
    """The engine's process ignores signals that `pkill` may send to all processes of a node."""
    backend = EngineBackend(CONFIG)
    before = child_pids()
    await backend.start()
    try:
        (pid,) = child_pids() - before
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
        assert await collect(backend, make_request(backend, max_tokens=4))
        assert backend.failure is None
    finally:
        await backend.stop()
