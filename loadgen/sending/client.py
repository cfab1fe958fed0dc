"""A strict client of the OpenAI API: streams of text, and vectors."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
from msgspec.json import encode

from draftgate.loadgen.checking.audit import StreamAudit, Verdict
from draftgate.loadgen.checking.vectors import VectorAudit
from draftgate.loadgen.sending.clock import Clock
from draftgate.loadgen.sending.sse import SseParser
from draftgate.loadgen.types import PlannedRequest, Record, RequestSpec, TextChunk

KEEPALIVE_S: Final = 4.0
"""Idle connections are kept this long: less than servers keep theirs (uvicorn: 5 s), for a request
sent into a connection that the server is closing would fail by nobody's fault."""


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """How long a client waits.

    Attributes:
        total_s: for the whole answer, from the instant it turns to the request.
        stall_s: for more text, once some has come.
    """

    total_s: float = 300.0
    stall_s: float = 60.0


def open_session(api_key: str = "") -> aiohttp.ClientSession:
    """Return a session which limits nothing by itself and notes when requests are sent.

    Connections are as many as there are open requests; answers come uncompressed, since compression
    holds chunks back. Time limits are `ask`'s business.
    """
    notes = aiohttp.TraceConfig()
    notes.on_connection_create_start.append(_connecting)
    notes.on_connection_create_end.append(_connected)
    notes.on_request_chunk_sent.append(_sending)
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
        headers=headers | ({"Authorization": f"Bearer {api_key}"} if api_key else {}),
        trace_configs=[notes],
    )


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """Return the id of the first model the server lists.

    Raises:
        aiohttp.ClientError: the server cannot be reached, or refuses.
        ValueError: it lists none.
    """
    async with session.get(f"{url}/v1/models") as response:
        response.raise_for_status()
        listed = (await response.json()).get("data") or []
    if not listed:
        raise ValueError(f"{url} lists no models")
    return str(listed[0]["id"])


