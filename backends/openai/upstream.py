"""A server with OpenAI's API as a worker, to which requests are forwarded without change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

from draftgate.addresses import read_server_url, split_credentials
from draftgate.backends.base import (
    BYTES_PER_TOKEN,
    CallTranslation,
    UpstreamCall,
    UpstreamPause,
)
from draftgate.backends.connection_errors import ConnectionFailed, public_reason
from draftgate.backends.errors import UpstreamLate, UpstreamUnreachable
from draftgate.backends.openai.block_index import BlockIndex
from draftgate.backends.openai.connection import Response
from draftgate.backends.openai.connections import DEAD_S, Connections
from draftgate.backends.openai.events import EVENT_STREAM, StreamEnding, is_aborted
from draftgate.backends.openai.exchange import HttpExchange, TranslatedExchange
from draftgate.backends.openai.kv_events import EventLog, KvEventSubscriber
from draftgate.backends.openai.monitor import POLL_S, PROBE_S, UpstreamMonitor, listed_model
from draftgate.backends.openai.pauses import Pauses
from draftgate.backends.openai.settings import authorization, tokenizer_of
from draftgate.backends.openai.upstream_load import UpstreamLoad
from draftgate.backends.prompt_blocks import PromptBlocks
from draftgate.backends.types import Capabilities, ModelCard
from draftgate.backends.worker_config import (
    CONNECT_TIMEOUT_S,
    LONGEST_PAUSE_S,
    WorkerConfig,
)
from draftgate.policies.routing.types import CachedPrefix
from draftgate.policies.types import WorkerLoad


class _ResponseLate(ConnectionFailed):
    """No byte of a response has arrived within its limit."""


Models: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Descriptions of models, as an upstream lists them, by name."""

_MISSING: Final = frozenset({404, 405, 501})
"""Statuses of servers without an endpoint."""

_OK: Final = 200

SILENCE_S: Final = float(DEAD_S)
"""Seconds without any byte, also without responses to probes, after which waiting requests are
given up. This is also the patience with a machine that acknowledges nothing."""

_MOST_ERROR_BYTES: Final = 64 << 10

_INLINE_BYTES: Final = 256 << 10
"""Larger bodies are changed in a thread, because no callback may hold the event loop for long."""

_REPORTING_USAGE: Final = frozenset({"vllm", "sglang", "draftgate"})
"""The owners of models, as lists name them, whose servers can report the usage in each chunk of a
stream. Other servers may refuse a request with this option."""

_CAPABILITIES: Final = Capabilities(token_ids=False, resume=False, speculation=False)


