"""The scaling advice for each model of a node's upstreams."""

from __future__ import annotations

import logging
from collections import Counter

from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.fleet import Fleet
from draftgate.gateway.logs import log
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.policies.scaling import DemandView, ServerAdvisor


class UpstreamServers:
    """The number of servers that each model should have, in the metrics of the node.

    A model has the name that its upstreams use, and counts the requests for all aliases of it.
    Use the object only on the thread of the event loop.

    Attributes:
        desired: the present advice by model.
    """

    def __init__(self, fleet: Fleet, queue: CentralQueue, metrics: Metrics, idle_s: float) -> None:
        """Advise nothing yet.

        Args:
            idle_s: as for `ServerAdvisor`.
        """
        self.desired: dict[str, int] = {}
        self._fleet = fleet
        self._queue = queue
        self._metrics = metrics
        self._idle_s = idle_s
        self._advisors: dict[str, ServerAdvisor] = {}

    def update(self) -> None:
        """Update the advice and the metrics, and log changes. Call it about once a second."""
        queue, now_s = self._queue, self._queue.now_s()
        waiting = self._by_model(Counter([one.need.offer for one in queue.places.values()]))
        running = Counter[str]()
        for worker in self._fleet.workers:
            running += worker.count_by_offer()
        running = self._by_model(running)
        for model in sorted(self._fleet.upstream_models.own_models()):
            loads = [
                worker.backend.load()
                for worker in self._fleet.serving
                if not worker.leaving and self._has(worker.backend, model)
            ]
            queued = waiting[model]
            queue_s = queue.ordering.work_s * queued / max(len(queue), 1)
            advisor = self._advisors.setdefault(model, ServerAdvisor(self._idle_s))
            view = DemandView(loads, queued=queued, queue_s=queue_s)
            self._set(model, advisor.update(view, running[model], now_s), len(loads), queued)

    def _set(self, model: str, desired: int, servers: int, waiting: int) -> None:
        self._metrics.set(metric.DESIRED_SERVERS, desired, model)
        self._metrics.set(metric.WAITING_BY_MODEL, waiting, model)
        before, self.desired[model] = self.desired.get(model), desired
        if before not in {None, desired}:
            log(
                logging.INFO,
                "a model should have another number of servers",
                model=model,
                desired_servers=desired,
                servers=servers,
                waiting=waiting,
            )

    def _by_model(self, offers: Counter[str]) -> Counter[str]:
        """Return numbers by the own names of models, from those by the names that clients use."""
        found = Counter[str]()
        for name, count in offers.items():
            for own in self._fleet.upstream_models.own_names(name) or (name,):
                found[own] += count
        return found

    @staticmethod
    def _has(backend: object, model: str) -> bool:
        """Return whether an upstream runs a model, under its own name of it."""
        models, declared = getattr(backend, "models", None), getattr(backend, "declared", ())
        if models is None:
            return model in declared
        return model in models or any(one.get("parent") == model for one in models.values())
