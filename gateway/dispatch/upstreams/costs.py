"""The costs of the responses of upstreams with prices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from draftgate.backends.base import Exchange, TokenUsage
from draftgate.backends.types import ModelCard
from draftgate.backends.worker_config import TokenPrice
from draftgate.gateway.dispatch.admission import Entry
from draftgate.gateway.dispatch.decisions import Decision, Decisions
from draftgate.policies.routing.types import Candidate, RouteView


class Priced(Protocol):
    """An upstream with prices (`openai.upstream.OpenAIUpstream`)."""

    aliases: Mapping[str, str]
    prices: Mapping[str, TokenPrice]
    card: ModelCard


class Charged(Protocol):
    """A request whose response has ended (`forwarding.ForwardedRequest`)."""

    worker_id: str
    entry: Entry | None
    exchange: Exchange | None
    decision: Decision | None


class UpstreamCosts:
    """The prices of upstreams, and the costs of their responses."""

    def __init__(
        self,
        upstreams: Mapping[str, Priced],
        decisions: Decisions,
        on_cost: Callable[[str, str, float | None], None],
    ) -> None:
        """Use the prices of upstreams.

        Args:
            upstreams: the upstreams with prices, by the ids of their workers.
            decisions: records the cost of a request in its decision.
            on_cost: a callback for each response with a price: its tenant, its model, and its cost
                in USD, or None if that is unknown.
        """
        self._upstreams = upstreams
        self._decisions = decisions
        self._on_cost = on_cost

    def charge(self, sent: Charged) -> float | None:
        """Count the cost of a response, and return it in USD, or None if it is unknown.

        Only usage that the upstream reports has a cost. For a stream that continued on another
        upstream, this is the usage of the last one, and the cost also counts as unknown.
        """
        entry, exchange, decision = sent.entry, sent.exchange, sent.decision
        assert entry is not None
        found = self._price(sent.worker_id, entry.needs[0].offer)
        if found is None:
            return None
        model, price = found
        cost_usd = None
        usage = TokenUsage(0, 0, 0) if exchange is None else exchange.usage()
        if usage.prompt:  # estimates have none
            cost_usd = price.usd(*usage)
            self._on_cost(entry.tenant, model, cost_usd)
        if cost_usd is None or (decision is not None and decision.moves):
            self._on_cost(entry.tenant, model, None)
        if decision is not None and cost_usd is not None:
            self._decisions.add_cost(decision, cost_usd)
        return cost_usd

    def estimate(self, request: RouteView, worker: Candidate) -> float:
        """Return the expected cost of a request on an upstream in USD, or 0 without a price."""
        found = self._price(worker.worker_id, request.offer)
        if found is None:
            return 0.0
        output_tokens = request.output_tokens * request.sequences
        return found[1].usd(request.request.prompt_tokens, worker.cached_tokens, output_tokens)

    def _price(self, worker_id: str, model: str) -> tuple[str, TokenPrice] | None:
        """Return the upstream's own name of a model and its price, or None without a price."""
        upstream = self._upstreams.get(worker_id)
        if upstream is None:
            return None
        name = upstream.aliases.get(model, model) or upstream.card.model_id
        price = upstream.prices.get(name) or upstream.prices.get("")
        return None if price is None else (name, price)
