"""A server that speaks OpenAI's API, as a worker: requests go there as they came."""

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

from draftgate.backends.base import BYTES_PER_TOKEN, Rest, UpstreamCall, WorkerConfig
from draftgate.backends.errors import UpstreamUnreachable
from draftgate.backends.openai.exchange import HttpExchange
from draftgate.backends.openai.metrics.polling import POLL_S, MetricsPoller
from draftgate.backends.openai.pauses import Pauses
from draftgate.backends.openai.probing import PROBE_S, Prober
from draftgate.backends.openai.speed import ObservedSpeed
from draftgate.backends.openai.told import ToldLoad
from draftgate.backends.reasons import plain_reason
from draftgate.backends.types import Capabilities, ModelCard
from draftgate.policies.types import WorkerLoad

CONNECT_S: Final = 5.0
"""A connection takes a round trip or two; the answer itself may take as long as it likes."""

IDLE_CONNECTION_S: Final = 4.0
"""An idle connection is used again for so long. vLLM and SGLang (uvicorn) close theirs after 5 s,
and a request on a connection that is being closed is lost."""

LAST_BYTES_S: Final = 0.25
"""Behind `[DONE]` the end of the body is awaited this long, else the connection is closed."""

_USED_ONCE: Final = {"Connection": "close"}
"""What llama.cpp's server is told: it closes connections behind streams without saying so, and the
next request on one would be lost (b1-0c1e570, 2026-11-22)."""

LARGE_BYTES: Final = 64 << 10

_CAPABILITIES: Final = Capabilities(token_ids=False, resume=False, speculation=False)


