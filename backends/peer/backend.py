"""A worker of another Draftgate node behind the `Backend` protocol.

States: *starting* (asked until it answers), *linked* (requests run), *lost* (every stream has ended
with `BackendFailed`; it is asked in the background, with pauses), *stopped*.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Final

import aiohttp

from draftgate.backends.base import WorkerConfig
from draftgate.backends.core.admission import Admission
from draftgate.backends.errors import BackendFailed, CheckpointError, WorkerLeft
from draftgate.backends.peer.clock import RemoteClock
from draftgate.backends.peer.link import CONNECT_S, Link, PeerChanged, PeerRefused, linked
from draftgate.backends.peer.messages import WORKER_PATH, Cancel, Report, SetPace, Submit, Update
from draftgate.backends.peer.numbers import Numbers
from draftgate.backends.peer.proof import SharedSecret, secret_of
from draftgate.backends.peer.tokenizer import Tokenizers
from draftgate.backends.remote import remote_admission
from draftgate.backends.streams import DeltaStreams
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, GenerationRequest, ModelCard, Pace
from draftgate.policies.breaker import Breaker, Patience
from draftgate.policies.types import WorkerLoad

logger = logging.getLogger("draftgate.peer")

SILENCE_S: Final = 3.0
"""A peer that says nothing for so long is gone: it reports ten times a second, and an event loop
that is held for a second is not rare where processes share few cores. (Chosen.)"""

PATIENCE: Final = Patience(failures=1, timeouts_span_s=0.0, first_pause_s=0.25, longest_pause_s=5.0)
"""With a peer that is lost: to ask costs one connection, and a restarted one is wanted back."""


def _nothing() -> None:
    """Tell nobody."""


_UNKNOWN: Final = WorkerLoad(0, 0, 0, 0, 0.0, 0.0, ())


@dataclass(frozen=True, slots=True)
class _Served:
    """What a peer serves.

    Attributes:
        tokenizer: digest of the files behind `admission.tokenizer`.
    """

    card: ModelCard
    admission: Admission
    tokenizer: str


class PeerBackend:
    """Runs requests on another node's worker; satisfies `backends.base.Backend`.

    What can run is checked here, as in `engine/process.py`.

    Attributes:
        epoch: the life of the peer that it was linked to last.
        watermark: number of the last lease that its load includes.
        on_report: is called whenever the peer has told its load.
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
        """Prepare; nothing is sent before `start`.

        Args:
            address: of the worker (`messages.WORKER_PATH`), or of its node, as
                `http://10.0.0.5:8000`: its first worker is meant then.
            secret: that of the cluster; None where peers are on this machine and need none.
            epoch: the only life of it that is meant: after its restart it is never asked again.
                None takes it as it comes.
            silence_s: one that says nothing for so long is gone.
            clock: that of its pauses, and of what its deltas tell.
            tokenizers: those that other peers sent, shared with them.
        """
        self.epoch = epoch
        self.watermark = 0
        self.on_report: Callable[[], None] = _nothing
        self._url = _worker_url(address)
        self._secret = secret
        self._only_epoch = epoch
        self._silence_s = silence_s
        self._clock = clock
        self._streams = DeltaStreams(self._abandon)
        self._breaker = Breaker(PATIENCE)
        self._link: Link | None = None  # while linked
        self._numbers = Numbers()
        self._tokenizers = tokenizers or Tokenizers()
        self._served: _Served | None = None
        self._load, self._heard_s = _UNKNOWN, 0.0
        self._refusing = ""
        self._leaving = False
        self._remote_clock = RemoteClock()
        self._session: aiohttp.ClientSession | None = None
        self._started: asyncio.Future[None] | None = None
        self._linking: asyncio.Task[None] | None = None
        self._stopped = False

    @property
    def card(self) -> ModelCard:
        """What is served."""
        return self._known().card

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, made from the peer's files."""
        return self._known().admission.tokenizer

    @property
    def tokenizer_digest(self) -> str:
        """What tells the files of its tokenizer from any others."""
        return self._known().tokenizer

    @property
    def progress(self) -> float:
        """All of it at once."""
        return float(self._served is not None)

    @property
    def failure(self) -> str | None:
        """Why it takes no requests now: it is lost, or says so itself."""
        if self._stopped:
            return "the worker was stopped"
        if self._link is None:
            return f"the peer is lost: {self._breaker.reason or 'it was not reached yet'}"
        return f"the peer takes no requests: {self._refusing}" if self._refusing else None

    @property
    def load_age_s(self) -> float:
        """Seconds since the peer last told its load."""
        return self._clock() - self._heard_s

    def load(self) -> WorkerLoad:
        """Return what the peer told last."""
        return self._load

    async def start(self) -> None:
        """Ask until it answers, and learn what it serves: it may start later than this node.

        Raises:
            PeerRefused: it does not know the secret, is no node, or lives another life.
            CheckpointError: its tokenizer is damaged.
            BackendFailed: this was stopped meanwhile.
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
        """Say goodbye; open streams end with an error."""
        self._stopped = True
        self._streams.fail("the worker was stopped")
        if self._linking is not None:
            self._linking.cancel()
            await asyncio.wait({self._linking})
        self._settle(BackendFailed("the worker was stopped"))
        if self._session is not None:
            await self._session.close()

    def check(self, request: GenerationRequest) -> None:
        """Raise `RequestRejected` if the request can never run there."""
        self._known().admission.check(request)

    def generate(
        self, request: GenerationRequest, lease_number: int = 0
    ) -> AsyncGenerator[Delta, None]:
        """Send the request, and which lease it runs under, and return its deltas."""
        failure = self.failure
        if failure is not None or self._link is None:
            raise BackendFailed(failure)
        stream = self._streams.open(request)
        number = self._numbers.give(request.request_id)
        self._link.send(Submit(number, request, lease_number))
        return stream

    def pace(self, request_id: str, pace: Pace) -> None:
        """Change how far the peer goes on with a request."""
        number = self._numbers.of(request_id)
        if self._link is not None and number is not None:
            self._link.send(SetPace(number, pace))

    def unread_tokens(self, request_id: str) -> int:
        """Return how many tokens wait for a request's reader."""
        return self._streams.unread_tokens(request_id)

    def _abandon(self, request_id: str) -> None:
        number = self._numbers.forget(request_id)
        if self._link is not None and number is not None:
            self._link.send(Cancel(number))

    async def _stay_linked(self, session: aiohttp.ClientSession) -> None:
        """Link, and link again whenever that ends, until it makes no sense any more."""
        while True:
            reason = await self._link_once(session)
            self._lose(str(reason))
            if self._is_final(reason):
                self._settle(reason)
                return
            await asyncio.sleep(self._breaker.remaining_s(self._clock()))

    async def _link_once(self, session: aiohttp.ClientSession) -> Exception:
        """Link, and return why there is no link any more, or none came about."""
        try:
            async with linked(session, self._url, self._secret) as link:
                await self._adopt(link)
                return await link.carry(self._heard, self._silence_s)
        except (BackendFailed, CheckpointError) as error:
            return error
        except Exception as error:  # noqa: BLE001 - whatever it is, streams must learn of it
            return BackendFailed(f"{type(error).__name__}: {error}")

    async def _adopt(self, link: Link) -> None:
        """Learn who is there, fetch the tokenizer if it is not known, and begin.

        Raises:
            PeerRefused: it is not the one that is meant.
            CheckpointError: its tokenizer is damaged.
            BackendFailed: the connection ended.
        """
        welcome, known = link.welcome, self._served
        if self._only_epoch not in {None, welcome.epoch}:
            raise PeerChanged(f"it was restarted: epoch {welcome.epoch}, not {self._only_epoch}")
        if known is None:
            fetch = link.tokenizer_files
            tokenizer = await self._tokenizers.get(welcome.tokenizer, fetch)
        elif (known.card.model_id, known.tokenizer) == (welcome.card.model_id, welcome.tokenizer):
            tokenizer = known.admission.tokenizer
        else:
            raise PeerChanged(f"it serves another model now: {welcome.card.model_id}")
        admission = remote_admission(welcome.card, tokenizer)
        self._served = _Served(welcome.card, admission, welcome.tokenizer)
        self._remote_clock = RemoteClock()
        self._heard(await link.update())
        self.epoch, self._link = welcome.epoch, link
        self._breaker.succeeded()
        self._settle(None)
        logger.info("linked to the peer %s, epoch %s", self._url, welcome.epoch)

    def _heard(self, report: Report) -> None:
        """Take in a report: the load, and the deltas of a step."""
        if not isinstance(report, Update):
            return
        now_s = self._clock()
        self._load, self._heard_s, self._refusing = report.load, now_s, report.refusing
        self.watermark, self._leaving = report.watermark, report.leaving
        self._remote_clock.heard(report.sent_s, now_s)
        self._streams.deliver(self._addressed(report))
        for number, delta in report.deltas:
            if delta.finish_reason is not None:
                self._forget_ended(number)
        for number, reason in report.broken:
            request_id = self._numbers.request_id(number)
            if request_id is not None:
                self._numbers.forget(request_id)
                kind = WorkerLeft if report.leaving else BackendFailed
                self._streams.break_off(request_id, kind(reason))
        self.on_report()

    def _addressed(self, report: Update) -> Iterator[tuple[str, Delta]]:
        """Yield deltas with their requests' ids, but for those of requests that were given up."""
        for number, delta in report.deltas:
            request_id = self._numbers.request_id(number)
            if request_id is None:
                continue
            if delta.phases is None:
                yield request_id, delta
            else:
                yield request_id, delta._replace(phases=self._remote_clock.ours(delta.phases))

    def _forget_ended(self, number: int) -> None:
        """Forget a request if all its choices have ended."""
        request_id = self._numbers.request_id(number)
        if request_id is not None and request_id not in self._streams:
            self._numbers.forget(request_id)

    def _lose(self, reason: str) -> None:
        """End every stream; note why, and when to ask again."""
        if self._link is not None or self._breaker.reason != reason:
            logger.warning("no link to the peer %s: %s", self._url, reason)
        self._link, self._numbers = None, Numbers()
        self._breaker.failed(reason, self._clock())
        kind = WorkerLeft if self._leaving else BackendFailed
        self._streams.fail(f"the peer is lost: {reason}", kind)

    def _is_final(self, reason: Exception) -> bool:
        """Whether to ask again makes no sense: before it was ever there, or of another life."""
        if self._served is None:
            return isinstance(reason, PeerRefused | CheckpointError)
        return self._only_epoch is not None and isinstance(reason, PeerChanged)

    def _settle(self, error: Exception | None) -> None:
        """End `start`, once."""
        if self._started is None or self._started.done():
            return
        if error is None:
            self._started.set_result(None)
        else:
            self._started.set_exception(error)

    def _known(self) -> _Served:
        if self._served is None:
            raise RuntimeError("the backend was not started")
        return self._served


def static_peer(config: WorkerConfig) -> PeerBackend:
    """Return the peer at `config.upstream`.

    Raises:
        ValueError: there is no address, or no secret where one is named.
    """
    if config.upstream is None:
        raise ValueError("the backend 'peer' needs --upstream URL")
    return PeerBackend(config.upstream, secret_of(config.peer_secret_env))


def _worker_url(address: str) -> str:
    """Return the URL of a worker, by its own or its node's address."""
    address = address.rstrip("/")
    return address if WORKER_PATH in address else f"{address}{WORKER_PATH}0"
