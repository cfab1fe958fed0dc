"""A strict client of the OpenAI API for streams of text and embeddings."""

from __future__ import annotations

import asyncio
import resource
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import aiohttp
from msgspec.json import encode

from draftgate.addresses import mask_url
from draftgate.loadgen.checking.audit import StreamAudit, VectorAudit, Verdict
from draftgate.loadgen.sending.sse import SseParser
from draftgate.loadgen.types import PlannedRequest, Record, RequestSpec, TextChunk

Clock: TypeAlias = Callable[[], float]
"""Returns the seconds since the start of the run, which never decrease."""


def start_clock(start_s: float | None = None) -> Clock:
    """Return a clock that starts now, or at a given time of the monotonic clock.

    The clock is negative before its start. It reads the monotonic clock and not the event loop's,
    because uvloop's does not advance within an iteration. All processes of a machine share the
    monotonic clock, so their clocks agree. Linux provides it as CLOCK_MONOTONIC, in seconds since
    boot, and macOS has an equivalent.
    """
    origin_s = time.monotonic() if start_s is None else start_s
    return lambda: time.monotonic() - origin_s


_KEEPALIVE_S: Final = 4.0
"""How long to keep idle connections, shorter than servers do (uvicorn: 5 s). A request on a
connection that the server is closing would fail without a fault of the server."""

STALE_S: Final = 1.0
"""Seconds within which a connection that the server had closed shows itself. One that breaks later
is a fault of the server."""


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """How long a client waits.

    Attributes:
        total_s: for the whole response.
        stall_s: for more text after the first text.
    """

    total_s: float = 300.0
    stall_s: float = 60.0


@dataclass(frozen=True, slots=True)
class OpenAIClient:
    """A model at a server.

    Attributes:
        session: from `open_session`.
        url: the server's URL, without a path.
    """

    session: aiohttp.ClientSession
    url: str
    model: str
    timeouts: ClientTimeouts = ClientTimeouts()

    async def send_request(self, planned: PlannedRequest, clock: Clock | None = None) -> Record:
        """Send a request now, outside of any schedule, and return its record."""
        clock = clock or start_clock()
        exchange = StreamExchange(self, planned, clock, clock(), set())
        await exchange.run()
        return exchange.record()


def allow_many_connections() -> None:
    """Raise this process's limit of open files as far as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_session(api_key: str = "", tls: ssl.SSLContext | None = None) -> aiohttp.ClientSession:
    """Return a session without limits of its own that reports when requests are sent.

    The session opens a connection for each open request. Responses are not compressed, because
    compression delays chunks. `StreamExchange` applies the time limits.

    Args:
        tls: which certificates to trust, or None to trust those of the system.
    """
    tracing = aiohttp.TraceConfig()
    tracing.on_connection_create_start.append(_call_exchange(StreamExchange.note_connecting))
    tracing.on_connection_create_end.append(_call_exchange(StreamExchange.note_connected))
    tracing.on_request_chunk_sent.append(_call_exchange(StreamExchange.note_sending))
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=True if tls is None else tls
        ),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=headers | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        trace_configs=[tracing],
    )


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the id of the first model that the server lists.

    Raises:
        aiohttp.ClientError: the server cannot be reached, or rejects the request.
        ValueError: the server lists no models.
    """
    async with session.get(f"{url}/v1/models") as response:
        response.raise_for_status()
        listed = (await response.json()).get("data") or []
    if not listed:
        raise ValueError(f"{mask_url(url)} lists no models")
    return str(listed[0]["id"])