class OpenAIUpstream:
    """Implements `Upstream` with connections that are kept and shared.

    Attributes:
        card: describes the first model that it offers, without a name until it was reached.
        models: the models that clients may use, by name, as its latest list describes them, or None
            until a list was read. An alias is described as its model.
        name: the name that its operator gave it, or empty.
        aliases: further names for clients, with the upstream's own name of each model.
        role: the phase of requests that it computes.
        weight: its share of requests, relative to other upstreams, or 0 for a spare one.
        prices: prices by its own names of models, or of all other models under an empty name.
    """

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
            config: configuration, of which `upstream` is used, with its shared settings.
            clock: clock for pauses, speeds and the age of metrics, in seconds.
            probe_s: seconds between two probes of a healthy upstream.
            poll_s: seconds between two readings of its metrics.

        Raises:
            ValueError: the address is missing, or the variable of the key is not set.
        """
        settings = config.upstream
        if settings is None:
            raise ValueError("the backend 'openai' needs --upstream URL")
        self.url, credentials = split_credentials(read_server_url(settings.url))
        self.name, self.aliases = settings.name, settings.aliases
        self.role = settings.role
        self.weight, self.prices = settings.weight, settings.price
        self._settings = settings
        self._headers = {
            "Accept-Encoding": "identity",
            **settings.headers,
            **authorization(settings, credentials),
        }
        self._clock = clock
        self._probe_s = probe_s
        self._poll_s = poll_s
        self._pauses = Pauses(self.url, settings.max_pause_s or LONGEST_PAUSE_S)
        # Without and with a stream.
        limits_s = settings.response_timeout_s or None, settings.first_byte_timeout_s or None
        self._limits_s = limits_s if any(limits_s) else None
        self._load = UpstreamLoad(settings.concurrency or 0, settings.speculates)
        self.tokenizer = tokenizer_of(settings)
        self._cache = EventLog(BlockIndex())
        self._events: KvEventSubscriber | None = None
        if settings.kv_events is not None:
            replay = settings.kv_events_replay
            self._events = KvEventSubscriber(self._cache, settings.kv_events, replay)
        self._sent = 0  # sequences
        self._alive_s = clock()  # the last time at which it sent anything, as far as is known
        self._received_bytes = 0
        self._awaited_until_s = 0.0
        self._on_start: Callable[[], None] | None = None  # while requests wait for it
        self._missing: set[str] = set()  # paths that it does not have, until it may have restarted
        self.card = ModelCard("", self.url, 0, None, 0, _CAPABILITIES)
        self.models: Models | None = None
        self._connections: Connections | None = None
        self._monitor: UpstreamMonitor | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False

    def serves(self, name: str) -> bool:
        """Return whether clients may use a model of this name, as far as is known."""
        if self.models is not None:
            return name in self.models
        only = self._settings.models
        return not only or name in only or name in self.aliases

    @property
    def declared(self) -> Collection[str]:
        """Its own names of the models in its settings, which it may not have listed yet."""
        return {*self._settings.models, *self.aliases.values()}

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
        pauses = self._pauses
        if not (pauses.requested or pauses.breaker.reason or self._stopped):
            return None  # the usual case
        return pauses.pause(self.failure, self._clock())

    def load(self) -> WorkerLoad:
        """Return the load from this gateway's counts and from the upstream's metrics."""
        return self._load.load(self._sent, self._clock())

    async def start(self) -> None:
        """Probe the upstream once, and continue in the background.

        An upstream that does not respond is no error, because it may start later than this node.
        """
        connect_timeout_s = self._settings.connect_timeout_s or CONNECT_TIMEOUT_S
        self._connections = Connections(self.url, self._headers, connect_timeout_s)
        self._monitor = UpstreamMonitor(self._connections, self._clock)
        failure = await self._monitor.probe()
        self._offer(self._monitor.models)
        if failure is None:
            await self.poll()
        else:
            self._pauses.breaker.refuse(failure.reason, self._clock())
        loops = [self._probe_forever(), self._poll_forever()]
        if self._events is not None:
            loops.append(self._events.run())
        self._tasks = [asyncio.create_task(loop) for loop in loops]

    async def stop(self) -> None:
        """Close every connection, so that open exchanges fail."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._connections is not None:
            self._connections.close()

    def cached(self, prompt: PromptBlocks, model: str) -> CachedPrefix | None:
        """Return what its index has of a prompt, or None if events may be missing."""
        log = self._cache
        if not log.is_current or prompt.tokenizer is not self.tokenizer:
            return None
        name = self.aliases.get(model, model)
        listed = self._monitor.models if self._monitor is not None else None
        # vLLM lists an adapter with its base model as parent.
        adapter = name if (listed or {}).get(name, {}).get("parent") else ""
        return CachedPrefix(log.index.cached_tokens(prompt, adapter), log.index.is_complete)

    def may_abort(self, call: UpstreamCall) -> bool:
        """Return whether its settings allow that, and the server stops when its client leaves.

        llama.cpp's server completes a response that is not streamed.
        """
        model = None if self._monitor is None else self._monitor.model
        stops = call.stream or model is None or not model.is_llama_cpp
        return bool(self._settings.preemptible) and stops

    def await_start(self, seconds: float, on_start: Callable[[], None]) -> None:
        """Probe it every `PROBE_S` although it is out, and call a function once it responds.

        Args:
            seconds: time for which requests wait for it.
        """
        self._awaited_until_s = max(self._awaited_until_s, self._clock() + seconds)
        self._on_start = on_start

    async def forward(self, call: UpstreamCall) -> HttpExchange:
        """Forward a request, and return the response, whose end closes its connection if early."""
        if self._connections is None or self._stopped:
            raise UpstreamUnreachable(f"{self.url} was stopped")
        self._sent += call.sequences
        begin_s = self._clock()
        running = self._load.running(self._sent, begin_s)
        translation: CallTranslation | None = None
        try:
            if call.translation is None and self._limits_s is None and call.rewrite is None:
                response = await self._connections.request(
                    call.method, call.path, self._body(call), call.headers, call.request_id
                )
            else:
                translation, response = await self._first_bytes(call, self._connections)
            if response.head.content_type == "text/html" and response.status == _OK:
                response.close()
                raise ConnectionFailed("it responded with an HTML page")
            is_stream = response.head.content_type == EVENT_STREAM
            if response.body and not is_stream and is_aborted(response.body):
                raise ConnectionFailed("it aborted the request")
        except BaseException as error:
            self._sent -= call.sequences
            if not isinstance(error, OSError):  # TimeoutError is one
                raise
            reason = public_reason(error)
            if isinstance(error, _ResponseLate):
                self._pauses.note_late(begin_s, self._clock())
                raise UpstreamLate(f"{self.url}: {reason}") from error
            timeout = isinstance(error, TimeoutError)
            self._missing.clear()
            self._pauses.breaker.failed(reason, self._clock(), timeout=timeout)
            raise UpstreamUnreachable(f"{self.url}: {reason}") from error
        self._alive_s = self._clock()
        self._pauses.note_answer(response, self._alive_s)
        end = partial(self._end, call, begin_s, running)
        if translation is None:
            return HttpExchange(response, self._clock, end)
        return TranslatedExchange(response, self._clock, end, translation)

    async def probe(self) -> None:
        """Probe the upstream, and record the result."""
        assert self._monitor is not None
        assert self._connections is not None
        failure = await self._monitor.probe()
        self._offer(self._monitor.models)
        now_s = self._clock()
        if failure is None:
            self._alive_s = now_s
            self._pauses.note_probe(now_s)
            on_start, self._on_start = self._on_start, None
            if on_start is not None:
                on_start()
            return
        self._missing.clear()
        self._pauses.breaker.failed(failure.reason, now_s, timeout=failure.timeout)
        if failure.timeout:
            self._note_silence(self._connections, now_s)

    def _note_silence(self, connections: Connections, now_s: float) -> None:
        """Give up requests that wait for an upstream from which nothing has come for long.

        Another upstream may run them. An overloaded upstream still sends some bytes.
        """
        received = connections.received_bytes
        if received != self._received_bytes:
            self._received_bytes, self._alive_s = received, now_s
        elif now_s - self._alive_s >= SILENCE_S:
            connections.abandon_waiting(f"it sent nothing for {now_s - self._alive_s:.0f} s")

    async def poll(self) -> None:
        """Read the metrics of the upstream, if it has any."""
        assert self._monitor is not None
        sent = self._sent
        metrics = await self._monitor.metrics()
        if metrics is not None:
            # The metrics may or may not include requests that began or ended meanwhile.
            self._load.update(metrics, max(sent, self._sent), self._clock())
        self._load.set_cached_blocks(len(self._cache.index) if self._cache.is_current else 0)
        slots = await self._monitor.slots()
        if slots is not None:
            self._load.set_slots(slots)

    def _offer(self, listed: Models | None) -> None:
        """Offer the models of a list that clients may use, with the aliases."""
        if not listed:
            return
        only, aliases = self._settings.models, self.aliases
        found = {name: one for name, one in listed.items() if not only or name in only}
        found |= {
            alias: {**listed[name], "id": alias, "parent": name}
            for alias, name in aliases.items()
            if name in listed
        }
        if found != self.models:
            self.models = found
            for first in map(listed_model, list(found.values())[:1]):
                sizes = first.max_model_len, None, first.created_s
                self.card = ModelCard(first.model_id, self.url, *sizes, _CAPABILITIES)

    def _body(self, call: UpstreamCall) -> bytes:
        """Return the body of a call with the upstream's own name of the model."""
        name = self.aliases.get(call.model)
        return call.body if name is None else call.renamed[name]

    async def _first_bytes(
        self, call: UpstreamCall, connections: Connections
    ) -> tuple[CallTranslation | None, Response]:
        """Send a call, and wait for its response within the limits, as `_offer_forms` does.

        Raises:
            _ResponseLate: no byte has arrived in time.
        """
        limits_s = self._limits_s or (None, None)
        limit_s = limits_s[call.stream]
        if self._pauses.is_late:
            self._pauses.begin_trial(max(filter(None, limits_s)), self._clock())
        try:
            async with asyncio.timeout(limit_s) as limit:
                if call.translation is not None:
                    return await self._offer_forms(call, call.translation, connections)
                body = await _rewritten(call, self._body(call))
                return None, await connections.request(
                    call.method, call.path, body, call.headers, call.request_id
                )
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise _ResponseLate(f"it sent no response within {limit_s:g} s") from error

    async def _offer_forms(
        self, call: UpstreamCall, translation: CallTranslation, connections: Connections
    ) -> tuple[CallTranslation | None, Response]:
        """Send a call in the form that the upstream has an endpoint for.

        Returns:
            The translation if it was sent, or else None, and the response.
        """
        path, _, _ = call.path.partition("?")
        if not (self._settings.chats_only or path in self._missing):
            body = await _rewritten(call, self._body(call))
            response = await connections.request(
                call.method, call.path, body, call.headers, call.request_id
            )
            if self._settings.chats_only is not None or response.status not in _MISSING:
                return None, response
            body = b""
            with suppress(ValueError):  # a longer body is not that of an unknown path
                body = await response.wait_for_body(_MOST_ERROR_BYTES)
            if not translation.is_missing(response.status, body):
                return None, response
            response.close()
            self._missing.add(path)
        name = self.aliases.get(call.model, call.model)
        listed = (self.models or {}).get(call.model, {})
        body = await translation.translate(
            name, continuous_usage=listed.get("owned_by") in _REPORTING_USAGE
        )
        body = await _rewritten(call, body)
        headers, path = call.headers, translation.path
        return translation, await connections.request("POST", path, body, headers, call.request_id)

    def _end(
        self, call: UpstreamCall, begin_s: float, running: int, exchange: HttpExchange
    ) -> None:
        """End a call, and learn the speed from a complete stream.

        Args:
            running: number of sequences that ran when the call began.
        """
        scan, first_s = exchange.scan, exchange.first_s
        if scan is not None and scan.ending is StreamEnding.DONE and first_s is not None:
            usage = exchange.usage()
            prompt_tokens = usage.prompt or len(call.body) / BYTES_PER_TOKEN
            mean_running = (running + self._load.running(self._sent, self._clock())) / 2
            speed, seconds = self._load.learning(), exchange.last_s - first_s
            speed.add_first_byte(first_s - begin_s, prompt_tokens)
            speed.add_stream(seconds, usage.output, scan.finished, mean_running)
        self._sent -= call.sequences

    async def _probe_forever(self) -> None:
        while True:
            pause_s = self._pauses.breaker.remaining_s(self._clock()) or self._probe_s
            await asyncio.sleep(min(pause_s, self._probe_s))
            now_s = self._clock()
            if self._pauses.may_probe(now_s) or now_s < self._awaited_until_s:
                await self.probe()

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            if self.pause is None:
                await self.poll()


async def _rewritten(call: UpstreamCall, body: bytes) -> bytes:
    """Return a body for its phase, changed in a thread if it is large (`received.INLINE_BYTES`)."""
    rewrite = call.rewrite
    if rewrite is None:
        return body
    return rewrite(body) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(rewrite, body)
