"""The servers of a differential test, which run on one event loop in virtual time."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.memory_network import MemoryLoop

KEYS = """
keys:
  - {name: search, key: sk-search, share: 2, first_priority: -1, least_ttft_ms: 500,
     least_tpot_ms: 20}
  - {name: boss, key: sk-boss, role: operator, first_priority: null}
  - {name: batch, key: sk-batch, requests_per_minute: 30, tokens_per_minute: 2000}
  - {name: prometheus, key: sk-metrics, role: metrics}
"""

SHARED = {"port": 0, "log_level": "debug", "no_acceptance_cache": True}

SCENARIOS: dict[str, dict[str, Any]] = {
    "worker": {"backend": "sim", "cors_origins": ("https://chat.example.com",)},
    "keys": {
        "backend": "sim", "devices": (0, 1), "max_num_seqs": 2, "max_queued": 6,
        "queue_timeout_s": 20.0, "shed_priority": 5, "max_body_bytes": 200_000,
        "max_model_len": 2048, "speculation": "fixed:3",
    },
    "upstream": {"backend": "openai", "upstream_concurrency": 4},
    "faulty": {"backend": "openai"},
}  # fmt: skip
"""The settings of the nodes."""


@dataclass
class Recorder:
    """A relay that records what a node sends to its upstream."""

    loop: MemoryLoop
    port: int
    received: list[bytes] = field(default_factory=list)

    async def listen(self) -> int:
        """Begin to listen, and return the port."""
        server = await self.loop.create_server(lambda: _Incoming(self))
        return int(server.sockets[0].getsockname()[1])


class _Incoming(asyncio.Protocol):
    """A connection of the node to the relay, and one from the relay to the upstream."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._place: int | None = None
        self._opening: asyncio.Task[None] | None = None
        self._unsent = b""
        self.outgoing: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._opening = asyncio.ensure_future(self._open())

    async def _open(self) -> None:
        loop, port = self._recorder.loop, self._recorder.port
        self.outgoing, _ = await loop.create_connection(lambda: _Outgoing(self), port=port)
        if self._unsent:
            self.outgoing.write(self._unsent)

    def data_received(self, data: bytes) -> None:
        received = self._recorder.received
        if self._place is None or self._place >= len(received):
            self._place = len(received)
            received.append(b"")
        received[self._place] += data
        if self.outgoing is None:
            self._unsent += data
        else:
            self.outgoing.write(data)

    def answered(self) -> None:
        """Note that what the node sends from now on is a further request."""
        self._place = None

    def connection_lost(self, error: Exception | None) -> None:
        if self.outgoing is not None:
            self.outgoing.abort()


class _Outgoing(asyncio.Protocol):
    def __init__(self, incoming: _Incoming) -> None:
        self._incoming = incoming

    def data_received(self, data: bytes) -> None:
        self._incoming.answered()
        self._incoming.transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._incoming.transport.close()


class Lines(logging.Handler):
    """A handler that keeps log lines as they would be written, without the time."""

    def __init__(self) -> None:
        super().__init__()
        from draftgate.gateway.logs import LOGGER, JsonFormatter

        self.lines: list[dict[str, Any]] = []
        self._form = JsonFormatter()
        for name in (LOGGER, "aiohttp", "asyncio"):
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = [self], False
            logger.setLevel(logging.DEBUG if name == LOGGER else logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        found = json.loads(self._form.format(record))
        del found["time"]
        self.lines.append(found)


def with_tools(folder: Path) -> Path:
    """Write a checkpoint of the shipped model whose chat template supports tools."""
    from tests.gateway.tool_models import with_template

    return with_template(folder / "qwen", "qwen2_5")


Faults = Callable[[], Any]


@asynccontextmanager
async def node(**settings: Any) -> AsyncIterator[int]:
    """Run a node, and yield its port."""
    from draftgate.gateway.app import build_node, listening, start_workers
    from draftgate.gateway.config import effective_config

    built = build_node(effective_config({**SHARED, **settings}, {}).config)
    async with listening(built) as gateway:
        await start_workers(built)
        async with built.beating():
            yield int(gateway.url.rpartition(":")[2])
        await built.stop()


@asynccontextmanager
async def running(
    scenario: str, loop: MemoryLoop, folder: Path
) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Run the servers of a scenario.

    Yields:
        the port for clients, and the requests that upstreams have received.
    """
    settings = dict(SCENARIOS[scenario])
    received: list[bytes] = []
    async with AsyncExitStack() as stack:
        if settings["backend"] == "sim":
            settings["model"] = str(with_tools(folder))
            if scenario == "keys":
                keys = folder / "keys.yaml"
                keys.write_text(KEYS, encoding="utf-8")
                keys.chmod(0o600)
                settings |= {"api_keys_file": str(keys), "audit_file": str(folder / "audit.jsonl")}
        elif scenario == "upstream":
            behind = await stack.enter_async_context(
                node(backend="sim", model=str(with_tools(folder)))
            )
            recorder = Recorder(loop, behind, received)
            settings["upstream"] = (_named(f"http://127.0.0.1:{await recorder.listen()}"),)
        else:
            from tests.differential.faults import faulty_upstream

            behind = await stack.enter_async_context(faulty_upstream())
            recorder = Recorder(loop, behind, received)
            settings["upstream"] = (_named(f"http://127.0.0.1:{await recorder.listen()}"),)
        yield await stack.enter_async_context(node(**settings)), received


def _named(url: str) -> str:
    """Return an upstream with a name like those of earlier versions, which had no other names."""
    from draftgate.backends import worker_config

    has_names = hasattr(worker_config, "UpstreamSettings")
    return f"w-{secrets.token_hex(4)}-0={url}" if has_names else url