class OpenAIUpstream:
    """Implements `Upstream`. One session, whose connections are kept and shared."""

    recovers = True

    def __init__(
        self,
        config: WorkerConfig,
        clock: Callable[[], float] = time.monotonic,
        probe_s: float = PROBE_S,
        poll_s: float = POLL_S,
    ) -> None:
        """Take the address and the key; nothing is sent yet.

        Args:
            config: what begins with `upstream` is read.
            clock: for breaker, rests, speed and the age of metrics.
            probe_s: seconds between two probes of an upstream that is well.
            poll_s: seconds between two readings of its metrics.

        Raises:
            ValueError: there is no address, or no key where one is named.
        """
        if config.upstream is None:
            raise ValueError("the backend 'openai' needs --upstream URL")
        self.url = config.upstream.rstrip("/").removesuffix("/v1")
        self._headers = {"Accept-Encoding": "identity", **_authorization(config)}
        self._clock = clock
        self._probe_s = probe_s
        self._poll_s = poll_s
        self._pauses = Pauses(self.url)
        self._speed = ObservedSpeed()
        self._told = ToldLoad(config.upstream_concurrency, config.upstream_speculates)
        self._sent = 0  # sequences
        self._waiting: set[asyncio.Timeout] = set()  # for the head of an answer
        self._open: set[HttpExchange] = set()
        self._session: aiohttp.ClientSession | None = None
        self._prober: Prober | None = None
        self._poller: MetricsPoller | None = None
        self._asking: list[asyncio.Task[None]] = []
        self._stopped = False

    @property
    def card(self) -> ModelCard:
        """The first model of the upstream's list; its name is empty while it was never reached."""
        found = self._prober.model if self._prober is not None else None
        if found is None:
            return ModelCard("", self.url, 0, None, 0, _CAPABILITIES)
        return ModelCard(
            found.model_id, self.url, found.max_model_len, None, found.created_s, _CAPABILITIES
        )

    @property
    def progress(self) -> float:
        """Always 1: there is nothing to load here."""
        return 1.0

    @property
    def failure(self) -> str | None:
        """Why it is left alone, unless it only asked for a pause."""
        return "stopped" if self._stopped else self._pauses.breaker.reason

    @property
    def rest(self) -> Rest | None:
        """The pause it asked for, or the time to its next probe while it is out."""
        now_s, failure = self._clock(), self.failure
        if failure is not None:
            return self._pauses.out(failure, now_s)
        return self._pauses.asked_for(now_s)

    def load(self) -> WorkerLoad:
        """Return what is counted here, and what its metrics told of others while that is fresh."""
        return self._told.load(self._sent, self._speed, self._clock())

    async def start(self) -> None:
        """Ask whether it is there, once, and go on asking in the background.

        One that does not answer yet is no error: it may start later than this node.
        """
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._prober = Prober(self._session, self.url)
        self._poller = MetricsPoller(self._session, self.url, self._clock)
        reason = await self._prober.probe()
        if reason is None:
            await self.poll()
        else:
            self._pauses.breaker.refuse(reason.text, self._clock())
        asking = (self._probe_forever(), self._poll_forever())
        self._asking = [asyncio.create_task(forever) for forever in asking]

    async def stop(self) -> None:
        """Close every connection; what was open breaks."""
        self._stopped = True
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        # aiohttp tells nobody who waits for a connection that it closes itself.
        for waiting in self._waiting:
            waiting.reschedule(0.0)
        for exchange in self._open:
            exchange.fail("this node stops")
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def forward(self, call: UpstreamCall) -> AsyncGenerator[HttpExchange, None]:
        """Pass a request on; leaving the context early closes its connection."""
        if self._session is None or self._stopped:
            raise UpstreamUnreachable(f"{self.url} was stopped")
        self._sent += call.sequences
        try:
            begin_s, beside = self._clock(), self.load().running
            response = await self._send(self._session, call)
            exchange = HttpExchange(response, self._clock)
            self._open.add(exchange)
            try:
                yield exchange
                with suppress(TimeoutError, aiohttp.ClientError):
                    async with asyncio.timeout(LAST_BYTES_S):
                        await exchange.finish()
            finally:
                self._open.discard(exchange)
                response.close()  # a body read to its end has given its connection back by now
            beside = beside + self.load().running
            self._observe(exchange, begin_s, len(call.body), beside / 2)
        finally:
            self._sent -= call.sequences

    async def probe(self) -> None:
        """Ask whether it is there, and tell the breaker."""
        assert self._prober is not None
        found = await self._prober.probe()
        if found is None:
            self._pauses.breaker.succeeded()
        else:
            self._pauses.breaker.failed(found.text, self._clock(), timeout=found.timeout)

    async def poll(self) -> None:
        """Ask for its metrics. What gives none goes on with what is counted here."""
        assert self._poller is not None
        sent = self._sent
        reading = await self._poller.reading()
        if reading is not None:  # it counts what began or ended meanwhile, or does not
            self._told.learn(reading, max(sent, self._sent), self._clock())
        if self._is_llama_cpp:
            self._told.learn_seats(await self._poller.slots())

    @property
    def _is_llama_cpp(self) -> bool:
        found = self._prober.model if self._prober is not None else None
        return found is not None and found.is_llama_cpp

    async def _send(
        self, session: aiohttp.ClientSession, call: UpstreamCall
    ) -> aiohttp.ClientResponse:
        waiting = asyncio.timeout(None)
        self._waiting.add(waiting)
        try:
            async with waiting:
                response = await session.request(
                    call.method,
                    URL(self.url + call.path, encoded=True),
                    data=_payload(call.body),
                    headers={**call.headers, **(_USED_ONCE if self._is_llama_cpp else {})},
                    allow_redirects=False,
                )
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is one of these
            reason = plain_reason(error)
            timeout = isinstance(error, TimeoutError)
            self._pauses.breaker.failed(reason, self._clock(), timeout=timeout)
            raise UpstreamUnreachable(f"{self.url}: {reason}") from error
        finally:
            self._waiting.discard(waiting)
        self._pauses.answered(response, self._clock())
        return response

    def _observe(
        self, exchange: HttpExchange, begin_s: float, body_bytes: int, beside: float
    ) -> None:
        if not exchange.ended_rightly or exchange.first_s is None or exchange.last_s is None:
            return
        usage = exchange.usage()
        prompt_tokens = usage.prompt or body_bytes / BYTES_PER_TOKEN
        self._speed.begun(exchange.first_s - begin_s, prompt_tokens)
        seconds = exchange.last_s - exchange.first_s
        self._speed.streamed(seconds, usage.output, exchange.scan.finished, beside)

    async def _probe_forever(self) -> None:
        while True:
            pause_s = self._pauses.breaker.remaining_s(self._clock()) or self._probe_s
            await asyncio.sleep(min(pause_s, self._probe_s))
            if self._pauses.may_be_probed(self._clock()):
                await self.probe()

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            if self.rest is None:
                await self.poll()


def _payload(body: bytes) -> bytes | BytesIO | None:
    """Return the body so that a large one is sent piece by piece."""
    return BytesIO(body) if len(body) > LARGE_BYTES else body or None


def _authorization(config: WorkerConfig) -> dict[str, str]:
    name = config.upstream_api_key_env
    if name is None:
        return {}
    key = os.environ.get(name, "").strip()
    if not key:
        raise ValueError(f"--upstream-api-key-env: the variable {name} is not set")
    return {"Authorization": f"Bearer {key}"}