class HttpExchange:
    """One request and its answer. `record` tells what became of it, whenever it is asked.

    Args:
        clock: of the run; all instants are its.
        scheduled_s: when the request was meant to be sent.
        patience: how long to wait.
        ids: of all streams of the run, by which crossed ones are found.
    """

    def __init__(
        self,
        planned: PlannedRequest,
        clock: Clock,
        scheduled_s: float,
        patience: ClientTimeouts,
        ids: set[str],
    ) -> None:
        question = planned.request
        self.audit: StreamAudit | VectorAudit = (
            VectorAudit(len(question.inputs))
            if question.inputs
            else StreamAudit(question.n, question.max_tokens, ids=ids)
        )
        self._planned = planned
        self._clock = clock
        self._patience = patience
        self._scheduled_s = scheduled_s
        self._started_s = clock()
        self._connecting_s: float | None = None
        self._connect_s = 0.0
        self._sent_s: float | None = None
        self._status: int | None = None
        self._chunks: list[TextChunk] = []
        self._empty_s: list[float] = []
        self._end_s: float | None = None

    async def run(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        """Ask, read the answer to its end, and judge it. Never raises for what a server does.

        Raises:
            asyncio.CancelledError: the task was cancelled; the verdict is `INTERRUPTED`.
        """
        question = self._planned.request
        body = encode(question.body(model))
        loop = asyncio.get_running_loop()
        latest = loop.time() + self._patience.total_s
        try:
            async with (
                asyncio.timeout_at(latest) as limit,
                session.post(
                    url + question.path,
                    data=body,
                    headers=_headers(question),
                    trace_request_ctx=self,
                ) as response,
            ):
                await self._read(response, limit, latest)
        except TimeoutError:
            self._fault_timeout()
        except (aiohttp.ClientError, OSError) as error:
            broken = Verdict.NO_CONNECTION if self._status is None else Verdict.CUT
            self.audit.fault(broken, _words(error))
        except asyncio.CancelledError:
            self.audit.fault(Verdict.INTERRUPTED, "the run was stopped")
            raise
        finally:
            self._end_s = self._clock()

    def record(self) -> Record:
        """Return what became of it."""
        audit = self.audit
        record = Record(
            self._planned,
            self._scheduled_s,
            self._started_s if self._sent_s is None else self._sent_s,
            self._clock() if self._end_s is None else self._end_s,
            audit.verdict.value,
            audit.detail,
            tuple(self._chunks),
            usage=audit.usage,
            status=self._status,
            connect_s=self._connect_s,
        )
        if isinstance(audit, VectorAudit):
            return replace(record, vectors=audit.vectors)
        return replace(
            record,
            texts=audit.texts,
            finish_reasons=tuple(audit.finish_reasons),
            metrics=audit.metrics,
            stream_id=audit.stream_id,
            empty_s=tuple(self._empty_s),
        )

    def connecting(self) -> None:
        """Note that setting up a connection began."""
        self._connecting_s = self._clock()

    def connected(self) -> None:
        """Note that the connection stands."""
        if self._connecting_s is not None:
            self._connect_s = self._clock() - self._connecting_s

    def sending(self) -> None:
        """Note that bytes are handed to the network; the first time counts."""
        if self._sent_s is None:
            self._sent_s = self._clock()

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
            detail = f"not text/event-stream but {response.content_type}"
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
        """Read a stream: every event's content, with the instant at which its bytes were read."""
        parser, chunks = SseParser(), self._chunks
        now, patience_s = asyncio.get_running_loop().time, self._patience.stall_s
        try:
            async for data in response.content.iter_any():
                now_s, before = self._clock(), len(chunks)
                for event in parser.feed(data):
                    brought = audit.add(event.data, event.event)
                    if brought is not None and brought.characters:
                        chunks.append(TextChunk(now_s, brought.tokens, brought.characters))
                    elif brought is not None:
                        self._empty_s.append(now_s)
                if len(chunks) > before:
                    limit.reschedule(min(latest, now() + patience_s))
        except (aiohttp.ClientError, ConnectionError) as error:
            audit.end(cut=_words(error))
        else:
            audit.end()

    def _fault_timeout(self) -> None:
        patience, now_s = self._patience, self._clock()
        if now_s - self._started_s >= patience.total_s or not self._chunks:
            self.audit.fault(Verdict.TIMEOUT, f"not complete within {patience.total_s:g} s")
        else:
            quiet_s = now_s - self._chunks[-1].at_s
            self.audit.fault(Verdict.STALLED, f"no more text for {quiet_s:.1f} s")


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    planned: PlannedRequest,
    *,
    clock: Clock,
    patience: ClientTimeouts,
) -> Record:
    """Ask now, outside of any schedule, and return what became of it."""
    exchange = HttpExchange(planned, clock, clock(), patience, set())
    await exchange.run(session, url, model)
    return exchange.record()


def _headers(question: RequestSpec) -> dict[str, str]:
    """Return what was promised, in the headers by which draftgate and inference-perf name it."""
    limits = {"x-slo-ttft-ms": question.slo.ttft_s, "x-slo-tpot-ms": question.slo.tpot_s}
    return {name: f"{limit * 1e3:g}" for name, limit in limits.items() if limit is not None}


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


async def _connecting(_: aiohttp.ClientSession, trace: SimpleNamespace, __: Any) -> None:
    if isinstance(trace.trace_request_ctx, HttpExchange):
        trace.trace_request_ctx.connecting()


async def _connected(_: aiohttp.ClientSession, trace: SimpleNamespace, __: Any) -> None:
    if isinstance(trace.trace_request_ctx, HttpExchange):
        trace.trace_request_ctx.connected()


async def _sending(_: aiohttp.ClientSession, trace: SimpleNamespace, __: Any) -> None:
    if isinstance(trace.trace_request_ctx, HttpExchange):
        trace.trace_request_ctx.sending()
