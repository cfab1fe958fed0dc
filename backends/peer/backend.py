"""A worker of another Draftgate node as a `Backend`.

The backend has four states. It is *starting* until the peer responds. Requests run while it is
*linked*. When it is *lost*, every stream has ended with `BackendFailed`, and it tries to connect
again in the background, with pauses. It ends as *stopped*.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import aiohttp

from draftgate.backends.base import DeltaSink, KvEndpoint
from draftgate.backends.core.admission import Admission
from draftgate.backends.errors import AdapterFailed, BackendFailed, CheckpointError, WorkerLeft
from draftgate.backends.kv_transfer.exchange import KvOperation, KvResult
from draftgate.backends.kv_transfer.transfer import OperatedBlocks, TransferOutcome
from draftgate.backends.peer.blocks import PeerBlocks
from draftgate.backends.peer.channel import WORKER_PATH
from draftgate.backends.peer.link import Link, LinkIds, PeerChanged, RemoteClock, linked
from draftgate.backends.peer.proof import SharedSecret, secret_of
from draftgate.backends.peer.tokenizer import Tokenizers
from draftgate.backends.peer.upgrade import CONNECT_S, PeerRefused
from draftgate.backends.remote_worker import (
    Cancel,
    Report,
    SetPace,
    SetRole,
    Submit,
    Update,
    remote_admission,
)
from draftgate.backends.streams import DeltaSinks
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, ModelCard, Pace
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.resilience.breaker import Breaker, Patience
from draftgate.policies.types import Role, WorkerLoad

logger = logging.getLogger("draftgate.peer")

SILENCE_S: Final = 3.0
"""Seconds of silence after which a peer is lost. A peer reports ten times a second, but an event
loop may stall for a second if processes share few cores. (Chosen, not tuned.)"""

_PATIENCE: Final = Patience(
    failures=1, timeouts_span_s=0.0, first_pause_s=0.25, longest_pause_s=5.0
)
"""Patience with a lost peer. An attempt costs only one connection, and a restarted peer should be
usable soon."""

_UNKNOWN: Final = WorkerLoad(0, 0, 0, 0, 0.0, 0.0, ())


@dataclass(frozen=True, slots=True)
class _Served:
    """The model of a peer, with the limits against which requests are checked before they are sent.

    Attributes:
        tokenizer: digest of the files of `admission.tokenizer`.
    """

    card: ModelCard
    admission: Admission
    tokenizer: str


class PeerBackend(OperatedBlocks):
    """Implements `Backend` and `KvEndpoint` of `backends.base` for another node's worker.

    Attributes:
        epoch: epoch of the peer at the latest link.
        watermark: number of the last lease that its load includes.
        url: URL of the worker.
        role: phase of requests that the worker prefers.
        on_report: callback after each update of the peer.
    """

    recovers = True

    def __init__(
        self,
        address: str,
        secret: SharedSecret | None,
        epoch: str | None = None,
        *,
        silence_s: float = SILENCE_S,
        clock: Callable[[], float] = time.monotonic,
        tokenizers: Tokenizers | None = None,
    ) -> None:
        """Prepare the backend without sending a request.

        Args:
            address: URL of the worker (`channel.WORKER_PATH`). It may also be the URL of a node,
                such as `http://10.0.0.5:8000`, for the node's first worker.
            secret: secret of the cluster, or None for peers on this machine, which need none.
            epoch: the only epoch of the peer to use, so that the backend ends after a restart of
                the peer. None uses any epoch.
            silence_s: seconds of silence after which the peer is lost.
            clock: clock for pauses, ages and the `phases` of deltas, in seconds.
            tokenizers: cache of tokenizers, shared with other peers.
        """
        self.epoch = epoch
        self.watermark = 0
        self.role = Role.ANY
        self.on_report: Callable[[], None] = lambda: None
        self.url = _worker_url(address)
        self._secret = secret
        self._only_epoch = epoch
        self._silence_s = silence_s
        self._clock = clock
        self._sinks = DeltaSinks(self._end)
        self._breaker = Breaker(_PATIENCE)
        self._link: Link | None = None  # while linked
        self._blocks: PeerBlocks | None = None  # while linked to a peer that exchanges blocks
        self._ids = LinkIds()
        self._tokenizers = tokenizers or Tokenizers()
        self._served: _Served | None = None
        self._load, self._updated_s = _UNKNOWN, 0.0
        self._refusing = ""
        self._leaving = False
        self._role_changed = asyncio.Event()
        self._remote_clock = RemoteClock()
        self._session: aiohttp.ClientSession | None = None
        self._started: asyncio.Future[None] | None = None
        self._linking: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def card(self) -> ModelCard:
        """The model that the peer serves."""
        return self._require_served().card

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, created from the peer's files."""
        return self._require_served().admission.tokenizer

    @property
    def tokenizer_digest(self) -> str:
        """Digest of the tokenizer's files (`tokenizer.files_digest`)."""
        return self._require_served().tokenizer

    @property
    def progress(self) -> float:
        """1.0 after the first link to the peer, 0.0 before."""
        return float(self._served is not None)

    @property
    def failure(self) -> str | None:
        """The reason for which the peer takes no requests now, or None."""
        if self._stopped:
            return "the worker was stopped"
        if self._link is None:
            return f"the peer is lost: {self._breaker.reason or 'it was not reached yet'}"
        return f"the peer takes no requests: {self._refusing}" if self._refusing else None

    @property
    def leaving(self) -> bool:
        """Whether the peer is shutting down in order, and still runs requests."""
        return self._leaving and self._link is not None

    @property
    def load_age_s(self) -> float:
        """Seconds since the peer last reported its load."""
        return self._clock() - self._updated_s

    def load(self) -> WorkerLoad:
        """Return the load that the peer reported last."""
        return self._load

    async def start(self) -> None:
        """Connect to the peer until it responds, because it may start later than this node.

        Raises:
            PeerRefused: the peer does not know the secret, is not a node, or has another epoch.
            CheckpointError: its tokenizer is damaged.
            BackendFailed: this backend was stopped meanwhile.
        """
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            connector=aiohttp.TCPConnector(limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._started = asyncio.get_running_loop().create_future()
        self._linking = asyncio.create_task(self._stay_linked(self._session), name="peer")
        await self._started

    async def stop(self) -> None:
        """Close the link, so that open streams end with an error."""
        self._stopped = True
        self._sinks.fail("the worker was stopped")
        if self._linking is not None:
            self._linking.cancel()
            await asyncio.wait({self._linking})
        self._finish_start(BackendFailed("the worker was stopped"))
        if self._session is not None:
            await self._session.close()

    def check(self, request: GenerationRequest) -> None:
        """Raise `RequestRejected` if the peer can never run the request."""
        self._require_served().admission.check(request)

    def submit(self, request: GenerationRequest, sink: DeltaSink, lease_number: int = 0) -> None:
        """Send the request with the number of its lease, and put its deltas into the sink."""
        failure = self.failure
        if failure is not None or self._link is None:
            raise self._loss(failure)
        self._sinks.open(request, sink)
        self._link.send(Submit(self._ids.new_id(request.request_id), request, lease_number))

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it runs."""
        self._sinks.cancel(request_id)

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float = 0.0) -> None:
        """Change the pace of a request at the peer."""
        link_id = self._ids.id_of(request_id)
        if self._link is not None and link_id is not None:
            self._link.send(SetPace(link_id, pace, tpot_s))

    @property
    def changes_role(self) -> bool:
        """Whether the peer, if it is linked, can change its role while it runs."""
        return self._link is None or self._link.ready.changes_role

    async def change_role(self, role: Role) -> None:
        """Change the role of the worker, and return when the peer has reported it.

        Raises:
            BackendFailed: the peer is lost, or does not report the role in time.
        """
        if self._link is None:
            raise BackendFailed(self.failure)
        self._link.send(SetRole(role))
        try:
            async with asyncio.timeout(self._silence_s):
                while self.role is not role:
                    self._role_changed.clear()
                    await self._role_changed.wait()
        except TimeoutError:
            raise BackendFailed("the peer has not confirmed its role") from None

    def _end(self, request_id: str, cancelled: bool) -> None:
        link_id = self._ids.forget(request_id)
        if cancelled and self._link is not None and link_id is not None:
            self._link.send(Cancel(link_id))

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block, or 0 if the peer exchanges none."""
        return 0 if self._blocks is None else self._blocks.block_bytes

    async def operate(self, operation: KvOperation) -> KvResult:
        """Run an operation on the KV blocks of the peer."""
        if self._blocks is None:
            raise BackendFailed(self.failure or "the peer exchanges no KV blocks")
        return await self._blocks.operate(operation)

    async def fetch_blocks(
        self,
        source: KvEndpoint,
        hashes: Sequence[bytes],
        first: int,
        most_s: float | None,
        *,
        urgent: bool,
    ) -> TransferOutcome | None:
        """Let the peer pull blocks directly from another peer, or return None if it cannot."""
        if self._blocks is None or not isinstance(source, PeerBackend):
            return None
        return await self._blocks.fetch(source.url, hashes, first, most_s, urgent=urgent)

    async def _stay_linked(self, session: aiohttp.ClientSession) -> None:
        """Connect, and connect again after each end of the link, unless its reason is final."""
        while True:
            reason = await self._link_once(session)
            self._end_link(str(reason))
            if self._is_final(reason):
                self._finish_start(reason)
                return
            await asyncio.sleep(self._breaker.remaining_s(self._clock()))

    async def _link_once(self, session: aiohttp.ClientSession) -> Exception:
        """Connect until the link ends, and return the reason."""
        try:
            async with linked(session, self.url, self._secret) as link:
                await self._accept_peer(link, session)
                return await link.run(self._apply_update, self._silence_s)
        except (BackendFailed, CheckpointError) as error:
            return error
        except Exception as error:  # noqa: BLE001 - streams must end whatever happened
            return BackendFailed(f"{type(error).__name__}: {error}")
        finally:
            if self._blocks is not None:
                self._blocks.close()
            self._blocks = None

    async def _accept_peer(self, link: Link, http: aiohttp.ClientSession) -> None:
        """Check the peer's model, fetch its tokenizer if it is unknown, and accept requests.

        Raises:
            PeerRefused: the peer is not the expected peer.
            CheckpointError: its tokenizer is damaged.
            BackendFailed: the connection ended.
        """
        ready, known = link.ready, self._served
        if self._only_epoch not in {None, ready.epoch}:
            raise PeerChanged(f"it was restarted: epoch {ready.epoch}, not {self._only_epoch}")
        if known is None:
            tokenizer = await self._tokenizers.get(ready.tokenizer, link.tokenizer_files)
        elif (known.card.model_id, known.tokenizer) == (ready.card.model_id, ready.tokenizer):
            tokenizer = known.admission.tokenizer
        else:
            raise PeerChanged(f"it serves another model now: {ready.card.model_id}")
        card = ready.card if ready.streams_blocks else replace(ready.card, kv_format=None)
        admission = remote_admission(card, tokenizer)
        self._served = _Served(card, admission, ready.tokenizer)
        if card.kv_format is not None:
            self._blocks = PeerBlocks(http, self.url, self._secret, card.kv_format)
        self._remote_clock = RemoteClock()
        self._apply_update(await link.update())
        self.epoch, self._link = ready.epoch, link
        self._breaker.succeeded()
        self._finish_start(None)
        logger.info("linked to the peer %s, epoch %s", self.url, ready.epoch)

    def _apply_update(self, report: Report) -> None:
        """Apply the load and the deltas of an update."""
        if not isinstance(report, Update):
            return
        now_s = self._clock()
        if report.load is not None:
            self._load, self._updated_s, self.watermark = report.load, now_s, report.watermark
        self._refusing, self._leaving = report.refusing, report.leaving
        if report.role is not self.role:
            self.role = report.role
            self._role_changed.set()
        self._remote_clock.add_report(report.sent_s, now_s)
        batch = []
        for link_id, delta in report.deltas:
            request_id = self._ids.request_of(link_id)
            if request_id is None:
                continue  # the request was abandoned, but the peer did not know yet
            if delta.phases is not None:
                delta = delta._replace(phases=self._remote_clock.to_local_phases(delta.phases))  # noqa: PLW2901
            batch.append((request_id, delta))
        self._sinks.deliver(batch)
        for link_id, reason in report.failed:
            request_id = self._ids.request_of(link_id)
            if request_id is not None:
                self._ids.forget(request_id)
                kind = AdapterFailed if link_id in report.without_adapter else self._loss
                self._sinks.fail(reason, kind, request_id)
        self.on_report()

    def _end_link(self, reason: str) -> None:
        """End every stream, and record the reason and the time of the next attempt."""
        if self._link is not None or self._breaker.reason != reason:
            logger.warning("no link to the peer %s: %s", self.url, reason)
        self._link, self._ids = None, LinkIds()
        self._breaker.failed(reason, self._clock())
        self._sinks.fail(f"the peer is lost: {reason}", self._loss)

    @property
    def _loss(self) -> type[BackendFailed]:
        """The error of a stream that the peer does not complete."""
        return WorkerLeft if self._leaving else BackendFailed

    def _is_final(self, reason: Exception) -> bool:
        """Whether another attempt is pointless, because the peer or its epoch is wrong."""
        if self._served is None:
            return isinstance(reason, PeerRefused | CheckpointError)
        return self._only_epoch is not None and isinstance(reason, PeerChanged)

    def _finish_start(self, error: Exception | None) -> None:
        """Complete `start`, unless it is complete."""
        if self._started is None or self._started.done():
            return
        if error is None:
            self._started.set_result(None)
        else:
            self._started.set_exception(error)

    def _require_served(self) -> _Served:
        if self._served is None:
            raise RuntimeError("the backend was not started")
        return self._served


def static_peer(config: WorkerConfig) -> PeerBackend:
    """Return the peer at `config.upstream`.

    Raises:
        ValueError: the address is missing, or the secret is not set.
    """
    if config.upstream is None:
        raise ValueError("the backend 'peer' needs --upstream URL")
    return PeerBackend(config.upstream.url, secret_of(config.peer_secret_env))


def _worker_url(address: str) -> str:
    """Return the URL of a worker from its own address or that of its node."""
    address = address.rstrip("/")
    return address if WORKER_PATH in address else f"{address}{WORKER_PATH}0"
