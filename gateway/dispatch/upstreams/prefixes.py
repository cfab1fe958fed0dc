"""What upstreams have cached of prompts, from their events and from sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from draftgate.backends.base import Upstream
from draftgate.backends.prompt_blocks import PromptBlocks
from draftgate.gateway.fleet import FleetWorker
from draftgate.policies.routing.promises import Promises
from draftgate.policies.routing.sessions import Sessions
from draftgate.policies.routing.types import CachedPrefix, RouteView
from draftgate.policies.values import replace

BLOCK_TOKENS: Final = 16
"""Tokens in a block of the placement history. The blocks of upstreams may have other sizes."""


class ForwardedPrompt(NamedTuple):
    """What is known about the prompt of a forwarded request.

    Attributes:
        model: the name of its model.
        blocks: its tokens, or None if they are unknown.
        session: the id of its session, which includes the tenant, or empty without one.
        next_call_s: time after the response within which the session continues in seconds, or None
            if that is unknown.
    """

    model: str
    blocks: PromptBlocks | None
    session: str
    next_call_s: float | None = None

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """The hashes of its blocks for the placement history. Each model has its own."""
        return () if self.blocks is None else self.blocks.hashes(self.model, BLOCK_TOKENS)


class UpstreamPrefixes:
    """The caches of a fleet's upstreams, as far as the gateway knows them.

    Events are exact. Without the events of an upstream, the tokens of a session's last request
    count as cached on the upstream that ran it.
    """

    def __init__(
        self,
        now_s: Callable[[], float],
        on_predicted: Callable[[int], None],
        promises: Promises,
    ) -> None:
        """Start without sessions.

        Args:
            promises: takes the announced calls of sessions.
            now_s: the clock of sessions.
            on_predicted: a callback with the tokens that the upstream of a sent request has cached
                by its events.
        """
        self._sessions = Sessions()
        self._promises = promises
        self._now_s = now_s
        self._on_predicted = on_predicted

    def add_to(
        self, view: RouteView, prompt: ForwardedPrompt, workers: Iterable[FleetWorker]
    ) -> RouteView:
        """Return a routing policy's view of a request with what upstreams have cached of it."""
        self._promises.take(prompt.session)
        return replace(
            view,
            block_hashes=prompt.block_hashes,
            block_tokens=BLOCK_TOKENS,
            cached=self.cached(prompt, view.request.prompt_tokens, workers),
            session=prompt.session,
            session_worker=self._sessions.worker(prompt.session, self._now_s()),
        )

    def cached(
        self, prompt: ForwardedPrompt, prompt_tokens: int, workers: Iterable[FleetWorker]
    ) -> Mapping[str, CachedPrefix] | None:
        """Return what upstreams have cached of a prompt by their ids, or None if nothing is known.

        Args:
            prompt_tokens: number of tokens of the prompt.
        """
        found: dict[str, CachedPrefix] = {}
        if prompt.session:
            found |= self._sessions.cached(prompt.session, prompt_tokens, self._now_s())
        if prompt.blocks is not None:
            for worker in workers:
                known = _by_events(worker, prompt)
                if known is None:
                    continue
                other = found.get(worker.worker_id)
                if known.is_exact or other is None or other.tokens < known.tokens:
                    found[worker.worker_id] = known
        return found or None

    def sent(self, prompt: ForwardedPrompt, worker: FleetWorker, prompt_tokens: int) -> None:
        """Record that an upstream gets a request."""
        known = _by_events(worker, prompt)
        if known is not None:
            self._on_predicted(known.tokens)
        if prompt.session:
            self._promises.take(prompt.session)
            self._sessions.record(prompt.session, worker.worker_id, prompt_tokens, self._now_s())

    def record(self, prompt: ForwardedPrompt, worker_id: str, tokens: int) -> None:
        """Record the tokens that an upstream has computed for the session of a prompt."""
        if not prompt.session:
            return
        now_s, next_call_s = self._now_s(), prompt.next_call_s or 0.0
        self._sessions.record(prompt.session, worker_id, tokens, now_s, next_call_s)
        if next_call_s:
            self._promises.put(prompt.session, worker_id, tokens, now_s + next_call_s)


def _by_events(worker: FleetWorker, prompt: ForwardedPrompt) -> CachedPrefix | None:
    if prompt.blocks is None:
        return None
    upstream: Upstream = worker.backend  # type: ignore[assignment]
    return upstream.cached(prompt.blocks, prompt.model)
