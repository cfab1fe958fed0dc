"""The operator's preferences among upstreams: weights, spare ones and prices.

Among upstreams with equal estimates, the routing policy chooses the cheapest.

If the weights of upstreams differ, requests take turns instead. An upstream of weight w gets the
share w / (sum of weights) of the requests for a model. The order is that of start-time fair
queueing (Goyal et al. 1996): each request advances the clock of its upstream by 1 / w, and the
upstream with the earliest clock is next. An upstream that was away continues at the present time,
so it does not catch up. The first requests of sessions are divided by weighted rendezvous hashing,
on which all gateways agree.

An upstream is passed over while it has more than `OVERLOAD` times its share of the load: its load
divided by its weight exceeds that of another upstream with one more request by this factor. So an
upstream that slows down gets fewer requests than its share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from operator import attrgetter
from types import MappingProxyType
from typing import Final, TypeAlias

from draftgate.policies.routing.types import Candidate, RouteView
from draftgate.policies.values import replace

Estimate: TypeAlias = Callable[[RouteView, Candidate], float]
"""A function that returns the expected cost of a request on a worker in USD."""

NO_SERVERS: Final[Mapping[str, str]] = MappingProxyType({})

OVERLOAD: Final = 2.0
"""Multiple of its share of the load above which an upstream gets no request. With a factor of 1,
random lengths of requests make a small upstream idle so often that it gets 6% more than its share.
(Simulated: weights 1 and 2, 7 requests at a time, 2026-11-30.)"""

MOST_MODELS: Final = 1024
"""Maximum number of models whose turns are kept. An upstream without a list may get any name."""

_SEQUENCES: Final = attrgetter("sequences")
_PROMPT_TOKENS: Final = attrgetter("prompt_tokens")


class Preferences:
    """The weights and prices of workers, and the turns of requests.

    Attributes:
        spares: ids of workers of weight 0, which run a request only if no other worker can.
    """

    def __init__(self, weights: Mapping[str, float], estimate: Estimate | None = None) -> None:
        """Use the weights of workers, by their ids.

        Args:
            weights: numbers of 0 or more.
            estimate: returns the cost of a request on a worker, or None if no worker has a price.
        """
        self.spares = frozenset(one for one, weight in weights.items() if not weight)
        differ = len({weight for weight in weights.values() if weight}) > 1
        # Without other workers, spare ones take turns as equals.
        self._weights = {one: weight or 1.0 for one, weight in weights.items()} if differ else {}
        self._estimate = estimate
        self._turns: dict[str, _Turns] = {}  # by model, the one that was used first is first

    @property
    def has_any(self) -> bool:
        """Whether any request depends on the preferences."""
        return bool(self.spares or self._weights or self._estimate)

    def preferred(
        self,
        request: RouteView,
        workers: Sequence[Candidate],
        servers: Mapping[str, str] = NO_SERVERS,
    ) -> tuple[Candidate, ...]:
        """Return the workers between which the routing policy decides.

        If the weights of the workers differ, these are the worker whose turn it is, and the worker
        that ran the request's session last. Otherwise, they are all workers, and the cheapest one
        has precedence.

        Args:
            servers: the addresses of workers, by their ids, for the first request of a session.
                Otherwise it is empty.
        """
        if len({self._weights.get(one.worker_id, 1.0) for one in workers}) < 2:
            if self._estimate is not None:
                return self._by_price(request, workers, self._estimate)
            return by_session(request, workers, servers) if servers else tuple(workers)
        own_prompt = request.request.prompt_tokens
        able = self._within_share(workers, _SEQUENCES, request.sequences)
        able = self._within_share(able, _PROMPT_TOKENS, own_prompt)
        if servers:
            turn = min(able, key=_order_of(request.session, servers, self._weights))
        else:
            start = self._turns.get(request.offer, _Turns()).start
            turn = min(able, key=lambda one: (start(one.worker_id), one.worker_id))
        return tuple(
            one for one in workers if one is turn or one.worker_id == request.session_worker
        )

    def _by_price(
        self, request: RouteView, workers: Sequence[Candidate], estimate: Estimate
    ) -> tuple[Candidate, ...]:
        """Return workers with their places in the order of their prices."""
        usd = [estimate(request, worker) for worker in workers]
        places = {cost: place for place, cost in enumerate(sorted(set(usd)))}
        pairs = zip(workers, usd, strict=True)
        return tuple([replace(worker, precedence=places[cost]) for worker, cost in pairs])

    def placed(self, request: RouteView, worker_id: str) -> None:
        """Record the worker that gets a request."""
        if not self._weights:
            return
        turns = self._turns.get(request.offer)
        if turns is None:
            while len(self._turns) >= MOST_MODELS:
                del self._turns[next(iter(self._turns))]
            turns = self._turns[request.offer] = _Turns()
        turns.take(worker_id, 1.0 / self._weights.get(worker_id, 1.0))

    def _within_share(
        self, workers: Sequence[Candidate], load: Callable[[Candidate], int], own: int
    ) -> Sequence[Candidate]:
        """Return the workers that have not too much of a load, which are never none.

        Args:
            own: the load of the request.
        """
        weights = [self._weights.get(one.worker_id, 1.0) for one in workers]
        loads = list(map(load, workers))
        most = OVERLOAD * min(
            (at + own) / weight for at, weight in zip(loads, weights, strict=True)
        )
        found = zip(workers, loads, weights, strict=True)
        return [one for one, at, weight in found if at <= most * weight]


def by_session(
    request: RouteView, workers: Sequence[Candidate], servers: Mapping[str, str]
) -> tuple[Candidate, ...]:
    """Return workers with an order for the first request of a session.

    All gateways have the same order of the same servers, without talking to each other
    (rendezvous hashing: Thaler and Ravishankar 1998). The order decides among workers with equal
    estimates.

    Args:
        servers: the addresses of workers, by their ids.
    """
    order = sorted(workers, key=_order_of(request.session, servers, {}))
    places = {one.worker_id: place for place, one in enumerate(order)}
    return tuple([replace(one, precedence=places[one.worker_id]) for one in workers])


def _order_of(
    session: str, servers: Mapping[str, str], weights: Mapping[str, float]
) -> Callable[[Candidate], float]:
    """Return the key of the order in which workers get a session's first request.

    A worker is first with a probability proportional to its weight, because its key has an
    exponential distribution with this rate.
    """

    def key(worker: Candidate) -> float:
        name = f"{session}\0{servers.get(worker.worker_id, worker.worker_id)}"
        digest = blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        uniform = (int.from_bytes(digest, "big") + 0.5) / 2.0**64
        return -math.log(uniform) / weights.get(worker.worker_id, 1.0)

    return key


class _Turns:
    """The turns of the requests for one model."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}

    def start(self, worker_id: str) -> float:
        """Return the time at which a worker's next request would start."""
        return max(self._now, self._ends.get(worker_id, 0.0))

    def take(self, worker_id: str, length: float) -> None:
        """Give a worker a request of a length."""
        self._now = self.start(worker_id)
        self._ends[worker_id] = self._now + length