class StreamExchange:
    """One HTTP request and its response.

    Args:
        clock: the clock of the run, which sets all times.
        scheduled_s: when the request was due.
        ids: the ids of all streams of the run, which reveal crossed streams.
    """

    def __init__(
        self,
        client: OpenAIClient,
        planned: PlannedRequest,
        clock: Clock,
        scheduled_s: float,
        ids: set[str],
    ) -> None:
        spec = planned.request
        self.audit: StreamAudit | VectorAudit = (
            VectorAudit(len(spec.inputs))
            if spec.inputs
            else StreamAudit(spec.n, spec.max_tokens, ids=ids)
        )
        self._client = client
        self._planned = planned
        self._clock = clock
        self._scheduled_s = scheduled_s
        self._started_s = clock()
        self._connecting_s: float | None = None
        self._connect_s = 0.0
        self._sent_s: float | None = None
        self._status: int | None = None
        self._chunks: list[TextChunk] = []
        self._empty_s: list[float] = []
        self._end_s: float | None = None

    async def run(self) -> None:
        """Send the request, read the response to its end and check it.

        A fault of the server becomes the verdict and is not raised.

        Raises:
            asyncio.CancelledError: the task was cancelled. The verdict is then `INTERRUPTED`.
        """
        client, spec = self._client, self._planned.request
        body = encode(spec.body(client.model))
        latest = asyncio.get_running_loop().time() + client.timeouts.total_s
        headers = {**_limit_headers(spec), "traceparent": _traceparent()}
        try:
            async with (
                asyncio.timeout_at(latest) as limit,
                await self._post(body, headers) as response,
            ):
                await self._read(response, limit, latest)
        except TimeoutError:
            self._fault_timeout()
        except (aiohttp.ClientError, OSError) as error:
            broken = Verdict.NO_CONNECTION if self._status is None else Verdict.CUT
            self.audit.fault(broken, _describe(error))
        except asyncio.CancelledError:
            self.audit.fault(Verdict.INTERRUPTED, "the run was stopped")
            raise
        finally:
            self._end_s = self._clock()

    def record(self) -> Record:
        """Return the outcome so far."""
        audit = self.audit
        return Record(
            self._planned,
            self._scheduled_s,
            self._started_s if self._sent_s is None else self._sent_s,
            self._clock() if self._end_s is None else self._end_s,
            audit.verdict.value,
            audit.detail,
            tuple(self._chunks),
            texts=audit.texts,
            finish_reasons=tuple(audit.finish_reasons),
            usage=audit.usage,
            metrics=audit.metrics,
            status=self._status,
            connect_s=self._connect_s,
            stream_id=audit.stream_id,
            vectors=audit.vectors,
            empty_s=tuple(self._empty_s),
        )

    def note_connecting(self) -> None:
        """Record that opening a connection began."""
        self._connecting_s = self._clock()

    def note_connected(self) -> None:
        """Record that the connection is open."""
        if self._connecting_s is not None:
            self._connect_s = self._clock() - self._connecting_s

    def note_sending(self) -> None:
        """Record that bytes are handed to the network. Only the first call counts."""
        if self._sent_s is None:
            self._sent_s = self._clock()

    async def _post(self, body: bytes, headers: dict[str, str]) -> aiohttp.ClientResponse:
        """Send the request, and return the response after its head.

        A server may close an idle connection while the request is on its way. The request then goes
        to the next connection, because nothing of a response has arrived. This ends with a new
        connection at the latest.
        """
        client, path = self._client, self._planned.request.path
        while True:
            try:
                return await client.session.post(
                    client.url + path, data=body, headers=headers, trace_request_ctx=self
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError):
                reused_s = None if self._sent_s is None else self._clock() - self._sent_s
                if self._connecting_s is not None or reused_s is None or reused_s > STALE_S:
                    raise
            self._sent_s = None

    async def _read(
        self, response: aiohttp.ClientResponse, limit: asyncio.Timeout, latest: float
    ) -> None:
        self._status = response.status
        if response.status != 200:
            detail = f"{response.status}: {(await response.text(errors='replace'))[:200]}"
            self.audit.fault(Verdict.HTTP_STATUS, detail)
        elif isinstance(self.audit, VectorAudit):
            self.audit.add(await response.read())
            self._chunks.append(TextChunk(self._clock(), None, 0))
        elif response.content_type != "text/event-stream":
            detail = f"expected text/event-stream, got {response.content_type}"
            self.audit.fault(Verdict.NO_STREAM, detail)
        else:
            await self._read_events(response, self.audit, limit, latest)

    async def _read_events(
        self,
        response: aiohttp.ClientResponse,
        audit: StreamAudit,
        limit: asyncio.Timeout,
        latest: float,
    ) -> None:
        """Read a stream. All events of one read get the time of that read."""
        parser, chunks = SseParser(), self._chunks
        now, stall_s = asyncio.get_running_loop().time, self._client.timeouts.stall_s
        try:
            async for data in response.content.iter_any():
                now_s, before = self._clock(), len(chunks)
                for event in parser.feed(data):
                    content = audit.add(event.data, event.event)
                    if content is not None and content.characters:
                        chunks.append(TextChunk(now_s, content.tokens, content.characters))
                    elif content is not None:
                        self._empty_s.append(now_s)
                if len(chunks) > before:
                    limit.reschedule(min(latest, now() + stall_s))
        except (aiohttp.ClientError, ConnectionError) as error:
            audit.end(cut=_describe(error))
        else:
            audit.end()

    def _fault_timeout(self) -> None:
        total_s, now_s = self._client.timeouts.total_s, self._clock()
        if now_s - self._started_s >= total_s or not self._chunks:
            self.audit.fault(Verdict.TIMEOUT, f"not complete within {total_s:g} s")
        else:
            quiet_s = now_s - self._chunks[-1].at_s
            self.audit.fault(Verdict.STALLED, f"no more text for {quiet_s:.1f} s")


def _limit_headers(spec: RequestSpec) -> dict[str, str]:
    """Return the SLO in the headers by which draftgate and inference-perf name it, and the flow."""
    limits = {
        "x-slo-ttft-ms": spec.slo.ttft_s,
        "x-slo-tpot-ms": spec.slo.tpot_s,
        "x-flow-deadline-ms": spec.flow_deadline_s,
    }
    # Servers need not accept an exponent, which the format `g` writes from 1e6 on.
    headers = {
        name: f"{limit * 1e3:.6f}".rstrip("0").rstrip(".")
        for name, limit in limits.items()
        if limit is not None
    }
    return headers | ({"x-flow-id": spec.flow_id} if spec.flow_id else {})


def _traceparent() -> str:
    """Return the parent of a new sampled trace (W3C Trace Context), so that servers record it."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _call_exchange(note: Callable[[StreamExchange], None]) -> Callable[..., Awaitable[None]]:
    """Return a trace hook that calls a method of the exchange whose request is traced."""

    async def hook(_: aiohttp.ClientSession, trace: SimpleNamespace, __: Any) -> None:
        if isinstance(trace.trace_request_ctx, StreamExchange):
            note(trace.trace_request_ctx)

    return hook
