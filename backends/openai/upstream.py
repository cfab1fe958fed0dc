"""A server with OpenAI's API as a worker, to which requests are forwarded without change."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from typing import Final

import aiohttp
from yarl import URL

from draftgate.backends.base import BYTES_PER_TOKEN, UpstreamCall, UpstreamPause
from draftgate.backends.connection_errors import public_reason
from draftgate.backends.errors import UpstreamUnreachable
from draftgate.backends.openai.events import StreamEnding
from draftgate.backends.openai.exchange import HttpExchange
from draftgate.backends.openai.monitor import POLL_S, PROBE_S, UpstreamMonitor
from draftgate.backends.openai.pauses import Pauses
from draftgate.backends.openai.upstream_load import UpstreamLoad
from draftgate.backends.types import Capabilities, ModelCard
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import WorkerLoad

CONNECT_S: Final = 5.0
"""Timeout of a connection in seconds, which takes a round trip or two. The response may take any
time."""

IDLE_CONNECTION_S: Final = 4.0
"""Seconds for which an idle connection is reused. vLLM and SGLang (uvicorn) close idle connections
after 5 s. A request on a connection that is being closed is lost."""

LAST_BYTES_S: Final = 0.25
"""Seconds to wait for the end of the body after `[DONE]`. Without it, the connection is closed."""

_USED_ONCE: Final = {"Connection": "close"}
"""Header for llama.cpp's server. It closes connections after streams without notice, and the next
request on such a connection would be lost (b1-0c1e570, 2026-11-22)."""

LARGE_BYTES: Final = 64 << 10

_CAPABILITIES: Final = Capabilities(token_ids=False, resume=False, speculation=False)


class OpenAIUpstream:
    """Implements `Upstream` with one session, whose connections are kept and shared."""

    recovers = True

    def __init__(
        self,
        config: WorkerConfig,
        clock: Callable[[], float] = time.monotonic,
        probe_s: float = PROBE_S,
        poll_s: float = POLL_S,
    ) -> None:
        """Read the settings without sending a request.

        Args:
            config: configuration, of which the `upstream*` settings are used.
            clock: clock for pauses, speeds and the age of metrics, in seconds.
            probe_s: seconds between two probes of a healthy upstream.
            poll_s: seconds between two readings of its metrics.

        Raises:
            ValueError: the address is missing, or the variable of the key is not set.
        """
        if config.upstream is None:
            raise ValueError("the backend 'openai' needs --upstream URL")
        self.url = config.upstream.rstrip("/").removesuffix("/v1")
        self._headers = {"Accept-Encoding": "identity", **_authorization(config)}
        self._clock = clock
        self._probe_s = probe_s
        self._poll_s = poll_s
        self._pauses = Pauses(self.url)
        self._load = UpstreamLoad(config.upstream_concurrency, config.upstream_speculates)
        self._sent = 0  # sequences
        self._waiting: set[asyncio.Timeout] = set()  # for the head of a response
        self._open: set[HttpExchange] = set()
        self._session: aiohttp.ClientSession | None = None
        self._monitor: UpstreamMonitor | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False

    @property
    def card(self) -> ModelCard:
        """The first model in the upstream's list, without a name until the upstream was reached."""
        model = None if self._monitor is None else self._monitor.model
        if model is None:
            return ModelCard("", self.url, 0, None, 0, _CAPABILITIES)
        return ModelCard(
            model.model_id, self.url, model.max_model_len, None, model.created_s, _CAPABILITIES
        )

    @property
    def progress(self) -> float:
        """Always 1.0, because an upstream has no model to load."""
        return 1.0

    @property
    def failure(self) -> str | None:
        """The cause of an outage, or None if the upstream is healthy or only paused."""
        return "stopped" if self._stopped else self._pauses.breaker.reason

    @property
    def pause(self) -> UpstreamPause | None:
        """The requested pause, or the time until the next probe during an outage."""
        return self._pauses.pause(self.failure, self._clock())

    def load(self) -> WorkerLoad:
        """Return the load from this gateway's counts and from the upstream's metrics."""
        return self._load.load(self._sent, self._clock())

    async def start(self) -> None:
        """Probe the upstream once, and continue in the background.

        An upstream that does not respond is no error, because it may start later than this node.
        """
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._monitor = UpstreamMonitor(self._session, self.url, self._clock)
        failure = await self._monitor.probe()
        if failure is None:
            await self.poll()
        else:
            self._pauses.breaker.refuse(failure.reason, self._clock())
        loops = (self._probe_forever(), self._poll_forever())
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def stop(self) -> None:
        """Close every connection, so that open exchanges fail."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # aiohttp does not wake tasks that wait on a connection that it closes itself.
        for waiting in self._waiting:
            waiting.reschedule(0.0)
        for exchange in self._open:
            exchange.fail("this node stops")
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def forward(self, call: UpstreamCall) -> AsyncGenerator[HttpExchange, None]:
        """Forward a request. Leaving the context early closes its connection."""
        if self._session is None or self._stopped:
            raise UpstreamUnreachable(f"{self.url} was stopped")
        self._sent += call.sequences
        try:
            begin_s, running = self._clock(), self.load().running
            response = await self._send(self._session, call)
            exchange = HttpExchange(response, self._clock)
            self._open.add(exchange)
            try:
                yield exchange
                if exchange.has_rest:
                    with suppress(TimeoutError, aiohttp.ClientError):
                        async with asyncio.timeout(LAST_BYTES_S):
                            await exchange.finish()
            finally:
                self._open.discard(exchange)
                response.close()  # unless the body was read to its end
            mean_running = (running + self.load().running) / 2
            self._observe(exchange, begin_s, len(call.body), mean_running)
        finally:
            self._sent -= call.sequences

    async def probe(self) -> None:
        """Probe the upstream, and record the result."""
        assert self._monitor is not None
        failure = await self._monitor.probe()
        if failure is None:
            self._pauses.breaker.succeeded()
        else:
            self._pauses.breaker.failed(failure.reason, self._clock(), timeout=failure.timeout)

    async def poll(self) -> None:
        """Read the metrics of the upstream, if it has any."""
        assert self._monitor is not None
        sent = self._sent
        metrics = await self._monitor.metrics()
        if metrics is not None:
            # The metrics may or may not include requests that began or ended meanwhile.
            self._load.update(metrics, max(sent, self._sent), self._clock())
        slots = await self._monitor.slots()
        if slots is not None:
            self._load.set_slots(slots)

    async def _send(
        self, session: aiohttp.ClientSession, call: UpstreamCall
    ) -> aiohttp.ClientResponse:
        model = None if self._monitor is None else self._monitor.model
        once = _USED_ONCE if model is not None and model.is_llama_cpp else {}
        waiting = asyncio.timeout(None)
        self._waiting.add(waiting)
        try:
            async with waiting:
                response = await session.request(
                    call.method,
                    URL(self.url + call.path, encoded=True),
                    data=_payload(call.body),
                    headers={**call.headers, **once},
                    allow_redirects=False,
                )
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            reason = public_reason(error)
            timeout = isinstance(error, TimeoutError)
            self._pauses.breaker.failed(reason, self._clock(), timeout=timeout)
            raise UpstreamUnreachable(f"{self.url}: {reason}") from error
        finally:
            self._waiting.discard(waiting)
        self._pauses.note_answer(response, self._clock())
        return response

    def _observe(
        self, exchange: HttpExchange, begin_s: float, body_bytes: int, running: float
    ) -> None:
        """Learn the speed from a complete stream."""
        if exchange.scan.ending is not StreamEnding.DONE or exchange.first_s is None:
            return
        usage, speed = exchange.usage(), self._load.speed
        speed.add_first_byte(
            exchange.first_s - begin_s, usage.prompt or body_bytes / BYTES_PER_TOKEN
        )
        seconds = exchange.last_s - exchange.first_s
        speed.add_stream(seconds, usage.output, exchange.scan.finished, running)

    async def _probe_forever(self) -> None:
        while True:
            pause_s = self._pauses.breaker.remaining_s(self._clock()) or self._probe_s
            await asyncio.sleep(min(pause_s, self._probe_s))
            if self._pauses.may_probe(self._clock()):
                await self.probe()

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            if self.pause is None:
                await self.poll()


def _payload(body: bytes) -> bytes | BytesIO | None:
    """Return a body that aiohttp sends in pieces if it is large."""
    return BytesIO(body) if len(body) > LARGE_BYTES else body or None


def _authorization(config: WorkerConfig) -> dict[str, str]:
    name = config.upstream_api_key_env
    if name is None:
        return {}
    key = os.environ.get(name, "").strip()
    if not key:
        raise ValueError(f"--upstream-api-key-env: the variable {name} is not set")
    return {"Authorization": f"Bearer {key}"}
