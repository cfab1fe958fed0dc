"""A server with OpenAI's API as a worker, to which requests are forwarded without change."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from aiohttp import BasicAuth

from draftgate.addresses import read_server_url, split_credentials
from draftgate.backends.base import BYTES_PER_TOKEN, UpstreamCall, UpstreamPause
from draftgate.backends.connection_errors import public_reason
from draftgate.backends.errors import UpstreamUnreachable
from draftgate.backends.openai.connections import Connections
from draftgate.backends.openai.events import StreamEnding
from draftgate.backends.openai.exchange import HttpExchange
from draftgate.backends.openai.monitor import POLL_S, PROBE_S, ListedModel, UpstreamMonitor
from draftgate.backends.openai.pauses import Pauses
from draftgate.backends.openai.upstream_load import UpstreamLoad
from draftgate.backends.types import Capabilities, ModelCard
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import WorkerLoad

_CAPABILITIES: Final = Capabilities(token_ids=False, resume=False, speculation=False)


class OpenAIUpstream:
    """Implements `Upstream` with connections that are kept and shared.

    Attributes:
        excluded: why the node gives it no requests although it responds, or None.
        models_changed: a function that is called after its list of models has changed.
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
            config: configuration, of which the `upstream*` settings are used.
            clock: clock for pauses, speeds and the age of metrics, in seconds.
            probe_s: seconds between two probes of a healthy upstream.
            poll_s: seconds between two readings of its metrics.

        Raises:
            ValueError: the address is missing, or the variable of the key is not set.
        """
        if config.upstream is None:
            raise ValueError("the backend 'openai' needs --upstream URL")
        self.url, credentials = split_credentials(read_server_url(config.upstream))
        authorization = _authorization(config.upstream_api_key_env, credentials)
        self._headers = {"Accept-Encoding": "identity", **authorization}
        self._clock = clock
        self._probe_s = probe_s
        self._poll_s = poll_s
        self.excluded: str | None = None
        self.models_changed: Callable[[], None] = lambda: None
        self._pauses = Pauses(self.url, config.upstream_max_pause_s)
        self._load = UpstreamLoad(config.upstream_concurrency, config.upstream_speculates)
        self._sent = 0  # sequences
        self._card = ModelCard("", self.url, 0, None, 0, _CAPABILITIES)
        self._described: ListedModel | None = None  # the model of the card
        self._connections: Connections | None = None
        self._monitor: UpstreamMonitor | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = False

    @property
    def card(self) -> ModelCard:
        """The first model in the upstream's list, without a name until the upstream was reached."""
        model = None if self._monitor is None else self._monitor.model
        if model is not None and model is not self._described:
            self._described = model
            sizes = model.max_model_len, None, model.created_s
            self._card = ModelCard(model.model_id, self.url, *sizes, _CAPABILITIES)
        return self._card

    @property
    def models(self) -> frozenset[str] | None:
        """The names of the models in its latest list, or None until a list was read."""
        return None if self._monitor is None else self._monitor.models

    @property
    def progress(self) -> float:
        """Always 1.0, because an upstream has no model to load."""
        return 1.0

    @property
    def failure(self) -> str | None:
        """The cause of an outage, or None if the upstream is healthy or only paused."""
        return "stopped" if self._stopped else self._pauses.breaker.reason or self.excluded

    @property
    def pause(self) -> UpstreamPause | None:
        """The requested pause, or the time until the next probe during an outage."""
        pauses = self._pauses
        if not (pauses.requested or pauses.breaker.reason or self.excluded or self._stopped):
            return None  # the usual case
        return pauses.pause(self.failure, self._clock())

    def load(self) -> WorkerLoad:
        """Return the load from this gateway's counts and from the upstream's metrics."""
        return self._load.load(self._sent, self._clock())

    async def start(self) -> None:
        """Probe the upstream once, and continue in the background.

        An upstream that does not respond is no error, because it may start later than this node.
        """
        self._connections = Connections(self.url, self._headers)
        self._monitor = UpstreamMonitor(self._connections, self._clock)
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
        if self._connections is not None:
            self._connections.close()

    async def forward(self, call: UpstreamCall) -> HttpExchange:
        """Forward a request, and return the response, whose end closes its connection if early."""
        if self._connections is None or self._stopped:
            raise UpstreamUnreachable(f"{self.url} was stopped")
        self._sent += call.sequences
        begin_s = self._clock()
        running = self._load.running(self._sent, begin_s)
        try:
            response = await self._connections.request(
                call.method, call.path, call.body, call.headers, call.request_id
            )
        except BaseException as error:
            self._sent -= call.sequences
            if not isinstance(error, OSError):  # TimeoutError is one
                raise
            reason = public_reason(error)
            timeout = isinstance(error, TimeoutError)
            self._pauses.breaker.failed(reason, self._clock(), timeout=timeout)
            raise UpstreamUnreachable(f"{self.url}: {reason}") from error
        self._pauses.note_answer(response, self._clock())
        return HttpExchange(response, self._clock, partial(self._end, call, begin_s, running))

    async def probe(self) -> None:
        """Probe the upstream, and record the result."""
        assert self._monitor is not None
        models = self.models
        failure = await self._monitor.probe()
        if models != self.models:
            self.models_changed()  # before requests may reach an upstream that is back
        if failure is None:
            self._pauses.note_probe(self._clock())
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
            if self._pauses.may_probe(self._clock()):
                await self.probe()

    async def _poll_forever(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            if self.pause is None:
                await self.poll()


def _authorization(name: str | None, credentials: tuple[str, str] | None) -> dict[str, str]:
    """Return the header with the credentials of an address, or the key in a variable.

    Raises:
        ValueError: both are given, or the variable is not set.
    """
    if credentials is not None:
        if name is not None:
            raise ValueError(
                "--upstream-api-key-env cannot be combined with credentials in an --upstream URL"
            )
        return {"Authorization": BasicAuth(*credentials, "utf-8").encode()}
    if name is None:
        return {}
    key = os.environ.get(name, "").strip()
    if not key:
        raise ValueError(f"--upstream-api-key-env: the variable {name} is not set")
    return {"Authorization": f"Bearer {key}"}
