"""The scaling advice of a node, from the loads of the pool and from its own queue and requests."""

from __future__ import annotations

import logging

from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.fleet import Fleet
from draftgate.gateway.logs import log
from draftgate.gateway.telemetry.live import Recent
from draftgate.policies.scaling import (
    WITH_MOVES,
    WITHOUT_MOVES,
    DemandView,
    ScalingAdvice,
    ScalingAdvisor,
    ScalingReason,
)


class Scaling:
    """The caller of the scaling policy.

    Use the object only on the thread of the event loop.

    Attributes:
        advice: the present advice, or None before the node had a worker.
    """

    def __init__(
        self, fleet: Fleet, queue: CentralQueue, recent: Recent, *, moves: bool = False
    ) -> None:
        """Start without advice, where streams may move between workers that keep running."""
        self.advice: ScalingAdvice | None = None
        self._advisor = ScalingAdvisor(WITH_MOVES if moves else WITHOUT_MOVES)
        self._fleet = fleet
        self._queue = queue
        self._recent = recent

    def update(self) -> None:
        """Update the advice, and log a change. Call this method about once a second."""
        serving = self._fleet.serving
        view = DemandView(
            [worker.backend.load() for worker in serving if not worker.leaving],
            [worker.backend.load() for worker in serving if worker.leaving],
            len(self._queue),
            self._queue.ordering.work_s,
            self._recent.attainment(),
        )
        advice = self._advisor.update(view, self._queue.now_s())
        if advice == self.advice or advice is None:
            return
        self.advice = advice
        if advice.reason is not ScalingReason.START:
            log(
                logging.INFO,
                "the pool should have another number of workers",
                desired_workers=advice.workers,
                workers=len(view.loads),
                reason=advice.reason.value,
                load_workers=round(advice.load, 2),
            )
